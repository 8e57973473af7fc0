"""Hashes of message ids: the same wherever they are made, different for different ids."""

from hypothesis import given
from hypothesis import strategies as st

from contrail_common.texts import Texts
from contrail_storage.core.id_index import ID_BYTES, NO_ID
from contrail_storage.replica.message_ids import hash_id, hash_ids
from tests.support.each import each

KEY = b"k" * 32

ids = st.text(st.characters(exclude_categories=["Cs"]), max_size=40) | st.integers(0, 200).map(
    lambda length: "x" * length
)


def hashes(texts: list[str], key: bytes = KEY) -> list[bytes]:
    joined = hash_ids(Texts.of(texts), key)
    return [joined[at : at + ID_BYTES] for at in range(0, len(joined), ID_BYTES)]


@given(st.lists(ids, min_size=1, max_size=20))
def test_hash_of_an_id_does_not_depend_on_its_batch(texts: list[str]) -> None:
    assert hashes(texts) == [hash_id(text, KEY) for text in texts]


@given(st.lists(ids, min_size=2, max_size=20, unique=True))
def test_different_ids_have_different_hashes(texts: list[str]) -> None:
    assert len(set(hashes(texts))) == len(texts)


def test_hashes_never_change() -> None:
    # They are stored: another function would forget every id of the window.
    texts = ["order-1017", "", "ä" * 20, "z" * 64, "z" * 65]
    assert [each.hex() for each in hashes(texts)] == [
        "4e1d5d00ad356394ec59e80d8c459fb8",
        "00000000000000000000000000000000",
        "2bfc18e76bd9263a36e0c986ecb1ceb7",
        "f0aac33caab47c1658493dd839a000cb",
        "8a12a4120c48687fdaff731898ff0b06",
    ]


def test_no_id_has_no_hash() -> None:
    assert hashes(["", "a", ""])[::2] == [NO_ID, NO_ID]
    assert hash_id("", KEY) == NO_ID
    assert hashes(["", ""]) == [NO_ID, NO_ID]


def test_another_key_gives_other_hashes() -> None:
    assert hash_id("a", KEY) != hash_id("a", b"l" * 32)


@each(
    ("one", "other"),
    [
        ("a", "a\0"),
        ("\0", "\0\0"),
        ("x" * 64, "x" * 65),
        ("x" * 65, "x" * 66),
        ("x" * 4_000 + "a", "x" * 4_000 + "b"),
        ("abcdefgh", "efghabcd"),
    ],
)
def test_ids_that_are_nearly_alike_are_distinguished(one: str, other: str) -> None:
    left, right = hashes([one, other])
    assert left != right
    # Each half is as good: the duplicate window keeps a part of the hash.
    assert left[:8] != right[:8]
    assert left[8:] != right[8:]


def test_hashes_of_counted_ids_fall_evenly_into_buckets() -> None:
    buckets = [0] * 64
    for found in hashes([f"batch-{number}" for number in range(6_400)]):
        buckets[found[0] & 63] += 1
    assert max(buckets) < 3 * 100
    assert min(buckets) > 100 / 3
