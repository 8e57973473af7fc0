"""The short form of a summary for a terminal."""

from typing import Final

from contrail_client.cli import show
from contrail_client.cli.units import Figure
from contrail_pipeline.summary import wording
from contrail_pipeline.summary.figures import Spread, Subject, Summary

ROWS_MAX: Final = 10


def print_tables(summary: Summary) -> None:
    """Print the sentences of the report, and its most important tables."""
    for each in wording.readings(summary):
        show.console.print(show.printable(each), markup=False, soft_wrap=True)
    content = summary.content
    if content.patterns:
        show.table(
            ["subjects that match", "subjects", "messages", "share", "payload"],
            [
                (
                    each.pattern,
                    each.subjects,
                    each.messages,
                    Figure(wording.share(each.messages, content.messages)),
                    Figure(wording.size(each.bytes)),
                )
                for each in content.patterns[:ROWS_MAX]
            ],
        )
    if content.subjects:
        columns = ["subject", "messages", "share", "payload", "gap p50", "gap p99"]
        rows = [_subject(each, content.messages) for each in content.subjects[:ROWS_MAX]]
        show.table(columns, rows)
    spreads = [
        _spread("size of payloads", content.sizes, wording.size),
        _spread("time between messages", content.gaps_us, wording.span),
    ]
    if shown := [each for each in spreads if each]:
        show.table(["", "p50", "p90", "p99", "max"], shown)
    if summary.consumers:
        show.table(
            ["consumer", "to deliver", "unacknowledged", "redelivered", "oldest open"],
            [
                (
                    each.name,
                    each.pending,
                    each.ack_pending,
                    each.redelivered,
                    Figure("-" if each.oldest_age_us is None else wording.span(each.oldest_age_us)),
                )
                for each in summary.consumers[:ROWS_MAX]
            ],
        )


def _subject(found: Subject, all_messages: int) -> list[object]:
    gaps = found.gaps_us
    return [
        found.subject,
        found.messages,
        Figure(wording.share(found.messages, all_messages)),
        Figure(wording.size(found.bytes)),
        Figure("-" if gaps is None else wording.span(gaps.p50)),
        Figure("-" if gaps is None else wording.span(gaps.p99)),
    ]


def _spread(name: str, found: Spread | None, label: wording.Label) -> list[object]:
    if found is None:
        return []
    many = found.percentiles
    return [name, *(Figure(label(each)) for each in (many.p50, many.p90, many.p99, many.max))]
