"""The processes of Contrail. Only this package knows all services and connects them."""

from contrail_serve import local_cluster
from contrail_serve.main import main

__all__ = ["local_cluster", "main"]
