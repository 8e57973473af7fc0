"""The streams of a node: find, create, update and remove them, and reconcile half-made ones."""

import asyncio
import secrets
from bisect import bisect_left, bisect_right
from collections.abc import AsyncGenerator, Iterator
from contextlib import suppress
from typing import Final

import msgspec
import structlog

from contrail_common import errors
from contrail_common.config_rules import (
    check_stream_create,
    check_stream_encryption,
    check_stream_update,
    consumers_problem,
)
from contrail_common.errors import ApiError, FieldProblem
from contrail_common.model import StreamConfig, StreamInfo
from contrail_link.contract.streams import CreateMode
from contrail_storage.core import commands as cmd
from contrail_storage.core.key_layout import META_GROUP, is_in_memory
from contrail_storage.core.meta_machine import MetaMachine, StreamEntry
from contrail_storage.core.results import Done, Refused, Reserved
from contrail_storage.reading.reader import Reader
from contrail_storage.replica.meta_log import MetaLog
from contrail_storage.replica.raft_port import no_leader
from contrail_storage.replica.shard import Shard
from contrail_storage.replica.shard_logs import ShardLogs
from contrail_storage.streams.expectations import Expectations
from contrail_storage.streams.last_ids import LastIds
from contrail_storage.streams.outcomes import begun, error_of, expect
from contrail_storage.streams.placement import choose_group, choose_groups
from contrail_storage.streams.removals import Removals
from contrail_storage.streams.stream import CheckServing, Stream

_log = structlog.get_logger("contrail.streams")
_ROUTES_MAX: Final = 65_536
_LISTED_TOGETHER: Final = 64
_RENEWED_TOGETHER: Final = 256
_RECONCILED_TOGETHER: Final = 1_000
HASH_KEY_BYTES: Final = 32
_UNMADE: Final = "the stream is in memory, and is re-created once the disk accepts writes"


