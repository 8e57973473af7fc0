"""The one version of every distribution in this workspace."""

__version__ = "0.2.0"
