"""Acknowledgements over HTTP: a request has signed tokens, and the answer a result for each."""

from collections.abc import Iterator, Sequence
from typing import Final

import msgspec

from contrail_common import errors
from contrail_common.ack_tokens import AckTokens
from contrail_common.errors import ApiError
from contrail_edge.http.problems import Problem, problem, result_problem
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
    ack_delay_ns,
    check_ack_count,
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
            raise ApiError(
                errors.BATCH_TOO_LARGE,
                f"a request must not contain more than {ACKS_MAX} acks",
                applied=False,
            )
        opened = await in_turns(self._open(stream, consumer, acks))
        items = [item for item in opened if isinstance(item, AckItem)]
        if items:
            outcomes = iter(await self._acknowledge(stream, consumer, items, sync=sync))
        else:
            # Every token was refused here. Ask storage, so that an unknown consumer is still a 404.
            await self._link.consumer_info(stream, consumer)
            outcomes = iter([])
        return await in_turns(_outcomes(opened, outcomes))

    def _open(
        self, stream: str, consumer: str, acks: Sequence[AckRequest]
    ) -> Steps[list[AckItem | ApiError]]:
        open_token = self._tokens.opener(stream, consumer)
        delays_ns = []
        # All delays first: an invalid one refuses the request before anything is acknowledged.
        for at, ack in enumerate(acks):
            delays_ns.append(ack_delay_ns(ack, f"acks/{at}"))
            yield
        opened: list[AckItem | ApiError] = []
        for ack, delay_ns in zip(acks, delays_ns, strict=True):
            yield
            try:
                address = open_token(ack.token)
            except ApiError as error:
                opened.append(error)
                continue
            opened.append(
                AckItem(
                    address.shard_id,
                    address.consumer_id,
                    address.epoch,
                    address.seq,
                    ack.kind,
                    delay_ns,
                    ack.reason or "",
                )
            )
        return opened

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


def _outcomes(
    opened: list[AckItem | ApiError], answered: Iterator[AckResult]
) -> Steps[list[AckOutcome]]:
    found = []
    for item in opened:
        if isinstance(item, ApiError):
            found.append(AckOutcome(problem=problem(item)))
        else:
            found.append(_outcome(next(answered)))
        yield
    return found


def _outcome(result: AckResult) -> AckOutcome:
    if result.code:
        return AckOutcome(problem=result_problem(result.code, result.detail))
    return _ACKED
