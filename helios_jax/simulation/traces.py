"""Traces: when requests arrive and how long they are, from a file or from a Poisson process.

Formats, told apart by their content (the first line, or the top-level value):

    azure      CSV TIMESTAMP,ContextTokens,GeneratedTokens     arrival times are the file's
    mooncake   JSON lines timestamp (ms), input_length, ...    on a 3 s grid: uniform jitter spreads them over it
    servegen   JSON list of client models                      a renewal process a client, lengths from quantiles
    lengths    CSV num_prefill_tokens,num_decode_tokens        Poisson arrivals at `rate`, lengths drawn from the rows
    poisson    no file                                         Poisson arrivals, lognormal lengths

`poisson:RATE` draws prompts from a lognormal with median 512 and sigma 1 (mean 844), outputs from one
with median 128 and sigma 0.8 (mean 176), both at least 1 and cut at `MAX_PROMPT` and `MAX_OUTPUT`.
A file of client models takes those of one category, `FILE:CATEGORY`.

Everything is drawn from one seed. Times are seconds of the trace; `speed` divides them, so the load
grows and the order stays. Knows nothing of programs or costs.
"""

from __future__ import annotations

import csv
import dataclasses
import datetime
import io
import json
import math
import os.path
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from helios_jax.errors import ConfigError

POISSON = "poisson:"
PROMPT_MEDIAN, PROMPT_SIGMA, MAX_PROMPT = 512.0, 1.0, 8192
OUTPUT_MEDIAN, OUTPUT_SIGMA, MAX_OUTPUT = 128.0, 0.8, 2048
MOONCAKE_GRID_S = 3.0
BLOCK_TOKENS = 512  # of a Mooncake hash id
SYNTHETIC_CLIENTS = 8  # of traces that name none: client k sends a share proportional to 1/k
MAX_REQUESTS = 2_000_000  # about 1 KB each
MAX_LENGTH = 2**31 - 1
SHAPES = (0.01, 10_000.0)  # of gamma and Weibull gaps; measured ones are 0.014 to 16
MAX_RATE = 1e6  # of one client, requests a second
CREDITS = {
    "azure": "Azure/AzurePublicDataset (CC-BY-4.0), Splitwise, ISCA 2024",
    "mooncake": "kvcache-ai/Mooncake FAST25-release (Apache-2.0)",
    "servegen": "alibaba/ServeGen (Apache-2.0), reduced to quantiles",
    "lengths": "microsoft/vidur (MIT)",
    "poisson": "",
}


Blocks = tuple[int, ...]


@dataclasses.dataclass(frozen=True, kw_only=True, eq=False)
class Trace:
    """Requests in the order of their arrival; columns [n].

    Attributes:
        name: As given on the command line.
        kind: A key of `CREDITS`.
        at_s: float64, seconds since the start of the run, not decreasing.
        prompt_len, output_len: int64, at least 1.
        client: int64, who sent it, from 0.
        blocks: Of every prompt the ids of its blocks of `BLOCK_TOKENS` tokens, the last one shorter; prompts whose
            leading ids are equal share these tokens. One without ids shares nothing; empty if none has any.
    """

    name: str
    kind: str
    at_s: np.ndarray
    prompt_len: np.ndarray
    output_len: np.ndarray
    client: np.ndarray
    blocks: tuple[Blocks, ...] = ()

    def __len__(self) -> int:
        return len(self.at_s)


