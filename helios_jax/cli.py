"""The `helios-jax` command: prepare, serve, inspect, chat, generate, simulate.

jax is imported by the commands that run a model, not by `--help`. An error that the user can
do something about is one line on standard error and exit code 2.
"""

from __future__ import annotations

import argparse
import os
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import helios_jax
from helios_jax.config import (
    API_KEY_VARIABLE,
    CACHE_VARIABLE,
    DEFAULT_GRAMMAR_TIMEOUT_S,
    DEFAULT_MAX_QUEUE,
    DEFAULT_MODEL,
    DEFAULT_READY_TIMEOUT_S,
    EngineConfig,
    api_key,
)
from helios_jax.errors import ConfigError, HeliosError

EXIT_ERROR = 2
EXIT_INTERRUPTED = 130
MAX_PORT = 65535
DTYPES = ("float32", "bfloat16", "float16")
SPEC_METHODS = ("none", "copy", "draft", "mtp")
SPEC_WIDTHS = ("adaptive", "fixed")  # no rounds at all: --spec-method none
POLICIES = ("balanced", "throughput")
BASELINES = ("fcfs-prefill", "fcfs-chunked", "vtc")
MODEL_HELP = f"name, directory, .gguf file, hub id, or directory of a prepared core (default: {DEFAULT_MODEL})"
SOURCE_HELP = f"name, directory, .gguf file or hub id (default: {DEFAULT_MODEL})"
EPILOG = (
    f"Prepared cores are kept in ${CACHE_VARIABLE}, or ~/.cache/helios-jax. They hold programs that are executed"
    " as they are: trust a core as you trust its directory."
)

SIMULATE_EPILOG = (
    "Example: helios-jax simulate --costs step_costs.json --profile ID --trace poisson:4 --report out.json --html"
    " out.html. Cost profiles, traces and acceptance tables are files of yours; --list prints the names in them."
)


def main(arguments: Sequence[str] | None = None) -> None:
    """Run one command and exit."""
    options = parser().parse_args(arguments)
    try:
        options.run(options)
    except HeliosError as error:
        print(f"helios-jax: error: {' '.join(str(error).split())}", file=sys.stderr)
        sys.exit(EXIT_ERROR)
    except KeyboardInterrupt:
        sys.exit(EXIT_INTERRUPTED)
    except BrokenPipeError:  # the reader of our output has gone, as `| head` does
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        sys.exit(1)


def parser() -> argparse.ArgumentParser:
    """All commands and options."""
    top = argparse.ArgumentParser(prog="helios-jax", description=(helios_jax.__doc__ or "").splitlines()[0])
    top.add_argument("--version", action="version", version=f"helios-jax {helios_jax.__version__}")
    commands = top.add_subparsers(title="commands", required=True, metavar="COMMAND")

    def command(name: str, run: Callable[[argparse.Namespace], None], text: str) -> argparse.ArgumentParser:
        sub = commands.add_parser(name, help=text, description=text, epilog=EPILOG)
        sub.set_defaults(run=run)
        return sub

    prepare = command("prepare", _prepare, "compile a model's programs and convert its weights into a core")
    prepare.add_argument("model", nargs="?", default=DEFAULT_MODEL, metavar="MODEL", help=SOURCE_HELP)
    prepare.add_argument("--out", required=True, type=Path, metavar="DIR", help="directory of the core")
    _add_core_options(prepare)
    _add_speculation_options(prepare)

    serve = command("serve", _serve, "serve an OpenAI-compatible API over HTTP")
    serve.add_argument("model", nargs="?", default=DEFAULT_MODEL, metavar="MODEL|CORE", help=MODEL_HELP)
    _add_core_options(serve)
    _add_speculation_options(serve, chooses_width=True)
    _add_reuse_options(serve)
    _add_server_options(serve)
    _add_engine_options(serve)

    inspect = command("inspect", _inspect, "show the programs of a prepared core")
    inspect.add_argument("core", type=Path, metavar="CORE", help="directory of the core")

    chat = command("chat", _chat, "chat in the terminal, without a server (/exit leaves, /stats says what was reused)")
    chat.add_argument("model", nargs="?", default=DEFAULT_MODEL, metavar="MODEL", help=MODEL_HELP)
    chat.add_argument("--system", metavar="TEXT", help="system message")
    _add_core_options(chat)
    _add_speculation_options(chat, chooses_width=True)
    _add_reuse_options(chat)
    _add_sampling_options(chat, max_tokens=None)

    generate = command("generate", _generate, "continue a prompt")
    generate.add_argument("prompt", metavar="PROMPT", help="text to continue; - reads standard input")
    generate.add_argument("--model", default=DEFAULT_MODEL, metavar="MODEL", help=MODEL_HELP)
    generate.add_argument("--chat", action="store_true", help="give the prompt as a user's message, by the template")
    _add_core_options(generate)
    _add_speculation_options(generate, chooses_width=True)
    _add_reuse_options(generate)
    _add_sampling_options(generate, max_tokens=128)

    simulate = command("simulate", _simulate, "run a policy on measured step times and a trace, in virtual time")
    simulate.epilog = SIMULATE_EPILOG
    _add_simulation_options(simulate)
    return top


