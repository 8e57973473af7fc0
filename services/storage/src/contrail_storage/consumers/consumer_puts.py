"""Checks before a consumer is created or updated, for streams with one or several shards."""

import secrets
from typing import Final

import msgspec

from contrail_common import errors
from contrail_common.model import ConsumerConfig
from contrail_storage.core.commands import Precondition
from contrail_storage.core.consumer_machine import ConsumerMachine
from contrail_storage.streams.outcomes import error_of

ATTEMPTS: Final = 8
"""Attempts of a put. It starts again when the consumer is deleted meanwhile."""


def is_settled(
    existing: ConsumerMachine | None, config: ConsumerConfig, given: Precondition
) -> bool:
    """Whether the consumer exists as wanted; ApiError for what the shard would refuse now.

    This is only a shortcut: the shard decides when it applies the command.
    """
    same = existing is not None and existing.config == config
    version = None if existing is None else existing.version
    missing = errors.CONSUMER_NOT_FOUND
    refused = given.refusal(version, errors.CONSUMER_EXISTS, missing, same=same)
    if refused is not None:
        raise error_of(refused)
    return same


def named(config: ConsumerConfig) -> ConsumerConfig:
    """Return ``config`` with a name, a random one if it has none."""
    if config.name:
        return config
    return msgspec.structs.replace(config, name=secrets.token_urlsafe(12).replace("-", "a"))
