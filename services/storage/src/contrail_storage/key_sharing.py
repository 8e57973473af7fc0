"""How the members of a replicated group come to have the same subject keys.

The leader makes keys, and hands them to the other members. Once most members have them on disk, a
command names them; only then may they seal a message. A member that applies a name without having
the key fetches it from another one. Commands also retire and shred keys: a leader that has applied
the first seals with them no more, and each member destroys them when it applies the second. Keys go
from node to node over the peer port, and never into a log or a state.
"""

import asyncio
from array import array
from collections.abc import Iterable, Mapping, Sequence
from contextlib import suppress
from typing import TYPE_CHECKING, Final

import msgspec
import numpy as np
import structlog

from contrail_common import errors
from contrail_common.errors import ApiError
from contrail_storage.core import commands as cmd
from contrail_storage.core import key_layout as keys
from contrail_storage.core.results import Done
from contrail_storage.options import Cluster
from contrail_storage.replica.content_sealing import UNMADE, refusal
from contrail_storage.replica.raft_port import no_leader
from contrail_storage.seal.content import ContentOpener
from contrail_storage.seal.shared_keys import IF_LOST, SharedKey, SharedKeys
from contrail_storage.state.messages import GetKeys, PutKeys
from contrail_storage.streams.outcomes import expect
from contrail_storage.upkeep.backoff import Backoff

if TYPE_CHECKING:
    from contrail_storage.node import StorageNode

KEYS_TOGETHER: Final = 1_000
"""Keys of one request or command."""
_FULL: Final = errors.SUBJECT_KEYS_FULL, errors.STORAGE_FULL
_LOOK_S: Final = 0.5
_AGAIN_S: Final = 0.1
_AGAIN_MAX_S: Final = 5.0
_decoder = msgspec.msgpack.Decoder(list[SharedKey])
_log = structlog.get_logger("contrail.subject_keys")


