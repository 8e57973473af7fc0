"""Tickets: genuine, soon over, used once."""

import pytest

from contrail_common.errors import ApiError
from contrail_common.timeunits import format_time
from contrail_edge.tickets import Tickets
from contrail_link.contract.tickets import TICKET_NS
from contrail_storage.used_tickets import USED_MAX, UsedTickets

NOW = 1_800_000_000_000_000_000
KEYS = (b"a" * 32, b"b" * 32)


def test_ticket_is_understood_wherever_the_key_is_known() -> None:
    issued = Tickets(KEYS).issue(NOW)
    assert issued.expires_at == format_time(NOW + TICKET_NS)
    for keys in (KEYS, KEYS[:1], KEYS[::-1]):
        opened = Tickets(keys).open(issued.ticket.encode(), NOW)
        assert opened.expires_ns == NOW + TICKET_NS


@pytest.mark.parametrize(("later_ns", "good"), [(TICKET_NS - 1, True), (TICKET_NS, False)])
def test_ticket_lasts_30_seconds(later_ns: int, good: bool) -> None:
    ticket = Tickets(KEYS).issue(NOW).ticket.encode()
    if good:
        Tickets(KEYS).open(ticket, NOW + later_ns)
    else:
        with pytest.raises(ApiError, match="unauthenticated"):
            Tickets(KEYS).open(ticket, NOW + later_ns)


def test_ticket_that_was_changed_or_made_with_another_key_is_none() -> None:
    ticket = Tickets(KEYS).issue(NOW).ticket.encode()
    others = [b"", ticket[:-1], ticket + b"A", b"\xff", b"=" * 54]
    others += [ticket[:at] + bytes([ticket[at] ^ 1]) + ticket[at + 1 :] for at in range(53)]
    others.append(Tickets((b"c" * 32,)).issue(NOW).ticket.encode())
    for other in others:
        with pytest.raises(ApiError, match="unauthenticated"):
            Tickets(KEYS).open(other, NOW)


def test_ticket_is_used_once_and_forgotten_when_it_cannot_last_any_more() -> None:
    used = UsedTickets(NOW)
    assert used.use(b"1", NOW + TICKET_NS, NOW)
    assert not used.use(b"1", NOW + TICKET_NS, NOW + 2 * TICKET_NS - 1)
    assert used.use(b"2", NOW + 3 * TICKET_NS, NOW + 2 * TICKET_NS)
    assert len(used._used) == 1


def test_ticket_of_before_the_start_is_refused() -> None:
    used = UsedTickets(NOW)
    assert not used.use(b"1", NOW - 1 + TICKET_NS, NOW)


@pytest.mark.long
def test_used_tickets_are_bounded() -> None:
    used = UsedTickets(NOW)
    for number in range(USED_MAX):
        used.use(b"%d" % number, NOW + TICKET_NS, NOW)
    with pytest.raises(ApiError, match="too many tickets"):
        used.use(b"more", NOW + TICKET_NS, NOW)
    assert used.use(b"more", NOW + 3 * TICKET_NS, NOW + 2 * TICKET_NS)
