"""The storage link: the interface through which the api and the gateway use a storage node.

Within a process it is a direct call; between processes the same structs travel as framed msgpack.
Every method raises :class:`contrail_common.errors.ApiError` for a refusal or ``OUTCOME_UNKNOWN``.

In a cluster, each method has one node that answers it, which its declaration says
(``remote.Route``). All others refuse with ``NOT_LEADER``, ``applied=False``, and the name of the
node that answers in ``leader`` if they know it. Only the leader of the meta group knows that there
is no such stream: when another node refuses with ``STREAM_NOT_FOUND`` or
``NO_STREAM_FOR_SUBJECT``, ``leader`` is the leader of the meta group; if that is not known either,
the refusal is ``NOT_LEADER``.
"""

from typing import Protocol

from contrail_link.contract.admin import AdminLink
from contrail_link.contract.cluster import ClusterLink
from contrail_link.contract.consume import ConsumeLink
from contrail_link.contract.publish import PublishLink
from contrail_link.contract.read import ReadLink
from contrail_link.contract.streams import StreamsLink


class StorageLink(
    StreamsLink, PublishLink, ReadLink, ConsumeLink, AdminLink, ClusterLink, Protocol
):
    """A storage node as the api and the gateway see it."""
