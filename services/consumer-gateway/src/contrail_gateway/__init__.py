"""Delivery: long-poll pulls and acknowledgements. Stateless but for the polls that wait."""

from contrail_gateway.edge_module import edge_module

__all__ = ["edge_module"]
