"""What this code writes to disk and sends to other processes: a sample of every kind."""

import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any, Final, NamedTuple, get_args

import msgspec

from contrail_common.columns.blocks import decode_block, encode_block
from contrail_common.model import TTL_NEVER, StreamConfig
from contrail_link.tcp import frames as link_frames
from contrail_link.tcp import handshake as link_handshake
from contrail_link.tcp import methods
from contrail_replicator import messages as raft
from contrail_replicator.peers import codec, forming, frames, handshake
from contrail_replicator.peers.formation import Membership, Report, Stage
from contrail_storage.core import commands as cmd
from contrail_storage.core import key_layout as keys
from contrail_storage.core.archive.format import BLOCK, HEADER, ArchiveReader, ArchiveWriter, Record
from contrail_storage.core.entry_codec import decode_entry, encode_entry
from contrail_storage.core.stream.stream_machine import StreamMachine
from contrail_storage.disk import node_file
from contrail_storage.disk.files import Files
from contrail_storage.replica.log_time import ClockRecord
from contrail_storage.state import messages as state
from contrail_storage.state.rows import Unpacking, packed
from contrail_storage.store.checkpoint import CheckpointRecord
from contrail_storage.wal import codec as wal
from tests.formats.fill import filled
from tests.unit.storage.machine_rig import (
    SHARD,
    Message,
    Rig,
    RowStore,
    Shelf,
    append_of,
    configure,
    consumer_config,
    picture,
)
from tests.unit.storage.test_meta_machine import Kept

NOW_NS: Final = 1_800_000_000 * 10**9
_SALT: Final = b"salt of8"


class Format(NamedTuple):
    """One format: the bytes that this code writes, by the name of the sample, and how they read."""

    written: Callable[[], dict[str, bytes]]
    read: Callable[[str, bytes], Any]


# What is stored -----------------------------------------------------------------------------------


def _entries() -> dict[str, bytes]:
    found = {
        kind.__name__: encode_entry(cmd.Entry(NOW_NS, [(7, filled(kind))]))
        for kind in get_args(cmd.Command)
    }
    two = [(1, cmd.Trim(10, 20)), (2, cmd.ExpireAge(30))]
    return found | {"two commands after jumps of the time": encode_entry(cmd.Entry(1, two, -2))}


def _read_entry(name: str, data: bytes) -> Any:
    del name
    entry = decode_entry(data)
    return entry.time_ns, entry.skipped_ns, entry.commands


def _log() -> dict[str, bytes]:
    entry = wal.record_header(wal.RecordKind.ENTRY, 3, 5, 2, 4) + b"data"
    marks = [
        wal.mark_record(kind, 3, 4, 1)
        for kind in (wal.RecordKind.TRUNCATE, wal.RecordKind.BASE, wal.RecordKind.END)
    ]
    first = [entry, wal.hard_state_record(3, 2, "n1", raft.SUSPECT)]
    second = [*marks, wal.hard_state_record(4, 1, None)]
    segment = b"".join(
        part
        for number, records in ((1, first), (2, second))
        for part in (wal.batch_header(_SALT, number, *records), *records)
    )
    return {"segment": segment}


def _read_log(name: str, data: bytes) -> Any:
    del name
    found, at = [], 0
    while at < len(data):
        batch = wal.read_batch(memoryview(data), at, _SALT)
        assert batch is not None
        at = batch.end
        records = [
            (one.kind.name, one.group, one.index, one.term, one.data)
            for one in wal.records(batch.body)
        ]
        found.append((batch.number, batch.sealed, records))
    return found


def _history() -> Rig:
    """A stream in whose state there is something of everything."""
    rig = Rig()
    config = StreamConfig(
        name="S", subjects=("s.>",), max_msgs=9, allow_msg_ttl=True, duplicate_window_ns=10**9
    )
    rig.apply(1_000, configure(config))
    some = [
        Message("s.a", b"one", {"Name": ["value", "other"]}, msg_id="first"),
        Message("s.b", b"two", msg_id="second"),
        Message("s.a", b"three", ttl_ns=TTL_NEVER),
        Message("s.c", b"four", ttl_ns=5_000),
    ]
    rig.apply(2_000, append_of(some))
    rig.apply(3_000, append_of([Message("s.d", b"x" * 300)] * 6))
    rig.apply(4_000, cmd.DeleteMessage(6), cmd.EnforceLimits(9))
    rig.apply(5_000, cmd.PutConsumer(consumer_config("red", max_deliver=2), 2))
    number = next(iter(rig.machine.consumers))
    rig.apply(6_000, cmd.Deliver(number, 1, [2, 3, 4, 5, 7], 9_000))
    settled = cmd.Acknowledge(number, 1, [2, 4], [("nak", 5, 100), ("term", 7, 0)], {7: "no"})
    rig.apply(7_000, settled, cmd.Exhaust(number, 1, [3]))
    return rig


