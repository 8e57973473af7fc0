"""JetStream's rules for the configurations of streams and consumers. No IO.

The api calls ``normalise_*``, which complete a given configuration or refuse it. The storage node
calls ``check_*``, which refuse to create a configuration, or to replace an existing one by it. It
does so at the moment of the change, so that no other change can come in between.
"""

from collections.abc import Iterable, Mapping
from typing import Final, TypedDict, TypeVar, get_args

import msgspec

from contrail_common import errors, model
from contrail_common.errors import ApiError, ErrorSpec, FieldProblem
from contrail_common.model import (
    AckPolicy,
    Compression,
    ConsumerConfig,
    ConsumerLimits,
    DeliverPolicy,
    Erasure,
    Retention,
    Storage,
    StreamConfig,
)
from contrail_common.names import PATH_SEPARATORS, name_problem
from contrail_common.partition import POSITION_MAX, POSITIONS_MAX, SHARDS_MAX
from contrail_common.retention_rules import RetentionProblem, may_become
from contrail_common.subjects import (
    RESERVED_PREFIX,
    contains,
    filter_problem,
    overlapping_pairs,
    overlaps,
)
from contrail_common.timeunits import NS_PER_MS, NS_PER_S

_N = TypeVar("_N", int, str)

# JetStream's limits.
DESCRIPTION_BYTES_MAX: Final = 4096
METADATA_BYTES_MAX: Final = 128 * 1024
REPLICAS: Final = (1, 3, 5)
AGE_MIN_NS: Final = 100 * NS_PER_MS
SUBJECTS_MAX: Final = 256
"""Maximum number of subjects of a stream or filters of a consumer.

A message with a subject that is new to the stream is compared with each of them.
"""
_NAMES_SHOWN: Final = 10
_OF_ANSWERS: Final = ("_nats.ver", "_nats.level")
"""Metadata that JetStream adds to its answers. It is dropped when a client sends an answer back."""

RESERVED_SUBJECTS: Final = ("$JS.>", "$JSC.>", "$NRG.>", "$SYS.>", f"{RESERVED_PREFIX}.>")
RESERVED_EXCEPTIONS: Final = ("$JS.EVENT.>", "$SYS.ACCOUNT.>")


class StreamDraft(TypedDict, total=False):
    """The given part of a stream's configuration; a missing key takes its default."""

    name: str
    description: str
    subjects: tuple[str, ...]
    retention: Retention
    storage: Storage
    discard: str
    max_msgs: int
    max_bytes: int
    max_age_ns: int
    max_msgs_per_subject: int
    discard_new_per_subject: bool
    max_msg_size: int
    max_consumers: int
    duplicate_window_ns: int
    num_replicas: int
    allow_direct: bool
    sealed: bool
    deny_delete: bool
    deny_purge: bool
    allow_rollup_hdrs: bool
    allow_atomic: bool
    allow_msg_ttl: bool
    subject_delete_marker_ttl_ns: int
    compression: str
    first_seq: int
    consumer_limits: ConsumerLimits
    metadata: dict[str, str]
    encrypted: bool
    shards: int
    shard_by: tuple[int, ...]
    erasure: Erasure


class ConsumerDraft(TypedDict, total=False):
    """The given part of a consumer's configuration; a missing key takes its default."""

    name: str
    durable: bool
    description: str
    deliver_policy: DeliverPolicy
    opt_start_seq: int
    opt_start_time_ns: int
    ack_policy: AckPolicy
    ack_wait_ns: int
    max_deliver: int
    backoff_ns: tuple[int, ...]
    filter_subjects: tuple[str, ...]
    max_waiting: int
    max_ack_pending: int
    max_batch: int
    max_expires_ns: int
    max_bytes: int
    headers_only: bool
    inactive_threshold_ns: int
    metadata: dict[str, str]
    num_replicas: int
    mem_storage: bool


