"""Vocabulary and wire of Contrail: names, subjects, models, errors, blocks, service link."""

from contrail_common.__about__ import __version__

__all__ = ["__version__"]
