"""Tokenizers of Hugging Face directories: which file says what, and writing such files."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

import tokenizers

from helios_jax.errors import CheckpointError
from helios_jax.text.tokenizer import DEFAULT_TEMPLATE, TokenizerParts, put_around

if TYPE_CHECKING:
    from helios_jax.text.tokenizer import Tokenizer

TOKENIZER_NAME = "tokenizer.json"
CONFIG_NAME = "tokenizer_config.json"
GENERATION_NAME = "generation_config.json"
TEMPLATE_NAME = "chat_template.jinja"
OLD_TEMPLATE_NAME = "chat_template.json"  # of processors: {"chat_template": ...}
MORE_TEMPLATES = "additional_chat_templates"
TOKEN_NAMES = ("bos_token", "eos_token", "unk_token", "sep_token", "pad_token", "cls_token", "mask_token")
ADDED_TOKEN_FLAGS = ("single_word", "lstrip", "rstrip", "normalized", "special")


def parts_from_hf(directory: Path) -> TokenizerParts:
    """What the files of a model directory say.

    Raises:
        CheckpointError: `tokenizer.json` is missing, or a file is damaged or contradicts another.
    """
    config = read_json(directory / CONFIG_NAME)
    backend = _read_backend(directory)
    _add_missing_tokens(backend, config, directory)
    special = _special_tokens(directory, config)
    bos_id = _id_of(backend, special.get("bos_token"))
    eos_id = _id_of(backend, special.get("eos_token"))
    _follow_config(backend, config, bos_id, eos_id)
    return TokenizerParts(
        backend=backend,
        special_tokens=special,
        eos_token_ids=_eos_ids(directory, eos_id),
        bos_token_id=bos_id,
        chat_templates=_chat_templates(directory, config),
    )


def read_json(path: Path) -> dict[str, Any]:
    """An object from a JSON file; {} when the file is not there.

    Raises:
        CheckpointError: The file cannot be read, or is no JSON object.
    """
    if not path.is_file():
        return {}
    try:
        found = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError, RecursionError) as error:
        raise CheckpointError(f"{path} cannot be read as JSON: {_one_line(error)}") from error
    if not isinstance(found, dict):
        raise CheckpointError(f"{path} must hold a JSON object, it holds a {type(found).__name__}")
    return found


def _read_backend(directory: Path) -> tokenizers.Tokenizer:
    path = directory / TOKENIZER_NAME
    if not path.is_file():
        raise CheckpointError(
            f"{directory} has no {TOKENIZER_NAME}; save the model's tokenizer there in the fast format "
            "(transformers: AutoTokenizer.from_pretrained(...).save_pretrained(...))"
        )
    try:
        backend = tokenizers.Tokenizer.from_file(str(path))
    except Exception as error:  # `tokenizers` raises bare Exception for every kind of bad file
        raise CheckpointError(f"{path} cannot be read as a tokenizer: {_one_line(error)}") from error
    backend.no_padding()  # settings of training; a prompt is never padded or cut in silence
    backend.no_truncation()
    return backend


def _add_missing_tokens(backend: tokenizers.Tokenizer, config: Mapping[str, Any], directory: Path) -> None:
    """Tokens that only `tokenizer_config.json` lists are added, as transformers does."""
    listed = config.get("added_tokens_decoder") or {}
    try:
        wanted = sorted((int(i), dict(spec)) for i, spec in listed.items())
        there = backend.get_added_tokens_decoder()
        for token_id, spec in wanted:
            if token_id in there and there[token_id].content == spec["content"]:
                continue
            flags = {name: bool(spec[name]) for name in ADDED_TOKEN_FLAGS if name in spec}
            backend.add_tokens([tokenizers.AddedToken(spec["content"], **flags)])
            if backend.token_to_id(spec["content"]) != token_id:
                raise CheckpointError(
                    f"{directory}: {CONFIG_NAME} gives token {spec['content']!r} the id {token_id}, "
                    f"{TOKENIZER_NAME} makes it {backend.token_to_id(spec['content'])}"
                )
    except (AttributeError, KeyError, TypeError, ValueError) as error:
        raise CheckpointError(f"{directory / CONFIG_NAME}: added_tokens_decoder is damaged: {error!r}") from error


def _special_tokens(directory: Path, config: Mapping[str, Any]) -> dict[str, str]:
    """Special tokens by name; `tokenizer_config.json` wins over the older `special_tokens_map.json`."""
    both = read_json(directory / "special_tokens_map.json") | {k: v for k, v in config.items() if v is not None}
    found = {}
    for name in TOKEN_NAMES:
        value = both.get(name)
        text = value.get("content") if isinstance(value, dict) else value
        if isinstance(text, str):
            found[name] = text
        elif value is not None:
            raise CheckpointError(f"{directory / CONFIG_NAME}: {name} must be a string, it is {str(value)[:60]!r}")
    return found


def _id_of(backend: tokenizers.Tokenizer, token: str | None) -> int | None:
    return None if token is None else backend.token_to_id(token)


def _follow_config(
    backend: tokenizers.Tokenizer, config: Mapping[str, Any], bos_id: int | None, eos_id: int | None
) -> None:
    """`add_bos_token` and `add_eos_token` of the configuration win over `tokenizer.json`."""
    bare, around = backend.encode("a", add_special_tokens=False).ids, backend.encode("a").ids
    has_bos = bos_id is not None and around[:1] == [bos_id] and bare[:1] != [bos_id]
    has_eos = eos_id is not None and around[-1:] == [eos_id] and bare[-1:] != [eos_id]
    asked_bos, asked_eos = config.get("add_bos_token"), config.get("add_eos_token")
    wants_bos = asked_bos if isinstance(asked_bos, bool) and bos_id is not None else has_bos
    wants_eos = asked_eos if isinstance(asked_eos, bool) and eos_id is not None else has_eos
    if (wants_bos, wants_eos) != (has_bos, has_eos):
        put_around(backend, bos_id if wants_bos else None, eos_id if wants_eos else None)


def _eos_ids(directory: Path, eos_id: int | None) -> tuple[int, ...]:
    """Ids that end an output: the generation configuration's, else the model's, and the tokenizer's."""
    for name in (GENERATION_NAME, "config.json"):
        found = read_json(directory / name).get("eos_token_id")
        if found is not None:
            break
    ids = found if isinstance(found, list) else [found]
    ids = [i for i in (*ids, eos_id) if i is not None]
    if not all(isinstance(i, int) and not isinstance(i, bool) and i >= 0 for i in ids):
        raise CheckpointError(f"{directory / name}: eos_token_id must be an id or a list of ids, it is {found!r}")
    return tuple(dict.fromkeys(ids))


