"""Acceptance of draft tokens from published measurements, sampled reproducibly.

Names of a file of measurements (`acceptance_names` lists them):

    METHOD/TARGET                unconditional rates by position
    golden_al/MODEL/MODE         mean accepted lengths for 1, 2, ... drafts; their differences are the rates
    specforge_al/MODEL/BENCH     the same at some numbers of steps; rates between them are interpolated
                                 geometrically

With conditional rates c_1..c_k (c_d = p_d / p_(d-1)) the synthetic drafter proposes with a confidence
drawn from Beta(c / (1 - c), 1), whose mean is c, and the target accepts with that probability: the
confidences are calibrated and informative, and the mean over draws is the published rate. Draws are a
hash of (seed, request, position, depth): the same token is accepted whatever program runs it.
"""

from __future__ import annotations

import dataclasses
import math
import os.path
from pathlib import Path
from typing import Any, Protocol

import numpy as np

from helios_jax.errors import ConfigError
from helios_jax.simulation.profiles import read_json

MAX_RATE = 0.999  # a published 1.0 is a rounded one


@dataclasses.dataclass(frozen=True)
class AcceptanceTable:
    """Rates of one published measurement.

    Attributes:
        name: Its full name.
        rates: Unconditional rate of each position, not increasing, in [0, 1].
        method: Whose draft costs apply: eagle3, mtp or ngram.
    """

    name: str
    rates: tuple[float, ...]
    method: str

    @property
    def depth(self) -> int:
        """Positions that were measured."""
        return len(self.rates)

    def conditional(self) -> np.ndarray:
        """float64 [depth], probability of position d given that the ones before it were accepted; 0 after a rate of 0.

        Published tables have no rate of exactly 0 or 1 (`_sound`), synthetic ones may.
        """
        rates = np.array(self.rates)
        before = np.concatenate([[1.0], rates[:-1]])
        ratio = np.divide(rates, before, out=np.zeros(len(rates)), where=before > 0.0)
        return np.where(rates == 1.0, 1.0, np.minimum(MAX_RATE, ratio))


class Sampler(Protocol):
    """Who decides about proposals."""

    def draw(self, requests: np.ndarray, positions: np.ndarray, depth: int) -> tuple[np.ndarray, np.ndarray]:
        """As `AcceptanceSampler.draw`."""


class AcceptanceSampler:
    """Draws of the synthetic drafter and target.

    Args:
        table: Rates by position.
        seed: Of the draws.
    """

    def __init__(self, table: AcceptanceTable, seed: int = 0) -> None:
        self.table = table
        conditional = table.conditional()
        with np.errstate(divide="ignore"):
            self._exponent = (1.0 - conditional) / conditional  # infinite at 0: the confidence is 0
        self._key = np.uint64((seed * 0x9E3779B97F4A7C15 + 0xD1B54A32D192ED03) % 2**64)

    def draw(self, requests: np.ndarray, positions: np.ndarray, depth: int) -> tuple[np.ndarray, np.ndarray]:
        """Confidence and verdict of every proposal.

        Args:
            requests: int64 [n], a number for each request that no other one has.
            positions: int64 [n], position of the pending token.
            depth: Proposals, at most the table's; the last rate serves deeper ones.

        Returns:
            (confidence float64 [n, depth], accepted bool [n, depth]); accepted is each position's own verdict.
        """
        index = np.arange(depth, dtype=np.uint64)
        lanes = _mix(_mix(requests.astype(np.uint64) ^ self._key) + positions.astype(np.uint64))
        bits = _mix(lanes[:, None] + (index + np.uint64(1)) * np.uint64(0x9E3779B97F4A7C15))
        exponent = self._exponent[np.minimum(np.arange(depth), self.table.depth - 1)]
        confidence = _unit(bits) ** exponent
        return confidence, _unit(_mix(bits + np.uint64(0x2545F4914F6CDD1D))) < confidence


def uniform(requests: np.ndarray, positions: np.ndarray, seed: int) -> np.ndarray:
    """float64 [n] in (0, 1), a hash of its arguments."""
    key = np.uint64((seed * 0x9E3779B97F4A7C15 + 0xA0761D6478BD642F) % 2**64)
    return _unit(_mix(_mix(requests.astype(np.uint64) ^ key) + positions.astype(np.uint64)))