def load_trace(
    source: str, *, seconds: float, speed: float = 1.0, seed: int = 0, start_s: float = 0.0, rate: float | None = None
) -> Trace:
    """The arrivals of the first `seconds` of a run.

    Args:
        source: FILE, FILE:CATEGORY or poisson:RATE.
        seconds: Length of the run; seconds * speed of the trace are used.
        speed: Arrivals a second are multiplied by it.
        seed: Of jitter, lengths and arrival processes.
        start_s: Where in the trace the run begins.
        rate: Requests a second of a file that has lengths only; refused with any other.

    Raises:
        ConfigError: Unreadable, unknown or malformed file, or a parameter out of range; the message
            says which line.
    """
    for name, value in (("seconds", seconds), ("speed", speed)):
        if not math.isfinite(value) or value <= 0:
            raise ConfigError(f"{name} must be finite and greater than zero, got {value}")
    if not math.isfinite(start_s) or start_s < 0:
        raise ConfigError(f"the start must be finite and at least 0, got {start_s}")
    if seed < 0:
        raise ConfigError(f"seed must be at least 0, got {seed}")
    window = (start_s, start_s + seconds * speed)
    rng = np.random.default_rng(seed)
    kind, at_s, prompt_len, output_len, client, blocks = _columns(source, window, rng, rate)
    if rate is not None and kind != "lengths":
        raise ConfigError(f"{source} has arrival times of its own; the rate belongs to files that have lengths only")
    if start_s and kind in ("lengths", "poisson"):
        raise ConfigError(f"{source} has Poisson arrivals, which are the same from any start; leave the start out")
    keep = (at_s >= window[0]) & (at_s < window[1])
    _bounded(int(keep.sum()))
    order = np.flatnonzero(keep)[np.argsort(at_s[keep], kind="stable")]
    if client is None:
        client = _synthetic_clients(len(at_s), rng)
    return Trace(
        name=source, kind=kind, at_s=(at_s[order] - start_s) / speed, prompt_len=prompt_len[order],
        output_len=output_len[order], client=client[order],
        blocks=tuple(blocks[i] for i in order.tolist()) if blocks else (),
    )  # fmt: skip


_Window = tuple[float, float]


class _Columns(NamedTuple):
    """The rows of a source, in its order; clients and blocks where it names them."""

    kind: str
    at_s: np.ndarray
    prompt_len: np.ndarray
    output_len: np.ndarray
    client: np.ndarray | None = None
    blocks: tuple[Blocks, ...] = ()


def _columns(source: str, window: _Window, rng: np.random.Generator, rate: float | None) -> _Columns:
    if source.startswith(POISSON):
        return _poisson(_rate_of(source), window, rng)
    path, category = _split(source)
    text = _read(path)
    first = text.lstrip()[:1]
    if first == "[":
        return _servegen(path, text, category, window, rng)
    if category is not None:
        raise ConfigError(f"{path} has no categories; only files of client models take FILE:CATEGORY")
    if first == "{":
        return _mooncake(path, text, rng)
    header = text.split("\n", 1)[0].strip().split(",")
    if header[:3] == ["TIMESTAMP", "ContextTokens", "GeneratedTokens"]:
        return _azure(path, text)
    if header[:2] == ["num_prefill_tokens", "num_decode_tokens"]:
        return _lengths(path, text, window, rng, rate)
    raise ConfigError(f"{path} is no trace that is known here (first line {','.join(header)[:60]!r}); known are "
                      "Azure CSV, Mooncake JSON lines, ServeGen client models and Vidur lengths")  # fmt: skip


def _rate_of(source: str) -> float:
    text = source.removeprefix(POISSON)
    try:
        rate = float(text)
    except ValueError:
        rate = math.nan
    if not math.isfinite(rate) or rate <= 0:
        raise ConfigError(f"poisson:RATE needs a rate in requests a second greater than zero, got {text!r}")
    return rate


def _split(source: str) -> tuple[Path, str | None]:
    if not os.path.exists(source) and ":" in source:  # of os.path: too long a name is no file, not an error
        name, _, category = source.partition(":")
        if os.path.isfile(name):
            return Path(name), category
    return Path(source), None


def _read(path: Path) -> str:
    try:
        text = path.read_text(encoding="utf-8-sig")
    except (OSError, UnicodeDecodeError) as error:
        reason = error.strerror if isinstance(error, OSError) else "it is not UTF-8 text"
        raise ConfigError(f"cannot read the trace {path}: {reason}") from error
    if not text.strip():
        raise ConfigError(f"the trace {path} is empty")
    return text


_EPOCH = datetime.datetime(2000, 1, 1, tzinfo=datetime.UTC)
_MOMENT = re.compile(r"(\d{4}-\d\d-\d\d[ T]\d\d:\d\d:\d\d)(\.\d+)?(Z|[+-]\d\d:\d\d)?")


def _azure(path: Path, text: str) -> _Columns:
    """The first row is second 0. Times of 2023 have 100 ns and no offset, those of 2024 an offset: UTC without one."""

    def convert(row: list[str]) -> tuple[float, int, int]:
        match = _MOMENT.fullmatch(row[0].strip())
        if match is None:
            raise ValueError("the time is not YYYY-MM-DD HH:MM:SS.FRACTION, with an offset or without")
        moment, fraction, offset = match.groups()  # `datetime` would cut the fraction
        seconds = datetime.datetime.fromisoformat(moment + (offset or "+00:00")) - _EPOCH
        return seconds.total_seconds() + float(fraction or 0), int(row[1]), int(row[2])

    at_s, prompt, output = _rows(path, text, convert).T
    return _Columns("azure", at_s - at_s.min(), prompt.astype(np.int64), output.astype(np.int64))


