"""The nodes of a cluster, and bounded memories of what was learned about them."""

from collections.abc import Mapping
from typing import Final, Generic, Protocol, TypeVar

from contrail_link.contract import StorageLink
from contrail_link.tcp.channel import Channel

_V = TypeVar("_V")

ENTRIES_MAX: Final = 65_536


class Node(Protocol):
    """A storage node. A link that cannot reach it refuses at once, without effect."""

    @property
    def name(self) -> str:
        """Its name, or "" until it is known."""
        ...

    @property
    def link(self) -> StorageLink:
        """The link to it."""
        ...

    @property
    def channels(self) -> Mapping[str, Channel]:
        """The connections to it, by their purpose."""
        ...


class OwnNode:
    """The node of this process."""

    def __init__(self, name: str, link: StorageLink) -> None:
        self.name = name
        self.link = link
        self.channels: Mapping[str, Channel] = {}


class Learned(Generic[_V]):
    """A memory of at most ``entries_max`` values; the oldest key makes room.

    A value may be out of date: the node that is asked because of it then refuses.
    """

    def __init__(self, entries_max: int = ENTRIES_MAX) -> None:
        self._entries_max = entries_max
        # Oldest key first.
        self._values: dict[str, _V] = {}
        self.get = self._values.get
        """Return the value of a key, or None."""

    def note(self, key: str, value: _V) -> None:
        """Remember ``value`` for ``key``."""
        values = self._values
        if key not in values and len(values) >= self._entries_max:
            del values[next(iter(values))]
        values[key] = value

    def drop(self, key: str, value: _V) -> None:
        """Forget ``value`` for ``key``, unless another value was noted since."""
        if self._values.get(key) is value:
            del self._values[key]

    def __len__(self) -> int:
        return len(self._values)
