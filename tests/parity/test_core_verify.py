"""What programs are executed with before a core is ready makes every lane work, in programs of every kind."""

from __future__ import annotations

from pathlib import Path

import jax
import numpy as np
import pytest

from helios_jax.aot.abi import completion_layout
from helios_jax.aot.core import load_core
from helios_jax.aot.verify import busy_control
from helios_jax.scheduler.catalog import ProgramKind


@pytest.mark.parametrize(
    "fixture", ["tiny_copy_core_dir", pytest.param("tiny_hybrid_core_dir", marks=pytest.mark.slow)]
)
def test_every_lane_with_a_slot_works(fixture: str, request: pytest.FixtureRequest) -> None:
    path: Path = request.getfixturevalue(fixture)
    with load_core(path) as core:
        fresh = jax.tree.map(np.asarray, core.runner._state)
        assert not any(np.any(leaf) for leaf in jax.tree.leaves((fresh.kv, fresh.committed_len, fresh.output_counts)))
        kinds = set()
        for shape in core.catalog:
            ints, floats, _ = core.execute(shape, *busy_control(shape, core.dims)).wait()
            out = completion_layout(shape, core.dims).split(ints, floats)
            lanes = min(shape.batch_capacity, core.dims.slots)
            kinds.add(shape.kind)
            if shape.kind is ProgramKind.INITIALIZE:
                assert out["slot"][:lanes].tolist() == list(range(lanes))
            elif shape.kind in (ProgramKind.SNAPSHOT, ProgramKind.RESTORE):
                assert out["row"][: min(lanes, core.dims.state_rows)].all()
            else:
                assert (out["committed_len"][:lanes] > 0).all(), shape.name
                assert not out["status"].any()
                tokens = out["num_tokens"] if "num_tokens" in out else out["token"] + 1
                assert (tokens[:lanes] > 0).all(), shape.name
        assert len(kinds) > 3
        assert core.compiles_after_ready() == 0
