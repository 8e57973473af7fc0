"""Stored files are damaged while the node is down: it never silently shows less or other data.

Three outcomes are allowed. The node refuses to start and says why; or it serves and refuses the
damaged stream (503 `data_lost`); or the damage had no effect and everything is unchanged.
"""

import copy
import random
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Final, Literal

import msgspec
import pytest

from contrail_storage.wal.codec import BATCH_HEADER_BYTES
from tests.crash import damage
from tests.crash.disk import Kill, Plan
from tests.crash.history import Purge, Returned, Seen, Step, Stopped, TakeCheckpoint, Unknown
from tests.crash.ledger import Ledger
from tests.crash.script import ORDERS, Writer, archive
from tests.crash.trials import Trial, calls_of, kill_points, sample
from tests.crash.zygote import Ended, Job, Zygote
from tests.support.folders import contents

SEED: Final = 31
SEGMENT_BYTES: Final = 8_000
NODE_KEYS: Final = (bytes(range(32)),)
CLEAR_TEXT_MIN: Final = 20

Spoil = Callable[[Path, random.Random], str]


class Archive:
    """A data directory that is copied for every case, and what it holds."""

    def __init__(self, zygote: Zygote, directory: Path, node_keys: tuple[bytes, ...] = ()) -> None:
        self._zygote = zygote
        self._node_keys = node_keys
        self._directory = directory
        self._cases = 0
        ledger = Ledger(accept_refusals=True)
        self._built = self._trial(directory / "built", ledger)
        # With a successor, the last batch of the log can be distinguished from a torn one.
        job = Job(steps=archive(SEED), successors=True, segment_bytes=SEGMENT_BYTES)
        self._built.live(job)
        assert self._built.ledger.problems == []

    def spoil(self, spoil: Spoil) -> tuple[str, list[str], list[str]]:
        """Damage a copy and look at it: what was done, what the node says, what is wrong with that.

        The first answer is for messages of failures, the second holds the refusal to start, or of
        streams (none when everything is shown), the third the broken promises.
        """
        self._cases += 1
        directory = self._directory / f"{self._cases}"
        shutil.copytree(self._built.directory, directory)
        ledger = copy.deepcopy(self._built.ledger)
        trial = self._trial(directory, ledger)
        done = spoil(trial.data_dir, random.Random(f"{SEED} {self._cases}"))
        before = contents(trial.data_dir)
        records = trial.live(Job(look=True, segment_bytes=SEGMENT_BYTES)).records
        said = [record.reason for record in records if isinstance(record, Stopped)]
        if said and contents(trial.data_dir) != before:
            trial.ledger.problems.append("a start that was refused changed a file")
        for record in records:
            if isinstance(record, Seen):
                said += record.unreadable.values()
        shutil.rmtree(directory)
        return done, said, trial.ledger.problems

    def stop(
        self, spoil: Spoil, steps: list[Step], kill: Kill | None = None
    ) -> tuple[Ended, list[str], list[str]]:
        """Damage a copy, make calls on it, maybe up to ``kill``, and look at what that leaves.

        Answers the life of these calls, the streams that the look was refused, broken promises.
        """
        self._cases += 1
        directory = self._directory / f"{self._cases}"
        shutil.copytree(self._built.directory, directory)
        trial = self._trial(directory, copy.deepcopy(self._built.ledger))
        spoil(trial.data_dir, random.Random(SEED))
        end: Literal["stop", "exit"] = "stop" if kill is None else "exit"
        job = Job(steps=steps, plan=Plan(seed=SEED, kill=kill), segment_bytes=SEGMENT_BYTES)
        ended = trial.live(msgspec.structs.replace(job, end=end))
        looks = [trial.live(Job(look=True, segment_bytes=SEGMENT_BYTES)) for _ in range(2)]
        records = [record for one in looks for record in one.records]
        problems = trial.ledger.problems
        problems += [f"does not serve: {one.reason}" for one in records if isinstance(one, Stopped)]
        unreadable = [list(one.unreadable) for one in records if isinstance(one, Seen)]
        shutil.rmtree(directory)
        return ended, [name for names in unreadable for name in names], problems

    def _trial(self, directory: Path, ledger: Ledger) -> Trial:
        return Trial(self._zygote, directory, SEED, node_keys=self._node_keys, ledger=ledger)


