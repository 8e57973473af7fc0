"""Disks of nodes that fail, are slow, or lose what was not synced."""

import os
import random
import shutil
import struct
import subprocess
import sys
from pathlib import Path
from typing import Final

_SHIM: Final = Path(__file__).parents[1] / "support" / "failing_calls.c"
_RECORD: Final = struct.Struct("=qqqq")
_WRITTEN: Final = ord("w")
LOG: Final = "wal"
"""The folder of the log. The store is left alone: it has no log, and syncs what it flushes."""


def compiled(folder: Path) -> Path | None:
    """The library that makes calls fail; None without a C compiler."""
    compiler = shutil.which("cc") or shutil.which("gcc")
    if compiler is None:
        return None
    library = folder / "failing_calls.so"
    subprocess.run([compiler, "-O1", "-shared", "-fPIC", "-o", library, _SHIM, "-ldl"], check=True)
    return library


class Disk:
    """The disk under the data folder of one node."""

    def __init__(self, data_dir: Path, library: Path) -> None:
        self._data_dir = data_dir
        self._control = data_dir.parent / f"{data_dir.name}.fails"
        self._writes = data_dir.parent / f"{data_dir.name}.writes"
        self.program = (
            "env",
            f"LD_PRELOAD={library}",
            f"FAIL_BELOW={data_dir}/",
            f"FAIL_WITH={self._control}",
            f"WRITES={self._writes}",
            sys.executable,
            "-m",
            "contrail_serve",
        )
        """The command line of a node on this disk."""

    def fail(self, number: int) -> None:
        """Let all writes and syncs fail with an error number."""
        self._say(number)

    def slow_down(self, late_ms: int) -> None:
        """Let all syncs take longer."""
        self._say(-late_ms)

    def heal(self) -> None:
        """Let calls succeed again."""
        self._control.unlink(missing_ok=True)

    def begin(self) -> None:
        """Forget the writes of an earlier process. Call it before each start."""
        self._writes.unlink(missing_ok=True)

    def cut(self, chance: random.Random) -> int:
        """Take back what a dead process wrote to the log and did not sync; returns the bytes.

        Some of it may survive, as on a disk that wrote a part before the power went away.
        """
        lost = 0
        unsynced = self._unsynced()
        for path in (self._data_dir / LOG).rglob("*"):
            ranges = unsynced.get(path.stat().st_ino, [])
            if not ranges:
                continue
            begin, end = ranges[0][0], max(first + length for first, length in ranges)
            begin = chance.choice([begin, chance.randint(begin, end)])
            with path.open("r+b") as file:
                file.seek(begin)
                file.write(bytes(end - begin))
            lost += end - begin
        return lost

    def _say(self, number: int) -> None:
        # In one step: a file that was just created is empty, and would be read as no fault.
        new = self._control.with_suffix(".new")
        new.write_text(str(number), encoding="ascii")
        os.replace(new, self._control)

    def _unsynced(self) -> dict[int, list[tuple[int, int]]]:
        """The ranges of each file, by inode, that were written after its last sync."""
        found: dict[int, list[tuple[int, int]]] = {}
        records = self._writes.read_bytes() if self._writes.exists() else b""
        whole = len(records) - len(records) % _RECORD.size
        for kind, inode, offset, length in _RECORD.iter_unpack(records[:whole]):
            if kind == _WRITTEN:
                found.setdefault(inode, []).append((offset, length))
            else:
                found.pop(inode, None)
        return found
