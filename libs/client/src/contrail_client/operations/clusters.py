"""The call for the state of the cluster."""

from typing import Final

from contrail_client.calls import Call, call, json_as, path_of
from contrail_client.cluster import ClusterState

GET: Final[Call[ClusterState]] = call("GET", path_of("cluster"), json_as(ClusterState))
