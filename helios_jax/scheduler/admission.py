"""Admission: whether a request can ever be served, whether it fits now, and its slot.

Everything that can be refused is refused here, with the numbers, before the request owns
anything. Which pages are promised says `reservation`.
"""

from __future__ import annotations

import dataclasses

import numpy as np

from helios_jax.errors import CapacityError, RequestError
from helios_jax.scheduler import captures
from helios_jax.scheduler.capture_draft import Draft
from helios_jax.scheduler.page_pressure import follow
from helios_jax.scheduler.reservation import (
    admission_pages,
    headroom,
    pages_of_source,
    promised_pages,
    spare_pages,
    worst_pages,
)
from helios_jax.scheduler.resources import share
from helios_jax.scheduler.serviceable import check_request
from helios_jax.scheduler.speculation import reset_slots
from helios_jax.scheduler.stages import check_images, first_stage, set_bounds
from helios_jax.scheduler.state import FREE, State
from helios_jax.scheduler.types import Constraint, RequestHandle, RequestSpec

_KNOWN = sum(int(constraint) for constraint in Constraint)  # every bit that means something


def can_admit(state: State, spec: RequestSpec) -> bool:
    """Whether a slot is free now, and the pages that `spec` is promised beside those that residents need next.

    Raises:
        RequestError: It can never fit.
    """
    check_spec(state, spec)
    room = bool((state.requests.phase == FREE).any())
    room = room and admission_pages(state, spec) + headroom(state) <= spare_pages(state)
    return room and captures.private_row_obtainable(state, spec)


def check_spec(state: State, spec: RequestSpec) -> None:
    """Refuse what could never be served, even alone.

    Raises:
        RequestError: The request is malformed or can never fit; the message has the numbers.
    """
    prompt_len, limits = len(spec.prompt), state.limits
    if np.ndim(spec.prompt) != 1 or prompt_len < 1:
        raise RequestError("the prompt must hold at least one token", param="prompt", code="invalid_value")
    if spec.max_tokens < 0 or (spec.max_tokens == 0 and not spec.scored):
        message = f"max_tokens must be at least 1 (0 only for a scored prompt), got {spec.max_tokens}"
        raise RequestError(message, param="max_tokens", code="invalid_value")
    if not 0 <= spec.output_len < prompt_len:
        message = f"output_len must be 0 to {prompt_len - 1}, got {spec.output_len}"
        raise RequestError(message, param="output_len", code="invalid_value")
    _check_fields(spec)
    check_request(state.programs, state.policy.speculation, spec)
    if spec.scored and not len(state.programs.scored_prefill):
        raise RequestError("this core has no scored prefill programs", param="prompt_logprobs", code="unsupported")
    _check_stages(state, spec)
    total = prompt_len + spec.max_tokens
    if total > limits.max_context:
        message = (
            f"{prompt_len} prompt tokens and max_tokens {spec.max_tokens} need {total} tokens of context, "
            f"the limit is {limits.max_context}; shorten the prompt or lower max_tokens"
        )
        raise RequestError(message, param="prompt", code="context_length_exceeded")
    needed = worst_pages(spec, limits)
    if needed > limits.pages:
        message = (
            f"{prompt_len} prompt tokens and max_tokens {spec.max_tokens} need {needed} pages of "
            f"{limits.page_size} tokens, the cache has {limits.pages}; shorten the prompt or lower max_tokens"
        )
        raise RequestError(message, param="max_tokens", code="context_length_exceeded")


def _check_fields(spec: RequestSpec) -> None:
    """Refuse message ends and constraints that mean nothing."""
    ends, prompt_len = spec.message_ends, len(spec.prompt)
    integers = all(isinstance(end, (int, np.integer)) and not isinstance(end, bool) for end in ends)
    if not integers or any(b < a for a, b in zip((0, *ends), (*ends, prompt_len), strict=True)):
        message = f"message_ends must be integers from 0 to {prompt_len} in order, got {ends!r}"
        raise RequestError(message, param="message_ends", code="invalid_value")
    times = spec.preemptions
    if not isinstance(times, (int, np.integer)) or isinstance(times, bool) or times < 0:
        message = f"preemptions must be an integer of at least 0, got {times!r}"
        raise RequestError(message, param="preemptions", code="invalid_value")
    constraints = spec.constraints
    known = isinstance(constraints, int) and not isinstance(constraints, bool) and not int(constraints) & ~_KNOWN
    if not known:
        message = (
            f"constraints must be a combination of {', '.join(c.name or '' for c in Constraint)}, got {constraints!r}"
        )
        raise RequestError(message, param="constraints", code="invalid_value")


