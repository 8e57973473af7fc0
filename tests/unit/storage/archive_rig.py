"""Archives of machines that live in memory: written, and taken in as a node does it."""

from collections.abc import Iterator, Sequence

import msgspec

from contrail_storage.core import commands as cmd
from contrail_storage.core import key_layout as keys
from contrail_storage.core.archive import format as archive
from contrail_storage.core.archive.check import ArchiveCheck
from contrail_storage.core.archive.format import ArchiveReader, ArchiveWriter, Record
from contrail_storage.core.commands import ArchiveHeader
from contrail_storage.core.results import Done
from contrail_storage.core.stream.archive_records import block_record, state_records
from tests.unit.storage.machine_rig import SHARD, Rig, picture


def records_of(rig: Rig, *, consumers: bool = True) -> list[Record]:
    """All records but the last."""
    deadlines = rig.store.scan(keys.shard_key(keys.DEADLINE, SHARD))
    records = list(
        state_records(rig.machine, deadlines, consumers=consumers, skipped_ns=rig.skipped_ns)
    )
    blocks = [block_record(rig.machine, block) for block in rig.shelf.blocks]
    return records + [one for one in blocks if one is not None]


def packed(records: Sequence[Record]) -> bytes:
    """The archive of some records, whole."""
    writer = ArchiveWriter()
    return b"".join([writer.start(), *map(writer.record, records), writer.end()])


def checked(data: bytes, piece_bytes: int = 1 << 16) -> tuple[ArchiveHeader, list[Record]]:
    """What a node would restore of an archive that comes in pieces; ArchiveError and ApiError."""
    reader, check = ArchiveReader(), ArchiveCheck()
    records: list[Record] = []
    for start in range(0, len(data), piece_bytes):
        for record in reader.feed(data[start : start + piece_bytes]):
            check.take(record)
            records.append(record)
    reader.finish()
    check.finish()
    return check.header, records


def restored(
    data: bytes, *, in_a_part: int = 3, restarts: bool = False, skipped_ns: int = 0
) -> Rig:
    """A machine made of an archive; with ``restarts`` it is loaded anew after each part.

    ``skipped_ns`` is the sum of the jumps of its log time.
    """
    header, records = checked(data)
    rig = Rig(skipped_ns=skipped_ns)
    rest = [record for record in records if record.kind != archive.HEADER]
    for start in range(0, len(rest), in_a_part):
        part: list[tuple[int, bytes]] = [tuple(one) for one in rest[start : start + in_a_part]]
        assert rig.apply(1, cmd.RestorePart(part, "none")) == [Done()]
        if restarts:
            rig.restart()
    fresh = msgspec.structs.replace(header, incarnation="new")
    assert rig.apply(1, cmd.FinishRestore(fresh)) == [Done()]
    if restarts:
        rig.restart()
    return rig


def comparable(rig: Rig, ids: Sequence[str] = ()) -> dict[str, object]:
    """Everything of a machine but what a restored one has of its own: identity and versions."""
    assert rig.machine.record is not None
    known = dict(picture(rig.machine, ids))
    record = msgspec.structs.replace(rig.machine.record, incarnation="", version=0)
    known["record"] = repr(record)
    consumers = known["consumers"]
    assert isinstance(consumers, dict)
    known["consumers"] = {number: {**each, "version": 0} for number, each in consumers.items()}
    return known


def messages_of(rig: Rig) -> Iterator[tuple[int, str, int, object, bytes]]:
    """Sequence, subject, time, headers and payload of every live message."""
    for block in rig.shelf.blocks:
        for at in range(block.count):
            if rig.machine.is_live(block.base_seq + at):
                subject = rig.machine.subjects.name(int(block.subject_ids[at]))
                message = block.message(at, subject)
                yield message.seq, subject, message.time_ns, message.headers, message.payload
