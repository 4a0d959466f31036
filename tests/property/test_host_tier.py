"""Checkpoints in host memory against a plain list of them: what is found, what it holds, what goes, and every byte."""

from __future__ import annotations

import random

import numpy as np
import pytest

from helios_jax.engine.host_tier import Content, HostTier

PAGE = 4


def page_of(tokens: np.ndarray, index: int) -> Content:
    """What a page would hold: a function of the whole prefix up to its end."""
    return (np.array([hash(tokens[: (index + 1) * PAGE].tobytes())]), np.arange(3))


def row_of(tokens: np.ndarray) -> Content:
    return (np.array([hash(tokens.tobytes()), len(tokens)]),)


class Reference:
    """All checkpoints, the least recently used first."""

    def __init__(self, budget: int) -> None:
        self.budget = budget
        self.kept: list[tuple[np.ndarray, int]] = []

    def size(self, kept: list[tuple[np.ndarray, int]]) -> int:
        """Every different page once, rows, and the tokens as keys."""
        pages = {tokens[: (i + 1) * PAGE].tobytes() for tokens, count in kept for i in range(count)}
        rows = sum(16 + 4 * (len(tokens) - count * PAGE) for tokens, count in kept)
        return rows + len(pages) * (8 + 24 + 4 * PAGE)

    def put(self, tokens: np.ndarray, count: int) -> bool:
        if self.size([(tokens, count)]) > self.budget:
            return False
        self.kept = [each for each in self.kept if not same(each, (tokens, count))] + [(tokens, count)]
        while self.size(self.kept) > self.budget:
            self.kept.pop(0)
        return True

    def find(self, prompt: np.ndarray, beyond: int) -> int:
        fits = [t for t, _ in self.kept if beyond < len(t) < len(prompt) and (prompt[: len(t)] == t).all()]
        return max((len(t) for t in fits), default=0)


def same(one: tuple[np.ndarray, int], other: tuple[np.ndarray, int]) -> bool:
    return one[1] == other[1] and np.array_equal(one[0], other[0])


@pytest.mark.parametrize("seed", range(8))
def test_against_a_list(seed: int) -> None:
    """Random prefixes over two tokens, so that many share pages; with and without a draft's last page kept back."""
    rng = random.Random(seed)
    budget = rng.choice([300, 800, 2000])
    tier, reference = HostTier(budget, PAGE), Reference(budget)
    found = 0
    for _ in range(400):
        tokens = np.array([rng.randint(0, 1) for _ in range(rng.randint(1, 14))], np.int32)
        if rng.random() < 0.6:
            count = (len(tokens) - seed % 2) // PAGE
            lacking = tier.lacking(tokens, count)
            known = any(same(each, (tokens, count)) for each in reference.kept)
            assert (lacking is None) == known
            given = {index: page_of(tokens, index) for index in lacking or ()}
            assert tier.put(tokens, count, given, row_of(tokens)) == reference.put(tokens, count)
        else:
            if reference.kept and rng.random() < 0.5:  # a continuation of what is there
                tokens = np.concatenate([rng.choice(reference.kept)[0], tokens])
            beyond = rng.randint(0, 8)
            checkpoint = tier.find(tokens, beyond)
            expected = reference.find(tokens, beyond)
            assert (checkpoint.endpoint if checkpoint else 0) == expected
            if checkpoint is not None:
                found += 1
                prefix, count = tokens[:expected], (expected - seed % 2) // PAGE
                pages = tier.contents(checkpoint)
                assert [page[0][0] for page in pages] == [page_of(prefix, i)[0][0] for i in range(count)]
                assert checkpoint.row[0].tolist() == row_of(prefix)[0].tolist()
                reference.put(prefix, count)
        assert tier.used_bytes == reference.size(reference.kept) <= budget
        assert len(tier) == len(reference.kept)
    assert found > 10
    assert tier.evicted > 10
    tier.clear()
    assert (tier.used_bytes, len(tier)) == (0, 0)


def test_pages_that_went_meanwhile_are_missed() -> None:
    """Between asking what is lacking and putting it here, a shared page may go: then nothing is kept."""
    tier = HostTier(100, PAGE)
    first, second = np.arange(4, dtype=np.int32), np.arange(9, dtype=np.int32)
    assert tier.put(first, 1, {0: page_of(first, 0)}, row_of(first))
    assert tier.lacking(second, 2) == [1]
    tier.clear()
    assert not tier.put(second, 2, {1: page_of(second, 1)}, row_of(second))
    assert (tier.used_bytes, len(tier)) == (0, 0)


def test_what_is_larger_than_all_of_it_evicts_nothing() -> None:
    tier = HostTier(100, PAGE)
    small, large = np.arange(4, dtype=np.int32), np.arange(12, dtype=np.int32)
    assert tier.put(small, 1, {0: page_of(small, 0)}, row_of(small))
    assert not tier.put(large, 3, {index: page_of(large, index) for index in (1, 2)}, row_of(large))
    assert tier.find(large) is not None
    assert HostTier(0, PAGE).put(small, 0, {}, row_of(small)) is False
