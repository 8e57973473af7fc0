"""The report: one HTML page that needs no network and runs no script. Pure.

All names in it may come from strangers. They are escaped, control characters are written out, and
the page forbids the browser to load or run anything.
"""

import re
from collections.abc import Iterable, Sequence
from html import escape
from importlib.resources import files
from itertools import dropwhile
from typing import Final

from contrail_client.cli import units
from contrail_client.cli.show import printable
from contrail_pipeline.bounds import Bounds
from contrail_pipeline.summary import bins, charts, wording
from contrail_pipeline.summary.figures import (
    Consumer,
    Content,
    Pattern,
    Percentiles,
    Spread,
    Subject,
    Summary,
    Timeline,
)

_POLICY: Final = "default-src 'none'; style-src 'unsafe-inline'"
_UNLIMITED: Final[Sequence[object]] = (-1, None, "", "0s", False, [], {})
_LATE_US: Final = bins.HOUR
"""From this age on, the oldest open message of a consumer is highlighted."""
_UNIT: Final = re.compile(r"(?<=\d) (?=%|[KMGTP]iB\b|B\b|[µm]?s\b)")
Row = Sequence[str]


def page(summary: Summary) -> str:
    """The whole report."""
    sections = [each for each in _sections(summary) if each[2]]
    links = "".join(f'<a href="#{anchor}">{title}</a>' for anchor, title, _ in sections)
    body = "".join(
        f'<section id="{anchor}"><h2>{title}</h2>{text}</section>'
        for anchor, title, text in sections
    )
    style = files(__package__).joinpath("report.css").read_text(encoding="utf-8")
    name = _text(summary.stream)
    return (
        '<!doctype html>\n<html lang="en"><head><meta charset="utf-8">'
        f'<meta http-equiv="content-security-policy" content="{_POLICY}">'
        '<meta name="viewport" content="width=device-width, initial-scale=1">'
        f"<title>Stream {name}</title><style>{style}</style></head><body>"
        f'<header><h1>Stream {name}</h1><p class="faint">{_about(summary)}</p></header>'
        f"<main>{_brief(summary)}{_tiles(summary)}"
        f'<nav aria-label="Sections">{links}</nav>{body}</main>'
        f"<footer>{_NOTES}</footer></body></html>\n"
    )


_NOTES: Final = (
    "<p>Sizes are those of payloads, without subjects and headers. Times are when the server "
    "stored a message, in UTC and to the microsecond. A percentile p90 is the value that 90 % do "
    "not exceed. KiB and MiB are 1,024 and 1,048,576 bytes.</p>"
)


def _text(name: str) -> str:
    return escape(printable(name))


def _sentence(text: str) -> str:
    """A sentence, in which no line ends between a number and its unit."""
    return _UNIT.sub("&nbsp;", _text(text))


def _code(name: str) -> str:
    return f"<code>{_text(name)}</code>"


def _about(summary: Summary) -> str:
    return f"{_range(summary.bounds)}, as of {wording.moment(summary.made_us)} UTC"


def _range(bounds: Bounds) -> str:
    parts = []
    if bounds.subjects:
        parts.append("on " + ", ".join(map(_code, bounds.subjects)))
    if bounds.from_seq is not None:
        parts.append(f"from sequence {bounds.from_seq:,}")
    if bounds.to_seq is not None:
        parts.append(f"to sequence {bounds.to_seq:,}")
    if bounds.start_time is not None:
        parts.append(f"from {_text(bounds.start_time)}")
    if bounds.end_time is not None:
        parts.append(f"before {_text(bounds.end_time)}")
    return "Messages " + " ".join(parts) if parts else "All messages"


def _brief(summary: Summary) -> str:
    lines = "".join(f"<li>{_sentence(each)}</li>" for each in wording.readings(summary))
    return f'<ul class="brief">{lines}</ul>'


