"""The transport of groups of one. Groups with several members supply their own."""

from contrail_replicator.ports import GroupEndpoint, Message


class NullTransport:
    """The transport of groups of one."""

    def attach(self, group: int, endpoint: GroupEndpoint) -> None:
        """Nothing is ever delivered."""

    def detach(self, group: int) -> None:
        """Nothing was delivered."""

    def send(self, group: int, peer: str, message: Message) -> None:
        """Raise RuntimeError: a group of one sends nothing."""
        raise RuntimeError(f"group {group} has no transport to reach {peer}")
