"""One run: random faults under load, then the verdict."""

import random
import statistics
import time
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field
from pathlib import Path
from typing import Final

from contrail_client import Contrail, ContrailError
from tests.chaos import faults
from tests.chaos.changes import Changes
from tests.chaos.clients import Clients
from tests.chaos.cluster import ChaosCluster
from tests.chaos.plain import Plain
from tests.chaos.queues import Queues
from tests.chaos.registers import Registers
from tests.chaos.replicas import differences
from tests.cluster import verdict
from tests.cluster.load import ALL, STREAM, Load
from tests.cluster.test_kill_under_load import read_all

REPLICAS: Final = 3
_SETTLE_S: Final = 60.0
_CALM_S: Final = (0.5, 3.0)
_LAST_S: Final = {"pause": (0.5, 12.0), "kill": (0.2, 5.0), "enospc": (0.5, 4.0)}
_LASTS_S: Final = (0.5, 6.0)


@dataclass(slots=True)
class Done:
    """A fault that was done, and the longest time without an ack around it."""

    kind: str
    began_s: float
    ended_s: float = 0.0
    gap_s: float = 0.0


@dataclass
class Report:
    """What a run did and found."""

    seed: int
    done: list[Done] = field(default_factory=list)
    counts: dict[str, tuple[int, int, int]] = field(default_factory=dict)
    """Acknowledged, unknown and refused requests by kind of client."""
    problems: list[str] = field(default_factory=list)

    def lines(self) -> list[str]:
        """The report as text."""
        kinds: dict[str, list[float]] = {}
        for one in self.done:
            kinds.setdefault(one.kind, []).append(one.gap_s)
        lines = [f"{'fault':22} {'times':>5}   gaps between acks: p50      p99      max"]
        for kind, gaps in sorted(kinds.items()):
            high = (
                statistics.quantiles(gaps, n=100, method="inclusive")[98] if gaps[1:] else gaps[0]
            )
            lines.append(
                f"{kind:22} {len(gaps):5} {statistics.median(gaps):22.2f} s {high:6.2f} s"
                f" {max(gaps):6.2f} s"
            )
        lines.append("")
        for name, (acked, unknown, refused) in self.counts.items():
            lines.append(f"{name:12} {acked:7} acked {unknown:6} unknown {refused:6} refused")
        lines += ["", *(self.problems or ["all promises were kept"])]
        return lines