# Streams -----------------------------------------------------------------------------------------
def normalise_stream(draft: StreamDraft, *, pedantic: bool = False) -> StreamConfig:
    """Return the complete configuration for ``draft``.

    Raises STREAM_CONFIG_INVALID (or the error of a rule) with pointers. If ``pedantic``, raises
    PEDANTIC for a given value that would be stored as another one.
    """
    rules = _Rules(errors.STREAM_CONFIG_INVALID, draft, pedantic=pedantic)
    name = draft.get("name", "")
    check_stream_name(name)
    rules.texts(draft.get("description", ""), draft.get("metadata", {}))
    max_age_ns = draft.get("max_age_ns", 0)
    if max_age_ns < 0 or 0 < max_age_ns < AGE_MIN_NS:
        rules.refuse("max_age", "must be 0 or at least 100ms")
    marker_ttl_ns = draft.get("subject_delete_marker_ttl_ns", 0)
    # As in JetStream, a marker TTL turns on message TTLs and roll-ups, and deny_purge off.
    marks = marker_ttl_ns != 0 and not draft.get("sealed", False)
    if marker_ttl_ns and marker_ttl_ns < NS_PER_S:
        rules.refuse("subject_delete_marker_ttl", "must be 0 or at least 1s")
    config = StreamConfig(
        name=name,
        description=draft.get("description", ""),
        # As in JetStream, a stream without subjects captures its own name.
        subjects=_stream_subjects(rules, draft.get("subjects", ()) or (name,)),
        retention=draft.get("retention", "limits"),
        storage=draft.get("storage", "file"),
        discard="new" if draft.get("discard") == "new" else "old",
        max_msgs=rules.unlimited("max_msgs", draft.get("max_msgs", -1)),
        max_bytes=rules.unlimited("max_bytes", draft.get("max_bytes", -1)),
        max_age_ns=max_age_ns,
        max_msgs_per_subject=rules.unlimited(
            "max_msgs_per_subject", draft.get("max_msgs_per_subject", -1)
        ),
        discard_new_per_subject=draft.get("discard_new_per_subject", False),
        max_msg_size=rules.unlimited("max_msg_size", draft.get("max_msg_size", -1)),
        max_consumers=rules.unlimited("max_consumers", draft.get("max_consumers", -1)),
        duplicate_window_ns=_duplicate_window(rules, draft, max_age_ns),
        num_replicas=_replicas(rules, draft),
        allow_direct=draft.get("allow_direct", False),
        deny_delete=draft.get("deny_delete", False),
        deny_purge=rules.switched("deny_purge", off=marks),
        allow_rollup_hdrs=rules.switched("allow_rollup_hdrs", on=marks),
        allow_msg_ttl=rules.switched("allow_msg_ttl", on=marker_ttl_ns != 0),
        subject_delete_marker_ttl_ns=marker_ttl_ns,
        allow_atomic=draft.get("allow_atomic", False),
        compression=_compression(draft.get("compression", "none")),
        # JetStream's clients send 0 for a field that is not set.
        first_seq=rules.at_least_zero("first_seq", draft.get("first_seq", 1)) or 1,
        consumer_limits=_consumer_limits(rules, draft.get("consumer_limits", ConsumerLimits())),
        metadata=_metadata(draft.get("metadata", {})),
        encrypted=draft.get("encrypted", False),
        shards=draft.get("shards", 1),
        shard_by=draft.get("shard_by", ()),
        erasure=draft.get("erasure", "rewrite"),
    )
    _check_shards(rules, config)
    _check_erasure(rules, config)
    if draft.get("sealed", False):
        # Sealing overrides the fields that the rules below are about.
        return sealed(config)
    if config.discard_new_per_subject:
        if config.discard != "new":
            rules.refuse("discard_new_per_subject", "requires discard to be new")
        if config.max_msgs_per_subject < 0:
            rules.refuse("discard_new_per_subject", "requires max_msgs_per_subject to be set")
    if config.deny_purge and config.allow_rollup_hdrs:
        rules.refuse("allow_rollup_hdrs", "cannot be enabled together with deny_purge")
    return config


