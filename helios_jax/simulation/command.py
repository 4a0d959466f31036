"""`helios-jax simulate`: options in, a run or several, a report and a page out.

Errors of the caller are `ConfigError`s; the command line prints them as one line. Progress is shown
on standard error while it is a terminal. Without `--report` the report goes to standard output.
"""

from __future__ import annotations

import argparse
import concurrent.futures
import contextlib
import dataclasses
import multiprocessing
import os
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from helios_jax.errors import ConfigError
from helios_jax.scheduler.preferences import POLICY_PRESETS
from helios_jax.simulation.acceptance import acceptance_names, load_acceptance
from helios_jax.simulation.experiment import MIN_SECONDS, Experiment, Outcome, Progress, run_experiment
from helios_jax.simulation.page import Load, load_of, make_page
from helios_jax.simulation.profiles import load_profile, profile_ids
from helios_jax.simulation.report import Objectives, as_json
from helios_jax.simulation.traces import Trace, load_trace

LOAD_FACTORS = (0.5, 0.75, 1.0, 1.5, 2.0)  # of the given speed, for goodput over load
LOAD_SECONDS = 60.0
MAX_JOBS = 8


def simulate(options: argparse.Namespace) -> None:
    """Run the command.

    Raises:
        ConfigError: A file, a name or a number that cannot be used.
    """
    if options.list:
        _list(options)
        return
    experiment, source = experiment_of(options), source_of(options)
    _check_outputs(options)
    _check_used(options)
    trace = load_trace(speed=options.speed, **source)
    if not len(trace):
        hint = "try more --seconds, or another --start of a file"
        raise ConfigError(f"no request of {options.trace} arrives within {options.seconds:g} s; {hint}")
    with _bar("simulating") as progress:
        outcome = run_experiment(experiment, trace, progress)
    _write(options.report, as_json(outcome.report))
    if options.html is not None:
        loads, seconds = _loads(experiment, source, options, outcome)
        _write(options.html, make_page(experiment, trace, outcome, options.speed, loads, seconds))
    if options.report is not None:
        print(summary(outcome))


def experiment_of(options: argparse.Namespace) -> Experiment:
    """The experiment that the options describe.

    Raises:
        ConfigError: A missing or wrong option.
    """
    if options.costs is None:
        raise ConfigError("--costs FILE is required: a file of cost profiles")
    if options.profile is None:
        raise ConfigError(f"--profile ID is required; {options.costs} has {', '.join(profile_ids(options.costs))}")
    return Experiment(
        profile=load_profile(options.costs, options.profile),
        policy=options.policy,
        slots=options.slots,
        seconds=options.seconds,
        seed=options.seed,
        acceptance=load_acceptance(options.acceptance) if options.acceptance is not None else None,
        objectives=Objectives(ttft_ms=options.slo_ttft_ms, gap_ms=options.slo_gap_ms),
        prefill_chunk=options.prefill_chunk,
        **({} if options.token_budget is None else {"token_budget": options.token_budget}),
        max_context=options.max_context,
        kv_gib=options.kv_gib,
        state_rows=options.state_rows,
        host_ms=options.host_ms,
        frames=options.frames,
        max_queue=options.max_queue,
        warm=options.warm,
        preferences=tuple(map(_preference, options.prefer)),
        check=options.check,
    )


def source_of(options: argparse.Namespace) -> dict[str, Any]:
    """Arguments of `load_trace`, its speed apart."""
    if options.trace is None:
        raise ConfigError("--trace FILE or --trace poisson:RATE is required")
    return {
        "source": options.trace,
        "seconds": options.seconds,
        "seed": options.seed,
        "start_s": options.start,
        "rate": options.rate,
    }


def summary(outcome: Outcome) -> str:
    """A few lines for a terminal."""
    report = outcome.report
    requests, ttft, gap = report["requests"], report["ttft_ms"], report["gap_ms"]
    head = f"{report['policy']}: {requests['completed']} of {requests['arrived']} requests completed"
    lines = [f"{head}, {requests['refused']} refused, {report['output_tokens_per_s']:.1f} output tokens/s"]
    for name, found in (("first token", ttft), ("gap", gap)):
        values = [f"{key} {'-' if value is None else f'{value:.1f}'}" for key, value in found.items()]
        lines.append(f"{name} ms  {'  '.join(values)}")
    return "\n".join([*lines, f"goodput {report['goodput']}, padding {report['padding_ratio']}"])


def _preference(text: str) -> tuple[str, float]:
    name, _, value = text.partition("=")
    try:
        return name, float(value)
    except ValueError:
        raise ConfigError(f"--prefer takes NAME=NUMBER, got {text!r}") from None


def _list(options: argparse.Namespace) -> None:
    """Names that --profile and --acceptance take."""
    if options.costs is None and options.acceptance is None:
        raise ConfigError("--list needs --costs FILE, --acceptance FILE or both")
    if options.costs is not None:
        print("\n".join(profile_ids(options.costs)))
    if options.acceptance is not None:
        print("\n".join(acceptance_names(Path(options.acceptance))))