def _chat_templates(directory: Path, config: Mapping[str, Any]) -> dict[str, str]:
    """Templates by name; a file of its own wins over the configuration."""
    given = config.get("chat_template") or read_json(directory / OLD_TEMPLATE_NAME).get("chat_template")
    templates = named_templates(given, str(directory / CONFIG_NAME))
    files = {path.stem: path for path in sorted((directory / MORE_TEMPLATES).glob("*.jinja"))}
    if (directory / TEMPLATE_NAME).is_file():
        files[DEFAULT_TEMPLATE] = directory / TEMPLATE_NAME
    for name, path in files.items():
        try:
            templates[name] = path.read_text(encoding="utf-8")
        except (OSError, UnicodeDecodeError) as error:
            raise CheckpointError(f"{path} cannot be read: {_one_line(error)}") from error
    return templates


def named_templates(given: Any, where: str) -> dict[str, str]:
    """A template, or a list of {"name", "template"}, as a mapping.

    Raises:
        CheckpointError: Anything else.
    """
    if given is None:
        return {}
    if isinstance(given, str):
        return {DEFAULT_TEMPLATE: given}
    if isinstance(given, list):
        given = {e.get("name"): e.get("template") for e in given if isinstance(e, dict)}
    if isinstance(given, dict) and all(isinstance(k, str) and isinstance(v, str) for k, v in given.items()):
        return given
    raise CheckpointError(f"{where}: chat_template must be a string or a list of named templates")


def write_hf(tokenizer: Tokenizer, directory: Path) -> None:
    """Write a tokenizer as the files that `parts_from_hf` reads.

    Raises:
        OSError: The directory cannot be written.
    """
    directory.mkdir(parents=True, exist_ok=True)
    tokenizer.backend.save(str(directory / TOKENIZER_NAME))
    config: dict[str, Any] = {**tokenizer.special_tokens, "tokenizer_class": "PreTrainedTokenizerFast"}
    if tokenizer.chat_templates:
        config["chat_template"] = [{"name": n, "template": t} for n, t in tokenizer.chat_templates.items()]
    generation = {"bos_token_id": tokenizer.bos_token_id, "eos_token_id": list(tokenizer.eos_token_ids)}
    for name, content in ((CONFIG_NAME, config), (GENERATION_NAME, generation)):
        (directory / name).write_text(json.dumps(content, ensure_ascii=False, indent=1) + "\n", encoding="utf-8")


def _one_line(error: Exception) -> str:
    return " ".join(str(error).split())[:300]
