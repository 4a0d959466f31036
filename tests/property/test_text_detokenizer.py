"""The detokenizer against decoding everything at once (T1 of the fault scenarios)."""

from __future__ import annotations

from hypothesis import given, settings
from hypothesis import strategies as st

from helios_jax.text.detokenizer import Detokenizer, text_offsets
from helios_jax.text.tokenizer import load_tokenizer
from tests.unit.text_toy import GOLDEN, ListTokenizer

TOKENIZERS = [load_tokenizer(GOLDEN / f"text_{kind}") for kind in ("byte_level", "headers", "byte_fallback", "unigram")]
tokenizers = st.sampled_from(TOKENIZERS)
# Pieces that fall together into characters more often than random bytes do.
CUTS = ("👩‍💻", "🇩🇪", "안", "\u1112\u1161\u11ab", "é", "a", " ", "\ufffd")
fragments = st.one_of(
    st.sampled_from([c.encode()[i:j] for c in CUTS for i in range(4) for j in range(i + 1, 13)]),
    st.binary(max_size=3),
)


def pieces(tokenizer: object, ids: list[int], prompt: list[int] | None = None, skip: bool = True) -> list[str]:
    detokenizer = Detokenizer(tokenizer, prompt or [], skip)
    return [*(detokenizer.push(i) for i in ids), detokenizer.flush()]


@settings(max_examples=200, deadline=None)
@given(tokenizers, st.data(), st.booleans())
def test_pieces_are_the_whole(tokenizer, data, skip) -> None:
    ids = data.draw(st.lists(st.integers(0, tokenizer.vocab_size + 1), max_size=40))
    assert "".join(pieces(tokenizer, ids, skip=skip)) == tokenizer.decode(ids, skip_special_tokens=skip)


@settings(max_examples=200, deadline=None)
@given(st.lists(fragments, max_size=20))
def test_bytes_in_any_pieces(parts: list[bytes]) -> None:
    tokenizer = ListTokenizer(parts)
    found = "".join(pieces(tokenizer, list(range(len(parts)))))
    assert found == b"".join(parts).decode("utf-8", errors="replace")


@settings(max_examples=200, deadline=None)
@given(st.text(max_size=20), st.data())
def test_valid_text_never_shows_a_replacement(text: str, data) -> None:
    """Cut anywhere, valid text gives U+FFFD only where the text itself has it, at every moment."""
    raw = text.encode()
    cuts = sorted(data.draw(st.lists(st.integers(0, len(raw)), max_size=8)))
    parts = [raw[a:b] for a, b in zip([0, *cuts], [*cuts, len(raw)], strict=True)]
    detokenizer, shown = Detokenizer(ListTokenizer(parts)), ""
    for index in range(len(parts)):
        shown += detokenizer.push(index)
        assert text.startswith(shown)
    assert detokenizer.flush() == ""
    assert shown == text


@settings(max_examples=200, deadline=None)
@given(tokenizers, st.data())
def test_output_continues_the_prompt(tokenizer, data) -> None:
    """Where the prompt ends with a whole character, prompt and output decode as one text."""
    ids = st.integers(0, tokenizer.vocab_size - 1)
    prompt, output = data.draw(st.lists(ids, max_size=6)), data.draw(st.lists(ids, max_size=12))
    prompt += tokenizer.encode("a", add_special_tokens=False)[-1:]
    whole = tokenizer.decode(prompt + output)
    assert tokenizer.decode(prompt) + "".join(pieces(tokenizer, output, prompt)) == whole


@settings(max_examples=100, deadline=None)
@given(tokenizers, st.data())
def test_offsets_are_lengths_of_what_was_shown(tokenizer, data) -> None:
    ids = data.draw(st.lists(st.integers(0, tokenizer.vocab_size - 1), max_size=20))
    shown = pieces(tokenizer, ids)
    expected = [7 + len("".join(shown[:i])) for i in range(len(ids))]
    assert text_offsets(tokenizer, ids, start=7) == expected
