"""Adaptive speculation against "off" and every fixed width, in virtual time: the tables of docs/LOG.md.

    python -m benchmarks.speculation_sim --costs FILE --acceptance FILE [--profiles ID ...] [--cases NAME ...]
        [--streams 1 8 64] [--outputs 128 384] [--policy balanced] [--frames 2] [--seconds 60]
        [--rectangular]

Rows are Markdown. Rates are output tokens a second after the warm-up; `ratio` is adaptive over the better of "off" and
every fixed width, after the warm-up and (`whole run`) with discovery and learning from the first token on. Programs are
those that a core of that method holds for 64 slots.
"""

from __future__ import annotations

import argparse
import dataclasses
from collections.abc import Mapping
from pathlib import Path

from helios_jax.aot.speculation import DEFAULT_DRAFT_TOKENS, default_rows, round_shapes, widths
from helios_jax.scheduler.catalog import Catalog, ProgramKind, ProgramShape, powers_of_two
from helios_jax.simulation.acceptance import load_acceptance
from helios_jax.simulation.profiles import CostProfile, load_profile, profile_ids
from helios_jax.simulation.streams import Drafter, Streams, Yield, after, alternating, by_request, constant, run_streams

SLOTS = 64
LOADS = (1, 2, 4, 8, 16, 32, 64)
PROMPTS = tuple((rows, tokens) for tokens in (64, 256, 512) for rows in (1, 8))
WARM_SHARE = 0.25
CHANGE, LONG = 500, (900, 1100)  # acceptance changes once in a long output; estimates have a half-life of 128 tokens
CASES = (
    "published", "deep", "worst", "mixed", "none", "all", "fades", "awakes", "sure",
    "copies", "repeats", "no copy fits",
)  # fmt: skip


@dataclasses.dataclass(frozen=True, kw_only=True)
class Case:
    """What is proposed, and what it costs: `method` of cores ("draft", "copy"), `cost` of profiles.

    `outputs` are the lengths of requests where they matter to the case.
    """

    drafter: Drafter
    method: str
    cost: str
    outputs: tuple[int, int] | None = None


def cases(acceptance: str) -> Mapping[str, Case]:
    """Every acceptance that is tried, by name.

    Args:
        acceptance: File of published rates.
    """
    depth, copied = DEFAULT_DRAFT_TOKENS["draft"], DEFAULT_DRAFT_TOKENS["copy"]
    eagle = load_acceptance(f"{acceptance}:eagle3/Llama-3.1-8B-Instruct")
    mtp = load_acceptance(f"{acceptance}:mtp (multi-layer)")
    poor = load_acceptance(f"{acceptance}:eagle3 tree logs")
    edits = load_acceptance(f"{acceptance}:ngram")
    none, every, good = constant(0.0, depth), constant(1.0, depth), constant(0.9, depth)
    right, wrong = constant(0.95, copied), constant(0.1, copied)

    def drafted(*tables: object, cost: str = "eagle3", **others: object) -> Case:
        return Case(drafter=Drafter(tables=tables, **others), method="draft", cost=cost)  # type: ignore[arg-type]

    def found(*tables: object, **others: object) -> Case:
        return Case(drafter=Drafter(tables=tables, **others), method="copy", cost="ngram")  # type: ignore[arg-type]

    return {
        "published": drafted(eagle),
        "deep": drafted(mtp, cost="mtp"),
        "worst": drafted(poor),
        "mixed": drafted(none, poor, eagle, good, kinds=by_request(4)),
        "none": drafted(none),
        "all": drafted(every),
        "fades": dataclasses.replace(drafted(good, none, kinds=after(CHANGE)), outputs=LONG),
        "awakes": dataclasses.replace(drafted(none, good, kinds=after(CHANGE)), outputs=LONG),
        "sure": drafted(none, shown=(good,)),
        "copies": found(edits, found=(0.8,)),
        "repeats": found(right, wrong, found=(0.95, 0.15), kinds=alternating(0.4)),
        "no copy fits": found(constant(0.0, copied), found=(0.7,)),
    }


