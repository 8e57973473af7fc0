"""A whole cluster on one machine, as real processes: `contrail cluster`."""

from contrail_serve.local_cluster.control import ControlError, start_process, stop_cluster
from contrail_serve.local_cluster.launcher import Options, launch

__all__ = ["ControlError", "Options", "launch", "start_process", "stop_cluster"]
