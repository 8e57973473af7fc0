"""The encrypted log: records open at their place only, and damage is judged without a key."""

from collections.abc import Callable, Sequence
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from contrail_storage.seal.keyring import Keyring
from contrail_storage.wal import LogOptions, NodeLog, codec
from contrail_storage.wal.codec import RECORD_HEADER_BYTES, RecordKind, Seal
from contrail_storage.wal.log_state import Segment
from contrail_storage.wal.replay import Replayed, replay
from tests.support.each import each
from tests.unit.storage.wal_disk import HandLoop, Inode, SimDisk

SALT = b"\x07saltSA\x01"
OTHER_SALT = b"\x08saltSA\x01"
ROOT = Path("/wal")
NODE_KEY = bytes(32)
KEYRING = Keyring.create(SimDisk(), Path("/"), NODE_KEY)
BASE = codec.mark_record(RecordKind.BASE, 1, 0, 0)

payloads = st.lists(st.binary(min_size=1, max_size=60), min_size=1, max_size=8)


def entry(index: int, data: bytes) -> bytes:
    return codec.record_header(RecordKind.ENTRY, 1, index, 1, len(data)) + data


def sealed(number: int, body: bytes, salt: bytes = SALT) -> bytes:
    return codec.sealed_body(body, Seal(KEYRING, salt, number))


def batch(number: int, body: bytes, *, is_sealed: bool = True) -> bytes:
    return codec.batch_header(SALT, number, body, sealed=is_sealed) + body


def sealed_batches(datas: list[bytes]) -> list[bytes]:
    bodies = [entry(index, data) for index, data in enumerate(datas, 1)]
    bodies[0] = BASE + bodies[0]
    return [batch(number, sealed(number, body)) for number, body in enumerate(bodies, 1)]


def read_back(content: bytes, keyring: Keyring | None = KEYRING) -> Replayed:
    disk = SimDisk()
    segment = Segment(1, 1, SALT)
    disk.names[ROOT / segment.name] = Inode(bytearray(content))
    return replay(disk, ROOT, [segment], {}, keyring)


def datas_in(found: Replayed) -> list[bytes]:
    group = found.recovery.groups.get(1)
    return [data for data, _, _ in group.entries] if group else []


def records_in(body: bytes) -> list[bytes]:
    """The records of a body with their headers, as they lie there."""
    found, view = [], memoryview(body)
    while view:
        length = RECORD_HEADER_BYTES + int.from_bytes(view[RECORD_HEADER_BYTES - 4 :][:4], "little")
        found.append(bytes(view[:length]))
        view = view[length:]
    return found


@given(payloads)
def test_sealed_segment_gives_every_entry_and_shows_none(datas: list[bytes]) -> None:
    content = b"".join(sealed_batches(datas))
    found = read_back(content)
    assert datas_in(found) == datas
    assert found.recovery.torn_tail is None
    assert found.recovery.rot is None
    assert all(data not in content for data in datas if len(data) > 4)


@given(payloads, st.data())
def test_sealed_segment_cut_anywhere_has_a_torn_tail(
    datas: list[bytes], draw: st.DataObject
) -> None:
    batches = sealed_batches(datas)
    content = b"".join(batches)
    cut = draw.draw(st.integers(0, len(content)))
    found = read_back(content[:cut])
    whole = datas_in(found)
    assert whole == datas[: len(whole)]
    assert sum(map(len, batches[: len(whole)])) <= cut
    assert found.recovery.rot is None