def _lengths(path: Path, text: str, window: _Window, rng: np.random.Generator, rate: float | None) -> _Columns:
    if rate is None or not math.isfinite(rate) or rate <= 0:
        raise ConfigError(f"{path} has lengths without arrival times; give --rate, requests a second above zero")
    rows = _rows(path, text, lambda row: (0.0, int(row[0]), int(row[1])))
    at_s = _arrivals(rate, window, rng)
    drawn = rows[rng.integers(0, len(rows), len(at_s))].astype(np.int64)
    return _Columns("lengths", at_s, drawn[:, 1], drawn[:, 2])


def _rows(path: Path, text: str, convert: Callable[[list[str]], tuple[float, int, int]]) -> np.ndarray:
    """float64 [n, (seconds, prompt, output)] of a CSV file with a header."""
    rows, lines = [], csv.reader(io.StringIO(text))
    next(lines)
    try:
        for row in lines:
            if row:
                rows.append(_positive(convert(row)))
    except (ValueError, IndexError, OverflowError, csv.Error) as error:
        found = text.splitlines()[lines.line_num - 1 : lines.line_num]
        raise ConfigError(f"{path}, line {lines.line_num}: {''.join(found)[:80]!r} is no request ({error})") from error
    if not rows:
        raise ConfigError(f"the trace {path} holds no requests")
    return np.array(rows, np.float64)


def _positive(row: tuple[float, int, int]) -> tuple[float, int, int]:
    if not math.isfinite(row[0]) or not (1 <= row[1] <= MAX_LENGTH and 1 <= row[2] <= MAX_LENGTH):
        raise ValueError(f"times must be finite and lengths at least 1, at most {MAX_LENGTH}")
    return row


def _whole(value: object) -> int:
    if type(value) is not int:
        raise ValueError(f"a length or an id must be a whole number, not {str(value)[:20]}")
    return value


def _mooncake(path: Path, text: str, rng: np.random.Generator) -> _Columns:
    rows, blocks = [], []
    for number, line in enumerate(text.splitlines(), 1):
        if not line.strip():
            continue
        try:
            entry = json.loads(line)
            row = (entry["timestamp"] / 1000.0, _whole(entry["input_length"]), _whole(entry["output_length"]))
            rows.append(_positive(row))
            blocks.append(_blocks(entry.get("hash_ids", []), row[1]))
        except KeyError as error:
            raise ConfigError(f"{path}, line {number}: no request ({error} is missing)") from error
        except (ValueError, TypeError, OverflowError, RecursionError) as error:
            raise ConfigError(f"{path}, line {number}: no request ({error})") from error
    at_s, prompt, output = np.array(rows, np.float64).T
    at_s = at_s + rng.uniform(0.0, MOONCAKE_GRID_S, len(at_s))
    return _Columns("mooncake", at_s, prompt.astype(np.int64), output.astype(np.int64), None, tuple(blocks))


