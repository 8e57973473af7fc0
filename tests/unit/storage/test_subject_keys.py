"""Keys of subjects: made before they are used, found again, and gone for good once destroyed."""

import threading
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from contrail_storage.disk.files import Files
from contrail_storage.seal import mark_index
from contrail_storage.seal.key_file import JOURNAL_MAX, SUBJECT_KEYS_NAME, SubjectKeysDamagedError
from contrail_storage.seal.keyring import Keyring
from contrail_storage.seal.subject_keys import SubjectKeys, SubjectKeysFullError
from tests.unit.storage.wal_disk import PowerCutError, SimDisk

NODE_KEY = bytes(range(32))
FOLDER = Path("/data")
PLAIN = b"what was said"
SLOTS_AT = 4096 + 65536


def opened(files: Files, directory: Path, **options: Any) -> SubjectKeys:
    keys = SubjectKeys(files, directory, None, **options)
    keys.load()
    return keys


def key_id(keys: SubjectKeys, shard: int, subject: str) -> int:
    key = keys.sealing(shard, subject)
    assert key is not None
    return key.id


def sealed(keys: SubjectKeys, shard: int, subject: str) -> tuple[int, bytes]:
    key = keys.sealing(shard, subject)
    assert key is not None
    return key.id, key.cipher.encrypt(bytes(12), PLAIN, key.name)


def opens(keys: SubjectKeys, content: tuple[int, bytes]) -> bool:
    """Whether ``content`` opens; False: its key was destroyed."""
    key = keys.opening(content[0])
    if key is None:
        return False
    assert key.cipher.decrypt(bytes(12), content[1], key.name) == PLAIN
    return True


def test_folder_without_sealed_messages_has_no_file(tmp_path: Path) -> None:
    keys = opened(Files(), tmp_path)
    assert not keys.exists
    assert keys.retire(1, ["a"]) == []
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("encrypted", [False, True], ids=["plain", "encrypted"])
def test_keys_are_found_again_after_a_restart_and_a_change_of_the_node_key(
    tmp_path: Path, encrypted: bool
) -> None:
    ring = Keyring.create(Files(), tmp_path, NODE_KEY) if encrypted else None
    keys = SubjectKeys(Files(), tmp_path, ring)
    keys.load()
    names = [f"s.{number}" for number in range(300)]
    keys.make([(1, name) for name in names])
    keys.make([(2, "s.1"), (1, "s.1")])
    content = {name: sealed(keys, 1, name) for name in names}
    assert len({one for one, _ in content.values()}) == 300
    assert key_id(keys, 2, "s.1") != content["s.1"][0]
    keys.close()
    if ring is not None:
        assert ring.rotate(bytes(32))
        ring = Keyring.load(Files(), tmp_path, [bytes(32)])
    again = SubjectKeys(Files(), tmp_path, ring)
    again.load()
    assert {name: key_id(again, 1, name) for name in names} == {
        name: one for name, (one, _) in content.items()
    }
    assert all(opens(again, one) for one in content.values())
    assert dict(again.live()) == {1: 300, 2: 1}
    assert again.sealing(1, "other") is None


def test_keys_of_an_encrypted_folder_are_not_in_its_file_as_they_are(tmp_path: Path) -> None:
    plain, ring = tmp_path / "plain", tmp_path / "sealed"
    for directory in (plain, ring):
        directory.mkdir()
    opened(Files(), plain).make([(1, "a")])
    keyring = Keyring.create(Files(), ring, NODE_KEY)
    SubjectKeys(Files(), ring, keyring).make([(1, "a")])
    without = SubjectKeys(Files(), ring, None)
    without.load()
    assert without.sealing(1, "a") is None  # not even which subjects there are
    (slot,) = without.slots_of_shard(1)
    assert slot == 0


