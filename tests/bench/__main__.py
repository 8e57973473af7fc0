"""``python -m tests.bench [--quick] [--cases a,b] [--json FILE] [--patience SECONDS]``.

A full run takes some minutes and writes its figures into docs/benchmarks.md. Its status is 0 if
everything was measured, even if aims were missed.

``--cluster`` measures a cluster of three nodes instead, beside one node. That takes a quarter of an
hour, and writes its own section.

``--scale`` measures one node with many streams, consumers, subjects and sockets instead. In full
size that takes a quarter of an hour or more and some GB of memory and disk. A run in full size
writes the figures of its section.
"""

import argparse
import contextlib
import multiprocessing
import sys
import tempfile
from collections.abc import Iterator
from concurrent.futures import ProcessPoolExecutor
from dataclasses import replace
from pathlib import Path
from typing import Final

from tests.bench.cases import CASES, CLUSTER, ONE_NODE, PROFILED, with_references
from tests.bench.figures import FULL, QUICK, Bench, BenchError, Measured
from tests.bench.patience import Patience
from tests.bench.profiles import profile_of
from tests.bench.report import (
    CLUSTERED,
    FIGURES,
    SCALE,
    STAGED,
    Report,
    circumstances,
    now,
    write_into,
)
from tests.bench.scale import ScaleRun, Sizes
from tests.bench.turns import measured_in_turns

_SIZES: Final = ("streams", "consumers", "subjects", "sockets")
ROOT: Final = Path(__file__).parents[2]
DOCUMENT: Final = ROOT / "docs" / "benchmarks.md"


def main() -> int:
    """Measure and report; returns the exit status."""
    arguments = _arguments()
    if arguments.scale:
        return _scale(Sizes(**{name: getattr(arguments, name) for name in _SIZES}))
    names = with_references(arguments.cases or list(CLUSTER if arguments.cluster else ONE_NODE))
    results: dict[str, Measured | None] = {}
    command = " ".join(["python -m tests.bench", *sys.argv[1:]])
    report = Report(CASES, results, command, now())
    failed = _measure(names, arguments, results, report)
    if arguments.json is not None:
        arguments.json.write_text(report.as_json(), encoding="utf-8")
    if failed:
        print(f"failed: {', '.join(failed)}", file=sys.stderr)
        return 1
    if not (arguments.quick or arguments.cases):
        write_into(DOCUMENT, report.document(), CLUSTERED if arguments.cluster else FIGURES)
        if not arguments.cluster:
            write_into(DOCUMENT, report.stage_table(), STAGED)
        print(f"written to {DOCUMENT.relative_to(ROOT)}")
    return 0


def _measure(
    names: list[str],
    arguments: argparse.Namespace,
    results: dict[str, Measured | None],
    report: Report,
) -> list[str]:
    """Fill ``results``; returns the names of the cases that could not be measured."""
    scale = QUICK if arguments.quick else FULL
    failed: list[str] = []
    with _means() as (folder, worker):
        bench = Bench(folder, worker, scale, Patience(arguments.patience))
        for name in names:
            try:
                results[name] = measured_in_turns(CASES[name], CASES, bench)
                print(report.line(name), flush=True)
                _profile(name, bench, results)
                for line in report.stages(name, arguments.functions):
                    print(line, flush=True)
            except (BenchError, OSError) as error:
                failed.append(name)
                print(f"{CASES[name].title:58} FAILED: {error}", flush=True)
    return failed


def _profile(name: str, bench: Bench, results: dict[str, Measured | None]) -> None:
    measured = results[name]
    if measured is not None and name in PROFILED:
        profile = profile_of(CASES[name], bench, measured)
        results[name] = replace(measured, profile=profile)


def _scale(sizes: Sizes) -> int:
    begun = now()
    with _means() as (folder, worker):
        run = ScaleRun(folder, worker, sizes)
        try:
            run.run()
        except (BenchError, OSError) as error:
            print(f"failed: {error}", file=sys.stderr)
            return 1
    if sizes == Sizes():
        figures = [*circumstances(begun, "python -m tests.bench --scale"), "", run.table()]
        write_into(DOCUMENT, "\n".join(figures), SCALE)
        print(f"written to {DOCUMENT.relative_to(ROOT)}")
    return 0


@contextlib.contextmanager
def _means() -> Iterator[tuple[Path, ProcessPoolExecutor]]:
    """An empty folder on the disk of the checkout, and the process of the load generator."""
    # The temporary folder of the system may be in memory.
    parent = ROOT / "build"
    parent.mkdir(exist_ok=True)
    spawn = multiprocessing.get_context("spawn")
    with (
        tempfile.TemporaryDirectory(prefix="bench-", dir=parent) as folder,
        ProcessPoolExecutor(1, spawn) as worker,
    ):
        yield Path(folder), worker


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m tests.bench", description=__doc__)
    parser.add_argument("--quick", action="store_true", help="one short run of each case")
    parser.add_argument(
        "--cases", type=_names, help=f"only these and what stands beside them: {', '.join(CASES)}"
    )
    parser.add_argument(
        "--patience",
        type=float,
        default=0.0,
        metavar="SECONDS",
        help="wait up to so long in all for other processes to be quiet, and repeat what they"
        " disturbed (default: measure at once)",
    )
    parser.add_argument(
        "--functions",
        type=int,
        default=0,
        metavar="N",
        help="below each stage its N functions that take most CPU",
    )
    parser.add_argument("--json", type=Path, metavar="FILE", help="write everything as JSON")
    parser.add_argument("--scale", action="store_true", help="measure one node with much of all")
    parser.add_argument("--cluster", action="store_true", help="measure a cluster of three nodes")
    full = Sizes()
    for name in _SIZES:
        default = getattr(full, name)
        parser.add_argument(
            f"--{name}", type=int, default=default, help=f"with --scale (default: {default:,})"
        )
    return parser.parse_args()


def _names(text: str) -> list[str]:
    names = text.split(",")
    unknown = [name for name in names if name not in CASES]
    if unknown:
        raise argparse.ArgumentTypeError(f"unknown case: {', '.join(unknown)}")
    return names


if __name__ == "__main__":
    sys.exit(main())
