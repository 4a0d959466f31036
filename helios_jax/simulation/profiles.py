"""Cost profiles: measured step times of a real GPU, interpolated for every program shape.

A profile file (schema 1) holds, for each model and GPU, tables in milliseconds of GPU time a
step and the components that they were composed of. The components compose every table to the
rounding of the file (a test compares all of them), and cover what the tables leave out (mixed
steps behind a prefix, verification at any context), so the components are what is used:

    decode  = linear(B) + head(B) + attention(rows, context)
    prefill = linear(tokens) + head(rows) + sum of prompt attention(chunk, prefix)
    verify  = linear(P) + head(P) + attention(rows, context) * verify_attn_factor + D * draft(B)
    mixed   = verify or decode of its decode rows, its prompt's attention, linear over all tokens

Captured programs compute their padding: linear layers and the head are charged at the physical
extents, attention (whose kernels end at each row's length) only for the rows in use.

Limits: one replica, bf16, no prefix sharing; host time is not in the tables; values between
grid points are linear, and beyond the last grid point they continue the last segment. State
operations are not in the tables: they are charged `STATE_MS` a launch, and vision is refused.
"""

from __future__ import annotations

import bisect
import dataclasses
import itertools
import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from helios_jax.errors import ConfigError
from helios_jax.scheduler.catalog import ProgramKind, ProgramShape, ProposalSource

SCHEMA = 1
STATE_MS = 0.05  # initialise, snapshot, restore: a few small kernels; no table has them
DEFAULT_METHOD = "eagle3"  # of drafts, where nothing says otherwise
NS_PER_MS = 1e6
MAX_NUMBER = 1e9  # in a profile: ms, tokens, bytes
MAX_STEP_MS = 3.6e6  # an hour; sums of nanoseconds must fit 64 bits


class Work(NamedTuple):
    """What a frame really has to do, as far as its duration depends on it.

    Attributes:
        prompts: (chunk, prefix) tokens of each prompt row.
        contexts: Tokens in the cache of each decoding row.
    """

    prompts: tuple[tuple[int, int], ...] = ()
    contexts: tuple[int, ...] = ()


class Curve:
    """Piecewise linear function of one number, continued beyond its ends (never below the first value)."""

    def __init__(self, x: Sequence[float], y: Sequence[float]) -> None:
        self.x, self.y = tuple(x), tuple(y)

    def __call__(self, at: float) -> float:
        x, y = self.x, self.y
        if at <= x[0] or len(x) == 1:
            return y[0]
        i = min(bisect.bisect_left(x, at), len(x) - 1)
        return y[i - 1] + (y[i] - y[i - 1]) * (at - x[i - 1]) / (x[i] - x[i - 1])


class Surface:
    """Bilinear function of (row, column). The curves of rows that were asked for are kept: whole numbers, few."""

    def __init__(self, rows: Sequence[float], columns: Sequence[float], values: Sequence[Sequence[float]]) -> None:
        self._columns = tuple(columns)
        self._by_column = [Curve(rows, [line[j] for line in values]) for j in range(len(columns))]
        self._kept: dict[float, Curve] = {}

    def __call__(self, row: float, column: float) -> float:
        curve = self._kept.get(row)
        if curve is None:
            curve = self._kept[row] = Curve(self._columns, [by_row(row) for by_row in self._by_column])
        return curve(column)


