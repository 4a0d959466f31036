"""Cuts of a prompt, sentence by sentence of the specification's checkpoint retention."""

from __future__ import annotations

import numpy as np
import pytest

from helios_jax.scheduler.cuts import (
    Cut,
    CutCosts,
    CutPlan,
    anchor_ahead,
    copy_is_due,
    cover_ns,
    earned_ns,
    plan_cuts,
    terminal_is_due,
)
from helios_jax.scheduler.state_rows import Role


def costs(programs: dict[int, int], snapshot_ns: int) -> CutCosts:
    """Programs as capacity -> duration."""
    tokens = np.array(list(programs), np.int64)
    return CutCosts(tokens, np.array(list(programs.values()), np.int64), snapshot_ns)


def planned(
    prompt_len: int, ends: tuple[int, ...], *, known: CutCosts, restored: int = 0, fraction: float = 0.05,
    mandatory: tuple[int, ...] = (),
) -> CutPlan:  # fmt: skip
    return plan_cuts(
        prompt_len=prompt_len, restored_len=restored, message_ends=ends, mandatory=mandatory, costs=known,
        fraction=fraction,
    )  # fmt: skip


SMOOTH = costs({1: 100}, 10)  # 100 ns a token, whatever the split; a copy costs 10


def test_the_last_eligible_message_is_the_anchor() -> None:
    assert planned(100, (10, 60, 90), known=costs({}, 0)).cuts == (Cut(90, Role.ANCHOR, 0),)


def test_a_message_that_ends_the_prompt_is_the_anchor_and_the_prompt_end() -> None:
    assert planned(100, (100,), known=SMOOTH).cuts == (Cut(100, Role.ANCHOR, 0),)


@pytest.mark.parametrize("ends", [(), (0,), (40,), (101, 500)])
def test_the_prompt_end_substitutes_when_no_message_is_eligible(ends: tuple[int, ...]) -> None:
    """Ends within the restored prefix, or beyond the prompt, are not eligible."""
    assert planned(100, ends, restored=40, known=SMOOTH).cuts == (Cut(100, Role.ANCHOR, 0),)


def test_earlier_messages_come_in_reverse_order_then_a_distinct_prompt_end() -> None:
    """100 tokens cost 10,000 ns; at 0.1, 0.2, 0.3 and 0.4 percent one more copy of 10 ns fits."""
    plans = [planned(100, (20, 50, 80), known=SMOOTH, fraction=0.001 * count).cuts for count in range(5)]
    ends = [tuple((cut.endpoint, cut.role) for cut in cuts) for cuts in plans]
    anchor, extra, prompt = (80, Role.ANCHOR), Role.EXTRA, (100, Role.PROMPT_END)
    assert ends == [
        (anchor,),
        ((50, extra), anchor),
        ((20, extra), (50, extra), anchor),
        ((20, extra), (50, extra), anchor, prompt),
        ((20, extra), (50, extra), anchor, prompt),
    ]


def test_there_is_no_fixed_capture_count() -> None:
    cuts = planned(1000, tuple(range(10, 1000, 10)), known=SMOOTH, fraction=1.0).cuts
    assert len(cuts) == 100


def test_an_extra_pays_for_the_prefills_that_its_split_adds() -> None:
    """90 tokens fit one program of 50 us; cut at 60 they need two: 50 us more, beside the copy's 10."""
    known = costs({100: 50_000}, 10_000)
    assert planned(190, (60, 90), known=known, fraction=0.6).cuts[0] == Cut(60, Role.EXTRA, 60_000)
    left_out = planned(190, (60, 90), known=known, fraction=0.599)
    assert left_out.cuts == (Cut(90, Role.ANCHOR, 0), Cut(190, Role.PROMPT_END, 10_000))
    assert left_out.over_allowance == 1


def test_an_extra_at_a_stop_that_exists_anyway_pays_its_copy_only() -> None:
    known = costs({100: 50_000}, 10_000)
    cuts = planned(190, (60, 90), known=known, fraction=0.2, mandatory=(60,)).cuts
    assert [cut.cost_ns for cut in cuts] == [10_000, 0, 10_000]


def test_the_allowance_counts_uncached_work_only() -> None:
    """Restored tokens cost nothing: 10 of 100 tokens are left, 50 ns of allowance, no copy of 60."""
    known = costs({1: 100}, 60)
    assert len(planned(100, (95,), known=known).cuts) == 2
    assert len(planned(100, (95,), known=known, restored=90).cuts) == 1


def test_the_splits_of_accepted_extras_are_the_base_of_the_next() -> None:
    """Three pieces of 30 in a program of 100: each further split adds one more program."""
    known = costs({100: 1000}, 0 + 1)
    cuts = planned(90, (30, 60), known=known, fraction=10.0).cuts
    assert cuts == (Cut(30, Role.EXTRA, 1001), Cut(60, Role.ANCHOR, 0), Cut(90, Role.PROMPT_END, 1))


@pytest.mark.parametrize("known", [costs({}, 10), costs({1: 100}, 0), costs({}, 0)])
def test_unknown_costs_disable_extras_and_keep_the_anchor(known: CutCosts) -> None:
    plan = planned(100, (20, 80), known=known, fraction=100.0)
    assert plan == CutPlan((Cut(80, Role.ANCHOR, 0),), unknown_cost=2)


def test_a_fraction_of_zero_disables_extras() -> None:
    assert planned(100, (20, 80), known=SMOOTH, fraction=0.0).cuts == (Cut(80, Role.ANCHOR, 0),)


def test_the_anchor_lies_ahead_until_it_is_consumed() -> None:
    cuts = planned(100, (20, 80), known=SMOOTH).cuts
    assert [anchor_ahead(cuts, consumed) for consumed in (0, 79, 80)] == [80, 80, 0]


def test_an_expired_cost_skips_the_copy_of_an_extra_only() -> None:
    assert not copy_is_due(Role.EXTRA, 0)
    assert not copy_is_due(Role.PROMPT_END, 0)
    assert copy_is_due(Role.EXTRA, 1)
    assert copy_is_due(Role.ANCHOR, 0)


def test_decode_earns_its_fraction_until_the_copy_is_covered() -> None:
    credit, frames = np.zeros(1), 0
    while not terminal_is_due(credit_ns=credit[0], snapshot_ns=1_000, committed_len=50, captured_len=40):
        credit, frames = earned_ns(credit, 2_000, 0.05), frames + 1
    assert frames == 10


def test_a_terminal_capture_needs_a_distinct_endpoint_and_a_measured_cost() -> None:
    assert terminal_is_due(credit_ns=10, snapshot_ns=10, committed_len=41, captured_len=40)
    assert not terminal_is_due(credit_ns=10, snapshot_ns=10, committed_len=40, captured_len=40)
    assert not terminal_is_due(credit_ns=1e18, snapshot_ns=0, committed_len=41, captured_len=40)
    assert not terminal_is_due(credit_ns=9.99, snapshot_ns=10, committed_len=41, captured_len=40)


def test_the_cheapest_cover_may_overshoot_and_mix_programs() -> None:
    known = costs({64: 10, 256: 25, 512: 60}, 1)
    cover = cover_ns(known, 600)
    assert [int(cover[n]) for n in (0, 1, 64, 65, 129, 256, 257, 320, 321, 512, 513, 600)] == [
        0, 10, 10, 20, 25, 25, 35, 35, 45, 50, 60, 70,
    ]  # fmt: skip
