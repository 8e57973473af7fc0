"""Which batches of a restore are complete, so that another run need not send them again.

It only saves time: the stream recognizes a batch that it has.
"""

from typing import Final, Self

import msgspec

from contrail_spark.lake import files
from contrail_spark.lake.store import Lake

FOLDER: Final = "restores"


class _Document(msgspec.Struct):
    """Its content in a file: the last complete batch of each shard."""

    incarnation: str
    done: dict[int, int]


class Progress:
    """The progress of the restore ``producer`` to one incarnation of a stream."""

    def __init__(self, lake: Lake, producer: str, document: _Document) -> None:
        self.producer = producer
        self._lake = lake
        self._document = document
        # One warning is enough.
        self._failed = False

    @classmethod
    def load(cls, lake: Lake, producer: str, incarnation: str) -> Self:
        """What is known; nothing if there is no file, or if it cannot be read."""
        found = _Document(incarnation, {})
        try:
            path = lake.root / FOLDER / f"{producer}.json"
            known = msgspec.json.decode(path.read_bytes(), type=_Document)
        except (OSError, msgspec.MsgspecError):
            pass
        else:
            if known.incarnation == incarnation:
                found = known
        return cls(lake, producer, found)

    def done(self, shard: int) -> int:
        """The last complete batch of a shard; 0 if none is known."""
        return self._document.done.get(shard, 0)

    def reached(self, shard: int, number: int) -> None:
        """Batch ``number`` of a shard and all before it are complete."""
        self._document.done[shard] = max(number, self.done(shard))

    def save(self) -> str | None:
        """Keep it for the next run; why that is not possible, once."""
        folder = self._lake.root / FOLDER
        try:
            temporary = self._lake.temporary(0)
            files.make_folders(folder)
            temporary.write_bytes(msgspec.json.encode(self._document))
            files.sync_file(temporary)
            temporary.replace(folder / f"{self.producer}.json")
        except OSError as error:
            if self._failed:
                return None
            self._failed = True
            where = error.filename or folder
            return f"a restart will send everything again: {where}: {error.strerror}"
        return None
