"""Case O2: an abort in every window between two actions of the scheduler, whoever it hits.

Three requests, two slots, pages for two: one waits. The history without an abort is counted first;
then it is lived again and again, with an abort before each of its actions in turn.
"""

from __future__ import annotations

from typing import Any

import pytest

from helios_jax.engine.outputs import RequestOutput
from helios_jax.scheduler.scheduler import Scheduler
from helios_jax.testing import expected_tokens, hashed_text
from tests.simulation.window_kit import Stepped

PROMPTS = {"a": [97] * 5, "b": list(b"ababab ababa"), "c": list(b"the last of three")}
LENGTHS = {"a": 9, "b": 7, "c": 5}
ACTIONS = (
    "admit", "advance_to", "plan", "commit", "complete", "complete_packed_round_with_survival", "published_outputs",
    "finish", "offer_copy",
)  # fmt: skip
CORES: dict[str, dict[str, Any]] = {
    "plain": {},
    "draft": {"spec_method": "draft", "num_draft_tokens": 2},
    "copy": {"spec_method": "copy", "num_draft_tokens": 2},
    "mixed": {"mixed_prefill": True},
}


def live(core: str, victim: str, at: int) -> tuple[int, str | None]:
    """The history with an abort before action number `at`; how many actions there were, and the victim's end."""
    world = Stepped(max_slots=2, max_context=32, page_size=4, num_pages=12, prefill_chunk=64, **CORES[core])
    actions = [0]

    def watched(method: Any) -> Any:
        def act(*arguments: Any) -> Any:
            if actions[0] == at:
                world.rig.abort(victim)
            actions[0] += 1
            return method(world.engine.scheduler, *arguments)

        return act

    for name in ACTIONS:
        setattr(world.engine.scheduler, name, watched(getattr(Scheduler, name)))
    for name, prompt in PROMPTS.items():
        world.rig.submit(prompt, name, max_tokens=LENGTHS[name])
    world.run()
    for name, prompt in PROMPTS.items():
        outputs = [item for item in world.rig.received[name] if isinstance(item, RequestOutput)]
        assert [output.finished for output in outputs] == [False] * (len(outputs) - 1) + [True]
        tokens = [token for output in outputs for token in output.outputs[0].token_ids]
        wanted = expected_tokens(hashed_text, prompt, LENGTHS[name])
        assert tokens == (wanted if world.rig.reason(name) == "length" else wanted[: len(tokens)])
        assert world.rig.reason(name) == "length" or name == victim
    assert world.rig.ledger_problems() == []
    totals = world.engine.board.snapshot()
    assert totals.reconciles()
    assert totals.active == 0
    world.close()
    return actions[0], world.rig.reason(victim)


def every_window(core: str, step: int) -> None:
    count, reason = live(core, "a", -1)
    assert reason == "length"
    for victim in PROMPTS:
        ends = [live(core, victim, at)[1] for at in range(0, count, step)]
        assert ends[0] == "abort"
        assert set(ends) == {"abort", "length"} or victim == "c"  # the last one may run to the very end


def test_an_abort_in_every_tenth_window() -> None:
    for number, core in enumerate(sorted(CORES)):
        every_window(core, 17 + number)


@pytest.mark.slow
@pytest.mark.parametrize("core", sorted(CORES))
def test_an_abort_in_every_window(core: str) -> None:
    every_window(core, 1)
