"""The commits of a lake, and the state that they add up to. Pure.

A commit is a JSON document in a file of its own. Adding a file to the lake, and removing one, takes
effect with the commit, not when the file appears or disappears.
"""

import hashlib
from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Final

import msgspec

from contrail_common.names import name_problem
from contrail_spark.errors import LakeError
from contrail_spark.lake.layout import DataFile, Partition, parse_data_path

FORMAT: Final = 1
CHECKPOINT_EVERY: Final = 64
REMOVED_KEPT_US: Final = 7 * 24 * 3_600 * 1_000_000
"""How long a removed file is kept for readers at most."""


class LakeInfo(msgspec.Struct, frozen=True, kw_only=True):
    """What a lake holds: ``lake.json``, which never changes.

    ``token`` is the number of the subject token, from 1, that partitions the lake besides the day.
    """

    format: int = FORMAT
    stream: str
    incarnation: str
    token: int | None = None
    created_us: int


class Range(msgspec.Struct, frozen=True, order=True):
    """Sequences of a shard, both inclusive."""

    shard: int
    from_seq: int
    to_seq: int


class FileEntry(msgspec.Struct, frozen=True, kw_only=True):
    """A Parquet file of the lake.

    ``path`` is below the lake. ``from_seq`` and ``to_seq`` are the first and the last message in
    the file, and times are microseconds since 1970.
    """

    path: str
    shard: int
    from_seq: int
    to_seq: int
    messages: int
    bytes: int
    sha256: str
    first_time_us: int
    last_time_us: int


class ShardState(msgspec.Struct, frozen=True, kw_only=True):
    """How far a shard is archived, and which sequences before were lost.

    ``lost`` are (first, last), ascending, without overlap.
    """

    archived_through: int = 0
    lost: tuple[tuple[int, int], ...] = ()


class Removed(msgspec.Struct, frozen=True):
    """A file that no longer belongs to the lake, and when it was removed from it."""

    path: str
    time_us: int


class Checkpoint(msgspec.Struct, frozen=True, kw_only=True):
    """The whole state after a commit, so that reading it needs no earlier ones."""

    files: tuple[FileEntry, ...]
    shards: dict[int, ShardState]
    removed: tuple[Removed, ...]


class Commit(msgspec.Struct, frozen=True, kw_only=True):
    """A change of the lake.

    ``covered`` are the sequences that are archived by it. They follow those archived before.
    ``lost`` are those of them that had been removed from the stream. ``removed`` are paths.
    """

    number: int
    job: str
    time_us: int
    covered: tuple[Range, ...] = ()
    lost: tuple[Range, ...] = ()
    added: tuple[FileEntry, ...] = ()
    removed: tuple[str, ...] = ()
    checkpoint: Checkpoint | None = None


@dataclass(frozen=True, slots=True)
class State:
    """What the lake holds after commit ``number``; before the first commit, 0.

    ``files`` are by path. ``removed`` has files that were removed, with the time: readers that
    began earlier may still need them.
    """

    number: int = 0
    files: dict[str, FileEntry] = field(default_factory=dict)
    shards: dict[int, ShardState] = field(default_factory=dict)
    removed: dict[str, int] = field(default_factory=dict)

    def archived_through(self, shard: int) -> int:
        """The last sequence of a shard that is archived or lost; 0 if none is."""
        return self.shards.get(shard, ShardState()).archived_through

    def live_files(self) -> list[FileEntry]:
        """The files in the order of their messages: by shard, then by sequence."""
        return sorted(self.files.values(), key=lambda each: (each.shard, each.from_seq, each.path))


class _Head(msgspec.Struct):
    """The one field of ``lake.json`` that all formats have."""

    format: int


class _Sealed(msgspec.Struct, frozen=True, kw_only=True):
    """A commit as it is in its file; the digest is of the bytes of ``commit``."""

    format: int
    sha256: str
    commit: msgspec.Raw


def encode(commit: Commit) -> bytes:
    """The content of a commit's file."""
    body = msgspec.json.encode(commit)
    sealed = _Sealed(
        format=FORMAT, sha256=hashlib.sha256(body).hexdigest(), commit=msgspec.Raw(body)
    )
    return msgspec.json.encode(sealed) + b"\n"


def decode(content: bytes, number: int, where: str) -> Commit:
    """The commit in a file; LakeError, which names ``where``, if it is damaged or too new."""
    try:
        sealed = msgspec.json.decode(content, type=_Sealed)
        check_format(sealed.format, where)
        body = bytes(sealed.commit)
        if hashlib.sha256(body).hexdigest() != sealed.sha256:
            raise LakeError(f"{where} is damaged: its content does not match its checksum")
        commit = msgspec.json.decode(body, type=Commit)
    except (msgspec.MsgspecError, UnicodeDecodeError) as error:
        raise LakeError(f"{where} is damaged: {error}") from None
    if commit.number != number:
        raise LakeError(f"{where} is damaged: it is commit {commit.number}")
    return commit


def decode_info(content: bytes, where: str) -> LakeInfo:
    """The content of ``lake.json``; LakeError if it is damaged or too new."""
    try:
        check_format(msgspec.json.decode(content, type=_Head).format, where)
        info = msgspec.json.decode(content, type=LakeInfo)
    except (msgspec.MsgspecError, UnicodeDecodeError) as error:
        raise LakeError(f"{where} is damaged: {error}") from None
    if problem := _info_problem(info):
        raise LakeError(f"{where} is damaged: {problem}")
    return info


