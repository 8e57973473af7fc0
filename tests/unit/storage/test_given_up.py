"""What a consumer gave up on: a set of sequences in pages."""

from hypothesis import given
from hypothesis import strategies as st

from contrail_storage.core.given_up import PAGE, GivenUp, pages_are_sound

seqs = st.integers(1, 5 * PAGE)


@given(st.lists(st.tuples(st.sampled_from(["add", "discard", "trim", "reload"]), seqs)))
def test_pages_hold_what_a_set_would(steps: list[tuple[str, int]]) -> None:
    found, plain = GivenUp(), set[int]()
    for kind, seq in steps:
        if kind == "add":
            found.add(seq)
            plain.add(seq)
        elif kind == "discard":
            assert found.discard(seq) == (seq in plain)
            plain.discard(seq)
        elif kind == "trim":
            found.trim(seq)
            plain = {each for each in plain if each >= seq}
        else:
            assert pages_are_sound(found.pages(), max(plain, default=0))
            found = GivenUp(found.pages())
        assert list(found) == sorted(plain)
        assert bool(found) == bool(plain)
        assert not plain or found.span() == (min(plain), max(plain))
        assert (seq in found) == (seq in plain)


def test_pages_from_outside_ascend_and_end_with_the_stream() -> None:
    assert pages_are_sound([(0, b"\x02"), (1, b"\x01")], PAGE)
    assert not pages_are_sound([(0, b"\x02"), (1, b"\x01")], PAGE - 1)
    assert not pages_are_sound([(1, b"\x01"), (1, b"\x01")], 9 * PAGE)
    assert not pages_are_sound([(-1, b"\x01")], PAGE)
    assert not pages_are_sound([(0, b"")], PAGE)
    assert not pages_are_sound([(0, b"\x01" * (PAGE // 8 + 1))], 9 * PAGE)