def sealed(config: StreamConfig) -> StreamConfig:
    """Return the configuration of the sealed stream: no message is added, expires or is removed."""
    return msgspec.structs.replace(
        config,
        sealed=True,
        max_age_ns=0,
        discard="new",
        deny_delete=True,
        deny_purge=True,
        allow_rollup_hdrs=False,
    )


def check_stream_name(name: str) -> None:
    """Refuse an invalid stream name."""
    _check_name(name, errors.STREAM_CONFIG_INVALID, errors.STREAM_NAME_SEPARATOR)


def check_stream_create(config: StreamConfig) -> None:
    """Refuse a configuration that only an existing stream may have: a new one cannot be sealed."""
    if config.sealed:
        raise _invalid(errors.STREAM_CONFIG_INVALID, "sealed", "a new stream cannot be sealed")


def check_stream_update(old: StreamConfig, new: StreamConfig) -> None:
    """Raise STREAM_UPDATE_REFUSED if ``new`` changes a field of ``old`` that must not change."""
    problem = stream_update_problem(old, new)
    if problem is not None:
        raise problem.as_error()


def stream_update_problem(old: StreamConfig, new: StreamConfig) -> RetentionProblem | None:
    """Return why ``new`` must not replace ``old``, or None if it may."""
    if not may_become(old.retention, new.retention):
        return _frozen("retention", "cannot be changed to or from workqueue")
    # What is stored depends on these: its place, its numbers, and the keys that open it.
    for field in ("name", "storage", "first_seq", "shards", "shard_by", "erasure", "num_replicas"):
        if getattr(old, field) != getattr(new, field):
            return _frozen(field, "cannot be changed")
    # These are promises about stored messages, so they cannot be withdrawn.
    for field in ("sealed", "deny_delete", "deny_purge"):
        if getattr(old, field) and not getattr(new, field):
            return _frozen(field, "cannot be set back to false")
    if old.allow_msg_ttl and not new.allow_msg_ttl:
        return _frozen("allow_msg_ttl", "cannot be turned off")
    return None


def consumers_problem(
    config: StreamConfig, consumers: Iterable[ConsumerConfig]
) -> RetentionProblem | None:
    """Return which of a stream's consumers exceed the limits in ``config``, or None."""
    over = [one.name for one in consumers if over_limits(one, config.consumer_limits)]
    if not over:
        return None
    names = ", ".join(sorted(over)[:_NAMES_SHOWN])
    return _frozen("consumer_limits", f"{len(over)} consumers exceed the new limits: {names}")


def _frozen(field: str, message: str) -> RetentionProblem:
    return RetentionProblem(errors.STREAM_UPDATE_REFUSED, field, message)


def check_stream_encryption(config: StreamConfig, *, encrypts: bool) -> None:
    """Refuse a stream that must be encrypted if the node does not encrypt.

    A stream in memory is never written to disk, so it needs no encryption.
    """
    if config.encrypted and not encrypts and config.storage != "memory":
        message = "the server has no encryption key and stores data unencrypted"
        raise _invalid(errors.STREAM_CONFIG_INVALID, "encrypted", message)


def _stream_subjects(rules: "_Rules", subjects: tuple[str, ...]) -> tuple[str, ...]:
    rules.subject_filters("subjects", subjects)
    for position, subject in enumerate(subjects):
        reserved = next((one for one in RESERVED_SUBJECTS if overlaps(subject, one)), None)
        if reserved and not any(contains(one, subject) for one in RESERVED_EXCEPTIONS):
            rules.refuse(f"subjects/{position}", f"overlaps with {reserved}, which is reserved")
    overlap = next(overlapping_pairs(subjects), None)
    if overlap is not None:
        left, right = overlap
        rules.refuse("subjects", f'subject "{left}" overlaps with "{right}"')
    return subjects


