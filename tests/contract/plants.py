"""Servers whose short ways differ from the declared routes, each in one way that must be found.

``python -m tests.contract.plants FAULT serve ...`` runs one.
"""

import re
import runpy
import sys
from collections.abc import Callable
from typing import Any, Final

from msgspec.structs import replace

from contrail_api.publishing.single import SinglePublish
from contrail_common.model import PublishMessage
from contrail_edge.direct import DirectExchange
from contrail_edge.direct_reads import DirectRead
from contrail_edge.http.requests import Request
from contrail_edge.http.responses import Response, header_lines
from contrail_edge.known_heads import KnownHeads
from tests.contract.twin import slow_down

_send, _read, _split = DirectExchange._send, DirectRead.__call__, KnownHeads.split


def _answering(change: Callable[[Response], Response]) -> Callable[..., None]:
    def send(self: DirectExchange, answer: Response) -> None:
        _send(self, change(answer))

    return send


def _another_status(answer: Response) -> Response:
    return replace(answer, status=200) if answer.status == 201 else answer


def _lost_header(answer: Response) -> Response:
    left = [one for one in answer.wire_headers() if one[0] != b"durability"]
    return replace(answer, lines=header_lines(left) or b"", headers=[])


def _lost_field(answer: Response) -> Response:
    return replace(answer, body=answer.body.replace(b',"num_pending":0', b""))


def _unchecked_subject(self: SinglePublish, request: Request, payload: bytes) -> PublishMessage:
    return PublishMessage(request.path_values["subject"], None, payload)


def _unchecked_limit(self: DirectRead, request: Request, body: bytes, reply: Any) -> None:
    request.query_string = re.sub(rb"&?limit=0", b"", request.query_string)
    _read(self, request, body, reply)


_answers: dict[bytes, Response] = {}


def _cached(self: DirectRead, request: Request, body: bytes, reply: Any) -> None:
    """Keep answers, and never hear of the end of a stream."""

    def keep(answer: Any) -> None:
        if isinstance(answer, Response) and not request.query_string:
            _answers[request.raw_path] = answer
        reply(answer)

    found = None if request.query_string else _answers.get(request.raw_path)
    if found is None:
        _read(self, request, body, keep)
    else:
        reply(found)


_bodies: dict[bytes, bytes] = {}


def _first_body(self: KnownHeads, data: bytes) -> Any:
    """Take the first body with a known head for all of them."""
    found = _split(self, data)
    if found is None or found[0].target is None:
        return found
    head = data[: len(data) - len(found[2])]
    return (*found[:2], _bodies.setdefault(head, found[2]))


def _first_query(self: KnownHeads, data: bytes) -> Any:
    """Take the query that a known head came with first for all of them."""
    found = _split(self, data)
    if found is None or found[0].target is not None:
        return found
    known, part, body = found
    query = known.scope["query_string"]
    return known, part.partition(b"?")[0] + b"?" * bool(query) + query, body


PLANTS: Final[dict[str, tuple[type, str, Callable[..., Any]]]] = {
    "another status": (DirectExchange, "_send", _answering(_another_status)),
    "a lost header": (DirectExchange, "_send", _answering(_lost_header)),
    "a lost field": (DirectExchange, "_send", _answering(_lost_field)),
    "a subject that is not checked": (SinglePublish, "_message", _unchecked_subject),
    "a limit that is not checked": (DirectRead, "__call__", _unchecked_limit),
    "a cache of a deleted stream": (DirectRead, "__call__", _cached),
    "the body of another request": (KnownHeads, "split", _first_body),
    "the query of another request": (KnownHeads, "split", _first_query),
}


if __name__ == "__main__":
    owner, name, value = PLANTS[sys.argv.pop(1)]
    setattr(owner, name, value)
    slow_down()
    runpy.run_module("contrail_serve", run_name="__main__", alter_sys=True)
