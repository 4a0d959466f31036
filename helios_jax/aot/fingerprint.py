"""What an executable depends on besides its own shapes: the key of a prepared core.

A serialised executable loads silently under another jaxlib and may crash on another CPU, so
a core is used only where every entry of its fingerprint is equal; each difference is a
readable reason for compiling again.
"""

from __future__ import annotations

import functools
import hashlib
import importlib.metadata
import os
import pathlib
import platform
import types

import jax
import jaxlib

import helios_jax.aot
import helios_jax.models
from helios_jax.scheduler import catalog

CPUINFO = pathlib.Path("/proc/cpuinfo")
FLAG_VARIABLES = ("XLA_FLAGS", "LIBTPU_INIT_ARGS")
JAX_SETTINGS = ("jax_enable_x64", "jax_default_matmul_precision", "jax_default_prng_impl", "jax_threefry_partitionable")
# x86 also lists what the kernel mitigates, which moves with microcode and shapes no code.
X86_CODEGEN_PREFIXES = (
    *("sse", "ssse", "avx", "fma", "f16c", "bmi", "amx", "aes", "pclmul", "popcnt", "adx", "sha", "vaes"),
    *("vpclmul", "gfni", "abm", "lzcnt", "movbe", "xop", "tbm", "fsgsbase", "rdseed", "rdrnd", "prfchw", "movdir"),
)
# Sources that shape the executables; the rest of `aot` only stores and runs them.
AOT_SOURCES = ("abi.py", "device_state.py", "compile.py", "programs")

Fingerprint = dict[str, str]


def cpu_features() -> str:
    """Sorted instruction-set features of this host, or its processor name without /proc."""
    try:
        text = CPUINFO.read_text()
    except OSError:
        return platform.processor() or platform.machine()
    for line in text.splitlines():
        name, _, value = line.partition(":")
        if name.strip() == "flags":
            return " ".join(sorted(f for f in set(value.split()) if f.startswith(X86_CODEGEN_PREFIXES)))
        if name.strip() == "Features":  # ARM lists nothing but instruction sets
            return " ".join(sorted(set(value.split())))
    return platform.processor() or platform.machine()


def helios_version() -> str:
    """Version of the installed distribution; "0" when run from a source tree."""
    try:
        return importlib.metadata.version("helios-jax")
    except importlib.metadata.PackageNotFoundError:
        return "0"


def _package_dir(module: types.ModuleType) -> pathlib.Path:
    return pathlib.Path(str(module.__file__)).resolve().parent


@functools.cache  # what this process has imported does not change with the files
def source_digest() -> str:
    """sha256 over the sources that decide what a program computes and how it is called."""
    aot, models = _package_dir(helios_jax.aot), _package_dir(helios_jax.models)
    files = [pathlib.Path(catalog.__file__).resolve(), *models.rglob("*.py")]
    for name in AOT_SOURCES:
        path = aot / name
        files += path.rglob("*.py") if path.is_dir() else [path]
    digest, root = hashlib.sha256(), aot.parent
    for path in sorted(set(files)):
        digest.update(f"{path.relative_to(root).as_posix()}\0".encode())
        digest.update(path.read_bytes() if path.exists() else b"")
    return digest.hexdigest()


def current_fingerprint() -> Fingerprint:
    """The fingerprint of this process: versions, devices, CPU features, flags and sources."""
    devices = jax.devices()
    entries = {
        "jax": jax.__version__,
        "jaxlib": jaxlib.__version__,
        "helios_jax": helios_version(),
        "python": ".".join(platform.python_version_tuple()[:2]),
        "backend": jax.default_backend(),
        "platform_version": " ".join(devices[0].client.platform_version.split()),
        "device_kind": devices[0].device_kind,
        "device_count": str(len(devices)),
        "machine": f"{platform.system()} {platform.machine()}",
        "cpu_features": cpu_features(),
        "sources": source_digest(),
    }
    entries |= {name: " ".join(sorted(os.environ.get(name, "").split())) for name in FLAG_VARIABLES}
    return entries | {name: str(getattr(jax.config, name, None)) for name in JAX_SETTINGS}


def differences(stored: Fingerprint, current: Fingerprint) -> list[str]:
    """One readable line for each entry that differs; empty means the core may be used."""
    lines = []
    for name in sorted(stored.keys() | current.keys()):
        old, new = stored.get(name, ""), current.get(name, "")
        if old == new:
            continue
        if name == "cpu_features":
            gone, more = set(old.split()) - set(new.split()), set(new.split()) - set(old.split())
            lines.append(f"CPU features differ (missing here: {_some(gone)}; only here: {_some(more)})")
        elif name == "sources":
            lines.append("the sources of the programs changed")
        else:
            lines.append(f"{name} was {old or 'unset'}, is {new or 'unset'}")
    return lines


def _some(names: set[str], most: int = 4) -> str:
    shown = sorted(names)[:most]
    return " ".join(shown) + (f" and {len(names) - most} more" if len(names) > most else "") if names else "none"
