"""What is to be archived, cut into pieces: one piece is one task, and about one file. Pure."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from contrail_spark.errors import LakeError
from contrail_spark.lake.manifest import Range, State
from contrail_spark.plan import ShardBounds, Split


@dataclass(frozen=True, slots=True)
class Piece:
    """Sequences of a shard, both inclusive; ``messages`` is an estimate.

    ``lost`` sequences were removed from the stream before they were archived.
    """

    shard: int
    from_seq: int
    to_seq: int
    messages: int = 0
    lost: bool = False

    @property
    def range(self) -> Range:
        """The sequences as the manifest has them."""
        return Range(self.shard, self.from_seq, self.to_seq)


def missing_of(bounds: ShardBounds, state: State, goal: int) -> list[Piece]:
    """The sequences of a shard up to ``goal`` that are not archived: first those that are lost.

    Raises LakeError if the stream ends before the lake.
    """
    done = state.archived_through(bounds.shard)
    if bounds.last_seq < done:
        raise LakeError(
            f"shard {bounds.shard} of the stream ends with sequence {bounds.last_seq}, but the "
            f"lake has it through {done}: the server has lost the end of the stream"
        )
    first = min(max(done + 1, bounds.first_seq), goal + 1)
    pieces = []
    if first > done + 1:
        pieces.append(Piece(bounds.shard, done + 1, first - 1, lost=True))
    if first <= goal:
        pieces.append(Piece(bounds.shard, max(first, done + 1), goal))
    return pieces


def cut(part: Range, splits: Sequence[Split], piece_bytes: int) -> list[Piece]:
    """Cut a range at the ends of the server's splits, and large splits further.

    The server cuts at the borders of its blocks, and a plan has a limited number of splits. The
    pieces cover the whole range, also sequences that no split has.
    """
    pieces: list[Piece] = []
    begin = part.from_seq
    for at, split in enumerate(splits):
        end = part.to_seq if at == len(splits) - 1 else split.to_seq
        parts = max(1, round(split.bytes / piece_bytes))
        pieces += _evenly(Piece(part.shard, begin, end, split.messages), parts)
        begin = end + 1
    if begin <= part.to_seq:
        pieces.append(Piece(part.shard, begin, part.to_seq))
    return pieces


def _evenly(piece: Piece, parts: int) -> Iterator[Piece]:
    span = piece.to_seq - piece.from_seq + 1
    parts = min(parts, span)
    for part in range(parts):
        first, end = (piece.from_seq + span * at // parts for at in (part, part + 1))
        yield Piece(piece.shard, first, end - 1, piece.messages // parts)


def rounds(pieces: Sequence[Piece], size: int) -> Iterator[Sequence[Piece]]:
    """Groups of pieces, each of which is committed at once."""
    for start in range(0, len(pieces), size):
        yield pieces[start : start + size]


def covered(pieces: Sequence[Piece]) -> tuple[Range, ...]:
    """The sequences of consecutive pieces, as one range for each shard."""
    result: dict[int, Range] = {}
    for each in pieces:
        first = result.get(each.shard, each.range).from_seq
        result[each.shard] = Range(each.shard, first, each.to_seq)
    return tuple(result.values())


def spelled(ranges: Sequence[Range]) -> str:
    """Ranges in the words of an error message."""
    return ", ".join(f"shard {each.shard}: {each.from_seq}..{each.to_seq}" for each in ranges)
