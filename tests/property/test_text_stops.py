"""Stop strings against a search in the whole text (T2 of the fault scenarios)."""

from __future__ import annotations

from hypothesis import given, settings
from hypothesis import strategies as st

from helios_jax.text.stops import StopBuffer

letters = st.text("ab", min_size=1, max_size=5)


def naive(text: str, stops: list[str]) -> tuple[int, str | None]:
    """Where the match that is complete first ends, the longest of several; (len(text), None) without."""
    for end in range(1, len(text) + 1):
        matches = [stop for stop in stops if text[:end].endswith(stop)]
        if matches:
            return end, max(matches, key=len)
    return len(text), None


def held_back(text: str, stops: list[str]) -> int:
    """Length of the longest end of `text` that begins a stop string, by trying all."""
    return max(n for n in range(len(text) + 1) if n == 0 or any(stop.startswith(text[-n:]) for stop in stops))


@settings(max_examples=500, deadline=None)
@given(st.lists(st.text("abc", max_size=6), max_size=8), st.lists(letters, max_size=3), st.booleans())
def test_pieces_against_the_whole_text(parts: list[str], stops: list[str], include: bool) -> None:
    text = "".join(parts)
    end, matched = naive(text, stops)
    expected = text if matched is None else text[: end if include else end - len(matched)]
    buffer, shown, given_text = StopBuffer(stops, include), "", ""
    for part in parts:
        result = buffer.push(part)
        shown += result.text
        given_text += part
        assert expected.startswith(shown)
        assert (result.matched is not None) == (matched is not None and end <= len(given_text))
        if result.matched is None:
            assert len(given_text) - len(shown) == held_back(given_text, stops), "held back too much or too little"
    assert buffer.matched == matched
    assert shown + buffer.flush() == expected


@settings(max_examples=200, deadline=None)
@given(st.text("abc", max_size=20), st.lists(letters, min_size=1, max_size=3), st.data())
def test_pieces_do_not_matter(text: str, stops: list[str], data) -> None:
    cut = data.draw(st.integers(0, len(text)))
    whole, parts = StopBuffer(stops), StopBuffer(stops)
    one = whole.push(text).text + whole.flush()
    two = parts.push(text[:cut]).text + parts.push(text[cut:]).text + parts.flush()
    assert (one, whole.matched) == (two, parts.matched)