def core_catalog(method: str, depth: int, only: int | None = None, *, rectangular: bool = False) -> Catalog:
    """Programs of a core with 64 slots.

    Without a draft context plain decode is width one; with one, width-one rounds keep it.

    Args:
        depth: D.
        only: Rounds of this width and of width one; None = all.
        rectangular: Leave out the ragged rounds, which host or device allocate.
    """
    kind, rows = ProgramKind, powers_of_two(SLOTS)
    rounds = round_shapes(
        method=method, max_slots=SLOTS, draft_tokens=depth, token_capacity=default_rows(SLOTS, depth)
    )  # fmt: skip
    shapes = [shape for shape in rounds if only is None or not shape.proposal_depth or shape.token_capacity == only]
    if rectangular:
        shapes = [shape for shape in shapes if shape.packed_capacity == shape.batch_capacity * shape.token_capacity]
    shapes += [ProgramShape(kind.INITIALIZE, b, 0) for b in (1, SLOTS)]
    shapes += [ProgramShape(kind.PREFILL, b, tokens) for b, tokens in PROMPTS]
    if method == "copy":
        shapes += [ProgramShape(kind.DECODE, b, 1) for b in rows]
    return Catalog(tuple(shapes))


def seconds_of(streams: int) -> float:
    """Few streams need longer for their chances to even out."""
    return max(8.0, 24.0 / streams)


def compare(
    case: Case, profile: CostProfile, streams: int, seconds: float, *, rectangular: bool = False, **others: object
) -> dict[str, Yield]:
    """Yields of `off`, of each width and of `adaptive`, by name."""
    depth = DEFAULT_DRAFT_TOKENS[case.method]
    if case.outputs is not None:
        others["outputs"] = case.outputs

    def run(mode: str, only: int | None) -> Yield:
        return run_streams(
            Streams(
                profile=profile, catalog=core_catalog(case.method, depth, only, rectangular=rectangular), mode=mode,
                streams=streams, seconds=seconds, warm_seconds=WARM_SHARE * seconds, method=case.cost, **others,  # type: ignore[arg-type]
            ),
            case.drafter,
        )  # fmt: skip

    found = {"off": run("off", 0)}
    found |= {str(width): run("fixed", width) for width in widths(depth)}
    return {**found, "adaptive": run("adaptive", None)}


def ratios(found: Mapping[str, Yield]) -> tuple[float, float]:
    """Adaptive over the best of the others: after the warm-up, and over the whole run."""
    others = [made for name, made in found.items() if name != "adaptive"]
    adaptive = found["adaptive"]
    return adaptive.warm / max(made.warm for made in others), adaptive.cold / max(made.cold for made in others)


def main() -> None:
    own = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0], allow_abbrev=False)
    own.add_argument("--costs", type=Path, required=True)
    own.add_argument("--acceptance", required=True)
    own.add_argument("--profiles", nargs="+")
    own.add_argument("--cases", nargs="+", choices=CASES, default=list(CASES))
    own.add_argument("--streams", type=int, nargs="+", default=list(LOADS))
    own.add_argument("--outputs", type=int, nargs=2, default=[128, 384])
    own.add_argument("--policy", default="balanced")
    own.add_argument("--frames", type=int, default=2)
    own.add_argument("--rectangular", action="store_true", help="cores without ragged rounds")
    own.add_argument("--seconds", type=float, help="of every run; without it, by the number of streams")
    options = own.parse_args()
    known = cases(options.acceptance)
    columns = ("profile", "proposals", "streams", "off", "fixed", "adaptive", "ratio", "whole run")
    print(f"| {' | '.join(columns)} |\n|{'---|' * len(columns)}")
    for profile_id in options.profiles or profile_ids(options.costs):
        profile = load_profile(options.costs, profile_id)
        for name in options.cases:
            for streams in options.streams:
                seconds = options.seconds or seconds_of(streams)
                found = compare(
                    known[name], profile, streams, seconds, outputs=tuple(options.outputs), policy=options.policy,
                    frames=options.frames, rectangular=options.rectangular,
                )  # fmt: skip
                fixed = ", ".join(f"{w}: {m.warm:.0f}" for w, m in found.items() if w not in ("off", "adaptive"))
                warm, cold = ratios(found)
                cells = [profile_id, name, str(streams), f"{found['off'].warm:.0f}", fixed]
                print(f"| {' | '.join(cells)} | {found['adaptive'].warm:.0f} | {warm:.3f} | {cold:.3f} |", flush=True)


if __name__ == "__main__":
    main()
