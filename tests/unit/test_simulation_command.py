"""`helios-jax simulate`: reports and pages from small files, names, errors, exit codes."""

from __future__ import annotations

import dataclasses
import json
import re
from html.parser import HTMLParser
from pathlib import Path

import pytest

from helios_jax.cli import BASELINES, POLICIES, main, parser
from helios_jax.scheduler import policy_preset
from helios_jax.simulation.command import experiment_of
from helios_jax.simulation.experiment import POLICIES as SIMULATED
from tests.unit.simulation_toy import acceptance_file, azure_file, profile_document, profile_file

COMPONENTS = profile_document()["profiles"][0]["components"]
KEYS = [
    "policy", "requests", "ttft_ms", "gap_ms", "output_tokens_per_s", "goodput", "preemptions", "programs",
    "padding_ratio", "ledgers",
]  # fmt: skip
SMALL = ("--slots", "8", "--prefill-chunk", "512", "--seconds", "1", "--jobs", "1", "--kv-gib", "0.1")


def run(capsys: pytest.CaptureFixture[str], *arguments: str) -> tuple[int | str | None, str, str]:
    """Exit code, standard output, standard error."""
    code: int | str | None = 0
    try:
        main(["simulate", *arguments])
    except SystemExit as exit_:
        code = exit_.code
    captured = capsys.readouterr()
    return code, captured.out, captured.err


@pytest.fixture
def files(tmp_path: Path) -> list[str]:
    """A toy profile and ten requests within a second."""
    trace = azure_file(tmp_path, [(i * 0.1, 50 + 30 * i, 5 + i) for i in range(10)])
    return ["--costs", str(profile_file(tmp_path)), "--profile", "toy.gpu", "--trace", str(trace), *SMALL]


def test_the_policies_are_those_of_the_command_line() -> None:
    assert POLICIES + BASELINES == SIMULATED


@pytest.mark.parametrize("policy", SIMULATED)
def test_every_policy_reports_the_same_keys(capsys: pytest.CaptureFixture[str], files: list[str], policy: str) -> None:
    code, out, err = run(capsys, *files, "--policy", policy, "--check")
    report = json.loads(out)
    assert (code, err) == (0, "")
    assert list(report) == KEYS
    assert report["policy"] == policy
    assert report["requests"] == {"arrived": 10, "completed": 10, "refused": 0}
    assert report["output_tokens_per_s"] > 0
    for ledger in report["ledgers"].values():
        assert ledger["spent"] <= ledger["bound"]


