"""The position of a reader in a stream with several shards: the next sequence of each, as a text.

Cursors are opaque to clients. A cursor contains the incarnation of its stream, so it is invalid
after the stream was created again. Its text never looks like a number.
"""

import base64
import binascii
from collections.abc import Sequence
from typing import Annotated, Final

import msgspec

from contrail_common.partition import SHARDS_MAX
from contrail_common.timeunits import INT64_MAX

_FROM_URL: Final = str.maketrans("-_", "+/")


class Cursor(msgspec.Struct, array_like=True, frozen=True):
    """``next_seqs`` of the shards in order, of the ``incarnation`` of a stream."""

    incarnation: str
    next_seqs: Annotated[
        list[Annotated[int, msgspec.Meta(ge=0, le=INT64_MAX)]], msgspec.Meta(max_length=SHARDS_MAX)
    ]

    def text(self) -> str:
        """Return the text that clients get."""
        return base64.urlsafe_b64encode(_encode(self)).decode().rstrip("=")


_encode: Final = msgspec.msgpack.Encoder().encode
_decoder: Final = msgspec.msgpack.Decoder(Cursor)


def read_cursor(text: str) -> Cursor:
    """Return the cursor with this ``text``; raise ValueError if it is invalid."""
    # The URL-safe decoder of Python skips invalid characters, so one cursor would have many texts.
    padded = text.translate(_FROM_URL) + "=" * (-len(text) % 4)
    try:
        return _decoder.decode(base64.b64decode(padded, validate=True))
    except (binascii.Error, ValueError, msgspec.DecodeError):
        raise ValueError("is not a valid cursor") from None


def after_each(begin: Cursor, taken: Sequence[tuple[int, int]]) -> list[str]:
    """Return the cursor after each of the messages (shard, sequence) read from ``begin`` on."""
    # Pages are merged by time, so consecutive messages may be of different shards.
    seqs = list(begin.next_seqs)
    texts: list[str] = []
    for shard, seq in taken:
        seqs[shard] = seq + 1
        texts.append(Cursor(begin.incarnation, seqs).text())
    return texts
