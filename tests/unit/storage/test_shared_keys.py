"""Subject keys of which each member of a group has a copy, and the state that names them."""

import random
import threading
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import pytest

from contrail_common import errors
from contrail_common.errors import ApiError
from contrail_common.model import StreamConfig
from contrail_storage.core import commands as cmd
from contrail_storage.core import key_layout as keys
from contrail_storage.core.results import Done, Refused, Writes
from contrail_storage.core.stream.stream_machine import StreamMachine
from contrail_storage.disk.files import Files
from contrail_storage.seal.key_file import SHARED_KEYS_NAME, SLOT_BYTES
from contrail_storage.seal.keyring import Keyring
from contrail_storage.seal.shared_keys import SHARED, SharedKey, SharedKeys
from contrail_storage.seal.subject_keys import SubjectKeysFullError

SHARD = 7
SLOTS_AT = 4096 + 64 * 1024


def opened(folder: Path, sealer: Keyring | None = None, slots_max: int = 1_000) -> SharedKeys:
    found = SharedKeys(Files(), folder, sealer, lambda shard_id: b"key of %d" % shard_id, slots_max)
    found.load()
    return found


class Member:
    """A member: its file, and the state that it has applied."""

    def __init__(self, folder: Path) -> None:
        folder.mkdir()
        self.folder = folder
        self.keys = opened(folder)
        self.named: set[int] = set()
        self.last = 0
        self.applied = 0

    def apply(self, log: list[tuple[str, list[int]]], index: int) -> None:
        for kind, ids in log[self.applied : index]:
            if kind == "name":
                self.named |= set(ids)
                self.last = ids[-1]
                self.keys.name(SHARD, ids)
            else:
                self.named -= set(ids)
                self.keys.shred(SHARD, ids)
        self.applied = max(self.applied, index)

    def restart(self) -> None:
        """The rows of the store are as of the last applied entry, or perhaps of an earlier one."""
        self.keys.close()
        self.keys = opened(self.folder)
        self.keys.settle(SHARD, np.array(sorted(self.named), np.uint64), self.last)

    def wipe(self) -> None:
        self.keys.close()
        (self.folder / SHARED_KEYS_NAME).unlink(missing_ok=True)
        self.keys = opened(self.folder)
        self.named, self.last, self.applied = set(), 0, 0

    def has(self, key_id: int) -> bool:
        return bool(self.keys.give(SHARD, [key_id]))


class Cluster:
    """Three members, and what one leader after the other does; a step is a method."""

    def __init__(self, folder: Path, seed: int) -> None:
        self.chance = random.Random(seed)
        self.members = [Member(folder / str(at)) for at in range(3)]
        self.log: list[tuple[str, list[int]]] = []
        self.alive: set[int] = set()
        self.sent: list[list[SharedKey]] = []
        self._term = self._subjects = 0
        self._leader: Member | None = None

    def any(self) -> Member:
        return self.chance.choice(self.members)

    def lose(self) -> list[SharedKey]:
        """Make keys that no other member gets for now, so that they are not named."""
        leader = self.any()
        if leader is not self._leader:
            self._leader, self._term = leader, self._term + 1
        leader.apply(self.log, len(self.log))  # it leads, so it has applied everything
        self._subjects += 1
        texts = [f"{kind}{self._subjects}" for kind in "st"]
        self.sent.append(leader.keys.prepare(SHARD, texts, self._term))
        return self.sent[-1]

    def make(self) -> None:
        made = self.lose()
        others = [one for one in self.members if one is not self._leader]
        if self.chance.choice(others).keys.take(SHARD, made):
            ids = [one.id for one in made]
            self.log.append(("name", ids))
            self.alive |= set(ids)

    def delay(self) -> None:
        """A put arrives late, or again."""
        if self.sent:
            self.any().keys.take(SHARD, self.chance.choice(self.sent))

    def shred(self) -> None:
        if self.alive:
            key_id = self.chance.choice(sorted(self.alive))
            self.log.append(("shred", [key_id]))
            self.alive.discard(key_id)

    def apply(self) -> None:
        self.any().apply(self.log, self.chance.randint(0, len(self.log)))

    def fetch(self, one: Member | None = None, other: Member | None = None) -> None:
        one, other = one or self.any(), other or self.any()
        wanted = one.keys.wanted.get(SHARD, [])
        one.keys.take(SHARD, other.keys.give(SHARD, wanted))

    def restart(self) -> None:
        self._leader = None
        self.any().restart()

    def wipe(self) -> None:
        if all(one.has(key_id) for one in self.members for key_id in self.alive):
            self._leader = None
            self.any().wipe()


