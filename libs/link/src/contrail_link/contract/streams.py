"""Streams: their configuration, and the removal of their messages."""

from typing import Literal, Protocol

import msgspec

from contrail_common.model import ConsumerInfo, StreamConfig, StreamInfo
from contrail_link.contract.remote import ALL, META, REPEAT, UNKNOWN, leader_of, remote

CreateMode = Literal["create", "put"]


class Page(msgspec.Struct, frozen=True):
    """One page of a listing; ``next_token`` is None on the last page."""

    streams: list[StreamInfo] = []
    consumers: list[ConsumerInfo] = []
    next_token: str | None = None


class StreamsLink(Protocol):
    """Streams: their configuration, and the removal of their messages."""

    @remote(1, UNKNOWN, to=META)
    async def put_stream(
        self, config: StreamConfig, mode: CreateMode, if_match: int | None, if_none: bool
    ) -> tuple[StreamInfo, bool]:
        """Create a stream (True), or find it identical or update it (False).

        If the name has another config, ``create`` refuses (STREAM_EXISTS) and ``put`` updates it.
        ``if_match`` is the required config version (0: any); ``if_none`` requires that there is no
        stream (else PRECONDITION_FAILED). The conditions are checked when the change is applied.
        """
        ...

    @remote(2, REPEAT, to=leader_of("name"))
    async def stream_info(self, name: str, replica: str = "") -> StreamInfo:
        """Return the stream's configuration and state (STREAM_NOT_FOUND).

        For ``replica``, see `ReadLink.find_replica`.
        """
        ...

    @remote(3, REPEAT, to=ALL)
    async def list_streams(self, subject: str, prefix: str, limit: int, token: str) -> Page:
        """List streams by name; with ``subject``, only those whose subjects overlap it.

        A node of a cluster lists at least the streams that it leads. The token of a page is the
        name of its last stream in base64url without padding, the same at every node.
        """
        ...

    @remote(4, UNKNOWN, to=META)
    async def delete_stream(self, name: str, if_match: int | None = None) -> None:
        """Remove the stream with its messages and consumers (STREAM_NOT_FOUND).

        ``if_match`` is the required config version (else PRECONDITION_FAILED).
        """
        ...

    @remote(5, UNKNOWN, to=leader_of("name"))
    async def purge_stream(
        self, name: str, subject: str, up_to_seq: int, keep: int, shard: int | None = None
    ) -> int:
        """Remove messages; return how many (``up_to_seq`` is exclusive; 0 and "" mean not given).

        If the stream has several shards, ``up_to_seq`` needs ``shard``, and ``keep`` needs either
        ``shard`` or a subject whose messages are all in one (INVALID_FIELD).
        """
        ...

    @remote(60, UNKNOWN, to=leader_of("stream"))
    async def step_down(self, stream: str, preferred: str) -> str:
        """Make another node the leader of the stream, and return its name.

        ``preferred`` must have a replica of the stream (INVALID_FIELD); "": the one that has most.
        Raises NOT_REPLICATED; NO_FIT_PEER if the node that leads still does.
        """
        ...

    @remote(13, UNKNOWN, to=leader_of("stream"))
    async def delete_message(self, stream: str, seq: int, shard: int | None = None) -> None:
        """Make one message unreadable (SEQUENCE_NOT_FOUND, DELETE_DENIED)."""
        ...
