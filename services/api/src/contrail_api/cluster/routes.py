"""Reading the state of the cluster."""

from typing import Final

from contrail_api.cluster.shown import EXAMPLE, ClusterStateJson, cluster_json
from contrail_edge.http.requests import Request
from contrail_edge.http.responses import Answer, json_response
from contrail_edge.inputs.negotiation import JSON_TYPE
from contrail_edge.routing import AnswerDoc, BodyDoc, Operation, Route
from contrail_link.contract import StorageLink

GET: Final = Operation(
    operation_id="get_cluster",
    tag="cluster",
    summary="Get the state of the cluster",
    description="Tells how the storage nodes and the groups that they form are. Each node is asked "
    "for up to a second, so a node that is away is shown as such. A server alone answers as a "
    "cluster of one node.",
    answers={
        200: AnswerDoc(
            description="The state of the cluster.",
            content={JSON_TYPE: BodyDoc(shape=ClusterStateJson, example=EXAMPLE)},
        )
    },
)


class Cluster:
    """The route of the cluster's state."""

    def __init__(self, link: StorageLink) -> None:
        self._link = link

    def routes(self) -> tuple[Route, ...]:
        """Return the route with its documentation."""
        return (Route("GET", "/v1/cluster", self.get, GET),)

    async def get(self, request: Request) -> Answer:
        """Return the state of the cluster."""
        del request
        return json_response(200, cluster_json(await self._link.node_views()))