def _add_core_options(sub: argparse.ArgumentParser) -> None:
    group = sub.add_argument_group("core (a prepared core keeps its own)")
    group.add_argument("--max-slots", type=int, metavar="N", help="requests that run at the same time, 1 to 64 (8)")
    group.add_argument("--max-context", type=int, metavar="N", help="tokens of a request, prompt and output (2048)")
    group.add_argument("--dtype", choices=DTYPES, help="of weights, activations and cache (float32)")
    group.add_argument("--page-size", type=int, choices=(16, 64), help="tokens of a cache page (16)")
    group.add_argument("--num-pages", type=int, metavar="N", help="cache pages (enough for every slot, or what fits)")
    group.add_argument("--prefill-chunk", type=int, metavar="N", help="most prompt tokens of one program (512)")
    group.add_argument(
        "--mixed-prefill",
        action=argparse.BooleanOptionalAction,
        help="also programs that run a prompt chunk beside decoding requests (no); --no-... leaves a core's out",
    )
    group.add_argument(
        "--checkpoint-rows",
        dest="state_rows",
        type=int,
        metavar="N",
        help="states of prompts and conversations kept for others that begin alike; 0 = none (4 a slot, if they fit)",
    )


def _add_reuse_options(sub: argparse.ArgumentParser) -> None:
    group = sub.add_argument_group("reuse of prompts")
    group.add_argument(
        "--enable-prefix-caching",
        action=argparse.BooleanOptionalAction,
        help="begin with kept states where a prompt begins with known tokens (yes, in a core with rows for them)",
    )


def _add_speculation_options(sub: argparse.ArgumentParser, chooses_width: bool = False) -> None:
    """Documented in docs/speculation.md; what a prepared core has can be left out, not added to."""
    group = sub.add_argument_group("speculation (a prepared core keeps its own; it can do less, or none)")
    group.add_argument("--spec-method", choices=SPEC_METHODS, help="where proposals of several tokens come from (none)")
    group.add_argument("--draft-model", metavar="MODEL", help="smaller model of the same vocabulary, of method draft")
    group.add_argument(
        "--num-draft-tokens", type=int, metavar="D", help="most proposals a round, 1 to 8 (copy 7, draft 5, mtp 3)"
    )
    group.add_argument(
        "--speculative-token-capacity",
        type=int,
        metavar="R",
        help="most tokens that one round verifies, over all requests (every slot at full width, at most 256)",
    )
    if not chooses_width:
        return
    group.add_argument(
        "--spec-width", choices=SPEC_WIDTHS, help="choose widths by value per time, or the widest (adaptive)"
    )
    group.add_argument(
        "--mtp-adaptive-verification-alpha",
        type=float,
        metavar="A",
        help="exponent on acceptance estimates when widths are chosen; above 1 is more careful (1)",
    )


