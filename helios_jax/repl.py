"""The terminal chat: a conversation that streams, in a few commands.

`/exit` (or end of input) leaves, `/reset` forgets the conversation, `/stats` says what was reused so far, Ctrl-C
ends the answer that is being written, or leaves at the prompt. Where the core keeps checkpoints, a line under
every answer says how much of its prompt was not computed again.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from typing import Any, TextIO

from helios_jax.engine.outputs import RequestOutput
from helios_jax.engine.stats import CheckpointStats
from helios_jax.errors import RequestError

COMMANDS = "/exit leaves, /reset starts again, /stats says what was reused, Ctrl-C ends an answer"


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
            elif line == "/stats":
                self._say(_statistics(self._llm.stats().checkpoints))
            elif line.startswith("/"):
                self._say(f"{COMMANDS}\n")
            elif line:
                self._answer(line)

    def _answer(self, line: str) -> None:
        messages = [*self.messages, {"role": "user", "content": line}]
        answer, reused = "", ""
        try:
            for output in self._llm.stream(self._llm.chat_prompt(messages), self._params):
                reused = _reused(output)
                answer += output.outputs[0].text
                self._say(output.outputs[0].text)
        except KeyboardInterrupt:
            self._say(" [cancelled]")
        except RequestError as error:  # the conversation no longer fits the context, most likely
            self._say(f"{error} (/reset starts a new conversation)\n")
            return
        self._say(f"\n{reused}")
        self.messages = [*messages, {"role": "assistant", "content": answer}]

    def _say(self, text: str) -> None:
        self._out.write(text)
        self._out.flush()


def _reused(output: RequestOutput) -> str:
    """How much of a prompt was restored; nothing to say without checkpoints."""
    if output.num_cached_tokens is None:
        return ""
    return f"[prompt of {len(output.prompt_token_ids)} tokens, {output.num_cached_tokens} reused]\n"


def _statistics(stats: CheckpointStats) -> str:
    if not stats.rows_total:
        return "this core keeps no checkpoints\n"
    cuts = [f"{tokens} {reason.replace('_', ' ')}" for reason, tokens in stats.cut_tokens.items() if tokens]
    again = f"; shared but computed again: {', '.join(cuts)}" if cuts else ""
    return (
        f"{stats.hit_tokens} of {stats.queried_tokens} prompt tokens reused{again}\n"
        f"{stats.published} checkpoints in {stats.rows_used} of {stats.rows_total} state rows; "
        f"{stats.snapshots} taken, {stats.restores} restored, {stats.evictions} given up\n"
    )
