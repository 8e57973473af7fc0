"""The REST side of the public interface: management, publishing, reads and replay. Stateless."""

from contrail_api.edge_module import edge_module

__all__ = ["edge_module"]