def _add_server_options(sub: argparse.ArgumentParser) -> None:
    group = sub.add_argument_group("server")
    group.add_argument("--host", default="127.0.0.1", help="address to listen on (%(default)s)")
    group.add_argument("--port", type=int, default=8000, help="port; 0 takes a free one (%(default)s)")
    group.add_argument("--api-key", metavar="KEY", help=f"bearer token that clients must send (${API_KEY_VARIABLE})")
    group.add_argument(
        "--served-model-name",
        nargs="+",
        default=(),
        metavar="NAME",
        help="names that requests may use (the model's own)",
    )
    group.add_argument(
        "--drain-timeout", type=float, default=30.0, metavar="S", help="seconds that running requests get on SIGTERM"
    )


def _add_engine_options(sub: argparse.ArgumentParser) -> None:
    group = sub.add_argument_group("engine")
    group.add_argument(
        "--max-queue",
        type=int,
        default=DEFAULT_MAX_QUEUE,
        metavar="N",
        help="outputs that may wait for a slot; more get 429 (%(default)s)",
    )
    group.add_argument(
        "--ready-timeout",
        type=float,
        default=DEFAULT_READY_TIMEOUT_S,
        metavar="S",
        help="seconds without progress after which /ready says 503 (%(default)s)",
    )
    group.add_argument(
        "--grammar-timeout",
        type=float,
        default=DEFAULT_GRAMMAR_TIMEOUT_S,
        metavar="S",
        help="seconds to compile a grammar of structured outputs, else 400 (%(default)s)",
    )
    group.add_argument("--trace", type=Path, metavar="FILE", help="append one JSON line a frame")
    group.add_argument(
        "--async-scheduling",
        action=argparse.BooleanOptionalAction,
        default=True,
        help="submit the next decode step before the last one is over (on)",
    )
    group.add_argument("--scheduler-policy", choices=POLICIES, default="balanced", help="(%(default)s)")
    group.add_argument("--scheduler-terminal-value", type=float, metavar="V", help="value of retiring a request")
    group.add_argument("--scheduler-terminal-age-price", type=float, metavar="P", help="price of a waiting retirement")
    group.add_argument(
        "--scheduler-checkpoint-extra-work-fraction",
        type=float,
        metavar="F",
        help="time of optional checkpoints per time of prefill and decode (0.05)",
    )
    group.add_argument(
        "--host-checkpoint-bytes",
        type=int,
        default=0,
        metavar="N",
        help="host memory for checkpoints that the device has no room for; 0 keeps none there (%(default)s)",
    )


def _add_sampling_options(sub: argparse.ArgumentParser, max_tokens: int | None) -> None:
    group = sub.add_argument_group("sampling")
    text = "up to the context" if max_tokens is None else str(max_tokens)
    group.add_argument("--max-tokens", type=int, default=max_tokens, metavar="N", help=f"output tokens ({text})")
    group.add_argument("--temperature", type=float, default=0.7, help="0 is greedy (%(default)s)")
    group.add_argument("--top-p", type=float, default=1.0, help="(%(default)s)")
    group.add_argument("--top-k", type=int, default=0, help="0 is off (%(default)s)")
    group.add_argument("--min-p", type=float, default=0.0, help="(%(default)s)")
    group.add_argument("--seed", type=int, help="same seed, same output")
    group.add_argument("--stop", action="append", metavar="TEXT", help="ends the output; may be repeated")