@dataclasses.dataclass(frozen=True, kw_only=True, eq=False)
class CostProfile:
    """Step times of one model on one GPU; all in ms.

    Attributes:
        profile_id: Its name in the file.
        model, gpu: What was measured.
        kv_bytes_per_token: Cache bytes of a token, all layers.
        linear: Of packed tokens.
        head: Of rows whose logits are computed.
        attn_decode: Of decoding rows x mean context.
        attn_prefill: Of chunk x prefix.
        verify_factor: Attention of more than one target row, relative to one.
        drafts: Method -> cost of one proposal position, of rows.
    """

    profile_id: str
    model: str
    gpu: str
    kv_bytes_per_token: int
    linear: Curve
    head: Curve
    attn_decode: Surface
    attn_prefill: Surface
    verify_factor: float
    drafts: Mapping[str, Curve]

    def duration_ms(self, shape: ProgramShape, work: Work, method: str = DEFAULT_METHOD) -> float:
        """GPU time of one execution of a program.

        Args:
            shape: The physical program, which fixes what is computed.
            work: The rows in use, which fix the attention.
            method: Proposal method of speculative programs, a key of `drafts`.

        Raises:
            ConfigError: A vision program, or a method without a cost.
        """
        kind, rows = shape.kind, shape.batch_capacity
        if kind is ProgramKind.DECODE:
            return self.linear(rows) + self.head(rows) + self._attention(work.contexts, 1)
        if kind in (ProgramKind.PREFILL, ProgramKind.SCORED_PREFILL):
            head_rows = shape.token_capacity if kind is ProgramKind.SCORED_PREFILL else rows
            return self.linear(shape.token_capacity) + self.head(head_rows) + self._prompt_attention(work.prompts)
        if kind is ProgramKind.SPECULATIVE:
            targets = shape.packed_capacity or rows * shape.token_capacity
            attention = self._attention(work.contexts, shape.token_capacity)
            return self.linear(targets) + self.head(targets) + attention + self._draft(shape, method)
        if kind is ProgramKind.MIXED:
            targets = (rows - 1) * shape.token_capacity
            base = self.linear(shape.prefill_capacity + targets) + self.head(targets + 1)
            attention = self._attention(work.contexts, shape.token_capacity) + self._prompt_attention(work.prompts)
            return base + attention + self._draft(shape, method)
        if kind is ProgramKind.VISION:
            raise ConfigError(f"profile {self.profile_id} has no vision times; leave vision programs out")
        return STATE_MS

    def _attention(self, contexts: Sequence[int], width: int) -> float:
        """Decode attention of the rows in use, at their mean context (its cost follows the sum)."""
        if not contexts:
            return 0.0
        factor = self.verify_factor if width > 1 else 1.0
        return factor * self.attn_decode(len(contexts), sum(contexts) / len(contexts))

    def _prompt_attention(self, prompts: Sequence[tuple[int, int]]) -> float:
        """Packed rows launch the kernels once: what each row adds to the cheapest call is summed."""
        if not prompts:
            return 0.0
        least = self.attn_prefill(0, 0)
        return least + sum(max(0.0, self.attn_prefill(chunk, prefix) - least) for chunk, prefix in prompts)

    def _draft(self, shape: ProgramShape, method: str) -> float:
        """D proposal positions; at width one a learned source still runs one, to keep its context."""
        if shape.proposal_source is not ProposalSource.LEARNED:
            return 0.0  # copied proposals cost the device nothing
        if method not in self.drafts:
            known = ", ".join(self.drafts)
            raise ConfigError(f"no draft cost for {method!r} in profile {self.profile_id}; it has {known}")
        return max(1, shape.proposal_depth) * self.drafts[method](shape.batch_capacity)


class ProfileCosts:
    """A profile as the device asks for durations: ns of a shape and its work.

    Raises:
        ConfigError: A step of more than `MAX_STEP_MS`, as tables of nonsense give.
    """

    def __init__(self, profile: CostProfile, method: str = DEFAULT_METHOD) -> None:
        self.profile, self._method = profile, method

    def __call__(self, shape: ProgramShape, work: Work = Work()) -> int:
        step_ms = self.profile.duration_ms(shape, work, self._method)
        if not step_ms <= MAX_STEP_MS:
            raise ConfigError(f"profile {self.profile.profile_id}: {step_ms:g} ms for one {shape.kind} step is no time")
        return max(1, round(NS_PER_MS * step_ms))


def profile_ids(path: Path) -> tuple[str, ...]:
    """Ids of the profiles of a file, in its order.

    Raises:
        ConfigError: The file is missing or is no cost profile file.
    """
    return tuple(str(entry["id"]) for entry in _entries(path))


