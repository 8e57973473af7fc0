"""Delivery: long-poll pulls and acknowledgements. Stateless but for the polls that wait."""

from contrail_gateway.room import room

__all__ = ["room"]