def _check_outputs(options: argparse.Namespace) -> None:
    """A long run must not end at a path or a number that was wrong from the start."""
    paths = [path for path in (options.report, options.html) if path is not None]
    for path in paths:
        place = path if os.path.exists(path) else path.absolute().parent
        if os.path.isdir(path) or not os.path.exists(place) or not os.access(place, os.W_OK):
            raise ConfigError(f"cannot write {path}: it is a directory, its directory does not exist, or no permission")
    regular = [path for path in paths if os.path.isfile(path) or not os.path.exists(path)]  # not /dev/null
    if len({os.path.realpath(path) for path in regular}) < len(regular):
        raise ConfigError(f"--report and --html are the same file, {options.html}; the page would replace the report")
    if options.load_seconds is not None and not options.load_seconds >= MIN_SECONDS:
        raise ConfigError(f"load_seconds must be at least {MIN_SECONDS:g}, got {options.load_seconds}")
    if options.jobs is not None and options.jobs < 1:
        raise ConfigError(f"jobs must be at least 1, got {options.jobs}")


def _check_used(options: argparse.Namespace) -> None:
    """An option that nothing of the run would look at is a mistake of the caller's; the trace checks its own."""
    policies = {options.policy, *options.compare}
    if options.html is None:
        for name, given in (("--compare", options.compare), ("--load-seconds", options.load_seconds)):
            if given:
                raise ConfigError(f"{name} is for the page; give --html FILE too")
    if options.token_budget is not None and "fcfs-chunked" not in policies:
        raise ConfigError(f"{options.policy} has no token budget; --token-budget belongs to fcfs-chunked")
    if options.warm and not policies & set(POLICY_PRESETS):
        presets = " and ".join(POLICY_PRESETS)
        raise ConfigError(f"{options.policy} knows no durations that --warm could give; it belongs to {presets}")


def _write(path: Path | None, text: str) -> None:
    if path is None:
        sys.stdout.write(text)
        return
    try:
        path.write_text(text, encoding="utf-8")
    except OSError as error:
        raise ConfigError(f"cannot write {path}: {error.strerror or error}") from error


def _loads(
    experiment: Experiment, source: dict[str, Any], options: argparse.Namespace, outcome: Outcome
) -> tuple[list[Load], float]:
    """Runs at several speeds, of the policy and of those to compare with.

    The run that was made is one of them when it is as long as they are.
    """
    seconds = min(experiment.seconds, options.load_seconds or LOAD_SECONDS)
    same = seconds == experiment.seconds
    tasks = []
    for policy in dict.fromkeys([experiment.policy, *options.compare]):
        made = same and policy == experiment.policy
        own = experiment.preferences if policy == experiment.policy else ()
        rows = experiment.state_rows if policy in POLICY_PRESETS else 0  # baselines keep no checkpoints
        shorter = dataclasses.replace(experiment, seconds=seconds, policy=policy, preferences=own, state_rows=rows)
        speeds = [factor * options.speed for factor in LOAD_FACTORS if not (made and factor == 1.0)]
        tasks += [(shorter, {**source, "seconds": seconds}, speed) for speed in speeds]
    loads = [load_of(options.speed, outcome)] if same else []
    jobs = min(options.jobs or os.cpu_count() or 1, MAX_JOBS, len(tasks))
    with _bar("loads") as progress, _mapper(jobs) as apply:
        for done, load in enumerate(apply(_load, tasks), 1):
            loads.append(load)
            progress(done / len(tasks))
    return sorted(loads, key=lambda load: (load.policy, load.speed)), seconds


def _load(task: tuple[Experiment, dict[str, Any], float]) -> Load:
    experiment, source, speed = task
    trace: Trace = load_trace(speed=speed, **source)
    return load_of(speed, run_experiment(experiment, trace))


@contextlib.contextmanager
def _mapper(jobs: int) -> Iterator[Callable[..., Any]]:
    """`map` in this process, or over fresh ones; the results are the same."""
    if jobs <= 1:
        yield map
        return
    context = multiprocessing.get_context("spawn")
    with concurrent.futures.ProcessPoolExecutor(jobs, mp_context=context) as pool:
        yield pool.map


@contextlib.contextmanager
def _bar(text: str) -> Iterator[Progress]:
    """A bar on standard error while it is a terminal; nothing otherwise."""
    if not sys.stderr.isatty():
        yield lambda share: None
        return
    from rich.console import Console
    from rich.progress import BarColumn, TextColumn, TimeElapsedColumn, TimeRemainingColumn
    from rich.progress import Progress as Bar

    columns = (TextColumn("{task.description}"), BarColumn(), TextColumn("{task.percentage:>3.0f}%"))
    with Bar(*columns, TimeElapsedColumn(), TimeRemainingColumn(), console=Console(stderr=True), transient=True) as bar:
        task = bar.add_task(text, total=1.0)

        def show(share: float) -> None:
            bar.update(task, completed=min(share, 1.0), description=text if share <= 1.0 else f"{text}, draining")

        yield show
