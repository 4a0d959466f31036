"""Rotary frequencies and rotation against definitions written another way."""

from __future__ import annotations

import cmath
import math

import jax.numpy as jnp
import numpy as np
import pytest

from helios_jax.errors import CheckpointError
from helios_jax.models.dense_config import rope_from_hf
from helios_jax.models.fields import Fields
from helios_jax.models.rope import RopeConfig, inverse_frequencies, rotate, rotation

LLAMA3 = {"rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0}


def test_rotation_is_a_complex_product() -> None:
    """Dimension i and i + H/2 are one complex number, turned by position * theta^(-2i/H)."""
    head_dim, positions = 6, [0, 1, 7, 200]
    x = np.random.default_rng(0).normal(size=(4, 2, head_dim)).astype(np.float32)
    rope = RopeConfig(theta=100.0)
    turned = rotate(jnp.asarray(x), *rotation(jnp.asarray(positions), inverse_frequencies(rope, head_dim)))
    for t, position in enumerate(positions):
        for head in range(2):
            for i in range(3):
                z = complex(x[t, head, i], x[t, head, i + 3]) * cmath.exp(1j * position * 100.0 ** (-2 * i / head_dim))
                assert turned[t, head, i] == pytest.approx(z.real, abs=1e-5)
                assert turned[t, head, i + 3] == pytest.approx(z.imag, abs=1e-5)


def test_scores_depend_on_distance_only() -> None:
    q, k = np.random.default_rng(1).normal(size=(2, 1, 1, 16)).astype(np.float32)
    inv = inverse_frequencies(RopeConfig(), 16)

    def score(at_q: int, at_k: int) -> float:
        turned_q = rotate(jnp.asarray(q), *rotation(jnp.asarray([at_q]), inv))
        return float(jnp.sum(turned_q * rotate(jnp.asarray(k), *rotation(jnp.asarray([at_k]), inv))))

    assert score(9, 4) == pytest.approx(score(105, 100), abs=1e-4)
    assert score(9, 4) != pytest.approx(score(9, 5), abs=1e-4)


def test_llama3_has_three_bands() -> None:
    """Real values of Llama 3.1: theta 500000, H 128, context 8192."""
    rope = RopeConfig(scaling="llama3", theta=500000.0, factor=8.0, original_context=8192)
    plain = inverse_frequencies(RopeConfig(theta=500000.0), 128)
    scaled = inverse_frequencies(rope, 128)
    wavelength = 2 * math.pi / plain
    fast, slow = wavelength < 8192 / 4, wavelength > 8192
    np.testing.assert_array_equal(scaled[fast], plain[fast])
    np.testing.assert_allclose(scaled[slow], plain[slow] / 8, rtol=1e-6)
    between = ~fast & ~slow
    assert between.sum() > 2
    assert ((scaled[between] < plain[between]) & (scaled[between] > plain[between] / 8)).all()
    assert (np.diff(scaled) < 0).all()


@pytest.mark.parametrize(
    ("values", "expected"),
    [
        ({}, RopeConfig()),
        ({"rope_theta": 5.0}, RopeConfig(theta=5.0)),
        ({"rope_parameters": {"rope_type": "default", "rope_theta": 5.0}}, RopeConfig(theta=5.0)),
        ({"rope_theta": 5.0, "rope_scaling": None}, RopeConfig(theta=5.0)),
        (
            {"rope_theta": 5.0, "rope_scaling": {"type": "linear", "factor": 2}},
            RopeConfig(theta=5.0, scaling="linear", factor=2.0),
        ),
        (
            {"rope_parameters": {"rope_type": "linear", "factor": 2.0, "rope_theta": 5.0}},
            RopeConfig(theta=5.0, scaling="linear", factor=2.0),
        ),
        (
            {"rope_theta": 5.0, "rope_scaling": {**LLAMA3, "original_max_position_embeddings": 64}},
            RopeConfig(theta=5.0, scaling="llama3", factor=8.0, original_context=64),
        ),
        (
            {"max_position_embeddings": 32, "rope_parameters": {**LLAMA3, "rope_theta": 5.0}},
            RopeConfig(theta=5.0, scaling="llama3", factor=8.0, original_context=32),
        ),
    ],
)
def test_both_spellings_mean_the_same(values: dict, expected: RopeConfig) -> None:
    assert rope_from_hf(Fields(values, "config.json")) == expected


def test_factors_that_do_not_fit_are_refused() -> None:
    with pytest.raises(CheckpointError, match="3 frequency factors; head_dim needs 4"):
        inverse_frequencies(RopeConfig(freq_factors=(1.0, 2.0, 3.0)), 8)
    with pytest.raises(CheckpointError, match="low_freq_factor < high_freq_factor"):
        RopeConfig(scaling="llama3", low_freq_factor=4.0, high_freq_factor=4.0)
