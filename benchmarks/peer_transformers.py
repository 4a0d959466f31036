"""The same work done by transformers, in a process (and an environment) of its own.

Prints one JSON line: decode tokens/s by number of streams, and prefill tokens/s. Run by
`benchmarks.serving --peer-python PYTHON`; needs torch and transformers, which helios_jax
itself never imports.
"""

from __future__ import annotations

import argparse
import json
import time


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--gguf", help="GGUF file; otherwise --model is a directory")
    parser.add_argument("--model", default=".")
    parser.add_argument("--streams", type=int, nargs="+", default=[1, 4, 8])
    parser.add_argument("--prompt-len", type=int, default=64)
    parser.add_argument("--prefill-len", type=int, default=512)
    parser.add_argument("--new-tokens", type=int, default=64)
    args = parser.parse_args()

    import torch
    from transformers import AutoModelForCausalLM

    files = {"gguf_file": args.gguf} if args.gguf else {}
    model = AutoModelForCausalLM.from_pretrained(args.model, dtype=torch.float32, **files).eval()
    generator = torch.Generator().manual_seed(0)
    vocab = model.config.vocab_size

    def ids(rows: int, length: int) -> torch.Tensor:
        return torch.randint(3, vocab, (rows, length), generator=generator)

    result: dict[str, object] = {"decode": {}}
    with torch.inference_mode():
        for rows in args.streams:
            out = model(ids(rows, args.prompt_len), use_cache=True)
            cache = getattr(out, "cache", None) or out.past_key_values
            name = "cache" if getattr(out, "cache", None) is not None else "past_key_values"
            token = out.logits[:, -1].argmax(-1, keepdim=True)
            start = time.perf_counter()
            for _ in range(args.new_tokens):
                out = model(token, use_cache=True, **{name: cache})
                cache = getattr(out, name)
                token = out.logits[:, -1].argmax(-1, keepdim=True)
            result["decode"][rows] = rows * args.new_tokens / (time.perf_counter() - start)  # type: ignore[index]
        prompt = ids(1, args.prefill_len)
        model(prompt, use_cache=True, logits_to_keep=1)
        start = time.perf_counter()
        model(prompt, use_cache=True, logits_to_keep=1)
        result["prefill"] = args.prefill_len / (time.perf_counter() - start)
    print(json.dumps(result))


if __name__ == "__main__":
    main()
