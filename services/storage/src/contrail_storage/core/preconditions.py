"""Checking a caller's precondition on the configuration of a stream or a consumer."""

from contrail_common import errors
from contrail_common.errors import ErrorSpec
from contrail_storage.core.commands import Precondition
from contrail_storage.core.results import Refused


def refusal(
    given: Precondition, version: int | None, exists: ErrorSpec, missing: ErrorSpec, *, same: bool
) -> Refused | None:
    """Why a configuration may not be put; ``version`` is the current one (None: there is none).

    ``same``: the current configuration is equal; if not, ``create`` refuses with ``exists``.
    ``update`` refuses with ``missing`` if there is none.
    """
    if version is None and given.version is not None:
        return Refused(errors.PRECONDITION_FAILED.code, "it does not exist")
    # If-Match and If-None-Match come first, as in HTTP: a failed condition is 412, whatever else is
    # wrong.
    if version is not None and (given.absent or given.version not in (None, 0, version)):
        return Refused(errors.PRECONDITION_FAILED.code, f"the version is {version}")
    if version is None and given.update:
        return Refused(missing.code)
    if version is not None and given.create and not same:
        return Refused(exists.code)
    return None
