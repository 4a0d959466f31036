"""A checkpoint is known by everything that its state depends on, and matched by its tokens themselves."""

from __future__ import annotations

import numpy as np
import pytest

from helios_jax.engine.prefixes import Scope, key_of

HERE = Scope("a-model", "an-adapter", "digest")
TOKENS = np.array([5, 6, 7, 8], np.int32)


@pytest.mark.parametrize("field", Scope._fields)
def test_another_model_adapter_or_image_is_another_prefix(field: str) -> None:
    other = HERE._replace(**{field: "another"})
    key = key_of(HERE, TOKENS)
    assert key.covers(HERE, np.append(TOKENS, 9))
    assert not key.covers(other, np.append(TOKENS, 9))
    assert key != key_of(other, TOKENS)


def test_a_prefix_covers_what_begins_with_each_of_its_tokens() -> None:
    key = key_of(HERE, TOKENS)
    assert key.covers(HERE, TOKENS)
    assert not key.covers(HERE, TOKENS[:-1])
    for place in range(len(TOKENS)):
        prompt = np.append(TOKENS, 9)
        prompt[place] += 1
        assert not key.covers(HERE, prompt)
        assert key_of(HERE, prompt[:4]) != key
    assert key_of(HERE, TOKENS.astype(np.int64)) == key  # the same tokens in another type