def _consumer_limits(rules: "_Rules", limits: ConsumerLimits) -> ConsumerLimits:
    rules.at_least_zero("consumer_limits/inactive_threshold", limits.inactive_threshold_ns)
    rules.at_least_zero("consumer_limits/max_ack_pending", limits.max_ack_pending)
    return limits


def _check_shards(rules: "_Rules", config: StreamConfig) -> None:
    if not 1 <= config.shards <= SHARDS_MAX:
        rules.refuse("shards", f"must be between 1 and {SHARDS_MAX}")
    if len(config.shard_by) > POSITIONS_MAX or len(set(config.shard_by)) < len(config.shard_by):
        rules.refuse("shard_by", f"must list at most {POSITIONS_MAX} positions, without repeats")
    for at, position in enumerate(config.shard_by):
        if not 1 <= position <= POSITION_MAX:
            rules.refuse(f"shard_by/{at}", f"must be between 1 and {POSITION_MAX}")
    if config.shards == 1:
        return
    if config.first_seq != 1:
        rules.refuse(
            "first_seq",
            "cannot be set for a stream with more than one shard: each shard has its own sequence",
        )
    for field in ("max_msgs", "max_bytes"):
        # Otherwise the share of some shards would be 0, and they could store nothing.
        if 0 < getattr(config, field) < config.shards:
            rules.refuse(
                field,
                f"must be at least {config.shards}: the limit is divided among the "
                f"{config.shards} shards",
            )


def _check_erasure(rules: "_Rules", config: StreamConfig) -> None:
    if config.erasure != "subject_key":
        return
    if config.storage == "memory":
        # Subject keys protect copies outside the server; a stream in memory has none.
        rules.refuse("erasure", "subject_key is only for streams with file storage")
    if config.compression != "none":
        # Encrypted payloads do not get smaller.
        rules.refuse("compression", "must be none when erasure is subject_key")


def _duplicate_window(rules: "_Rules", draft: StreamDraft, max_age_ns: int) -> int:
    window_ns = draft.get("duplicate_window_ns", 0)
    if window_ns < 0 or 0 < window_ns < AGE_MIN_NS:
        rules.refuse("duplicate_window", "must be at least 100ms")
    if 0 < max_age_ns < window_ns:
        rules.refuse("duplicate_window", "must not be longer than max_age")
    if window_ns:
        return window_ns
    # A given window that is too long is refused above; the default gives way to max_age.
    default_ns = min(model.DUPLICATE_WINDOW_NS, max_age_ns or model.DUPLICATE_WINDOW_NS)
    return rules.rewritten("duplicate_window", "duplicate_window_ns", 0, default_ns)


def _metadata(metadata: dict[str, str]) -> dict[str, str]:
    return {key: value for key, value in metadata.items() if key not in _OF_ANSWERS}


def _compression(compression: str) -> Compression:
    known: dict[str, Compression] = {one: one for one in get_args(Compression)}
    stored = known.get(compression)
    if stored is None:
        raise _invalid(errors.STREAM_CONFIG_INVALID, "compression", f"must be one of {list(known)}")
    return stored


def _not_negative(rules: "_Rules", replicas: int) -> int:
    if replicas < 0:
        rules.refuse("num_replicas", "must not be negative", errors.REPLICAS_NEGATIVE)
    return replicas


def _replicas(rules: "_Rules", draft: StreamDraft) -> int:
    given = _not_negative(rules, draft.get("num_replicas", 1))
    replicas = rules.rewritten("num_replicas", "num_replicas", given, given or 1)
    if replicas not in REPLICAS:
        # An even number survives no more failures than the odd one below it.
        rules.refuse("num_replicas", "must be 1, 3 or 5")
    elif replicas > 1 and draft.get("storage") == "memory":
        rules.refuse("num_replicas", "must be 1 for a stream in memory")
    return replicas


