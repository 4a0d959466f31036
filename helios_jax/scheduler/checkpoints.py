"""Published checkpoints: prefixes that others may restore, their aliases, pins and worth.

A checkpoint says: "state row R holds everything that the first `endpoint` tokens of a prefix
leave behind". The prefix is known by a key that the caller forms from the tokens themselves
(and the model, adapter and images); this module only compares keys. It knows neither requests
nor prices.

The life of a checkpoint:

1. A capture ends and is published under a key, with the demand time of its request. A key that
   is published already makes it an alias of the row that holds it; the fresh row is surplus.
2. Matches touch it. A restore pins it until the copy out of its row is complete.
3. The allocator (module `row_allocator`) needs a row: the least protected unpinned one goes,
   with all its aliases.

Evicting one alias of several frees nothing, so victims are rows, each as protected as its most
protected alias; `freed_by` counts the rows and pages that nobody else holds.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Collection, Hashable
from typing import NamedTuple

import numpy as np

from helios_jax.errors import InvariantError
from helios_jax.scheduler import state_rows
from helios_jax.scheduler.state_rows import Role, Rows

Key = Hashable
MAX_ALIASES = len(Role)  # a row has at most one checkpoint a role: publishing one twice is a demand for the first


@dataclasses.dataclass(frozen=True, eq=False)
class Checkpoints:
    """The published checkpoints, oldest first; columns are read-only int64 [n].

    At most MAX_ALIASES a state row. Two of them have the same row exactly if they have the same
    key, and then the same endpoint.

    Attributes:
        ids: Strictly increasing, never given twice.
        endpoints: Tokens covered.
        roles: A `Role`.
        rows: State row, 1-based.
        demand_ns: When a request last asked for the prefix.
        pins: Restores that read the row now.
        keys: Of the token prefix.
        pages: Cache pages that the checkpoint shares; aliases share the same, and a page may be in many prefixes.
        last_id: The id given last, 0 before the first.
    """

    ids: np.ndarray
    endpoints: np.ndarray
    roles: np.ndarray
    rows: np.ndarray
    demand_ns: np.ndarray
    pins: np.ndarray
    keys: tuple[Key, ...] = ()
    pages: tuple[tuple[int, ...], ...] = ()
    last_id: int = 0

    def __len__(self) -> int:
        return len(self.keys)


COLUMNS = ("ids", "endpoints", "roles", "rows", "demand_ns", "pins")


class Published(NamedTuple):
    """A publication: the checkpoint's id, and the row that it did not need (0: it took the row).

    With a surplus row the pages that were offered beside it are not held either.
    """

    checkpoints: Checkpoints
    checkpoint: int
    surplus_row: int


class Identified(NamedTuple):
    """A named checkpoint; `merged` says which ids went into which older ones of the same key and role."""

    rows: Rows
    checkpoints: Checkpoints
    merged: dict[int, int]


class Freed(NamedTuple):
    """What really becomes free when some checkpoints go."""

    rows: tuple[int, ...]
    pages: tuple[int, ...]


def new_checkpoints() -> Checkpoints:
    """No checkpoint is published."""
    empty = np.zeros((len(COLUMNS), 0), np.int64)
    empty.setflags(write=False)
    return Checkpoints(*empty)


def index_of(checkpoints: Checkpoints, checkpoint: int) -> int:
    """Position of an id.

    Raises:
        InvariantError: It is not published (any more).
    """
    index = int(np.searchsorted(checkpoints.ids, checkpoint))
    if index == len(checkpoints) or checkpoints.ids[index] != checkpoint:
        raise InvariantError(f"checkpoint {checkpoint} is not published")
    return index


def is_published(checkpoints: Checkpoints, checkpoint: int) -> bool:
    return bool((checkpoints.ids == checkpoint).any())


def ids_of(checkpoints: Checkpoints, key: Key) -> tuple[int, ...]:
    """The aliases of a prefix, oldest first."""
    return tuple(int(i) for i, held in zip(checkpoints.ids, checkpoints.keys, strict=True) if held == key)


def publish(
    checkpoints: Checkpoints,
    *,
    key: Key,
    endpoint: int,
    role: Role,
    row: int,
    demand_ns: int,
    pages: tuple[int, ...] = (),
) -> Published:
    """Publish the row under a key, or as an alias of the row that the key has already.

    `demand_ns` is when the request that took the checkpoint arrived: all checkpoints of one
    request are equally recent, so that role and length decide among them.

    Raises:
        InvariantError: The key covers another number of tokens, or the row has another key.
    """
    known = ids_of(checkpoints, key)
    if known and checkpoints.endpoints[index_of(checkpoints, known[0])] != endpoint:
        raise InvariantError(f"the key of checkpoint {known[0]} is published for {endpoint} tokens too")
    held = int(checkpoints.rows[index_of(checkpoints, known[0])]) if known else row
    if (checkpoints.rows == row).any() and not (known and held == row):
        raise InvariantError(f"row {row} holds another prefix already")
    surplus = row if known and held != row else 0
    for checkpoint in known:
        if checkpoints.roles[index_of(checkpoints, checkpoint)] == role:
            return Published(touch(checkpoints, checkpoint, demand_ns), checkpoint, surplus)
    checkpoint = checkpoints.last_id + 1
    entry = (checkpoint, endpoint, int(role), held, demand_ns, 0)
    columns = [np.append(getattr(checkpoints, n), v).astype(np.int64) for n, v in zip(COLUMNS, entry, strict=True)]
    shared = checkpoints.pages[index_of(checkpoints, known[0])] if known else tuple(pages)
    added = _sealed(columns, (*checkpoints.keys, key), (*checkpoints.pages, shared), checkpoint)
    return Published(added, checkpoint, surplus)


def identify(rows: Rows, checkpoints: Checkpoints, checkpoint: int, key: Key) -> Identified:
    """Give a checkpoint (and its aliases) the caller's key; a prefix that is known makes its row surplus.

    Raises:
        InvariantError: A restore reads the row that would become surplus, or lengths differ.
    """
    index = index_of(checkpoints, checkpoint)
    row = int(checkpoints.rows[index])
    aliases = np.flatnonzero(checkpoints.rows == row).tolist()
    known = [i for i, held in enumerate(checkpoints.keys) if held == key and i not in aliases]
    if known and checkpoints.endpoints[known[0]] != checkpoints.endpoints[index]:
        raise InvariantError(f"the key of checkpoint {checkpoints.ids[known[0]]} covers another number of tokens too")
    if known and checkpoints.pins[aliases].any():
        raise InvariantError(f"checkpoint {checkpoint} is being restored, it cannot move to another row")
    keys, pages, columns = list(checkpoints.keys), list(checkpoints.pages), checkpoints.rows.copy()
    merged: dict[int, int] = {}
    for i in aliases:
        keys[i] = key
        if known:
            pages[i], columns[i] = pages[known[0]], checkpoints.rows[known[0]]
            twins = [twin for twin in known if checkpoints.roles[twin] == checkpoints.roles[i]]
            merged |= {int(checkpoints.ids[i]): int(checkpoints.ids[twin]) for twin in twins}
    columns.setflags(write=False)
    named = dataclasses.replace(checkpoints, rows=columns, keys=tuple(keys), pages=tuple(pages))
    for old, twin in merged.items():
        named = touch(named, twin, int(named.demand_ns[index_of(named, old)]))
    named = without(named, [index_of(named, old) for old in merged])
    return Identified(state_rows.free_published(rows, row) if known else rows, named, merged)


def touch(checkpoints: Checkpoints, checkpoint: int, now_ns: int) -> Checkpoints:
    """A request asks for the prefix now; an older time than the known one changes nothing."""
    index = index_of(checkpoints, checkpoint)
    return _with(checkpoints, "demand_ns", index, max(now_ns, int(checkpoints.demand_ns[index])))


def pin(checkpoints: Checkpoints, checkpoint: int) -> Checkpoints:
    """A restore from the checkpoint begins: its row is no victim until `unpin`."""
    index = index_of(checkpoints, checkpoint)
    return _with(checkpoints, "pins", index, int(checkpoints.pins[index]) + 1)


def unpin(checkpoints: Checkpoints, checkpoint: int) -> Checkpoints:
    """A restore ended.

    Raises:
        InvariantError: None was running.
    """
    index = index_of(checkpoints, checkpoint)
    if checkpoints.pins[index] < 1:
        raise InvariantError(f"checkpoint {checkpoint} is not pinned")
    return _with(checkpoints, "pins", index, int(checkpoints.pins[index]) - 1)


def victim_order(checkpoints: Checkpoints, in_use: Collection[int] = ()) -> np.ndarray:
    """Positions of the checkpoints, the least protected first; int64 [n].

    The order: the older demand goes first, and what a resident request took or was restored from
    (`in_use`) is in demand now, after all others; of equal demand the smaller role (extra, prompt
    end, terminal, anchor: the conversation's next turn most likely begins at the anchor, and an
    extra is a second chance only); of equal roles the shorter prefix, which is cheapest to compute
    again; then the older id.
    """
    present = np.array([checkpoint in in_use for checkpoint in checkpoints.ids.tolist()], np.bool_)
    return np.lexsort((checkpoints.ids, checkpoints.endpoints, checkpoints.roles, checkpoints.demand_ns, present))


class Claim(NamedTuple):
    """What a capture of a resident request would be worth: compared like the columns of `victim_order`."""

    demand_ns: int
    role: Role
    endpoint: int


def victim_row(checkpoints: Checkpoints, claim: Claim | None = None, in_use: Collection[int] = ()) -> int:
    """The row that the allocator would evict next, 0 when there is none.

    A row counts as its most protected alias does; rows that a restore reads are no victims. Nor
    are those that are more protected than the claim, if there is one: an extra does not take the
    row of its own anchor, nor an earlier request that of a later one that is resident too.
    """
    rows, aliases = ranked_rows(checkpoints, in_use)
    if not len(rows):
        return 0
    row, best = int(rows[0]), int(aliases[0])
    if claim is None or checkpoints.ids[best] not in in_use:
        return row
    worth = (int(checkpoints.demand_ns[best]), int(checkpoints.roles[best]), int(checkpoints.endpoints[best]))
    return row if worth <= tuple(claim) else 0


def ranked_rows(checkpoints: Checkpoints, in_use: Collection[int] = ()) -> tuple[np.ndarray, np.ndarray]:
    """Rows that no restore reads, the least protected first, and the position of the most protected alias of each."""
    if not len(checkpoints):
        return np.zeros(0, np.int64), np.zeros(0, np.int64)
    order = victim_order(checkpoints, in_use)
    place = np.empty_like(order)
    place[order] = np.arange(len(order))
    protection = np.full(int(checkpoints.rows.max()) + 1, -1, np.int64)
    np.maximum.at(protection, checkpoints.rows, place)
    protection[checkpoints.rows[checkpoints.pins > 0]] = -1
    rows = np.flatnonzero(protection >= 0)
    rows = rows[protection[rows].argsort()]
    return rows, order[protection[rows]]


def freed_by(checkpoints: Checkpoints, evicted: Collection[int], used_pages: Collection[int] = ()) -> Freed:
    """Rows and pages that nobody holds once `evicted` are gone; `used_pages` are held by requests."""
    if not evicted:
        return Freed((), ())
    gone = np.isin(checkpoints.ids, list(evicted))
    rows = set(checkpoints.rows[gone].tolist()) - set(checkpoints.rows[~gone].tolist())
    pages: dict[bool, set[int]] = {True: set(), False: set(used_pages)}
    for leaves, held in zip(gone.tolist(), checkpoints.pages, strict=True):
        pages[leaves].update(held)
    return Freed(tuple(sorted(rows)), tuple(sorted(pages[True] - pages[False])))


def without(checkpoints: Checkpoints, gone: list[int]) -> Checkpoints:
    """The others, when the checkpoints at positions `gone` are withdrawn."""
    keep = np.setdiff1d(np.arange(len(checkpoints)), gone)
    keys, pages = (tuple(values[i] for i in keep.tolist()) for values in (checkpoints.keys, checkpoints.pages))
    return _sealed([getattr(checkpoints, name)[keep] for name in COLUMNS], keys, pages, checkpoints.last_id)


def evict(rows: Rows, checkpoints: Checkpoints, checkpoint: int) -> tuple[Rows, Checkpoints]:
    """Withdraw one checkpoint; its row is free if it was the last alias.

    Raises:
        InvariantError: A restore reads its row, and it is the last alias.
    """
    index = index_of(checkpoints, checkpoint)
    row = int(checkpoints.rows[index])
    if checkpoints.pins[index]:
        raise InvariantError(f"checkpoint {checkpoint} is being restored")
    left = without(checkpoints, [index])
    return (rows if (left.rows == row).any() else state_rows.free_published(rows, row)), left


def _with(checkpoints: Checkpoints, name: str, index: int, value: int) -> Checkpoints:
    column = getattr(checkpoints, name).copy()
    column[index] = value
    column.setflags(write=False)
    return dataclasses.replace(checkpoints, **{name: column})


def _sealed(
    columns: list[np.ndarray], keys: tuple[Key, ...], pages: tuple[tuple[int, ...], ...], last_id: int
) -> Checkpoints:
    for column in columns:
        column.setflags(write=False)
    ids, endpoints, roles, rows, demand_ns, pins = columns
    return Checkpoints(ids, endpoints, roles, rows, demand_ns, pins, keys, pages, last_id)
