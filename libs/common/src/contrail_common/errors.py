"""The error registry: every error that a caller can see has exactly one entry here.

Codes below 20000 are JetStream's ``err_code``; ours start at 20000. An entry has the name, the
status, and whether the same request may succeed later. The ``detail`` is given where the error is
raised.
"""

from dataclasses import dataclass, field
from typing import Final


@dataclass(frozen=True, slots=True)
class ErrorSpec:
    """One kind of error. ``retryable``: the same request may succeed later."""

    code: int
    name: str
    status: int
    title: str
    retryable: bool = False


REGISTRY: Final[dict[int, ErrorSpec]] = {}
"""The errors by code. A variant, which shares the code of another error, is only in BY_NAME."""

BY_NAME: Final[dict[str, ErrorSpec]] = {}


def _register(
    code: int, name: str, status: int, title: str, *, retryable: bool = False
) -> ErrorSpec:
    assert code not in REGISTRY, f"error code {code} registered twice"
    spec = ErrorSpec(code, name, status, title, retryable)
    REGISTRY[code] = BY_NAME[name] = spec
    return spec


def _variant(of: ErrorSpec, name: str, status: int, title: str) -> ErrorSpec:
    """Register an error with the code of ``of``, and a name and status of its own."""
    assert name not in BY_NAME, f"error name {name} registered twice"
    spec = ErrorSpec(of.code, name, status, title)
    BY_NAME[name] = spec
    return spec


# Streams -----------------------------------------------------------------------------------------
STREAM_NOT_FOUND: Final = _register(10059, "stream_not_found", 404, "stream not found")
STREAM_EXISTS: Final = _register(
    10058, "stream_exists", 409, "stream name already in use with a different configuration"
)
STREAM_RESTORE_EXISTS: Final = _register(
    10130, "stream_restore_exists", 409, "stream name already in use, cannot restore"
)
ARCHIVE_INVALID: Final = _register(
    20008, "archive_invalid", 422, "not a complete stream archive; nothing was restored"
)
STREAM_CONFIG_INVALID: Final = _register(
    10052, "stream_config_invalid", 422, "invalid stream configuration"
)
STREAM_UPDATE_REFUSED: Final = _variant(
    STREAM_CONFIG_INVALID, "stream_update_refused", 409, "stream configuration change not permitted"
)
STREAM_NAME_MISMATCH: Final = _register(
    10056, "stream_name_mismatch", 422, "stream name in the body does not match the path"
)
STREAM_NAME_SEPARATOR: Final = _register(
    10128, "stream_name_separator", 422, "stream name contains a path separator"
)
SUBJECT_OVERLAP: Final = _register(
    10065, "subject_overlap", 409, "subjects overlap with an existing stream"
)
STREAM_SEALED: Final = _register(10109, "stream_sealed", 409, "stream is sealed")
DELETE_DENIED: Final = _register(10057, "delete_denied", 409, "message delete not permitted")
PURGE_DENIED: Final = _register(10110, "purge_denied", 409, "stream purge not permitted")
STREAM_LIMIT: Final = _register(10027, "stream_limit", 507, "maximum number of streams reached")
PEDANTIC: Final = _register(
    10157, "pedantic", 422, "the server would change a value, which pedantic mode does not allow"
)
REPLICAS_UNSUPPORTED: Final = _register(
    10074, "replicas_unsupported", 422, "not enough nodes for the replicas"
)
REPLICAS_NEGATIVE: Final = _register(
    10133, "replicas_negative", 422, "number of replicas is negative"
)
NOT_REPLICATED: Final = _register(
    10010, "not_replicated", 409, "the stream has one replica, so no other node can lead it"
)
NO_FIT_PEER: Final = _register(
    10005, "no_fit_peer", 503, "no other replica is fit to lead the stream now", retryable=True
)
SHARDED_UNSUPPORTED: Final = _register(
    20072, "sharded_unsupported", 422, "not supported for a stream with more than one shard"
)

