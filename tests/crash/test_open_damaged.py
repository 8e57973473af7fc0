"""Damaged folders opened with ``accept_data_loss``: readable messages are served unchanged.

Without the switch a start is refused and changes nothing. After one with it, every start serves.
"""

import itertools
import os
import random
import shutil
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Final

import pytest

from contrail_common.model import StoredMessage
from contrail_storage.wal.codec import BATCH_HEADER_BYTES
from tests.crash import damage
from tests.crash.disk import Kill, Plan
from tests.crash.history import Seen, Stopped
from tests.crash.script import EVENTS, ORDERS, archive
from tests.crash.trials import calls_of, kill_points
from tests.crash.zygote import Ended, Job, Zygote
from tests.support.folders import contents

SEED: Final = 31
SEGMENT_BYTES: Final = 1_500
NODE_KEYS: Final = (bytes(range(32)),)

Spoil = Callable[[Path, random.Random], str]


class Damaged:
    """A folder that is copied and damaged for every case, and what it showed before."""

    def __init__(self, zygote: Zygote, area: Path, node_keys: tuple[bytes, ...] = ()) -> None:
        self._zygote = zygote
        self._area = area
        self._node_keys = node_keys
        self._cases = 0
        self._spoils: Counter[str] = Counter()  # by test: copies it has damaged
        self._twins = itertools.count().__next__
        self.built = area / "built"
        self.live(self.built, steps=archive(SEED), successors=True)
        self.before = self.seen(self.live(self.copy(), look=True))

    def copy(self) -> Path:
        """Another copy of the folder."""
        self._cases += 1
        target = self._area / f"{self._cases}"
        shutil.copytree(self.built, target)
        return target

    def twin(self, folder: Path) -> Path:
        """A copy of a copy."""
        return Path(shutil.copytree(folder, folder.with_name(f"{folder.name}-{self._twins()}")))

    def live(self, folder: Path, **job: object) -> Ended:
        """One life on a folder."""
        given = {"segment_bytes": SEGMENT_BYTES, "node_keys": self._node_keys} | job
        return self._zygote.live(Job(data_dir=str(folder), **given))  # type: ignore[arg-type]

    def seen(self, ended: Ended) -> Seen:
        """The look of a life, which must have served."""
        assert refusals(ended) == []
        return next(record for record in ended.records if isinstance(record, Seen))

    def refused(self, folder: Path, *, accept: bool = False) -> str:
        """The reason why a folder is refused; checks that it is unchanged."""
        before = contents(folder)
        (reason,) = refusals(self.live(folder, look=True, accept=accept))
        assert contents(folder) == before
        return reason

    def accepted(self, folder: Path) -> Seen:
        """The remaining content of a folder that is refused without the switch; looks twice."""
        self.refused(folder)
        before = contents(folder)
        first = self.seen(self.live(folder, look=True, accept=True))
        aside = contents(folder / "damaged/1")
        assert aside.items() <= before.items()
        assert any(name.startswith("store/") for name in aside)
        again = self.seen(self.live(folder, look=True))
        assert shown(again) == shown(first)
        assert again.unreadable == {}
        return again

    def spoiled(self, spoil: Spoil) -> Path:
        """A damaged copy. The damage depends on the test alone, not on those that ran before."""
        folder = self.copy()
        test = os.environ["PYTEST_CURRENT_TEST"]
        self._spoils[test] += 1
        spoil(folder, random.Random(f"{SEED} {test} {self._spoils[test]}"))
        return folder


def refusals(ended: Ended) -> list[str]:
    return [record.reason for record in ended.records if isinstance(record, Stopped)]


def shown(seen: Seen) -> dict[str, dict[int, StoredMessage]]:
    """The messages of each stream by sequence."""
    return {
        name: {message.seq: message for message in view.messages}
        for name, view in seen.streams.items()
    }


@pytest.fixture(scope="module")
def stored(zygote: Zygote, lasting_area: Path) -> Damaged:
    return Damaged(zygote, lasting_area / "plain")


@pytest.fixture(scope="module")
def sealed(zygote: Zygote, lasting_area: Path) -> Damaged:
    return Damaged(zygote, lasting_area / "sealed", NODE_KEYS)


def segments(folder: Path) -> list[Path]:
    return sorted(folder.glob("wal/*.wal"))


def rot_in_the_log(folder: Path, chance: random.Random) -> str:
    *_, last = segments(folder)
    segment = chance.choice(segments(folder))
    empty_batch = BATCH_HEADER_BYTES if segment == last else 0
    return damage.flip_bit(segment, chance, 0, damage.written_end(segment) - empty_batch)


def missing_segment(folder: Path, chance: random.Random) -> str:
    return damage.remove(chance.choice(segments(folder)))


