"""The command line: help without jax, one line and exit code 2 for what the user can mend."""

from __future__ import annotations

import io
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from helios_jax.cli import core_options, engine_config, main, parser
from helios_jax.engine.llm import LLM
from helios_jax.engine.outputs import CompletionOutput, RequestOutput
from helios_jax.engine.params import SamplingParams
from helios_jax.engine.stats import CheckpointStats
from helios_jax.repl import Repl
from helios_jax.testing import ByteTokenizer, fake_core, scripted


def run(capsys: pytest.CaptureFixture[str], *arguments: str) -> tuple[int | str | None, str, str]:
    with pytest.raises(SystemExit) as caught:
        main(arguments)
    captured = capsys.readouterr()
    return caught.value.code, captured.out, captured.err


@pytest.mark.parametrize("command", [[], ["prepare"], ["serve"], ["inspect"], ["chat"], ["generate"], ["simulate"]])
def test_help_of_every_command(capsys: pytest.CaptureFixture[str], command: list[str]) -> None:
    code, out, _ = run(capsys, *command, "--help")
    assert code == 0
    assert "usage: helios-jax" in out


def test_prepare_takes_no_prepared_core(capsys: pytest.CaptureFixture[str]) -> None:
    _, prepare, _ = run(capsys, "prepare", "--help")
    _, serve, _ = run(capsys, "serve", "--help")
    assert "prepared core (default" not in " ".join(prepare.split())
    assert "prepared core (default" in " ".join(serve.split())


def test_help_and_import_load_no_jax() -> None:
    script = (
        "import sys, helios_jax.cli as cli\n"
        "try: cli.main(['serve', '--help'])\n"
        "except SystemExit: pass\n"
        "sys.exit(any(name in sys.modules for name in ('jax', 'uvicorn', 'rich')))"
    )
    done = subprocess.run(
        [sys.executable, "-c", script], capture_output=True, cwd=Path(__file__).parents[2], check=False
    )
    assert done.returncode == 0


def test_version_and_module(capsys: pytest.CaptureFixture[str]) -> None:
    code, out, _ = run(capsys, "--version")
    assert code == 0
    assert out.startswith("helios-jax ")


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["inspect", "/nonexistent"], "holds no prepared core"),
        (["generate", "hi", "--model", "/nonexistent/model"], "/nonexistent/model"),
        (["generate", "hi", "--temperature", "-1"], "temperature must be in"),
        (["generate", "hi", "--max-slots", "65"], "max_slots must be an integer in [1, 64], got 65"),
        (["generate", "hi", "--spec-method", "draft"], "spec_method 'draft' needs draft_model"),
        (["generate", "hi", "--num-draft-tokens", "9"], "num_draft_tokens must be an integer in [1, 8], got 9"),
        (["serve", "--mtp-adaptive-verification-alpha", "0"], "must be finite and greater than zero, got 0.0"),
        (["serve", "--max-queue", "-1"], "max_queue must be an integer in"),
        (["serve", "--ready-timeout", "nan"], "ready_timeout_s must be a positive number"),
        (["serve", "--grammar-timeout", "0"], "grammar_timeout_s must be a positive number"),
        (["serve", "--port", "99999999"], "--port must be in [0, 65535], got 99999999"),
        (["serve", "--api-key", ""], "--api-key must not be blank"),
        (["serve", "--api-key", "  "], "--api-key must not be blank"),
        (["serve", "--host", "192.0.2.1"], "cannot listen on 192.0.2.1:8000"),
    ],
)
def test_user_errors_are_one_line_and_code_2(
    capsys: pytest.CaptureFixture[str], arguments: list[str], message: str
) -> None:
    code, _, err = run(capsys, *arguments)
    assert code == 2
    assert err.startswith("helios-jax: error: ")
    assert err.count("\n") == 1
    assert message in err


