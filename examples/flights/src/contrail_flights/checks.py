"""The checks of the demonstration: figures of the CSV against those of the service and Spark."""

from collections.abc import Sequence
from dataclasses import dataclass

from contrail_client import ConsumerInfo
from contrail_flights.tally import Tally


class DisagreementError(RuntimeError):
    """Messages that were published, delivered or read differ from the CSV."""


@dataclass(frozen=True, slots=True)
class Check:
    """A figure that must be the same on both sides."""

    what: str
    expected: str
    found: str

    @property
    def agrees(self) -> bool:
        """Whether both sides have the same figure."""
        return self.expected == self.found

    def __str__(self) -> str:
        but = "" if self.agrees else f", but it has to be {self.expected}"
        return f"{self.what}: {self.found}{but}"


@dataclass(frozen=True, slots=True)
class Received:
    """The messages that a consumer got of its route, those ``expected``, and those left."""

    how: str
    expected: Tally
    found: Tally
    consumer: ConsumerInfo


def check_all(
    whole: Tally, published: Tally | None, received: Sequence[Received], read: Tally
) -> list[Check]:
    """All checks of a run; ``published`` is None if an earlier run has published."""
    checks = [] if published is None else [Check("published", str(whole), str(published))]
    for each in received:
        left = _left(each.consumer.num_pending, each.consumer.num_ack_pending)
        checks.append(Check(each.how, str(each.expected), str(each.found)))
        checks.append(Check(f"left of the flights {each.how}", _left(0, 0), left))
    return [*checks, Check("read by Spark", str(whole), str(read))]


def raise_disagreements(checks: Sequence[Check]) -> None:
    """Raise DisagreementError with all checks that fail, if there are any."""
    if wrong := [str(check) for check in checks if not check.agrees]:
        raise DisagreementError("; ".join(wrong))


def _left(pending: int, unacknowledged: int) -> str:
    return f"{pending:,} not delivered and {unacknowledged:,} not acknowledged"