# Consumers ---------------------------------------------------------------------------------------
def normalise_consumer(draft: ConsumerDraft, *, pedantic: bool = False) -> ConsumerConfig:
    """Return the configuration for ``draft``, without the defaults of its stream.

    :func:`complete_consumer` adds these. Raises CONSUMER_CONFIG_INVALID (or the error of a rule)
    with pointers, and PEDANTIC as :func:`normalise_stream` does.
    """
    rules = _Rules(errors.CONSUMER_CONFIG_INVALID, draft, pedantic=pedantic)
    name = draft.get("name", "")
    _check_name(name, rules.spec, errors.CONSUMER_NAME_SEPARATOR)
    rules.texts(draft.get("description", ""), draft.get("metadata", {}))
    filters = draft.get("filter_subjects", ())
    _check_filters(rules, filters)
    _check_start(draft, filters)
    backoff_ns = draft.get("backoff_ns", ())
    max_deliver = rules.unlimited("max_deliver", draft.get("max_deliver", -1))
    if any(delay_ns < 0 for delay_ns in backoff_ns):
        rules.refuse("backoff", "a delay must not be negative")
    # The last delays could never apply.
    if 0 < max_deliver < len(backoff_ns):
        rules.refuse(
            "backoff", "must not have more delays than max_deliver", errors.BACKOFF_INVALID
        )
    return ConsumerConfig(
        name=name,
        durable=draft.get("durable", True),
        description=draft.get("description", ""),
        deliver_policy=draft.get("deliver_policy", "all"),
        opt_start_seq=draft.get("opt_start_seq", 0),
        opt_start_time_ns=draft.get("opt_start_time_ns", 0),
        ack_policy=draft.get("ack_policy", "explicit"),
        ack_wait_ns=_ack_wait(rules, draft, backoff_ns),
        max_deliver=max_deliver,
        backoff_ns=backoff_ns,
        filter_subjects=filters,
        max_waiting=rules.defaulted("max_waiting", draft.get("max_waiting", 0), model.MAX_WAITING),
        max_ack_pending=_max_ack_pending(rules, draft),
        max_batch=rules.at_least_zero("max_batch", draft.get("max_batch", 0)),
        max_expires_ns=_max_expires(rules, draft.get("max_expires_ns", 0)),
        max_bytes=rules.at_least_zero("max_bytes", draft.get("max_bytes", 0)),
        headers_only=draft.get("headers_only", False),
        inactive_threshold_ns=rules.at_least_zero(
            "inactive_threshold", draft.get("inactive_threshold_ns", 0)
        ),
        metadata=_metadata(draft.get("metadata", {})),
        num_replicas=_not_negative(rules, draft.get("num_replicas", 0)),
        mem_storage=draft.get("mem_storage", False),
    )


def complete_consumer(config: ConsumerConfig, limits: ConsumerLimits) -> ConsumerConfig:
    """Return ``config`` with defaults for fields that are 0: the stream's, or else the server's."""
    idle_ns = 0 if config.durable else model.INACTIVE_THRESHOLD_NS
    return msgspec.structs.replace(
        config,
        max_ack_pending=config.max_ack_pending or limits.max_ack_pending or model.MAX_ACK_PENDING,
        inactive_threshold_ns=config.inactive_threshold_ns
        or limits.inactive_threshold_ns
        or idle_ns,
    )


def over_limits(config: ConsumerConfig, limits: ConsumerLimits) -> ErrorSpec | None:
    """Return the error if a consumer exceeds a limit of its stream, or None.

    An unlimited value exceeds any limit. Without acks nothing is pending, so the limit of pending
    acks does not apply.
    """
    idle_ns, idle_max_ns = config.inactive_threshold_ns, limits.inactive_threshold_ns
    if idle_max_ns and not 0 < idle_ns <= idle_max_ns:
        return errors.CONSUMER_THRESHOLD_EXCEEDED
    pending, pending_max = config.max_ack_pending, limits.max_ack_pending
    if pending_max and config.ack_policy != "none" and not 0 < pending <= pending_max:
        return errors.CONSUMER_LIMITS_EXCEEDED
    return None


