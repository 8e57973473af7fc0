"""The management routes. Imported when they are needed, because they import FastAPI."""

from fastapi import APIRouter

from contrail_api.consumers.routes import ConsumerRoutes
from contrail_api.streams.erasures import ErasureRoutes
from contrail_api.streams.routes import StreamRoutes
from contrail_edge.http.settings import EdgeSettings
from contrail_edge.openapi.declared import management_router
from contrail_link.contract import StorageLink


def management(link: StorageLink, settings: EdgeSettings) -> APIRouter:
    """Return the routes of streams, consumers and erasures."""
    router = management_router()
    StreamRoutes(link, settings).add_to(router)
    ConsumerRoutes(link).add_to(router)
    ErasureRoutes(link).add_to(router)
    return router
