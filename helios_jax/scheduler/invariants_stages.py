"""Invariants of the stages before inference: images, windows, boundaries, copies (see `invariants`)."""

from __future__ import annotations

from helios_jax.scheduler.state import (
    DECODE,
    EXTERNAL,
    INITIALIZE,
    PROMPT,
    RESTORE,
    SNAPSHOT,
    TERMINAL,
    VISION,
    Phase,
    State,
)
from helios_jax.scheduler.types import RequestSpec

_BEFORE_PROMPT = (INITIALIZE, RESTORE, EXTERNAL, VISION)
_RUNNING = (*_BEFORE_PROMPT, SNAPSHOT, PROMPT, DECODE)


def images(state: State) -> str | None:
    """The active window is one of those that the storage gives, and the prompt has consumed nothing ahead of it."""
    r = state.requests
    for slot, spec in enumerate(state.specs):
        if spec is None or r.phase[slot] not in _RUNNING:
            continue
        done, last, consumed = (int(column[slot]) for column in (r.images_done, r.window_images, r.consumed_len))
        windows = image_windows(spec, state.limits.feature_tokens)
        if not any(first <= done <= last == end for first, end in windows):
            return f"slot {slot} has {done} images of a window up to {last}, the windows are {windows}"
        if any(span.start < consumed < span.end for span in spec.image_spans):
            return f"slot {slot} has consumed {consumed} tokens, the middle of an image"
        if done < len(spec.image_spans) and consumed > spec.image_spans[done].start:
            return f"slot {slot} has consumed {consumed} tokens with {done} images encoded"
        if r.phase[slot] in (PROMPT, DECODE, SNAPSHOT) and done != last:
            return f"slot {slot} in {Phase(r.phase[slot]).name} has {done} images of {last}"
    return None


def boundaries(state: State) -> str | None:
    """A prompt stops at a mandatory position at the latest, never inside an image."""
    r = state.requests
    for slot, spec in enumerate(state.specs):
        if spec is None or r.phase[slot] != PROMPT:
            continue
        consumed, boundary, window = int(r.consumed_len[slot]), int(r.boundary[slot]), int(r.window_images[slot])
        starts = [span.start for span in spec.image_spans[window:]]
        latest = min(end for end in (spec.system_end, *starts[:1], len(spec.prompt)) if end > consumed)
        if not consumed < boundary <= latest:
            return f"slot {slot} may prefill from {consumed} to {boundary}, {latest} is mandatory"
        if any(span.start < boundary < span.end for span in spec.image_spans):
            return f"slot {slot} would stop at {boundary}, inside an image"
    return None


def copies(state: State) -> str | None:
    """Who waits for a copy has its row; who has further windows has a private one; only ended requests have an end."""
    r = state.requests
    for slot, spec in enumerate(state.specs):
        if spec is None or r.phase[slot] not in (*_RUNNING, TERMINAL):
            continue
        phase, private, window = Phase(r.phase[slot]), int(r.private_row[slot]), int(r.window_images[slot])
        earliest = r.visible_ns[slot] if phase == TERMINAL else 0  # the clock may stand at 0
        latest = state.now_ns if phase == TERMINAL else 0
        if not earliest <= r.terminal_ns[slot] <= latest:
            return f"slot {slot} in {phase.name} has ended at {r.terminal_ns[slot]}, now is {state.now_ns}"
        if phase == TERMINAL:
            continue
        if window < len(spec.image_spans) and not private:
            return f"slot {slot} has {len(spec.image_spans)} images, a window up to {window} and no private row"
        between = window < len(spec.image_spans) and r.consumed_len[slot] == spec.image_spans[window].start
        if phase == SNAPSHOT and not (r.state_row[slot] or between):
            return f"slot {slot} waits for a copy without a row"
        if phase in (PROMPT, VISION, DECODE) and between:
            return f"slot {slot} in {phase.name} is at the end of its window"
        if private and r.restore_row[slot] == private and not (phase == RESTORE and between):
            return f"slot {slot} in {phase.name} would restore its window"
    return streams(state)


def streams(state: State) -> str | None:
    """A stream is in DECODE, or one snapshot away from it: none waits behind several stages.

    `service` relies on it: every stream has the reference interval of its family, and no individual
    future delivery has to stand in for it.
    """
    r = state.requests
    for slot, spec in enumerate(state.specs):
        if spec is None or r.phase[slot] not in _RUNNING or not r.output_len[slot]:
            continue
        phase, last = Phase(r.phase[slot]), int(r.window_images[slot])
        if phase not in (DECODE, SNAPSHOT):
            return f"slot {slot} has output and is in {phase.name}, stages away from decoding"
        if r.consumed_len[slot] != r.prompt_len[slot] or last < len(spec.image_spans):
            return f"slot {slot} has output with {r.consumed_len[slot]} of {r.prompt_len[slot]} prompt tokens consumed"
    return None


def image_windows(spec: RequestSpec, feature_tokens: int) -> list[tuple[int, int]]:
    """(first, last) of each window of whole images, those that a restored prefix holds left out."""
    first = sum(span.end <= spec.restored_len for span in spec.image_spans)
    windows, room = [[first, first]], feature_tokens
    for number, span in enumerate(spec.image_spans[first:], start=first):
        size = span.end - span.start
        if size > room:
            windows.append([number, number])
            room = feature_tokens
        room -= size
        windows[-1][1] = number + 1
    return [(begin, end) for begin, end in windows]