def test_destroyed_key_opens_nothing_and_its_subject_gets_another(tmp_path: Path) -> None:
    keys = opened(Files(), tmp_path)
    keys.make([(1, "a"), (1, "b")])
    before, other = sealed(keys, 1, "a"), sealed(keys, 1, "b")
    slots = keys.retire(1, ["a", "never seen"])
    assert keys.sealing(1, "a") is None
    assert opens(keys, before)
    keys.destroy(slots, 9)
    assert not opens(keys, before)
    assert keys.remains_of(1, ["b", "a"], slots) == [(9, "a")]
    keys.make([(1, "a")])
    after = sealed(keys, 1, "a")
    asked = np.array([before[0], 0, other[0], after[0]], np.uint64)
    for again in (keys, opened(Files(), tmp_path)):
        assert again.gone(asked).tolist() == [True, False, False, False]
        assert [opens(again, one) for one in (before, other, after)] == [False, True, True]
        assert list(again.remains) == slots


def test_slot_that_is_used_again_does_not_open_what_the_key_before_sealed(tmp_path: Path) -> None:
    keys = opened(Files(), tmp_path)
    keys.make([(1, "a")])
    before = sealed(keys, 1, "a")
    slots = keys.retire(1, ["a"])
    keys.destroy(slots, 9)
    keys.finish(slots)
    keys.finish(slots)  # twice says nothing more
    keys.make([(1, "b"), (1, "c")])
    assert key_id(keys, 1, "b") & 0xFFFFFFFF == slots[0] or key_id(keys, 1, "c") == slots[0]
    for again in (keys, opened(Files(), tmp_path)):
        assert not opens(again, before)
        assert again.remains == {}
        assert sorted(again.slots_of_shard(1)) == [0, 1]


def test_copy_of_the_folder_is_not_opened_with_the_file_from_after_the_erasure(
    tmp_path: Path,
) -> None:
    keys = opened(Files(), tmp_path)
    keys.make([(1, "a")])
    plain = (tmp_path / SUBJECT_KEYS_NAME).read_bytes()[SLOTS_AT : SLOTS_AT + 128]
    secret = plain[40:72]
    keys.destroy(keys.retire(1, ["a"]), 2)
    assert len(set(secret)) > 8
    assert secret not in (tmp_path / SUBJECT_KEYS_NAME).read_bytes()


def test_keys_in_use_are_kept_in_memory_up_to_a_bound(tmp_path: Path) -> None:
    keys = opened(Files(), tmp_path, ciphers_max=4)
    content = []
    for number in range(50):
        keys.make([(1, f"s.{number}")])
        content.append(sealed(keys, 1, f"s.{number}"))
    assert all(opens(keys, one) for one in content)


def test_no_key_is_made_above_the_bound_of_slots(tmp_path: Path) -> None:
    keys = opened(Files(), tmp_path, slots_max=3)
    keys.make([(1, "a"), (1, "b"), (1, "c")])
    with pytest.raises(SubjectKeysFullError):
        keys.make([(1, "d")])
    slots = keys.retire(1, ["b"])
    keys.destroy(slots, 0)
    keys.finish(slots)
    keys.make([(1, "d")])
    assert key_id(keys, 1, "d") & 0xFFFFFFFF == slots[0]


def test_missing_older_or_damaged_file_is_not_taken_for_an_erasure(tmp_path: Path) -> None:
    keys = opened(Files(), tmp_path)
    keys.make([(1, "a")])
    older = (tmp_path / SUBJECT_KEYS_NAME).read_bytes()
    keys.make([(1, "b")])
    content = sealed(keys, 1, "b")
    path = tmp_path / SUBJECT_KEYS_NAME
    whole = path.read_bytes()
    torn = bytearray(whole)
    torn[SLOTS_AT + 128 + 45] ^= 1
    for data in (None, older, bytes(torn), b"", whole[:50], b"\0" * 5000, b"CTSK" + whole[4:60]):
        path.unlink(missing_ok=True)
        if data is not None:
            path.write_bytes(data)
        again = opened(Files(), tmp_path)
        assert not again.gone(np.array([content[0]], np.uint64))[0]
        with pytest.raises(SubjectKeysDamagedError):
            again.opening(content[0])
        assert again.exists == (data in (older, bytes(torn)))
        if data is not None and not again.exists:
            assert SUBJECT_KEYS_NAME in again.trouble
            with pytest.raises(SubjectKeysDamagedError):
                again.make([(1, "c")])