def check_consumer_update(old: ConsumerConfig, new: ConsumerConfig) -> None:
    """Raise CONSUMER_UPDATE_REFUSED if ``new`` changes a field of ``old`` that must not change."""
    problem = consumer_update_problem(old, new)
    if problem is not None:
        raise problem.as_error()


def consumer_update_problem(old: ConsumerConfig, new: ConsumerConfig) -> RetentionProblem | None:
    """Return why ``new`` must not replace ``old``, or None if it may.

    The fixed fields are those of JetStream, without those of push consumers.
    """
    fixed = {
        "name": "name",
        "durable": "durable_name",
        "deliver_policy": "deliver_policy",
        "opt_start_seq": "opt_start_seq",
        "opt_start_time_ns": "opt_start_time",
        "ack_policy": "ack_policy",
        "max_waiting": "max_waiting",
        "mem_storage": "mem_storage",
    }
    for attribute, field in fixed.items():
        if getattr(old, attribute) != getattr(new, attribute):
            return RetentionProblem(errors.CONSUMER_UPDATE_REFUSED, field, "cannot be changed")
    return None


def _check_filters(rules: "_Rules", filters: tuple[str, ...]) -> None:
    if "" in filters:
        rules.refuse("filter_subjects", "a filter is empty", errors.FILTER_EMPTY)
    rules.subject_filters("filter_subjects", filters)
    # As in JetStream, filters may overlap in part, but none may be contained in another.
    for one, other in overlapping_pairs(filters):
        if contains(one, other) or contains(other, one):
            rules.refuse(
                "filter_subjects", f'"{one}" overlaps with "{other}"', errors.FILTERS_OVERLAP
            )


def _check_start(draft: ConsumerDraft, filters: tuple[str, ...]) -> None:
    policy = draft.get("deliver_policy", "all")
    wanted = {"by_start_sequence": "opt_start_seq", "by_start_time": "opt_start_time"}.get(policy)
    given = {
        "opt_start_seq": draft.get("opt_start_seq", 0),
        "opt_start_time": draft.get("opt_start_time_ns", 0),
    }
    for field, value in given.items():
        if field == wanted and value <= 0:
            raise _invalid(errors.START_INVALID, field, f"is required by deliver_policy {policy}")
        if field != wanted and value != 0:
            raise _invalid(
                errors.START_INVALID, field, f"cannot be used with deliver_policy {policy}"
            )
    if policy == "last_per_subject" and not filters:
        message = "is required by deliver_policy last_per_subject"
        raise _invalid(errors.START_INVALID, "filter_subjects", message)


def _ack_wait(rules: "_Rules", draft: ConsumerDraft, backoff_ns: tuple[int, ...]) -> int:
    given_ns = rules.at_least_zero("ack_wait", draft.get("ack_wait_ns", 0))
    if backoff_ns:
        # As in JetStream, the first delay replaces ack_wait.
        return rules.rewritten("ack_wait", "ack_wait_ns", given_ns, backoff_ns[0])
    return rules.rewritten("ack_wait", "ack_wait_ns", given_ns, given_ns or model.ACK_WAIT_NS)


def _max_ack_pending(rules: "_Rules", draft: ConsumerDraft) -> int:
    given = draft.get("max_ack_pending", 0)
    # Without acknowledgements nothing is ever pending, so the limit would have no effect.
    if draft.get("ack_policy") == "none" and given > 0:
        rules.refuse("max_ack_pending", "cannot be set when ack_policy is none")
    if given < 0:
        return rules.unlimited("max_ack_pending", given)
    if draft.get("ack_policy") != "none":
        # The stream decides what 0 is stored as. It is never stored as 0, so pedantic mode refuses
        # it here.
        rules.defaulted("max_ack_pending", given, model.MAX_ACK_PENDING)
    return given