def _check_stages(state: State, spec: RequestSpec) -> None:
    """Whether the catalogue has the programs that the request's stages need."""
    programs = state.programs
    rows = programs.scored_prefill if spec.scored else programs.prefill
    largest_image = int(programs.tokens[programs.vision].max(initial=0))
    check_images(spec, state.limits, int(programs.tokens[rows].max(initial=0)), largest_image)
    captures.check_source(state.retention.checkpoints, spec, state.limits)
    restores = spec.restored_len and not captures.takes_part(state.retention.checkpoints, spec)
    if restores and not len(programs.restore):
        raise RequestError("this core has no restore programs", param="restored_len", code="unsupported")
    if spec.external and not spec.restored_len:
        raise RequestError("external state needs its length", param="restored_len", code="invalid_value")
    windows = state.limits.state_rows and len(programs.snapshot) and len(programs.restore)
    if captures.needs_private_row(spec, state.limits.feature_tokens) and not windows:
        message = (
            f"the images have more features than the storage holds ({state.limits.feature_tokens}), and this core "
            "has no state rows, snapshot and restore programs to work in windows"
        )
        raise RequestError(message, param="image_spans", code="unsupported")


def admit(state: State, spec: RequestSpec, now_ns: int) -> tuple[State, RequestHandle]:
    """Give a request the lowest free slot; it takes part in the next plan.

    A request that is admitted while a frame runs is outside that frame's interval.

    Raises:
        RequestError: It can never fit.
        CapacityError: No slot, pages or private state row now; wait for a request to retire, or to give way.
    """
    if not can_admit(state, spec):
        pages, kept, spare = admission_pages(state, spec), headroom(state), spare_pages(state)
        slots = int(np.count_nonzero(state.requests.phase == FREE))
        message = (
            f"the request needs a slot and {pages} pages; {slots} slots and {spare} pages are free, "
            f"{kept} of them for the next steps of running requests"
        )
        if not captures.private_row_obtainable(state, spec):
            message += "; its images need a state row, all are in use"
        raise CapacityError(message)
    slot = int(np.flatnonzero(state.requests.phase == FREE)[0])
    requests = state.requests.draft()
    requests.generation[slot] += 1
    requests.epoch[slot] += 1
    requests.prompt_len[slot], requests.max_tokens[slot] = len(spec.prompt), spec.max_tokens
    requests.scored[slot], requests.constraints[slot] = spec.scored, int(spec.constraints)
    shares = captures.takes_part(state.retention.checkpoints, spec)
    first_stage(requests, slot, spec, state.limits, shares=shares)
    handle, draft = RequestHandle(slot, int(requests.generation[slot])), Draft(state)
    set_bounds(requests, slot, spec, captures.admit(draft, requests, handle, spec, now_ns))
    counters = dataclasses.replace(state.counters, admitted=state.counters.admitted + 1)
    requests.reserved_pages[slot] = promised_pages(spec, state.limits)
    requests.worst_pages[slot] = worst_pages(spec, state.limits)
    requests.admission[slot], requests.last_use_ns[slot] = counters.admitted, now_ns
    specs = (*state.specs[:slot], spec, *state.specs[slot + 1 :])
    shared = pages_of_source(state, spec)
    pool = share(state.pool, slot, shared) if shared else state.pool
    admitted = dataclasses.replace(
        state,
        now_ns=max(state.now_ns, int(now_ns)),
        requests=requests.sealed(),
        pool=follow(pool, draft.checkpoints),
        specs=specs,
        counters=counters,
        acceptance=reset_slots(state.acceptance, [slot]),
        retention=draft.sealed(),
    )
    return admitted, handle