def all_segments_missing(folder: Path, _chance: random.Random) -> str:
    return " ".join(damage.remove(segment) for segment in segments(folder))


@pytest.mark.parametrize("times", [3, pytest.param(20, marks=pytest.mark.slow)])
@pytest.mark.parametrize("spoil", [rot_in_the_log, missing_segment, all_segments_missing])
def test_of_a_log_with_a_gap_every_shard_keeps_what_lies_below_it(
    stored: Damaged, spoil: Spoil, times: int
) -> None:
    before = shown(stored.before)
    for _ in range(times):
        after = shown(stored.accepted(stored.spoiled(spoil)))
        assert after.keys() == before.keys()
        for name, messages in after.items():
            last = max(messages)
            assert messages == {seq: one for seq, one in before[name].items() if seq <= last}


def any_table(folder: Path, chance: random.Random) -> Path:
    return damage.some_file(folder, "store/*.sst", chance)


def any_blob(folder: Path, chance: random.Random) -> Path:
    """A blob file: it has blocks outside of the tables."""
    return damage.some_file(folder, "store/*.blob", chance)


def manifest(folder: Path) -> Path:
    return damage.newest_file(folder, "store/MANIFEST-*")


def both_identities(spoil: Callable[[Path, random.Random], str]) -> Spoil:
    """Damage the file and its copy."""
    return lambda d, c: " ".join(spoil(path, c) for path in sorted(d.glob("identity*")))


STORE_DAMAGE: Final = [
    pytest.param(lambda d, c: damage.remove(any_table(d, c)), id="missing table"),
    pytest.param(lambda d, c: damage.cut_end(any_table(d, c), c), id="cut table"),
    pytest.param(lambda d, c: damage.cut_end(manifest(d), c), id="cut manifest"),
    pytest.param(lambda d, c: damage.flip_bit(manifest(d), c), id="bit of the manifest"),
    pytest.param(lambda d, c: damage.remove(manifest(d)), id="missing manifest"),
    pytest.param(lambda d, c: damage.remove(d / "store/CURRENT"), id="missing CURRENT"),
    pytest.param(lambda d, c: damage.remove(any_blob(d, c)), id="missing blocks"),
    pytest.param(lambda d, c: damage.cut_end(any_blob(d, c), c), id="cut blocks"),
]


def manifest_missing(folder: Path, _chance: random.Random) -> str:
    return damage.remove(manifest(folder))


def manifest_empty(folder: Path, _chance: random.Random) -> str:
    os.truncate(manifest(folder), 0)
    return "manifest emptied"


CONFIGURATIONS_GONE: Final = "neither its name nor its configuration can be read"


@pytest.mark.parametrize("spoil", STORE_DAMAGE)
def test_of_a_damaged_store_what_can_be_read_is_served_as_it_was(
    stored: Damaged, spoil: Spoil
) -> None:
    before = shown(stored.before)
    for _ in range(2):
        folder = stored.spoiled(spoil)
        if refusals(stored.live(stored.twin(folder), look=True, accept=True)):
            # The first table has the names and the configurations of all streams.
            assert CONFIGURATIONS_GONE in stored.refused(folder, accept=True)
            continue
        for name, messages in shown(stored.accepted(folder)).items():
            assert messages.items() <= before[name].items()


@pytest.mark.parametrize("spoil", [manifest_missing, manifest_empty])
@pytest.mark.parametrize("archive", ["stored", "sealed"])
def test_blocks_beside_the_tables_are_found_though_the_store_lost_their_place(
    spoil: Spoil, archive: str, request: pytest.FixtureRequest
) -> None:
    damaged: Damaged = request.getfixturevalue(archive)
    assert shown(damaged.accepted(damaged.spoiled(spoil))) == shown(damaged.before)


@pytest.mark.parametrize(
    "spoil",
    [
        pytest.param(both_identities(damage.flip_bit), id="bit of the identity"),
        pytest.param(both_identities(damage.cut_end), id="cut identity"),
    ],
)
def test_damage_beside_the_messages_loses_none(stored: Damaged, spoil: Spoil) -> None:
    for _ in range(3):
        assert shown(stored.accepted(stored.spoiled(spoil))) == shown(stored.before)


def rotten_block(folder: Path, chance: random.Random) -> str:
    # The first of these files begins with the large blocks of one stream.
    return damage.flip_bit(min(folder.glob("store/*.blob")), chance, 40_000, 120_000)


