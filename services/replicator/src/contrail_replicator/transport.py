"""The transport of groups of one. Groups with several members supply their own."""

from contrail_replicator.messages import Message
from contrail_replicator.ports import GroupEndpoint


class NullTransport:
    """A transport without peers."""

    def attach(self, group: int, endpoint: GroupEndpoint) -> None:
        """Do nothing: no message ever arrives."""

    def detach(self, group: int) -> None:
        """Do nothing: no message was delivered before."""

    def send(self, group: int, peer: str, message: Message) -> None:
        """Raise RuntimeError: a group of one sends nothing."""
        raise RuntimeError(f"group {group} has no transport to reach {peer}")
