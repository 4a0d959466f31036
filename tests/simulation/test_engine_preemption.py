"""Pages run out: requests give way and go on with the same tokens, over the fake device in the real engine.

Every output is compared with the slow reference that has no pages; ledgers must return to idle.
"""

from __future__ import annotations

import random
import threading

import pytest

from helios_jax.engine.outputs import RequestOutput
from helios_jax.engine.params import OutputKind
from helios_jax.errors import RequestError
from helios_jax.scheduler import check_invariants
from helios_jax.scheduler.reservation import MAX_PREEMPTIONS
from helios_jax.testing import EngineRig, expected_tokens, hashed_text

TINY = {"max_slots": 5, "page_size": 4, "max_context": 80, "prefill_chunk": 16}
DRAFTS = [
    pytest.param({}, id="no drafts"),
    pytest.param({"spec_method": "mtp", "num_draft_tokens": 1, "spec_width": "adaptive"}, id="1 draft"),
    pytest.param({"spec_method": "copy", "num_draft_tokens": 3, "spec_width": "adaptive"}, id="3 copies"),
    pytest.param({"spec_method": "mtp", "num_draft_tokens": 5, "spec_width": "fixed"}, id="5 drafts"),
]


def streamed(rig: EngineRig, name: str) -> list[int]:
    """The tokens of all deltas, in the order in which the reader got them."""
    outputs = [item for item in rig.received[name] if isinstance(item, RequestOutput)]
    return [token for output in outputs for part in output.outputs for token in part.token_ids]


def submit_many(rig: EngineRig, rng: random.Random, number: int, **params: object) -> dict[str, tuple[list[int], int]]:
    """Random requests that all fit alone; name -> prompt and most tokens."""
    requests = {}
    for _ in range(number):
        prompt = [rng.randrange(97, 122) for _ in range(rng.randrange(1, 24))]
        most = rng.randrange(1, 50)
        requests[rig.submit(prompt, max_tokens=most, ignore_eos=True, **params)] = prompt, most
    return requests


def preemptions(rig: EngineRig, name: str) -> int:
    last = rig.received[name][-1]
    assert isinstance(last, RequestOutput)
    return last.metrics.preemptions


@pytest.mark.parametrize("options", DRAFTS)
@pytest.mark.parametrize("frames", [1, 2])
def test_outputs_are_those_of_requests_that_never_gave_way(options: dict, frames: int) -> None:
    rng, total = random.Random(frames), 0
    with EngineRig(num_pages=26, frames=frames, **TINY, **options) as rig:
        requests = submit_many(rig, rng, 24)
        rig.finish(*requests)
        for name, (prompt, most) in requests.items():
            assert streamed(rig, name) == expected_tokens(hashed_text, prompt, most)
            assert rig.reason(name) == "length"
            assert preemptions(rig, name) <= MAX_PREEMPTIONS
            total += preemptions(rig, name)
        rig.settle()
        assert rig.ledger_problems() == []
        check_invariants(rig.engine.scheduler.state)
        assert rig.engine.scheduler.state.counters.preempted == total > 0


@pytest.mark.parametrize("options", DRAFTS)
def test_preempted_between_launch_and_result(options: dict) -> None:
    """O5: whoever gives way while frames of it are outstanding loses their tokens, and computes them again."""
    rng, rig_of, count = random.Random(5), [], [0]

    def interrupt(*_: object) -> None:
        roster = rig_of[0].engine.roster
        if roster.running and rng.random() < 0.3 and count[0] < 60:
            count[0] += 1
            roster.preempt(rng.choice(list(roster.running)))

    with EngineRig(start=False, on_complete=interrupt, **TINY, **options) as rig:
        rig_of.append(rig)
        rig.engine.start()
        requests = submit_many(rig, rng, 12, logprobs=2)
        rig.finish(*requests)
        assert count[0] > 5  # how many frames there are depends on when requests arrive
        for name, (prompt, most) in requests.items():
            assert streamed(rig, name) == expected_tokens(hashed_text, prompt, most)
        rig.settle()
        assert rig.ledger_problems() == []