def _tiles(summary: Summary) -> str:
    content = summary.content
    if content.first_us is None or content.last_us is None:
        return ""
    first, last = content.first_us, content.last_us
    tiles = [
        ("Messages", wording.count(content.messages), ""),
        ("Payload", wording.size(content.bytes), f"{wording.count(content.bytes)} bytes"),
        ("Subjects", wording.count(content.subject_count), ""),
        ("Average rate", wording.rate(content.messages, last - first), ""),
        ("First message", *_parted(first)),
        ("Last message", *_parted(last)),
        ("Consumers", wording.count(summary.consumer_count), ""),
    ]
    if len(content.shards) > 1:
        tiles.append(("Shards", wording.count(len(content.shards)), ""))
    shown = "".join(
        f"<div><dt>{name}</dt><dd>{value}{f'<small>{more}</small>' if more else ''}</dd></div>"
        for name, value, more in tiles
    )
    return f'<dl class="tiles">{shown}</dl>'


def _parted(us: int) -> tuple[str, str]:
    day, _, time = wording.moment(us).partition(", ")
    return time, f"{day}, UTC"


def _sections(summary: Summary) -> Iterable[tuple[str, str, str]]:
    content = summary.content
    yield "time", "Over time", _over_time(content, content.timeline)
    yield "subjects", "Subjects", _subjects(content)
    yield "gaps", "Time between messages", _gaps(content)
    yield "sizes", "Sizes", _sizes(content.sizes)
    yield "consumers", "Consumers", _consumers(summary)
    yield "headers", "Headers", _headers(content)
    yield "stream", "The stream", _stream(summary)


def _figure(title: str, reading: str, chart: str) -> str:
    return f"<figure><figcaption><b>{title}</b>{_sentence(reading)}</figcaption>{chart}</figure>"


def _over_time(content: Content, found: Timeline | None) -> str:
    if found is None:
        return ""
    width = wording.width(found.width_us)
    most = max(found.slices, key=lambda each: each.messages)
    largest = max(found.slices, key=lambda each: each.bytes)
    messages = charts.timeline(
        "Messages over time", found, [each.messages for each in found.slices], "messages",
        scale=bins.ticks, label=wording.short,
    )  # fmt: skip
    sizes = charts.timeline(
        "Bytes over time", found, [each.bytes for each in found.slices], "payload",
        scale=bins.size_ticks, label=wording.size,
    )  # fmt: skip
    return _figure(
        "Messages over time",
        f"The peak is {units.counted(most.messages, 'message')} per {width}, from "
        f"{wording.moment(most.start_us, found.width_us)} UTC on: "
        f"{wording.rate(most.messages, found.width_us)}.",
        messages,
    ) + _figure(
        "Bytes over time",
        f"The peak is {wording.size(largest.bytes)} of payload per {width}; a message has "
        f"{wording.size(content.bytes / content.messages)} on average.",
        sizes,
    )


def _subjects(content: Content) -> str:
    if not content.subjects:
        return ""
    tables = [_pattern_table(content.patterns, content)] if content.patterns else []
    shown, all_ = len(content.subjects), content.subject_count
    title = "All subjects" if shown == all_ else f"The {shown} subjects with most messages"
    tables.append(_subject_table(title, content.subjects, content))
    if {each.subject for each in content.largest} != {each.subject for each in content.subjects}:
        title = f"The {len(content.largest)} subjects with most bytes"
        tables.append(_largest_table(title, content.largest, content))
    return "".join(tables)


def _pattern_table(found: Sequence[Pattern], content: Content) -> str:
    grouped = sum(each.subjects for each in found)
    largest = "" if grouped == content.subject_count else "; the largest groups"
    most = found[0].messages
    return _table(
        f"{wording.count(content.subject_count)} subjects in groups{largest}",
        ("Subjects that match", "subjects", "messages", "share", "payload"),
        [
            (
                _code(each.pattern),
                wording.count(each.subjects),
                wording.count(each.messages),
                _share(each.messages, content.messages, most),
                wording.size(each.bytes),
            )
            for each in found
        ],
    )


