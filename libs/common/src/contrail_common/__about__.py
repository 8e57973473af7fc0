"""The one version of every distribution in this workspace."""

__version__ = "0.1.0"
