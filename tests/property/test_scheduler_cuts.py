"""Cut plans against a second, slow implementation in exact fractions."""

from __future__ import annotations

import functools
import itertools
from fractions import Fraction

import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st

from helios_jax.scheduler.cuts import CutCosts, cover_ns, plan_cuts
from helios_jax.scheduler.state_rows import Role


def slow_cover(programs: list[tuple[int, int]], length: int) -> int:
    """Least cost to consume `length` tokens, by trying every first program."""

    @functools.cache
    def best(left: int) -> int:
        return 0 if left <= 0 else min(duration + best(left - tokens) for tokens, duration in programs)

    return best(length)


def slow_work(programs: list[tuple[int, int]], stops: set[int]) -> int:
    ordered = sorted(stops)
    return sum(slow_cover(programs, b - a) for a, b in itertools.pairwise(ordered))


def slow_cuts(
    prompt: int, restored: int, ends: list[int], mandatory: list[int], programs: list[tuple[int, int]], snapshot: int,
    fraction: float,
) -> list[tuple[int, Role]]:  # fmt: skip
    """The specification's paragraph, one sentence after the other."""
    eligible = [end for end in ends if restored < end <= prompt]
    anchor = max(eligible) if eligible else prompt
    chosen = [(anchor, Role.ANCHOR)]
    if programs and snapshot:
        stops = {restored, prompt, anchor} | {m for m in mandatory if restored < m < prompt}
        base = slow_work(programs, stops)
        allowance = Fraction(fraction * base)  # one rounding of the product, as the policy has it
        copies = 0
        wanted = [(end, Role.EXTRA) for end in sorted(set(eligible) - {anchor}, reverse=True)]
        wanted += [(prompt, Role.PROMPT_END)] if anchor != prompt else []
        for end, role in wanted:
            extra_work = slow_work(programs, stops | {end}) - base + (copies + 1) * snapshot
            if Fraction(extra_work) <= allowance:
                stops.add(end)
                copies += 1
                chosen.append((end, role))
    return sorted(chosen)


PROGRAMS = st.lists(st.tuples(st.integers(1, 12), st.integers(1, 50)), max_size=4)


@settings(max_examples=400, deadline=None)
@given(
    prompt=st.integers(1, 60), restored=st.integers(0, 59), ends=st.lists(st.integers(-2, 65), max_size=8),
    mandatory=st.lists(st.integers(0, 65), max_size=3), programs=PROGRAMS, snapshot=st.integers(0, 40),
    fraction=st.sampled_from([0.0, 0.05, 0.3, 0.5, 1.0, 2.0, 7.5]),
)  # fmt: skip
def test_the_plan_is_the_slow_one(
    prompt: int, restored: int, ends: list[int], mandatory: list[int], programs: list[tuple[int, int]], snapshot: int,
    fraction: float,
) -> None:  # fmt: skip
    restored = min(restored, prompt - 1)
    table = np.array(programs, np.int64).reshape(-1, 2)
    plan = plan_cuts(
        prompt_len=prompt, restored_len=restored, message_ends=ends, mandatory=mandatory,
        costs=CutCosts(table[:, 0], table[:, 1], snapshot), fraction=fraction,
    )  # fmt: skip
    expected = slow_cuts(prompt, restored, ends, mandatory, programs, snapshot, fraction)
    assert [(cut.endpoint, cut.role) for cut in plan.cuts] == expected
    eligible = {end for end in ends if restored < end <= prompt}
    candidates = len(eligible | {prompt})
    assert len(plan.cuts) + plan.over_allowance + plan.unknown_cost == candidates
    assert min(plan.over_allowance, plan.unknown_cost) == 0


@settings(max_examples=200, deadline=None)
@given(programs=PROGRAMS.filter(bool), longest=st.integers(0, 60))
def test_the_cover_is_the_slow_one(programs: list[tuple[int, int]], longest: int) -> None:
    table = np.array(programs, np.int64)
    cover = cover_ns(CutCosts(table[:, 0], table[:, 1], 1), longest)
    assert cover.tolist() == [slow_cover(programs, length) for length in range(longest + 1)]
