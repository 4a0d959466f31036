"""Stop strings: the cases that went wrong elsewhere, by name."""

from __future__ import annotations

import pytest

from helios_jax.errors import RequestError
from helios_jax.text.stops import StopBuffer


def shown(stops: list[str], *parts: str, include: bool = False) -> tuple[str, str | None]:
    buffer = StopBuffer(stops, include)
    text = "".join(buffer.push(part).text for part in parts)
    return text + buffer.flush(), buffer.matched


def test_stop_inside_one_piece() -> None:
    assert shown(["DEFGHIJ"], "ABCDEFGHIJ") == ("ABC", "DEFGHIJ")


def test_stop_split_over_every_character() -> None:
    assert shown(["DEFGHIJ"], *"ABCDEFGHIJKL") == ("ABC", "DEFGHIJ")


def test_stop_is_the_first_token() -> None:
    assert shown(["\n\n"], "\n\n", "more") == ("", "\n\n")


def test_false_alarm_is_released() -> None:
    buffer = StopBuffer(["<end>"])
    assert buffer.push("a<en").text == "a"
    assert buffer.push("emy").text == "<enemy"


def test_false_alarm_that_begins_again() -> None:
    assert shown(["aab"], "a", "a", "a", "b", "c") == ("a", "aab")


def test_tail_is_released_at_the_end() -> None:
    assert shown(["STOP"], "never STO") == ("never STO", None)


@pytest.mark.parametrize(
    ("stops", "expected"),
    [
        (["CD", "ABCDE"], ("xAB", "CD")),  # complete first, though it begins later
        (["D", "CD", "BCD"], ("xA", "BCD")),  # complete together: the longest
        (["AB", "ABC"], ("x", "AB")),
    ],
)
def test_overlapping_stops(stops: list[str], expected: tuple[str, str]) -> None:
    assert shown(stops, "xABCDE") == expected
    assert shown(stops, *"xABCDE") == expected
    assert shown(stops[::-1], *"xABCDE") == expected


def test_included_stop() -> None:
    assert shown(["END"], "the E", "ND and", include=True) == ("the END", "END")


def test_text_after_the_match_is_gone() -> None:
    buffer = StopBuffer(["."])
    assert buffer.push("a.b") == ("a", ".")
    assert buffer.push("c") == ("", ".")
    assert buffer.flush() == ""


def test_without_stops_everything_passes() -> None:
    assert shown([], "a", "", "b") == ("ab", None)


def test_empty_stop_is_refused() -> None:
    with pytest.raises(RequestError, match="must not be empty") as caught:
        StopBuffer(["a", ""])
    assert caught.value.param == "stop"


def test_cost_is_linear_in_a_bad_case() -> None:
    """A million comparisons a character would not end: the fallbacks of the matcher are amortised."""
    stop = "a" * 20_000 + "b"
    assert shown([stop], "a" * 40_000, "b") == ("a" * 20_000, stop)
