"""The declaration of how a method of the link is called in another process.

The TCP client and server take names, argument types and result types from the declaration itself.
"""

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from enum import Enum
from typing import Any, Final, TypeVar

_F = TypeVar("_F", bound=Callable[..., Any])
_MARK: Final = "__remote__"


class OnLoss(Enum):
    """The outcome of a request that was sent and not answered before its connection ended."""

    REPEAT = "safe to repeat: the request changes nothing"
    REFUSE = "safe to refuse: storage undoes it, or delivers its messages again"
    UNKNOWN = "outcome unknown: the request may have been applied"


REPEAT: Final = OnLoss.REPEAT
REFUSE: Final = OnLoss.REFUSE
UNKNOWN: Final = OnLoss.UNKNOWN


class Goal(Enum):
    """The node of a cluster that answers a request. All others refuse it with NOT_LEADER."""

    LEADER = "the leader of the stream"
    META = "the leader of the meta group"
    ANY = "any node"
    TOKEN = "the node that gave the token"
    ALL = "all nodes together"


@dataclass(frozen=True, slots=True)
class Route:
    """The way to the node that answers. ``key`` names the argument with the stream or the token.

    It may be a field of an argument, such as ``request.stream``.
    """

    goal: Goal
    key: str = ""


def leader_of(key: str) -> Route:
    """Return the route to the leader of the stream that this argument names."""
    return Route(Goal.LEADER, key)


META: Final = Route(Goal.META)
ANY: Final = Route(Goal.ANY)
ALL: Final = Route(Goal.ALL)
TOKEN: Final = Route(Goal.TOKEN, "token")


@dataclass(frozen=True, slots=True)
class Remote:
    """The part of a declaration that its annotations do not say.

    ``number`` identifies the method on the wire. It is never used again for another method, so that
    processes of different versions cannot confuse two of them. ``wait_ns`` returns how long
    the caller of a request lets storage wait; a method without it is answered as soon as possible.
    """

    number: int
    on_loss: OnLoss
    wait_ns: Callable[..., int] | None
    route: Route = META


def remote(
    number: int, on_loss: OnLoss, *, to: Route, wait_ns: Callable[..., int] | None = None
) -> Callable[[_F], _F]:
    """Declare that a method of a link can be called from another process: see :class:`Remote`."""

    def mark(method: _F) -> _F:
        setattr(method, _MARK, Remote(number, on_loss, wait_ns, to))
        return method

    return mark


def declared(link: type) -> Iterator[tuple[Callable[..., Any], Remote]]:
    """Return the remote methods of a protocol, with those of its bases."""
    for name in dir(link):
        method = getattr(link, name)
        if hasattr(method, _MARK):
            yield method, getattr(method, _MARK)