# Messages ----------------------------------------------------------------------------------------
MESSAGE_NOT_FOUND: Final = _register(10037, "message_not_found", 404, "no message found")
MESSAGE_LEFT_OUT: Final = _register(
    20009,
    "message_left_out",
    413,
    "the answer has no room for this message; ask for it in another request",
    retryable=True,
)
SEQUENCE_NOT_FOUND: Final = _register(10043, "sequence_not_found", 404, "sequence not found")
NO_STREAM_FOR_SUBJECT: Final = _register(
    20001, "no_stream_for_subject", 404, "no stream captures the subject"
)
SUBJECT_NOT_CAPTURED: Final = _register(
    20002, "subject_not_captured", 409, "the stream does not capture the subject"
)
EXPECTED_STREAM: Final = _register(
    10060, "expected_stream_mismatch", 412, "expected stream does not match"
)
WRONG_LAST_MSG_ID: Final = _register(10070, "wrong_last_msg_id", 412, "wrong last message id")
WRONG_LAST_SEQUENCE: Final = _register(10071, "wrong_last_sequence", 412, "wrong last sequence")
EXPECTED_SUBJECT_ALONE: Final = _register(
    10193,
    "expected_subject_without_sequence",
    422,
    "an expected subject was given without an expected sequence",
)
MESSAGE_TOO_LARGE: Final = _register(
    10054, "message_too_large", 413, "message exceeds the maximum size"
)
LAST_UNSETTLED: Final = _register(
    10163,
    "expected_last_unavailable",
    503,
    "expected last sequence per subject temporarily unavailable",
    retryable=True,
)
HEADERS_TOO_LARGE: Final = _register(
    10097, "headers_too_large", 431, "message headers exceed the maximum size of 64 KiB"
)
STORE_FAILED: Final = _register(
    10077, "stream_full", 507, "stream is full (a limit was reached and `discard` is `new`)"
)
ROLLUP_REFUSED: Final = _register(10111, "rollup_refused", 422, "roll-up not permitted or invalid")
TTL_INVALID: Final = _register(10165, "ttl_invalid", 422, "invalid per-message TTL")
TTL_DISABLED: Final = _register(
    10166, "ttl_disabled", 422, "per-message TTL is not enabled on the stream"
)
ATOMIC_DISABLED: Final = _register(
    10174, "atomic_disabled", 422, "atomic batches are not enabled on the stream"
)
WRONG_LAST_SEQUENCE_IN_BATCH: Final = _register(
    10164,
    "wrong_last_sequence_in_batch",
    412,
    "wrong last sequence: an earlier message in the batch has the same subject",
)
ATOMIC_UNSUPPORTED: Final = _register(
    10177, "atomic_unsupported", 422, "header not allowed in an atomic batch"
)
ATOMIC_TOO_LARGE: Final = _register(
    10199, "atomic_too_large", 413, "atomic batch has too many messages or bytes"
)
ATOMIC_DUPLICATE: Final = _register(
    10201, "atomic_duplicate", 409, "atomic batch contains a message id that is already stored"
)
INVALID_SUBJECT: Final = _register(20003, "invalid_subject", 422, "invalid subject")
FEATURE_HEADER: Final = _register(
    20004,
    "header_not_supported",
    422,
    "header requests a feature that this server does not support",
)
REPLAY_GONE: Final = _register(
    20005, "range_gone", 410, "the range starts before the first sequence that the stream still has"
)
INCARNATION_CHANGED: Final = _register(
    20006, "incarnation_changed", 409, "the stream was re-created after the replay was planned"
)
REPLAY_AHEAD: Final = _register(
    20007,
    "range_not_applied",
    503,
    "the range ends beyond what this replica has applied",
    retryable=True,
)

ERASURE_NOT_FOUND: Final = _register(20070, "erasure_not_found", 404, "erasure not found")
ERASURE_LIMIT: Final = _register(
    20071, "erasure_limit", 503, "too many erasures are pending", retryable=True
)

