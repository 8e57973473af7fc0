"""The methods of ``StorageLink`` on the wire, made from their declarations."""

import inspect
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from types import NoneType
from typing import Any, Final, Generic, TypeVar, get_origin, get_type_hints

import msgspec

from contrail_common import errors
from contrail_common.columns.message_batch import MessageBatch
from contrail_common.errors import ApiError
from contrail_common.model import PublishMessage
from contrail_link.contract import StorageLink
from contrail_link.contract.consume import AckResult, ConsumerHold, PullResult
from contrail_link.contract.publish import PublishAck, PublishOutcome
from contrail_link.contract.remote import UNKNOWN, Remote, declared
from contrail_link.tcp.refusals import WireError, api_error

_R = TypeVar("_R")


class NodeIdentity(msgspec.Struct, frozen=True):
    """What a storage node says of itself to each client. Fields may be added at the end."""

    name: str = ""


class EachOutcome(msgspec.Struct, array_like=True, frozen=True):
    """Outcome of the messages at these positions of a request: one of the two fields is set."""

    positions: list[int]
    ack: PublishAck | None = None
    error: WireError | None = None

    @property
    def outcome(self) -> PublishOutcome:
        """The ack or the refusal."""
        if self.ack is not None:
            return self.ack
        return ApiError(errors.INTERNAL) if self.error is None else api_error(self.error)


_REPLICA: Final = "replica"

encode: Final = msgspec.msgpack.Encoder().encode


class Method(Generic[_R]):
    """One method.

    ``streams``: the result only says that a stream of chunks begins. ``may_wait``: storage may take
    as long as the caller allows, and the request can be cancelled.
    """

    def __init__(self, name: str, remote: Remote, arguments: Sequence[Any], result: Any) -> None:
        self.name = name
        self.number = remote.number
        self.on_loss = remote.on_loss
        self.streams = result is ConsumerHold or get_origin(result) is AsyncIterator
        self.may_wait = self.streams or remote.wait_ns is not None
        self.arguments = msgspec.msgpack.Decoder(tuple[tuple(arguments)])  # type: ignore[misc]
        self.result: msgspec.msgpack.Decoder[_R] = msgspec.msgpack.Decoder(
            NoneType if self.streams else result
        )
        self._wait_ns = remote.wait_ns

    def wait_ns(self, arguments: Sequence[Any]) -> int:
        """Return how long the caller of a request with these arguments lets storage wait."""
        return 0 if self._wait_ns is None else self._wait_ns(*arguments)


class DeclaredMethod(Method[Any]):
    """A method that is sent and answered as it is declared, by a coroutine."""

    def __init__(self, declaration: Callable[..., Any], remote: Remote) -> None:
        hints = get_type_hints(declaration)
        result = hints.pop("return")
        super().__init__(declaration.__name__, remote, tuple(hints.values()), result)
        self.declaration = declaration
        self.route = remote.route
        _, *parameters = inspect.signature(declaration).parameters.values()
        self._signature = inspect.Signature(parameters)
        argument, _, self._key_field = remote.route.key.partition(".")
        names = list(hints)
        # Position of the argument with the key of the route; None if it has no key.
        self._key_at = names.index(argument) if argument else None
        # Position of the argument that names a replica, or has a field for it; None without one.
        self._replica_at = names.index(_REPLICA) if _REPLICA in names else None
        self._has_field = False
        for at, kind in enumerate(hints.values()):
            if _REPLICA in getattr(kind, "__struct_fields__", ()):
                self._replica_at, self._has_field = at, True

    def in_order(self, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> tuple[Any, ...]:
        """Return the arguments of a call in the order of their declaration, with the defaults."""
        # The usual call: binding a signature is slow.
        if len(args) == len(self._signature.parameters):
            return args
        bound = self._signature.bind(*args, **kwargs)
        bound.apply_defaults()
        return bound.args

    def replica(self, arguments: Sequence[Any]) -> str:
        """Return the name of the node that has to read its own copy, or ""."""
        if self._replica_at is None:
            return ""
        found = arguments[self._replica_at]
        name: str = found.replica if self._has_field else found
        return name

    def key(self, arguments: Sequence[Any]) -> str:
        """Return the stream or token by which a request with these arguments is routed, or ""."""
        if self._key_at is None:
            return ""
        found = arguments[self._key_at]
        key: str = getattr(found, self._key_field) if self._key_field else found
        return key


DECLARED: Final = [DeclaredMethod(method, remote) for method, remote in declared(StorageLink)]
BY_NAME: Final = {method.name: method for method in DECLARED}
PULL: Final[Method[PullResult]] = BY_NAME["pull"]
ACKNOWLEDGE: Final[Method[list[AckResult]]] = BY_NAME["acknowledge"]

# A list and a batch are both arrays in msgpack, so ``publish_then`` has a number for each.
PUBLISH: Final[Method[PublishAck]] = Method(
    "publish", Remote(7, UNKNOWN, None), (str, list[PublishMessage]), PublishAck
)
PUBLISH_BATCH: Final[Method[PublishAck]] = Method(
    "publish_batch", Remote(8, UNKNOWN, None), (str, MessageBatch), PublishAck
)

# ``publish_each_then`` is answered in chunks, since each stream answers when it can.
PUBLISH_EACH: Final[Method[EachOutcome]] = Method(
    "publish_each", Remote(11, UNKNOWN, None), (list[PublishMessage],), EachOutcome
)

METHODS: Final[dict[int, Method[Any]]] = {
    method.number: method for method in (*DECLARED, PUBLISH, PUBLISH_BATCH, PUBLISH_EACH)
}
