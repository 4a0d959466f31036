"""Compiles one grammar after another in a process of its own, so that whoever waits may kill it.

Run as a script by `grammar_process`. A line of JSON comes in: {"kind", "text", "options"}; a line goes
out: {"grammar"} for llguidance, or {"error"}. The first line out says that the imports are done.

The library compiles some small grammars for minutes, and on some it overflows the stack, which ends a
process. Here both end this process only. Its stack and memory are smaller than the server's, so what
compiles here compiles there.
"""

from __future__ import annotations

import contextlib
import json
import os
import resource
import sys
import threading
from typing import Any, TextIO, cast

import llguidance

STACK_BYTES = 512 * 1024
MEMORY_BYTES = 4 << 30
NICENESS = 10  # streams go first
EOS = 256  # of the byte vocabulary that grammars are tried on


class _Bytes:
    """A vocabulary of single bytes, in the shape that llguidance asks for."""

    is_tokenizer_wrapper = True
    eos_token_id, bos_token_id = EOS, None
    tokens = [*(bytes([value]) for value in range(EOS)), b"<eos>"]  # noqa: RUF012
    special_token_ids = (EOS,)

    def __call__(self, text: Any) -> list[int]:
        return list(text if isinstance(text, bytes) else text.encode())


def translate(kind: str, text: str, options: dict[str, Any]) -> str:
    """The grammar in llguidance's own form.

    Raises:
        Exception: It cannot be read; the text of the exception says why.
    """
    if kind == "json_schema":
        return llguidance.LLMatcher.grammar_from_json_schema(text, overrides=cast("Any", options))
    if kind == "regex":
        return llguidance.LLMatcher.grammar_from_regex(text)
    if "::=" in text:  # GBNF, llama.cpp's form
        from llguidance.gbnf_to_lark import any_to_lark

        text = any_to_lark(text)
    return llguidance.LLMatcher.grammar_from_lark(text)


def answer(request: dict[str, Any], tokenizer: Any) -> dict[str, str]:
    """What is written back for one request: the grammar if it compiles and has a first mask."""
    try:
        grammar = translate(request["kind"], request["text"], request["options"])
        limits = llguidance.LLParserLimits(**request["limits"])
        matcher = llguidance.LLMatcher(tokenizer, grammar, log_level=0, limits=limits)
        if not matcher.is_error():
            matcher.compute_bitmask()
        return {"error": matcher.get_error()} if matcher.is_error() else {"grammar": grammar}
    except Exception as error:  # the library's conversions raise whatever they meet
        return {"error": str(error) or type(error).__name__}


def serve(requests: TextIO, answers: TextIO) -> None:
    """Until the other end closes."""
    tokenizer = llguidance.LLTokenizer(_Bytes())  # type: ignore[arg-type]  # what it reads is there
    print(json.dumps({"ready": True}), file=answers, flush=True)
    for line in requests:
        print(json.dumps(answer(json.loads(line), tokenizer)), file=answers, flush=True)


def main() -> None:
    """Serve standard input and output, in a thread with a small stack."""
    os.nice(NICENESS)
    with contextlib.suppress(ValueError, OSError):  # the limit is lower already
        resource.setrlimit(resource.RLIMIT_AS, (MEMORY_BYTES, MEMORY_BYTES))
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)  # what the library prints must not look like an answer
    threading.stack_size(STACK_BYTES)
    thread = threading.Thread(target=serve, args=(sys.stdin, answers))
    thread.start()
    thread.join()


if __name__ == "__main__":
    main()
