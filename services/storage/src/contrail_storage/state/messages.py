"""What the members of a group say to each other about its state and its subject keys."""

import msgspec

from contrail_storage.seal.shared_keys import SharedKey


class Offer(msgspec.Struct, tag="offer", array_like=True, frozen=True):
    """The leader to a member: entries up to ``base_index`` are gone; fetch the state."""

    group: int
    leader: str
    base_index: int


class Open(msgspec.Struct, tag="open", array_like=True, frozen=True):
    """A member to the leader: begin to read the state."""

    group: int
    member: str


class OpenBlocks(msgspec.Struct, tag="open_blocks", array_like=True, frozen=True):
    """A member to another one: begin to read the blocks of a shard with these sequences."""

    group: int
    member: str
    shard: int
    first_seq: int
    end_seq: int


class Opened(msgspec.Struct, array_like=True, frozen=True):
    """The answer to both: what `Read` names the state by, and its row of the applied index."""

    number: int
    applied: bytes


class Read(msgspec.Struct, tag="read", array_like=True, frozen=True):
    """A member to the leader: send a piece, counted from 0."""

    number: int
    piece: int


class Close(msgspec.Struct, tag="close", array_like=True, frozen=True):
    """A member to the leader: it needs no more pieces."""

    number: int


class PutKeys(msgspec.Struct, tag="put_keys", array_like=True, frozen=True):
    """The leader to a member: store subject keys that the state is to name."""

    shard: int
    keys: list[SharedKey]


class GetKeys(msgspec.Struct, tag="get_keys", array_like=True, frozen=True):
    """A member to another one: send those of these subject keys that you have.

    The answer is a list of `SharedKey`.
    """

    shard: int
    ids: list[int]


Request = Offer | Open | OpenBlocks | Read | Close | PutKeys | GetKeys
decoder = msgspec.msgpack.Decoder(Request)
