"""Programs with hybrid and mixture families: transformers' tokens however the work is cut, batched and speculated."""

from __future__ import annotations

import dataclasses
import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from helios_jax.aot.device_state import new_state
from helios_jax.models.interface import heads_of
from helios_jax.models.reference import PlainState, attend_dense, empty_caches, recur_plain
from helios_jax.models.source import open_source
from helios_jax.scheduler.catalog import ProgramKind, ProgramShape
from tests.golden.tiny import GREEDY_LEN, VOCAB, golden, tiny_checkpoint
from tests.parity.goldens_kit import TOLERANCE, check_splits_and_batches
from tests.unit.mixed_toy import WIDE, Joint
from tests.unit.programs_toy import Chunk, Host, settings_of
from tests.unit.speculative_toy import LEARNED, NARROW, RAGGED, RECTANGLE, Offer, Rounds

FAST = "qwen3_5_hybrid"  # the smallest with recurrent and attending layers and heads


@functools.cache
def loaded(family: str) -> tuple[Any, Any]:
    source = open_source(tiny_checkpoint(family))
    return source.model, source.load_params("float32")


@functools.cache
def heads(family: str) -> tuple[Any, Any]:
    source = open_source(tiny_checkpoint(family))
    return heads_of(source.model), source.heads().load_params("float32")


@functools.cache
def greedy_run(family: str, prompt: tuple[int, ...], count: int) -> list[int]:
    """The model's next `count` tokens by plain decode in one lane, which the goldens hold by themselves."""
    return Host(*loaded(family), slots=1, context=len(prompt) + count + 16).generate(0, prompt, count)


@pytest.mark.parametrize(
    "family", [FAST, *(pytest.param(f, marks=pytest.mark.long) for f in ("qwen3_next", "qwen3_moe"))]
)
def test_goldens_by_prefill_splits_and_batches(family: str) -> None:
    check_splits_and_batches(Host(*loaded(family), slots=3, context=96), golden(family))


@functools.cache
def plain_state(family: str, length: int) -> Any:
    """tokens [length], count -> each recurrent layer's state after the first `count`, token by token."""
    model, params = loaded(family)

    @jax.jit
    def run(params: Any, tokens: jax.Array, count: jax.Array) -> tuple[PlainState, ...]:
        def recur(spec: Any, rows: Any, state: Any) -> Any:
            # decay and strength 0 change nothing: behind `count` the matrix stays as it is
            there = jnp.arange(length)[:, None] < count
            stopped = rows._replace(decay=jnp.where(there, rows.decay, 0.0), beta=jnp.where(there, rows.beta, 0.0))
            out, after = recur_plain(spec, stopped, state)
            padded = jnp.concatenate([state.rows, rows.mixed])
            last = jax.lax.dynamic_slice_in_dim(padded, count, spec.kernel - 1)
            return out, after._replace(rows=last)

        caches = empty_caches(model)
        _, caches = model.forward(params, tokens, jnp.arange(length), caches, attend_dense, recur)
        return caches[len(model.attention_layers) :]

    return lambda tokens, count: run(params, jnp.asarray(np.resize(tokens, length)), jnp.asarray(count))


def check_state(host: Host, family: str, slot: int, known: list[int], length: int) -> None:
    """The slot's recurrent state is that after all its known tokens but the pending one."""
    expected = plain_state(family, length)(known, len(known) - 1)
    for mine, theirs in zip(host.state.recurrent, expected, strict=True):
        np.testing.assert_allclose(np.asarray(mine[0])[slot], theirs.rows, atol=TOLERANCE)
        np.testing.assert_allclose(np.asarray(mine[1])[slot], theirs.matrix, atol=TOLERANCE)


def with_heads(family: str, **options: Any) -> Rounds:
    draft, own = heads(family)
    return Rounds(*loaded(family), draft=draft, draft_params=own, **options)


def begin(host: Host, slot: int, prompt: list[int], cuts: tuple[int, ...] = ()) -> int:
    """Prefills `prompt` in chunks; the token that follows."""
    host.initialize(slot, len(prompt))
    start = 0
    for stop in cuts:
        host.prefill([Chunk(slot, prompt[start:stop], start, False)])
        start = stop
    return int(host.prefill([Chunk(slot, prompt[start:], start)])["token"][0])