def _subject_table(title: str, found: Sequence[Subject], content: Content) -> str:
    span = (content.last_us or 0) - (content.first_us or 0)
    near = span < bins.MINUTE
    most = found[0].messages
    return _table(
        title,
        ("Subject", "messages", "share", "rate", "payload", "first and last", "gap p50", "gap p99"),
        [
            (
                _code(each.subject),
                wording.count(each.messages),
                _share(each.messages, content.messages, most),
                wording.rate(each.messages, span),
                wording.size(each.bytes),
                f"{_time(each.first_us, near)}<br>{_time(each.last_us, near)}",
                *_two(each.gaps_us),
            )
            for each in found
        ],
    )


def _time(us: int, near: bool) -> str:
    """A time for a table: without the day if all are near."""
    text = wording.moment(us, bins.MS if near else bins.S)
    return text.partition(", ")[2] if near else text.rpartition(":")[0]


def _two(gaps: Percentiles | None) -> Row:
    return ("-", "-") if gaps is None else (wording.span(gaps.p50), wording.span(gaps.p99))


def _largest_table(title: str, found: Sequence[Subject], content: Content) -> str:
    return _table(
        title,
        ("Subject", "payload", "share", "messages", "mean size"),
        [
            (
                _code(each.subject),
                wording.size(each.bytes),
                _share(each.bytes, content.bytes, found[0].bytes),
                wording.count(each.messages),
                wording.size(each.bytes / each.messages),
            )
            for each in found
        ],
    )


def _gaps(content: Content) -> str:
    gaps = content.gaps_us
    if gaps is None:
        return ""
    together = sum(each.count for each in gaps.bins if each.low == 0)
    many = gaps.percentiles
    if together:
        said = (
            f"{wording.share(together, gaps.count)} of the messages have the same time as the one "
            "before: they were published in one batch, or in the same microsecond."
        )
    else:
        said = f"Half of the messages come within {wording.span(many.p50)} of the one before."
    if many.max:
        said += f" The longest pause is {wording.span(many.max)}."
    apart = list(dropwhile(lambda each: not (each.low and each.count), gaps.bins))
    chart = (
        charts.histogram(
            "Time between messages",
            apart,
            "time since the message before" + (", where it is not 0" if together else ""),
            wording.span,
            "messages",
        )
        if apart
        else ""
    )
    return _figure("Time from one message of the stream to the next", said, chart) + _percentiles(
        "Times between messages", gaps, wording.span
    )


def _sizes(sizes: Spread | None) -> str:
    if sizes is None:
        return ""
    many = sizes.percentiles
    if sizes.min == many.max:
        return f"<p>All payloads have {wording.size(many.max)}.</p>"
    chart = charts.histogram("Sizes", sizes.bins, "size of the payload", wording.size, "messages")
    return _figure(
        "Size of payloads",
        f"Half of the payloads have at most {wording.size(many.p50)}; one in a hundred has more "
        f"than {wording.size(many.p99)}, and the largest has {wording.size(many.max)}.",
        chart,
    ) + _percentiles("Payloads", sizes, wording.size)


def _percentiles(title: str, found: Spread, label: wording.Label) -> str:
    many = found.percentiles
    values = (found.min, found.mean, many.p50, many.p90, many.p99, many.max)
    return _table(
        "Percentiles",
        (title, "least", "mean", "p50", "p90", "p99", "largest"),
        [(wording.count(found.count), *map(label, values))],
    )


def _consumers(summary: Summary) -> str:
    if not summary.consumers:
        return ""
    shown, all_ = len(summary.consumers), summary.consumer_count
    title = "All consumers" if shown == all_ else f"The {shown} of {all_:,} that are most behind"
    return (
        "<p>The backlog of each consumer in the whole stream, when the summary began.</p>"
        + _table(
            title,
            (
                "Consumer",
                "to deliver",
                "unacknowledged",
                "redelivered",
                "floor distance",
                "oldest open",
                "last delivery",
            ),
            [_consumer(each, summary.made_us) for each in summary.consumers],
        )
        + "<p class=faint>Floor distance: sequences from the last one below which everything is "
        "acknowledged to the last one that was delivered. Oldest open: the age of the oldest "
        "message that is not acknowledged.</p>"
    )


