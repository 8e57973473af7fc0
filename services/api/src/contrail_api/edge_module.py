"""The routes of the api: management, publishing, reading and replay, over a storage link."""

import importlib
from typing import TYPE_CHECKING

from contrail_api import (
    events_docs,
    publish_docs,
    read_docs,
    snapshot_docs,
)
from contrail_api.batch import BATCH_DIRECT_BYTES_MAX, DIRECT_TYPES, BatchPublish
from contrail_api.events import Events
from contrail_api.publish import SinglePublish
from contrail_api.reads import Reads
from contrail_api.replay import Replays
from contrail_api.snapshots import Snapshots
from contrail_edge.direct_reads import DirectRead
from contrail_edge.http.settings import EdgeSettings
from contrail_edge.routing import Direct, EdgeModule, Route
from contrail_link.contract import StorageLink

if TYPE_CHECKING:
    from fastapi import APIRouter

_STREAM = "/v1/streams/{stream}"


def edge_module(link: StorageLink, settings: EdgeSettings) -> EdgeModule:
    """Return the whole public interface except delivery to consumers."""
    single, batch = SinglePublish(link, settings), BatchPublish(link, settings)
    reads, replays = Reads(link), Replays(link)
    snapshots = Snapshots(link)
    return EdgeModule(
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
            Route(
                "GET",
                f"{_STREAM}/messages/{{seq}}",
                reads.get,
                read_docs.GET,
                Direct(DirectRead(reads.get)),
            ),
            Route("GET", f"{_STREAM}/messages/{{seq}}/json", reads.get_json, read_docs.GET_JSON),
            Route("DELETE", f"{_STREAM}/messages/{{seq}}", reads.delete, read_docs.DELETE),
            Route("GET", f"{_STREAM}/messages", reads.range, read_docs.RANGE),
            Route(
                "GET",
                f"{_STREAM}/last",
                reads.last,
                read_docs.LAST,
                Direct(DirectRead(reads.last)),
            ),
            Route("GET", f"{_STREAM}/subjects", reads.subjects, read_docs.SUBJECTS),
            Route("GET", f"{_STREAM}/deleted", reads.deleted, read_docs.DELETED),
            Route("GET", f"{_STREAM}/replay/plan", replays.plan, read_docs.PLAN),
            Route("GET", f"{_STREAM}/replay", replays.replay, read_docs.REPLAY),
            Route("GET", f"{_STREAM}/snapshot", snapshots.snapshot, snapshot_docs.SNAPSHOT),
            Route("PUT", f"{_STREAM}/restore", snapshots.restore, snapshot_docs.RESTORE),
            Route("GET", "/v1/events", Events(link).open, events_docs.EVENTS),
        ),
        management=lambda: _management(link, settings),
    )


def _management(link: StorageLink, settings: EdgeSettings) -> "APIRouter":
    module = importlib.import_module("contrail_api.management")
    made: APIRouter = module.management(link, settings)
    return made
