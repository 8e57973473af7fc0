"""Headers of many messages in columns.

There are two forms with the same methods. :class:`UniformHeaders` is for messages that all have the
same names with one value each, like most messages of one publisher. :class:`HeaderColumns` is for
all others.
"""

import re
from collections.abc import Sequence
from itertools import pairwise
from typing import Final

import msgspec
import numpy as np

from contrail_common.model import Headers
from contrail_common.texts import (
    I64Array,
    Texts,
    are_offsets,
    as_u32,
    cut,
    cut_offsets,
    gather,
    is_utf8,
    join_offsets,
    join_texts,
    lengths_of,
    offsets_of,
    pick,
)

HEADER_NAME_MAX: Final = 128
# A name must not end with an asterisk: in HTTP, `Msg-Header-<Name>*` is an encoded value (RFC
# 8187).
HEADER_NAME: Final = re.compile(r"[!#$%&'*+.^_`|~0-9A-Za-z-]{0,127}[!#$%&'+.^_`|~0-9A-Za-z-]")
# These would end a header line of HTTP, and let a value forge the next one.
BAD_HEADER_VALUE: Final = re.compile(r"[\x00\r\n]")

# As in NATS, where a header is a line: the colon, the space and the line break count too.
_VALUE_OVERHEAD = 4
_BAD_VALUE_BYTES: Final = re.compile(rb"[\x00\r\n]")


def can_be_sent(headers: "HeaderColumns | UniformHeaders") -> bool:
    """Return True if HTTP can carry all of ``headers``, whose offsets are valid."""
    columns = headers.nested()
    names = set(Texts(columns.name_offsets, columns.names).each())
    return all(map(HEADER_NAME.fullmatch, names)) and not _BAD_VALUE_BYTES.search(columns.texts)


def header_size(headers: Headers) -> int:
    """Return the bytes of headers for limits: name + value + 4 for each value."""
    total = 0
    for name, values in headers.items():
        name_bytes = len(name.encode())
        for value in values:
            total += name_bytes + len(value.encode()) + _VALUE_OVERHEAD
    return total


