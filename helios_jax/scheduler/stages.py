"""What a request needs next: initialise, restore, vision, snapshot, prompt or decode.

Works in place on a writable `Requests`; `lifecycle` and `completion` call it when a stage is
over. Images are encoded in windows of whole images that fit the prepared feature storage. A
request of one window needs nothing more; at the border of two, its exact state is saved in a
private row and restored under a fresh generation, so that the next window's features can
start at offset zero (specification: "Prerequisites and completion").
"""

from __future__ import annotations

import numpy as np

from helios_jax.errors import RequestError
from helios_jax.scheduler.state import DECODE, EXTERNAL, INITIALIZE, PROMPT, RESTORE, SNAPSHOT, VISION, Requests, State
from helios_jax.scheduler.types import Limits, RequestSpec


def first_stage(requests: Requests, slot: int, spec: RequestSpec, limits: Limits, *, shares: bool = False) -> None:
    """Set up the columns of a request that was just admitted; restored tokens count as consumed.

    Args:
        shares: They are in pages that it shares; nothing is restored.
    """
    requests.consumed_len[slot] = requests.committed_len[slot] = spec.restored_len
    requests.written_len[slot] = spec.restored_len
    requests.images_done[slot] = sum(span.end <= spec.restored_len for span in spec.image_spans)
    open_window(requests, slot, spec, limits)
    set_bounds(requests, slot, spec)
    if spec.external:
        requests.phase[slot] = EXTERNAL
    else:
        requests.phase[slot] = RESTORE if spec.restored_len and not shares else INITIALIZE


def open_window(requests: Requests, slot: int, spec: RequestSpec, limits: Limits) -> None:
    """Put as many whole images as fit the feature storage into the active window."""
    requests.window_images[slot] = window_end(spec, int(requests.images_done[slot]), limits)


def window_end(spec: RequestSpec, first: int, limits: Limits) -> int:
    """Images up to the end of the window that begins with image `first`."""
    room = limits.feature_tokens
    for number in range(first, len(spec.image_spans)):
        room -= spec.image_spans[number].end - spec.image_spans[number].start
        if room < 0:
            return number
    return len(spec.image_spans)


def feature_offset(spec: RequestSpec, limits: Limits, image: int) -> int:
    """Where the features of an image begin in the storage: every window starts at zero."""
    first = sum(span.end <= spec.restored_len for span in spec.image_spans)
    last = window_end(spec, first, limits)
    while last <= image:
        first, last = last, window_end(spec, last, limits)
    return sum(span.end - span.start for span in spec.image_spans[first:image])


def set_bounds(requests: Requests, slot: int, spec: RequestSpec, cut: int = 0) -> None:
    """Recompute `boundary` and `endpoint` after `consumed_len` has moved.

    Args:
        cut: An armed checkpoint cut of the request, 0 if there is none.
    """
    consumed = int(requests.consumed_len[slot])
    requests.boundary[slot] = next_boundary(spec, consumed, int(requests.window_images[slot]), cut)
    requests.endpoint[slot] = next_endpoint(spec, consumed)


def next_boundary(spec: RequestSpec, consumed: int, window: int, cut: int = 0) -> int:
    """Where the next prefill must stop at the latest: system end, armed cut, first image behind the window, end.

    Args:
        window: Images up to the end of the active window.
        cut: As in `set_bounds`.
    """
    later, prompt_len = [spec.system_end, cut], len(spec.prompt)
    if window < len(spec.image_spans):
        later.append(spec.image_spans[window].start)
    return min((end for end in later if consumed < end < prompt_len), default=prompt_len)


def next_endpoint(spec: RequestSpec, consumed: int) -> int:
    """The first message end after `consumed` prompt tokens, or the end of the prompt."""
    prompt_len = len(spec.prompt)
    return min((end for end in spec.message_ends if consumed < end < prompt_len), default=prompt_len)


def at_window_end(requests: Requests, slot: int, spec: RequestSpec) -> bool:
    """Whether the next prompt token depends on an image of the following window."""
    window = int(requests.window_images[slot])
    return window < len(spec.image_spans) and requests.consumed_len[slot] == spec.image_spans[window].start


def enter(requests: Requests, slot: int, spec: RequestSpec) -> None:
    """Set the phase from the columns, once no copy is due at this position.

    Output exists or the prompt is consumed: DECODE. Images of the window are missing: VISION.
    """
    if requests.consumed_len[slot] == requests.prompt_len[slot]:
        requests.phase[slot] = DECODE
    elif requests.images_done[slot] < requests.window_images[slot]:
        requests.phase[slot] = VISION
    else:
        requests.phase[slot] = PROMPT


def arrive(requests: Requests, slot: int, spec: RequestSpec, *, due: bool) -> None:
    """The prompt has consumed up to `consumed_len`: snapshot if a capture is due or a window ends here."""
    if due or at_window_end(requests, slot, spec):
        requests.phase[slot] = SNAPSHOT
    else:
        enter(requests, slot, spec)


def next_features(state: State, slots: np.ndarray) -> np.ndarray:
    """Features of the image that each VISION request encodes next; int64 [n]."""
    sizes = []
    for slot in slots.tolist():
        spec = state.specs[slot]
        assert spec is not None  # it waits for one of its images
        span = spec.image_spans[int(state.requests.images_done[slot])]
        sizes.append(span.end - span.start)
    return np.array(sizes, np.int64)


def check_images(spec: RequestSpec, limits: Limits, largest_prefill: int, largest_image: int) -> None:
    """Refuse images and cuts that no program or storage can hold.

    Args:
        largest_prefill: Prompt tokens of the largest prefill program that may serve the request.
        largest_image: Features of the largest image that a vision program encodes.

    Raises:
        RequestError: With the numbers.
    """
    previous = 0
    for number, span in enumerate(spec.image_spans):
        size = span.end - span.start
        if not previous <= span.start < span.end <= len(spec.prompt):
            message = f"image {number} spans tokens {span.start} to {span.end} of a prompt of {len(spec.prompt)}"
            raise RequestError(message, param="image_spans", code="invalid_value")
        limit = min(limits.feature_tokens, largest_prefill, largest_image)
        if size > limit:
            message = f"image {number} has {size} features, this core takes at most {limit} (never split)"
            raise RequestError(message, param="image_spans", code="invalid_value")
        for name, cut in (("system_end", spec.system_end), ("restored_len", spec.restored_len)):
            if span.start < cut < span.end:
                message = f"{name} {cut} lies inside image {number} ({span.start} to {span.end})"
                raise RequestError(message, param=name, code="invalid_value")
        previous = span.end
    if not 0 <= spec.system_end <= len(spec.prompt):
        message = f"system_end must be 0 to {len(spec.prompt)}, got {spec.system_end}"
        raise RequestError(message, param="system_end", code="invalid_value")
    if not 0 <= spec.restored_len < len(spec.prompt):
        message = f"restored_len must be 0 to {len(spec.prompt) - 1}, got {spec.restored_len}"
        raise RequestError(message, param="restored_len", code="invalid_value")