def _max_expires(rules: "_Rules", expires_ns: int) -> int:
    if expires_ns < 0 or 0 < expires_ns < NS_PER_MS:
        rules.refuse("max_expires", "must be 0 or at least 1ms")
    return expires_ns


# Shared ------------------------------------------------------------------------------------------
class _Rules:
    """The checks of one draft; they raise ``spec`` unless a rule has an error of its own."""

    def __init__(self, spec: ErrorSpec, draft: Mapping[str, object], *, pedantic: bool) -> None:
        self.spec = spec
        self._draft = draft
        self._pedantic = pedantic

    def refuse(self, field: str, message: str, spec: ErrorSpec | None = None) -> None:
        """Refuse the configuration for ``field``."""
        raise _invalid(spec or self.spec, field, message)

    def rewritten(self, field: str, key: str, given: _N, stored: _N) -> _N:
        """Return ``stored``; in pedantic mode, refuse another value if the caller gave one."""
        if self._pedantic and key in self._draft and given != stored:
            raise _invalid(errors.PEDANTIC, field, f"{given} would be stored as {stored}")
        return stored

    def switched(self, field: str, *, on: bool = False, off: bool = False) -> bool:
        """Return a flag, which another field may turn ``on`` or ``off``.

        In pedantic mode, the draft must already have the resulting value.
        """
        given = bool(self._draft.get(field, False))
        stored = (given or on) and not off
        if self._pedantic and given != stored:
            message = f"must be {str(stored).lower()} when subject_delete_marker_ttl is set"
            raise _invalid(errors.PEDANTIC, field, message)
        return stored

    def unlimited(self, field: str, value: int) -> int:
        """Return a limit; values up to 0 mean unlimited, and are stored as -1."""
        return self.rewritten(field, field, value, value if value > 0 else -1)

    def defaulted(self, field: str, value: int, default: int) -> int:
        """Return a count that must not be negative; 0 means ``default``."""
        return self.rewritten(field, field, value, self.at_least_zero(field, value) or default)

    def at_least_zero(self, field: str, value: int) -> int:
        """Return a count or duration that must not be negative."""
        if value < 0:
            self.refuse(field, "must not be negative")
        return value

    def texts(self, description: str, metadata: Mapping[str, str]) -> None:
        """Refuse a description or metadata above their limits."""
        if len(description.encode()) > DESCRIPTION_BYTES_MAX:
            self.refuse("description", f"must not be longer than {DESCRIPTION_BYTES_MAX} bytes")
        total = sum(len(key.encode()) + len(value.encode()) for key, value in metadata.items())
        if total > METADATA_BYTES_MAX:
            self.refuse("metadata", f"must not be larger than {METADATA_BYTES_MAX} bytes")

    def subject_filters(self, field: str, filters: tuple[str, ...]) -> None:
        """Refuse invalid filters, and too many of them."""
        if len(filters) > SUBJECTS_MAX:
            self.refuse(field, f"must not have more than {SUBJECTS_MAX} entries")
        for position, one in enumerate(filters):
            problem = filter_problem(one)
            if problem is not None:
                self.refuse(f"{field}/{position}", problem)


def _check_name(name: str, invalid: ErrorSpec, separated: ErrorSpec) -> None:
    problem = name_problem(name)
    if problem is not None:
        # JetStream has an error of its own for path separators, and clients may depend on it.
        spec = invalid if PATH_SEPARATORS.isdisjoint(name) else separated
        raise _invalid(spec, "name", problem)


def _invalid(spec: ErrorSpec, field: str, message: str) -> ApiError:
    return ApiError(spec, f"{field}: {message}", [FieldProblem(f"/{field}", message)])
