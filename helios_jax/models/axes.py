"""The axis glossary: one letter, one meaning, in every signature, docstring and einsum.

| letter | axis |
|---|---|
| B | lanes of a program |
| T | query tokens, packed over the lanes |
| S | keys of one sequence |
| N | query heads |
| K | key/value heads; query head n reads kv head n // (N // K) |
| G | query heads a kv head, N // K |
| H | head dimension |
| D | model width (hidden size) |
| F | width of the feed-forward part |
| V | vocabulary |
| P | pages of the pool |
| L | layers |
| R | rows whose logits are wanted |
| E | experts |

Weights of linear layers are stored [out, in], as Hugging Face checkpoints store them.
"""