def _meta() -> Kept:
    kept = Kept()
    kept.make("A", "a.>")
    kept.apply(cmd.ReserveStream("B", ("b", "c"), "i", 3))
    for number, name in enumerate(("n1", "n2", "n3"), 1):
        kept.apply(cmd.NoteStart(name, number, 1, 7, 8))
    kept.apply(cmd.RegisterNode("n2", 2, b"token of 16 byte", 2))
    kept.apply(cmd.CreateGroup(5, ("n1", "n2", "n3")))
    kept.apply(cmd.RecordErasure("e", "A", (1,), 2, ["n1"], 3, indexes={5: 9}))
    kept.apply(cmd.FinishErasures(["e"], "n1", 4))
    return kept


def _states() -> dict[str, bytes]:
    rows = {"stream": _history().store.rows, "meta": _meta().store.rows}
    return {name: b"".join(packed(sorted(found.items()))) for name, found in rows.items()}


def _read_state(name: str, data: bytes) -> Any:
    unpacking, store = Unpacking(keys.META_GROUP if name == "meta" else 5), RowStore()
    end = len(data) - len(next(iter(packed([]))))
    store.write(unpacking.operations_of(data[:end]))
    assert unpacking.operations_of(data[end:]) == []
    assert unpacking.complete
    if name == "meta":
        kept = Kept()
        kept.store = store
        kept.restart()
        meta = kept.meta
        meta.group_table.load(store.scan(keys.shard_key(keys.MEMBERS, cmd.META_SHARD)))
        meta.node_table.load(store.scan(keys.shard_key(keys.NODE, cmd.META_SHARD)))
        meta.erasures.load(store.scan(keys.shard_key(keys.ERASURE, cmd.META_SHARD)))
        tables = meta.streams, meta.group_table.groups, meta.node_table.nodes
        return meta.next_shard_id, tables, meta.erasures.receipts
    return _known(StreamMachine.load(SHARD, Shelf(), store.scan))


def _known(machine: StreamMachine) -> dict[str, Any]:
    """What a machine knows, with structs in the place of their texts."""
    shown = picture(machine, ("first", "second"))
    names = "next subject", "subjects", "deleted", "exempt", "ids", "consumer ids"
    consumers = {
        number: (
            *(each.config, each.created_ns, each.version, each.epoch, each.next_seq),
            *(each.delivered, each.floor, dict(each.pending.items())),
            *(sorted(each.acked_ahead), list(each.given_up)),
        )
        for number, each in machine.consumers.items()
    }
    known = {name: shown[name] for name in names} | {"consumers": consumers}
    return known | {"record": machine.record, "counters": machine.counters}


def _blocks() -> dict[str, bytes]:
    rig = _history()
    found = {f"of {block.base_seq}": encode_block(block, 7) for block in rig.shelf.blocks}
    same = [Message("s.a", b"%d" % at, {"Same": ["v"]}) for at in range(40)]
    rig.apply(8_000, append_of(same))
    return found | {"uniform headers": encode_block(rig.shelf.blocks[-1], 8)}


def _read_block(name: str, data: bytes) -> Any:
    del name
    block = decode_block(data)
    columns = block.columns
    contents = [columns.content(at) for at in range(columns.count)]
    return block.base_seq, block.times_ns.tolist(), block.subject_ids.tolist(), contents


def _files() -> dict[str, bytes]:
    """Files of a node that are replaced as a whole."""
    alone = node_file.NodeIdentity("n1", 1, cluster_id=b"c" * 16)
    member = node_file.NodeIdentity(
        *("n2", 3, True, b"d" * 16, 2, 9, node_file.Stage.PREPARED, False, ("n1", "n2", "n3"))
    )
    found = {}
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder)
        for name, identity in (("identity alone", alone), ("identity of a member", member)):
            node_file.save_identity(Files(), path, identity)
            found[name] = (path / node_file.IDENTITY_NAME).read_bytes()
        for name, payload in (
            ("checkpoint", msgspec.msgpack.encode(filled(CheckpointRecord))),
            ("clock", msgspec.msgpack.encode(filled(ClockRecord))),
        ):
            node_file.write_node_file(Files(), path / "file", payload)
            found[name] = (path / "file").read_bytes()
    return found


def _read_file(name: str, data: bytes) -> Any:
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / node_file.IDENTITY_NAME
        path.write_bytes(data)
        if name.startswith("identity"):
            return node_file.load_identity(Files(), path.parent)
        kind = {"checkpoint": CheckpointRecord, "clock": ClockRecord}[name]
        return msgspec.msgpack.decode(node_file.read_node_file(Files(), path), type=kind)


def _archives() -> dict[str, bytes]:
    writer = ArchiveWriter()
    parts = [
        writer.start(),
        writer.record(Record(HEADER, b"one")),
        writer.record(Record(BLOCK, b"two")),
    ]
    return {"two records": b"".join([*parts, writer.end()])}


