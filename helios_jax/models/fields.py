"""Typed access to the fields of a model configuration, whatever file it came from.

Every wrong or missing field becomes one `CheckpointError` that names the file and the field,
so family files read configurations without a single check of their own.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Mapping
from typing import Any

from helios_jax.errors import CheckpointError

_MISSING = object()


@dataclasses.dataclass(frozen=True)
class Fields:
    """The fields of one configuration.

    Attributes:
        values: Name -> value, as stored. A null counts as absent.
        where: File (and section) that messages name.
        prefix: Put before every name that is asked for, as in GGUF's `llama.block_count`.
    """

    values: Mapping[str, Any]
    where: str
    prefix: str = ""

    def get(self, name: str, default: Any = None) -> Any:
        """The value as stored, or `default` where it is absent or null."""
        value = self.values.get(self.prefix + name)
        return default if value is None else value

    def integer(self, name: str, default: Any = _MISSING) -> Any:
        """An int; floats that are whole numbers count."""
        value = self._required(name, default)
        if value is default:
            return value
        if isinstance(value, bool) or not isinstance(value, (int, float)) or value != math.floor(value):
            raise self._wrong(name, value, "an integer")
        return int(value)

    def number(self, name: str, default: Any = _MISSING) -> Any:
        """A finite float."""
        value = self._required(name, default)
        if value is default:
            return value
        if isinstance(value, bool) or not isinstance(value, (int, float)) or not math.isfinite(value):
            raise self._wrong(name, value, "a finite number")
        return float(value)

    def boolean(self, name: str, default: bool) -> bool:
        value = self.get(name, default)
        if not isinstance(value, bool):
            raise self._wrong(name, value, "true or false")
        return value

    def text(self, name: str, default: str) -> str:
        value = self.get(name, default)
        if not isinstance(value, str):
            raise self._wrong(name, value, "a string")
        return value

    def section(self, name: str) -> Fields | None:
        """A nested object as Fields of its own; None where it is absent."""
        value = self.get(name)
        if value is None:
            return None
        if not isinstance(value, Mapping):
            raise self._wrong(name, value, "an object")
        return Fields(value, f"{self.where} ({name})")

    def _required(self, name: str, default: Any) -> Any:
        value = self.get(name, default)
        if value is _MISSING:
            raise CheckpointError(f"{self.where} lacks the field {self.prefix}{name}")
        return value

    def _wrong(self, name: str, value: Any, wanted: str) -> CheckpointError:
        shown = " ".join(repr(value).split())[:60]
        return CheckpointError(f"{self.where}: {self.prefix}{name} is {shown}; it must be {wanted}")


def token_ids(value: Any, where: str) -> tuple[int, ...]:
    """Token ids given as one integer, a list or nothing.

    Raises:
        CheckpointError: Anything else.
    """
    items = [] if value is None else value if isinstance(value, list) else [value]
    if not all(isinstance(item, int) and not isinstance(item, bool) for item in items):
        raise CheckpointError(f"{where} must be a token id or a list of them, not {items!r}"[:200])
    return tuple(dict.fromkeys(items))