def test_aborts_at_every_moment_leave_the_ledger_balanced() -> None:
    """O2, O3: whatever a request is doing when its caller leaves, a queue of preempted ones among it."""
    rng, rig_of, left = random.Random(2), [], []

    def leave(*_: object) -> None:
        rig = rig_of[0]
        check_invariants(rig.engine.scheduler.state)
        waiting = [sequence.request.request_id for sequence in rig.engine.roster.waiting]
        running = [sequence.request.request_id for sequence in rig.engine.roster.running.values()]
        if rng.random() < 0.1 and waiting + running:
            left.append(rng.choice(waiting[:2] + running))
            rig.abort(left[-1])

    options = {"num_pages": 24, "spec_method": "mtp", "num_draft_tokens": 3}
    with EngineRig(start=False, on_submit=leave, on_complete=leave, **TINY, **options) as rig:
        rig_of.append(rig)
        rig.engine.start()
        requests = submit_many(rig, rng, 60)
        rig.finish(*requests)
        assert rig.engine.scheduler.state.counters.preempted > 0
        assert len(set(left)) > 10
        for name, (prompt, most) in requests.items():
            said = streamed(rig, name)
            assert said == expected_tokens(hashed_text, prompt, most)[: len(said)]
            assert rig.reason(name) == "length" if name not in left else rig.reason(name) in ("abort", "length")
        rig.settle()
        assert rig.ledger_problems() == []


def test_a_scored_prompt_that_gave_way_is_scored_once() -> None:
    """Log-probabilities of the prompt are whole, in order and told once, wherever the request was interrupted."""
    texts = []
    for when in (None, 1, 2, 3, 4, 6):
        rig_of, count = [], [0]

        def interrupt(*_: object, when: int | None = when, rig_of: list = rig_of, count: list = count) -> None:
            count[0] += 1
            roster = rig_of[0].engine.roster
            if count[0] == when and roster.running:
                roster.preempt(next(iter(roster.running)))

        with EngineRig(start=False, on_complete=interrupt, **TINY) as rig:
            rig_of.append(rig)
            rig.engine.start()
            prompt = list(range(97, 97 + 23)) + [97] * 17
            name = rig.submit(prompt, max_tokens=5, prompt_logprobs=1, logprobs=1, kind=OutputKind.FINAL_ONLY)
            (last,) = rig.finish(name)
            assert isinstance(last, RequestOutput)
            assert last.prompt_logprobs is not None
            assert len(last.prompt_logprobs) == len(prompt)
            assert len(last.outputs[0].logprobs or ()) == 5
            texts.append((repr(last.prompt_logprobs), last.outputs[0].token_ids, last.prompt_token_ids))
            assert last.metrics.preemptions == (when is not None)
    assert all(text == texts[0] for text in texts)


def test_stop_strings_and_seeds_survive() -> None:
    """What the host holds back, and the numbers of a seed, do not know that the request gave way."""
    outputs = []
    for every in (0, 3):
        rig_of, count = [], [0]

        def interrupt(*_: object, every: int = every, rig_of: list = rig_of, count: list = count) -> None:
            count[0] += 1
            roster = rig_of[0].engine.roster
            if every and count[0] % every == 0 and count[0] < 40 and roster.running:
                roster.preempt(next(iter(roster.running)))

        with EngineRig(start=False, on_complete=interrupt, **TINY) as rig:
            rig_of.append(rig)
            rig.engine.start()
            names = [
                rig.submit([97, 98 + i], max_tokens=40, temperature=1.0, seed=i, stop=["e", "xy"]) for i in range(6)
            ]
            rig.finish(*names)
            outputs.append([(rig.text(name), rig.reason(name), streamed(rig, name)) for name in names])
            rig.settle()
            assert rig.ledger_problems() == []
    assert outputs[0] == outputs[1]


def test_a_request_that_can_never_fit_is_refused_with_the_numbers() -> None:
    """Q3: never an empty success; without max_tokens it gets what the pool holds."""
    with EngineRig(num_pages=10, spec_method="mtp", num_draft_tokens=3, **TINY) as rig:
        with pytest.raises(RequestError, match=r"40 tokens and at least 1 more of output; .* is 37 tokens"):
            rig.submit([97] * 40, max_tokens=5)
        name = rig.submit([97] * 30, max_tokens=None, ignore_eos=True)
        rig.finish(name)
        assert len(streamed(rig, name)) == 7
        rig.settle()
        assert rig.ledger_problems() == []


def test_nobody_overtakes_who_gave_way() -> None:
    """A request is admitted again before those that arrived after it."""
    order: list[str] = []
    rig_of: list[EngineRig] = []
    lock = threading.Lock()

    def look(*_: object) -> None:
        with lock:
            waiting = [sequence.number for sequence in rig_of[0].engine.roster.waiting]
            assert waiting == sorted(waiting)
            order.extend(sequence.request.request_id for sequence in rig_of[0].engine.roster.waiting)

    with EngineRig(start=False, num_pages=22, on_submit=look, **TINY) as rig:
        rig_of.append(rig)
        rig.engine.start()
        requests = submit_many(rig, random.Random(3), 30)
        rig.finish(*requests)
        assert rig.engine.scheduler.state.counters.preempted > 0
        assert rig.engine.stats().waiting == 0