def _add_simulation_options(sub: argparse.ArgumentParser) -> None:
    """Documented in docs/simulate.md."""
    group = sub.add_argument_group("what runs")
    group.add_argument("--costs", type=Path, metavar="FILE", help="cost profiles (JSON)")
    group.add_argument("--profile", metavar="ID", help="profile of that file; --list shows them")
    group.add_argument("--trace", metavar="FILE|poisson:RATE", help="arrivals and lengths, or a rate a second")
    group.add_argument("--policy", choices=POLICIES + BASELINES, default="balanced", help="(%(default)s)")
    group.add_argument("--acceptance", metavar="FILE:NAME", help="speculate, with these acceptance rates")
    group.add_argument("--list", action="store_true", help="print the names that --profile and --acceptance take")
    group = sub.add_argument_group("load")
    group.add_argument("--seconds", type=float, default=60.0, metavar="S", help="requests arrive so long (%(default)g)")
    group.add_argument("--speed", type=float, default=1.0, metavar="X", help="factor on arrivals (%(default)g)")
    group.add_argument("--start", type=float, default=0.0, metavar="S", help="where the trace begins (%(default)g)")
    group.add_argument("--rate", type=float, metavar="R", help="requests a second of a file that has lengths only")
    group.add_argument("--seed", type=int, default=0, metavar="N", help="same seed, same report (%(default)s)")
    group = sub.add_argument_group("machine")
    group.add_argument("--slots", type=int, default=64, metavar="N", help="requests at the same time (%(default)s)")
    group.add_argument("--max-context", type=int, default=16384, metavar="N", help="longest request (%(default)s)")
    group.add_argument("--prefill-chunk", type=int, default=2048, metavar="N", help="largest prefill (%(default)s)")
    group.add_argument("--token-budget", type=int, metavar="N", help="tokens of a step of fcfs-chunked (512)")
    group.add_argument("--kv-gib", type=float, default=50.0, metavar="G", help="cache, GiB (%(default)g)")
    group.add_argument(
        "--state-rows",
        type=int,
        default=0,
        metavar="N",
        help="rows for checkpoints of prefixes, with a trace that has hash ids (%(default)s: nothing is reused)",
    )
    group.add_argument("--host-ms", type=float, default=0.2, metavar="MS", help="host time of a step (%(default)g)")
    group.add_argument("--frames", type=int, choices=(1, 2), default=2, help="frames in flight (%(default)s)")
    group.add_argument("--max-queue", type=int, metavar="N", help="requests that may wait; more are refused (no bound)")
    group.add_argument("--warm", action="store_true", help="durations are known from the start")
    group.add_argument(
        "--prefer", action="append", default=[], metavar="NAME=NUMBER", help="a preference of the policy; repeat"
    )
    group = sub.add_argument_group("results")
    group.add_argument("--slo-ttft-ms", type=float, default=1000.0, metavar="MS", help="objective (%(default)g)")
    group.add_argument("--slo-gap-ms", type=float, default=100.0, metavar="MS", help="objective (%(default)g)")
    group.add_argument("--report", type=Path, metavar="FILE", help="JSON report (standard output)")
    group.add_argument("--html", type=Path, metavar="FILE", help="page with plots, of several loads")
    group.add_argument("--load-seconds", type=float, metavar="S", help="of each run for goodput over load (60)")
    group.add_argument(
        "--compare",
        nargs="+",
        choices=POLICIES + BASELINES,
        default=(),
        metavar="POLICY",
        help="also on that plot",
    )
    group.add_argument("--jobs", type=int, metavar="N", help="processes for those runs (one a core)")
    group.add_argument("--check", action="store_true", help="check every invariant at every step (slow)")


def core_options(options: argparse.Namespace) -> dict[str, Any]:
    """Keyword arguments of `aot.CoreOptions`; None where nothing was said."""
    names = [
        "max_slots",
        "max_context",
        "dtype",
        "page_size",
        "num_pages",
        "prefill_chunk",
        "mixed_prefill",
        "state_rows",
    ]
    names += ["spec_method", "draft_model", "num_draft_tokens", "speculative_token_capacity"]
    return {name: getattr(options, name) for name in names}


def engine_options(options: argparse.Namespace) -> dict[str, Any]:
    """How widths of rounds are chosen, and whether prompts are reused; keyword arguments of `LLM` too."""
    names = ("spec_width", "mtp_adaptive_verification_alpha", "enable_prefix_caching")
    return {name: getattr(options, name) for name in names}


def engine_config(options: argparse.Namespace) -> EngineConfig:
    """How `serve` runs its engine."""
    return EngineConfig(
        **{name: value for name, value in engine_options(options).items() if value is not None},
        max_queue=options.max_queue,
        ready_timeout_s=options.ready_timeout,
        grammar_timeout_s=options.grammar_timeout,
        trace=options.trace,
        async_scheduling=options.async_scheduling,
        policy=options.scheduler_policy,
        terminal_value=options.scheduler_terminal_value,
        terminal_age_price=options.scheduler_terminal_age_price,
        checkpoint_extra_work_fraction=options.scheduler_checkpoint_extra_work_fraction,
        host_checkpoint_bytes=options.host_checkpoint_bytes,
    )