def test_prefixes_of_a_trace_are_reused_with_rows(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    trace = tmp_path / "trace.jsonl"
    rows = [
        {"timestamp": 3000 * i, "input_length": 600 + i, "output_length": 2, "hash_ids": [1, 2 + i]} for i in range(4)
    ]
    trace.write_text("\n".join(map(json.dumps, rows)))
    options = ["--costs", str(profile_file(tmp_path)), "--profile", "toy.gpu", "--trace", str(trace), *SMALL]
    options += ["--seconds", "20", "--max-context", "1024"]
    code, out, _ = run(capsys, *options, "--state-rows", "16", "--check")
    report = json.loads(out)
    assert (code, list(report)) == (0, [*KEYS, "prefixes"])
    assert report["prefixes"] | {"captured": 0} == {
        "prompt_tokens": 2406, "reused_tokens": 3 * 512, "hit_ratio": 0.6384, "captured": 0, "evicted": 0,
    }  # fmt: skip
    assert "prefixes" not in json.loads(run(capsys, *options)[1])
    code, _, err = run(capsys, *options, "--state-rows", "4", "--policy", "vtc")
    assert (code, err.count("\n")) == (2, 1)
    assert "vtc keeps no checkpoints" in err


def test_speculation_from_a_table(capsys: pytest.CaptureFixture[str], files: list[str], tmp_path: Path) -> None:
    acceptance = f"{acceptance_file(tmp_path)}:eagle3/Toy"
    _, plain, _ = run(capsys, *files)
    _, drafted, _ = run(capsys, *files, "--acceptance", acceptance)
    assert json.loads(drafted)["programs"]["speculative"] > 0
    assert json.loads(plain)["programs"]["decode"] > json.loads(drafted)["programs"]["speculative"]


@pytest.mark.parametrize("extra", [[], ["--acceptance"]])
def test_the_same_seed_gives_the_same_bytes(
    capsys: pytest.CaptureFixture[str], tmp_path: Path, extra: list[str]
) -> None:
    lengths = tmp_path / "lengths.csv"
    lengths.write_text("num_prefill_tokens,num_decode_tokens\n100,7\n200,9\n30,20\n")
    options = ["--costs", str(profile_file(tmp_path)), "--profile", "toy.gpu", "--trace", str(lengths), *SMALL]
    options += ["--rate", "10", "--seconds", "0.5"]
    options += [*extra, f"{acceptance_file(tmp_path)}:eagle3/Toy"] if extra else []
    written = []
    for name, seed in (("a", 1), ("b", 1), ("c", 2)):
        report, page = tmp_path / f"{name}.json", tmp_path / f"{name}.html"
        outputs = ["--report", str(report), "--html", str(page)]
        code, out, _ = run(capsys, *options, "--seed", str(seed), *outputs)
        assert code == 0
        assert "requests completed" in out
        written.append((report.read_bytes(), page.read_bytes()))
    assert written[0] == written[1]
    assert written[0][0] != written[2][0]


class Page(HTMLParser):
    """Collects tags and checks that they close."""

    VOID = ("meta", "br")

    def __init__(self, text: str) -> None:
        super().__init__()
        self.open: list[str] = []
        self.tags: list[tuple[str, dict[str, str | None]]] = []
        self.headings: list[str] = []
        self.feed(text)
        self.close()

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append((tag, dict(attrs)))
        if tag not in self.VOID:
            self.open.append(tag)

    def handle_startendtag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append((tag, dict(attrs)))

    def handle_endtag(self, tag: str) -> None:
        assert self.open.pop() == tag

    def handle_data(self, data: str) -> None:
        if self.open and self.open[-1] == "h2":
            self.headings.append(data)


def test_the_page_needs_nothing_else(capsys: pytest.CaptureFixture[str], files: list[str], tmp_path: Path) -> None:
    path = tmp_path / "out.html"
    assert run(capsys, *files, "--html", str(path), "--speed", "1.5")[0] == 0
    text = path.read_text()
    page = Page(text)
    assert page.open == []
    assert not {"script", "link", "img", "iframe", "object"} & {tag for tag, _ in page.tags}
    assert not {"src", "href"} & {name for _, attributes in page.tags for name in attributes}
    assert not re.search(r"https?://|url\(|@import", text)
    assert page.headings == [
        "Time to first token", "Token gaps", "Goodput over load", "Program mix over time",
        "Prices of one request over its life",
    ]  # fmt: skip
    assert sum(tag == "svg" for tag, _ in page.tags) == 6
    assert sum(tag == "tr" for tag, _ in page.tags) == 1 + 5  # the given load and four around it
    assert "balanced, speed 0.75" in text
    for tag, attributes in page.tags:
        for name in ("x", "y", "cx", "cy", "x1", "y1", "x2", "y2", "width", "height"):
            if tag != "svg" and attributes.get(name) is not None:
                assert -1 <= float(str(attributes[name])) <= 700


def test_shorter_runs_for_the_loads_rerun_the_given_one(
    capsys: pytest.CaptureFixture[str], files: list[str], tmp_path: Path
) -> None:
    path = tmp_path / "out.html"
    assert run(capsys, *files, "--html", str(path), "--load-seconds", "0.4")[0] == 0
    assert "5 runs of 0.4 s" in path.read_text()


def test_policies_are_compared_on_one_plot(
    capsys: pytest.CaptureFixture[str], files: list[str], tmp_path: Path
) -> None:
    path = tmp_path / "out.html"
    assert run(capsys, *files, "--html", str(path), "--compare", "vtc", "balanced", "fcfs-chunked")[0] == 0
    cells = re.findall(r"<tr><td>([a-z-]+)</td><td>([\d.]+)</td>", path.read_text())
    speeds = ["0.5", "0.75", "1", "1.5", "2"]
    assert cells == [(policy, speed) for policy in ("balanced", "fcfs-chunked", "vtc") for speed in speeds]


@pytest.mark.slow
def test_loads_in_processes_are_the_same(capsys: pytest.CaptureFixture[str], files: list[str], tmp_path: Path) -> None:
    pages = []
    for jobs in ("1", "2"):
        path = tmp_path / f"{jobs}.html"
        assert run(capsys, *files, "--html", str(path), "--jobs", jobs)[0] == 0
        pages.append(path.read_bytes())
    assert pages[0] == pages[1]


def test_names_are_listed(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    code, out, _ = run(capsys, "--costs", str(profile_file(tmp_path)), "--list")
    assert (code, out) == (0, "toy.gpu\n")
    code, out, _ = run(capsys, "--acceptance", str(acceptance_file(tmp_path)), "--list")
    assert code == 0
    assert out.splitlines()[:2] == ["eagle3/Toy", "mtp (1 head)/Toy"]
    code, _, err = run(capsys, "--list")
    assert code == 2
    assert "--list needs --costs FILE" in err


def test_long_requests_and_full_queues_are_refused(
    capsys: pytest.CaptureFixture[str], files: list[str], tmp_path: Path
) -> None:
    _, out, _ = run(capsys, *files, "--max-context", "200")
    report = json.loads(out)
    assert report["requests"] == {"arrived": 10, "completed": 5, "refused": 5}  # 50 + 30 i + 5 + i tokens
    assert report["goodput"] <= 0.5
    _, out, _ = run(capsys, *files, "--slots", "1", "--max-queue", "1", "--speed", "10")
    assert json.loads(out)["requests"]["refused"] > 0


@pytest.mark.parametrize("policy", ["balanced", "vtc"])
def test_only_who_must_wait_counts_in_the_queue(
    capsys: pytest.CaptureFixture[str], files: list[str], tmp_path: Path, policy: str
) -> None:
    idle = [*files, "--policy", policy, "--speed", "0.2", "--seconds", "5"]
    _, out, _ = run(capsys, *idle, "--max-queue", "0")
    assert json.loads(out)["requests"] == {"arrived": 10, "completed": 10, "refused": 0}
    crowd = azure_file(tmp_path, [(0.0, 50, 5)] * 10)  # at the same moment
    arguments = [str(crowd) if name == "--trace" else value for name, value in zip(["", *files], files, strict=False)]
    for bound, completed in ((0, 8), (1, 9), (2, 10)):
        _, out, _ = run(capsys, *arguments, "--policy", policy, "--max-queue", str(bound))
        assert json.loads(out)["requests"] == {"arrived": 10, "completed": completed, "refused": 10 - completed}


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"--costs": "/nonexistent.json"}, "cannot read cost profiles from /nonexistent.json"),
        ({"--costs": None}, "--costs FILE is required"),
        ({"--profile": "h100"}, "has no profile 'h100'; it has toy.gpu"),
        ({"--profile": None}, "--profile ID is required; "),
        ({"--trace": None}, "--trace FILE or --trace poisson:RATE is required"),
        ({"--trace": "poisson:fast"}, "poisson:RATE needs a rate"),
        ({"--trace": "/nonexistent.csv"}, "cannot read the trace /nonexistent.csv"),
        ({"--start": "1000"}, "no request of"),
        ({"--trace": "poisson:1e-9"}, "no request of poisson:1e-9 arrives within 1 s; try more --seconds"),
        ({"--acceptance": "/nonexistent.json:a"}, "/nonexistent.json is no file"),
        ({"--slots": "65"}, "slots must be in [1, 64], got 65"),
        ({"--slots": "0"}, "slots must be in [1, 64], got 0"),
        ({"--seconds": "-1"}, "seconds must be finite and greater than zero"),
        ({"--seconds": "nan"}, "seconds must be finite and greater than zero"),
        ({"--speed": "0"}, "speed must be finite and greater than zero"),
        ({"--prefill-chunk": "1"}, "prefill_chunk must be in [64, 65536], got 1"),
        ({"--max-context": "1"}, "max_context must be in"),
        ({"--slo-ttft-ms": "0"}, "slo_ttft_ms must be finite and greater than zero"),
        ({"--kv-gib": "1e-9"}, "hold no page of"),
        ({"--host-ms": "-1"}, "host_ms must be finite and at least 0"),
        ({"--prefer": "decode_age_price"}, "--prefer takes NAME=NUMBER"),
        ({"--prefer": "speed=1"}, "unknown preference 'speed'; choose one of output_token_value"),
        ({"--prefer": "decode_age_price=-1"}, "decode_age_price must be finite and nonnegative"),
        ({"--policy": "vtc", "--prefer": "decode_age_price=1"}, "vtc has no preferences"),
        ({"--prefer": "estimate_ttl_ns=inf"}, "estimate_ttl_ns must be a positive integer below 2**62, got inf"),
        ({"--prefer": "estimate_ttl_ns=nan"}, "estimate_ttl_ns must be a positive integer below 2**62, got nan"),
        ({"--prefer": "adaptation_ms=inf"}, "adaptation_ms must be finite and greater than zero"),
        ({"--prefer": "speculation=1"}, "speculation must be one of"),
        ({"--seed": "-1"}, "seed must be in [0, 18446744073709551615], got -1"),
        ({"--kv-gib": "1e308"}, "kv_gib must be finite and greater than zero, at most 1.04858e+06, got 1e+308"),
        ({"--kv-gib": "nan"}, "kv_gib must be finite"),
        ({"--host-ms": "1e300"}, "host_ms must be finite and at least 0, at most 60000, got 1e+300"),
        ({"--seconds": "1e-7", "--trace": "poisson:1e8"}, "seconds must be at least 0.001, got 1e-07"),
        ({"--seconds": "1e300"}, "seconds must be finite and greater than zero, at most 1e+07"),
        ({"--seconds": "60", "--trace": "poisson:1e8"}, "about 6e+09 requests is more than 2000000"),
        ({"--seconds": "1", "--speed": "1e300", "--trace": "poisson:1"}, "requests is more than 2000000"),
        ({"--trace": "x" * 5000}, "cannot read the trace"),
        ({"--acceptance": "x" * 5000}, "is no file"),
        ({"--trace": "poisson:5", "--rate": "3"}, "poisson:5 has arrival times of its own"),
        ({"--rate": "3"}, "has arrival times of its own; the rate belongs to files that have lengths only"),
        ({"--trace": "poisson:5", "--start": "3"}, "are the same from any start; leave the start out"),
        ({"--compare": "vtc"}, "--compare is for the page; give --html FILE too"),
        ({"--load-seconds": "5"}, "--load-seconds is for the page; give --html FILE too"),
        ({"--token-budget": "512"}, "balanced has no token budget; --token-budget belongs to fcfs-chunked"),
        ({"--token-budget": "512", "--policy": "vtc"}, "vtc has no token budget"),
        ({"--token-budget": "1", "--policy": "fcfs-chunked"}, "token_budget must be in [64, 65536], got 1"),
        ({"--report": "same.out", "--html": "./same.out"}, "--report and --html are the same file, same.out"),
        ({"--report": "x" * 5000}, "cannot write"),
        ({"--load-seconds": "0"}, "load_seconds must be at least 0.001, got 0"),
        ({"--load-seconds": "nan"}, "load_seconds must be at least 0.001, got nan"),
        ({"--jobs": "0"}, "jobs must be at least 1, got 0"),
        ({"--report": "/nonexistent/out.json"}, "cannot write /nonexistent/out.json"),
        ({"--html": "/"}, "cannot write /"),
    ],
)
def test_errors_are_one_line_and_code_2(
    capsys: pytest.CaptureFixture[str], files: list[str], changes: dict[str, str | None], message: str
) -> None:
    options = dict(zip(files[::2], files[1::2], strict=True)) | changes
    arguments = [part for name, value in options.items() if value is not None for part in (name, value)]
    code, out, err = run(capsys, *arguments)
    assert (code, out) == (2, "")
    assert err.startswith("helios-jax: error: ")
    assert err.count("\n") == 1
    assert message in err