# Consumers ---------------------------------------------------------------------------------------
CONSUMER_NOT_FOUND: Final = _register(10014, "consumer_not_found", 404, "consumer not found")
CONSUMER_EXISTS: Final = _register(
    10148, "consumer_exists", 409, "consumer already exists with a different configuration"
)
CONSUMER_CONFIG_INVALID: Final = _register(
    10091, "consumer_config_invalid", 422, "invalid consumer configuration"
)
CONSUMER_UPDATE_REFUSED: Final = _variant(
    STREAM_CONFIG_INVALID,
    "consumer_update_refused",
    409,
    "consumer configuration change not permitted",
)
CONSUMER_LIMIT: Final = _register(
    10026, "consumer_limit", 409, "maximum number of consumers reached"
)
CONSUMER_NAME_SEPARATOR: Final = _register(
    10127, "consumer_name_separator", 422, "consumer name contains a path separator"
)
CONSUMER_NAME_MISMATCH: Final = _register(
    10132, "consumer_name_mismatch", 422, "name, durable_name and the path do not match"
)
CONSUMER_PATH_MISMATCH: Final = _variant(
    STREAM_NAME_MISMATCH,
    "consumer_path_mismatch",
    422,
    "consumer name in the body does not match the path",
)
FILTERS_OVERLAP: Final = _register(10138, "filters_overlap", 422, "subject filters overlap")
FILTER_TWICE: Final = _register(
    10136, "filter_twice", 422, "filter_subject and filter_subjects cannot be used together"
)
FILTER_EMPTY: Final = _register(10139, "filter_empty", 422, "subject filter is empty")
START_INVALID: Final = _register(
    10094, "deliver_policy_invalid", 422, "start options do not match the deliver policy"
)
BACKOFF_INVALID: Final = _register(
    10116, "backoff_invalid", 422, "max_deliver is smaller than the number of backoff delays"
)
WORKQUEUE_ACKS: Final = _register(
    10084, "workqueue_needs_explicit_ack", 422, "workqueue stream requires explicit acks"
)
WORKQUEUE_UNFILTERED: Final = _register(
    10099,
    "workqueue_unfiltered",
    409,
    "multiple non-filtered consumers not allowed on workqueue stream",
)
WORKQUEUE_NOT_UNIQUE: Final = _register(
    10100, "workqueue_not_unique", 409, "filtered consumer not unique on workqueue stream"
)
WORKQUEUE_DELIVER_ALL: Final = _register(
    10101,
    "workqueue_needs_deliver_all",
    422,
    "consumer on a workqueue stream must use deliver policy all",
)
CONSUMER_REPLICAS_EXCEEDED: Final = _register(
    10126, "consumer_replicas_exceeded", 422, "consumer has more replicas than the stream"
)
CONSUMER_REPLICAS_DIFFER: Final = _register(
    10134, "consumer_replicas_differ", 422, "consumer must have as many replicas as the stream"
)
CONSUMER_LIMITS_EXCEEDED: Final = _register(
    10121, "max_ack_pending_limit", 422, "consumer max_ack_pending exceeds the stream's limit"
)
CONSUMER_THRESHOLD_EXCEEDED: Final = _register(
    10153, "inactive_threshold_limit", 422, "consumer inactive_threshold exceeds the stream's limit"
)
PULL_LIMIT: Final = _register(
    20020, "pull_limit_exceeded", 409, "pull request exceeds a limit of the consumer"
)
PULL_TOO_SMALL: Final = _register(
    20021, "message_exceeds_max_bytes", 409, "the next message is larger than max_bytes"
)
TOO_MANY_WAITERS: Final = _register(
    20022, "too_many_waiters", 429, "too many waiting requests", retryable=True
)
CONSUMER_DELETED: Final = _register(20023, "consumer_deleted", 410, "the consumer was deleted")
TOKEN_FORGED: Final = _register(
    20024, "ack_token_invalid", 403, "ack token is invalid or belongs to another consumer"
)
TOKEN_STALE: Final = _register(
    20025, "stale_token", 409, "ack token is stale: the consumer was deleted, re-created or reset"
)
PULL_INVALID: Final = _register(20026, "pull_invalid", 422, "invalid pull request")
NOT_SENT_HERE: Final = _register(
    20027, "not_sent_here", 409, "sequence is not awaiting acknowledgement on this socket"
)
SUBSCRIPTION_NOT_FOUND: Final = _register(
    20028, "subscription_not_found", 404, "no subscription with this sid on the socket"
)
SUBSCRIPTION_EXISTS: Final = _register(
    20029, "subscription_exists", 409, "sid is already in use on the socket"
)

