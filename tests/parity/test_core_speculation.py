"""Prepared cores with speculative rounds: loaded without their checkpoints, without compiling, and right.

The model is the tiny Llama whose greedy continuation transformers computed (`tests/golden`): every
round, whatever was proposed, must continue it token for token.
"""

from __future__ import annotations

import json
import shutil
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from safetensors.numpy import save_file

from helios_jax.aot.abi import completion_layout, control_layout
from helios_jax.aot.core import CoreOptions, PreparedCore, load_core, prepare
from helios_jax.aot.report import ProgramStatus, inspect_core
from helios_jax.errors import ConfigError
from helios_jax.scheduler.catalog import Allocation, ProgramKind, ProgramShape, ProposalSource
from tests.golden.tiny import config_of, golden, tiny_checkpoint, tiny_tensors, write_checkpoint

GREEDY = golden("llama3")["greedy"].tolist()
PROMPT = golden("llama3")["prompt"].tolist()


class Driver:
    """The first slots of a core, each in its own pages, with the golden prompt."""

    def __init__(self, core: PreparedCore, slots: int) -> None:
        self.core, self.slots = core, tuple(range(slots))
        each = core.dims.pages_per_slot
        self.tables = 1 + np.arange(len(self.slots) * each, dtype=np.int32).reshape(-1, each)
        self.outputs: list[list[int]] = [[] for _ in self.slots]
        initial = {"prompt_len": len(PROMPT), "bias_ids": -1, "top_p": 1.0, "repetition_penalty": 1.0}
        self._submit(self.core.catalog.of_kind(ProgramKind.INITIALIZE)[-1], self.slots, **initial)
        prefill = self.core.catalog.of_kind(ProgramKind.PREFILL)[0]
        tokens = np.pad(np.array(PROMPT, np.int32), (0, prefill.token_capacity - len(PROMPT)))
        for slot in self.slots:
            out = self._submit(prefill, [slot], query_len=len(PROMPT), sample=1, tokens=tokens)
            self.outputs[slot].append(int(out["token"][0]))

    def shape(self, kind: ProgramKind, **extents: Any) -> ProgramShape:
        """The core's program of a kind for all slots, with these extents."""
        wanted = {"batch_capacity": len(self.slots)} | extents
        shapes = self.core.catalog.of_kind(kind)
        return next(s for s in shapes if all(getattr(s, name) == value for name, value in wanted.items()))

    def _submit(self, shape: ProgramShape, slots: Sequence[int], **values: Any) -> dict[str, np.ndarray]:
        ints, floats, fields = control_layout(shape, self.core.dims).new()
        fields["slot"][:] = self.core.dims.slots
        fields["slot"][: len(slots)] = slots
        for name, value in values.items():
            fields[name][...] = value
        if "page_table" in fields:
            fields["page_table"][: len(slots)] = self.tables[list(slots)]
        done = completion_layout(shape, self.core.dims).split(*self.core.execute(shape, ints, floats).wait()[:2])
        assert done["slot"][: len(slots)].tolist() == list(slots)
        return done

    def decode(self) -> None:
        out = self._submit(self.shape(ProgramKind.DECODE), self.slots)
        for slot in self.slots:
            self.outputs[slot].append(int(out["token"][slot]))

    def round(self, shape: ProgramShape, limits: Sequence[int], copies: Sequence[Sequence[int]] = ()) -> Any:
        """One round of all slots: `limits` target rows each, and what is proposed where it is copied."""
        values: dict[str, Any] = {"limit": np.array(limits)}
        if shape.proposal_depth:
            values["calibration"] = (1.0, 0.0)
        if shape.proposal_depth and shape.proposal_source is ProposalSource.COPY:
            proposal = np.full((len(self.slots), shape.proposal_depth), -1, np.int32)
            for slot, tokens in enumerate(copies):
                proposal[slot, : len(tokens)] = tokens
            values |= {"proposal": proposal, "confidence": np.where(proposal >= 0, 0.9, 0.0)}
        out = self._submit(shape, self.slots, **values)
        for slot in self.slots:
            count = int(out["num_tokens"][slot])
            assert count == out["accepted"][slot] + 1
            self.outputs[slot] += out["tokens"][slot, :count].tolist()
        return out

    def check(self) -> None:
        for output in self.outputs:
            assert output == GREEDY[: len(output)]


def loaded(directory: Path, options: Any = None) -> PreparedCore:
    core = load_core(directory, options=options)
    assert {line.status for line in core.report} == {ProgramStatus.LOADED}
    return core


@pytest.fixture(scope="module")
def copy_core(tiny_copy_core_dir: Path) -> Iterator[PreparedCore]:
    with loaded(tiny_copy_core_dir) as core:
        yield core