def _info_problem(info: LakeInfo) -> str | None:
    """Why no job has written this; it has no checksum that would tell."""
    if problem := name_problem(info.stream):
        return f"the stream {info.stream!r}: {problem}"
    if not info.incarnation:
        return "the incarnation of the stream is empty"
    if info.token is not None and info.token < 1:
        return f"token must be at least 1, not {info.token}"
    if info.created_us < 0:
        return f"created_us must not be negative, not {info.created_us}"
    return None


def check_format(found: int, where: str) -> None:
    """Raise LakeError unless this version reads the format."""
    if found != FORMAT:
        raise LakeError(f"{where} has format {found}, but this version reads format {FORMAT} only")


def checkpoint_of(state: State) -> Checkpoint:
    """The state as a commit contains it."""
    return Checkpoint(
        files=tuple(state.live_files()),
        shards=state.shards,
        removed=tuple(Removed(path, time_us) for path, time_us in state.removed.items()),
    )


def restored(commit: Commit, where: str) -> State:
    """The state after a commit that has all of it; LakeError if it has not."""
    whole = commit.checkpoint
    if whole is None:
        raise LakeError(f"{where} is damaged: it has no checkpoint")
    return State(
        commit.number,
        {each.path: each for each in whole.files},
        whole.shards,
        {each.path: each.time_us for each in whole.removed},
    )


def apply(state: State, commit: Commit) -> State:
    """The state after a commit; LakeError if the commit contradicts the state."""
    if commit.number != state.number + 1:
        raise LakeError(f"commit {commit.number} does not follow {state.number}")
    shards = _archived(state, commit)
    files, removed = dict(state.files), dict(state.removed)
    for path in commit.removed:
        if files.pop(path, None) is None:
            raise LakeError(f"commit {commit.number} removes {path}, which is not in the lake")
        removed[path] = commit.time_us
    for entry in commit.added:
        if problem := entry_problem(entry, commit.number):
            raise LakeError(f"commit {commit.number}: {problem}")
        if entry.to_seq > shards.get(entry.shard, ShardState()).archived_through:
            raise LakeError(f"commit {commit.number}: {entry.path} is beyond what is archived")
        if entry.path in files or entry.path in removed:
            raise LakeError(f"commit {commit.number} adds {entry.path} a second time")
        files[entry.path] = entry
    return State(commit.number, files, shards, removed)


def _archived(state: State, commit: Commit) -> dict[int, ShardState]:
    shards = dict(state.shards)
    for each in sorted(commit.covered):
        before = shards.get(each.shard, ShardState())
        if each.from_seq != before.archived_through + 1 or each.to_seq < each.from_seq:
            raise LakeError(
                f"commit {commit.number} covers sequences {each.from_seq}..{each.to_seq} of shard "
                f"{each.shard}, which is archived through {before.archived_through}"
            )
        shards[each.shard] = ShardState(archived_through=each.to_seq, lost=before.lost)
    for each in sorted(commit.lost):
        before = shards.get(each.shard, ShardState())
        if not state.archived_through(each.shard) < each.from_seq <= each.to_seq:
            raise LakeError(f"commit {commit.number} loses sequences that were archived before")
        if each.to_seq > before.archived_through:
            raise LakeError(f"commit {commit.number} loses sequences that it does not cover")
        lost = merged((*before.lost, (each.from_seq, each.to_seq)))
        shards[each.shard] = ShardState(archived_through=before.archived_through, lost=lost)
    return shards


def entry_problem(entry: FileEntry, commit: int) -> str | None:
    """Why a commit cannot add this file; None if it can."""
    found = parse_data_path(entry.path)
    if found is None:
        return f"{entry.path!r} is no path of a data file"
    if found.commit != commit:
        return f"{entry.path} was written for commit {found.commit}"
    named = (found.shard, found.from_seq, found.to_seq)
    if named != (entry.shard, entry.from_seq, entry.to_seq):
        return f"{entry.path} does not name the messages in it"
    if not 1 <= entry.from_seq <= entry.to_seq:
        return f"{entry.path} has no range of sequences"
    if not 1 <= entry.messages <= entry.to_seq - entry.from_seq + 1:
        return f"{entry.path} cannot have {entry.messages} messages"
    return None


def merged(ranges: Iterable[tuple[int, int]]) -> tuple[tuple[int, int], ...]:
    """The same sequences in ascending ranges that neither overlap nor touch."""
    result: list[tuple[int, int]] = []
    for first, last in sorted(ranges):
        if result and first <= result[-1][1] + 1:
            result[-1] = (result[-1][0], max(result[-1][1], last))
        else:
            result.append((first, last))
    return tuple(result)


def partition_of(entry: FileEntry) -> Partition:
    """The folder that a file of the lake is in."""
    found = parse_data_path(entry.path)
    if found is None:
        raise LakeError(f"{entry.path!r} is no path of a data file")
    return found.partition


def is_garbage(found: DataFile, state: State, removed_until_us: int) -> bool:
    """True if a file can never become part of the lake, and readers have had time to leave it.

    Only the commit in its name can add a file. When that commit exists without it, nothing can.
    Files that were removed after ``removed_until_us`` are kept for readers that began before.
    """
    if found.commit > state.number or found.path in state.files:
        return False
    removed_us = state.removed.get(found.path)
    return removed_us is None or removed_us <= removed_until_us
