"""The api's room at the edge: management, publishing, reading and replay, over a storage link."""

from contrail_api import (
    consumer_docs,
    events_docs,
    publish_docs,
    read_docs,
    snapshot_docs,
    stream_docs,
)
from contrail_api.batch import BATCH_DIRECT_BYTES_MAX, DIRECT_TYPES, BatchPublish
from contrail_api.consumers import ConsumerRoutes
from contrail_api.events import Events
from contrail_api.publish import SinglePublish
from contrail_api.reads import Reads
from contrail_api.replay import Replays
from contrail_api.snapshots import Snapshots
from contrail_api.streams import StreamRoutes
from contrail_common.edge.declared import management_router
from contrail_common.edge.routing import Direct, Room, Route
from contrail_common.edge.settings import EdgeSettings
from contrail_common.link import StorageLink

_STREAM = "/v1/streams/{stream}"


def room(link: StorageLink, settings: EdgeSettings) -> Room:
    """Everything of the public interface but delivery to consumers."""
    single, batch = SinglePublish(link, settings), BatchPublish(link, settings)
    reads, replays = Reads(link), Replays(link)
    snapshots = Snapshots(link)
    router = management_router()
    StreamRoutes(link, settings).add_to(router)
    ConsumerRoutes(link).add_to(router)
    return Room(
        link=link,
        routes=(
            Route(
                "POST",
                "/v1/subjects/{subject}/messages",
                single.publish,
                publish_docs.PUBLISH,
                Direct(single.publish_directly),
            ),
            Route(
                "POST",
                f"{_STREAM}/messages",
                batch.publish,
                publish_docs.BATCH,
                Direct(batch.publish_directly, DIRECT_TYPES, BATCH_DIRECT_BYTES_MAX),
            ),
            Route("GET", f"{_STREAM}/messages/{{seq}}", reads.get, read_docs.GET),
            Route("DELETE", f"{_STREAM}/messages/{{seq}}", reads.delete, read_docs.DELETE),
            Route("GET", f"{_STREAM}/messages", reads.range, read_docs.RANGE),
            Route("GET", f"{_STREAM}/last", reads.last, read_docs.LAST),
            Route("GET", f"{_STREAM}/subjects", reads.subjects, read_docs.SUBJECTS),
            Route("GET", f"{_STREAM}/deleted", reads.deleted, read_docs.DELETED),
            Route("GET", f"{_STREAM}/replay/plan", replays.plan, read_docs.PLAN),
            Route("GET", f"{_STREAM}/replay", replays.replay, read_docs.REPLAY),
            Route("GET", f"{_STREAM}/snapshot", snapshots.snapshot, snapshot_docs.SNAPSHOT),
            Route("PUT", f"{_STREAM}/restore", snapshots.restore, snapshot_docs.RESTORE),
            Route("GET", "/v1/events", Events(link).open, events_docs.EVENTS),
        ),
        router=router,
        shapes=(*stream_docs.SHAPES, *consumer_docs.SHAPES, *publish_docs.SHAPES),
    )