def _read_archive(name: str, data: bytes) -> Any:
    del name
    reader = ArchiveReader()
    found = reader.feed(data)
    reader.finish()
    return found


# What is sent -------------------------------------------------------------------------------------


def _peers() -> dict[str, bytes]:
    found = {}
    for kind in get_args(raft.Message):
        if kind not in (raft.Heartbeat, raft.HeartbeatReply):
            message = (
                raft.DigestAnswer(1, 2, bytes(range(16)))
                if (kind is raft.DigestAnswer)
                else filled(kind)
            )
            [(_, number, body)] = codec.encode(message)
            found[kind.__name__] = b"".join(frames.frame(number, 7, body))
    beats = codec.encode_heartbeats(NOW_NS, [(3, filled(raft.Heartbeat))])
    replies = codec.encode_heartbeat_replies(NOW_NS, [(3, filled(raft.HeartbeatReply))])
    report = Report(Membership(Stage.PREPARED, b"c" * 16), ("n1", "n2", "n3"))
    found["Heartbeat"] = b"".join(frames.frame(codec.HEARTBEATS, 0, beats))
    found["HeartbeatReply"] = b"".join(frames.frame(codec.HEARTBEAT_REPLIES, 0, replies))
    found["Report"] = b"".join(frames.frame(forming.FORMATION, 0, [forming.encode_report(report)]))
    return found


def _read_frame(name: str, data: bytes) -> Any:
    [frame] = frames.FrameCutter(1 << 20).feed(data)
    if name == "Heartbeat":
        message: Any = codec.wall_ns_of(frame.body), list(codec.decode_heartbeats(frame.body))
    elif name == "HeartbeatReply":
        replies = list(codec.decode_heartbeat_replies(frame.body))
        message = codec.wall_ns_of(frame.body), replies
    elif name == "Report":
        report = forming.decode_report(frame.body)
        message = report.membership.stage, report.membership.cluster_id, report.names
    else:
        message = codec.decode(frame.kind, frame.body)
    return frame.kind, frame.group, message


_STATE: Final = (*get_args(state.Request), state.Opened)


def _read_between(name: str, data: bytes) -> Any:
    if name == "Opened":
        return msgspec.msgpack.decode(data, type=state.Opened)
    return state.decoder.decode(data)


def _handshakes() -> dict[str, bytes]:
    hello = handshake.Hello("n1", "n2", frames.Channel.BULK, b"c" * 16, 3, 4, 5, 6, 7)
    listener = handshake.ListenerHandshake([b"k" * 32], b"l" * 32, handshake.PLAIN, lambda _: hello)
    dialler = handshake.DiallerHandshake([b"k" * 32], b"d" * 32, handshake.PLAIN, hello)
    answer = dialler.feed(listener.first)
    server = link_handshake.ServerHandshake([b"k" * 32], b"s" * 32)
    client = link_handshake.ClientHandshake(b"k" * 32, b"c" * 32)
    proof = client.feed(server.hello)
    return {
        "listener's first": listener.first,
        "dialler": answer,
        "listener's welcome": listener.feed(answer),
        "refusal": handshake.refusal("it is not welcome"),
        "hello": hello.encoded(),
        "server of the link": server.hello,
        "client of the link": proof,
        "server's proof": server.feed(proof),
    }


def _read_handshake(name: str, data: bytes) -> Any:
    """A proof is right if it is the same again; only the hello has a meaning of its own."""
    if name != "hello":
        assert _handshakes()[name] == data
        return None
    hello = handshake.decode_hello(data)
    return {field: getattr(hello, field) for field in hello.__slots__}


def _link() -> dict[str, bytes]:
    found = {}
    for method in methods.METHODS.values():
        for of, decoder in (("arguments", method.arguments), ("result", method.result)):
            body = methods.encode(filled(decoder.type))
            kind = link_frames.REQUEST if of == "arguments" else link_frames.RESULT
            head = link_frames.frame_head(kind, method.number, 5, 6, len(body))
            found[f"{method.name} {of}"] = head + body
    return found


def _read_link(name: str, data: bytes) -> Any:
    del name
    [frame] = link_frames.FrameReader(1 << 20).feed(data)
    method = methods.METHODS[frame.method]
    decoder = method.arguments if frame.kind == link_frames.REQUEST else method.result
    return frame.request, frame.value, decoder.decode(frame.body)


FORMATS: Final = {
    "entries": Format(_entries, _read_entry),
    "log": Format(_log, _read_log),
    "states": Format(_states, _read_state),
    "blocks": Format(_blocks, _read_block),
    "node_files": Format(_files, _read_file),
    "archives": Format(_archives, _read_archive),
    "peer_frames": Format(_peers, _read_frame),
    "state_messages": Format(
        lambda: {kind.__name__: msgspec.msgpack.encode(filled(kind)) for kind in _STATE},
        _read_between,
    ),
    "handshakes": Format(_handshakes, _read_handshake),
    "link": Format(_link, _read_link),
}