def test_damaged_slot_is_never_used_again(tmp_path: Path) -> None:
    keys = opened(Files(), tmp_path)
    keys.make([(1, "a")])
    path = tmp_path / SUBJECT_KEYS_NAME
    torn = bytearray(path.read_bytes())
    torn[SLOTS_AT + 20] ^= 1
    path.write_bytes(bytes(torn))
    again = opened(Files(), tmp_path)
    assert again.broken == 1
    again.make([(1, "a"), (1, "b")])
    assert {key_id(again, 1, name) & 0xFFFFFFFF for name in "ab"} == {1, 2}


def test_failed_sync_makes_no_key_and_the_next_try_does(tmp_path: Path) -> None:
    disk = SimDisk()
    keys = opened(disk, FOLDER)
    keys.make([(1, "a")])
    for call in ("write", "sync"):
        disk.fail(call)
        with pytest.raises(OSError, match="Input/output"):
            keys.make([(1, "b")])
        assert keys.sealing(1, "b") is None
        disk.heal()
    keys.make([(1, "b")])
    content = sealed(keys, 1, "b")
    assert opens(opened(disk.survivor(), FOLDER), content)


def test_failed_destroying_opens_nothing_and_is_made_durable_later(tmp_path: Path) -> None:
    disk = SimDisk()
    keys = opened(disk, FOLDER)
    keys.make([(1, "a")])
    content = sealed(keys, 1, "a")
    disk.fail("sync")
    with pytest.raises(OSError, match="Input/output"):
        keys.destroy(keys.retire(1, ["a"]), 5)
    assert not opens(keys, content)
    assert opens(opened(disk.survivor(), FOLDER), content)
    disk.heal()
    keys.destroy_again()
    after = opened(disk.survivor(), FOLDER)
    assert not opens(after, content)
    assert after.remains_of(1, ["a"], after.remains) == [(5, "a")]


def test_subject_that_seals_again_is_not_condemned_any_more(tmp_path: Path) -> None:
    keys = opened(Files(), tmp_path)
    keys.make([(1, "a"), (1, "b"), (2, "a")])
    ids = {name: key_id(keys, 1, name) & 0xFFFFFFFF for name in "ab"}
    assert keys.slots_of_subjects(1, ["a", "c"]) == {ids["a"]}
    keys.condemn(ids.values())
    assert keys.sealing(1, "b") is not None
    assert keys.condemned(keys.slots_of_shard(1)) == [ids["a"]]


def history(keys: SubjectKeys, noted: list[tuple[str, Any]]) -> None:
    """A life: keys are made, seal, and are destroyed; ``noted`` gets what is certain by then."""
    for name in "abc":
        keys.make([(1, name)])
        noted.append(("made", (name, sealed(keys, 1, name))))
    slots = keys.retire(1, ["a", "b"])
    noted.append(("asked", ("a", "b")))
    keys.destroy(slots, 7)
    noted.append(("destroyed", ("a", "b")))
    noted.append(("finished", "a"))
    keys.finish([number for number in slots if keys.remains_of(1, ["a"], [number])])
    keys.make([(1, "a"), (1, "d"), (1, "e")])
    for name in "ade":
        noted.append(("made", (name, sealed(keys, 1, name))))
    noted.append(("asked", ("c", "d")))
    keys.destroy(keys.retire(1, ["c", "d"]), 9)
    noted.append(("destroyed", ("c", "d")))