@pytest.fixture(scope="module")
def sealed(zygote: Zygote, lasting_area: Path) -> Archive:
    return Archive(zygote, lasting_area / "sealed", NODE_KEYS)


@pytest.fixture(scope="module")
def stored(zygote: Zygote, lasting_area: Path) -> Archive:
    return Archive(zygote, lasting_area / "plain")


def faults(archive: Archive, spoil: Spoil, times: int, *, must_notice: bool) -> list[str]:
    found = []
    for _ in range(times):
        done, said, problems = archive.spoil(spoil)
        if must_notice and not said:
            problems = [*problems, "not noticed"]
        if any(len(text) < CLEAR_TEXT_MIN for text in said):
            problems = [*problems, f"says only {said}"]
        found += [f"{done}: {problem}" for problem in problems]
    return found


def any_table(data_dir: Path, chance: random.Random) -> Path:
    return damage.some_file(data_dir, "store/*.sst", chance)


def any_blob(data_dir: Path, chance: random.Random) -> Path:
    """A file of blocks that stand apart from the tables."""
    return damage.some_file(data_dir, "store/*.blob", chance)


def last_segment(data_dir: Path) -> Path:
    return damage.newest_file(data_dir, "wal/*.wal")


def newest_record(data_dir: Path) -> Path:
    return damage.newest_file(data_dir, "checkpoints/*")


def flip_copies(data_dir: Path, chance: random.Random, name: str) -> str:
    """Damage a file that is kept twice, and its copy."""
    return ", ".join(damage.flip_bit(path, chance) for path in sorted(data_dir.glob(f"{name}*")))


def remove_copies(data_dir: Path, name: str) -> str:
    return ", ".join(damage.remove(path) for path in sorted(data_dir.glob(f"{name}*")))


def manifest(data_dir: Path) -> Path:
    return damage.newest_file(data_dir, "store/MANIFEST-*")


@pytest.mark.parametrize(
    ("spoil", "times"),
    [
        pytest.param(lambda d, c: damage.remove(any_table(d, c)), 3, id="missing table"),
        pytest.param(lambda d, c: damage.cut_end(any_table(d, c), c), 3, id="cut table"),
        pytest.param(lambda d, c: damage.cut_end(manifest(d), c), 6, id="cut manifest"),
        pytest.param(lambda d, c: damage.flip_bit(manifest(d), c), 4, id="bit of the manifest"),
        pytest.param(lambda d, c: damage.remove(manifest(d)), 1, id="missing manifest"),
        pytest.param(lambda d, c: damage.remove(d / "store/CURRENT"), 1, id="missing CURRENT"),
        pytest.param(lambda d, c: flip_copies(d, c, "identity"), 2, id="bit of the identity"),
        pytest.param(
            lambda d, c: damage.remove(damage.some_file(d, "wal/*0[0-9a-e]-*.wal", c)),
            1,
            id="missing first segment",
        ),
        pytest.param(lambda d, c: damage.remove(any_blob(d, c)), 3, id="missing blocks"),
        pytest.param(lambda d, c: damage.cut_end(any_blob(d, c), c), 3, id="cut blocks"),
    ],
)
def test_damage_to_a_needed_file_is_noticed(stored: Archive, spoil: Spoil, times: int) -> None:
    assert faults(stored, spoil, times, must_notice=True) == []


def test_flipped_bits_of_tables_are_never_served(stored: Archive) -> None:
    for any_file in (any_table, any_blob):
        found = faults(
            stored, lambda d, c, f=any_file: damage.flip_bit(f(d, c), c), 16, must_notice=False
        )
        assert found == []


def test_flipped_bit_inside_a_message_block_stops_its_stream_only(stored: Archive) -> None:
    def spoil(data_dir: Path, chance: random.Random) -> str:
        # The first file begins with the large blocks of one stream.
        first = min(data_dir.glob("store/*.blob"))
        return damage.flip_bit(first, chance, 40_000, 120_000)

    for _ in range(4):
        done, said, problems = stored.spoil(spoil)
        assert problems == [], done
        assert [text.partition(":")[0] for text in said] == ["data_lost"] * 2, (done, said)


