"""Which shard a subject belongs to: known answers, and one subject at a time against many."""

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from contrail_common.partition import (
    SHARDS_MAX,
    fnv1a_32,
    partition_key,
    shard_of,
    shard_of_filter,
    shards_of,
    share,
)
from contrail_common.subjects import matches
from tests.support.each import each

tokens = st.sampled_from(["a", "b", "eu", "ä", "long-token", "1"])
subjects = st.lists(tokens, min_size=1, max_size=4).map(".".join)
positions = st.lists(st.integers(1, 5), max_size=3, unique=True).map(tuple)
shard_counts = st.integers(1, SHARDS_MAX)


@each(
    ("data", "value"),
    [
        # The test vectors of the authors of FNV.
        (b"", 0x811C9DC5),
        (b"a", 0xE40C292C),
        (b"b", 0xE70C2DE5),
        (b"foobar", 0xBF9CF968),
        (b"chongo was here!\n", 0xD49930D5),
    ],
)
def test_fnv1a_has_its_known_answers(data: bytes, value: int) -> None:
    assert fnv1a_32(data) == value


def test_key_is_the_tokens_without_anything_between() -> None:
    assert partition_key("a.b.c", ()) == b"a.b.c"
    assert partition_key("a.b.c", (3, 1)) == b"ca"
    assert partition_key("a.b.c", (2, 9)) == b"b"
    assert partition_key("a", (2,)) == b""
    assert shard_of("a", 4, (2,)) == 0x811C9DC5 % 4
    assert shard_of("foobar", 10) == 0xBF9CF968 % 10


@given(st.lists(subjects, max_size=60), shard_counts, positions)
def test_many_subjects_at_once_lie_where_each_lies(
    many: list[str], shards: int, shard_by: tuple[int, ...]
) -> None:
    found = shards_of(many, shards, shard_by)
    assert found.dtype == np.uint32
    assert found.tolist() == [shard_of(one, shards, shard_by) for one in many]


def test_long_and_empty_keys_are_hashed_together() -> None:
    many = ["x" * length for length in range(1, 300, 7)] + ["a.b"] * 3
    assert shards_of(many, 7).tolist() == [shard_of(one, 7) for one in many]
    assert shards_of(many, 7, (2,)).tolist() == [shard_of(one, 7, (2,)) for one in many]
    assert shards_of(["a"] * 40, 7, (2,)).tolist() == [0x811C9DC5 % 7] * 40


@given(
    st.lists(st.sampled_from(["a", "b", "*"]), min_size=1, max_size=4),
    st.booleans(),
    st.lists(subjects, min_size=1, max_size=30),
    st.integers(2, 8),
    positions,
)
def test_filter_of_one_shard_matches_nothing_elsewhere(
    parts: list[str], open_ended: bool, many: list[str], shards: int, shard_by: tuple[int, ...]
) -> None:
    pattern = ".".join([*parts, ">"] if open_ended else parts)
    shard = shard_of_filter(pattern, shards, shard_by)
    if shard is not None:
        within = [one for one in many if matches(pattern, one)]
        assert {shard_of(one, shards, shard_by) for one in within} <= {shard}


def test_filter_lies_in_one_shard_when_its_wildcards_choose_none() -> None:
    assert shard_of_filter("a.b", 8) == shard_of("a.b", 8)
    assert shard_of_filter("a.*", 8) is None
    assert shard_of_filter(">", 8) is None
    assert shard_of_filter(">", 1) == 0
    assert shard_of_filter("eu.*.>", 8, (1,)) == shard_of("eu.x.y", 8, (1,))
    assert shard_of_filter("*.eu", 8, (2,)) == shard_of("x.eu", 8, (2,))
    assert shard_of_filter("eu.*", 8, (1, 2)) is None
    assert shard_of_filter("eu.>", 8, (1, 2)) is None
    assert shard_of_filter("eu.*", 8, (1, 3)) == shard_of("eu.x", 8, (1, 3))


@given(st.integers(-1, 1_000), shard_counts)
def test_shares_of_a_limit_add_up_to_it(total: int, shards: int) -> None:
    shares = [share(total, shards, shard) for shard in range(shards)]
    assert shares == sorted(shares, reverse=True)
    if total < 0:
        assert set(shares) == {total}
    else:
        assert sum(shares) == total
        assert max(shares) - min(shares) <= 1
