"""A host of speculative rounds: `programs_toy.Host` with a draft model and rounds of any shape."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from helios_jax.aot.abi import Dims, control_layout
from helios_jax.aot.device_state import new_state
from helios_jax.aot.programs import build_program
from helios_jax.scheduler.catalog import Allocation, ProgramKind, ProgramShape, ProposalSource
from tests.unit.programs_toy import Host, Toy, abstract_bits, toy_params

# the rounds that most tests share: each is compiled once a process
RECTANGLE = ProgramShape(ProgramKind.SPECULATIVE, 4, 4, 3, 16, 0, ProposalSource.COPY)
RAGGED = ProgramShape(ProgramKind.SPECULATIVE, 4, 4, 3, 9, 0, ProposalSource.COPY, Allocation.PREFIX_LIMIT)
LEARNED = ProgramShape(ProgramKind.SPECULATIVE, 4, 4, 3, 9, 0, ProposalSource.LEARNED, Allocation.PREFIX_LIMIT)
NARROW = ProgramShape(ProgramKind.SPECULATIVE, 4, 1, 0, 4, 0, ProposalSource.LEARNED)
IDENTITY = (1.0, 0.0)


@functools.cache
def compiled(shape: ProgramShape, model: Any, dims: Dims, dtype: str, draft: Any) -> Any:
    """The executable of a shape in a core that may have a draft model."""
    control = control_layout(shape, dims)
    weights = model.abstract_params(dtype)
    arguments = (
        weights if draft is None else {"target": weights, "draft": draft.abstract_params(dtype)},
        jax.eval_shape(lambda: new_state(model, dims, dtype, draft)),
        jax.ShapeDtypeStruct((control.int_size,), jnp.int32),
        jax.ShapeDtypeStruct((control.float_size,), jnp.float32),
        *abstract_bits(shape, dims),
    )
    return jax.jit(build_program(shape, model, dims, dtype, draft), donate_argnums=1).lower(*arguments).compile()


@functools.cache
def other_params(noise: float = 0.8) -> Any:
    """Weights of a toy that agrees with `toy_params` in little, or in more with less noise."""
    rng = np.random.default_rng(99)
    noisy = [w + noise * w.std() * rng.standard_normal(w.shape) for w in jax.tree.leaves(toy_params())]
    return jax.tree.unflatten(jax.tree.structure(toy_params()), [w.astype(np.float32) for w in noisy])


@dataclasses.dataclass
class Offer:
    """One lane of a round: its ceiling, and for copies the supplied prefix and its confidence."""

    slot: int
    limit: int
    tokens: Sequence[int] = ()
    confidence: Sequence[float] = ()


class Rounds(Host):
    """A host whose core may have a draft model, or heads; every program runs with it then.

    One size for all tests: other sizes would be other programs, and compiling is what costs.
    """

    def __init__(
        self, model: Any = None, params: Any = None, *, draft: Any = None, draft_params: Any = None, **options: Any
    ) -> None:
        super().__init__(model, params, **{"slots": 5, "context": 224} | options)
        self.draft = draft
        if draft is not None:
            cast = jax.tree.map(lambda a: jnp.asarray(a, jnp.dtype(self.dtype)), draft_params)
            self.params = {"target": self.params, "draft": cast}
            fresh = new_state(self.model, self.dims, self.dtype, draft)
            nan = 0x7FC0 if jnp.dtype(self.dtype).itemsize == 2 else np.nan
            poisoned = jax.tree.map(lambda p: jnp.asarray(np.full(p.shape, nan, p.dtype)), fresh.draft_kv)
            kept = tuple(jnp.full_like(rows, np.nan) for rows in fresh.mtp_hidden)
            self.state = self.state.replace(draft_kv=poisoned, mtp_hidden=kept)

    def program(self, shape: ProgramShape) -> Any:
        return compiled(shape, self.model, self.dims, self.dtype, self.draft)

    def round(
        self, shape: ProgramShape, offers: Sequence[Offer | None], *, logprobs: bool = False,
        calibration: tuple[float, float] = IDENTITY, pages: int | None = None,
    ) -> dict[str, np.ndarray]:  # fmt: skip
        """One round; lanes beyond `offers`, and None, are inactive.

        Args:
            pages: Pages of each lane in its table; None = all of its slot's.
        """
        b, d = shape.batch_capacity, shape.proposal_depth
        fields: dict[str, Any] = {
            "slot": np.full(b, self.dims.slots, np.int32),
            "limit": np.zeros(b, np.int32),
            "page_table": np.zeros((b, self.dims.pages_per_slot), np.int32),
            "want_logprobs": int(logprobs),
        }
        if d:
            fields["calibration"] = calibration
        if d and shape.proposal_source is ProposalSource.COPY:
            fields["proposal"] = np.full((b, d), -1, np.int32)
            fields["confidence"] = np.zeros((b, d), np.float32)
        for lane, offer in enumerate(offers):
            if offer is None:
                continue
            fields["slot"][lane], fields["limit"][lane] = offer.slot, offer.limit
            fields["page_table"][lane, :pages] = self.tables[offer.slot, :pages]
            if "proposal" in fields:
                fields["proposal"][lane, : len(offer.tokens)] = offer.tokens
                fields["confidence"][lane, : len(offer.confidence)] = offer.confidence
        return self.run(shape, **fields)

    def extend(self, outputs: dict[int, list[int]], offers: Sequence[Offer | None], out: dict[str, np.ndarray]) -> None:
        """Appends a round's tokens to the outputs of its slots."""
        for lane, offer in enumerate(offers):
            if offer is not None:
                outputs[offer.slot] += out["tokens"][lane, : out["num_tokens"][lane]].tolist()


def toy_rounds(**options: Any) -> Rounds:
    """A host of the toy with a draft toy of other weights, unless `draft_params` says otherwise."""
    return Rounds(draft=Toy(), draft_params=options.pop("draft_params", None) or other_params(), **options)