class HeaderColumns(msgspec.Struct, array_like=True, tag=1, gc=False):
    """Headers of ``n`` messages as nested offsets: message -> entries -> values -> text."""

    entry_offsets: bytes
    name_offsets: bytes
    value_offsets: bytes
    text_offsets: bytes
    names: bytes
    texts: bytes

    def message(self, position: int) -> Headers | None:
        """Return the headers of the message at ``position``, or None if it has none."""
        entry_offsets = as_u32(self.entry_offsets)
        start, stop = int(entry_offsets[position]), int(entry_offsets[position + 1])
        if start == stop:
            return None
        names = as_u32(self.name_offsets)[start : stop + 1].tolist()
        values = as_u32(self.value_offsets)[start : stop + 1].tolist()
        first = values[0]
        texts = as_u32(self.text_offsets)[first : values[-1] + 1].tolist()
        headers: Headers = {}
        for entry in range(stop - start):
            name = self.names[names[entry] : names[entry + 1]].decode()
            headers[name] = [
                self.texts[texts[value] : texts[value + 1]].decode()
                for value in range(values[entry] - first, values[entry + 1] - first)
            ]
        return headers

    def each(self) -> list[Headers | None]:
        """Return the headers of all messages, None for those that have none."""
        names = Texts(self.name_offsets, self.names).each()
        texts = Texts(self.text_offsets, self.texts).each()
        values = [
            texts[start:stop] for start, stop in pairwise(as_u32(self.value_offsets).tolist())
        ]
        return [
            dict(zip(names[start:stop], values[start:stop], strict=True)) if start < stop else None
            for start, stop in pairwise(as_u32(self.entry_offsets).tolist())
        ]

    def is_sound(self, count: int) -> bool:
        """Return True if the offsets fit each other, the texts and ``count`` messages."""
        entries = len(self.name_offsets) // 4 - 1
        values = len(self.text_offsets) // 4 - 1
        return (
            are_offsets(self.entry_offsets, count, entries)
            and are_offsets(self.name_offsets, entries, len(self.names))
            and are_offsets(self.value_offsets, entries, values)
            and are_offsets(self.text_offsets, values, len(self.texts))
            and is_utf8(self.names, self.name_offsets)
            and is_utf8(self.texts, self.text_offsets)
        )

    def sizes(self) -> I64Array:
        """Bytes that each message's headers count: name + value + 4 for each value."""
        value_offsets = as_u32(self.value_offsets).astype(np.int64)
        value_counts = np.diff(value_offsets)
        name_bytes = lengths_of(self.name_offsets)
        texts = as_u32(self.text_offsets).astype(np.int64)
        text_bytes = texts[value_offsets[1:]] - texts[value_offsets[:-1]]
        by_entry = np.concatenate(
            ([0], np.cumsum((name_bytes + _VALUE_OVERHEAD) * value_counts + text_bytes))
        )
        entry_offsets = as_u32(self.entry_offsets)
        sizes: I64Array = by_entry[entry_offsets[1:]] - by_entry[entry_offsets[:-1]]
        return sizes

    def size(self) -> int:
        """The sum of :meth:`sizes`."""
        return int(self.sizes().sum())

    def about(self) -> int:
        """About what :meth:`size` returns, without a look at the entries."""
        return len(self.names) + len(self.texts) + len(self.text_offsets)

    def slice(self, start: int, stop: int) -> "HeaderColumns | None":
        """Return the headers of the messages from ``start`` up to ``stop``, or None."""
        entry_offsets, first, last = cut_offsets(self.entry_offsets, start, stop)
        if first == last:
            return None
        name_offsets, names = cut(self.name_offsets, first, last, self.names)
        value_offsets, first, last = cut_offsets(self.value_offsets, first, last)
        text_offsets, texts = cut(self.text_offsets, first, last, self.texts)
        return HeaderColumns(entry_offsets, name_offsets, value_offsets, text_offsets, names, texts)

    def select(self, positions: I64Array) -> "HeaderColumns | None":
        """Return the headers of the messages at ``positions``, or None if they have none."""
        entry_offsets, entries = pick(self.entry_offsets, positions)
        if not len(entries):
            return None
        name_offsets, names = pick(self.name_offsets, entries)
        value_offsets, values = pick(self.value_offsets, entries)
        text_offsets, texts = pick(self.text_offsets, values)
        return HeaderColumns(
            entry_offsets,
            name_offsets,
            value_offsets,
            text_offsets,
            gather(self.names, names),
            gather(self.texts, texts),
        )

    def nested(self) -> "HeaderColumns":
        """Return the headers in this form."""
        return self


class UniformHeaders(msgspec.Struct, array_like=True, tag=2, gc=False):
    """Headers of ``n`` messages that all have the same ``names``, in this order (at least one).

    ``values`` holds one text for each name of the first message, then of the second, and so on.
    """

    names: Texts
    values: Texts

    def message(self, position: int) -> Headers | None:
        """Return the headers of the message at ``position``."""
        count = self.names.count
        values = self.values.slice(position * count, (position + 1) * count)
        return {name: [value] for name, value in zip(self.names.each(), values.each(), strict=True)}

    def each(self) -> list[Headers | None]:
        """Return the headers of all messages."""
        names, values = self.names.each(), self.values.each()
        count = len(names)
        return [
            {name: [value] for name, value in zip(names, values[at : at + count], strict=True)}
            for at in range(0, len(values), count)
        ]

    def is_sound(self, count: int) -> bool:
        """Return True if there are names, and each of ``count`` messages has a value for each."""
        names = len(self.names.offsets) // 4 - 1
        return names > 0 and self.names.is_sound(names) and self.values.is_sound(names * count)

    def sizes(self) -> I64Array:
        """Bytes that each message's headers count: name + value + 4 for each value."""
        names = len(self.names.offsets) // 4 - 1
        ends = as_u32(self.values.offsets)[::names].astype(np.int64)
        return ends[1:] - ends[:-1] + (len(self.names.heap) + _VALUE_OVERHEAD * names)

    def size(self) -> int:
        """The sum of :meth:`sizes`."""
        names = len(self.names.offsets) // 4 - 1
        messages = self.values.count // names
        fixed = len(self.names.heap) + _VALUE_OVERHEAD * names
        return len(self.values.heap) + messages * fixed

    def about(self) -> int:
        """Return :meth:`size`, which needs no look at the values."""
        return self.size()

    def column(self, number: int) -> Texts:
        """Return the values of the ``number``-th name, one for each message."""
        names = self.names.count
        if names == 1:
            return self.values
        return self.values.select(np.arange(number, self.values.count, names))

    def slice(self, start: int, stop: int) -> "UniformHeaders":
        """Return the headers of the messages from ``start`` up to ``stop``."""
        names = self.names.count
        return UniformHeaders(self.names, self.values.slice(start * names, stop * names))

    def select(self, positions: I64Array) -> "UniformHeaders":
        """Return the headers of the messages at ``positions``."""
        names = self.names.count
        indices = (positions[:, None] * names + np.arange(names)).ravel()
        return UniformHeaders(self.names, self.values.select(indices))

    def nested(self) -> HeaderColumns:
        """Return the same headers in the general form."""
        names = self.names.count
        count = self.values.count // names
        one_by_one = np.arange(count * names + 1, dtype=np.uint32)
        return HeaderColumns(
            entry_offsets=one_by_one[::names].tobytes(),
            name_offsets=offsets_of(np.tile(lengths_of(self.names.offsets), count), count * names),
            value_offsets=one_by_one.tobytes(),
            text_offsets=self.values.offsets,
            names=self.names.heap * count,
            texts=self.values.heap,
        )


