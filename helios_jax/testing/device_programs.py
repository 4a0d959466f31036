"""Programs of the fake device that run one token or one prompt a row; rounds are in `device_rounds`.

Each takes the state, the named control fields and the completion fields that it fills.
"""

from __future__ import annotations

from helios_jax.testing.device_state import FakeState, Mask, Parts
from helios_jax.testing.model import fake_logprobs

STATUS_NOTHING_ALLOWED = 2


def decode(state: FakeState, parts: Parts, out: Parts, mask: Mask) -> None:
    """The pending token of each lane joins the cache; the next one is pending."""
    for row, slot in enumerate(parts["slot"]):
        out["token"][row] = -1
        if slot == state.dims.slots:
            continue
        table, position = parts["page_table"][row], state.committed[slot]
        state.write(table, position, state.pending[slot : slot + 1])
        state.consume(slot, position, state.pending[slot : slot + 1])
        state.committed[slot] = position + 1
        out["committed_len"][row] = position + 1
        _sample(state, parts, out, row, mask)


def prefill(state: FakeState, parts: Parts, out: Parts, mask: Mask) -> None:
    """Packed prompt tokens of all rows; the row whose prompt ends samples its first token."""
    offset = 0
    for row, slot in enumerate(parts["slot"]):
        out["token"][row] = -1
        length, start, table = parts["query_len"][row], parts["start"][row], parts["page_table"][row]
        if length == 0:
            continue
        state.write(table, start, parts["tokens"][offset : offset + length])
        if "target" in parts:
            _score(state, parts, out, offset, length)
        offset += length
        state.consume(slot, start, parts["tokens"][offset - length : offset])
        state.committed[slot] = start + length
        out["committed_len"][row] = start + length
        if parts["sample"][row]:
            _sample(state, parts, out, row, mask)


def _sample(state: FakeState, parts: Parts, out: Parts, row: int, mask: Mask) -> None:
    slot = int(parts["slot"][row])
    history = state.history(parts["page_table"][row], int(state.committed[slot]))
    token = state.choose(slot, history, mask(row))
    out["token"][row] = token
    if token < 0:
        out["status"][row] = STATUS_NOTHING_ALLOWED
        return
    state.pending[slot] = token
    if parts["want_logprobs"][0]:
        state.describe(token, out, (row,))


def _score(state: FakeState, parts: Parts, out: Parts, offset: int, length: int) -> None:
    for i in range(offset, offset + length):
        if parts["target"][i] >= 0:
            ids, values = out["target_top_ids"][i], out["target_top_logprobs"][i]
            fake_logprobs(int(parts["target"][i]), ids, values, state.dims.vocab_size)
            out["target_logprob"][i], out["target_rank"][i] = values[0], 1