def test_messages_of_a_rotten_block_become_deleted_and_the_rest_is_served(
    stored: Damaged,
) -> None:
    for _ in range(2):
        folder = stored.spoiled(rotten_block)
        assert stored.seen(stored.live(folder, look=True)).unreadable.keys() == {ORDERS}
        after = stored.seen(stored.live(folder, look=True, accept=True))
        assert after.unreadable == {}
        assert shown(after)[EVENTS] == shown(stored.before)[EVENTS]
        left, before = shown(after)[ORDERS], shown(stored.before)[ORDERS]
        assert left.items() < before.items()
        state, whole = after.streams[ORDERS].state, stored.before.streams[ORDERS].state
        assert state.messages == len(left)
        assert (state.last_seq, state.first_seq) == (whole.last_seq, min(left))
        assert shown(stored.seen(stored.live(folder, look=True))) == shown(after)


@pytest.mark.parametrize("times", [4, pytest.param(30, marks=pytest.mark.slow)])
@pytest.mark.parametrize("any_file", [any_table, any_blob])
def test_flipped_bits_of_a_store_take_what_they_hit_and_nothing_else(
    stored: Damaged, any_file: Callable[[Path, random.Random], Path], times: int
) -> None:
    before = shown(stored.before)
    for _ in range(times):
        folder = stored.spoiled(lambda d, c: damage.flip_bit(any_file(d, c), c))
        ended = stored.live(folder, look=True, accept=True)
        if refusals(ended):
            assert CONFIGURATIONS_GONE in stored.refused(folder, accept=True)
            continue
        after = stored.seen(ended)
        assert after.unreadable == {}
        for name, messages in shown(after).items():
            assert messages.items() <= before[name].items()
        assert shown(stored.seen(stored.live(folder, look=True))) == shown(after)


@pytest.mark.parametrize("spoil", [rot_in_the_log, missing_segment, *STORE_DAMAGE])
def test_encrypted_folder_is_opened_as_a_plain_one_is(sealed: Damaged, spoil: Spoil) -> None:
    before = shown(sealed.before)
    folder = sealed.spoiled(spoil)
    if refusals(sealed.live(sealed.twin(folder), look=True, accept=True)):
        assert CONFIGURATIONS_GONE in sealed.refused(folder, accept=True)
        return
    for name, messages in shown(sealed.accepted(folder)).items():
        assert messages.items() <= before[name].items()


def test_wrong_or_missing_node_key_is_no_damage_and_nothing_is_touched(sealed: Damaged) -> None:
    for spoil in (rot_in_the_log, lambda _folder, _chance: "nothing"):
        folder = sealed.spoiled(spoil)
        before = contents(folder)
        for wrong in ((), (b"w" * 32,)):
            ended = sealed.live(folder, accept=True, node_keys=wrong)
            assert "is encrypted" in refusals(ended)[0]
        assert contents(folder) == before


def test_damaged_data_keys_are_refused_with_the_switch_too(sealed: Damaged) -> None:
    folder = sealed.spoiled(
        lambda d, c: " ".join(damage.flip_bit(path, c) for path in sorted(d.glob("keys*")))
    )
    assert "keys" in sealed.refused(folder, accept=True)


def test_healthy_folder_is_opened_as_without_the_switch(stored: Damaged) -> None:
    folder = stored.copy()
    after = stored.seen(stored.live(folder, look=True, accept=True))
    assert after.streams == stored.before.streams
    assert not (folder / "damaged").exists()
    assert not (folder / "accepting").exists()


@pytest.mark.parametrize(
    "spoil",
    [rot_in_the_log, rotten_block, lambda d, c: damage.remove(manifest(d))],
    ids=["rot in the log", "rotten block", "missing manifest"],
)
@pytest.mark.parametrize(
    ("stride", "every"),
    [(47, 2), pytest.param(1, 1, marks=pytest.mark.slow)],
    ids=["sampled", "all"],
)
def test_crash_in_an_accepting_start_leaves_damage_or_a_healed_folder(
    stored: Damaged, spoil: Spoil, stride: int, every: int
) -> None:
    folder = stored.spoiled(spoil)
    whole = stored.live(stored.twin(folder), look=True, accept=True, end="stop")
    healed = shown(stored.seen(whole))
    calls = calls_of(whole)
    renames = [
        Kill("files", number)
        for number, call in enumerate(calls["files"], 1)
        if call in ("rename", "unlink")
    ]
    for kill in [*renames[::every], *kill_points(calls)[::stride]]:
        twin = stored.twin(folder)
        stored.live(twin, accept=True, plan=Plan(seed=SEED, kill=kill))
        ended = stored.live(twin, look=True)
        if refusals(ended) or stored.seen(ended).unreadable:
            ended = stored.live(twin, look=True, accept=True)
        assert shown(stored.seen(ended)) == healed, kill
        assert shown(stored.seen(stored.live(twin, look=True))) == healed, kill
        assert not (twin / "accepting").exists()
        shutil.rmtree(twin)
