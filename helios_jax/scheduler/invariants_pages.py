"""Invariants of pages and of promises of them, recounted from tables, rows and specs (see `invariants`)."""

from __future__ import annotations

import collections

import numpy as np

from helios_jax.scheduler.reservation import MAX_PREEMPTIONS
from helios_jax.scheduler.resources import pages_for, shared_pages
from helios_jax.scheduler.state import FREE, State


def page_holders(state: State) -> str | None:
    """Every page is free or held; the ledger's counts of holders are those of the tables and rows."""
    pool, pages = state.pool, state.limits.pages
    free = pool.free[: pool.num_free].tolist()
    users = collections.Counter(page for table in pool.tables for page in table.tolist())
    keepers = collections.Counter(page for row in pool.rows for page in row)
    held = users.keys() | keepers.keys()
    if sorted([*free, *held]) != list(range(1, pages + 1)):
        return f"{len(free)} pages are free and {len(held)} held, of {pages}"
    if any(len(set(table.tolist())) < len(table) for table in pool.tables):
        return "a table has a page twice"
    for name, counts, ledger in (("tables", users, pool.users), ("rows", keepers, pool.keepers)):
        if ledger.tolist() != [counts[page] for page in range(pages + 1)]:
            return f"pages are in so many {name}: {counts}, the ledger says {ledger}"
    return f"{len(users)} pages are in tables, the ledger says {pool.used}" if pool.used != len(users) else None


def sharing(state: State) -> str | None:
    """Rows keep what their checkpoints name; whoever has a page with others goes on behind it."""
    pool, limits, known = state.pool, state.limits, state.retention.checkpoints
    named = dict(zip(known.rows.tolist(), known.pages, strict=True))
    if pool.rows != tuple(named.get(row, ()) for row in range(1, limits.state_rows + 1)):
        return f"rows keep {pool.rows}, checkpoints share {named}"
    for endpoint, pages in zip(known.endpoints.tolist(), known.pages, strict=True):
        if len(pages) != shared_pages(endpoint, limits.page_size, limits.draft_extent):
            return f"a checkpoint of {endpoint} tokens shares {len(pages)} pages"
    holders = pool.users + pool.keepers
    for slot, table in enumerate(pool.tables):
        behind = shared_pages(int(state.requests.committed_len[slot]), limits.page_size, limits.draft_extent)
        if (holders[table[max(behind, 0) :]] > 1).any():
            return (
                f"slot {slot} writes behind {state.requests.committed_len[slot]}, of its pages {table} others hold some"
            )
    return None


def promises(state: State) -> str | None:
    """Promises are within what their specs allow, and admissions number the residents."""
    requests, size = state.requests, state.limits.page_size
    residents = np.flatnonzero(requests.phase != FREE)
    for slot in residents.tolist():
        spec, mine = state.specs[slot], int(requests.reserved_pages[slot])
        if spec is None:
            return f"slot {slot} has no spec"
        worst = pages_for(len(spec.prompt) + spec.max_tokens + state.limits.draft_extent, size)
        first = pages_for(len(spec.prompt) + min(1, spec.max_tokens) + state.limits.draft_extent, size)
        least = worst if spec.preemptions >= MAX_PREEMPTIONS else first
        if requests.worst_pages[slot] != worst or not least <= mine <= worst:
            return f"slot {slot} is promised {mine} pages, {least} at least, of {requests.worst_pages[slot]} ({worst})"
    numbers = requests.admission[residents]
    if len(np.unique(numbers)) != len(numbers) or ((numbers < 1) | (numbers > state.counters.admitted)).any():
        return f"admissions {numbers} of {state.counters.admitted}"
    return None