class Chaos:
    """Faults that follow from a seed, under load."""

    def __init__(
        self,
        folder: Path,
        seed: int,
        say: Callable[[str], None] = print,
        kinds: Sequence[str] = (),
    ) -> None:
        self.report = Report(seed)
        self._chance = random.Random(seed)
        self._say = say
        self._kinds = kinds
        self._begun_s = time.monotonic()
        self._cluster = ChaosCluster(folder, random.Random(f"{seed} cluster"))
        self._load: Load
        self._clients: list[Clients]

    def run(self, seconds: float) -> Report:
        """Do faults for so long, then check everything."""
        with ExitStack() as stack:
            stack.enter_context(self._cluster)
            urls, seed = self._cluster.urls, self.report.seed
            self._load = Load(urls, seed, REPLICAS)
            self._clients = [
                kind(urls, seed, REPLICAS) for kind in (Registers, Plain, Queues, Changes)
            ]
            self._load.prepare()
            with Contrail(urls[0]) as client:
                for clients in self._clients:
                    clients.prepare(client)
            self._load.start()
            stack.callback(self._load.abandon)
            for clients in self._clients:
                stack.callback(clients.stop)
                clients.start()
            end_s = time.monotonic() + seconds
            while time.monotonic() < end_s and self._step():
                pass
            self._finish()
        self._judge_replicas()
        return self.report

    # Faults --------------------------------------------------------------------------------------

    def _step(self) -> bool:
        """One fault, and what follows; False if the cluster did not recover."""
        wait_some(self._chance, _CALM_S)
        kind, fault, name = self._choice()
        done = Done(kind, time.monotonic())
        self.report.done.append(done)
        try:
            with faults.done(fault, self._cluster, name) as text:
                self._say(f"{time.monotonic() - self._begun_s:7.2f} s  {kind}: {text}")
                base = kind.partition(" ")[0]
                wait_some(self._chance, _LAST_S.get(base, _LASTS_S))
        except Exception as error:
            done.ended_s = time.monotonic()
            self.report.problems.append(f"no recovery from {kind}: {error!r}")
            return False
        done.ended_s = time.monotonic()
        recovered = self.wait_until_acked()
        self._measure(done)
        if not recovered:
            self.report.problems.append(f"no progress after {kind}: {text}")
        if ended := self._cluster.ended():
            self.report.problems += [f"a process ended: {one}" for one in ended]
            recovered = False
        if self._load.errors or any(clients.errors for clients in self._clients):
            recovered = False
        return recovered

    def _choice(self) -> tuple[str, faults.Fault, str]:
        kinds = {**faults.OF_ONE_NODE, **faults.OF_ALL}
        if not self._cluster.disks:
            kinds = {kind: one for kind, one in kinds.items() if kind not in faults.NEED_A_DISK}
        if self._kinds:
            kinds = {kind: one for kind, one in kinds.items() if kind in self._kinds}
        kind = self._chance.choice(sorted(kinds))
        leader = self._cluster.leader(STREAM)
        if kind in faults.OF_ALL:
            return kind, kinds[kind], leader
        if self._chance.random() < 0.6:
            return f"{kind} leader", kinds[kind], leader
        return f"{kind} follower", kinds[kind], self._cluster.other_node(leader)

    def wait_until_acked(self) -> bool:
        """Wait until every kind of client goes on."""
        deadline_s = time.monotonic() + _SETTLE_S
        wanted = [(clients, len(clients.acked_s) + 3) for clients in self._clients]
        if not self._load.journal.wait_for_acknowledged(
            self._load.journal.acknowledged + 30, _SETTLE_S
        ):
            return False
        while any(len(clients.acked_s) < count for clients, count in wanted):
            if time.monotonic() > deadline_s:
                return False
            time.sleep(0.05)
        return True

    def _measure(self, done: Done) -> None:
        """The longest time without an ack of the load, from the fault to the recovery."""
        acked_s = self._load.journal.acknowledged_s[:]
        last_s = time.monotonic()
        times = [at for at in acked_s if at < last_s]
        gaps = [
            later - max(earlier, done.began_s)
            for earlier, later in zip(times, [*times[1:], last_s], strict=True)
            if later > done.began_s
        ]
        done.gap_s = max(gaps, default=last_s - done.began_s)

    # Verdict -------------------------------------------------------------------------------------

    def _finish(self) -> None:
        report, load = self.report, self._load
        for clients in self._clients:
            clients.stop()
        load.finish()
        for clients in self._clients:
            clients.finish()
        report.problems += [f"load: {error!r}" for error in load.errors]
        report.counts["load"] = (load.journal.acknowledged, load.journal.unknown, 0)
        with Contrail(self._cluster.urls[0]) as client:
            stored, replayed = read_all(client), list(client.replay(STREAM))
            found = verdict.problems(load.journal, stored, replayed, eager_consumer=ALL)
            report.problems += [f"load: {problem}" for problem in found]
            for clients in self._clients:
                name = clients.stream.lower()
                report.counts[name] = (len(clients.acked_s), clients.unknown, clients.refused)
                report.problems += [f"{name}: {problem}" for problem in clients.errors]
                try:
                    found = clients.verdict(client)
                except ContrailError as error:
                    found = [f"cannot be read: {error}"]
                report.problems += [f"{name}: {problem}" for problem in found[:5]]
        statuses = self._cluster.stop()
        report.problems += [
            f"{name} ended with {status}" for name, status in statuses.items() if status
        ]

    def _judge_replicas(self) -> None:
        folders = {
            name: Path(node.settings["data_dir"]) for name, node in self._cluster.nodes.items()
        }
        self.report.problems += differences(folders)


def wait_some(chance: random.Random, between_s: tuple[float, float]) -> None:
    """Let a part of the plan last: what a fault does to the load shows only with time."""
    time.sleep(chance.uniform(*between_s))
