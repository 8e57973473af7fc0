"""Configurations as the public API takes them: its fields, its rules, its merge patch."""

from collections.abc import Mapping
from typing import Any, TypeVar

from pydantic import BaseModel, ValidationError

from contrail_api.changes import as_document, merged
from contrail_api.consumers import config as consumer_config
from contrail_api.consumers.config import ConsumerConfigBody, consumer_draft
from contrail_api.streams import shown as stream_shown
from contrail_api.streams.config import StreamConfigBody, stream_draft
from contrail_common.config_rules import normalise_consumer, normalise_stream
from contrail_common.model import ConsumerConfig, StreamConfig
from contrail_common.timeunits import format_time, parse_duration
from tests.scenarios.arguments import ArgumentError
from tests.scenarios.clock import BEGIN_NS

_Body = TypeVar("_Body", bound=BaseModel)
Fields = Mapping[str, Any]


def new_stream(name: str, fields: Fields) -> StreamConfig:
    """The configuration that ``fields`` give; ApiError when the rules refuse it."""
    body = _validated(StreamConfigBody, {**fields, "name": name})
    return normalise_stream(stream_draft(body))


def patched_stream(config: StreamConfig, fields: Fields) -> StreamConfig:
    """``config`` with ``fields`` laid over it."""
    shown = as_document(stream_shown.config_json(config))
    return new_stream(config.name, merged(shown, fields))


def new_consumer(name: str, fields: Fields, *, durable: bool) -> ConsumerConfig:
    """The configuration that ``fields`` give; ``opt_start_time`` counts from the begin."""
    given = {**fields, "name": name}
    if "opt_start_time" in fields:
        given["opt_start_time"] = format_time(BEGIN_NS + parse_duration(fields["opt_start_time"]))
    return _consumer(given, durable=durable)


def patched_consumer(config: ConsumerConfig, fields: Fields) -> ConsumerConfig:
    """``config`` with ``fields`` laid over it; filters replace filters."""
    shown = as_document(consumer_config.config_json(config))
    if "filter_subject" in fields or "filter_subjects" in fields:
        shown.update(filter_subject=None, filter_subjects=[])
    return _consumer(merged(shown, fields), durable=config.durable)


def _consumer(document: Fields, *, durable: bool) -> ConsumerConfig:
    body = _validated(ConsumerConfigBody, document)
    return normalise_consumer(consumer_draft(body, durable=durable))


def _validated(model: type[_Body], document: Fields) -> _Body:
    try:
        return model.model_validate(document)
    except ValidationError as error:
        first = error.errors()[0]
        where = ".".join(map(str, first["loc"]))
        raise ArgumentError(f"{where}: {first['msg']}") from None
