"""Checkpoints on the host, over the fake device: answers are the slow reference's, whatever happens."""

from __future__ import annotations

import random
from typing import Any

import pytest

from helios_jax.config import EngineConfig
from helios_jax.engine.outputs import RequestOutput
from helios_jax.engine.stats import HostTierStats
from helios_jax.errors import ConfigError, DeviceError
from helios_jax.scheduler.invariants import check_invariants
from helios_jax.testing import EngineRig, expected_tokens, hashed_text

PAGE = 16
OPTIONS: dict[str, Any] = {"max_slots": 2, "max_context": 256, "page_size": PAGE, "prefill_chunk": 64, "state_rows": 2,
                           "host_checkpoint_bytes": 1 << 20, "checkpoint_extra_work_fraction": 0.0}  # fmt: skip


def text(number: int, length: int) -> list[int]:
    """A prompt that differs from others from its first token on."""
    return [97 + (number + i * (number + 3)) % 26 for i in range(length)]


def ask(rig: EngineRig, prompt: list[int], count: int = 4, ends: tuple[int, ...] = ()) -> int:
    """Tokens of one prompt that were reused; its answer is the reference's, and nothing is out of place."""
    name = rig.submit(prompt, message_ends=ends or (len(prompt),), max_tokens=count)
    (output,) = rig.finish(name)
    assert isinstance(output, RequestOutput), output
    pieces = [item for item in rig.received[name] if isinstance(item, RequestOutput)]
    tokens = [token for piece in pieces for part in piece.outputs for token in part.token_ids]
    assert tokens == expected_tokens(hashed_text, prompt, count)
    settled(rig)
    assert output.num_cached_tokens is not None
    return output.num_cached_tokens


def settled(rig: EngineRig) -> HostTierStats:
    """What the host has, once engine and copies have nothing left to do."""
    rig.settle()
    assert rig.engine.host is not None
    rig.engine.host.settle()
    check_invariants(rig.engine.scheduler.state)
    assert rig.ledger_problems() == []
    return rig.engine.stats().host_tier


def test_conversations_that_do_not_fit_on_the_device_go_on_from_the_host() -> None:
    """Six of them with two rows: every second turn comes when its first has given way."""
    with EngineRig(**OPTIONS) as rig:
        for number in range(6):
            assert ask(rig, text(number, 40)) == 0
        assert rig.engine.stats().checkpoints.published == 2
        assert settled(rig).saved >= 4
        for number in range(6):
            prompt = [*text(number, 40), *expected_tokens(hashed_text, text(number, 40), 4), *text(9, 20)]
            assert ask(rig, prompt, ends=(40, len(prompt))) >= 40
        stats = settled(rig)
        assert stats.restored >= 5
        assert stats.restored_tokens >= 5 * 40
        assert stats.lost == 0
        assert rig.engine.stats().checkpoints.hits == 6


def test_without_it_they_are_computed_again() -> None:
    with EngineRig(**OPTIONS | {"host_checkpoint_bytes": 0}) as rig:
        assert rig.engine.host is None
        for number in range(6):
            rig.finish(rig.submit(text(number, 40), message_ends=(40,), max_tokens=4))
        (output,) = rig.finish(rig.submit([*text(0, 40), *text(9, 20)], max_tokens=4))
        assert isinstance(output, RequestOutput)
        assert output.num_cached_tokens == 0
        assert rig.engine.stats().host_tier == HostTierStats()


def test_pages_that_are_on_the_device_are_neither_copied_again_nor_kept_twice() -> None:
    system = text(1, 64)
    with EngineRig(**OPTIONS | {"state_rows": 3}) as rig:
        for number in range(2, 8):
            ask(rig, [*system, *text(number, 40)], ends=(64, 104))
        one = settled(rig).bytes_used
        row = 4 * PAGE + 24
        pages = 4 + 2 * settled(rig).checkpoints  # the system's, and two of each conversation at most
        assert one <= pages * 2 * 4 * PAGE + settled(rig).checkpoints * (row + 4 * PAGE)
        assert ask(rig, [*system, *text(2, 40), 98], ends=(64, 104)) == 104


def test_a_budget_keeps_the_ones_that_were_used_last() -> None:
    with EngineRig(**OPTIONS | {"host_checkpoint_bytes": 1500}) as rig:
        for number in range(12):
            ask(rig, text(number, 40))
        stats = settled(rig)
        assert 0 < stats.checkpoints < 8
        assert stats.evicted > 0
        assert stats.bytes_used <= stats.bytes_total == 1500
        assert ask(rig, [*text(9, 40), 97]) == 40
        assert ask(rig, [*text(0, 40), 97]) == 0


