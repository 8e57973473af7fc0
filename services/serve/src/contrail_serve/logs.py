"""Structured logs to stderr: JSON lines, or text on a terminal.

Each line names the process, and the request and trace that it is part of.
"""

import io
import logging
import sys
from contextlib import suppress
from typing import TextIO, cast

import structlog
from structlog.types import EventDict, Processor, WrappedLogger

from contrail_link.request_context import current_context


class _Lossy(io.TextIOBase):
    """A text file that drops what cannot be written.

    A full disk below stderr must not fail the code that logs, least of all what handles failures.
    """

    def __init__(self, file: TextIO) -> None:
        self._file = file

    def write(self, text: str) -> int:
        with suppress(OSError, ValueError):  # a ValueError if the file is closed
            self._file.write(text)
        return len(text)

    def flush(self) -> None:
        with suppress(OSError, ValueError):
            self._file.flush()


def configure_logs(level: str, style: str, **process: str) -> None:
    """Set up structlog; ``style`` is ``json``, ``text`` or ``auto`` (text on a terminal).

    Every JSON line has the fields of ``process`` (service and node); text lines do not.
    """
    text = style == "text" or (style == "auto" and sys.stderr.isatty())
    # Plain tracebacks, because others show local variables, which may be long or secret.
    renderer: Processor = (
        structlog.dev.ConsoleRenderer(exception_formatter=structlog.dev.plain_traceback)
        if text
        else structlog.processors.JSONRenderer()
    )

    def name_process(logger: WrappedLogger, method: str, event: EventDict) -> EventDict:
        return event if text else {**event, **process}

    shared: list[Processor] = [
        structlog.processors.add_log_level,
        structlog.processors.TimeStamper(fmt="iso", utc=True),
        name_process,
        name_request,
        structlog.processors.StackInfoRenderer(),
    ]
    rendering: list[Processor] = [renderer]
    if not text:
        rendering.insert(0, structlog.processors.format_exc_info)
    number = logging.getLevelNamesMapping()[level.upper()]
    sink = cast("TextIO", _Lossy(sys.stderr))
    structlog.configure(
        processors=[*shared, *rendering],
        wrapper_class=structlog.make_filtering_bound_logger(number),
        logger_factory=structlog.WriteLoggerFactory(file=sink),
        cache_logger_on_first_use=True,
    )
    _take_over(sink, shared, rendering, number)


def _take_over(
    sink: TextIO, shared: list[Processor], rendering: list[Processor], level: int
) -> None:
    """Format log lines of libraries, warnings, and errors of tasks like our own lines."""
    handler = logging.StreamHandler(sink)
    handler.setFormatter(
        structlog.stdlib.ProcessorFormatter(
            foreign_pre_chain=[structlog.stdlib.add_logger_name, *shared],
            processors=[structlog.stdlib.ProcessorFormatter.remove_processors_meta, *rendering],
        )
    )
    # Libraries log through the root logger. Below warnings they say too much.
    root = logging.getLogger()
    root.handlers[:] = [handler]
    root.setLevel(max(level, logging.WARNING))
    logging.captureWarnings(capture=True)


def name_request(logger: WrappedLogger, method: str, event: EventDict) -> EventDict:
    """Add the id of the current request, and of its trace if it has one."""
    context = current_context()
    if context is not None:
        event["request_id"] = context.request_id.decode("ascii")
        if context.traceparent:
            event["trace_id"] = context.trace_id
    return event