def load_profile(path: Path, profile_id: str) -> CostProfile:
    """Read one profile and check every table of it.

    Raises:
        ConfigError: Naming the file and what is wrong with it; for an unknown id, the ids that exist.
    """
    entries = {str(entry["id"]): entry for entry in _entries(path)}
    if profile_id not in entries:
        raise ConfigError(f"{path} has no profile {profile_id!r}; it has {', '.join(entries)}")
    reader = _Reader(f"{path}, profile {profile_id}", entries[profile_id])
    drafts = {
        key.removesuffix("_per_position_ms"): reader.curve(("draft", key), ("draft", "batch"))
        for key in reader.mapping("draft")
        if key.endswith("_per_position_ms")
    }
    drafts["ngram"] = Curve((1.0,), (reader.number("draft", "ngram_ms"),))
    return CostProfile(
        profile_id=profile_id,
        model=str(reader.mapping("model").get("name", "?")),
        gpu=str(entries[profile_id].get("gpu", "?")),
        kv_bytes_per_token=reader.count("kv_bytes_per_token"),
        linear=reader.curve(("components", "linear_ms", "ms"), ("components", "linear_ms", "tokens")),
        head=reader.curve(("components", "lm_head_ms", "ms"), ("components", "lm_head_ms", "rows")),
        attn_decode=reader.surface(("components", "attn_decode_ms"), "batch", "ctx"),
        attn_prefill=reader.surface(("components", "attn_prefill_ms"), "chunk", "prefix"),
        verify_factor=reader.number("components", "verify_attn_factor"),
        drafts=drafts,
    )


def _entries(path: Path) -> list[dict[str, Any]]:
    document = read_json(path, "cost profiles")
    profiles = document.get("profiles") if isinstance(document, dict) else None
    if not isinstance(document, dict) or document.get("schema") != SCHEMA or not isinstance(profiles, list):
        raise ConfigError(f"{path} is no cost profile file: it needs schema {SCHEMA} and a list 'profiles'")
    if not profiles or not all(isinstance(entry, dict) and "id" in entry for entry in profiles):
        raise ConfigError(f"{path} holds no profiles, or one without an id")
    return profiles


def read_json(path: Path, what: str) -> Any:
    """A JSON document.

    Raises:
        ConfigError: It cannot be read or parsed.
    """
    try:
        return json.loads(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise ConfigError(f"cannot read {what} from {path}: {error.strerror or error}") from error
    except (ValueError, RecursionError) as error:
        raise ConfigError(f"{path} is no JSON file of {what}: {error}") from error


class _Reader:
    """Checked access to one profile's nested tables; errors name the place."""

    def __init__(self, where: str, entry: dict[str, Any]) -> None:
        self._where, self._entry = where, entry

    def _at(self, *keys: str) -> Any:
        value: Any = self._entry
        for count, key in enumerate(keys, 1):
            if not isinstance(value, dict) or key not in value:
                raise ConfigError(f"{self._where}: {'.'.join(keys[:count])} is missing")
            value = value[key]
        return value

    def mapping(self, *keys: str) -> dict[str, Any]:
        value = self._at(*keys)
        if not isinstance(value, dict):
            raise ConfigError(f"{self._where}: {'.'.join(keys)} must be an object")
        return value

    def number(self, *keys: str) -> float:
        return self._checked([self._at(*keys)], keys)[0]

    def count(self, *keys: str) -> int:
        value = self.number(*keys)
        if value < 1 or value != int(value):
            raise ConfigError(f"{self._where}: {'.'.join(keys)} must be a whole number of at least 1, got {value:g}")
        return int(value)

    def _checked(self, values: Any, keys: Sequence[str], length: int | None = None) -> list[float]:
        good = isinstance(values, list) and values and (length is None or len(values) == length)
        if not good or not all(type(v) in (int, float) and 0 <= v <= MAX_NUMBER for v in values):
            wanted = "numbers" if length is None else f"{length} numbers"
            raise ConfigError(f"{self._where}: {'.'.join(keys)} must hold {wanted} in [0, {MAX_NUMBER:g}]")
        return [float(value) for value in values]

    def _axis(self, *keys: str) -> list[float]:
        axis = self._checked(self._at(*keys), keys)
        if any(b <= a for a, b in itertools.pairwise(axis)):
            raise ConfigError(f"{self._where}: {'.'.join(keys)} must grow strictly")
        return axis

    def curve(self, values: Sequence[str], axis: Sequence[str]) -> Curve:
        x = self._axis(*axis)
        return Curve(x, self._checked(self._at(*values), values, len(x)))

    def surface(self, place: Sequence[str], rows: str, columns: str) -> Surface:
        x, y = self._axis(*place, rows), self._axis(*place, columns)
        table = self._at(*place, "ms")
        if not isinstance(table, list) or len(table) != len(x):
            raise ConfigError(f"{self._where}: {'.'.join(place)}.ms must have {len(x)} rows, one a value of {rows}")
        return Surface(x, y, [self._checked(line, (*place, "ms"), len(y)) for line in table])
