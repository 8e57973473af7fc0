"""What creating or updating a consumer asks first, be its stream of one shard or of several."""

import secrets

import msgspec

from contrail_common import errors
from contrail_common.config_rules import check_consumer_update
from contrail_common.errors import ApiError
from contrail_common.link import CreateMode
from contrail_common.model import ConsumerConfig
from contrail_storage.core.consumer_machine import ConsumerMachine


def is_changed(
    existing: ConsumerMachine,
    config: ConsumerConfig,
    mode: CreateMode,
    if_match: int | None,
    *,
    if_none: bool,
) -> bool:
    """Whether a consumer that exists is to become another; ApiError when it may not."""
    if if_none or if_match not in (None, existing.version):
        raise ApiError(
            errors.PRECONDITION_FAILED, f"the version is {existing.version}", applied=False
        )
    if existing.config == config:
        return False
    if mode == "create":
        raise ApiError(errors.CONSUMER_EXISTS, applied=False)
    check_consumer_update(existing.config, config)
    return True


def to_create(config: ConsumerConfig, if_match: int | None) -> ConsumerConfig:
    """A consumer that does not exist, with a name; PRECONDITION_FAILED when it had to exist."""
    if if_match is not None:
        raise ApiError(errors.PRECONDITION_FAILED, "there is no such consumer")
    if config.name:
        return config
    return msgspec.structs.replace(config, name=secrets.token_urlsafe(12).replace("-", "a"))
