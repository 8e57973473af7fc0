"""Acknowledgements over HTTP: a request has signed tokens, and the answer a result for each."""

from collections.abc import Sequence
from typing import Final

import msgspec

from contrail_common import errors
from contrail_common.ack_tokens import AckHead, AckTokens, TokenOpener
from contrail_common.errors import ApiError
from contrail_edge.http.problems import Problem, invalid_field, problem, result_problem
from contrail_edge.http.requests import Request
from contrail_edge.http.responses import Answer, json_response
from contrail_edge.http.settings import EdgeSettings
from contrail_edge.http.steps import Steps
from contrail_edge.http.turns import in_turns
from contrail_edge.inputs.json_body import decode_json
from contrail_edge.inputs.negotiation import JSON_TYPE, acceptable, content_type
from contrail_gateway.core.pull_rules import (
    ACKS_BYTES_MAX,
    ACKS_MAX,
    AckBody,
    AckRequest,
    check_ack,
    check_ack_count,
    too_many_acks,
)
from contrail_link.contract.consume import AckItem, AckResult, ConsumeLink


class AckOutcome(msgspec.Struct, frozen=True):
    """``ok`` if the acknowledgement was accepted, otherwise a ``problem``."""

    ok: bool | msgspec.UnsetType = msgspec.UNSET
    """True if the acknowledgement was accepted."""
    problem: Problem | msgspec.UnsetType = msgspec.UNSET
    """Why the acknowledgement was refused."""


class AckResults(msgspec.Struct):
    """The result of each acknowledgement, in order."""

    results: list[AckOutcome]
    """Result of each acknowledgement, in order."""


_STEP: Final = 64
"""Tokens that are opened in one step, which takes half a millisecond at most."""
_ACKED: Final = AckOutcome(ok=True)
_decoder: Final = msgspec.json.Decoder(AckBody)


class Acknowledger:
    """Applies acknowledgements to a consumer."""

    def __init__(self, link: ConsumeLink, tokens: AckTokens, settings: EdgeSettings) -> None:
        self._link = link
        self._tokens = tokens
        self._body_bytes_max = min(ACKS_BYTES_MAX, settings.body_bytes_max)

    async def ack(self, request: Request) -> Answer:
        """``POST .../ack``."""
        acceptable(request.headers.get(b"accept"), (JSON_TYPE,))
        content_type(request.headers.get(b"content-type"), (JSON_TYPE,))
        raw = await request.body(self._body_bytes_max)
        check_ack_count(raw)
        body = decode_json(_decoder, raw)
        stream, consumer = request.path_values["stream"], request.path_values["consumer"]
        results = await self.apply(stream, consumer, body.acks, sync=body.sync)
        return json_response(200, AckResults(results))

    async def apply(
        self, stream: str, consumer: str, acks: Sequence[AckRequest], *, sync: bool
    ) -> list[AckOutcome]:
        """Acknowledge, and return the result of each of ``acks``.

        Raises ApiError if none of them could be tried.
        """
        if len(acks) > ACKS_MAX:
            raise too_many_acks()
        opened = await in_turns(_opened(self._tokens.opener(stream, consumer), acks))
        if opened.items:
            answered = await self._acknowledge(stream, consumer, opened.items, sync=sync)
        else:
            # Every token was refused here. Ask storage, so that an unknown consumer is still a 404.
            await self._link.consumer_info(stream, consumer)
            answered = []
        outcomes = list(map(_outcome, answered))
        return [
            AckOutcome(problem=problem(at)) if isinstance(at, ApiError) else outcomes[at]
            for at in opened.found
        ]

    async def _acknowledge(
        self, stream: str, consumer: str, items: list[AckItem], *, sync: bool
    ) -> list[AckResult]:
        try:
            return await self._link.acknowledge(stream, consumer, items, sync)
        except ApiError as error:
            # The tokens are genuine, so the consumer existed and has been deleted.
            if error.spec is not errors.CONSUMER_NOT_FOUND:
                raise
            return [AckResult(errors.TOKEN_STALE.code, "the consumer was deleted") for _ in items]


class _Opened(msgspec.Struct):
    """Acknowledgements for storage, and where each one of a request is in ``items``.

    Consecutive ones of one head are one item. ``found`` has the refusal of a token that was not
    opened.
    """

    items: list[AckItem]
    found: list[int | ApiError]


def _opened(opener: TokenOpener, acks: Sequence[AckRequest]) -> Steps[_Opened]:
    delays_ns = []
    # All are checked first: an invalid one refuses the request before anything is acknowledged.
    for at, ack in enumerate(acks):
        delays_ns.append(check_ack(ack, f"acks/{at}"))
        if at % _STEP == _STEP - 1:
            yield
    opened = _Opened([], [])
    last: tuple[object, ...] = ()
    count = 0
    for at, (ack, delay_ns) in enumerate(zip(acks, delays_ns, strict=True)):
        if at % _STEP == _STEP - 1:
            yield
        try:
            head, seq = opener.open(ack.token)
            seqs = [seq] if seq is not None else _named(head, ack.ranges)
        except ApiError as error:
            opened.found.append(error)
            continue
        count += len(seqs)
        if count > ACKS_MAX:
            raise too_many_acks()
        kind = (id(head), ack.kind, delay_ns, ack.reason)
        if kind == last:
            opened.items[-1].seqs.extend(seqs)
        else:
            address = (head.shard_id, head.consumer_id, head.epoch)
            opened.items.append(AckItem(*address, seqs, ack.kind, delay_ns, ack.reason or ""))
            last = kind
        opened.found.append(len(opened.items) - 1)
    return opened


def _named(head: AckHead, ranges: list[tuple[int, int]] | None) -> list[int]:
    """Return the sequences in ``ranges`` of positions of a head; all of them without ranges."""
    end = len(head)
    if ranges is None:
        ranges = [(0, end - 1)]
    if ranges and ranges[-1][1] >= end:
        raise invalid_field("ranges", f"the token is of {end} messages")
    return [seq for first, last in ranges for seq in head.seqs(first, last)]


def _outcome(result: AckResult) -> AckOutcome:
    if result.code:
        return AckOutcome(problem=result_problem(result.code, result.detail))
    return _ACKED