def _mix(bits: np.ndarray) -> np.ndarray:
    """splitmix64's finaliser (Steele, Lea, Flood, OOPSLA 2014); arithmetic modulo 2**64."""
    bits = (bits ^ (bits >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    bits = (bits ^ (bits >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return bits ^ (bits >> np.uint64(31))


def _unit(bits: np.ndarray) -> np.ndarray:
    """Uniform in (0, 1): 53 bits, the middle of each cell."""
    return ((bits >> np.uint64(11)).astype(np.float64) + 0.5) * 2.0**-53


def acceptance_names(path: Path) -> tuple[str, ...]:
    """Every name of a file.

    Raises:
        ConfigError: The file is missing or holds no acceptance rates.
    """
    return tuple(_tables(path))


def load_acceptance(source: str) -> AcceptanceTable:
    """The table of `FILE:NAME`: its whole name, one of the parts between slashes, or any text in it, if unique.

    Raises:
        ConfigError: No such file, or no or several tables match; the message lists them.
    """
    path, name = _split(source)
    tables = _tables(path)
    wanted = name.lower()
    matches = [table for table in tables.values() if wanted == table.name.lower()]
    matches = matches or [table for table in tables.values() if wanted in table.name.lower().split("/")]
    matches = matches or [table for table in tables.values() if wanted and wanted in table.name.lower()]
    if len(matches) == 1:
        return matches[0]
    if len(matches) > 1:
        raise ConfigError(f"{name!r} could be any of {', '.join(table.name for table in matches)}; say more of it")
    raise ConfigError(f"{path} has no acceptance table {name!r}; it has {', '.join(tables)}")


def _split(source: str) -> tuple[Path, str]:
    """The longest prefix before a colon that is a file."""
    cuts = [i for i, letter in enumerate(source) if letter == ":"]
    for cut in reversed(cuts):
        if os.path.isfile(source[:cut]):
            return Path(source[:cut]), source[cut + 1 :]
    if os.path.isfile(source):
        raise ConfigError(f"--acceptance takes FILE:NAME; {source} has {', '.join(_tables(Path(source)))}")
    raise ConfigError(f"--acceptance takes FILE:NAME, and {source.partition(':')[0]} is no file")


def _tables(path: Path) -> dict[str, AcceptanceTable]:
    document = read_json(path, "acceptance rates")
    if not isinstance(document, dict):
        raise ConfigError(f"{path} holds no acceptance rates")
    found: dict[str, AcceptanceTable] = {}

    def add(name: str, method: str, rates: list[float]) -> None:
        unique, count = name, 2
        while unique in found:
            unique, count = f"{name} ({count})", count + 1
        if rates:
            found[unique] = AcceptanceTable(unique, _sound(rates), _method(method))

    try:
        for entry in document.get("per_position", ()):
            add(f"{entry['method']}/{entry['target']}", entry["method"], list(entry["per_position"]))
        for model, modes in document.get("golden_al", {}).get("models", {}).items():
            for mode, lengths in modes.items():
                add(f"golden_al/{model}/{mode}", model, _from_lengths(dict(enumerate(lengths, 1))))
        for model, benches in document.get("specforge_al", {}).get("models", {}).items():
            for bench, lengths in benches.items():
                steps = {int(step): float(length) for step, length in lengths.items()}
                add(f"specforge_al/{model}/{bench}", "eagle3", _from_lengths(steps))
    except (KeyError, TypeError, ValueError, AttributeError) as error:
        raise ConfigError(f"{path} is malformed: {error!r}") from error
    if not found:
        raise ConfigError(f"{path} holds no acceptance rates")
    return found


def _sound(rates: list[Any]) -> tuple[float, ...]:
    """Rates as probabilities that do not grow with depth; a rate of 0 ends the table.

    Differences of separate runs may be noisy; a position is never accepted more often than the
    one before it.
    """
    sound: list[float] = []
    for rate in rates:
        if not isinstance(rate, (int, float)) or not math.isfinite(rate) or rate > 1:
            raise ValueError(f"{rate!r} is no rate")
        if rate <= 0:
            break
        sound.append(min(float(rate), MAX_RATE, *sound[-1:]))
    if not sound:
        raise ValueError("a table without a positive rate")
    return tuple(sound)


def _from_lengths(lengths: dict[int, float]) -> list[float]:
    """Rates whose sums give the mean accepted lengths (which count the bonus token).

    Between measured numbers of steps the rates fall geometrically: the ratio that makes their sum
    right is found by bisection.
    """
    rates: list[float] = []
    done, length = 0, 1.0
    for steps in sorted(lengths):
        gain = lengths[steps] - length
        if gain <= 0:
            break
        rates += _geometric(gain, steps - done, rates[-1] if rates else 1.0)
        done, length = steps, lengths[steps]
    return rates


def _geometric(total: float, count: int, before: float) -> list[float]:
    """`count` values before*q, before*q^2, ... of the given sum; equal ones when no q in (0, 1] reaches it."""
    low, high = 0.0, 1.0
    if total >= before * count:
        return [total / count] * count
    for _ in range(60):
        middle = (low + high) / 2
        low, high = (middle, high) if before * sum(middle**d for d in range(1, count + 1)) < total else (low, middle)
    return [before * high**d for d in range(1, count + 1)]


def _method(name: str) -> str:
    lowered = name.lower()
    return next((method for method in ("ngram", "mtp") if method in lowered), "eagle3")
