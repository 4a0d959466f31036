"""Random states with requests in every stage, for the oracle of prerequisites."""

from __future__ import annotations

import dataclasses
import random
from collections.abc import Callable

import numpy as np

from helios_jax.scheduler import (
    Catalog,
    Constraint,
    ImageSpan,
    PolicyConfig,
    ProgramKind,
    ProgramShape,
    RequestSpec,
    State,
    new_state,
)
from helios_jax.scheduler.catalog import ProposalSource
from helios_jax.scheduler.state import Phase, Requests
from tests.unit.scheduler_toy import admitted, measured, request, small_catalog, small_limits

HOUR_NS = 3_600_000_000_000
SLOTS = 8
FRESH = ("initialize", "restore", "vision", "saved prompt", "saved stream")  # stages before inference
LONGER = ("initialize with images", "restore with images", "more images", "window end", "window restore")
READY = ("prompt", "stream")


def random_catalog(
    rng: random.Random, *, prefill_rows: tuple[int, ...] = (1,), mixed: bool = True, rounds: bool = False
) -> Catalog:
    """Two programs or so of every kind, a few extents each; `rounds` adds rectangular speculation."""
    kinds, tokens = ProgramKind, sorted(rng.sample(range(1, 7), 2))
    base = small_catalog(
        decode=rng.sample((1, 2, 3, 4, 8), 2),
        prefill=[(b, t) for b in prefill_rows for t in tokens],
        scored=[(1, t) for t in tokens],
        initialize=rng.sample((1, 2, 3, 8), 2),
    )
    shapes = [ProgramShape(kind, b, 0) for kind in (kinds.RESTORE, kinds.SNAPSHOT) for b in rng.sample((1, 2, 4, 8), 2)]
    shapes += [
        ProgramShape(kinds.VISION, *extents) for extents in rng.sample(((1, 2), (1, 4), (2, 2), (2, 4), (4, 4)), 3)
    ]
    shapes += [ProgramShape(kinds.VISION, 1, 4)]
    if mixed:
        extents = rng.sample(((2, 2), (2, 4), (4, 4), (8, 6)), 2)
        shapes += [ProgramShape(kinds.MIXED, b, 1, prefill_capacity=t) for b, t in extents]
    if rounds:
        depth, learned = rng.choice((1, 2)), ProposalSource.LEARNED
        for b in rng.sample((1, 2, 4), 2):
            shapes.append(
                ProgramShape(kinds.SPECULATIVE, b, depth + 1, depth, b * (depth + 1), proposal_source=learned)
            )
        shapes.append(ProgramShape(kinds.SPECULATIVE, 4, 1, 0, 4, proposal_source=learned))
        shapes.append(ProgramShape(kinds.MIXED, 4, depth + 1, depth, 0, 4, proposal_source=learned))
    return Catalog((*base, *shapes), aligned=False)


def random_policy(rng: random.Random) -> PolicyConfig:
    return PolicyConfig(
        output_token_value=rng.choice([0.0, 1.0, 64.0]),
        token_fairness=rng.choice([0.25, 16.0]),
        delivery_fairness=rng.choice([0.0, 4.0]),
        decode_age_price=rng.choice([0.0, 0.1, 3.0]),
        terminal_value=rng.choice([0.0, 256.0]),
        terminal_age_price=rng.choice([0.0, 1.0]),
    )


def random_state(
    rng: random.Random, kinds: tuple[str, ...], *, catalog: Catalog, num: int = 6, unmeasured: float = 0.0,
    policy: PolicyConfig | None = None, short: int = 4,
) -> State:  # fmt: skip
    """2 to `num` requests of the named kinds with prices over many decades; one is of the first kind.

    Args:
        short: Largest number of tokens up to the boundary of a prompt.
    """
    limits = dataclasses.replace(small_limits(slots=SLOTS), feature_tokens=3)
    state = new_state(catalog, limits, policy or random_policy(rng))
    state = dataclasses.replace(state, now_ns=HOUR_NS)
    chosen = [kinds[0], *(rng.choice(kinds) for _ in range(rng.randint(1, num - 1)))]
    rng.shuffle(chosen)
    base = [request(12, 6, scored=kind in SCORABLE and rng.random() < 0.2) for kind in chosen]
    state, handles = admitted(state, *base)
    requests, specs = state.requests.draft(), list(state.specs)
    for (slot, _), kind, spec in zip(handles, chosen, base, strict=True):
        specs[slot] = MAKERS[kind](rng, requests, slot, spec, short)
        _dress(rng, requests, slot)
    state = dataclasses.replace(state, requests=requests.sealed(), specs=tuple(specs))
    return measured(state, lambda _: 0 if rng.random() < unmeasured else rng.randint(10**5, 10**8))


