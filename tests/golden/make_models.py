"""Makes tests/golden/models/*.npz: what transformers computes for the tiny checkpoints.

Run from the root of the repository, in an environment with torch (CPU) and transformers 5:

    python -m tests.golden.make_models [family ...]

Each file holds `prompt`, `greedy`, `logits`, `logits_bfloat16`, `logits_float16` (see `tiny.golden`),
`margin`, the smallest distance between the best and second logit of the greedy run (so that equal
tokens are a fair demand), and `crc`, the CRC-32 of the weights that were used.
"""

from __future__ import annotations

import sys
import tempfile
import zlib
from pathlib import Path

import numpy as np
import torch
from transformers import AutoModelForCausalLM
from transformers.utils import logging

from tests.golden.tiny import FAMILIES, GOLDEN_DIR, GREEDY_LEN, tiny_prompt, tiny_tensors, write_checkpoint
from tests.golden.tiny_hybrid import HYBRIDS

MIN_MARGIN = 1e-3  # ten times the tolerance on logits


def logits_of(model: torch.nn.Module, ids: list[int]) -> np.ndarray:
    """float32 logits [len(ids), V] after every token, without a cache."""
    with torch.no_grad():
        return model(input_ids=torch.tensor([ids]), use_cache=False).logits[0].float().numpy()


def make(family: str) -> dict[str, np.ndarray]:
    """Everything that is stored for one family."""
    prompt = tiny_prompt(family)
    with tempfile.TemporaryDirectory() as scratch:
        directory = write_checkpoint(family, Path(scratch))
        load = lambda: AutoModelForCausalLM.from_pretrained(  # noqa: E731
            directory, dtype=torch.float32, attn_implementation="eager"
        ).eval()
        model = load()
        ids = list(prompt)
        for _ in range(GREEDY_LEN):
            ids.append(int(logits_of(model, ids)[-1].argmax()))
        cached = model.generate(
            torch.tensor([prompt]), max_new_tokens=GREEDY_LEN, do_sample=False, eos_token_id=-1, pad_token_id=0
        )
        assert cached[0].tolist() == ids, f"{family}: transformers disagrees with itself with a cache"
        out = {"prompt": np.array(prompt), "greedy": np.array(ids[len(prompt) :]), "logits": logits_of(model, ids)}
        for dtype in (torch.bfloat16, torch.float16):
            rounded = load()
            for weight in rounded.parameters():  # not the buffers: the rotary frequencies are no weights
                weight.data = weight.data.to(dtype).float()
            out[f"logits_{str(dtype).removeprefix('torch.')}"] = logits_of(rounded, prompt)
    best = np.sort(out["logits"][len(prompt) - 1 : -1], axis=-1)
    out["margin"] = (best[:, -1] - best[:, -2]).min()
    out["crc"] = np.array(zlib.crc32(b"".join(t.tobytes() for _, t in sorted(tiny_tensors(family).items()))))
    return out


def main(families: list[str]) -> None:
    logging.set_verbosity_error()
    logging.disable_progress_bar()
    GOLDEN_DIR.mkdir(exist_ok=True)
    for family in families:
        out = make(family)
        kinds = len(set(out["greedy"].tolist()))
        largest = abs(out["logits"]).max()
        print(f"{family:14s} margin {out['margin']:.4f}, {kinds} different tokens, |logits| <= {largest:.1f}")
        if out["margin"] < MIN_MARGIN:
            raise SystemExit(f"{family}: the greedy run nearly ties; change the prompt's name in tiny.py")
        np.savez_compressed(GOLDEN_DIR / f"{family}.npz", **out)


if __name__ == "__main__":
    main(sys.argv[1:] or [*FAMILIES, *HYBRIDS])