def test_serve_options_reach_core_and_engine() -> None:
    options = parser().parse_args(
        ["serve", "some/model", "--max-slots", "4", "--dtype", "bfloat16", "--scheduler-policy", "throughput",
         "--scheduler-terminal-value", "0", "--scheduler-checkpoint-extra-work-fraction", "0.1",
         "--trace", "t.jsonl", "--max-queue", "7", "--spec-method", "draft", "--draft-model", "small",
         "--num-draft-tokens", "3", "--speculative-token-capacity", "12", "--spec-width", "fixed",
         "--mtp-adaptive-verification-alpha", "1.5", "--mixed-prefill"]
    )  # fmt: skip
    assert options.model == "some/model"
    assert core_options(options) == {
        "max_slots": 4, "max_context": None, "dtype": "bfloat16", "page_size": None, "num_pages": None,
        "prefill_chunk": None, "spec_method": "draft", "draft_model": "small", "num_draft_tokens": 3,
        "speculative_token_capacity": 12, "mixed_prefill": True, "state_rows": None,
    }  # fmt: skip
    config = engine_config(options)
    assert (config.policy, config.terminal_value, config.max_queue) == ("throughput", 0.0, 7)
    assert config.checkpoint_extra_work_fraction == 0.1
    assert (config.spec_width, config.mtp_adaptive_verification_alpha) == ("fixed", 1.5)
    plain = engine_config(parser().parse_args(["serve"]))
    assert (plain.spec_width, plain.mtp_adaptive_verification_alpha) == ("adaptive", None)
    assert plain.async_scheduling
    assert plain.host_checkpoint_bytes == 0
    host = engine_config(parser().parse_args(["serve", "--host-checkpoint-bytes", "5000"]))
    assert host.host_checkpoint_bytes == 5000
    assert not engine_config(parser().parse_args(["serve", "--no-async-scheduling"])).async_scheduling


def test_prepare_has_what_shapes_a_core_and_not_how_widths_are_chosen(capsys: pytest.CaptureFixture[str]) -> None:
    _, prepare, _ = run(capsys, "prepare", "--help")
    _, generate, _ = run(capsys, "generate", "--help")
    assert "--spec-method" in prepare
    assert "--spec-width" not in prepare
    assert "--spec-width" in generate


def test_chat_streams_keeps_the_conversation_and_survives_ctrl_c() -> None:
    lines = iter(["hello", "/reset", "again", "/what", "/exit"])
    written = io.StringIO()

    class Interrupted(io.StringIO):
        """Presses Ctrl-C at the third piece of the first answer."""

        pieces = 0

        def write(self, text: str) -> int:
            written.write(text)
            Interrupted.pieces += len(text) == 1 and text.isalpha()
            if Interrupted.pieces == 3:
                Interrupted.pieces = 100
                raise KeyboardInterrupt
            return len(text)

    with LLM.from_core(fake_core(next_token=scripted("answer")), tokenizer=ByteTokenizer()) as llm:
        repl = Repl(llm, SamplingParams(temperature=0, max_tokens=20), "be nice", ask=lambda _: next(lines),
                    out=Interrupted())  # fmt: skip
        repl.run()
        assert llm.stats().requests_total["cancelled"] <= 1
    assert "ans [cancelled]" in written.getvalue()
    assert [m["content"] for m in repl.messages] == ["be nice", "again", "answer"]


class ScriptedLLM:
    """Answers "yes", one character at a time; of every prompt all but 5 tokens were reused."""

    model_name = "scripted"

    def __init__(self, stats: CheckpointStats) -> None:
        self.checkpoints = stats

    def chat_prompt(self, messages: list[dict[str, str]]) -> dict[str, Any]:
        return {"prompt": "".join(message["content"] for message in messages)}

    def stream(self, prompt: dict[str, Any], params: SamplingParams) -> Iterator[RequestOutput]:
        ids = list(prompt["prompt"].encode())
        cached = len(ids) - 5 if self.checkpoints.rows_total else None
        for character in "yes":
            yield RequestOutput("r", None, ids, [CompletionOutput(0, character, [1])], False, None, cached)

    def stats(self) -> Any:
        return self


def chat_with(llm: ScriptedLLM, *lines: str) -> str:
    asked, out = iter([*lines, "/exit"]), io.StringIO()
    Repl(llm, SamplingParams(), ask=lambda _: next(asked), out=out).run()
    return out.getvalue().partition("\n")[2]


def test_chat_shows_what_was_reused() -> None:
    stats = CheckpointStats(queried_tokens=50, hit_tokens=40, snapshots=3, restores=2, rows_total=4, rows_used=2,
                            published=1, evictions=5)  # fmt: skip
    stats.cut_tokens |= {"no_state": 6, "evicted": 7}
    assert chat_with(ScriptedLLM(stats), "hello", "again", "/stats") == (
        "yes\n[prompt of 5 tokens, 0 reused]\n"
        "yes\n[prompt of 13 tokens, 8 reused]\n"
        "40 of 50 prompt tokens reused; shared but computed again: 6 no state, 7 evicted\n"
        "1 checkpoints in 2 of 4 state rows; 3 taken, 2 restored, 5 given up\n"
    )


def test_chat_without_checkpoints_says_nothing_of_them() -> None:
    told = chat_with(ScriptedLLM(CheckpointStats()), "hello", "/stats")
    assert told == "yes\nthis core keeps no checkpoints\n"