@pytest.mark.parametrize("stride", [29, pytest.param(3, marks=pytest.mark.slow)])
def test_stream_that_stops_amid_a_life_cut_short_anywhere_spares_the_others(
    stored: Archive, stride: int
) -> None:
    def spoil(data_dir: Path, chance: random.Random) -> str:
        return damage.flip_bit(min(data_dir.glob("store/*.blob")), chance, 40_000, 120_000)

    write = Writer(SEED + 1, all_ids=False)
    steps: list[Step] = [
        [write.orders(write.message("orders.0")), write.events(write.message("events.a"))],
        [
            Purge(ORDERS, up_to_seq=75),
            write.events(write.message("events.b")),
            write.orders(write.message("orders.1")),
        ],
        [write.events(write.message("events.c"))],
        [TakeCheckpoint()],
        [write.events(write.message("events.d"))],
    ]
    ended, refused, problems = stored.stop(spoil, steps)
    assert (refused, problems) == ([ORDERS] * 4, [])
    outcomes = [one.outcome for one in ended.records if isinstance(one, Returned)]
    assert sum(isinstance(one, Unknown) for one in outcomes) in (1, 2)
    calls = calls_of(ended)
    for kill in sample(kill_points(calls), calls, stride):
        _, refused, problems = stored.stop(spoil, steps, kill)
        assert (set(refused), problems) == ({ORDERS}, []), kill


def test_flipped_bit_of_the_log_before_its_last_batch_refuses_the_start(stored: Archive) -> None:
    def spoil(data_dir: Path, chance: random.Random) -> str:
        segment = damage.some_file(data_dir, "wal/*.wal", chance)
        empty_batch = BATCH_HEADER_BYTES if segment == last_segment(data_dir) else 0
        return damage.flip_bit(segment, chance, 0, damage.written_end(segment) - empty_batch)

    for _ in range(12):
        done, said, problems = stored.spoil(spoil)
        assert problems == [], done
        assert ["write-ahead log is damaged" in text for text in said] == [True], (done, said)


@pytest.mark.parametrize("archive", ["stored", "sealed"])
def test_damage_to_one_of_two_copies_changes_nothing(
    archive: str, request: pytest.FixtureRequest
) -> None:
    folder: Archive = request.getfixturevalue(archive)
    spoils: list[Spoil] = [
        lambda d, c: damage.cut_end(newest_record(d), c),
        lambda d, c: damage.flip_bit(newest_record(d), c),
        lambda d, c: damage.flip_bit(d / "identity", c),
        lambda d, c: damage.cut_end(d / "identity", c),
        lambda d, _: damage.remove(d / "identity"),
    ]
    if archive == "sealed":
        spoils += [
            lambda d, c: damage.flip_bit(d / "keys", c),
            lambda d, _: damage.remove(d / "keys"),
        ]
    for spoil in spoils:
        assert folder.spoil(spoil)[1:] == ([], [])


def test_damaged_end_of_the_log_is_cut_without_loss(stored: Archive) -> None:
    def flip(data_dir: Path, chance: random.Random) -> str:
        segment = last_segment(data_dir)
        end = damage.written_end(segment)
        return damage.flip_bit(segment, chance, end - BATCH_HEADER_BYTES, end)

    def cut(data_dir: Path, chance: random.Random) -> str:
        segment = last_segment(data_dir)
        return damage.cut_end(segment, chance, BATCH_HEADER_BYTES, damage.written_end(segment))

    for spoil in (flip, flip, cut, cut):
        assert stored.spoil(spoil)[1:] == ([], [])


@pytest.mark.parametrize(
    ("spoil", "times"),
    [
        pytest.param(lambda d, c: flip_copies(d, c, "keys"), 4, id="bit of the data keys"),
        pytest.param(lambda d, _: remove_copies(d, "keys"), 1, id="missing data keys"),
    ],
)
def test_damage_to_a_needed_file_of_an_encrypted_folder_is_noticed(
    sealed: Archive, spoil: Spoil, times: int
) -> None:
    assert faults(sealed, spoil, times, must_notice=True) == []


def test_flipped_bits_of_an_encrypted_folder_are_never_served(sealed: Archive) -> None:
    def spoil(data_dir: Path, chance: random.Random) -> str:
        if chance.random() < 0.5:
            return damage.flip_bit(any_table(data_dir, chance), chance)
        segment = damage.some_file(data_dir, "wal/*.wal", chance)
        return damage.flip_bit(segment, chance, 0, damage.written_end(segment))

    assert faults(sealed, spoil, 10, must_notice=False) == []


def test_undamaged_copy_is_served_whole(stored: Archive) -> None:
    assert stored.spoil(lambda _directory, _chance: "nothing")[1:] == ([], [])
