"""A process with all modules imported that forks one child per life, which makes a life cheap.

It opens no store itself, because the threads of RocksDB do not survive a fork.
"""

import asyncio
import gc
import os
import signal
import subprocess
import sys
import traceback
from pathlib import Path
from types import TracebackType
from typing import IO, Final, Literal, Self

import msgspec
import numpy as np
import structlog

from contrail_serve.groups import SingleMemberGroups
from contrail_storage import node as storage_node
from contrail_storage.node import NodeOptions, StorageNode
from contrail_storage.replica import write_behind
from contrail_storage.upkeep.checkpointer import DataLostError
from contrail_storage.upkeep.compactor import CompactorBounds
from contrail_storage.wal.log_options import LogOptions
from tests.crash.disk import CountedFiles, Plan, StoreOpener, Switch
from tests.crash.eager import EagerGroups
from tests.crash.history import Broken, Finished, Opened, Record, Step, Stopped
from tests.crash.lives import Life, MovedTime, NodeStoppedError
from tests.crash.mutants import MUTANTS, replace
from tests.crash.pipe import Reporter, bodies, read_to_end

_LIFE_S: Final = 240.0
_NEVER_S: Final = 1_000.0
HELD_S: Final = 1_000.0
"""Hold the changes of entries back until a call needs them in the store."""
SOON_S: Final = 0.005
_ROOT: Final = Path(__file__).parents[2]


class Job(msgspec.Struct, frozen=True, kw_only=True):
    """The work of one life: open `data_dir`, look, make the calls, look again, end."""

    data_dir: str = ""
    node_keys: tuple[bytes, ...] = ()
    plan: Plan = Plan()
    steps: list[Step] = []
    first_number: int = 0
    insist: bool = False
    look: bool = False
    end: Literal["stop", "exit"] = "exit"
    groups: Literal["sound", "eager"] = "sound"
    successors: bool = False
    segment_bytes: int = 4_096
    merge_blocks: int = 4
    page_blocks: int = 4
    hold_s: float = SOON_S
    blob_bytes_min: int = 256
    mutant: str = ""
    accept: bool = False


class Ended(msgspec.Struct, frozen=True):
    """How a life ended, and its complete records, as they came through the pipe."""

    killed: bool
    records: list[Record]


class Zygote:
    """The requesting side."""

    def __init__(self) -> None:
        environment = {**os.environ, "OPENBLAS_NUM_THREADS": "1", "PYTHONHASHSEED": "0"}
        self._process = subprocess.Popen(
            [sys.executable, "-m", "tests.crash.zygote"],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            cwd=_ROOT,
            env=environment,
        )

    def live(self, job: Job) -> Ended:
        """Run one life; raises AssertionError if the node does something that no node may do."""
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        _write_frame(self._process.stdin, msgspec.msgpack.encode(job))
        frame = _read_frame(self._process.stdout)
        assert frame, "the process that forks has ended"
        ended = msgspec.msgpack.decode(frame, type=Ended)
        for record in ended.records:
            assert not isinstance(record, Broken), f"{job.plan}\n{record.trace}"
        return ended

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        with self._process as process:
            assert process.stdin is not None
            process.stdin.close()
            process.wait(60)


def _write_frame(stream: IO[bytes], body: bytes) -> None:
    stream.write(len(body).to_bytes(8, "little") + body)
    stream.flush()


def _read_frame(stream: IO[bytes]) -> bytes:
    size = stream.read(8)
    return stream.read(int.from_bytes(size, "little")) if size else b""


def _main() -> None:
    structlog.configure(logger_factory=structlog.ReturnLoggerFactory())
    np.unique(np.zeros(1, np.uint32))
    gc.collect()
    gc.freeze()
    while frame := _read_frame(sys.stdin.buffer):
        ended = _fork(msgspec.msgpack.decode(frame, type=Job))
        _write_frame(sys.stdout.buffer, msgspec.msgpack.encode(ended))


def _fork(job: Job) -> Ended:
    reading, writing = os.pipe()
    child = os.fork()
    if child == 0:
        os.close(reading)
        _be_born(job, Reporter(writing))
    os.close(writing)
    try:
        data = read_to_end(reading, _LIFE_S)
        trouble: list[Record] = []
    except TimeoutError as error:
        os.kill(child, signal.SIGKILL)
        data, trouble = b"", [Broken(f"the life goes on and on: {error}")]
    finally:
        os.close(reading)
    _, status = os.waitpid(child, 0)
    decode = msgspec.msgpack.Decoder(Record).decode
    return Ended(os.WIFSIGNALED(status), [decode(body) for body in bodies(data)] + trouble)


def _be_born(job: Job, reporter: Reporter) -> None:
    try:
        asyncio.run(_live(job, reporter))
    except BaseException:
        reporter.send(Broken(traceback.format_exc()))
    finally:
        os._exit(0)


async def _live(job: Job, reporter: Reporter) -> None:
    switch = Switch(job.plan, reporter)
    replace(storage_node, "LogTime", MovedTime)
    replace(write_behind, "HOLD_S", job.hold_s)
    replace(write_behind, "SOON_S", job.hold_s)
    if job.mutant:
        MUTANTS[job.mutant]()
    root = Path(job.data_dir)
    opener = StoreOpener(switch, job.blob_bytes_min)
    files = CountedFiles(switch, root, reporter)
    idle_s = 0.0 if job.successors else _NEVER_S
    options = NodeOptions(
        root,
        node_keys=job.node_keys,
        log=LogOptions(segment_bytes=job.segment_bytes, keep_bytes=0, idle_s=idle_s),
        merge_blocks=job.merge_blocks,
        page_blocks=job.page_blocks,
        compactor=CompactorBounds(tick_s=_NEVER_S),
        files=files,
        open_store=opener,
        accept_data_loss=job.accept,
    )
    groups = SingleMemberGroups() if job.groups == "sound" else EagerGroups()
    try:
        node = StorageNode.open(options, groups)
        await node.start()
    except (DataLostError, OSError) as error:
        reporter.send(Stopped(str(error)))
        return
    reporter.send(Opened())
    life = Life(
        node,
        reporter,
        job.first_number,
        lambda: not (job.successors and files.lonely),
        opener.store,
        held=job.hold_s >= HELD_S,
    )
    try:
        if job.look:
            await life.look()
        await life.run(job.steps, insist=job.insist)
        if job.look:
            await life.drain_all()
            await life.look(kept=True)
    except NodeStoppedError as error:
        reporter.send(Stopped(str(error)))
        return
    reporter.send(Finished(switch.calls))
    if job.end == "stop":
        await node.stop()
        reporter.send(Finished(switch.calls))


if __name__ == "__main__":
    _main()
