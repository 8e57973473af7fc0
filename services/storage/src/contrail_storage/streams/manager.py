"""Managing streams on a node: create, update, remove, purge, route, and mend half-made ones."""

import asyncio
import secrets
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from typing import Final, TypeVar

import msgspec
import structlog

from contrail_common import errors
from contrail_common.config_rules import (
    check_stream_create,
    check_stream_encryption,
    check_stream_update,
    consumers_problem,
)
from contrail_common.errors import REGISTRY, ApiError
from contrail_common.model import StreamConfig, StreamInfo
from contrail_common.subjects import matches_any
from contrail_link.contract.streams import CreateMode
from contrail_storage.core import commands as cmd
from contrail_storage.core.key_layout import is_volatile
from contrail_storage.core.meta_machine import MetaMachine, StreamEntry
from contrail_storage.core.preconditions import refusal
from contrail_storage.core.results import Done, Refused, Removed, Reserved, Result
from contrail_storage.core.subjects.filters import SubjectFilter
from contrail_storage.reading.reader import Reader
from contrail_storage.replica.proposer import Proposer
from contrail_storage.replica.shard import Shard, check_removal
from contrail_storage.replica.shard_logs import ShardLogs
from contrail_storage.streams.last_ids import LastIds
from contrail_storage.streams.sharded_state import check_purge
from contrail_storage.streams.stream import CheckServing, Stream

_log = structlog.get_logger("contrail.streams")
_ROUTES_MAX: Final = 65_536
_SLICE_MESSAGES: Final = 20_000
_SLICES_MAX: Final = 16
"""Slices that a caller waits for when its change makes messages superfluous."""
_PURGED_SUBJECTS: Final = 256
_EVERYTHING: Final = 1 << 62
_RENEWED_TOGETHER: Final = 256
HASH_KEY_BYTES: Final = 32
_UNMADE: Final = "the stream is in memory, and is re-created once the disk accepts writes"

ResultT = TypeVar("ResultT", bound=Result)


def expect(result: Result, kind: type[ResultT]) -> ResultT:
    """Return ``result`` if it is of ``kind``; raise its ApiError if it is a refusal."""
    if isinstance(result, Refused):
        raise error_of(result)
    assert isinstance(result, kind), f"{result} is not a {kind.__name__}"
    return result


def error_of(refused: Refused) -> ApiError:
    """Return the refusal that ``apply`` answered as the caller's error."""
    if refused.problem is not None:
        return refused.problem.as_error()
    return ApiError(REGISTRY[refused.code], refused.detail, applied=False)


@contextmanager
def begun(has_effect: bool = True) -> Iterator[None]:
    """After a step that had an effect, turn "not applied" refusals into an unknown outcome."""
    try:
        yield
    except ApiError as error:
        if has_effect and error.applied is False:
            raise ApiError(errors.OUTCOME_UNKNOWN, str(error)) from error
        raise