# Requests ----------------------------------------------------------------------------------------
BAD_REQUEST: Final = _register(10003, "bad_request", 400, "bad request")
CONFLICTING_FIELDS: Final = _variant(
    BAD_REQUEST, "conflicting_fields", 422, "fields cannot be used together"
)
MALFORMED_BODY: Final = _register(10025, "malformed_body", 400, "request body cannot be parsed")
INVALID_FIELD: Final = _register(20030, "invalid_field", 422, "a field is invalid")
NOT_FOUND: Final = _register(20031, "not_found", 404, "resource not found")
METHOD_NOT_ALLOWED: Final = _register(20032, "method_not_allowed", 405, "method not allowed")
UNSUPPORTED_MEDIA: Final = _register(20033, "unsupported_media_type", 415, "unsupported media type")
NOT_ACCEPTABLE: Final = _register(20034, "not_acceptable", 406, "no acceptable representation")
BODY_TOO_LARGE: Final = _register(20035, "body_too_large", 413, "request body too large")
BATCH_TOO_LARGE: Final = _register(20036, "batch_too_large", 413, "too many items in one request")
REQUEST_HEADERS_TOO_LARGE: Final = _register(
    20037, "request_headers_too_large", 431, "request headers too large"
)
REQUEST_TIMEOUT: Final = _register(
    20038, "request_timeout", 408, "the request did not arrive in time", retryable=True
)
UNAUTHENTICATED: Final = _register(20039, "unauthenticated", 401, "missing or invalid token")
FORBIDDEN: Final = _register(20040, "forbidden", 403, "not permitted")
FOREIGN_HOST: Final = _register(20041, "foreign_host", 403, "Host header is not allowed")
FOREIGN_ORIGIN: Final = _register(20042, "foreign_origin", 403, "Origin is not allowed")
PRECONDITION_FAILED: Final = _register(
    20043, "precondition_failed", 412, "If-Match or If-None-Match condition failed"
)
URI_TOO_LONG: Final = _register(20044, "uri_too_long", 414, "request target too long")
UPGRADE_REQUIRED: Final = _register(
    20045, "upgrade_required", 426, "this resource requires a WebSocket connection"
)
SUBPROTOCOL_UNKNOWN: Final = _register(
    20046, "subprotocol_unknown", 400, "no supported WebSocket sub-protocol was offered"
)
OPERATION_UNKNOWN: Final = _register(20047, "operation_unknown", 422, "unknown operation")
OPERATION_UNAVAILABLE: Final = _register(
    20048, "operation_unavailable", 422, "operation is not available in this version"
)
NOT_IMPLEMENTED: Final = _register(20049, "not_implemented", 501, "not implemented")

# Service -----------------------------------------------------------------------------------------
OUTCOME_UNKNOWN: Final = _register(
    20050,
    "outcome_unknown",
    504,
    "outcome unknown: the request may have taken effect",
    retryable=True,
)
OVERLOADED: Final = _register(20051, "overloaded", 503, "server is overloaded", retryable=True)
NOT_READY: Final = _register(20052, "not_ready", 503, "server is not ready", retryable=True)
DATA_LOST: Final = _register(
    20053, "data_lost", 503, "stored data is damaged; the stream is stopped"
)
STORAGE_FULL: Final = _register(
    20054, "storage_full", 507, "no disk space left for writes", retryable=True
)
MEMORY_FULL: Final = _register(
    10028, "insufficient_memory", 507, "streams in memory have reached their limit", retryable=True
)
STORAGE_FAILED: Final = _register(
    20055, "storage_failed", 503, "storage is not accepting writes", retryable=True
)
STORAGE_READ_FAILED: Final = _register(
    20057, "storage_read_failed", 503, "stored data could not be read from disk", retryable=True
)
NOT_LEADER: Final = _register(
    20058, "not_leader", 503, "another node leads this stream", retryable=True
)
REPLICAS_DIFFER: Final = _register(
    20059,
    "replicas_differ",
    503,
    "replicas of the stream differ, and none is known to be right",
    retryable=True,
)
SUBJECT_KEYS_FULL: Final = _register(
    20080, "subject_keys_full", 507, "maximum number of subject keys reached", retryable=True
)
NUMBER_FORGOTTEN: Final = _register(
    20081,
    "number_forgotten",
    409,
    "which messages of the batch are stored is not known any more",
)
SHUTTING_DOWN: Final = _register(
    20056, "shutting_down", 503, "server is shutting down", retryable=True
)
INTERNAL: Final = _register(20099, "internal", 500, "internal error")


@dataclass(frozen=True, slots=True)
class FieldProblem:
    """An invalid field: ``pointer`` is a JSON Pointer into the body, or the parameter's name."""

    pointer: str
    message: str


@dataclass(slots=True)
class ApiError(Exception):
    """A refusal (or unknown outcome) on its way to the caller.

    ``applied`` is False if the request certainly had no effect, and None if that is not known.
    ``retry_after_s`` becomes the Retry-After header. ``leader`` is the name of the node that leads,
    if the refusal is NOT_LEADER and the node is known.
    """

    spec: ErrorSpec
    detail: str = ""
    fields: list[FieldProblem] = field(default_factory=list)
    retry_after_s: int | None = None
    applied: bool | None = None
    leader: str = ""

    def __str__(self) -> str:
        return f"{self.spec.name}: {self.detail or self.spec.title}"


def from_code(code: int, detail: str) -> ApiError:
    """Return the error of one result among several, which storage refused with this code."""
    spec = REGISTRY.get(code, INTERNAL)
    # Only an unknown outcome may have had an effect.
    return ApiError(spec, detail, applied=None if spec is OUTCOME_UNKNOWN else False)
