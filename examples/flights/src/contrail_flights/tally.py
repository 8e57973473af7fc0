"""Count and checksum of a set of messages, independent of their order."""

import zlib
from collections.abc import Iterable
from dataclasses import dataclass

SEPARATOR = b"\n"


@dataclass(frozen=True, slots=True)
class Tally:
    """The number of messages, and a sum of CRC-32: of ``subject``, a line feed and ``payload``.

    A sum does not depend on order, and Spark can compute it too. Count and sum together show lost,
    doubled and changed messages.
    """

    count: int = 0
    checksum: int = 0

    def __add__(self, other: "Tally") -> "Tally":
        return Tally(self.count + other.count, self.checksum + other.checksum)

    def __str__(self) -> str:
        return f"{self.count:,} with checksum {self.checksum:x}"


def tally_of(messages: Iterable[tuple[str, bytes]]) -> Tally:
    """The tally of (subject, payload) pairs."""
    count = checksum = 0
    for subject, payload in messages:
        count += 1
        checksum += zlib.crc32(payload, zlib.crc32(SEPARATOR, zlib.crc32(subject.encode())))
    return Tally(count, checksum)