@pytest.mark.long
@pytest.mark.parametrize("family", [FAST, "qwen3_next"])
def test_rounds_of_every_width_equal_transformers(family: str) -> None:
    """Copies right up to a random depth, the heads' own proposals, width one and plain decode, in random order.

    Slots start at other places and in other chunks. At the end the state of each slot is the recurrence's own
    after its committed tokens: nothing of a fallen proposal is left in it.
    """
    stored, rng = golden(family), np.random.default_rng(5)
    prompt, greedy = stored["prompt"].tolist(), stored["greedy"].tolist()
    host = with_heads(family, slots=3, context=96)
    outputs = {slot: greedy[:slot] for slot in range(3)}
    for slot, cuts in enumerate([(), (1, 17), (9,)]):
        outputs[slot].append(begin(host, slot, prompt + greedy[:slot], cuts))
    kinds: list[ProgramShape | None] = [RECTANGLE, RAGGED, LEARNED, NARROW, None]
    seen: dict[ProgramShape | None, int] = dict.fromkeys(kinds, 0)
    depths = np.zeros(4, int)
    limit = GREEDY_LEN - 6
    while any(len(out) < limit for out in outputs.values()):
        shape = kinds[rng.integers(len(kinds))]
        slots = [slot for slot in rng.permutation(3).tolist() if len(outputs[slot]) < limit and rng.random() < 0.8]
        if not slots:
            continue
        seen[shape] += 1
        if shape is None:
            lanes = [*slots, None, None, None][:3]
            for slot, token in zip(lanes, host.decode(lanes)["token"], strict=True):
                outputs.get(slot, []).append(int(token)) if slot is not None else None
            continue
        offers: list[Offer | None] = []
        for slot in slots:
            right = int(rng.integers(4))
            copy = greedy[len(outputs[slot]) :][:3]
            copy = [token if i < right else (token + 1) % VOCAB for i, token in enumerate(copy)]
            offers.append(Offer(slot, 1 if shape is NARROW else int(rng.integers(1, 5)), copy, [0.9, 0.8, 0.7]))
        out = host.round(shape, offers)
        host.extend(outputs, offers, out)
        depths += np.bincount(out["accepted"][: len(offers)], minlength=4)
    for slot, out in outputs.items():
        assert out == greedy[: len(out)]
        check_state(host, family, slot, prompt + out, 96)
    assert all(count > 2 for count in seen.values())
    assert (depths > 0).all()


@pytest.mark.slow
def test_mixed_programs_equal_transformers() -> None:
    """Prompts in chunks of any length, some at the start and some behind others, beside rounds of copies.

    The prompt's slot then decodes with the others, so what its chunks left is read too.
    """
    stored, rng = golden(FAST), np.random.default_rng(8)
    prompt, greedy = stored["prompt"].tolist(), stored["greedy"].tolist()
    host = Joint(*loaded(FAST), slots=4, context=96)
    outputs: dict[int, list[int]] = {slot: greedy[:slot] for slot in range(2)}
    for slot in range(2):
        outputs[slot].append(begin(host, slot, prompt + greedy[:slot]))
    partial = 0
    for number in range(12):
        slot, begun = 2 + number % 2, int(rng.integers(0, 40))
        known = prompt + greedy[:begun]
        host.initialize(slot, len(known))
        start = 0
        while start < len(known):
            stop = len(known) if rng.random() < 0.3 else int(rng.integers(start + 1, len(known) + 1))
            chunk = Chunk(slot, known[start:stop], start, stop == len(known))
            rows: list[Any] = [chunk, None]
            for other in range(2):
                if len(outputs[other]) > GREEDY_LEN - 8:
                    outputs[other] = [begin(host, other, prompt)]
                right, copy = int(rng.integers(4)), greedy[len(outputs[other]) :][:3]
                copy = [token if i < right else (token + 1) % VOCAB for i, token in enumerate(copy)]
                rows.append(Offer(other, int(rng.integers(1, 5)), copy, [0.9, 0.8, 0.7]))
            rows = [rows[i] for i in rng.permutation(4)]
            out = host.mixed(WIDE, rows)
            for lane, row in enumerate(rows):
                if isinstance(row, Offer):
                    outputs[row.slot] += out["tokens"][lane, : out["num_tokens"][lane]].tolist()
                    partial += int(0 < out["accepted"][lane] < out["offered"][lane])
            start = stop
        said = int(out["tokens"][rows.index(chunk), 0])
        assert said == greedy[begun]
        outputs[slot] = [*greedy[:begun], said]
        for _ in range(2):
            lanes = [0, 1, slot]
            for which, token in zip(lanes, host.decode(lanes)["token"], strict=True):
                outputs[which].append(int(token))
    assert partial > 5
    for slot, out_tokens in outputs.items():
        assert out_tokens == greedy[: len(out_tokens)]
        check_state(host, FAST, slot, prompt + out_tokens, 96)


