"""Commands to try, which work unchanged with the server of the demonstration."""

import os
import shlex
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from contrail_flights.stream import STREAM


@dataclass(frozen=True, slots=True)
class Suggestion:
    """A shell command, and a description of what it shows."""

    purpose: str
    command: str


_CONTRAIL: Final = Path(sys.executable).with_name("contrail")


def _program(path: Path) -> str:
    """The text with which a shell in this folder starts the program."""
    shown = os.path.relpath(path) if path.is_relative_to(Path.cwd()) else str(path)
    return shlex.quote(shown)


def suggestions(url: str) -> list[Suggestion]:
    """Commands to try next. Each one finds what it needs if they are run in this order."""
    stream = f"{url}/v1/streams/{STREAM}"
    # Each answer ends with a line feed, so that the prompt starts on a new line.
    get = "curl -sw '\\n'"
    python, contrail = _program(Path(sys.executable)), _program(_CONTRAIL)
    put = "curl -so /dev/null -X PUT -H 'Content-Type: application/json'"
    return [
        Suggestion("Show the stream's configuration and state", f"{get} {stream}"),
        Suggestion("Read the first flight of the year, as stored", f"{get} -i {stream}/messages/1"),
        Suggestion(
            "Read three flights from La Guardia to Atlanta",
            f"{get} '{stream}/messages?subject=flights.LGA.ATL.*&limit=3'",
        ),
        Suggestion(
            "Create a durable consumer for United's flights from Newark, and pull two",
            f'{put} {stream}/consumers/united -d \'{{"filter_subject": "flights.EWR.*.UA"}}\' && '
            f"{get} {stream}/consumers/united/next -H 'Content-Type: application/json' "
            """-d '{"batch": 2, "expires": "2s"}'""",
        ),
        Suggestion(
            "Create your own stream and publish to it",
            f'{put} {url}/v1/streams/NOTES -d \'{{"subjects": ["notes.>"]}}\' && '
            f"{get} {url}/v1/subjects/notes.hello/messages -d 'Hello, Contrail'",
        ),
        Suggestion(
            "Replay a range in bulk (Arrow, NDJSON or msgpack)",
            f"curl -sH 'Accept: application/x-ndjson' '{stream}/replay?from_seq=1&to_seq=3'",
        ),
        Suggestion(
            "Use the command line",
            f"{contrail} stream info {STREAM} --server {url} && "
            f"{contrail} pub notes.hello 'Hello again' --server {url}",
        ),
        Suggestion(
            "Use Python",
            f'{python} -c "from contrail_client import Contrail; '
            f"print(Contrail('{url}').get_stream('{STREAM}').state)\"",
        ),
    ]
