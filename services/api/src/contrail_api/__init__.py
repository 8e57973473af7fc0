"""The REST side of the public interface: management, publishing, reads and replay. Stateless."""

from contrail_api.room import room

__all__ = ["room"]
