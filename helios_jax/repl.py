"""The terminal chat: a conversation that streams, in a few commands.

`/exit` (or end of input) leaves, `/reset` forgets the conversation, Ctrl-C ends the answer
that is being written, or leaves at the prompt.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from typing import Any, TextIO

from helios_jax.errors import RequestError

COMMANDS = "/exit leaves, /reset starts again, Ctrl-C ends an answer"


class Repl:
    """One conversation with a model.

    Args:
        llm: An open `LLM`.
        params: Sampling of every answer.
        system: System message, or None.
        ask: Reads a line; `input` unless a test gives another.
        out: Where answers go.
    """

    def __init__(
        self,
        llm: Any,
        params: Any,
        system: str | None = None,
        *,
        ask: Callable[[str], str] = input,
        out: TextIO | None = None,
    ) -> None:
        self._llm, self._params, self._ask = llm, params, ask
        self._out = out or sys.stdout
        self._start = [{"role": "system", "content": system}] if system else []
        self.messages: list[dict[str, str]] = list(self._start)

    def run(self) -> None:
        """Until /exit, the end of input, or Ctrl-C at the prompt."""
        self._say(f"{self._llm.model_name}: {COMMANDS}\n")
        while True:
            try:
                line = self._ask("> ").strip()
            except (EOFError, KeyboardInterrupt):
                self._say("\n")
                return
            if line == "/exit":
                return
            if line == "/reset":
                self.messages = list(self._start)
            elif line.startswith("/"):
                self._say(f"{COMMANDS}\n")
            elif line:
                self._answer(line)

    def _answer(self, line: str) -> None:
        messages = [*self.messages, {"role": "user", "content": line}]
        answer = ""
        try:
            for output in self._llm.stream(self._llm.chat_prompt(messages), self._params):
                answer += output.outputs[0].text
                self._say(output.outputs[0].text)
        except KeyboardInterrupt:
            self._say(" [cancelled]")
        except RequestError as error:  # the conversation no longer fits the context, most likely
            self._say(f"{error} (/reset starts a new conversation)\n")
            return
        self._say("\n")
        self.messages = [*messages, {"role": "assistant", "content": answer}]

    def _say(self, text: str) -> None:
        self._out.write(text)
        self._out.flush()
