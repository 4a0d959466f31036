"""Case Q3: what can never fit is refused with the numbers before it waits; what just fits is served to its end."""

from __future__ import annotations

from typing import Any

import pytest

from helios_jax.errors import RequestError
from helios_jax.testing import EngineRig, expected_tokens, hashed_text

CORES: tuple[dict[str, Any], ...] = (
    {},
    {"spec_method": "copy", "num_draft_tokens": 3},
    {"spec_method": "draft", "num_draft_tokens": 3},
    {"spec_method": "draft", "num_draft_tokens": 3, "mixed_prefill": True},
)


@pytest.mark.parametrize("core", CORES)
@pytest.mark.parametrize("page_size", [4, 16])
def test_a_pool_smaller_than_the_context_is_the_limit(core: dict[str, Any], page_size: int) -> None:
    pages = 64 // page_size
    with EngineRig(max_slots=2, max_context=128, page_size=page_size, num_pages=pages, **core) as rig:
        most = rig.assembly.intake.max_context
        extent = rig.core.limits.draft_extent
        assert most == 64 - extent
        for too_long in (most, most + 1, 127, 128, 500):
            with pytest.raises(RequestError, match=f"{too_long} tokens.*{most} tokens") as refused:
                rig.submit([97] * too_long, max_tokens=5)
            assert refused.value.code == "context_length_exceeded"
        lengths = {1: None, most - 1: None, most - 2: 10**6, most // 2: None, 7: most - 7}
        names = {
            rig.submit([98] * length, f"r{length}", max_tokens=tokens): length for length, tokens in lengths.items()
        }
        rig.finish(*names)
        for name, length in names.items():
            expected = expected_tokens(hashed_text, [98] * length, most - length)
            assert (rig.reason(name), rig.text(name)) == ("length", bytes(expected).decode())
        assert rig.ledger_problems() == []