def test_power_cut_anywhere_keeps_what_was_made_and_what_was_destroyed() -> None:
    whole = SimDisk()
    history(opened(whole, FOLDER), [])
    assert whole.calls > 20

    @given(st.integers(1, whole.calls), st.floats(0, 1))
    def cut(at: int, keep: float) -> None:
        disk = SimDisk(cut_at=at)
        noted: list[tuple[str, Any]] = []
        with pytest.raises(PowerCutError):
            history(opened(disk, FOLDER), noted)
        disk.cut_at = None
        after = opened(disk.survivor(keep), FOLDER)
        assert after.trouble == ""
        alive: dict[str, tuple[int, bytes]] = {}
        asked: set[str] = set()
        dead: list[tuple[int, bytes]] = []
        ended: list[tuple[str, tuple[int, bytes]]] = []
        for kind, what in noted:
            if kind == "made":
                alive[what[0]] = what[1]
            elif kind == "asked":
                asked.update(what)
            elif kind == "finished":
                # Of its messages nothing is left, so its slot may be found broken.
                dead = [one for name, one in ended if name != what]
            else:
                ended = [(name, alive.pop(name)) for name in what]
                dead += [one for _, one in ended]
        assert not any(opens(after, one) for one in dead)
        for name, content in alive.items():
            # What was being destroyed when the power went is there, or known to be gone.
            assert opens(after, content) or name in asked, name
        after.make([(1, name) for name in "abcdefgh"])
        assert not any(opens(after, one) for one in dead)
        fresh = opened(disk.survivor(keep), FOLDER)
        assert sorted(fresh.remains) == sorted(after.remains)

    cut()


def test_more_keys_than_one_note_holds_are_destroyed(tmp_path: Path) -> None:
    keys = opened(Files(), tmp_path)
    names = [f"s.{number}" for number in range(2 * JOURNAL_MAX + 5)]
    keys.make([(1, name) for name in names])
    content = [sealed(keys, 1, name) for name in (names[0], names[JOURNAL_MAX], names[-1])]
    slots = keys.retire(1, names)
    keys.destroy(slots, 3)
    again = opened(Files(), tmp_path)
    assert not any(opens(again, one) for one in content)
    assert len(again.remains) == len(names)
    again.finish(slots)
    assert dict(again.live()) == {}
    assert again.remains == {}


def test_index_finds_the_slots_that_a_plain_table_holds(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(mark_index, "_RECENT_MAX", 3)
    prefixes = st.sampled_from([0, 1, 2, 3, (1 << 64) - 1, 1 << 63, 77, 78, 79])

    @given(st.lists(st.tuples(st.booleans(), prefixes, st.integers(0, 30)), max_size=60))
    def compare(steps: list[tuple[bool, int, int]]) -> None:
        index, plain = mark_index.MarkIndex(), set[tuple[int, int]]()
        for adds, prefix, slot in steps:
            if not adds:
                index.discard(prefix, slot)
                plain.discard((prefix, slot))
            elif (prefix, slot) not in plain:
                index.add(prefix, slot)
                plain.add((prefix, slot))
            wanted = [0, prefix, 79]
            for each in wanted:
                assert sorted(index.find(each)) == sorted(at for own, at in plain if own == each)
            assert index.find_many(wanted) == {at for own, at in plain if own in wanted}

    compare()


def test_key_that_is_retired_while_it_is_looked_up_does_not_come_back(tmp_path: Path) -> None:
    keys = opened(Files(), tmp_path)
    keys.make([(7, "orders.a")])
    before = keys.sealing(7, "orders.a")
    assert before is not None
    retiring = threading.Thread(target=keys.retire, args=(7, ["orders.a"]))

    class Recent(dict[Any, Any]):
        """The older half of the cache: another thread retires the key while it is read."""

        def get(self, key: Any, default: Any = None) -> Any:
            found = super().get(key, default)
            if not retiring.is_alive():
                retiring.start()
                retiring.join(0.2)  # ends only where nothing keeps it from the cache
            return found

    cache = keys._sealing
    cache._old, cache._young = Recent(cache._young), {}
    keys.sealing(7, "orders.a")
    retiring.join()
    assert keys.sealing(7, "orders.a") is None
    keys.close()