@given(payloads, st.data())
def test_changed_bit_of_a_sealed_segment_is_a_torn_tail_or_rot_and_never_other_data(
    datas: list[bytes], draw: st.DataObject
) -> None:
    batches = sealed_batches(datas)
    content = bytearray(b"".join(batches))
    at = draw.draw(st.integers(0, len(content) * 8 - 1))
    content[at // 8] ^= 1 << at % 8
    found = read_back(bytes(content))
    whole = datas_in(found)
    assert whole == datas[: len(whole)]
    in_the_last = at // 8 >= len(content) - len(batches[-1])
    assert (found.recovery.torn_tail is not None) is in_the_last
    assert (found.recovery.rot is not None) is not in_the_last


FIRST_TWO = sealed(2, entry(1, b"one") + entry(2, b"two"))
HEAD = batch(1, sealed(1, BASE))
OLD, NEW = records_in(FIRST_TWO)


@each(
    "content",
    [
        # With sound sums: only the seal tells.
        pytest.param(HEAD + batch(2, NEW + OLD), id="swapped in a batch"),
        pytest.param(HEAD + batch(2, NEW), id="moved up in a batch"),
        pytest.param(HEAD + batch(2, OLD) + batch(3, NEW), id="moved to another batch"),
        pytest.param(
            HEAD + batch(2, sealed(2, entry(1, b"one"), OTHER_SALT)), id="of another segment"
        ),
        pytest.param(
            HEAD + batch(2, OLD[:5] + OLD[5:13][::-1] + OLD[13:] + NEW),
            id="with another index",
        ),
        pytest.param(HEAD + batch(2, entry(1, b"one")), id="not sealed"),
        pytest.param(HEAD + batch(2, entry(1, b"one"), is_sealed=False), id="of a plain log"),
    ],
)
def test_record_that_was_not_sealed_for_its_place_is_rot(content: bytes) -> None:
    found = read_back(content)
    assert found.recovery.rot is not None
    assert datas_in(found) in ([], [b"one"])


def test_sealed_batch_in_a_plain_log_is_rot() -> None:
    found = read_back(HEAD, keyring=None)
    assert found.recovery.rot is not None
    assert "encrypted" in found.recovery.rot.reason


class Life:
    """An encrypted log with two groups, from its opening to the end."""

    def __init__(self, disk: SimDisk, keyring: Keyring, keep_from: dict[int, int]) -> None:
        options = LogOptions(idle_s=1000.0, segment_bytes=400, keep_bytes=0)
        self.log = NodeLog.open(
            ROOT, files=disk, options=options, keep_from=keep_from, sealer=keyring
        )
        self.loop = HandLoop()
        self.durable = {1: 0, 2: 0}
        self.held = {group: self.log.attach(group, self._reporter(group)) for group in (1, 2)}
        self.failures: list[Exception] = []
        self.log.start(call_soon=self.loop.call_soon, on_failure=self.failures.append)

    def _reporter(self, group: int) -> Callable[[int, int], None]:
        def on_durable(position: int, _index: int) -> None:
            self.durable[group] = position

        return on_durable

    def put(self, group: int, first: int, datas: Sequence[bytes]) -> None:
        for index, data in enumerate(datas, first):
            position = self.log.append(group, index, 1, data)
            self.loop.run_until(lambda wanted=position: self.durable[group] >= wanted)


def test_entries_survive_segments_carrying_forward_rotation_and_restarts() -> None:
    disk = SimDisk()
    keyring = Keyring.create(disk, Path("/"), NODE_KEY)
    busy = [b"busy payload %d" % number for number in range(40)]
    life = Life(disk, keyring, {})
    life.put(2, 1, [b"quiet payload"])
    life.put(1, 1, busy[:20])
    keyring.rotate(b"k" * 32)
    life.put(1, 21, busy[20:])
    assert life.log.drop_segments({1: 30, 2: 0}) > 0
    life.log.close()
    content = b"".join(
        bytes(inode.content) for path, inode in disk.names.items() if path.parent == ROOT
    )
    assert b"payload" not in content
    again = Keyring.load(disk, Path("/"), [b"k" * 32])
    held = Life(disk.survivor(), again, {1: 30}).held
    assert [data for data, _, _ in held[1].entries] == busy[30:]
    assert [data for data, _, _ in held[2].entries] == [b"quiet payload"]