class StreamManager:
    """The streams of this node, over the meta group and the groups of the shards.

    All fields belong to the event loop.
    """

    def __init__(
        self,
        node: str,
        meta: MetaMachine,
        shards: dict[int, Shard],
        meta_log: Proposer,
        shard_log: ShardLogs,
        reader: Reader,
        check_serving: CheckServing,
        *,
        encrypts: bool,
    ) -> None:
        self.node = node
        # Refuses changes while the node accepts none.
        self._check_serving = check_serving
        # Whether the node encrypts stored data; streams on disk with `encrypted` need that.
        self._encrypts = encrypts
        # Names, shards and stages of the streams; changed by `_meta_log` only.
        self._meta = meta
        # By number; shared with the applier, which changes it.
        self._shards = shards
        # Accepts changes of `_meta`.
        self._meta_log = meta_log
        # Accepts the commands of all shards, on disk and in memory.
        self._shard_log = shard_log
        # Finds the messages that purges and deletes need to know.
        self._reader = reader
        self._last_ids = LastIds(reader)
        # Held while a stream is made, changed, removed or mended.
        self._lock = asyncio.Lock()
        # Names that `claim_restore` keeps.
        self._restoring: set[str] = set()
        # Whether streams of earlier processes in memory are made again. After that, a listed stream
        # without a shard is being removed.
        self._renewed = False
        # By name: streams that were asked for. `_bind` replaces those that are out of date.
        self._streams: dict[str, Stream] = {}
        # Cache of `route`: the stream of each subject (None: there is none).
        self._routes: dict[str, Stream | None] = {}
        # Number of the meta machine's change as of which `_routes` is valid.
        self._routes_of = -1

    # Finding -------------------------------------------------------------------------------------

    def stream(self, name: str) -> Stream:
        """Return the listed stream ``name`` (STREAM_NOT_FOUND, NOT_READY).

        The object stays the same until the stream is removed, so others may keep state with it.
        """
        entry = self._meta.streams.get(name)
        stream = self._streams.get(name)
        if stream is None or stream.entry is not entry:
            stream = self._bind(name, entry)
        if stream is None or not stream.exists:
            raise self._absent(name, entry)
        return stream

    def _bind(self, name: str, entry: StreamEntry | None) -> Stream | None:
        """Make the stream of a new or changed ``entry``; None unless it has all its shards.

        Each change of an entry replaces it, so a `Stream` with the current entry is current. One
        whose shards are the same has only other subjects.
        """
        known = self._streams.pop(name, None)
        if entry is None or entry.stage != "listed":
            return None
        shards = [self._shards[number] for number in entry.numbers if number in self._shards]
        if len(shards) < entry.shards or not shards[0].machine.exists:
            return None
        if known is not None and known.shards == shards:
            known.entry = entry
            stream = known
        else:
            append = self._shard_log.appending(shards[0])
            stream = Stream(entry, shards, self.node, self._check_serving, append, self._last_ids)
        self._streams[name] = stream
        return stream

    def _absent(self, name: str, entry: StreamEntry | None) -> ApiError:
        lost = (
            entry is not None
            and entry.stage == "listed"
            and any(number not in self._shards for number in entry.numbers)
        )
        if lost and not self._renewed:
            return ApiError(errors.NOT_READY, _UNMADE, retry_after_s=1, applied=False)
        return ApiError(errors.STREAM_NOT_FOUND, f"there is no stream {name}", applied=False)

    def listed(self) -> list[Stream]:
        """All listed streams, except those whose removal has begun."""
        streams: list[Stream] = []
        for name, entry in self._meta.streams.items():
            stream = self._streams.get(name)
            if stream is None or stream.entry is not entry:
                stream = self._bind(name, entry)
            if stream is not None and stream.exists:
                streams.append(stream)
        return streams

    def entry(self, name: str) -> StreamEntry:
        """Return the meta entry of the listed stream ``name`` (STREAM_NOT_FOUND)."""
        return self.stream(name).entry

    def shard(self, name: str, number: int | None = None) -> Shard:
        """Return a shard of the listed stream ``name``, as `Stream.shard`."""
        return self.stream(name).shard(number)

    def parts(self, name: str) -> list[Shard]:
        """All shards of the listed stream ``name`` in order."""
        return self.stream(name).shards

    def shards(self) -> list[Shard]:
        """Return the shards of all listed streams."""
        return [shard for stream in self.listed() for shard in stream.shards]

    def shard_numbers(self) -> list[int]:
        """Numbers of the shards of all listed streams."""
        return [number for stream in self.listed() for number in stream.entry.numbers]

    def taken_numbers(self) -> set[int]:
        """Shard numbers of all streams, including those half made or not completely removed."""
        return {number for entry in self._meta.streams.values() for number in entry.numbers}

    def names(self) -> list[str]:
        """Names of the listed streams, ascending."""
        return sorted(stream.name for stream in self.listed())

    def route(self, subject: str) -> Stream:
        """Return the listed stream that captures a literal subject (NO_STREAM_FOR_SUBJECT)."""
        if self._routes_of != self._meta.changes or len(self._routes) > _ROUTES_MAX:
            self._routes, self._routes_of = {}, self._meta.changes
        try:
            stream = self._routes[subject]
        except KeyError:
            stream = self._routes[subject] = self._find_route(subject)
        if stream is None:
            raise ApiError(errors.NO_STREAM_FOR_SUBJECT, applied=False)
        if not stream.exists:
            raise self._absent(stream.name, stream.entry)
        return stream

    def _find_route(self, subject: str) -> Stream | None:
        for entry in self._meta.streams.values():
            if entry.stage == "listed" and matches_any(entry.subjects, subject):
                return self.stream(entry.name)
        return None

    # Changing ------------------------------------------------------------------------------------

    async def put(
        self, config: StreamConfig, mode: CreateMode, if_match: int | None, if_none: bool
    ) -> tuple[StreamInfo, bool]:
        """Create or update; see ``StorageLink.put_stream``."""
        check_stream_encryption(config, encrypts=self._encrypts)
        given = cmd.Precondition(create=mode == "create", version=if_match, absent=if_none)
        async with self._lock:
            if config.name in self._restoring:
                raise ApiError(errors.STREAM_EXISTS, "the stream is being restored", applied=False)
            entry = await self._mended(config.name)
            if entry is None or entry.stage != "listed":
                _check(given, None, same=False)
                check_stream_create(config)
                return await self._create(config), True
            shard = self._shards[entry.shard]
            record = shard.machine.record
            assert record is not None
            _check(given, record.version, same=record.config == config)
            if record.config != config:
                # The shard decides when it applies the change. The check is repeated here, before
                # the subjects are claimed.
                check_stream_update(record.config, config)
                consumers = [one.config for one in shard.machine.consumers.values()]
                problem = consumers_problem(config, consumers)
                if problem is not None:
                    raise problem.as_error()
                await self._update(shard, entry, config, given)
            else:
                # A crash may have separated an earlier change from the removals that it causes.
                await self._keep_to(entry)
            return self.stream(config.name).info(), False

    async def _create(self, config: StreamConfig) -> StreamInfo:
        incarnation = secrets.token_hex(8)
        number = await self._reserve(config, incarnation)
        await self._configure(number, config, incarnation)
        with begun():
            await self._align(self._meta.streams[config.name])
            await self._list(config, config.subjects, incarnation)
        return self.stream(config.name).info()

    async def _align(self, entry: StreamEntry) -> None:
        """Give the configuration of the first shard, which decides, to shards that lack it."""
        record = self._shards[entry.shard].machine.record
        assert record is not None
        behind = [number for number in entry.numbers[1:] if not self._is_aligned(entry, number)]

        async def configure(number: int) -> None:
            command = cmd.ConfigureStream(
                record.config,
                record.incarnation,
                record.hash_key,
                number - entry.shard,
                record.version,
            )
            expect(await self._shard_log.command(number, command), Done)

        await asyncio.gather(*map(configure, behind))

    def _is_aligned(self, entry: StreamEntry, number: int) -> bool:
        """Whether a shard has the first shard's configuration, as of the same change."""
        first, shard = self._shards.get(entry.shard), self._shards.get(number)
        if first is None or shard is None or first.machine.record is None:
            return False
        record = shard.machine.record
        return record is not None and (
            record.version == first.machine.record.version
            and record.config == first.machine.record.config
        )

    async def _configure(self, number: int, config: StreamConfig, incarnation: str) -> None:
        """Create the stream of a shard that has none."""
        hash_key = secrets.token_bytes(HASH_KEY_BYTES)
        given = cmd.Precondition(create=True)
        configure = cmd.ConfigureStream(config, incarnation, hash_key, given=given)
        expect(await self._shard_log.command(number, configure), Done)

    async def _reserve(self, config: StreamConfig, incarnation: str) -> int:
        volatile = config.storage == "memory"
        reserve = cmd.ReserveStream(
            config.name, config.subjects, incarnation, config.shards, volatile
        )
        return expect(await self._meta_log.command(cmd.META_SHARD, reserve), Reserved).shard

    async def _update(
        self, shard: Shard, entry: StreamEntry, config: StreamConfig, given: cmd.Precondition
    ) -> None:
        # Subjects are claimed in meta before the shard uses them, and released after that.
        record = shard.machine.record
        assert record is not None
        if set(config.subjects) != set(entry.subjects):
            both = tuple(dict.fromkeys(entry.subjects + config.subjects))
            await self._list(record.config, both, record.incarnation)
        given = msgspec.structs.replace(given, update=True)
        configure = cmd.ConfigureStream(config, record.incarnation, record.hash_key, given=given)
        result = await self._shard_log.command(entry.shard, configure)
        if isinstance(result, Refused):
            with suppress(ApiError):  # if it fails, the next change or start releases the subjects
                await self._mended(config.name)
            raise error_of(result)
        with begun():
            await self._align(entry)
            if shard.volatile or set(config.subjects) != set(entry.subjects):
                await self._list(config, config.subjects, record.incarnation)
            await self._keep_to(entry)

    async def _keep_to(self, entry: StreamEntry) -> None:
        """Remove the messages that a stream's configuration no longer allows."""
        for number in entry.numbers:
            shard = self._shards[number]
            if shard.machine.over_limits:
                await self._enforce_limits(shard)
            await self.keep_interest(shard)

    async def keep_interest(self, shard: Shard) -> None:
        """Remove messages that no consumer needs any more: up to 16 slices of them.

        The housekeeper continues with what is left, and with what was interrupted.
        """
        for _ in range(_SLICES_MAX):
            if not (shard.machine.exists and shard.machine.pending_recheck):
                return
            await self._keep_slice(shard)

    async def settle_last(self, shard: Shard) -> None:
        """Find the last messages of the subjects whose last message was removed."""
        while shard.machine.subjects.unsettled:
            await self._keep_slice(shard)

    async def _keep_slice(self, shard: Shard) -> None:
        command = cmd.KeepInterest(_SLICE_MESSAGES)
        expect(await self._shard_log.command(shard.machine.shard, command), Removed)

    async def _enforce_limits(self, shard: Shard) -> None:
        """Apply lowered limits at once: trim in slices until they hold."""
        machine = shard.machine
        while machine.exists:
            command = cmd.EnforceLimits(_SLICE_MESSAGES)
            result = expect(await self._shard_log.command(machine.shard, command), Removed)
            if not result.more:
                return

    async def _list(
        self, config: StreamConfig, subjects: tuple[str, ...], incarnation: str
    ) -> None:
        kept = config if config.storage == "memory" else None
        listing = cmd.ListStream(config.name, subjects, kept, incarnation)
        expect(await self._meta_log.command(cmd.META_SHARD, listing), Done)

    async def delete(self, name: str, if_match: int | None = None) -> None:
        """Remove a stream with all it holds; see ``StorageLink.delete_stream``."""
        async with self._lock:
            entry = self.entry(name)
            record = self._shards[entry.shard].machine.record
            assert record is not None
            # The shard decides, because it knows the version. After this command it has no stream.
            drop = cmd.DropStream(record.incarnation, if_match)
            expect(await self._shard_log.command(entry.shard, drop), Done)
            with begun():
                await self._drop(entry)

    async def _drop(self, entry: StreamEntry) -> None:
        """Finish the removal of a stream, wherever it stopped."""
        unlist = cmd.UnlistStream(entry.name, entry.incarnation)
        expect(await self._meta_log.command(cmd.META_SHARD, unlist), Done)
        for number in entry.numbers:
            await self._shard_log.command(number, cmd.DropStream())
        release = cmd.ReleaseStream(entry.name, entry.incarnation)
        expect(await self._meta_log.command(cmd.META_SHARD, release), Done)
        self._streams.pop(entry.name, None)  # nobody may ask for it again

    async def mend_all(self) -> None:
        """Finish or undo changes that a crash interrupted."""
        async with self._lock:
            await self._renew_lost()
            for entry in list(self._meta.streams.values()):
                if not self._is_whole(entry) and entry.name not in self._restoring:
                    await self._mend_if_sound(entry)

    async def _mend_if_sound(self, entry: StreamEntry) -> None:
        """Mend a stream; a damaged one stays as it is and does not prevent others from serving."""
        try:
            await self._mend(entry)
        except ApiError as error:
            if error.spec not in (errors.DATA_LOST, errors.OUTCOME_UNKNOWN):
                raise
            _log.critical("stream_not_repaired", stream=entry.name, reason=str(error))

    async def _mended(self, name: str) -> StreamEntry | None:
        """Return the meta entry of ``name`` after mending its stream; None if there is none."""
        entry = self._meta.streams.get(name)
        if entry is not None and not self._is_whole(entry):
            await self._mend(entry)
            entry = self._meta.streams.get(name)
        return entry

    def _is_whole(self, entry: StreamEntry) -> bool:
        """Whether the stream is listed under exactly the subjects that all its shards capture."""
        first = self._shards.get(entry.shard)
        if entry.stage != "listed" or first is None or not first.machine.exists:
            return False
        if not all(self._is_aligned(entry, number) for number in entry.numbers[1:]):
            return False
        config = first.machine.config
        return set(entry.subjects) == set(config.subjects) and entry.config in (None, config)

    async def _renew_lost(self) -> None:
        """Create the streams in memory of an earlier process again, empty."""
        lost = [
            entry
            for entry in self._meta.streams.values()
            if entry.stage == "listed" and is_volatile(entry.shard)
            if entry.shard not in self._shards
        ]
        for start in range(0, len(lost), _RENEWED_TOGETHER):
            await asyncio.gather(*map(self._renew, lost[start : start + _RENEWED_TOGETHER]))
        self._renewed = True

    async def _renew(self, entry: StreamEntry) -> None:
        assert entry.config is not None
        incarnation = secrets.token_hex(8)
        renew = cmd.RenewStream(entry.name, incarnation, entry.incarnation)
        number = expect(await self._meta_log.command(cmd.META_SHARD, renew), Reserved).shard
        await self._configure(number, entry.config, incarnation)
        await self._align(self._meta.streams[entry.name])

    async def _mend(self, entry: StreamEntry) -> None:
        shard = self._shards.get(entry.shard)
        if entry.stage != "unlisted" and shard is not None and shard.machine.exists:
            await self._align(entry)
            config = shard.machine.config
            await self._list(config, config.subjects, entry.incarnation)
            for number in entry.numbers:
                await self._enforce_limits(self._shards[number])
        else:
            await self._drop(entry)

    # Restoring -----------------------------------------------------------------------------------

    async def claim_restore(self, name: str) -> None:
        """Reserve ``name`` for a restore, until :meth:`end_restore`; STREAM_RESTORE_EXISTS."""
        async with self._lock:
            if name in self._restoring or await self._mended(name) is not None:
                raise ApiError(errors.STREAM_RESTORE_EXISTS, applied=False)
            self._restoring.add(name)

    async def begin_restore(self, config: StreamConfig, incarnation: str) -> int:
        """Reserve the name and subjects of a stream; return its first shard (SUBJECT_OVERLAP)."""
        check_stream_encryption(config, encrypts=self._encrypts)
        return await self._reserve(config, incarnation)

    async def restore_part(self, number: int, part: cmd.RestorePart) -> None:
        """Put a part into a reserved shard."""
        expect(await self._shard_log.command(number, part), Done)

    async def finish_restore(self, number: int, finishes: list[cmd.FinishRestore]) -> StreamInfo:
        """Create the stream of shards that have all parts; ``number`` is the first shard."""
        config = finishes[0].header.config
        # The first shard decides and comes last: until then, a crash undoes the others.
        for part in reversed(range(len(finishes))):
            command = self._shard_log.command(number + part, finishes[part])
            expect(await command, Done)
        with begun():
            await self._align(self._meta.streams[config.name])
            incarnation = self._meta.streams[config.name].incarnation
            await self._list(config, config.subjects, incarnation)
        return self.stream(config.name).info()

    async def end_restore(self, name: str) -> None:
        """End a restore: finish or undo what is half done."""
        async with self._lock:
            self._restoring.discard(name)
            await self._mended(name)

    # Messages ------------------------------------------------------------------------------------

    async def purge(
        self,
        shards: list[Shard],
        subject: str,
        up_to_seq: int,
        keep: int,
        *,
        shredded: bool = False,
    ) -> int:
        """Remove messages below a sequence, all but the newest, or all; in slices.

        The stream of ``shards`` may be gone (STREAM_NOT_FOUND), and its name used by another one.
        ``shredded``: the messages cannot be decrypted any more, so no rule keeps them.
        """
        if not all(shard.machine.exists for shard in shards):
            raise ApiError(errors.STREAM_NOT_FOUND, applied=False)
        if len(shards) > 1:
            shards = check_purge(shards, subject, up_to_seq, keep)
        removed = 0
        for shard in shards:
            with begun(removed > 0):
                removed += await self._purge(shard, subject, up_to_seq, keep, shredded=shredded)
        return removed

    async def _purge(
        self, shard: Shard, subject: str, up_to_seq: int, keep: int, *, shredded: bool
    ) -> int:
        async with shard.removal:
            to_seq = up_to_seq or _EVERYTHING
            if shredded or subject not in ("", ">"):
                subjects = SubjectFilter((subject or ">",))
                purge = cmd.PurgeSubjects([], to_seq, _SLICE_MESSAGES, keep, shredded)
                return await self._purge_subjects(shard, subjects, purge)
            trim = cmd.Trim(to_seq, _SLICE_MESSAGES, keep)
            return await self._in_slices(shard, trim)

    async def _in_slices(self, shard: Shard, command: cmd.StreamCommand, removed: int = 0) -> int:
        """Propose a command until nothing is left; return ``removed`` plus what it removed."""
        while True:
            with begun(removed > 0):
                done = await self._shard_log.command(shard.machine.shard, command)
                result = expect(done, Removed)
            removed += result.count
            if not result.more:
                return removed

    async def _purge_subjects(
        self, shard: Shard, subjects: SubjectFilter, purge: cmd.PurgeSubjects
    ) -> int:
        """Purge matching messages, some subjects at a time."""
        names = [name for _, name in subjects.subjects(shard.machine.subjects)]
        if purge.keep and len(names) > _PURGED_SUBJECTS:
            # No single command knows all these subjects, so the newest as of now are kept.
            to_seq = await self._reader.newest_from(shard, subjects, purge.keep)
            purge = msgspec.structs.replace(purge, to_seq=to_seq, keep=0)
        removed = 0
        for start in range(0, max(len(names), 1), _PURGED_SUBJECTS):
            some = names[start : start + _PURGED_SUBJECTS]
            command = msgspec.structs.replace(purge, subjects=some)
            removed = await self._in_slices(shard, command, removed)
        shard.notify()  # a consumer whose pending messages were removed has room
        return removed

    async def delete_message(self, shard: Shard, seq: int) -> None:
        """Remove one message (SEQUENCE_NOT_FOUND, DELETE_DENIED, STREAM_SEALED)."""
        check_removal(shard)
        async with shard.removal:
            if not shard.machine.is_live(seq) or seq > shard.applied_seq:
                raise ApiError(
                    errors.SEQUENCE_NOT_FOUND, f"sequence {seq} not found", applied=False
                )
            previous_seq = await self._reader.previous_of_subject(shard, seq)
            command = cmd.DeleteMessage(seq, previous_seq)
            expect(await self._shard_log.command(shard.machine.shard, command), Removed)
        # If the message was pending at a consumer, the consumer has room for another delivery.
        shard.notify()


def _check(given: cmd.Precondition, version: int | None, *, same: bool) -> None:
    """Refuse early what the shard would refuse now, so that no subjects are claimed for it."""
    refused = refusal(given, version, errors.STREAM_EXISTS, errors.STREAM_NOT_FOUND, same=same)
    if refused is not None:
        raise error_of(refused)