def _blocks(ids: Any, prompt_len: int) -> Blocks:
    blocks = tuple(map(_whole, ids))
    if len(blocks) not in (0, -(-prompt_len // BLOCK_TOKENS)):
        raise ValueError(f"{len(blocks)} hash_ids do not cover {prompt_len} tokens in blocks of {BLOCK_TOKENS}")
    return blocks


def _servegen(path: Path, text: str, category: str | None, window: _Window, rng: np.random.Generator) -> _Columns:
    try:
        models = json.loads(text)
        categories = sorted({model["category"] for model in models})
        if not all(isinstance(name, str) for name in categories):
            raise TypeError("a category that is no text")
    except (ValueError, KeyError, TypeError, RecursionError) as error:
        raise ConfigError(f"{path} is no list of client models ({error})") from error
    if category not in categories:
        given = "needs a category" if category is None else f"has no category {category!r}"
        raise ConfigError(f"{path} {given}: give FILE:CATEGORY with one of {', '.join(categories)}")
    chosen = [model for model in models if model["category"] == category]
    try:
        parts = [_client(model, number, window, rng) for number, model in enumerate(chosen)]
    except (KeyError, TypeError, ValueError, IndexError, ArithmeticError) as error:
        raise ConfigError(f"{path}: a client model of {category} is malformed ({error!r})") from error
    at_s, prompt, output, client = (np.concatenate(column) for column in zip(*parts, strict=True))
    return _Columns("servegen", at_s, prompt, output, client)


def _client(model: dict[str, Any], number: int, window: _Window, rng: np.random.Generator) -> tuple[np.ndarray, ...]:
    """Arrivals of one client: a renewal process a window, lengths from the quantiles of their six hours.

    A window says (start, requests/s, CV, family, shape, scale). The shape of the gaps is kept and
    their mean set to the measured rate: the fitted scale of a heavy tail does not reproduce it.
    """
    times = []
    for begin, rate, _, family, shape, _ in model["windows_10min"]:
        low, high = max(window[0], begin), min(window[1], begin + 600.0)
        if rate <= 0 or high <= low:  # NaN goes on and is refused
            continue
        if not (SHAPES[0] <= shape <= SHAPES[1] and rate <= MAX_RATE):
            raise ValueError(f"shape {shape} is not in [{SHAPES[0]:g}, {SHAPES[1]:g}], or rate {rate} too large")
        count = _bounded(rate * (high - low))
        draws = rng.weibull(shape, count) if family == "Weibull" else rng.gamma(shape, 1.0, count)
        mean = math.gamma(1.0 + 1.0 / shape) if family == "Weibull" else shape
        at = low + np.cumsum(draws) / (mean * rate)
        times.append(at[at < high])
    at_s = np.concatenate(times) if times else np.zeros(0)
    levels = _rising(model["quantile_pct"], 100.0) / 100.0
    begins = sorted(int(begin) for begin in model["token_quantiles_6h"])
    if not begins:
        raise ValueError("token_quantiles_6h is empty")
    lengths = np.ones((2, len(at_s)), np.int64)
    period = np.searchsorted(begins, at_s, side="right") - 1
    for index, begin in enumerate(begins):
        members = np.maximum(period, 0) == index
        quantiles = model["token_quantiles_6h"][str(begin)]
        for row, key in enumerate(("input_tokens", "output_tokens")):
            values = _rising(quantiles[key], MAX_LENGTH)
            drawn = np.interp(rng.uniform(size=int(members.sum())), levels, values)
            lengths[row, members] = np.maximum(1, np.rint(drawn))
    return at_s, lengths[0], lengths[1], np.full(len(at_s), number)


def _rising(values: Any, most: float) -> np.ndarray:
    """float64 of quantiles or of their levels; np.interp would take anything, and say nothing of a fall."""
    column = np.array(values, np.float64)
    within = (column >= 0) & (column <= most)
    if column.ndim != 1 or not len(column) or not within.all() or (np.diff(column) < 0).any():
        raise ValueError(f"quantiles and levels must rise within [0, {most:g}]")
    return column


def _poisson(rate: float, window: _Window, rng: np.random.Generator) -> _Columns:
    at_s = _arrivals(rate, window, rng)
    prompt = _lognormal(PROMPT_MEDIAN, PROMPT_SIGMA, MAX_PROMPT, len(at_s), rng)
    output = _lognormal(OUTPUT_MEDIAN, OUTPUT_SIGMA, MAX_OUTPUT, len(at_s), rng)
    return _Columns("poisson", at_s, prompt, output)


def _arrivals(rate: float, window: _Window, rng: np.random.Generator) -> np.ndarray:
    gaps = rng.exponential(1.0 / rate, _bounded(rate * (window[1] - window[0])))
    return window[0] + np.cumsum(gaps)


def _bounded(expected: float) -> int:
    """Draws that cover `expected` arrivals with certainty enough; more than MAX_REQUESTS is refused."""
    if expected > MAX_REQUESTS:
        raise ConfigError(f"about {expected:.3g} requests is more than {MAX_REQUESTS}; shorten --seconds or the rate")
    return int(expected + 10.0 * math.sqrt(expected) + 20.0)


def _lognormal(median: float, sigma: float, most: int, count: int, rng: np.random.Generator) -> np.ndarray:
    drawn = np.rint(median * np.exp(sigma * rng.standard_normal(count)))
    return np.clip(drawn, 1, most).astype(np.int64)


def _synthetic_clients(count: int, rng: np.random.Generator) -> np.ndarray:
    shares = 1.0 / np.arange(1, SYNTHETIC_CLIENTS + 1)
    return rng.choice(SYNTHETIC_CLIENTS, size=count, p=shares / shares.sum())
