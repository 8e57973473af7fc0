"""``python -m tests.walkthrough``: one publish and one delivery of a real run, file by file."""

import asyncio
import os
import tempfile
from pathlib import Path

import structlog
from rich.console import Console
from rich.table import Table

from tests.walkthrough.tracing import Hop
from tests.walkthrough.walk import walk

ROOT = Path(__file__).parents[2]


def show(console: Console, title: str, hops: list[Hop]) -> None:
    """Print one table of hops."""
    table = Table(title=title, title_justify="left", box=None, pad_edge=False)
    table.add_column("", justify="right", style="dim")
    table.add_column("µs", justify="right")
    table.add_column("thread", style="dim", no_wrap=True)
    table.add_column("first call", style="cyan", overflow="fold")
    table.add_column("where", no_wrap=True)
    table.add_column("what the file is", overflow="fold")
    for number, hop in enumerate(hops, 1):
        where = f"{hop.file.relative_to(ROOT)}:{hop.line}"
        short = ".".join(hop.name.split(".")[-2:])
        table.add_row(
            str(number), f"{hop.after_us:,.0f}", hop.thread.partition("-")[0] or hop.thread,
            short, where, hop.about,
        )  # fmt: skip
    console.print(table)
    console.print()


def main() -> None:
    """Walk and print the hops."""
    structlog.configure(logger_factory=structlog.WriteLoggerFactory(open(os.devnull, "w")))  # noqa: SIM115
    with tempfile.TemporaryDirectory() as folder:
        walked = asyncio.run(walk(Path(folder) / "data"))
    console = Console(width=max(Console().width, 160), highlight=False)
    show(console, "One publish: POST /v1/subjects/tour.hello/messages", walked.published)
    show(
        console,
        "One delivery: POST .../consumers/walker/next, then .../ack (sync)",
        walked.delivered,
    )
    calls = walked.publish_calls
    console.print(f"one publish: {calls.calls} calls in {len(calls.files)} files")


if __name__ == "__main__":
    main()
