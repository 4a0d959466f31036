"""Model families as flax modules, and their weights in and out.

Start at `source.open_source`: it opens a directory, a GGUF file or a name and gives a
`Model` (equations, no weights) and `load_params` (weights, streamed to the device). A family
is one file in `families/`. This room knows jax and flax; it does not know pages, slots,
batches, sampling or tokenizers.
"""
