"""A leader's attempt to make another member the leader."""

from dataclasses import dataclass


@dataclass(slots=True)
class Handover:
    """Waits until the target has the whole log; then asks it to start an election at once.

    Nothing is appended meanwhile. It ends with the leadership, or without success at `deadline`.
    """

    target: str
    deadline: float
    """Seconds on the group's clock."""
    next_request: float = float("-inf")
    """When the target is asked, or asked again."""

    def is_due(self, now: float, target_index: int, last_index: int) -> bool:
        """Whether to ask the target now; it has the log durably up to `target_index`."""
        return target_index >= last_index and now >= self.next_request
