"""The benchmark of copies by width does what it says: equal outputs in every mode, by rounds of that width."""

from __future__ import annotations

import argparse
from pathlib import Path

from benchmarks.speculation import differing, measure, modes, report
from helios_jax.aot.core import load_core

PROMPTS = [[5, 9, 17, 33, 5, 9, 17, 33, 5, 9], [40, 41, 42, 40, 41, 42, 40]]


def test_every_mode_says_the_same_by_its_own_rounds(tiny_copy_core_dir: Path, tmp_path: Path) -> None:
    with load_core(tiny_copy_core_dir) as core:
        llms = modes(core, tmp_path)
        turns = measure(llms, PROMPTS, 2, argparse.Namespace(rounds=2, tokens=24))
        rows = list(report("prompts", 2, turns))
        played = {name: {width for _, width in mode.llm.stats().rounds} for name, mode in llms.items()}
        for mode in llms.values():
            mode.llm.close()
        assert core.compiles_after_ready() == 0
    assert len(turns) == 2
    assert differing(turns) == 0
    # Six outputs of 12 and 24 tokens in turns; at most one of them, a client's, is broken off.
    assert all(one.tokens >= 84 for turn in turns for one in turn.values())
    assert [row.split(" | ")[1] for row in rows] == ["off", "fixed 2", "fixed 4", "adaptive"]
    assert " of " in rows[-1]
    assert played["off"] == set()
    assert max(played["fixed 2"]) == 2
    assert max(played["fixed 4"]) == 4
