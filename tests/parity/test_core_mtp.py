"""`spec_method="mtp"` from a checkpoint to the engine's output, and its refusal where there are no heads."""

from __future__ import annotations

import json
import shutil
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
from safetensors.numpy import save_file

from helios_jax import LLM, SamplingParams
from helios_jax.aot.core import CoreOptions, load_core, prepare
from helios_jax.aot.manifest import DRAFT_WEIGHTS_DIR, read_manifest
from helios_jax.aot.report import ProgramStatus
from helios_jax.config import EngineConfig
from helios_jax.errors import CheckpointError, ConfigError
from helios_jax.models.interface import MtpHeads
from helios_jax.models.params import leaves
from helios_jax.models.reference import greedy_tokens
from helios_jax.scheduler.catalog import ProgramKind, ProposalSource
from tests.golden.tiny import tiny_checkpoint, tiny_mtp_tensors, tiny_tensors, write_checkpoint
from tests.parity.test_speculative_mtp import FAMILY, PROMPT, agreeing, loaded

SHARE, OUTPUT = 0.1, 60


@pytest.fixture(scope="module")
def core_dir(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A core of heads that are right about half of the time; its checkpoint is gone."""
    place = tmp_path_factory.mktemp("mtp")
    checkpoint = write_checkpoint(FAMILY, place / "model")
    tensors = {name: np.array(leaf) for tree in agreeing(SHARE) for name, leaf in leaves(tree)}
    assert tensors.keys() == (tiny_tensors(FAMILY) | tiny_mtp_tensors(FAMILY)).keys()
    save_file(tensors, checkpoint / "model.safetensors")
    options = CoreOptions(max_slots=1, max_context=96, prefill_chunk=32, spec_method="mtp", num_draft_tokens=2)
    prepare(checkpoint, options, place / "core").close()
    shutil.rmtree(checkpoint)
    return place / "core"


@pytest.fixture(scope="module")
def wanted() -> list[list[int]]:
    params = agreeing(SHARE)[0]
    return [greedy_tokens(loaded()[0], params, prompt, OUTPUT) for prompt in (PROMPT, PROMPT[5:17])]


@pytest.fixture(scope="module")
def llm(core_dir: Path) -> Iterator[LLM]:
    with LLM(core=core_dir, config=EngineConfig(spec_width="fixed")) as llm:
        yield llm


@pytest.mark.slow
def test_the_core_holds_the_heads_beside_the_model(core_dir: Path) -> None:
    manifest = read_manifest(core_dir)
    assert manifest.draft is not None
    assert {Path(file.path).parts[0] for file in manifest.draft_weights} == {DRAFT_WEIGHTS_DIR}
    with load_core(core_dir) as core:
        assert {line.status for line in core.report} == {ProgramStatus.LOADED}
        assert isinstance(core.draft, MtpHeads)
        assert {name for name, _ in leaves(core.params["draft"])} == tiny_mtp_tensors(FAMILY).keys()
        shapes = core.catalog.of_kind(ProgramKind.SPECULATIVE)
        assert {shape.proposal_source for shape in shapes} == {ProposalSource.LEARNED}
        assert sorted(shape.token_capacity for shape in shapes) == [1, 2, 3]
        spec = core.draft.attention_layers[0]
        each = spec.num_kv_heads * spec.head_dim
        layers = sum(s.num_kv_heads * s.head_dim for s in core.model.attention_layers) + each
        assert core.memory.page_bytes == 2 * 16 * layers * 4


@pytest.mark.slow
@pytest.mark.parametrize("spec_width", ["fixed", "adaptive", "off"])
def test_greedy_output_is_the_models_own(core_dir: Path, wanted: list[list[int]], spec_width: str) -> None:
    params = SamplingParams(temperature=0, max_tokens=OUTPUT, ignore_eos=True)
    with LLM(core=core_dir, config=EngineConfig(spec_width=spec_width)) as llm:
        for _ in range(2):
            outputs = llm.generate([PROMPT, PROMPT[5:17]], params)
            assert [output.outputs[0].token_ids for output in outputs] == wanted
        stats = llm.stats()
        counts = list(stats.rounds.values())
        assert stats.compiles_after_ready == 0
        if spec_width == "fixed":
            assert 0 < sum(c.accepted for c in counts) < sum(c.offered for c in counts)
        if spec_width == "off":
            assert sum(c.offered for c in counts) == 0


@pytest.mark.slow
def test_sampled_output_repeats_with_its_seed_and_widths(core_dir: Path) -> None:
    """A drafted position is drawn otherwise than a bonus one; with one frame in flight the widths repeat too."""
    params = SamplingParams(temperature=0.8, top_p=0.9, seed=4, max_tokens=30, ignore_eos=True)
    with LLM(core=core_dir, config=EngineConfig(spec_width="fixed", async_scheduling=False)) as llm:
        outputs = [tuple(llm.generate([PROMPT], params)[0].outputs[0].token_ids) for _ in range(5)]
    assert len(set(outputs)) == 1
    assert len(outputs[0]) == 30


@pytest.mark.slow
def test_a_stop_token_inside_a_block_ends_the_output(llm: LLM, wanted: list[list[int]]) -> None:
    stop = wanted[0][len(wanted[0]) // 2]
    params = SamplingParams(temperature=0, max_tokens=OUTPUT, ignore_eos=True, stop_token_ids=[stop])
    output = llm.generate([PROMPT], params)[0].outputs[0]
    assert output.finish_reason == "stop"
    assert [*output.token_ids, stop][: wanted[0].index(stop) + 1] == wanted[0][: wanted[0].index(stop) + 1]


def test_models_without_heads_are_refused_before_anything_is_made(tmp_path: Path) -> None:
    options = CoreOptions(max_slots=1, max_context=64, spec_method="mtp")
    with pytest.raises(ConfigError, match="needs multi-token-prediction heads, which this qwen3 model has not"):
        prepare(tiny_checkpoint("qwen3"), options, tmp_path / "core")
    without = write_checkpoint(FAMILY, tmp_path / "without")
    config = json.loads((without / "config.json").read_text())
    (without / "config.json").write_text(json.dumps(config | {"mtp_num_hidden_layers": 0}))
    with pytest.raises(ConfigError, match="which this qwen3_5 model has not"):
        prepare(without, options, tmp_path / "core")
    (without / "config.json").write_text(json.dumps(config))
    save_file(tiny_tensors(FAMILY), without / "model.safetensors")
    with pytest.raises(CheckpointError, match=r"lacks tensor mtp\.fc\.weight"):
        prepare(without, options, tmp_path / "core")
    assert not (tmp_path / "core").exists()
