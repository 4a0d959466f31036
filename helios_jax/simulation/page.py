"""The page of a simulation: one HTML file that needs nothing else, with plots as inline SVG."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from html import escape

import numpy as np

from helios_jax.simulation.experiment import Experiment, Outcome
from helios_jax.simulation.plots import Axis, Figure, linear, logarithmic
from helios_jax.simulation.report import as_json, first_outputs_ms, gaps_ms
from helios_jax.simulation.traces import CREDITS, Trace

QUANTILES = 400
PROFILE_CREDIT = "derived from AIConfigurator (Apache-2.0) and Vidur (MIT) measurements"
ACCEPTANCE_CREDIT = "published by vLLM, SGLang SpecForge and InferenceX (Apache-2.0, MIT)"


@dataclasses.dataclass(frozen=True, kw_only=True)
class Load:
    """One point of the curve of goodput over load.

    Attributes:
        policy: What ran.
        speed: Factor on the arrivals of the trace.
        offered_per_s: Requests that arrived a second.
        goodput: Share of them within both objectives, None without requests.
        output_tokens_per_s: Produced while requests arrived.
        ttft_p99_ms, gap_p99_ms: None without outputs.
    """

    policy: str
    speed: float
    offered_per_s: float
    goodput: float | None
    output_tokens_per_s: float
    ttft_p99_ms: float | None
    gap_p99_ms: float | None


def load_of(speed: float, outcome: Outcome) -> Load:
    """The point that a run gives."""
    report = outcome.report
    return Load(
        policy=report["policy"],
        speed=speed,
        offered_per_s=outcome.offered_per_s,
        goodput=report["goodput"],
        output_tokens_per_s=report["output_tokens_per_s"],
        ttft_p99_ms=report["ttft_ms"]["p99"],
        gap_p99_ms=report["gap_ms"]["p99"],
    )


def make_page(
    experiment: Experiment, trace: Trace, outcome: Outcome, speed: float, loads: Sequence[Load], load_seconds: float
) -> str:
    """The whole page.

    Args:
        experiment, trace, outcome: The run that the report is about.
        speed: Its factor on arrivals.
        loads: Runs at several speeds, this one among them, and of other policies to compare with.
        load_seconds: How long requests arrived in each of those.
    """
    sections = [
        ("Time to first token", _first_outputs(experiment, outcome), "Arrival to first visible output, every request."),
        ("Token gaps", _gaps(experiment, outcome), "Between visible outputs of a request; a burst counts once."),
        ("Goodput over load", _goodput(loads, experiment.policy, speed), _loads_note(experiment, loads, load_seconds)),
        ("Program mix over time", _mix(experiment, outcome), "Share of each interval that the device ran each kind."),
        ("Prices of one request over its life", *_prices(experiment, outcome, trace)),
    ]
    body = "\n".join(
        f"<section><h2>{escape(title)}</h2>{plot}<p>{note}</p></section>" for title, plot, note in sections
    )
    return _PAGE.format(
        title=escape(f"{experiment.policy} on {experiment.profile.profile_id}"),
        style=_STYLE,
        settings=_settings(experiment, trace, speed),
        tiles=_tiles(outcome),
        body=body,
        report=escape(as_json(outcome.report)),
        credits=_credits(experiment, trace),
    )


def _settings(experiment: Experiment, trace: Trace, speed: float) -> str:
    profile, table = experiment.profile, experiment.acceptance
    parts = [
        f"{profile.model} on {profile.gpu} ({profile.profile_id})",
        f"trace {trace.name}, speed {speed:g}, {experiment.seconds:g} s, seed {experiment.seed}",
        f"{experiment.slots} slots, chunk {experiment.prefill_chunk}, context {experiment.max_context}",
        f"acceptance {table.name}" if table else "no speculation",
    ]
    return " · ".join(escape(part) for part in parts)


def _tiles(outcome: Outcome) -> str:
    report, requests = outcome.report, outcome.report["requests"]
    tiles = [
        ("requests", f"{requests['completed']} of {requests['arrived']}"),
        ("goodput", _percent(report["goodput"])),
        ("TTFT p50 / p99", f"{_ms(report['ttft_ms']['p50'])} / {_ms(report['ttft_ms']['p99'])}"),
        ("gap p50 / p99", f"{_ms(report['gap_ms']['p50'])} / {_ms(report['gap_ms']['p99'])}"),
        ("output", f"{report['output_tokens_per_s']:.0f} tokens/s"),
        ("padding", _percent(report["padding_ratio"])),
    ]
    return "".join(f"<div><b>{escape(value)}</b>{escape(name)}</div>" for name, value in tiles)


def _percent(share: float | None) -> str:
    return "-" if share is None else f"{100 * share:.1f} %"


def _ms(value: float | None) -> str:
    return "-" if value is None else f"{value:.0f} ms"


def _first_outputs(experiment: Experiment, outcome: Outcome) -> str:
    waits = first_outputs_ms(outcome.requests)
    arrivals = np.array([request.arrival_ns / 1e9 for request in outcome.requests if request.first_ns])
    if not len(waits):
        return _NOTHING
    limit = experiment.objectives.ttft_ms
    figure = Figure("Distribution of the time to first token", logarithmic("ms, logarithmic", waits), _SHARE)
    figure.line(_distribution(waits), 0)
    figure.limit(limit, f"objective {limit:g} ms", vertical=True)
    over_time = Figure("Time to first token over time", linear("s", arrivals), logarithmic("ms, logarithmic", waits))
    over_time.cloud(np.stack([arrivals, waits], axis=1), 0)
    over_time.limit(limit, f"objective {limit:g} ms", vertical=False)
    return figure.svg() + over_time.svg()


def _gaps(experiment: Experiment, outcome: Outcome) -> str:
    gaps, limit = gaps_ms(outcome.requests), experiment.objectives.gap_ms
    if not len(gaps):
        return _NOTHING
    figure = Figure("Distribution of the gaps between outputs", logarithmic("ms, logarithmic", gaps), _SHARE)
    figure.line(_distribution(gaps), 1)
    figure.limit(limit, f"objective {limit:g} ms", vertical=True)
    return figure.svg()


def _distribution(values: np.ndarray) -> np.ndarray:
    """[n, 2] (value, share of values at most that)."""
    shares = np.linspace(0.0, 1.0, QUANTILES)
    return np.stack([np.quantile(values, shares), shares], axis=1)


def _goodput(loads: Sequence[Load], policy: str, speed: float) -> str:
    """A line a policy; the point of the run that the page is about is marked."""
    known = [load for load in loads if load.goodput is not None]
    if not known:
        return _NOTHING
    figure = Figure(
        "Goodput over load",
        linear("requests a second", [load.offered_per_s for load in known]),
        Axis(label="share within objectives", low=0.0, high=1.0),
    )
    policies = sorted({load.policy for load in known}, key=lambda name: (name != policy, name))
    for colour, name in enumerate(policies):
        own = sorted((load for load in known if load.policy == name), key=lambda load: load.offered_per_s)
        figure.line(np.array([(load.offered_per_s, load.goodput) for load in own], np.float64), colour, name)
        figure.points([_mark(load) for load in own], colour)
    given = [_mark(load) for load in known if (load.policy, load.speed) == (policy, speed)]
    figure.points(given, len(policies))
    return figure.svg() + _load_table([load for name in policies for load in known if load.policy == name])


def _mark(load: Load) -> tuple[float, float, str]:
    return load.offered_per_s, load.goodput or 0.0, f"{load.policy}, speed {load.speed:g}: {_percent(load.goodput)}"


def _load_table(loads: Sequence[Load]) -> str:
    names = ("policy", "speed", "requests/s", "goodput", "tokens/s", "TTFT p99", "gap p99")
    head = f"<tr>{''.join(f'<th>{name}</th>' for name in names)}</tr>"
    rows = [
        f"<tr><td>{load.policy}</td><td>{load.speed:g}</td><td>{load.offered_per_s:.2f}</td>"
        f"<td>{_percent(load.goodput)}</td><td>{load.output_tokens_per_s:.0f}</td><td>{_ms(load.ttft_p99_ms)}</td>"
        f"<td>{_ms(load.gap_p99_ms)}</td></tr>"
        for load in loads
    ]
    return f"<table>{head}{''.join(rows)}</table>"


def _loads_note(experiment: Experiment, loads: Sequence[Load], load_seconds: float) -> str:
    limits = experiment.objectives
    return escape(
        f"Good: first token within {limits.ttft_ms:g} ms and the 99th percentile of a request's own gaps within "
        f"{limits.gap_ms:g} ms. {len(loads)} runs of {load_seconds:g} s; the given speed is marked."
    )


def _mix(experiment: Experiment, outcome: Outcome) -> str:
    recorder = outcome.recorder
    if not recorder.mix:
        return _NOTHING
    count = 1 + max(max(buckets) for buckets in recorder.mix.values())
    kinds = sorted(recorder.mix, key=lambda kind: -sum(recorder.mix[kind].values()))
    group = -(-count // 120)  # a long drain has more intervals than the plot has room for
    shares = np.zeros((len(kinds), -(-count // group)))
    for row, kind in enumerate(kinds):
        for bucket, device_ns in recorder.mix[kind].items():
            shares[row, bucket // group] += device_ns / (recorder.bucket_s * group * 1e9)
    edges = np.arange(shares.shape[1] + 1) * recorder.bucket_s * group
    top = Axis(label="share of time", low=0.0, high=1.0)
    figure = Figure("Program mix over time", linear("s", edges), top)
    figure.bars(edges, shares, [kind.replace("_", " ") for kind in kinds])
    return figure.svg()


def _prices(experiment: Experiment, outcome: Outcome, trace: Trace) -> tuple[str, str]:
    recorder = outcome.recorder
    prices = np.array(recorder.prices, np.float64).reshape(-1, 3)
    values = prices[:, 1:][np.isfinite(prices[:, 1:]) & (prices[:, 1:] > 0)]
    if not len(values):
        return _NOTHING, "No request was followed."
    number = recorder.tracked
    seconds = prices[:, 0]
    span = Axis(label="s", low=float(seconds.min()), high=max(float(seconds.max()), float(seconds.min()) + 1e-3))
    figure = Figure("Prices of one request", span, logarithmic("value, logarithmic", values))
    figure.line(prices[:, [0, 1]], 0, "next token (intrinsic value + fairness / rate)")
    figure.line(prices[:, [0, 2]], 1, "next delivery (fairness / rate)")
    prompt, output, at_s = (column[number].item() for column in (trace.prompt_len, trace.output_len, trace.at_s))
    note = f"Request {number}: {prompt} prompt and {output} output tokens, arrived at {at_s:.2f} s."
    if experiment.policy not in ("balanced", "throughput"):
        note += f" {experiment.policy} does not look at prices."
    return figure.svg(), escape(note)


def _credits(experiment: Experiment, trace: Trace) -> str:
    parts = [f"Cost profile {experiment.profile.profile_id}: {PROFILE_CREDIT}."]
    if CREDITS[trace.kind]:
        parts.append(f"Trace in the format of {CREDITS[trace.kind]}.")
    if experiment.acceptance:
        parts.append(f"Acceptance {experiment.acceptance.name}: {ACCEPTANCE_CREDIT}.")
    return escape(" ".join(parts))


_SHARE = Axis(label="share of all", low=0.0, high=1.0)
_NOTHING = "<p>Nothing was observed.</p>"
# One colour a series, for light and for dark paper.
_LIGHT = ("#0b6fb8", "#c8511b", "#00806a", "#a4357f", "#8a6d00", "#4a4fb5", "#6b7780", "#b03030", "#3d3d3d")
_DARK = ("#62b3ee", "#f09055", "#4cc9ae", "#e384c3", "#d9b93f", "#a0a5ff", "#a5b0b8", "#f07f7f", "#d5d5d5")


def _palette(colours: Sequence[str]) -> str:
    return " ".join(f".c{number} {{ color: {colour}; }}" for number, colour in enumerate(colours))


_STYLE = f"""
:root {{ --paper: #fff; --ink: #1d2328; --soft: #5b6670; --grid: #e3e7ea; }}
{_palette(_LIGHT)}
@media (prefers-color-scheme: dark) {{
:root {{ --paper: #14181b; --ink: #e6eaed; --soft: #a2adb6; --grid: #2b3238; }}
{_palette(_DARK)}
}}
body {{ margin: 0 auto; padding: 1.5rem; max-width: 1360px; background: var(--paper); color: var(--ink);
  font: 15px/1.45 system-ui, sans-serif; }}
h1 {{ font-size: 1.35rem; margin: 0; }} h2 {{ font-size: 1.05rem; margin: 0 0 .4rem; }}
p {{ color: var(--soft); margin: .3rem 0; }}
.tiles {{ display: flex; flex-wrap: wrap; gap: .6rem 2rem; margin: 1rem 0; color: var(--soft); }}
.tiles b {{ display: block; font-size: 1.15rem; color: var(--ink); }}
main {{ display: grid; grid-template-columns: repeat(auto-fit, minmax(min(100%, 480px), 1fr)); gap: 2rem; }}
svg {{ width: 100%; height: auto; display: block; }} svg text {{ font-size: 11px; }}
.ink {{ fill: var(--soft); }} .mid {{ text-anchor: middle; }} .end {{ text-anchor: end; }}
.grid {{ stroke: var(--grid); }} .rule {{ stroke: var(--soft); stroke-dasharray: 4 3; }}
.line {{ fill: none; stroke: currentColor; stroke-width: 1.8; }}
.dot {{ fill: currentColor; fill-opacity: .7; }} .bar {{ fill: currentColor; }}
.legend span {{ margin-right: 1rem; }}
.key {{ display: inline-block; width: .8em; height: .8em; margin-right: .35em; background: currentColor; }}
table {{ border-collapse: collapse; font-variant-numeric: tabular-nums; }}
th, td {{ padding: .15rem .8rem .15rem 0; text-align: right; font-weight: normal; }} th {{ color: var(--soft); }}
pre {{ overflow-x: auto; font-size: 12px; }} footer {{ margin-top: 2rem; font-size: 12px; color: var(--soft); }}
"""
_PAGE = """<!DOCTYPE html>
<html lang="en">
<head>
<meta charset="utf-8">
<meta name="viewport" content="width=device-width, initial-scale=1">
<title>{title}</title>
<style>{style}</style>
</head>
<body>
<h1>{title}</h1>
<p>{settings}</p>
<div class="tiles">{tiles}</div>
<main>
{body}
</main>
<details><summary>Report</summary><pre>{report}</pre></details>
<footer>{credits}</footer>
</body>
</html>
"""
