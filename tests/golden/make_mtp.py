"""Makes tests/golden/models/<family>_mtp.npz: what the reference equations of MTP heads give.

Run from the root of the repository, in an environment with torch (CPU) and transformers 5:

    python -m tests.golden.make_mtp [family ...]

transformers ignores `mtp.*` tensors, so the heads are composed here from its decoder layer and norms.
The file holds, for the prompt and greedy tokens t of `models/<family>.npz`:

- `hidden` [87, 64]: output of row i, from the model's last hidden state i and token t[i + 1];
- `chain` [24, 4]: most probable tokens of 4 steps on their own behind the first 24 .. 47 known tokens and
  the one that follows; `chain_hidden` [24, 4, 64] the outputs that they are read from;
- `margin`: the smallest distance between the best and second logit of `chain`;
- `crc`: CRC-32 of the heads' weights.
"""

from __future__ import annotations

import copy
import importlib
import re
import sys
import tempfile
import zlib
from pathlib import Path
from typing import Any

import numpy as np
import torch
from transformers import AutoModelForCausalLM
from transformers.utils import logging

from tests.golden.tiny import GOLDEN_DIR, golden, tiny_mtp_tensors, write_checkpoint
from tests.golden.tiny_hybrid import packed_experts

FAMILIES = {"qwen3_5": "Qwen3_5", "qwen3_5_hybrid": "Qwen3_5", "qwen3_5_moe": "Qwen3_5Moe", "qwen3_next": "Qwen3Next"}
STEPS, STARTS = 4, range(24, 48)


class Heads(torch.nn.Module):
    """One pass over whole sequences, without a cache."""

    def __init__(self, config: Any, kind: str) -> None:
        super().__init__()
        name = re.sub("(?<=[a-z0-9])(?=[A-Z])", "_", kind).lower()
        module = importlib.import_module(f"transformers.models.{name}.modeling_{name}")
        layer, norm = getattr(module, f"{kind}DecoderLayer"), getattr(module, f"{kind}RMSNorm")
        text = "Text" if kind.startswith("Qwen3_5") else ""
        single = copy.deepcopy(config)
        single.num_hidden_layers, single.layer_types = 1, ["full_attention"]
        single._attn_implementation, single.mlp_only_layers = "eager", []
        width, eps = config.hidden_size, config.rms_norm_eps
        self.fc = torch.nn.Linear(2 * width, width, bias=False)
        self.layers = torch.nn.ModuleList([layer(single, 0)])
        self.norm = norm(width, eps)
        self.pre_fc_norm_hidden = norm(width, eps)
        self.pre_fc_norm_embedding = norm(width, eps)
        self.sections = (3,) * bool(text)
        self.rotary = getattr(module, f"{kind}{text}RotaryEmbedding")(config=single)

    def forward(self, embedded: torch.Tensor, hidden: torch.Tensor) -> torch.Tensor:
        """embedded, hidden [1, T, D] -> [1, T, D]; rows stand at positions 0 .. T - 1."""
        count = embedded.shape[1]
        positions = torch.arange(count).view(1, -1).expand(*self.sections, 1, -1)
        x = self.fc(torch.cat([self.pre_fc_norm_embedding(embedded), self.pre_fc_norm_hidden(hidden)], -1))
        seen = torch.tril(torch.ones(count, count, dtype=torch.bool))
        mask = torch.zeros(1, 1, count, count).masked_fill(~seen, torch.finfo(torch.float32).min)
        return self.norm(self.layers[0](x, position_embeddings=self.rotary(x, positions), attention_mask=mask))


def make(family: str) -> None:
    logging.set_verbosity_error()
    stored, weights = golden(family), tiny_mtp_tensors(family)
    with tempfile.TemporaryDirectory() as scratch, torch.no_grad():
        model = AutoModelForCausalLM.from_pretrained(
            write_checkpoint(family, Path(scratch)), dtype=torch.float32, attn_implementation="eager"
        ).eval()
        heads = Heads(model.config, FAMILIES[family]).eval()
        packed = packed_experts(weights)
        heads.load_state_dict({name.removeprefix("mtp."): torch.tensor(w) for name, w in packed.items()})
        ids = torch.tensor([[*stored["prompt"].tolist(), *stored["greedy"].tolist()]])
        target = model.model(input_ids=ids, use_cache=False).last_hidden_state
        embed = model.model.embed_tokens
        hidden = heads(embed(ids[:, 1:]), target[:, :-1])
        chains, outputs, margin = [], [], np.inf
        for start in STARTS:
            tokens, states = ids[:, 1 : start + 1], target[:, :start]
            for _ in range(STEPS):
                out = heads(embed(tokens), states)[:, -1:]
                logits = model.lm_head(out)[0, 0]
                best = logits.topk(2).values
                margin = min(margin, float(best[0] - best[1]))
                tokens = torch.cat([tokens, logits.argmax()[None, None]], 1)
                states = torch.cat([states, out], 1)
            chains.append(tokens[0, -STEPS:].numpy())
            outputs.append(states[0, -STEPS:].numpy())
    print(f"{family}: margin {margin:.5f}, {len(np.unique(chains))} different tokens")
    np.savez_compressed(
        GOLDEN_DIR / f"{family}_mtp.npz",
        hidden=hidden[0].numpy(),
        chain=np.array(chains),
        chain_hidden=np.array(outputs),
        margin=margin,
        crc=zlib.crc32(b"".join(w.tobytes() for _, w in sorted(weights.items()))),
    )


def main(families: list[str]) -> None:
    logging.set_verbosity_error()
    for family in families:
        make(family)


if __name__ == "__main__":
    main(sys.argv[1:] or list(FAMILIES))