def _prepare(options: argparse.Namespace) -> None:
    from helios_jax.aot import RichProgress
    from helios_jax.engine.setup import Target

    with RichProgress() as progress:
        core = Target(model=options.model, core=options.out, options=core_options(options)).prepare(progress)
    print(core.summary())
    core.close()


def _serve(options: argparse.Namespace) -> None:
    import logging

    from rich.console import Console
    from rich.logging import RichHandler

    from helios_jax.engine.setup import Target
    from helios_jax.server.context import ServerLimits
    from helios_jax.server.run import run_server

    console = Console(stderr=True)
    rich = console.is_terminal  # one console for bars and log lines, so that they do not overwrite each other
    handler: logging.Handler = RichHandler(console=console, show_path=False) if rich else logging.StreamHandler()
    handler.setFormatter(logging.Formatter("%(message)s" if rich else "%(asctime)s %(levelname)s %(message)s"))
    logging.basicConfig(level=logging.WARNING, handlers=[handler])
    logging.getLogger("helios_jax").setLevel(logging.INFO)
    if not 0 <= options.port <= MAX_PORT:  # getaddrinfo would take it modulo 65536
        raise ConfigError(f"--port must be in [0, {MAX_PORT}], got {options.port}")
    if options.api_key is not None and not options.api_key.strip():  # an unset variable must not open the server
        raise ConfigError(f"--api-key must not be blank; leave it out to use ${API_KEY_VARIABLE} or no key")
    config = engine_config(options)
    target = Target(model=options.model, options=core_options(options))

    def make(report: Callable[[str], None]) -> Any:
        from helios_jax.aot import RichProgress
        from helios_jax.engine.async_llm import AsyncLLM

        with RichProgress(console) as bars:

            def progress(stage: str, done: int, total: int, detail: str = "") -> None:
                bars(stage, done, total, detail)
                report(f"preparing: {stage} {done}/{total} {detail}".rstrip())

            core = target.open(progress)
        print(core.summary(), file=sys.stderr)
        return AsyncLLM.from_core(core, config=config)

    run_server(
        make,
        options.host,
        options.port,
        api_key=options.api_key or api_key(),
        served_model_names=tuple(options.served_model_name),
        limits=ServerLimits(drain_timeout_s=options.drain_timeout),
        announce=lambda url: print(f"listening on {url}, preparing {options.model}", file=sys.stderr),
    )


def _inspect(options: argparse.Namespace) -> None:
    from rich.console import Console
    from rich.table import Table

    from helios_jax.aot import inspect_core
    from helios_jax.aot.report import INSPECT_HEADER, format_row, inspect_caption

    rows = inspect_core(options.core)
    caption = inspect_caption(options.core)
    table = Table(title=str(options.core), title_justify="left", caption=caption or None, caption_justify="left")
    for index, name in enumerate(INSPECT_HEADER):
        numeric = 0 < index < len(INSPECT_HEADER) - 1
        table.add_column(name, justify="right" if numeric else "left", overflow="fold", no_wrap=numeric)
    for row in rows:
        table.add_row(*format_row(row))
    Console(width=None if sys.stdout.isatty() else 160).print(table)


def _chat(options: argparse.Namespace) -> None:
    from helios_jax.repl import Repl

    with _open_llm(options) as llm:
        Repl(llm, _sampling(options), options.system).run()


def _generate(options: argparse.Namespace) -> None:
    prompt: Any = sys.stdin.read() if options.prompt == "-" else options.prompt
    params = _sampling(options)
    with _open_llm(options) as llm:
        if options.chat:
            prompt = llm.chat_prompt([{"role": "user", "content": prompt}])
        for output in llm.stream(prompt, params):
            print(output.outputs[0].text, end="", flush=True)
    print()


def _simulate(options: argparse.Namespace) -> None:
    from helios_jax.simulation.command import simulate

    simulate(options)


def _open_llm(options: argparse.Namespace) -> Any:
    from helios_jax.engine.llm import LLM

    return LLM(options.model, **core_options(options), **engine_options(options))


def _sampling(options: argparse.Namespace) -> Any:
    from helios_jax.engine.params import SamplingParams

    names = ("max_tokens", "temperature", "top_p", "top_k", "min_p", "seed", "stop")
    return SamplingParams(**{name: getattr(options, name) for name in names})
