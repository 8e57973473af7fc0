"""Structured logs to stderr: JSON lines, or text on a terminal.

Each line names the process, and the request and trace that it is part of.
"""

import logging
import sys

import structlog
from structlog.types import EventDict, Processor, WrappedLogger

from contrail_common.request_context import current_context


def configure_logs(level: str, style: str, **process: str) -> None:
    """Set up structlog; ``style`` is ``json``, ``text`` or ``auto`` (text on a terminal).

    ``process`` (its service, its node) stands in every JSON line; on a terminal it is known.
    """
    text = style == "text" or (style == "auto" and sys.stderr.isatty())
    renderer: Processor = (
        structlog.dev.ConsoleRenderer() if text else structlog.processors.JSONRenderer()
    )

    def name_process(logger: WrappedLogger, method: str, event: EventDict) -> EventDict:
        return event if text else {**event, **process}

    structlog.configure(
        processors=[
            structlog.processors.add_log_level,
            structlog.processors.TimeStamper(fmt="iso", utc=True),
            name_process,
            name_request,
            structlog.processors.StackInfoRenderer(),
            structlog.processors.format_exc_info,
            renderer,
        ],
        wrapper_class=structlog.make_filtering_bound_logger(
            logging.getLevelNamesMapping()[level.upper()]
        ),
        logger_factory=structlog.WriteLoggerFactory(file=sys.stderr),
        cache_logger_on_first_use=True,
    )


def name_request(logger: WrappedLogger, method: str, event: EventDict) -> EventDict:
    """Add the id of the request, and of its trace when it has one."""
    context = current_context()
    if context is not None:
        event["request_id"] = context.request_id.decode("ascii")
        if context.traceparent:
            event["trace_id"] = context.trace_id
    return event
