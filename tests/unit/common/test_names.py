"""Names of streams and consumers at their limits."""

from hypothesis import given
from hypothesis import strategies as st

from contrail_common.names import NAME_BYTES_MAX, name_problem
from tests.support.each import each


@each("name", ["a", "FLIGHTS", "a-b_c", "$x", "ä", "🦊", "a:b", "{}", "%2F"])
def test_printable_name_is_valid(name: str) -> None:
    assert name_problem(name) is None


@each("character", ["a", "ü", "€", "🦊"])
def test_name_is_bounded_in_bytes_and_not_in_characters(character: str) -> None:
    width = len(character.encode())
    longest = character * (NAME_BYTES_MAX // width)
    longest += "x" * (NAME_BYTES_MAX - len(longest.encode()))
    assert len(longest.encode()) == NAME_BYTES_MAX == 255
    assert name_problem(longest) is None
    assert name_problem(longest + "x") is not None


@each("bad", list(".*>/\\ \t\r\n\f\v\0\x7f\x1b\u00a0\u2003\u2028\u200b\ud800"))
def test_separator_white_space_control_or_surrogate_is_refused_anywhere(bad: str) -> None:
    for name in (bad, f"a{bad}", f"{bad}a", f"a{bad}b"):
        assert name_problem(name) is not None


def test_empty_name_is_refused() -> None:
    assert name_problem("") is not None


@given(st.text(max_size=300))
def test_any_text_is_judged_without_an_error(name: str) -> None:
    problem = name_problem(name)
    assert problem is None or problem.startswith("a name must not")