def _dress(rng: random.Random, requests: Requests, slot: int) -> None:
    """Prices and ages."""
    requests.committed_len[slot] = requests.consumed_len[slot]
    # One request without history at most: two would tie, and a tie is the tie order's business.
    requests.token_r[slot] = np.nan if slot == 0 and rng.random() < 0.5 else 10 ** rng.uniform(-3, 6)
    requests.last_use_ns[slot] = rng.randint(0, HOUR_NS)
    requests.endpoint[slot] = rng.randint(int(requests.consumed_len[slot]) + 1, 13)
    requests.terminal_ns[slot] = HOUR_NS - rng.randint(0, 10**9) if requests.phase[slot] == Phase.TERMINAL else 0
    if requests.consumed_len[slot] == requests.prompt_len[slot]:
        requests.output_len[slot] = rng.randint(1, 5)
        requests.delivery_r[slot] = rng.choice([np.nan, 10 ** rng.uniform(-3, 6)])
        requests.visible_ns[slot] = HOUR_NS - rng.randint(0, 2 * 10**9)
        requests.constraints[slot] = int(rng.choice([0, 0, Constraint.GRAMMAR, Constraint.NO_LEARNED]))


def _prompting(rng: random.Random, requests: Requests, slot: int, spec: RequestSpec, short: int) -> RequestSpec:
    """A prompt with up to `short` tokens before its boundary, which is the end of the prompt or not."""
    remaining, consumed = rng.randint(1, short), rng.randint(1, 12 - short)
    at_end = rng.random() < 0.5
    requests.consumed_len[slot] = 12 - remaining if at_end else consumed
    requests.boundary[slot] = 12 if at_end else consumed + remaining
    return spec


def _in_phase(phase: Phase) -> Callable[..., RequestSpec]:
    def make(rng: random.Random, requests: Requests, slot: int, spec: RequestSpec, short: int) -> RequestSpec:
        requests.phase[slot] = phase
        return _prompting(rng, requests, slot, spec, short)

    return make


def _initialize(rng: random.Random, requests: Requests, slot: int, spec: RequestSpec, short: int) -> RequestSpec:
    requests.boundary[slot] = rng.randint(1, short)
    return spec


def _saved_prompt(rng: random.Random, requests: Requests, slot: int, spec: RequestSpec, short: int) -> RequestSpec:
    requests.phase[slot], requests.state_row[slot] = Phase.SNAPSHOT, slot + 1
    return _prompting(rng, requests, slot, spec, short)


def _at_end(phase: Phase) -> Callable[..., RequestSpec]:
    """The prompt is consumed: a stream, one that waits for its snapshot, or a request that has ended."""

    def make(rng: random.Random, requests: Requests, slot: int, spec: RequestSpec, short: int) -> RequestSpec:
        requests.phase[slot] = phase
        requests.state_row[slot] = 0 if phase == Phase.DECODE else slot + 1
        requests.consumed_len[slot] = requests.boundary[slot] = 12
        return spec

    return make


def _images(phase: Phase, num: int) -> Callable[..., RequestSpec]:
    """`num` images of the window are missing; the first begins within the tokens up to the boundary."""

    def make(rng: random.Random, requests: Requests, slot: int, spec: RequestSpec, short: int) -> RequestSpec:
        _prompting(rng, requests, slot, spec, short)
        if phase == Phase.INITIALIZE:
            requests.boundary[slot] -= requests.consumed_len[slot]
            requests.consumed_len[slot] = 0
        requests.consumed_len[slot] = max(0, min(requests.consumed_len[slot], requests.boundary[slot] - num))
        requests.phase[slot], requests.window_images[slot] = phase, num
        start = int(requests.consumed_len[slot])
        room = int(requests.boundary[slot]) - start
        spans = []
        for _ in range(num):
            size = rng.randint(1, max(1, min(4, room // num)))
            spans.append(ImageSpan(start, start + size))
            start += size
        requests.boundary[slot] = max(int(requests.boundary[slot]), start)
        return dataclasses.replace(spec, image_spans=tuple(spans))

    return make


def _window(phase: Phase) -> Callable[..., RequestSpec]:
    """Between two windows: one image behind, one or two ahead, a private row."""

    def make(rng: random.Random, requests: Requests, slot: int, spec: RequestSpec, short: int) -> RequestSpec:
        requests.phase[slot], requests.private_row[slot] = phase, slot + 1
        if phase == Phase.RESTORE:
            requests.restore_row[slot] = slot + 1
        else:
            requests.state_row[slot] = rng.choice((0, SLOTS + slot + 1))  # a due capture comes first
        requests.images_done[slot] = requests.window_images[slot] = 1
        requests.consumed_len[slot], requests.boundary[slot] = 4, 12
        size = rng.randint(1, 2)
        ahead = [ImageSpan(4, 4 + size), ImageSpan(4 + size, 6 + size)][: rng.randint(1, 2)]
        return dataclasses.replace(spec, image_spans=(ImageSpan(0, 4), *ahead))

    return make


MAKERS: dict[str, Callable[..., RequestSpec]] = {
    "initialize": _initialize,
    "restore": _in_phase(Phase.RESTORE),
    "vision": _images(Phase.VISION, 1),
    "saved prompt": _saved_prompt,
    "saved stream": _at_end(Phase.SNAPSHOT),
    "terminal": _at_end(Phase.TERMINAL),
    "prompt": _in_phase(Phase.PROMPT),
    "stream": _at_end(Phase.DECODE),
    "initialize with images": _images(Phase.INITIALIZE, 2),
    "restore with images": _images(Phase.RESTORE, 1),
    "more images": _images(Phase.VISION, 2),
    "window end": _window(Phase.SNAPSHOT),
    "window restore": _window(Phase.RESTORE),
}
SCORABLE = ("initialize", "restore", "saved prompt", "prompt", "vision")
