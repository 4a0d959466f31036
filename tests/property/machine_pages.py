"""Pages in the naive model: promises, shares, who is starved and who gives way; one page and one request at a time.

Pages have an identity and no number: tables of jobs and rows are lists of them.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from helios_jax.scheduler import RequestSpec, ScheduledPlan, State
from tests.property.machine_jobs import Job, Page, ceil_div

if TYPE_CHECKING:
    from tests.property.machine_model import Model

MOST_PREEMPTIONS = 2


def worst(model: Model, spec: RequestSpec) -> int:
    total = len(spec.prompt) + spec.max_tokens + model.limits.draft_extent
    return ceil_div(total, model.limits.page_size)


def at_admission(model: Model, spec: RequestSpec) -> int:
    """Prompt and one step; half of the rest after one preemption, all of it after two."""
    first = ceil_div(
        len(spec.prompt) + (1 if spec.max_tokens else 0) + model.limits.draft_extent, model.limits.page_size
    )
    rest = worst(model, spec) - first
    return first + (0 if not spec.preemptions else ceil_div(rest, 2) if spec.preemptions == 1 else rest)


def in_tables(model: Model) -> set[Page]:
    return {page for job in model.jobs for page in job.table}


def spare(model: Model) -> int:
    """Pages in no table, however many share them, and promised to nobody."""
    beyond = sum(job.promised - len(job.table) for job in model.jobs)
    return model.limits.pages - len(in_tables(model)) - beyond


def shared(model: Model, table: list[Page], endpoint: int) -> list[Page]:
    """Of the pages of `endpoint` tokens those that nobody writes again: a draft may still write its last row."""
    whole = endpoint - 1 if model.limits.draft_extent else endpoint
    return [page for number, page in enumerate(table) if (number + 1) * model.limits.page_size <= whole]


def of_source(model: Model, spec: RequestSpec, state: State) -> list[Page]:
    """What a request begins its table with."""
    known = state.retention.checkpoints
    rows = dict(zip(known.ids.tolist(), known.rows.tolist(), strict=True))
    return list(model.kept[rows[spec.restore_from]]) if spec.restore_from else []


def check_identity(model: Model, state: State) -> None:
    """The numbers of pages are those of the model's pages, one for one, in the order of the tables."""
    pairs = [(job.table, state.pool.tables[job.handle.slot].tolist()) for job in model.jobs]
    known = state.retention.checkpoints
    pairs += [(model.kept[row], list(pages)) for row, pages in zip(known.rows.tolist(), known.pages, strict=True)]
    numbers: dict[Page, int] = {}
    for mine, theirs in pairs:
        assert len(mine) == len(theirs)
        for page, number in zip(mine, theirs, strict=True):
            assert numbers.setdefault(page, number) == number
    free = state.pool.free[: state.pool.num_free].tolist()
    assert sorted([*numbers.values(), *free]) == list(range(1, model.limits.pages + 1))


def headroom(model: Model) -> int:
    """The next page of everybody who may still grow, and as many as its next token needs."""
    pages = 0
    for job in model.running():
        growth = worst(model, job.spec) - job.promised
        next_token = ceil_div(job.written + 1 + model.limits.draft_extent, model.limits.page_size) - job.promised
        pages += min(growth, max(1, next_token))
    return pages


def fits(model: Model, spec: RequestSpec, state: State) -> bool:
    there = len(in_tables(model) & set(of_source(model, spec, state)))
    return at_admission(model, spec) - there + headroom(model) <= spare(model)


def lacking(model: Model) -> dict[int, int]:
    """Starved streams by key, with the pages that they miss for one more token once the older ones had theirs.

    Of streams whose flights certainly end them nobody asks.
    """
    wanted, short = 0, {}
    for job in sorted((job for job in model.jobs if job.streams), key=lambda job: job.key):
        if model.queued(job)[0] >= job.spec.max_tokens - len(job.out):
            continue
        end = job.committed + model.ahead(job) + 1 + model.limits.draft_extent
        need = max(0, ceil_div(end, model.limits.page_size) - job.promised)
        wanted += need
        if need and wanted > spare(model):  # nobody overtakes an older one that waits for pages
            short[job.key] = min(need, wanted - spare(model))
    return short


def loss(model: Model, job: Job, state: State) -> int:
    """Tokens to compute again: behind the longest checkpoint of its own that is still there."""
    if job.stage in ("initialize", "external") or (job.stage == "restore" and not job.window_restore):
        return 0
    present = set(state.retention.checkpoints.ids.tolist())
    ends = [model.checkpoints[number][1] for number in state.retention.used[job.handle.slot] if number in present]
    return job.committed - max(ends, default=0 if job.spec.restore_from else job.spec.restored_len)


def victim(model: Model, state: State, *, drained: bool) -> Job | None:
    """Who gives way; without `drained`, who would once the flights are over."""
    short = lacking(model)
    if not short or (drained and model.flights):
        return None
    oldest = min((job for job in model.jobs if job.key in short), key=lambda job: job.key)
    queued = [job for job in model.running() if model.queued(job)[0]]
    over = [job for job in queued if model.queued(job)[0] >= job.spec.max_tokens - len(job.out)]
    leaving = [job for job in model.jobs if job.ended is not None] + over
    if sum(job.promised for job in leaving) >= short[oldest.key]:
        return None
    present = [job for job in model.running() if job not in over]
    growing = [job for job in present if job.promised < worst(model, job.spec)]
    candidates = [
        job for job in present
        if job.spec.preemptions < MOST_PREEMPTIONS and any(other is not job for other in growing)
    ]  # fmt: skip
    return min(candidates, key=lambda job: (_lost(model, job, state), -job.key), default=None)


def _lost(model: Model, job: Job, state: State) -> int:
    return loss(model, job, state) + (model.ahead(job) if job.streams else 0)


def beyond_promises(model: Model, plan: ScheduledPlan) -> int:
    """Pages that a plan needs beyond what its requests were promised."""
    more = 0
    for lane in plan.lanes:
        job = model.job_of(lane.handle)
        if job is not None:
            more += max(0, ceil_div(model.reach(plan, lane, job), model.limits.page_size) - job.promised)
    return more
