"""``python -m tests.chaos [--minutes M] [--seed N] [--only kind,kind] [--keep FOLDER]``.

Prints what it does, the gaps between acks by kind of fault, and whether all promises were kept.
The status is 0 if they were. A seed repeats the same faults, at about the same times.
"""

import argparse
import contextlib
import random
import sys
import tempfile
from pathlib import Path

from tests.chaos import faults
from tests.chaos.run import Chaos

ROOT = Path(__file__).parents[2]


def main() -> int:
    """Run, and print; returns the exit status."""
    arguments = _arguments()
    print(f"seed {arguments.seed}", flush=True)
    with contextlib.ExitStack() as stack:
        folder = arguments.keep
        if folder is None:
            (ROOT / "build").mkdir(exist_ok=True)
            context = tempfile.TemporaryDirectory(prefix="chaos-", dir=ROOT / "build")
            folder = Path(stack.enter_context(context))
        chaos = Chaos(folder, arguments.seed, _say, arguments.only)
        report = chaos.run(60 * arguments.minutes)
    print("\n".join(["", *report.lines()]))
    if report.problems:
        only = f" --only {','.join(arguments.only)}" if arguments.only else ""
        print(
            f"\nrepeat with: python -m tests.chaos --minutes {arguments.minutes:g}"
            f" --seed {arguments.seed}{only}",
            file=sys.stderr,
        )
    return 1 if report.problems else 0


def _say(text: str) -> None:
    print(text, flush=True)


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m tests.chaos", description=__doc__)
    parser.add_argument("--minutes", type=float, default=10.0)
    parser.add_argument("--seed", type=int, default=random.SystemRandom().randrange(1_000_000))
    kinds = sorted({**faults.OF_ONE_NODE, **faults.OF_ALL})
    parser.add_argument(
        "--only", type=lambda text: text.split(","), default=[], help=f"of {', '.join(kinds)}"
    )
    parser.add_argument("--keep", type=Path, help="keep data and logs in this folder")
    return parser.parse_args()


if __name__ == "__main__":
    sys.exit(main())
