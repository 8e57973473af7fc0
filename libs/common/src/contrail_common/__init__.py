"""Vocabulary of Contrail: names, subjects, models, errors, blocks of messages."""

from contrail_common.__about__ import __version__

__all__ = ["__version__"]