def _consumer(found: Consumer, made_us: int) -> Row:
    filters = ", ".join(map(_code, found.filters))
    last = None if found.last_us is None else max(0, made_us - found.last_us)
    return (
        _code(found.name) + (f'<br><span class="faint">{filters}</span>' if filters else ""),
        wording.count(found.pending),
        wording.count(found.ack_pending),
        wording.count(found.redelivered),
        wording.count(found.floor_distance),
        _age(found.oldest_age_us),
        "never" if last is None else f"{wording.span(last)} ago",
    )


def _age(us: int | None) -> str:
    if us is None:
        return "-"
    text = wording.span(us)
    return f'<span class="late">{text}</span>' if us >= _LATE_US else text


def _headers(content: Content) -> str:
    if not content.messages:
        return ""
    if not content.headers:
        return "<p>No message has a header.</p>"
    most = content.headers[0].messages
    left_out = content.header_count - len(content.headers)
    more = f", without {left_out:,} that are rarer" if left_out else ""
    return (
        f"<p>{wording.share(content.with_headers, content.messages)} of the messages have "
        f"headers.</p>"
        + _table(
            f"Names of headers{more}",
            ("Header", "messages", "share"),
            [
                (
                    _code(each.name),
                    wording.count(each.messages),
                    _share(each.messages, content.messages, most),
                )
                for each in content.headers
            ],
        )
    )


def _stream(summary: Summary) -> str:
    settings = {
        name: value
        for name, value in summary.config.items()
        if value not in _UNLIMITED and name not in ("name", "metadata", "consumer_limits")
    }
    now_ns = summary.made_us * 1_000
    tables = [
        _table(
            "Configuration, without what is off or unlimited",
            ("Field", "Value"),
            [(_code(name), _value(name, value, now_ns)) for name, value in settings.items()],
        ),
        _table(
            "State of the whole stream when the summary began",
            ("Field", "Value"),
            [
                (_code(name), _value(name, value, now_ns))
                for name, value in summary.state.items()
                if value is not None
            ],
        ),
    ]
    if len(summary.content.shards) > 1:
        tables.append(_shard_table(summary.content))
    return "".join(tables)


def _value(name: str, value: object, now_ns: int) -> str:
    return _text(units.field(name, value, now_ns))


def _shard_table(content: Content) -> str:
    most = max(each.messages for each in content.shards)
    return _table(
        "Shards",
        ("Shard", "messages", "share", "payload", "first sequence", "last sequence"),
        [
            (
                str(each.shard),
                wording.count(each.messages),
                _share(each.messages, content.messages, most),
                wording.size(each.bytes),
                wording.count(each.first_seq),
                wording.count(each.last_seq),
            )
            for each in content.shards
        ],
    )


def _share(part: int, whole: int, most: int) -> str:
    """A share, above a bar that compares it with the largest one of the table."""
    width = 100 * part / most if most else 0
    return (
        f'{_text(wording.share(part, whole))}<span class="share" aria-hidden="true">'
        f'<i style="width:{width:.1f}%"></i></span>'
    )


def _table(title: str, columns: Sequence[str], rows: Sequence[Row]) -> str:
    """A table of HTML; the first column has names, and figures stand to the right."""
    kind = "text" if columns[-1] == "Value" else "figure"
    head = "".join(
        f'<th scope="col"{f" class={kind}" if at else ""}>{name}</th>'
        for at, name in enumerate(columns)
    )
    body = "".join(
        f'<tr><th scope="row">{name}</th>'
        + "".join(f'<td class="{kind}">{each}</td>' for each in values)
        + "</tr>"
        for name, *values in rows
    )
    return (
        f"<h3>{title}</h3>"
        f'<div class="scroll"><table aria-label="{title}"><thead><tr>{head}</tr></thead>'
        f"<tbody>{body}</tbody></table></div>"
    )
