"""The index of message ids: how few new ones pass its filters, and how many arrays it has."""

import numpy as np

from contrail_storage.core.id_index import ID_BYTES, IdHashes, IdIndex

COUNT = 1_000


def hashes(seed: int) -> IdHashes:
    return IdHashes.of(np.random.default_rng(seed).bytes(ID_BYTES * COUNT))


def filled(ids: int, drop_from: int = 0) -> IdIndex:
    """An index of so many ids; with ``drop_from``, it forgets all before the last so many."""
    index = IdIndex()
    for number in range(ids // COUNT):
        seqs = np.arange(number * COUNT + 1, (number + 1) * COUNT + 1)
        first = max(1, int(seqs[-1]) - drop_from) if drop_from else 1
        index.drop_below(first)
        index.add(hashes(number), seqs, int(seqs[-1]) - first + 1, first)
    return index


def test_few_new_ids_pass_a_full_filter() -> None:
    group = filled(600_000)._groups[1]
    used = sum(segment.used for segment in group.segments)
    assert used == group.filter.capacity - group.left > 0.9 * group.filter.capacity
    passed = sum(len(group.filter.passed_by(hashes(1_000_000 + at))) for at in range(50))
    assert passed < 50 * COUNT / 500


def test_few_filters_stand_before_the_ids_of_a_growing_index() -> None:
    index = filled(1_000_000)
    assert len(index._groups) <= 3
    assert sum(len(group.segments) for group in index._groups) > len(index._groups)
    for number in (0, 61, 62, 124, 250, 999):  # in all segments
        found = index.find(hashes(number))
        assert found.tolist() == list(range(number * COUNT + 1, (number + 1) * COUNT + 1))
    assert not index.find(hashes(1_000)).any()


def test_index_of_constant_size_has_few_segments_and_frees_the_others_one_by_one() -> None:
    index = filled(1_200_000, drop_from=200_000)
    assert len(index) <= 600_000
    assert sum(len(group.segments) for group in index._groups) <= 3
    assert index.find(hashes(1_199)).all()
    assert not index.find(hashes(500)).any()
    # Freeing a large array takes long, so it waits.
    waiting = len(index._dropped)
    assert waiting > 1
    index.free()
    assert len(index._dropped) == waiting - 1
    index.drop_below(1 << 40)
    assert (len(index), index._groups) == (0, [])
    assert index.find(hashes(0)).tolist() == [0] * COUNT