def test_key_in_the_slot_of_a_destroyed_one_is_not_destroyed_with_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Two threads destroy what was given up, and a third adds a key in between."""
    keys = opened(tmp_path)
    (first,) = keys.prepare(SHARD, ["a"], 1)
    keys.name(SHARD, [first.id])
    keys.shred(SHARD, [first.id])
    destroy, made = keys.destroy, list[SharedKey]()

    def destroy_and_make() -> None:
        keys.destroy_doomed()
        made.extend(keys.prepare(SHARD, ["b"], 1))

    other = threading.Thread(target=destroy_and_make)

    def destroy_late(slots: Sequence[int], below_seq: int) -> None:
        monkeypatch.undo()
        other.start()
        other.join(0.5)  # it may have to wait for this one
        destroy(slots, below_seq)

    monkeypatch.setattr(keys, "destroy", destroy_late)
    keys.destroy_doomed()
    other.join()
    assert keys.give(SHARD, [made[0].id]) == made
    keys.name(SHARD, [made[0].id])
    assert not keys.is_behind
    keys.close()


@pytest.mark.parametrize("restarted", [True, False])
def test_nothing_of_a_key_stays_in_a_slot_that_was_damaged(tmp_path: Path, restarted: bool) -> None:
    """The key comes again into another slot, so to shred it does not reach the damaged one."""
    keys = opened(tmp_path)
    (one,) = keys.prepare(SHARD, ["a"], 1)
    keys.name(SHARD, [one.id])
    path = tmp_path / SHARED_KEYS_NAME
    with path.open("r+b") as file:
        file.seek(SLOTS_AT + SLOT_BYTES - 1)
        file.write(bytes([path.read_bytes()[SLOTS_AT + SLOT_BYTES - 1] ^ 1]))
    if restarted:
        keys.close()
        keys = opened(tmp_path)
        keys.settle(SHARD, np.array([one.id], np.uint64), one.id)
    else:
        with pytest.raises(ApiError):
            keys.opening_of(SHARD, one.id)
        assert keys.is_behind
        keys.destroy_doomed()
    assert one.key not in path.read_bytes()
    assert not keys.broken
    assert keys.take(SHARD, [one])
    assert not keys.is_behind
    keys.shred(SHARD, [one.id])
    keys.destroy_doomed()
    assert one.key not in path.read_bytes()
    keys.close()
    keys = opened(tmp_path)
    (two,) = keys.prepare(SHARD, ["a"], 2)
    keys.name(SHARD, [two.id])
    keys.close()
    keys = opened(tmp_path)
    assert keys.give(SHARD, [two.id]) == [two]
    keys.close()


@pytest.mark.parametrize("seed", range(20))
def test_members_end_with_the_named_keys_and_no_others(tmp_path: Path, seed: int) -> None:
    cluster = Cluster(tmp_path, seed)
    steps = ["make", "make", "lose", "delay", "delay", "shred", "apply", "restart", "fetch", "wipe"]
    for _ in range(150):
        getattr(cluster, cluster.chance.choice(steps))()
    for one in cluster.members:
        one.apply(cluster.log, len(cluster.log))
    for one in cluster.members:
        for other in cluster.members:
            cluster.fetch(one, other)
        for delayed in cluster.sent:
            one.keys.take(SHARD, delayed)
        one.keys.destroy_doomed()
    shredded = {key_id for kind, ids in cluster.log if kind == "shred" for key_id in ids}
    secrets = {key.id: key.key for made in cluster.sent for key in made}
    assert len(cluster.alive) > 3
    for one in cluster.members:
        assert one.keys.wanted == {}
        data = (one.folder / SHARED_KEYS_NAME).read_bytes()
        assert all(one.has(key_id) and secrets[key_id] in data for key_id in cluster.alive)
        assert not any(one.has(key_id) or secrets[key_id] in data for key_id in shredded)


def test_key_seals_once_it_is_named_and_opens_until_it_is_shredded(tmp_path: Path) -> None:
    mine = opened(tmp_path)
    mine.settle(SHARD, np.zeros(0, np.uint64), 0)
    [made] = mine.prepare(SHARD, ["a"], 3)
    assert made.id == SHARED | 3 << 32 | 1
    assert mine.sealing(SHARD, "a") is None
    assert mine.slots_of_shard(SHARD) == []
    mine.name(SHARD, [made.id])
    sealing = mine.sealing(SHARD, "a")
    assert sealing is not None
    assert sealing.id == made.id
    assert mine.opening_of(SHARD, made.id) == sealing
    # The same id of another shard is another key.
    with pytest.raises(ApiError):
        mine.opening_of(SHARD + 1, made.id)
    assert mine.prepare(SHARD, ["a"], 3) == []
    # An erasure retires it: the next publish gets another one.
    retired = mine.ids_of(mine.retire(SHARD, ["a", "b"]))
    assert retired == [made.id]
    [second] = mine.prepare(SHARD, ["a"], 3)
    assert second.id == made.id + 1
    assert mine.opening_of(SHARD, made.id) is not None
    mine.shred(SHARD, [made.id])
    assert mine.opening_of(SHARD, made.id) is None
    assert made.key in (tmp_path / SHARED_KEYS_NAME).read_bytes()
    mine.destroy_doomed()
    data = (tmp_path / SHARED_KEYS_NAME).read_bytes()
    assert made.key not in data
    assert second.key in data
    # Its slot is used again.
    size = len(data)
    mine.prepare(SHARD, ["c"], 3)
    assert len((tmp_path / SHARED_KEYS_NAME).read_bytes()) == size
    mine.forget(SHARD)
    mine.destroy_doomed()
    assert second.key not in (tmp_path / SHARED_KEYS_NAME).read_bytes()
    assert not any(mine.live().values())


def test_damaged_slot_and_damaged_file_are_filled_again_from_another_member(
    tmp_path: Path,
) -> None:
    (tmp_path / "one").mkdir()
    (tmp_path / "other").mkdir()
    ring = Keyring.create(Files(), tmp_path / "one", bytes(32))
    mine, other = opened(tmp_path / "one", ring), opened(tmp_path / "other")
    made = mine.prepare(SHARD, ["a", "b", "c"], 1)
    assert other.take(SHARD, made)
    ids = [one.id for one in made]
    path = tmp_path / "one" / SHARED_KEYS_NAME
    assert not any(one.key in path.read_bytes() for one in made)

    def settled(keys: SharedKeys) -> list[int]:
        keys.settle(SHARD, np.array(ids, np.uint64), ids[-1])
        return keys.wanted.get(SHARD, [])

    for member in (mine, other):
        member.name(SHARD, ids)
    for at, lost in ((SLOTS_AT + 128 + 60, ids[1:2]), (0, ids)):
        mine.close()
        with path.open("r+b") as file:
            file.seek(at)
            file.write(b"damage")
        mine = opened(tmp_path / "one", ring)
        assert settled(mine) == lost
        with pytest.raises(ApiError):
            mine.opening_of(SHARD, lost[0])
        assert mine.take(SHARD, other.give(SHARD, lost))
        assert mine.wanted == {}
        assert mine.give(SHARD, ids) == made
    # Found while it runs.
    with path.open("r+b") as file:
        file.seek(SLOTS_AT + 60)
        file.write(b"damage")
    with pytest.raises(ApiError):
        mine.opening_of(SHARD, mine.ids_of([0])[0])
    assert len(mine.wanted[SHARD]) == 1
    mine.close()
    assert settled(opened(tmp_path / "one", ring)) == mine.wanted[SHARD]


def test_full_file_takes_no_key(tmp_path: Path) -> None:
    mine = opened(tmp_path, slots_max=2)
    mine.prepare(SHARD, ["a", "b"], 1)
    with pytest.raises(SubjectKeysFullError):
        mine.prepare(SHARD, ["c"], 1)


def test_state_names_ascending_ids_and_drops_the_shredded_ones() -> None:
    class NoFacts:
        facts_at = subjects_at = None

    machine = StreamMachine(SHARD, NoFacts())  # type: ignore[arg-type]

    def apply(command: cmd.Command, index: int) -> tuple[object, Writes]:
        writes = Writes()
        return machine.apply(index, 1, command, writes, term=7), writes

    def encoded(*ids: int) -> bytes:
        return np.array(ids, np.uint64).tobytes()

    def key(number: int) -> bytes:
        return keys.large_key(keys.SUBJECT_KEY, SHARD, number)

    high = SHARED | 1 << 32
    marks = b"1" * 16 + b"4" * 16
    result, writes = apply(cmd.NameKeys(encoded(high + 1, high + 4), marks), 1)
    assert result == Done()
    rows = dict(row[1:] for row in writes.rows if row[0] == "put")  # type: ignore[misc]
    assert rows[key(0)] == (high + 4).to_bytes(8, "big")
    assert rows[key(high + 1)] + rows[key(high + 4)] == marks
    for wrong in (encoded(high + 4), encoded(high + 6, high + 5), b"", b"1234567", encoded(0)):
        assert isinstance(apply(cmd.NameKeys(wrong, bytes(2 * len(wrong))), 2)[0], Refused)
    assert isinstance(apply(cmd.NameKeys(encoded(high + 6), marks), 2)[0], Refused)
    config = cmd.ConfigureStream(
        StreamConfig(name="S", subjects=("S",)),
        "i",
        bytes(16),
    )
    apply(config, 3)
    for late in (cmd.RetireKeys(encoded(high + 1), 6), cmd.ShredKeys(encoded(high + 1), 6)):
        result, writes = apply(late, 4)
        assert isinstance(result, Refused)
        assert (result.code, writes.rows) == (errors.NOT_LEADER.code, [])
    result, writes = apply(cmd.RetireKeys(encoded(high + 1), 7), 4)
    assert (result, writes.rows) == (Done(), [])
    result, writes = apply(cmd.ShredKeys(encoded(high + 1), 7), 5)
    assert (result, writes.rows) == (Done(), [("delete", key(high + 1))])
    loaded = StreamMachine.load(
        SHARD, NoFacts(), lambda prefix: rows.items() if prefix == key(0) else ()
    )  # type: ignore[arg-type,return-value]
    assert loaded.last_key == high + 4