@pytest.fixture(scope="module")
def draft_core(tiny_draft_core_dir: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[PreparedCore]:
    """The core alone, moved away from where it was made."""
    moved = tmp_path_factory.mktemp("moved") / "core"
    shutil.copytree(tiny_draft_core_dir, moved)
    with loaded(moved) as core:
        yield core


def test_copied_proposals_are_accepted_as_far_as_they_are_right(copy_core: PreparedCore) -> None:
    copy_core.reset()
    driver = Driver(copy_core, 2)
    rectangle = driver.shape(ProgramKind.SPECULATIVE, token_capacity=2)
    wrong = (GREEDY[1] + 1) % copy_core.dims.vocab_size
    out = driver.round(rectangle, [2, 2], [GREEDY[1:2], [wrong]])
    assert out["offered"].tolist() == [1, 1]
    assert out["accepted"].tolist() == [1, 0]
    out = driver.round(rectangle, [1, 2], [[], GREEDY[2:3]])  # one lane has no proposal
    assert out["accepted"].tolist() == [0, 1]
    driver.decode()
    assert [len(output) for output in driver.outputs] == [5, 5]
    driver.check()
    assert copy_core.compiles_after_ready() == 0


@pytest.mark.parametrize("allocation", list(Allocation))
def test_ragged_rounds_share_their_rows(copy_core: PreparedCore, allocation: Allocation) -> None:
    copy_core.reset()
    driver = Driver(copy_core, 2)
    shape = driver.shape(ProgramKind.SPECULATIVE, token_capacity=4, packed_capacity=4, allocation=allocation)
    limits = [3, 1] if allocation is Allocation.QUERY_LENGTH else [4, 1]
    out = driver.round(shape, limits, [GREEDY[1:4], []])
    assert out["offered"].tolist() == [2, 0]  # of 4 rows, two are those of the pending tokens
    assert out["accepted"].tolist() == [2, 0]
    driver.check()


@pytest.mark.slow
def test_a_draft_model_keeps_its_context_and_never_changes_the_output(draft_core: PreparedCore) -> None:
    assert draft_core.draft is not None
    assert draft_core.draft.family == "qwen3"
    assert draft_core.limits.draft_extent == 2
    draft_core.reset()
    driver = Driver(draft_core, 1)
    shapes = draft_core.catalog.of_kind(ProgramKind.SPECULATIVE)
    assert [shape.token_capacity for shape in shapes] == [1, 2, 3]
    for step in range(12):
        shape = shapes[step % len(shapes)]
        out = driver.round(shape, [shape.token_capacity])
        if shape.proposal_depth:
            assert ((out["confidence"] > 0) & (out["confidence"] <= 1)).all()
            assert (out["confidence"][1] <= out["confidence"][0] + 1e-6).all()
    driver.decode()
    driver.check()
    assert len(driver.outputs[0]) >= 14
    assert draft_core.compiles_after_ready() == 0


@pytest.mark.slow
def test_memory_of_every_round_is_reported(tiny_draft_core_dir: Path, draft_core: PreparedCore) -> None:
    plan, rows = draft_core.memory, inspect_core(tiny_draft_core_dir)
    rounds = [row for row in rows if row.kind == ProgramKind.SPECULATIVE]
    assert len(rounds) == len(draft_core.catalog.of_kind(ProgramKind.SPECULATIVE))
    for row in rows:
        assert row.argument_bytes >= plan.state_bytes
        assert row.donated_bytes == row.alias_bytes == plan.state_bytes
    layers = sum(
        of.attention_layers[0].num_kv_heads * of.attention_layers[0].head_dim * len(of.attention_layers)
        for of in (draft_core.model, draft_core.draft)
        if of
    )
    assert plan.page_bytes == 2 * 16 * layers * 4  # keys and values of 16 tokens, float32
    assert all(row.packed_capacity and row.temp_bytes for row in rounds)


@pytest.mark.slow
def test_speculation_can_be_left_out_of_a_load(tiny_draft_core_dir: Path) -> None:
    with loaded(tiny_draft_core_dir, {"spec_method": "none"}) as core:
        assert not core.supports(ProgramKind.SPECULATIVE)
        driver = Driver(core, 1)
        for _ in range(4):
            driver.decode()
        driver.check()


def test_a_draft_model_of_another_vocabulary_is_refused(tmp_path: Path) -> None:
    other = write_checkpoint("qwen2", tmp_path / "other")
    tensors = tiny_tensors("qwen2")
    tensors["model.embed_tokens.weight"] = tensors["model.embed_tokens.weight"][:96].copy()
    save_file(tensors, other / "model.safetensors")
    (other / "config.json").write_text(json.dumps(config_of("qwen2") | {"vocab_size": 96}))
    options = CoreOptions(max_slots=1, max_context=64, spec_method="draft", draft_model=str(other))
    with pytest.raises(ConfigError, match="a vocabulary of 96 tokens and the model one of 128"):
        prepare(tiny_checkpoint("llama3"), options, tmp_path / "core")
    assert not (tmp_path / "core").exists()
