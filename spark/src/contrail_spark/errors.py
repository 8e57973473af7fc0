"""The errors of reading and writing a stream; each message is a sentence for the user."""

import os
from collections.abc import Iterator
from contextlib import contextmanager


class ContrailSparkError(Exception):
    """Base of all errors that the data source raises itself."""


class OptionError(ContrailSparkError, ValueError):
    """An option is missing, unknown or not valid."""


class SchemaError(ContrailSparkError, ValueError):
    """A projection or a written frame has an unknown column, or one of another type."""


class RowError(ContrailSparkError, ValueError):
    """A row cannot be published as a message."""


class ServerRefusedError(ContrailSparkError):
    """The server answered with a refusal that a retry cannot change.

    ``status`` is the HTTP status and ``name`` the problem's name, such as ``stream_not_found``.
    """

    def __init__(self, message: str, status: int, name: str) -> None:
        super().__init__(message)
        self.status = status
        self.name = name


class StreamChangedError(ServerRefusedError):
    """The stream was deleted and created again after the range of this DataFrame was fixed."""


class DataLossError(ServerRefusedError):
    """Messages of the fixed range are gone: retention removed them before the job read them."""


class CheckpointError(ContrailSparkError):
    """The checkpoint of a streaming query does not fit the stream, or no longer."""


class UnavailableError(ContrailSparkError):
    """The server could not be reached, or did not answer in full, after all retries."""


class ProtocolError(ContrailSparkError):
    """The server's answer does not follow the API."""


class LakeError(ContrailSparkError):
    """A lake is damaged, is of another stream or format, or cannot be changed like this."""


class LakeNotFoundError(LakeError):
    """There is no lake in the folder."""


class LakeConflictError(LakeError):
    """Another job has changed the lake meanwhile; nothing was committed."""


@contextmanager
def message_first() -> Iterator[None]:
    """Make Spark report our errors by their message, without a traceback before it.

    Spark formats what a Python worker raises, by default with the whole traceback in front of the
    message. The worker ends with the error, so the variable hides no other traceback.
    """
    try:
        yield
    except ContrailSparkError:
        os.environ["SPARK_HIDE_TRACEBACK"] = "1"
        raise