class StreamManager:
    """The streams of this node, over the meta group and the groups of the shards.

    All fields belong to the event loop.
    """

    def __init__(
        self,
        node: str,
        meta: MetaMachine,
        shards: dict[int, Shard],
        meta_log: MetaLog,
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
        # By id; shared with the applier, which changes it.
        self._shards = shards
        # Accepts changes of `_meta`.
        self._meta_log = meta_log
        # Accepts the commands of all shards, on disk and in memory.
        self._shard_log = shard_log
        # Tells which streams this node leads. It changes only these.
        self._groups = shard_log.groups
        self.removals = Removals(shard_log, reader)
        """Removes messages of any shard."""
        # Names the actual last message id where a publish expected another one.
        self._last_ids = LastIds(reader)
        # Finds the last messages of wildcards that publishes expect something of.
        self._expectations = Expectations(shard_log, reader)
        # Held while a stream is made, changed, removed or reconciled.
        self._lock = asyncio.Lock()
        # Names that `claim_restore` keeps.
        self._restoring: set[str] = set()
        # Whether streams of earlier processes in memory are made again. After that, a listed stream
        # without a shard is being removed.
        self._renewed = False
        # By name: streams that were asked for. `_bind` replaces those that are out of date.
        self._streams: dict[str, Stream] = {}
        # Cache of `route`: the entry that captured a subject. It may be out of date. No subject is
        # kept that no stream captured, because any stream may capture it later.
        self._routes: dict[str, StreamEntry] = {}

    # Finding -------------------------------------------------------------------------------------

    def stream(self, name: str) -> Stream:
        """Return the listed stream ``name`` (STREAM_NOT_FOUND, NOT_READY, NOT_LEADER).

        The object stays the same until the stream is removed, so others may keep state with it.
        """
        stream = self.find(name)
        if stream is None:
            raise self._absent(name, self._meta.streams.get(name))
        return stream

    def find(self, name: str) -> Stream | None:
        """Return the listed stream ``name`` as :meth:`stream` does; None if it would raise."""
        return self._current(name, self._meta.streams.get(name))

    def _current(self, name: str, entry: StreamEntry | None) -> Stream | None:
        """The stream of ``entry``, which is what the meta machine has for ``name``, or None."""
        stream = self._streams.get(name)
        if stream is None or stream.entry is not entry:
            stream = self._bind(name, entry)
        return stream if stream is not None and stream.exists else None

    def _bind(self, name: str, entry: StreamEntry | None) -> Stream | None:
        """Make the stream of a new or changed ``entry``; None unless it has all its shards.

        Each change of an entry replaces it, so a `Stream` with the current entry is current. One
        whose shards are the same has only other subjects.
        """
        known = self._streams.pop(name, None)
        if entry is None or entry.stage != "listed":
            return None
        shards = [self._shards[one] for one in entry.shard_ids if one in self._shards]
        if len(shards) < entry.shards or not shards[0].machine.exists:
            return None
        if known is not None and known.shards == shards:
            known.entry = entry
            stream = known
        else:
            stream = Stream(
                entry,
                shards,
                self.node,
                self._shard_log.spread,
                self._check_serving,
                [self._shard_log.appending(shard) for shard in shards],
                self._last_ids,
                self._expectations,
            )
        self._streams[name] = stream
        return stream

    def _absent(
        self, name: str, entry: StreamEntry | None, *, by_subject: bool = False
    ) -> ApiError:
        if entry is not None and entry.stage == "listed":
            # A stream of another node. For its own, a node goes on to what is wrong with them.
            self._check_home(entry)
            self._check_kept(entry)
            lost = any(shard_id not in self._shards for shard_id in entry.shard_ids)
            if lost and not self._renewed:
                return ApiError(errors.NOT_READY, _UNMADE, retry_after_s=1, applied=False)
        # Other nodes may not have heard of the stream yet.
        self._groups.check_led(META_GROUP)
        if by_subject:
            return ApiError(errors.NO_STREAM_FOR_SUBJECT, applied=False)
        return ApiError(errors.STREAM_NOT_FOUND, f"there is no stream {name}", applied=False)

    def listed(self) -> list[Stream]:
        """All listed streams in the order of their names, except those whose removal has begun."""
        return list(self._listed("", ""))

    async def each_listed(self, after: str = "", prefix: str = "") -> AsyncGenerator[Stream, None]:
        """As :meth:`listed`: those after the name ``after`` whose names begin with ``prefix``.

        Other work of the event loop comes between every 64 of them, so streams may come and go.
        """
        for seen, stream in enumerate(self._listed(after, prefix), start=1):
            yield stream
            if seen % _LISTED_TOGETHER == 0:
                await asyncio.sleep(0)

    def _listed(self, after: str, prefix: str) -> Iterator[Stream]:
        names = self._meta.names
        start = max(bisect_right(names, after), bisect_left(names, prefix))
        for name in names[start:]:
            if not name.startswith(prefix):
                return
            stream = self.find(name)
            if stream is not None:
                yield stream

    def shard(self, name: str, number: int | None = None) -> Shard:
        """Return a shard of the listed stream ``name``, as `Stream.shard`."""
        return self.stream(name).shard(number)

    def with_shards(self) -> list[Stream]:
        """The listed streams that have several shards."""
        found = (self.find(one.name) for one in self._meta.streams.values() if one.shards > 1)
        return [stream for stream in found if stream is not None]

    def is_listed(self, number: int) -> bool:
        """Whether a listed stream has a shard with the id ``number``. Needs no search."""
        return self.stream_of(number) is not None

    def stream_of(self, number: int) -> Stream | None:
        """The listed stream that has a shard with the id ``number``, or None. Needs no search."""
        shard = self._shards.get(number)
        record = None if shard is None else shard.machine.record
        if record is None:
            return None
        stream = self.find(record.config.name)
        return stream if stream is not None and number in stream.entry.shard_ids else None

    def serves(self, shard: Shard) -> bool:
        """Whether this node serves the listed stream of a shard: see `Stream.is_led`."""
        stream = self.stream_of(shard.machine.shard_id)
        return stream is not None and stream.is_led

    @property
    def next_shard_id(self) -> int:
        """The lowest shard id that was given to no stream, as far as this node knows."""
        return self._meta.next_shard_id

    def taken_shard_ids(self) -> set[int]:
        """Shard ids of all streams, including those half made or not completely removed."""
        return {shard_id for entry in self._meta.streams.values() for shard_id in entry.shard_ids}

    def route(self, subject: str) -> Stream:
        """Return the listed stream that captures a literal subject (NO_STREAM_FOR_SUBJECT)."""
        entry = self._routes.get(subject)
        # An entry is replaced when it changes, so a known one that is current is right.
        if entry is None or self._meta.streams.get(entry.name) is not entry:
            entry = self._meta.capturing(subject)
            if entry is None:
                raise self._absent("", None, by_subject=True)
            if len(self._routes) >= _ROUTES_MAX:
                self._routes.clear()
            self._routes[subject] = entry
        stream = self._streams.get(entry.name)
        if stream is None or stream.entry is not entry or stream.shards[0].machine.record is None:
            stream = self._current(entry.name, entry)
            if stream is None:  # its removal has begun
                raise self._absent(entry.name, entry, by_subject=True)
        return stream

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
            while (entry := await self._reconciled(config.name)) is None or entry.stage != "listed":
                _check(given, None, same=False)
                check_stream_create(config)
                try:
                    return await self._create(config), True
                except ApiError as error:
                    # Another node had reserved the name. By now this node knows that, too.
                    if error.spec is not errors.STREAM_EXISTS:
                        raise
            shard = self._shards[entry.shard_id]
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
                await self._enforce_config(entry)
            return self.stream(config.name).info(), False

    async def _create(self, config: StreamConfig) -> StreamInfo:
        incarnation = secrets.token_hex(8)
        shard_id = await self._reserve(config, incarnation)
        await self._configure(shard_id, config, incarnation)
        with begun():
            await self._propagate(self._meta.streams[config.name])
            await self._list(config, config.subjects, incarnation)
        return self.stream(config.name).info()

    async def _propagate(self, entry: StreamEntry) -> None:
        """Give the configuration of the first shard, which decides, to shards that lack it."""
        record = self._shards[entry.shard_id].machine.record
        assert record is not None
        behind = [
            shard_id for shard_id in entry.shard_ids[1:] if not self._has_config(entry, shard_id)
        ]

        async def configure(shard_id: int) -> None:
            command = cmd.ConfigureStream(
                record.config,
                record.incarnation,
                record.hash_key,
                shard_id - entry.shard_id,
                record.version,
            )
            expect(await self._shard_log.command(shard_id, command), Done)

        await asyncio.gather(*map(configure, behind))

    def _has_config(self, entry: StreamEntry, shard_id: int) -> bool:
        """Whether a shard has the first shard's configuration, as of the same change."""
        first, shard = self._shards.get(entry.shard_id), self._shards.get(shard_id)
        if first is None or shard is None or first.machine.record is None:
            return False
        record = shard.machine.record
        return record is not None and (
            record.version == first.machine.record.version
            and record.config == first.machine.record.config
        )

    async def _configure(self, shard_id: int, config: StreamConfig, incarnation: str) -> None:
        """Create the stream of a shard that has none."""
        hash_key = secrets.token_bytes(HASH_KEY_BYTES)
        given = cmd.Precondition(create=True)
        configure = cmd.ConfigureStream(config, incarnation, hash_key, given=given)
        expect(await self._shard_log.command(shard_id, configure), Done)

    async def _reserve(self, config: StreamConfig, incarnation: str, *, here: bool = False) -> int:
        in_memory = config.storage == "memory"
        groups = () if in_memory else self._groups_for(config, here=here)
        if groups and self._groups[groups[0]].is_alone:
            await self._groups.before_single()
        reserve = cmd.ReserveStream(
            config.name,
            config.subjects,
            incarnation,
            config.shards,
            in_memory,
            groups,
            self._groups.node_id if in_memory else "",
        )
        return expect(await self._meta_log.command(reserve), Reserved).shard_id

    def _groups_for(self, config: StreamConfig, *, here: bool) -> tuple[int, ...]:
        """The group of each shard of a new stream; empty for the usual one.

        Raises NOT_LEADER if another node leads the group: only that node makes the stream. With
        ``here``, only groups that this node leads are chosen from, as long as there are any.
        """
        if len(self._meta.group_table.groups) < self._groups.planned:
            # They are being made, or this node has not applied that since its start.
            self._groups.check_led(META_GROUP)
            raise no_leader("")
        table, replicas = self._meta.group_table.groups.values(), config.num_replicas
        led = [entry for entry in table if here and self._groups.leads(entry.number)]
        group = choose_group(replicas, led, self._meta.shards_in) or choose_group(
            replicas, table, self._meta.shards_in
        )
        if group is not None:
            self._groups.check_led(group.number, group.members[0])
            if here or len(group.members) == 1:
                return (group.number,) * config.shards
            return choose_groups(group, config.shards, table, self._meta.shards_in)
        if config.num_replicas > 1:
            message = f"{config.num_replicas} replicas require a cluster with as many nodes"
            problem = FieldProblem("/num_replicas", message)
            raise ApiError(errors.REPLICAS_UNSUPPORTED, message, [problem], applied=False)
        return ()

    def _check_home(self, entry: StreamEntry) -> None:
        """Raise NOT_LEADER unless this node leads the first shard of a stream."""
        if entry.owner not in ("", self._groups.node_id):
            raise no_leader(entry.owner)
        group = self._meta.group_of(entry.shard_id)
        known = self._meta.group_table.groups.get(group)
        self._groups.check_led(group, known.members[0] if known is not None else "")

    def _check_kept(self, entry: StreamEntry) -> None:
        """Raise DATA_LOST for a stream whose only copy was on a disk that is lost."""
        loser = self._meta.loser_of(entry)
        if loser:
            detail = f"the only copy of stream {entry.name} was on a disk of {loser} that is lost"
            raise ApiError(errors.DATA_LOST, detail, applied=False)

    def leads(self, entry: StreamEntry) -> bool:
        """Whether this node leads the first shard of a stream, and so makes and removes it."""
        return entry.owner in ("", self._groups.node_id) and self._groups.leads(
            self._meta.group_of(entry.shard_id)
        )

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
        result = await self._shard_log.command(entry.shard_id, configure)
        if isinstance(result, Refused):
            with suppress(ApiError):  # if it fails, the next change or start releases the subjects
                await self._reconciled(config.name)
            raise error_of(result)
        with begun():
            await self._propagate(entry)
            if shard.in_memory or set(config.subjects) != set(entry.subjects):
                await self._list(config, config.subjects, record.incarnation)
            await self._enforce_config(entry)

    async def _enforce_config(self, entry: StreamEntry) -> None:
        """Remove the messages that a stream's configuration no longer allows."""
        for shard_id in entry.shard_ids:
            shard = self._shards[shard_id]
            if shard.machine.over_limits:
                await self.removals.enforce_limits(shard)
            await self.removals.enforce_interest(shard)

    async def _list(
        self, config: StreamConfig, subjects: tuple[str, ...], incarnation: str
    ) -> None:
        kept = config if config.storage == "memory" else None
        listing = cmd.ListStream(config.name, subjects, kept, incarnation)
        expect(await self._meta_log.command(listing), Done)

    async def delete(self, name: str, if_match: int | None = None) -> None:
        """Remove a stream with all it holds; see ``StorageLink.delete_stream``."""
        async with self._lock:
            lost = self._meta.streams.get(name)
            if lost is not None and self._meta.loser_of(lost) and if_match is None:
                self._check_home(lost)
                await self._drop(lost)
                return
            entry = self.stream(name).entry
            self._check_home(entry)
            record = self._shards[entry.shard_id].machine.record
            assert record is not None
            # The shard decides, because it knows the version. After this command it has no stream.
            drop = cmd.DropStream(record.incarnation, if_match)
            expect(await self._shard_log.command(entry.shard_id, drop), Done)
            with begun():
                await self._drop(entry)

    async def _drop(self, entry: StreamEntry) -> None:
        """Finish the removal of a stream, wherever it stopped."""
        unlist = cmd.UnlistStream(entry.name, entry.incarnation)
        expect(await self._meta_log.command(unlist), Done)
        for shard_id in entry.shard_ids:
            await self._shard_log.command(shard_id, cmd.DropStream())
        release = cmd.ReleaseStream(entry.name, entry.incarnation)
        expect(await self._meta_log.command(release), Done)
        self._streams.pop(entry.name, None)  # nobody may ask for it again

    async def reconcile_all(self) -> None:
        """Finish or undo changes that a crash interrupted."""
        async with self._lock:
            await self._renew_lost()
            for seen, entry in enumerate(list(self._meta.streams.values()), start=1):
                await self._reconcile_if_led(entry)
                if seen % _RECONCILED_TOGETHER == 0:
                    await asyncio.sleep(0)

    async def reconcile(self, name: str) -> None:
        """As :meth:`reconcile_all`, for one stream."""
        async with self._lock:
            entry = self._meta.streams.get(name)
            if entry is not None:
                await self._reconcile_if_led(entry)

    async def _reconcile_if_led(self, entry: StreamEntry) -> None:
        if self.leads(entry) and not self._is_whole(entry) and entry.name not in self._restoring:
            await self._reconcile_if_sound(entry)

    async def _reconcile_if_sound(self, entry: StreamEntry) -> None:
        """Reconcile a stream; a damaged one stays as it is and does not block the others."""
        try:
            self._check_kept(entry)
            await self._reconcile(entry)
        except ApiError as error:
            if error.spec not in (errors.DATA_LOST, errors.OUTCOME_UNKNOWN):
                raise
            _log.critical("stream_not_repaired", stream=entry.name, reason=str(error))

    async def _reconciled(self, name: str) -> StreamEntry | None:
        """Return the meta entry of ``name`` after reconciling its stream; None if there is none."""
        entry = self._meta.streams.get(name)
        if entry is not None:
            self._check_home(entry)
        if entry is not None and not self._is_whole(entry):
            self._check_kept(entry)
            await self._reconcile(entry)
            entry = self._meta.streams.get(name)
        return entry

    def _is_whole(self, entry: StreamEntry) -> bool:
        """Whether the stream is listed under exactly the subjects that all its shards capture."""
        first = self._shards.get(entry.shard_id)
        if entry.stage != "listed" or first is None or not first.machine.exists:
            return False
        if not all(self._has_config(entry, number) for number in entry.shard_ids[1:]):
            return False
        config = first.machine.config
        return set(entry.subjects) == set(config.subjects) and entry.config in (None, config)

    async def _renew_lost(self) -> None:
        """Create the streams in memory of an earlier process again, empty."""
        lost = [
            entry
            for entry in self._meta.streams.values()
            if entry.stage == "listed" and is_in_memory(entry.shard_id) and self.leads(entry)
            if entry.shard_id not in self._shards
        ]
        for start in range(0, len(lost), _RENEWED_TOGETHER):
            await asyncio.gather(*map(self._renew, lost[start : start + _RENEWED_TOGETHER]))
        self._renewed = True

    async def _renew(self, entry: StreamEntry) -> None:
        assert entry.config is not None
        incarnation = secrets.token_hex(8)
        renew = cmd.RenewStream(entry.name, incarnation, entry.incarnation)
        shard_id = expect(await self._meta_log.command(renew), Reserved).shard_id
        await self._configure(shard_id, entry.config, incarnation)
        await self._propagate(self._meta.streams[entry.name])

    async def _reconcile(self, entry: StreamEntry) -> None:
        shard = self._shards.get(entry.shard_id)
        if entry.stage != "unlisted" and shard is not None and shard.machine.exists:
            await self._propagate(entry)
            config = shard.machine.config
            await self._list(config, config.subjects, entry.incarnation)
            for shard_id in entry.shard_ids:
                await self.removals.enforce_limits(self._shards[shard_id])
        else:
            await self._drop(entry)

    # Restoring -----------------------------------------------------------------------------------

    async def claim_restore(self, name: str) -> None:
        """Reserve ``name`` for a restore, until :meth:`end_restore`; STREAM_RESTORE_EXISTS."""
        async with self._lock:
            if name in self._restoring or await self._reconciled(name) is not None:
                raise ApiError(errors.STREAM_RESTORE_EXISTS, applied=False)
            self._restoring.add(name)

    async def begin_restore(self, config: StreamConfig, incarnation: str) -> int:
        """Reserve a stream's name and subjects; return the first shard id.

        SUBJECT_OVERLAP; STREAM_RESTORE_EXISTS.

        The stream gets a group that this node leads now, because this node has the archive.
        """
        check_stream_encryption(config, encrypts=self._encrypts)
        while True:
            try:
                return await self._reserve(config, incarnation, here=True)
            except ApiError as error:
                if error.spec is not errors.STREAM_EXISTS:
                    raise
            # Another node had reserved the name. By now this node knows that, too.
            async with self._lock:
                if await self._reconciled(config.name) is not None:
                    raise ApiError(errors.STREAM_RESTORE_EXISTS, applied=False)

    async def restore_part(self, shard_id: int, part: cmd.RestorePart) -> None:
        """Put a part into a reserved shard."""
        expect(await self._shard_log.command(shard_id, part), Done)

    async def finish_restore(self, shard_id: int, finishes: list[cmd.FinishRestore]) -> StreamInfo:
        """Create the stream of shards that have all parts; ``shard_id`` is that of the first."""
        config = finishes[0].header.config
        # The first shard decides and comes last: until then, a crash undoes the others.
        for shard in reversed(range(len(finishes))):
            command = self._shard_log.command(shard_id + shard, finishes[shard])
            expect(await command, Done)
        with begun():
            await self._propagate(self._meta.streams[config.name])
            incarnation = self._meta.streams[config.name].incarnation
            await self._list(config, config.subjects, incarnation)
        return self.stream(config.name).info()

    async def end_restore(self, name: str) -> None:
        """End a restore: finish or undo what is half done."""
        async with self._lock:
            self._restoring.discard(name)
            await self._reconciled(name)


def _check(given: cmd.Precondition, version: int | None, *, same: bool) -> None:
    """Refuse early what the shard would refuse now, so that no subjects are claimed for it."""
    refused = given.refusal(version, errors.STREAM_EXISTS, errors.STREAM_NOT_FOUND, same=same)
    if refused is not None:
        raise error_of(refused)