class KeySharing:
    """The shared keys of one node. Used on the event loop, apart from `load` and `settle`."""

    def __init__(self, node: "StorageNode", cluster: Cluster | None) -> None:
        self._node = node
        self._cluster = cluster
        hash_key_of = node.applier.hash_key
        self.keys = SharedKeys(node.files, node.options.data_dir, node.keyring, hash_key_of)
        """In the file of this node."""
        self.opener = ContentOpener(node.subject_keys, self.keys)
        """Opens what any subject key of this node has sealed."""
        node.applier.on_keys = self._applied
        # Set when a key is to be fetched or destroyed.
        self._wake = asyncio.Event()
        # One request to each other node at a time: they share a bound with larger ones.
        self._turns: dict[str, asyncio.Lock] = {}

    # Following the state -------------------------------------------------------------------------

    async def shown(self, shard_ids: list[int]) -> None:
        """Compare the keys of shards whose state has come from another member."""
        await asyncio.to_thread(self.settle, shard_ids)
        self._wake.set()

    def lacks(self, number: int) -> bool:
        """Whether this node has yet to get keys of a group."""
        shards = self._node.applier.shards
        return any(at in shards and shards[at].group == number for at in self.keys.lacking)

    @property
    def problems(self) -> dict[str, str]:
        """What this node lacks, for its readiness."""
        lacking = sum(self.keys.lacking.values())
        reason = f"{lacking} have yet to come from other nodes; {IF_LOST}"
        return {"subject keys": reason} if lacking else {}

    async def wanted_marks(self, shard_id: int) -> dict[int, bytes]:
        """By id: the marks of the subjects whose keys this node lacks; empty if a row is gone.

        Raises as `until_written` and the store do.
        """
        ids = self.keys.wanted.get(shard_id, [])
        if not ids:
            return {}
        await self._node.until_written()
        rows = [keys.large_key(keys.SUBJECT_KEY, shard_id, one) for one in ids]
        found = await asyncio.to_thread(self._node.parts[0].get_many, rows)
        return {one: mark or b"" for one, mark in zip(ids, found, strict=True)}

    def settle(self, shard_ids: Iterable[int]) -> None:
        """Compare the keys of loaded shards with the rows that name them. Blocks."""
        shards, live = self._node.applier.shards, self.keys.live()
        for shard_id in shard_ids:
            if not shards[shard_id].machine.last_key and shard_id not in live:
                continue
            prefix = keys.shard_key(keys.SUBJECT_KEY, shard_id)
            last, named = 0, array("Q")
            for key, value in self._node.parts[0].scan(prefix, keys.prefix_end(prefix)):
                if number := keys.last_number(key, 8):
                    named.append(number)
                else:
                    last = int.from_bytes(value, "big")
            self.keys.settle(shard_id, np.frombuffer(named, np.uint64), last)

    def load(self) -> None:
        """Read the file, and :meth:`settle` what was loaded of groups with other nodes. Blocks."""
        node = self._node
        self.keys.load()
        node.groups.lacks_keys = self.lacks
        shards, is_replicated = node.applier.shards.items(), node.catching_up.is_replicated
        self.settle([shard_id for shard_id, shard in shards if is_replicated(shard.group)])

    def _applied(self, shard_id: int, command: cmd.KeyCommand) -> None:
        ids = np.frombuffer(command.ids, np.uint64).tolist()
        match command:
            case cmd.NameKeys():
                self.keys.name(shard_id, ids)
            case cmd.RetireKeys():
                self.keys.retire_ids(shard_id, ids)
            case cmd.ShredKeys():
                self.keys.shred(shard_id, ids)
        if self.keys.is_behind:
            self._wake.set()

    async def run(self) -> None:
        """Fetch keys that this node lacks, and destroy those that it must not have."""
        backoff = Backoff(_AGAIN_S, _AGAIN_MAX_S)
        while True:
            self._wake.clear()
            try:
                await asyncio.to_thread(self.keys.destroy_doomed)
                await self._fetch_wanted()
                backoff.succeeded()
            except (*UNMADE, ApiError) as error:
                if backoff.failed(str(error)):
                    _log.warning("shared_keys_behind", reason=str(error))
            except Exception as error:
                # Whatever another node sends must not end this one.
                if backoff.failed(repr(error)):
                    _log.exception("shared_keys_failed")
            with suppress(TimeoutError):
                async with asyncio.timeout(backoff.pause_s or _LOOK_S):
                    await self._wake.wait()

    async def _fetch_wanted(self) -> None:
        for shard_id, wanted in self.keys.wanted.items():
            shard = self._node.applier.shards.get(shard_id)
            if shard is None:
                continue
            left: Sequence[int] = wanted
            for peer in self._peers(shard.group):
                with suppress(ApiError):  # the next one may have them too
                    await self._fetch(peer, shard_id, left)
                left = self.keys.wanted.get(shard_id, ())
                if not left:
                    break

    def _peers(self, number: int) -> list[str]:
        """The other members of a group, its leader first."""
        members = self._node.membership.members_of(number)
        leader = self._node.groups[number].leader
        others = [one for one in members if one != self._node.membership.node_id]
        return sorted(others, key=lambda one: one != leader)

    async def _fetch(self, peer: str, shard_id: int, ids: Sequence[int]) -> None:
        """Fetch those of the keys that another node has."""
        for start in range(0, len(ids), KEYS_TOGETHER):
            request = GetKeys(shard_id, list(ids[start : start + KEYS_TOGETHER]))
            found = _decoder.decode(await self._ask(peer, request))
            if found:
                await asyncio.to_thread(self.keys.take, shard_id, found)

    async def _ask(self, peer: str, request: GetKeys | PutKeys) -> bytes:
        assert self._cluster is not None
        async with self._turns.setdefault(peer, asyncio.Lock()):
            return await self._cluster.fetch(peer, msgspec.msgpack.encode(request))

    # Making --------------------------------------------------------------------------------------

    async def make(self, number: int, wanted: Iterable[tuple[int, str]]) -> None:
        """Make keys for the (shard, subject) pairs without one, of a group that this node leads.

        On return they seal. Raises ApiError, or as `SharedKeys.prepare`: then some may be made, and
        none of them seals. Calls for a group must come one after the other.
        """
        subjects: dict[int, list[str]] = {}
        for shard_id, subject in wanted:
            subjects.setdefault(shard_id, []).append(subject)
        self._node.groups.check_led(number)
        term = self._node.groups[number].report().term
        made: dict[int, list[SharedKey]] = {}
        for shard_id, names in subjects.items():
            made[shard_id] = await asyncio.to_thread(self.keys.prepare, shard_id, names, term)
        if any(made.values()):
            await self._hand_out(number, made)
        for shard_id, found in made.items():
            for some in _parts(found):
                await self._name(number, shard_id, some)

    async def _name(self, number: int, shard_id: int, made: list[SharedKey]) -> None:
        ids = np.array([one.id for one in made], np.uint64)
        command = cmd.NameKeys(ids.tobytes(), b"".join(one.mark for one in made))
        try:
            named = self._node.groups.proposers[number].command(shard_id, command)
            expect(await named, Done)
        except ApiError as error:
            if error.spec is not errors.OUTCOME_UNKNOWN:
                raise
            # Whether they are named or not, nothing is sealed with them yet.
            raise no_leader("") from error

    async def _hand_out(self, number: int, made: Mapping[int, list[SharedKey]]) -> None:
        """Return once most members have the keys on disk (NOT_LEADER, SUBJECT_KEYS_FULL)."""
        loop, peers = asyncio.get_running_loop(), self._peers(number)
        pending: set[asyncio.Future[ApiError | None]] = set()
        for peer in peers:
            put: asyncio.Future[ApiError | None] = loop.create_future()
            pending.add(put)
            self._node.spawn(self._put(peer, made, put))
        held, problem = 1, no_leader("")
        while pending and self._node.groups.leads(number):
            done, pending = await asyncio.wait(
                pending, timeout=_LOOK_S, return_when=asyncio.FIRST_COMPLETED
            )
            for error in (one.result() for one in done):
                held += error is None
                if error is not None and error.spec in _FULL:
                    problem = error
            # The others go on.
            if held > (len(peers) + 1) // 2:
                return
        raise problem

    async def _put(
        self,
        peer: str,
        made: Mapping[int, list[SharedKey]],
        put: "asyncio.Future[ApiError | None]",
    ) -> None:
        """Hand keys to a member; tell why it does not have them on disk, or None if it has."""
        error: ApiError | None = no_leader("")
        try:
            for shard_id, found in made.items():
                for some in _parts(found):
                    await self._ask(peer, PutKeys(shard_id, some))
            error = None
        except ApiError as refused:
            _log.info("keys_not_handed_out", peer=peer, reason=str(refused))
            error = refused
        finally:
            put.set_result(error)

    # For other members ---------------------------------------------------------------------------

    async def answer(self, request: GetKeys | PutKeys) -> bytes:
        """Answer another member. PRECONDITION_FAILED: its keys may not come back."""
        try:
            if isinstance(request, GetKeys):
                found = await asyncio.to_thread(self.keys.give, request.shard, request.ids)
                return msgspec.msgpack.encode(found)
            has_all = await asyncio.to_thread(self.keys.take, request.shard, request.keys)
        except UNMADE as error:
            raise refusal(error) from error
        if not has_all:
            raise ApiError(errors.PRECONDITION_FAILED, "keys were shredded", applied=False)
        return b""


def _parts(found: list[SharedKey]) -> Iterable[list[SharedKey]]:
    for start in range(0, len(found), KEYS_TOGETHER):
        yield found[start : start + KEYS_TOGETHER]
