"""Publishing over HTTP: single messages, batches in every encoding, message ids, many subjects."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Final

from tests.bench.figures import Bench, BenchError, Measured, Run
from tests.bench.http_scripts import MSGPACK, Batches, DistinctSubjects, Singles
from tests.bench.load import Load, Script
from tests.bench.patience import repeat
from tests.bench.processes import folder_bytes, rss_bytes
from tests.bench.server import FILL_BATCH, FILL_CONNECTIONS, drive, fill, fresh_server

_WARM_S: Final = 0.5
_MIB: Final = 1 << 20
_HELD_MAX_BYTES: Final = 1 << 30
BATCH_CONNECTIONS: Final = 4
KIB_PAYLOAD_BYTES: Final = 1 << 10

Scripts = Callable[[], Sequence[Script]]


def published(bench: Bench, scripts: Callable[[str, str], Scripts], timed: bool) -> Measured:
    """Runs on one server, each on its own stream, which is checked at the end of the run."""
    with fresh_server(bench) as server:
        if not timed:
            fill(bench, server, "WARM", "warm")  # such runs have no time before they count

        def once(number: int) -> Run:
            stream, prefix = f"BENCH{number}", f"bench{number}"
            server.create_stream(stream, prefix)
            load = Load(
                server.port,
                server.pid,
                scripts(stream, prefix),
                seconds=bench.scale.seconds if timed else None,
                warm_s=_WARM_S if timed else 0.0,
            )
            driven = drive(bench, load)
            server.check_stored(stream, driven.messages)
            return driven.run

        runs = repeat(bench, once)
        rss = rss_bytes(server.pid) / _MIB
    return Measured(runs, note=f"server RSS {rss:,.0f} MiB at the end")


@dataclass(frozen=True, slots=True)
class Single:
    """Messages one by one, the payload as the body."""

    connections: int

    def __call__(self, bench: Bench) -> Measured:
        """Messages a second."""
        return published(bench, lambda _, prefix: Singles(prefix, self.connections), timed=True)


@dataclass(frozen=True, slots=True)
class Batched:
    """Batches over several connections, each with one of them in flight."""

    size: int
    form: str = MSGPACK
    connections: int = BATCH_CONNECTIONS

    def __call__(self, bench: Bench) -> Measured:
        """Messages a second."""
        return published(
            bench,
            lambda stream, prefix: Batches(stream, prefix, self.size, self.connections, self.form),
            timed=True,
        )


@dataclass(frozen=True, slots=True)
class BatchedWithIds:
    """Batches of 1,000 msgpack messages, each with an id of its own."""

    form: str = MSGPACK

    def __call__(self, bench: Bench) -> Measured:
        """Messages a second."""
        count = bench.scale.messages // 4 // FILL_BATCH
        return published(
            bench,
            lambda stream, prefix: Batches(
                stream, prefix, FILL_BATCH, BATCH_CONNECTIONS, self.form, count=count, ids=True
            ),
            timed=False,
        )


def held_kib_batches(bench: Bench) -> Measured:
    """Batches of 1,000 messages of 1 KiB for a long time, once: MB of payload a second.

    The stream keeps only a part of them, so that the disk does not fill.
    """
    stream, prefix = "BENCH", "bench"
    batches = Batches(
        stream, prefix, FILL_BATCH, BATCH_CONNECTIONS, payload_bytes=KIB_PAYLOAD_BYTES
    )
    with fresh_server(bench) as server:
        server.create_stream(stream, prefix, max_bytes=_HELD_MAX_BYTES)
        bench.patience.wait_for_quiet()
        load = Load(server.port, server.pid, batches, bench.scale.held_s, _WARM_S)
        driven = drive(bench, load)
        last_seq = server.call("GET", f"/v1/streams/{stream}")["state"]["last_seq"]
        if last_seq != driven.messages:
            raise BenchError(f"{driven.messages} were acknowledged, the last one is {last_seq}")
        rss = rss_bytes(server.pid) / _MIB
        disk = folder_bytes(bench.folder) / _MIB
    run = replace(driven.run, value=driven.run.value * KIB_PAYLOAD_BYTES / 1e6)
    note = (
        f"held for {bench.scale.held_s:.0f} s; max_bytes {_HELD_MAX_BYTES / _MIB:,.0f} MiB, so"
        f" that the disk does not fill; at the end server RSS {rss:,.0f} MiB, on disk"
        f" {disk:,.0f} MiB"
    )
    return Measured((run,), note)


def distinct_subjects(bench: Bench) -> Measured:
    """Memory of one subject: RSS before and after publishing to each of a million subjects."""
    count = bench.scale.messages // FILL_BATCH
    with fresh_server(bench) as server:
        fill(bench, server, "SAME", "same")
        before = rss_bytes(server.pid)
        server.create_stream("DISTINCT", "distinct")
        scripts = DistinctSubjects("DISTINCT", "distinct", count, FILL_CONNECTIONS)
        driven = drive(bench, Load(server.port, server.pid, scripts))
        server.check_stored("DISTINCT", driven.messages)
        after = rss_bytes(server.pid)
        state = server.call("GET", "/v1/streams/DISTINCT")["state"]
    if state["num_subjects"] != driven.messages:
        raise BenchError(f"{state['num_subjects']} subjects instead of {driven.messages}")
    per_subject = (after - before) / driven.messages
    note = f"{driven.run.value:,.0f} msg/s; RSS {before / _MIB:,.0f} to {after / _MIB:,.0f} MiB"
    return Measured((replace(driven.run, value=per_subject),), note)