AnyHeaders = HeaderColumns | UniformHeaders


def headers_in_columns(headers: Sequence[Headers | None]) -> AnyHeaders | None:
    """Return the headers of messages in columns, or None if no message has any."""
    first = headers[0] if headers else None
    if not first:
        return _nested(headers) if any(headers) else None
    names = list(first)
    texts: list[str] = []
    for each in headers:
        # The order counts too, because readers get the headers in the publisher's order.
        if not each or list(each) != names:
            return _nested(headers)
        for values in each.values():
            if len(values) != 1:
                return _nested(headers)
            texts += values
    return UniformHeaders(Texts.of(names), Texts.of(texts))


def one_header(name: str, values: Texts) -> AnyHeaders:
    """Return the headers of messages that have only this one, or none where the value is empty."""
    names = Texts.of([name])
    present = values.lengths() > 0
    if present.all():
        return UniformHeaders(names, values)
    count = int(np.count_nonzero(present))
    one_by_one = np.arange(count + 1, dtype=np.uint32)
    return HeaderColumns(
        entry_offsets=offsets_of(present.astype(np.uint32), values.count),
        name_offsets=(one_by_one * np.uint32(len(names.heap))).tobytes(),
        value_offsets=one_by_one.tobytes(),
        text_offsets=values.select(np.flatnonzero(present)).offsets,
        names=names.heap * count,
        texts=values.heap,
    )


def _nested(headers: Sequence[Headers | None]) -> HeaderColumns:
    entries = [entry for each in headers if each for entry in each.items()]
    names = Texts.of([name for name, _ in entries])
    texts = Texts.of([value for _, values in entries for value in values])
    return HeaderColumns(
        entry_offsets=offsets_of([len(each or ()) for each in headers], len(headers)),
        name_offsets=names.offsets,
        value_offsets=offsets_of([len(values) for _, values in entries], len(entries)),
        text_offsets=texts.offsets,
        names=names.heap,
        texts=texts.heap,
    )


def join_headers(parts: Sequence[tuple[AnyHeaders | None, int]]) -> AnyHeaders | None:
    """Join ``parts``, each given with its number of messages."""
    found = [headers for headers, _ in parts if headers is not None]
    if not found:
        return None
    uniform = [headers for headers in found if isinstance(headers, UniformHeaders)]
    # Otherwise use the general form: nothing is lost, and readers accept both.
    if len(uniform) == len(parts) and all(each.names == uniform[0].names for each in uniform):
        return UniformHeaders(uniform[0].names, join_texts([each.values for each in uniform]))
    zero = bytes(4)
    columns = [
        HeaderColumns(bytes(4 * (count + 1)), zero, zero, zero, b"", b"")
        if headers is None
        else headers.nested()
        for headers, count in parts
    ]
    return HeaderColumns(
        join_offsets([part.entry_offsets for part in columns]),
        join_offsets([part.name_offsets for part in columns]),
        join_offsets([part.value_offsets for part in columns]),
        join_offsets([part.text_offsets for part in columns]),
        b"".join([part.names for part in columns]),
        b"".join([part.texts for part in columns]),
    )
