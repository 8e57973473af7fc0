"""The outcomes of one batch's parts, put together in the order of its messages."""

from collections.abc import Callable
from dataclasses import dataclass, field

from contrail_common.errors import ApiError
from contrail_common.texts import I64Array
from contrail_link.contract.publish import PubResult

PartOutcome = list[PubResult] | ApiError
"""The results of a part as runs, or why none of its messages was stored."""


@dataclass(slots=True, eq=False)
class Gathering:
    """Collects the outcomes of the parts, until the last of ``waiting`` has answered.

    ``refused`` are messages of no part, by position. ``done`` gets the results of ``count``
    messages as runs, or the error of the first part if all of them failed.
    """

    count: int
    refused: dict[int, PubResult]
    waiting: int
    done: Callable[[PartOutcome], None]
    _parts: list[tuple[I64Array, list[PubResult]]] = field(default_factory=list)
    _errors: list[ApiError] = field(default_factory=list)

    def settle(self, positions: I64Array, outcome: PartOutcome) -> None:
        """Set the outcome of the messages at ``positions``, which are one part."""
        if isinstance(outcome, ApiError):
            self._errors.append(outcome)
            lost = PubResult(0, code=outcome.spec.code, detail=outcome.detail, count=len(positions))
            outcome = [lost]
        self._parts.append((positions, outcome))
        self.waiting -= 1
        if not self.waiting:
            # If every part failed, the request failed. If only some did, each message has its own
            # outcome.
            failed = len(self._errors) == len(self._parts) and not self.refused
            self.done(self._errors[0] if failed else self.results())

    def results(self) -> list[PubResult]:
        """Return all outcomes in the order of the messages."""
        if len(self._parts) == 1 and not self.refused:
            return self._parts[0][1]
        by_position = dict(self.refused)
        for positions, runs in self._parts:
            each = [one for run in runs for one in run.each()]
            by_position.update(zip(positions.tolist(), each, strict=True))
        return [by_position[at] for at in range(self.count)]
