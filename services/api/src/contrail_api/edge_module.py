"""The routes of the api: management, publishing, reading and replay, over a storage link."""

import importlib
from typing import TYPE_CHECKING

from contrail_api.cluster.routes import Cluster
from contrail_api.publishing.batch import BatchPublish
from contrail_api.publishing.single import SinglePublish
from contrail_api.reading.events import Events
from contrail_api.reading.listings import Listings
from contrail_api.reading.many import ManyMessageReads
from contrail_api.reading.one_message import OneMessage
from contrail_api.reading.ranges import Ranges
from contrail_api.reading.replay import Replays
from contrail_api.streams.snapshots import Snapshots
from contrail_edge.http.settings import EdgeSettings
from contrail_edge.routing import EdgeModule
from contrail_link.contract import StorageLink

if TYPE_CHECKING:
    from fastapi import APIRouter


def edge_module(link: StorageLink, settings: EdgeSettings) -> EdgeModule:
    """Return the whole public interface except delivery to consumers."""
    return EdgeModule(
        link=link,
        routes=(
            *SinglePublish(link, settings).routes(),
            *BatchPublish(link, settings).routes(),
            # Before single messages: its path would be one of them.
            *ManyMessageReads(link).routes(),
            *OneMessage(link).routes(),
            *Ranges(link).routes(),
            *Listings(link).routes(),
            *Replays(link).routes(),
            *Snapshots(link).routes(),
            *Events(link).routes(),
            *Cluster(link).routes(),
        ),
        management=lambda: _management(link, settings),
    )


def _management(link: StorageLink, settings: EdgeSettings) -> "APIRouter":
    module = importlib.import_module("contrail_api.management")
    made: APIRouter = module.management(link, settings)
    return made