@pytest.mark.slow
def test_a_thousand_tokens_after_partial_acceptance_and_empty_rounds() -> None:
    """Rounds that accept two or more, each followed by one without proposals: plain decode's tokens to the end."""
    prompt = golden(FAST)["prompt"].tolist()
    greedy = greedy_run(FAST, tuple(prompt), 1008)
    host = Rounds(*loaded(FAST), slots=3, context=1056)
    output, rng, twice = [begin(host, 0, prompt, (7,))], np.random.default_rng(9), 0
    while len(output) < 1000:
        right = int(rng.integers(2, 4))
        copy = greedy[len(output) :][:3]
        copy = [token if i < right else (token + 1) % VOCAB for i, token in enumerate(copy)]
        out = host.round(RECTANGLE, [Offer(0, 4, copy, [0.9, 0.8, 0.7])])
        host.extend({0: output}, [Offer(0, 4)], out)
        assert out["accepted"][0] == right
        twice += right == 2
        out = host.round(RECTANGLE, [None, Offer(0, 1)])
        host.extend({0: output}, [None, Offer(0, 1)], out)
        assert out["num_tokens"][1] == 1
    assert output == greedy[: len(output)]
    assert twice > 50
    check_state(host, FAST, 0, prompt + output, 1056)


@pytest.mark.slow
def test_restored_states_go_on_as_if_they_had_been_computed() -> None:
    """Inside a page and behind decoded tokens; the request that was copied goes elsewhere before the copy is used."""
    stored = golden(FAST)
    prompt, greedy = stored["prompt"].tolist(), stored["greedy"].tolist()
    host = Host(*loaded(FAST), slots=3, context=96)
    host.dims = dataclasses.replace(host.dims, state_rows=2)
    host.state = dataclasses.replace(host.state, saved=new_state(host.model, host.dims, "float32").saved)
    snapshot, restore = (ProgramShape(kind, 1, 0) for kind in (ProgramKind.SNAPSHOT, ProgramKind.RESTORE))

    def copy(shape: ProgramShape, slot: int, row: int, endpoint: int, **settings: Any) -> None:
        out = host.run(shape, slot=slot, row=row, page=host.tables[slot][(endpoint - 1) // 16], **settings)
        assert out["committed_len"].tolist() == [endpoint]

    host.initialize(0, len(prompt))
    host.prefill([Chunk(0, prompt[:21], 0, False)])
    copy(snapshot, 0, 1, 21)
    host.prefill([Chunk(0, prompt[:9], 21)])
    begin(host, 1, prompt)
    for _ in range(5):
        host.decode([1])
    copy(snapshot, 1, 2, 29)
    host.decode([1])

    host.tables[2][0] = host.tables[0][0]  # whole pages are shared
    copy(restore, 2, 1, 21, **settings_of(len(prompt)))
    outputs = {2: [int(host.prefill([Chunk(2, prompt[21:], 21)])["token"][0])]}
    host.tables[0][0] = host.tables[1][0]
    copy(restore, 0, 2, 29, **settings_of(30))
    outputs[0] = [*greedy[:6], int(host.prefill([Chunk(0, greedy[5:6], 29)])["token"][0])]
    for slot, output in outputs.items():
        while len(output) < 40:
            output.append(int(host.decode([slot])["token"][0]))
        assert output == greedy[:40]
        check_state(host, FAST, slot, prompt + output, 96)
