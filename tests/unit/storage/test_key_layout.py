"""Keys order as the numbers in them, and never meet."""

from hypothesis import given
from hypothesis import strategies as st

from contrail_storage.core import key_layout as keys

shards = st.integers(0, 2**32 - 1)
small = st.integers(0, 2**32 - 1)
large = st.integers(0, 2**64 - 1)
kinds = st.sampled_from(keys.SHARD_KINDS)


@given(kinds, st.tuples(shards, small), st.tuples(shards, small))
def test_small_keys_order_by_shard_then_number(
    kind: bytes, left: tuple[int, int], right: tuple[int, int]
) -> None:
    assert (keys.small_key(kind, *left) < keys.small_key(kind, *right)) == (left < right)


@given(kinds, st.tuples(shards, large), st.tuples(shards, large))
def test_large_keys_order_by_shard_then_number(
    kind: bytes, left: tuple[int, int], right: tuple[int, int]
) -> None:
    assert (keys.large_key(kind, *left) < keys.large_key(kind, *right)) == (left < right)
    assert keys.last_number(keys.large_key(kind, *left), 8) == left[1]


@given(shards, small, large)
def test_deltas_of_a_consumer_lie_under_its_prefix(shard: int, consumer: int, number: int) -> None:
    prefix = keys.small_key(keys.CONSUMER_DELTA, shard, consumer)
    key = keys.consumer_delta_key(shard, consumer, number)
    assert prefix <= key < keys.prefix_end(prefix)


@given(kinds, shards, shards, small)
def test_prefix_of_a_shard_holds_its_keys_and_no_other_shards(
    kind: bytes, shard: int, other: int, number: int
) -> None:
    prefix = keys.shard_key(kind, shard)
    key = keys.small_key(kind, other, number)
    assert (prefix <= key < keys.prefix_end(prefix)) == (shard == other)


def test_kinds_are_single_distinct_bytes() -> None:
    everything = (*keys.SHARD_KINDS, keys.APPLIED)
    assert len(set(everything)) == len(everything)
    assert {len(kind) for kind in everything} == {1}
