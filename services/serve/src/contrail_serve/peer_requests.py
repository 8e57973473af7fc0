"""Requests from node to node over one channel of the peer port, and their answers."""

import asyncio
import itertools
import secrets
import struct
from collections import Counter
from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from typing import Final

import structlog

from contrail_common import errors
from contrail_common.errors import ApiError
from contrail_link.tcp.refusals import decode_error, encode_error
from contrail_replicator.peers.frames import BODY_BYTES_MAX, Channel, Frame, FrameError
from contrail_replicator.peers.hub import PeerHub

_ASK: Final = 20
_ANSWER: Final = 21
_NO_GROUP: Final = 0
_HEAD: Final = struct.Struct("<QB")
_ANSWERED: Final = 0
_REFUSED: Final = 1
_ANSWER_S: Final = 10.0
"""Longer than a command for the meta group waits for a leader."""
_log: Final = structlog.get_logger("contrail.cluster")


@dataclass(frozen=True, slots=True)
class _Asked:
    peer: str
    answer: "asyncio.Future[bytes]"


class PeerRequests:
    """Sends the requests of this node, and answers those of others. Used on the event loop only.

    ``answer`` takes the body of a request and returns that of its answer, or raises ApiError, which
    the node that asked gets. At most ``open_max`` requests of one node to another are open.
    """

    def __init__(
        self,
        hub: PeerHub,
        channel: Channel,
        answer: Callable[[bytes], Awaitable[bytes]],
        *,
        open_max: int,
    ) -> None:
        self._hub = hub
        self._channel = channel
        self._answer = answer
        self._open_max = open_max
        # Own requests that have no answer yet, by number, and how many there are by node.
        self._asked: dict[int, _Asked] = {}
        self._open: Counter[str] = Counter()
        # Starts at random, so that no request gets an answer that an earlier process asked for.
        self._numbers = itertools.count(secrets.randbits(32))
        # Requests of others that are being answered, and how many there are by node.
        self._answering: set[asyncio.Task[None]] = set()
        self._taken: Counter[str] = Counter()
        hub.handle(channel, _ASK, self._take)
        hub.handle(channel, _ANSWER, self._settle)

    @property
    def bytes_max(self) -> int:
        """The most bytes that a request or an answer may have."""
        return BODY_BYTES_MAX[self._channel] - _HEAD.size

    async def ask(self, name: str, body: bytes) -> bytes:
        """Return a node's answer to a request.

        Raises the ApiError with which it refuses, OVERLOADED if too many requests are open,
        NOT_LEADER if the request was not sent, and OUTCOME_UNKNOWN if its answer does not come.
        """
        if len(body) > self.bytes_max:
            raise ValueError(f"a request of {len(body)} bytes; at most {self.bytes_max} are sent")
        if self._open[name] >= self._open_max:
            raise ApiError(errors.OVERLOADED, f"{name} has not answered yet", applied=False)
        number = next(self._numbers)
        answer: asyncio.Future[bytes] = asyncio.get_running_loop().create_future()
        self._asked[number] = _Asked(name, answer)
        self._open[name] += 1
        try:
            if not self._send(name, _ASK, number, 0, body):
                raise ApiError(errors.NOT_LEADER, applied=False)
            async with asyncio.timeout(_ANSWER_S):
                return await answer
        except TimeoutError:
            raise ApiError(errors.OUTCOME_UNKNOWN, f"{name} does not answer") from None
        finally:
            self._open[name] -= 1
            del self._asked[number]

    def _take(self, name: str, frame: Frame) -> None:
        number, _, body = _taken_apart(frame)
        if self._taken[name] >= self._open_max:
            refused = ApiError(errors.OVERLOADED, "too many requests are open", applied=False)
            self._send(name, _ANSWER, number, _REFUSED, encode_error(refused))
            return
        self._taken[name] += 1
        task = asyncio.ensure_future(self._reply(name, number, body))
        self._answering.add(task)
        task.add_done_callback(lambda done: self._answered(name, done))

    def _answered(self, name: str, done: "asyncio.Task[None]") -> None:
        self._answering.discard(done)
        self._taken[name] -= 1

    async def _reply(self, name: str, number: int, body: bytes) -> None:
        kind = _ANSWERED
        try:
            answer = await self._answer(body)
            if len(answer) > self.bytes_max:
                raise ValueError(f"an answer of {len(answer)} bytes")
        except ApiError as error:
            kind, answer = _REFUSED, encode_error(error)
        except Exception as error:
            _log.exception("request_of_peer_failed", peer=name)
            kind, answer = _REFUSED, encode_error(ApiError(errors.OUTCOME_UNKNOWN, repr(error)))
        self._send(name, _ANSWER, number, kind, answer)

    def _settle(self, name: str, frame: Frame) -> None:
        number, kind, body = _taken_apart(frame)
        asked = self._asked.get(number)
        if asked is None or asked.peer != name or asked.answer.done():
            return
        if kind == _ANSWERED:
            asked.answer.set_result(body)
        else:
            asked.answer.set_exception(decode_error(body))

    def _send(self, name: str, kind: int, number: int, outcome: int, body: bytes) -> bool:
        head = _HEAD.pack(number, outcome)
        return self._hub.send(name, self._channel, kind, _NO_GROUP, [head, body])


def _taken_apart(frame: Frame) -> tuple[int, int, bytes]:
    """Number, kind and body of a request or answer. Raises FrameError."""
    if len(frame.body) < _HEAD.size:
        raise FrameError("a request that is cut short")
    number, kind = _HEAD.unpack_from(frame.body)
    return number, kind, bytes(frame.body[_HEAD.size :])
