"""Pure scheduler of prepared programs: state + event -> state, state -> plan.

No jax, clock, random number, input or output, or log inside. `Scheduler` holds the state for
the engine; the functions are for tests, simulation and replay.
"""

from helios_jax.scheduler.admission import admit, can_admit
from helios_jax.scheduler.captures import demand_checkpoint, identify_checkpoint
from helios_jax.scheduler.catalog import MAX_SLOTS, Catalog, ProgramKind, ProgramShape, serving_catalog
from helios_jax.scheduler.completion import (
    complete,
    complete_packed_round,
    complete_packed_round_with_survival,
    complete_with_survival,
)
from helios_jax.scheduler.counters import snapshot_counters
from helios_jax.scheduler.invariants import check_invariants
from helios_jax.scheduler.lifecycle import (
    advance_to,
    cancel,
    commit,
    external_ready,
    finish,
    offer_copy,
    preempt,
)
from helios_jax.scheduler.policy import POLICY_PRESETS, PolicyConfig, plan_next, policy_preset
from helios_jax.scheduler.preemption import resumed, victim
from helios_jax.scheduler.publication import published_output, published_outputs
from helios_jax.scheduler.retirement import awaits_capture
from helios_jax.scheduler.scheduler import Scheduler
from helios_jax.scheduler.state import State, configure_policy, new_state, state_digest
from helios_jax.scheduler.types import (
    CheckpointPublished,
    CheckpointRole,
    CompletionRecord,
    Constraint,
    Event,
    ExecutionTiming,
    Fence,
    FinishReason,
    GeneratedToken,
    ImageSpan,
    Lane,
    LaneRole,
    Limits,
    RequestFinished,
    RequestHandle,
    RequestRebound,
    RequestSpec,
    ScheduledPlan,
    SelectionReason,
)

__all__ = [
    "MAX_SLOTS",
    "POLICY_PRESETS",
    "Catalog",
    "CheckpointPublished",
    "CheckpointRole",
    "CompletionRecord",
    "Constraint",
    "Event",
    "ExecutionTiming",
    "Fence",
    "FinishReason",
    "GeneratedToken",
    "ImageSpan",
    "Lane",
    "LaneRole",
    "Limits",
    "PolicyConfig",
    "ProgramKind",
    "ProgramShape",
    "RequestFinished",
    "RequestHandle",
    "RequestRebound",
    "RequestSpec",
    "ScheduledPlan",
    "Scheduler",
    "SelectionReason",
    "State",
    "admit",
    "advance_to",
    "awaits_capture",
    "can_admit",
    "cancel",
    "check_invariants",
    "commit",
    "complete",
    "complete_packed_round",
    "complete_packed_round_with_survival",
    "complete_with_survival",
    "configure_policy",
    "demand_checkpoint",
    "external_ready",
    "finish",
    "identify_checkpoint",
    "new_state",
    "offer_copy",
    "plan_next",
    "policy_preset",
    "preempt",
    "published_output",
    "published_outputs",
    "resumed",
    "serving_catalog",
    "snapshot_counters",
    "state_digest",
    "victim",
]
