"""Answers of the node as lines of a story."""

import json
from collections.abc import Iterator
from typing import Final

from contrail_common.errors import REGISTRY, ApiError
from contrail_common.model import (
    ConsumerInfo,
    Headers,
    SequencePair,
    StoredMessage,
    StreamInfo,
)
from contrail_common.timeunits import format_duration
from contrail_link.contract.consume import AckResult, Delivery, PullResult
from contrail_link.contract.publish import PubResult
from contrail_storage.core.consumer_machine import ConsumerMachine
from tests.scenarios.clock import shown_time
from tests.scenarios.world import EndedPull

_PAYLOAD_BYTES_SHOWN: Final = 24


def refused(error: ApiError) -> str:
    """A refusal: JetStream's code, the name, and the sentence."""
    return f"refused {error.spec.code} {error.spec.name}: {error.detail or error.spec.title}"


def _refused_with(code: int, detail: str) -> str:
    return refused(ApiError(REGISTRY[code], detail))


def published(results: list[PubResult]) -> list[str]:
    """One line for each run of stored messages, for each duplicate and for each refusal."""
    lines: list[str] = []
    run: list[int] = []
    for result in results:
        stored = not result.code and not result.duplicate
        if run and not stored:
            lines.append(_run(run))
            run = []
        if stored:
            run.append(result.seq)
        elif result.duplicate:
            lines.append(f"seq {result.seq} duplicate")
        else:
            lines.append(_refused_with(result.code, result.detail))
    return [*lines, _run(run)] if run else lines


def _run(seqs: list[int]) -> str:
    assert seqs == list(range(seqs[0], seqs[0] + len(seqs))), seqs
    return f"seq {seqs[0]}" if len(seqs) == 1 else f"seq {seqs[0]}-{seqs[-1]}"


def message(stored: StoredMessage) -> str:
    """A message as a reader gets it."""
    return f"{_content(stored)} at {shown_time(stored.time_ns)}"


def _content(stored: StoredMessage) -> str:
    return f"seq {stored.seq} {stored.subject} {_payload(stored.payload)}{_headers(stored.headers)}"


def _payload(payload: bytes) -> str:
    if len(payload) > _PAYLOAD_BYTES_SHOWN:
        return f"<{len(payload)} bytes>"
    return json.dumps(payload.decode(errors="backslashreplace"))


def _headers(headers: Headers | None) -> str:
    if not headers:
        return ""
    lines = [f"{name}: {value}" for name, values in headers.items() for value in values]
    return f" [{', '.join(lines)}]"


def pulled(result: PullResult) -> list[str]:
    """The deliveries of a pull."""
    return [_delivery(one) for one in result.deliveries] or ["no messages"]


def _delivery(delivery: Delivery) -> str:
    return (
        f"{_content(delivery.message)} consumer_seq {delivery.consumer_seq}, "
        f"num_delivered {delivery.num_delivered}, num_pending {delivery.num_pending}"
    )


def ended_pull(pull: EndedPull) -> Iterator[str]:
    """How a pull that waited ended."""
    yield f"pull {pull.number} ends at {format_duration(pull.after_ns)}"
    match pull.outcome:
        case PullResult():
            yield from (f"  {line}" for line in pulled(pull.outcome))
        case ApiError():
            yield f"  {refused(pull.outcome)}"
        case None:
            yield "  cancelled"


def acknowledged(seqs: list[int], results: list[AckResult]) -> list[str]:
    """Nothing for what was taken, a line for what was refused."""
    return [
        f"seq {seq} {_refused_with(result.code, result.detail)}"
        for seq, result in zip(seqs, results, strict=True)
        if result.code
    ]


def stream_info(info: StreamInfo) -> list[str]:
    """What a stream holds."""
    state = info.state
    first_at = f" at {shown_time(state.first_ts_ns)}" if state.first_ts_ns else ""
    last_at = f" at {shown_time(state.last_ts_ns)}" if state.last_ts_ns else ""
    return [
        f"messages {state.messages}, bytes {state.bytes}, "
        f"first_seq {state.first_seq}{first_at}, last_seq {state.last_seq}{last_at}",
        f"num_subjects {state.num_subjects}, num_deleted {state.num_deleted}, "
        f"consumer_count {state.consumer_count}",
    ]


def consumer_info(info: ConsumerInfo) -> list[str]:
    """How far a consumer is."""
    return [
        f"delivered {_position(info.delivered)}, ack_floor {_position(info.ack_floor)}",
        f"num_pending {info.num_pending}, num_ack_pending {info.num_ack_pending}, "
        f"num_redelivered {info.num_redelivered}, num_waiting {info.num_waiting}",
    ]


def _position(pair: SequencePair) -> str:
    return f"consumer_seq {pair.consumer_seq} stream_seq {pair.stream_seq}"


def pending(consumer: ConsumerMachine) -> list[str]:
    """The deliveries that are not acknowledged, and when each is due again."""
    return [
        f"seq {seq} consumer_seq {item.consumer_seq}, num_delivered {item.attempts}, "
        f"due at {shown_time(item.deadline_ns)}"
        for seq, item in sorted(consumer.pending.items())
    ] or ["nothing is pending"]
