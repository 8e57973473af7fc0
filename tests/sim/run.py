"""Run seeds: `python -m tests.sim.run FIRST COUNT`, with PYTHONHASHSEED=0 so that each repeats.

Each seed has a process of its own, a fork of this one, so that nothing of another seed is in it.
"""

import argparse
import gc
import io
import multiprocessing
import os
import sys
import tempfile
import time
from collections.abc import Sequence
from multiprocessing import connection
from pathlib import Path
from typing import Final, cast

import structlog

from tests.sim import checks
from tests.sim.batches import Batches
from tests.sim.cluster import simulated
from tests.sim.faults import KINDS, Nemesis
from tests.sim.load import Clients
from tests.sim.loop import SimLoop
from tests.sim.plants import PLANTS, planted
from tests.sim.queues import Queues
from tests.sim.removals import Removals
from tests.sim.subject_keys import SealedRemovals

_now = time.perf_counter
_COLLECTED_S: Final = 2.0


def run_seed(
    seed: int,
    seconds: float,
    folder: Path,
    *,
    faults: Sequence[str] = (),
    verbose: bool = False,
    digest: bool = False,
) -> list[str]:
    """Run one history; return what is wrong. ``digest`` prints what tells it from others."""
    with simulated(seed, folder, 5 if seed % 4 == 0 else 3) as cluster:
        _collect_garbage(cluster.loop)
        cluster.start()
        clients = Clients(cluster, Removals, SealedRemovals, Queues, Batches)
        nemesis = Nemesis(cluster, faults)
        try:
            clients.begin()
            happening = cluster.loop.create_task(nemesis.run())
            cluster.loop.run_for(seconds)
            nemesis.stop()
            cluster.until(happening.done)
            happening.result()
            cluster.until(lambda: all(one.runs for one in cluster.nodes.values()))
            cluster.loop.run_for(1.0)
            found = checks.problems(cluster, clients)
            if digest:
                print(f"seed {seed}: digest {checks.digest(cluster)}")
            return found
        except Exception as error:
            if verbose:
                raise
            return [f"it ended with {error!r}", *cluster.loop.errors]
        finally:
            if verbose:
                print(*nemesis.done, sep="\n")
                journal = clients.history.journal
                print(f"{journal.acknowledged} acknowledged, {journal.unknown} doubted")
                for name, node in cluster.nodes.items():
                    print(name, node.process.dead, node.process.paused, node.begun)


def _collect_garbage(loop: SimLoop) -> None:
    """Collect garbage at fixed times: what is closed then belongs to the history."""
    gc.collect()
    loop.call_later(_COLLECTED_S, _collect_garbage, loop)


def _report(seed: int, given: argparse.Namespace) -> bool:
    """Run one seed, and print what is wrong; whether nothing is."""
    out = sys.stderr if given.verbose else io.StringIO()
    structlog.configure(logger_factory=structlog.PrintLoggerFactory(out))
    gc.disable()
    begun = _now()
    with tempfile.TemporaryDirectory() as folder, planted(given.plant):
        how = {"faults": given.faults, "verbose": given.verbose, "digest": given.digest}
        found = run_seed(seed, given.seconds, Path(folder), **how)
    if found:
        print(f"seed {seed} ({_now() - begun:.1f} s):", *found, sep="\n  ")
        options = f" --seconds {given.seconds:g}"
        options += f" --plant '{given.plant}'" if given.plant else ""
        options += f" --faults {' '.join(given.faults)}" if given.faults else ""
        print(f"  again: PYTHONHASHSEED=0 python -m tests.sim.run {seed}{options} --verbose")
    elif given.verbose:
        print(f"seed {seed}: {_now() - begun:.1f} s")
    return not found


def _run_all(given: argparse.Namespace) -> tuple[int, list[int]]:
    """Run the seeds, some at a time; return how many ended, and those that failed."""
    fork = multiprocessing.get_context("fork")
    waiting = list(range(given.first, given.first + given.count))
    running: dict[int, tuple[int, multiprocessing.process.BaseProcess]] = {}
    failed: list[int] = []
    done = 0
    gc.freeze()
    while running or (waiting and not (failed and given.stop)):
        while waiting and len(running) < given.jobs and not (failed and given.stop):
            seed = waiting.pop(0)
            child = fork.Process(target=_end, args=(seed, given))
            child.start()
            running[child.sentinel] = seed, child
        for sentinel in connection.wait(list(running)):
            seed, child = running.pop(cast(int, sentinel))
            child.join()
            done += 1
            if child.exitcode:
                failed.append(seed)
    return done, failed


def _end(seed: int, given: argparse.Namespace) -> None:
    right = _report(seed, given)
    sys.stdout.flush()
    # Threads of simulated processes that were killed may still wait.
    os._exit(not right)


def main() -> int:
    """Run the seeds that are named."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("first", type=int)
    parser.add_argument("count", type=int, nargs="?", default=1)
    parser.add_argument("--seconds", type=float, default=20.0)
    parser.add_argument("--plant", choices=list(PLANTS), default="", help="a fault to be found")
    parser.add_argument("--faults", nargs="+", choices=KINDS, default=(), help="only these")
    parser.add_argument("--jobs", type=int, default=1, help="seeds at a time")
    parser.add_argument("--stop", action="store_true", help="end with the first seed that fails")
    parser.add_argument("--digest", action="store_true", help="print what tells histories apart")
    parser.add_argument("--verbose", action="store_true")
    given = parser.parse_args()
    if os.environ.get("PYTHONHASHSEED") != "0":
        sys.exit("set PYTHONHASHSEED=0: otherwise a seed gives another history each time")
    done, failed = _run_all(given)
    which = f"; not {', '.join(map(str, sorted(failed)))}" if failed else ""
    print(f"{done - len(failed)} of {done} seeds kept every promise{which}")
    return min(len(failed), 1)


if __name__ == "__main__":
    sys.exit(main())
