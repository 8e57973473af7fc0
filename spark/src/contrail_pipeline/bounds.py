"""The part of a stream or lake that a job reads: as options of commands and of the data source."""

from typing import Final

import msgspec

from contrail_client.cli.ending import Misuse
from contrail_common.subjects import filter_problem

_FLAGS: Final = {
    "subject:": "--subject:",
    "startingSequence": "--from-seq",
    "endingSequence": "--to-seq",
    "startingTimestamp": "--start-time",
    "endingTimestamp": "--end-time",
}
"""The options of commands for those of the data source."""


class Bounds(msgspec.Struct, frozen=True, omit_defaults=True):
    """The part that was asked for; without any of it, everything."""

    subjects: tuple[str, ...] = ()
    from_seq: int | None = None
    to_seq: int | None = None
    start_time: str | None = None
    end_time: str | None = None

    def check(self) -> None:
        """Raise Misuse for a subject that is not valid.

        The option of the data source separates subjects by spaces, and without any it selects all.
        """
        for each in self.subjects:
            if problem := filter_problem(each):
                raise Misuse(f"--subject {each!r}: {problem}")

    def options(self) -> dict[str, str]:
        """The options of the data source for it."""
        given = {
            "subject": " ".join(self.subjects) or None,
            "startingSequence": self.from_seq,
            "endingSequence": self.to_seq,
            "startingTimestamp": self.start_time,
            "endingTimestamp": self.end_time,
        }
        return {name: str(value) for name, value in given.items() if value is not None}


def in_flags(text: str) -> str:
    """An error of the data source, with the options of the command instead of its own."""
    text = text.removeprefix("option ")
    for name, flag in _FLAGS.items():
        text = text.replace(name, flag)
    return text
