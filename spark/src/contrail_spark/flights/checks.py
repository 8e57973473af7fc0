"""What the demonstration holds itself to: the CSV's figures beside those of service and Spark."""

from collections.abc import Sequence
from dataclasses import dataclass

from contrail_client import ConsumerInfo
from contrail_spark.flights.tally import Tally


class DisagreementError(RuntimeError):
    """Something that was published, delivered or read is not what the CSV holds."""


@dataclass(frozen=True, slots=True)
class Check:
    """One thing that has to be the same on both sides."""

    what: str
    expected: str
    found: str

    @property
    def agrees(self) -> bool:
        """True when both sides say the same."""
        return self.expected == self.found

    def __str__(self) -> str:
        but = "" if self.agrees else f", but it has to be {self.expected}"
        return f"{self.what}: {self.found}{but}"


def check_all(
    whole: Tally,
    route: Tally,
    published: Tally | None,
    delivered: Tally,
    consumer: ConsumerInfo,
    read: Tally,
) -> list[Check]:
    """Every check of a run; ``published`` is None when an earlier run has published."""
    checks = [] if published is None else [Check("published", str(whole), str(published))]
    return [
        *checks,
        Check("delivered on the route", str(route), str(delivered)),
        Check(
            "left on the route", _left(0, 0), _left(consumer.num_pending, consumer.num_ack_pending)
        ),
        Check("read by Spark", str(whole), str(read)),
    ]


def raise_disagreements(checks: Sequence[Check]) -> None:
    """DisagreementError with every check that fails, when one does."""
    if wrong := [str(check) for check in checks if not check.agrees]:
        raise DisagreementError("; ".join(wrong))


def _left(pending: int, unacknowledged: int) -> str:
    return f"{pending:,} not delivered and {unacknowledged:,} not acknowledged"
