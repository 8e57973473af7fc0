"""What creating or updating a consumer asks first, be its stream of one shard or of several."""

import secrets
from typing import Final

import msgspec

from contrail_common import errors
from contrail_common.model import ConsumerConfig
from contrail_storage.core.commands import Precondition
from contrail_storage.core.consumer_machine import ConsumerMachine
from contrail_storage.core.preconditions import refusal
from contrail_storage.streams.manager import error_of

ATTEMPTS: Final = 8
"""How often a consumer that is deleted while it is changed is made anew."""


def is_settled(
    existing: ConsumerMachine | None, config: ConsumerConfig, given: Precondition
) -> bool:
    """Whether nothing is left to do; ApiError for what the shard would refuse now.

    Only a shortcut: the shard decides when it applies the command.
    """
    same = existing is not None and existing.config == config
    version = None if existing is None else existing.version
    missing = errors.CONSUMER_NOT_FOUND
    refused = refusal(given, version, errors.CONSUMER_EXISTS, missing, same=same)
    if refused is not None:
        raise error_of(refused)
    return same


def named(config: ConsumerConfig) -> ConsumerConfig:
    """``config`` with a name."""
    if config.name:
        return config
    return msgspec.structs.replace(config, name=secrets.token_urlsafe(12).replace("-", "a"))