def test_a_device_may_swallow_both_outputs(capsys: pytest.CaptureFixture[str], files: list[str]) -> None:
    assert run(capsys, *files, "--report", "/dev/null", "--html", "/dev/null", "--load-seconds", "0.1")[0] == 0


def test_warm_needs_a_policy_with_durations(capsys: pytest.CaptureFixture[str], files: list[str]) -> None:
    code, out, err = run(capsys, *files, "--warm", "--policy", "vtc")
    assert (code, out) == (2, "")
    assert err == (
        "helios-jax: error: vtc knows no durations that --warm could give; it belongs to balanced and throughput\n"
    )


def test_options_of_a_compared_policy_are_used(
    capsys: pytest.CaptureFixture[str], files: list[str], tmp_path: Path
) -> None:
    page = ["--html", str(tmp_path / "out.html"), "--load-seconds", "0.2"]
    assert run(capsys, *files, *page, "--compare", "fcfs-chunked", "--token-budget", "128")[0] == 0
    assert run(capsys, *files, *page, "--policy", "vtc", "--compare", "throughput", "--warm")[0] == 0


def test_a_profile_of_nonsense_is_one_line_too(
    capsys: pytest.CaptureFixture[str], files: list[str], tmp_path: Path
) -> None:
    for changes, message in (
        ({"kv_bytes_per_token": 0}, "kv_bytes_per_token must be a whole number of at least 1, got 0"),
        ({"kv_bytes_per_token": 10**400}, "kv_bytes_per_token must hold numbers in [0, 1e+09]"),
        ({"draft": {"batch": [1], "ngram_ms": float("inf")}}, "draft.ngram_ms must hold numbers in [0, 1e+09]"),
        ({"components": {**COMPONENTS, "lm_head_ms": {"rows": [1], "ms": [1e8]}}}, "ms for one "),
    ):
        profile_file(tmp_path, **changes)
        code, out, err = run(capsys, *files)
        assert (code, out, err.count("\n")) == (2, "", 1)
        assert message in err


def test_a_warm_start_discovers_nothing(capsys: pytest.CaptureFixture[str], files: list[str]) -> None:
    cold, warm = (run(capsys, *files, *extra)[1] for extra in ([], ["--warm"]))
    assert cold != warm


def test_preferences_replace_fields_of_the_preset(files: list[str]) -> None:
    options = ["--policy", "throughput", "--prefer", "token_fairness=3", "--prefer", "estimate_ttl_ns=1e9"]
    policy = experiment_of(parser().parse_args(["simulate", *files, *options])).policy_config()
    expected = dataclasses.replace(policy_preset("throughput"), token_fairness=3.0, estimate_ttl_ns=10**9)
    assert policy == expected


def test_an_unknown_policy_is_refused_by_the_parser(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as caught:
        parser().parse_args(["simulate", "--policy", "fastest"])
    assert caught.value.code == 2
    assert "fcfs-chunked" in capsys.readouterr().err
