"""One page of streams, or of events, from the pages of several nodes."""

import base64
import zlib
from collections.abc import Mapping
from typing import Final

from contrail_common.model import Advisory, StreamInfo
from contrail_link.contract.admin import EventsResult
from contrail_link.contract.streams import Page

_SEPARATOR: Final = ","
_OF_NODE: Final = ":"


def one_page(pages: Mapping[str, Page], limit: int) -> Page:
    """Return the first ``limit`` streams of ``pages``, which are by node.

    A stream that several nodes list is shown as its leader does.
    """
    found: dict[str, StreamInfo] = {}
    ends = []
    for node, page in pages.items():
        for info in page.streams:
            if info.config.name not in found or info.leader == node:
                found[info.config.name] = info
        if page.next_token is not None:
            ends.append(page.streams[-1].config.name)
    # Further than the end of an incomplete page, streams may be missing.
    names = sorted(name for name in found if not ends or name <= min(ends))
    more = bool(ends) or len(names) > limit
    names = names[:limit]
    token = token_after(names[-1]) if more and names else None
    return Page(streams=[found[name] for name in names], next_token=token)


def token_after(name: str) -> str:
    """Return the token of the page after this name: the same at every node."""
    return base64.urlsafe_b64encode(name.encode()).decode().rstrip("=")


def positions_of(after: str) -> dict[str, str]:
    """Return the parts of a position in the events of a cluster, by the sign of their node."""
    parts = (part.partition(_OF_NODE) for part in after.split(_SEPARATOR) if part)
    return {node: position for node, sign, position in parts if sign}


def sign_of(node: str) -> str:
    """Return eight hexadecimal digits for the name of a node, which may have any characters."""
    return f"{zlib.crc32(node.encode()):08x}"


def one_result(
    results: Mapping[str, EventsResult], positions: dict[str, str], limit: int
) -> EventsResult:
    """Return the events of several nodes by time, with positions in all of them.

    ``results`` and ``positions`` are by the sign of the node. ``positions`` has the position of
    each node before these events.
    """
    tagged = [(one, node) for node, result in results.items() for one in result.advisories]
    tagged.sort(key=lambda pair: pair[0].time_ns)
    left = {node for _, node in tagged[limit:]}
    positions = dict(positions)
    for node, result in results.items():
        # The node itself has skipped events, or it has none after this position.
        if not result.advisories or result.lost != 0:
            positions[node] = result.position
    advisories: list[Advisory] = []
    for advisory, node in tagged[:limit]:
        positions[node] = advisory.id
        advisory.id = _joined(positions)
        advisories.append(advisory)
    for node, result in results.items():
        if node not in left:
            positions[node] = result.position
    counts = [result.lost for result in results.values()]
    lost = None if None in counts else sum(one or 0 for one in counts)
    return EventsResult(advisories, _joined(positions), lost)


def _joined(positions: Mapping[str, str]) -> str:
    return _SEPARATOR.join(
        f"{node}{_OF_NODE}{position}" for node, position in sorted(positions.items())
    )
