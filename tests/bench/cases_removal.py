"""Removal: erasing until the receipt is done, and streams that acks remove messages from."""

from dataclasses import dataclass
from time import monotonic
from typing import Final

from tests.bench.figures import PULLED_MAX, Bench, BenchError, Measured, Run
from tests.bench.http_scripts import Pulls
from tests.bench.load import Load
from tests.bench.patience import repeat
from tests.bench.processes import Usage, wait_until
from tests.bench.server import Server, drive, fill, fresh_server, publish_batches

_STREAM: Final = "BENCH"
_PREFIX: Final = "bench"
_ERASE_TIMEOUT_S: Final = 300.0
_POSITIONS: Final = 10


def erase(bench: Bench) -> Measured:
    """Seconds from the request to erase one message until its receipt says done."""
    with fresh_server(bench) as server:
        fill(bench, server, _STREAM, _PREFIX)

        def once(number: int) -> Run:
            seq = (number + 1) * bench.scale.messages // _POSITIONS
            before = Usage.now(server.pid)
            _erase(server, seq)
            after = Usage.now(server.pid)
            server.check_stored(_STREAM, bench.scale.messages - number - 1)
            return before.run(after, 1, value=after.at_s - before.at_s)

        runs = repeat(bench, once)
    return Measured(runs, note=f"{bench.scale.messages:,} messages")


def _erase(server: Server, seq: int) -> None:
    deadline = monotonic() + _ERASE_TIMEOUT_S
    receipt = server.call("POST", f"/v1/streams/{_STREAM}/erase?wait=30s", {"seqs": [seq]})
    while receipt["status"] != "done":
        if monotonic() > deadline:
            raise BenchError(f"erasing took more than {_ERASE_TIMEOUT_S:.0f} s: {receipt}")
        receipt = server.call("GET", f"/v1/erasures/{receipt['id']}?wait=30s")
    if receipt["messages"] != 1:
        raise BenchError(f"not one message was erased: {receipt}")


@dataclass(frozen=True, slots=True)
class PullAway:
    """Pulls of 100 with the acks of the last one, from a stream that removes acked messages."""

    retention: str
    batch: int = 100

    def __call__(self, bench: Bench) -> Measured:
        """Messages acknowledged a second."""
        with fresh_server(bench) as server:
            runs = repeat(bench, lambda number: self._pulled(bench, server, number))
        return Measured(runs, note="nothing left at the end")

    def _pulled(self, bench: Bench, server: Server, number: int) -> Run:
        stream, prefix = f"{_STREAM}{number}", f"{_PREFIX}{number}"
        messages = min(bench.scale.messages, PULLED_MAX)
        server.create_stream(stream, prefix, retention=self.retention)
        server.call("PUT", f"/v1/streams/{stream}/consumers/C", {})
        publish_batches(bench, server, stream, prefix, messages)
        server.check_stored(stream, messages)
        scripts = Pulls(stream, "C", messages, self.batch, connections=1)
        driven = drive(bench, Load(server.port, server.pid, scripts))
        if driven.messages != messages:
            raise BenchError(f"{driven.messages} of {messages} were acknowledged")

        def is_empty() -> bool:
            state = server.call("GET", f"/v1/streams/{stream}")["state"]
            return bool(state["messages"] == 0)

        wait_until(is_empty, "removing what was acknowledged")
        return driven.run