@pytest.mark.parametrize("seed", [0, 1, *(pytest.param(seed, marks=pytest.mark.slow) for seed in range(2, 8))])
def test_any_order_of_turns_aborts_and_small_pools(seed: int) -> None:
    """Trees of conversations, several at once, with few rows and pages, one or two frames in flight, and proposals."""
    rng = random.Random(seed)
    options = OPTIONS | {"state_rows": rng.randint(1, 4), "num_pages": rng.choice([20, 34]), "max_slots": 3}
    options |= {"host_checkpoint_bytes": rng.choice([2000, 10_000, 1 << 20]), "frames": 1 + seed % 2}
    options |= {"recurrent": seed % 3 > 0, "spec_method": ["none", "none", "mtp", "copy"][seed % 4]}
    with EngineRig(**options) as rig:
        talks = [text(number, rng.randint(5, 60)) for number in range(8)]
        for _ in range(40):
            chosen = rng.sample(range(len(talks)), 3)
            names: dict[str, tuple[int, int]] = {}
            for place in chosen:
                if len(talks[place]) > 150:
                    talks[place] = talks[place][: rng.randint(5, 60)]
                prompt, count = talks[place], rng.randint(1, 12)
                ends = tuple(sorted({rng.randint(1, len(prompt)) for _ in range(rng.randint(0, 3))}))
                names[rig.submit(prompt, message_ends=ends, max_tokens=count)] = (place, count)
            for name in [name for name in names if rng.random() < 0.2]:
                rig.abort(name)
                del names[name]
            for name, output in zip(names, rig.finish(*names), strict=True):
                place, count = names[name]
                assert isinstance(output, RequestOutput), output
                said = expected_tokens(hashed_text, talks[place], count)
                assert [t for o in rig.received[name] for t in o.outputs[0].token_ids] == said  # type: ignore[union-attr]
                talks[place] = [*talks[place], *said, *text(rng.randint(0, 9), rng.randint(1, 20))]
            settled(rig)
        assert settled(rig).restored > 0


@pytest.mark.parametrize("which", ["take_out", "put_in"])
def test_copies_that_fail_cost_no_request(which: str) -> None:
    def fails(name: str) -> None:
        if name == which:
            raise RuntimeError("RESOURCE_EXHAUSTED: out of memory")

    with EngineRig(**OPTIONS, on_copy=fails) as rig:
        for number in range(4):
            ask(rig, text(number, 40))
        published = rig.engine.stats().checkpoints.published
        assert ask(rig, [*text(0, 40), 97]) == 0
        assert ask(rig, [*text(0, 40), 98]) == 0  # what could not be written is not there
        stats = settled(rig)
        assert stats.lost > 0
        assert stats.restored == 0
        assert rig.engine.stats().checkpoints.published <= published + 1


class Trouble:
    """Loses the device at the next completion once it `comes`."""

    comes = False

    def at(self, frame: Any, out: Any) -> None:
        if self.comes:
            self.comes = False
            raise RuntimeError("the device is gone")


def test_the_tier_survives_a_device_that_does_not() -> None:
    trouble = Trouble()
    with EngineRig(**OPTIONS, on_complete=trouble.at) as rig:
        for number in range(4):
            ask(rig, text(number, 40))
        kept = settled(rig).checkpoints
        trouble.comes = True
        (error,) = rig.finish(rig.submit(text(8, 30), max_tokens=4))
        assert isinstance(error, DeviceError)
        assert settled(rig).checkpoints == kept
        assert rig.engine.stats().checkpoints.published == 0
        assert ask(rig, [*text(0, 40), 97]) == 40


def test_a_state_that_is_lost_in_copying_back_is_made_again() -> None:
    """As in any other loss of the device: who was to run next is told, everybody else goes on."""
    with EngineRig(**OPTIONS) as rig:
        for number in range(4):
            ask(rig, text(number, 40))
        runner = rig.core.runner

        def loses(name: str) -> None:
            if name == "put_in":
                runner.broken, runner.on_copy = True, None
                raise DeviceError("the device is gone")

        runner.on_copy = loses
        (error,) = rig.finish(rig.submit([*text(0, 40), 97], max_tokens=4))
        assert isinstance(error, DeviceError)
        settled(rig)
        assert runner.resets == 1
        assert ask(rig, [*text(1, 40), 97]) == 40


def test_what_a_device_loses_is_not_saved() -> None:
    """Rows that are dropped with a lost state have no content any more."""
    trouble = Trouble()
    with EngineRig(**OPTIONS, on_complete=trouble.at) as rig:
        ask(rig, text(0, 40))
        assert settled(rig).saved == 0
        trouble.comes = True
        rig.finish(rig.submit(text(8, 30), max_tokens=4))
        assert ask(rig, text(5, 20)) == 0  # the submission that would have saved it
        assert settled(rig) == HostTierStats(bytes_total=1 << 20)
        assert ask(rig, [*text(0, 40), 97]) == 0


def test_it_needs_checkpoints_on_the_device() -> None:
    with pytest.raises(ConfigError, match="needs a core with state rows"):
        EngineRig(host_checkpoint_bytes=1)
    with pytest.raises(ConfigError, match="needs prefix caching"):
        EngineRig(**OPTIONS, enable_prefix_caching=False)
    for wrong in (-1, 1.5, True):
        with pytest.raises(ConfigError, match="host_checkpoint_bytes must be an integer of at least 0"):
            EngineConfig(host_checkpoint_bytes=wrong)  # type: ignore[arg-type]
