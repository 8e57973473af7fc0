"""The feed of one subscription, which pulls within its credit, pushes, and forwards its acks."""

import asyncio
import contextlib
import secrets
import time
from typing import Final

import msgspec
import structlog

from contrail_common import errors
from contrail_common.config_rules import ConsumerDraft, normalise_consumer
from contrail_common.cursors import read_cursor
from contrail_common.errors import ApiError
from contrail_common.model import ConsumerConfig, ConsumerInfo
from contrail_common.timeunits import INT64_MAX, NS_PER_S, parse_time
from contrail_edge.http.problems import invalid_field
from contrail_edge.http.steps import at_once
from contrail_gateway.binding import Bound
from contrail_gateway.core.frames import FrameId, Gap, Gone, Ok, Sub, Subscribed
from contrail_gateway.core.pulled import Listed, Pulled
from contrail_gateway.core.session import Settlement
from contrail_gateway.core.sharded_order import ShardedOrder
from contrail_gateway.core.subscription import PullTerms, Subscription
from contrail_gateway.deliveries import SignTokens, signer
from contrail_gateway.sockets.feed_acks import FeedAcks
from contrail_gateway.sockets.feed_host import Host
from contrail_link.contract.consume import PullRequest, PullResult

_log: Final = structlog.get_logger(__name__)

_EXPIRES_NS: Final = 5 * NS_PER_S
# Seconds between two uses of the subscription's own consumer while there is no credit.
_TOUCH_S: Final = 10.0
_TOUCHES: Final = 3
"""Touches of an idle consumer within its inactive threshold, so that it is not removed."""
# If the gateway is lost, the consumers of its subscriptions are removed after this time.
_INACTIVE_NS: Final = 30 * NS_PER_S
_NAME_BYTES: Final = 8
_UNNAMED: Final = "own"
_RETRY_MIN_S: Final = 0.05
_RETRY_MAX_S: Final = 2.0
_GONE: Final = {
    errors.STREAM_NOT_FOUND: "the stream was deleted",
    errors.CONSUMER_NOT_FOUND: "the consumer was deleted",
    errors.CONSUMER_DELETED: "the consumer was deleted",
}


class _GoneError(Exception):
    """The subscription cannot continue; the text is the reason for the client."""


class Feed:
    """Serves one subscription, from its ``sub`` frame to its end.

    One task pulls and pushes; a second one, of `acks`, forwards acknowledgements while there are
    any. All fields belong to the event loop.
    """

    def __init__(self, host: Host, sub: Subscription, frame: Sub) -> None:
        self.sub = sub
        self.acks = FeedAcks(host, sub)
        # The session of the socket; it outlives the feed.
        self._host = host
        # The frame that asked for the subscription. Its start only applies to the first consumer.
        self._frame = frame
        # The binding that keeps the current consumer from being removed as unused.
        self._bound = Bound(host.link)
        # The configuration for the subscription's own consumer, still without a name; None if the
        # subscription names a consumer. An ordered subscription creates it again after a loss.
        self._config: ConsumerConfig | None = None
        # Signs ack tokens for `acks.addresses`; None until a delivery needs one.
        self._sign: SignTokens | None = None
        # Set when credit was added; the pump waits for it.
        self._more = asyncio.Event()
        # Name of the consumer that the feed created and must delete, or "".
        self._own_name = ""
        # Seconds between two touches of the own consumer while there is no credit.
        self._touch_s = _TOUCH_S
        # The last sequence of the stream at the latest empty pull. If the next pull is empty too,
        # nothing up to this sequence is left for the subscription. One shard only.
        self._covered_seq = 0
        # Seconds before the next retry; doubled by each failure, reset by a successful pull.
        self._retry_s = _RETRY_MIN_S
        # True while `_task` pulls. Only then may `leave` cancel it.
        self._pumping = False
        # True if the subscription waits for acknowledgements after its last push.
        self._drained = False
        # Id of an `unsub` frame without an answer. It is answered once pulling has stopped.
        self._left: FrameId | None = None
        if frame.consumer is None:
            self._config = _own_config(frame)
        # Runs `_run`, from the creation of the consumer to the end of the subscription.
        self._task = asyncio.create_task(self._run())

    # For the session -----------------------------------------------------------------------------
    def more(self) -> None:
        """Wake the pump: credit was added."""
        self._more.set()

    def leave(self, frame_id: FrameId | None, *, drain: bool) -> None:
        """Stop pulling. With ``drain``, wait up to the ack wait for acknowledgements first."""
        self.sub.leaving = True
        self._left = frame_id
        self._drained = drain
        if self._pumping:
            # Before and after pulling, the task sees `leaving` by itself. Cancelling it then would
            # interrupt the creation of the consumer, or the wait for acknowledgements.
            self._task.cancel()

    def stop(self) -> None:
        """End the feed because the socket is lost, and return unsent messages to the consumer."""
        self._drained = False  # nobody is left to acknowledge
        self._task.cancel()

    # Life cycle ----------------------------------------------------------------------------------
    async def _run(self) -> None:
        try:
            if await self._begin():
                await self._serve()
        except Exception:
            _log.exception("feed_failed")
            self._host.send(Gone(sid=self.sub.sid, reason=errors.INTERNAL.title))
        finally:
            self._give_back()
            self._answer_leave()
            # In tasks of their own: the subscription ends now, and its socket may be gone.
            self._host.later(asyncio.create_task(self._bound.end()))
            self._host.ended(self.sub.sid)
            if self._own_name:
                self._host.later(asyncio.create_task(self._delete(self._own_name)))

    async def _begin(self) -> bool:
        """Find or create the consumer, and answer the client; False if storage refused."""
        sub, frame = self.sub, self._frame
        try:
            if self._config is None:
                assert frame.consumer is not None
                info = await self._host.link.consumer_info(sub.stream, frame.consumer)
            else:
                info = await self._make(self._config)
            await self._bound.to(sub.stream, info.config.name)
            if sub.ordered and info.shards:
                sub.order = await self._sharded_order(info)
        except ApiError as error:
            self._host.refuse(frame.id, sub.sid, error)
            return False
        sub.opened(info, time.monotonic_ns(), frame.opt_start_seq or 0)
        if frame.id is not None:
            self._host.send(
                Subscribed(
                    id=frame.id,
                    sid=sub.sid,
                    consumer=sub.consumer,
                    num_pending=info.num_pending,
                    cursor=sub.order.sent_to() if sub.order is not None else "",
                )
            )
        return True

    async def _sharded_order(self, info: ConsumerInfo) -> ShardedOrder:
        text = self._frame.opt_start_cursor
        begin = read_cursor(text) if text else None  # storage has already checked the cursor
        return ShardedOrder(await self._host.link.stream_info(self.sub.stream), info, begin)

    async def _serve(self) -> None:
        sub = self.sub
        try:
            self._pumping = True
            await self._pump()
        except asyncio.CancelledError:
            if not sub.leaving:
                raise
            # `leave` only cancels the pump. The rest of this task still has work to do.
            asyncio.current_task().uncancel()  # type: ignore[union-attr]
        except _GoneError as gone:
            self._host.send(Gone(sid=sub.sid, reason=str(gone)))
            return
        finally:
            self._pumping = False
        self._give_back()
        await self._bound.end()
        self._answer_leave()
        if self._drained:
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(sub.ack_wait_ns / NS_PER_S):
                    await self.acks.wait_settled()

    def _answer_leave(self) -> None:
        """Answer `unsub`, however pulling ended; only the first call has an effect."""
        if self._left is not None:
            self._host.send(Ok(id=self._left))
            self._left = None

    def _give_back(self) -> None:
        """Return messages that were pulled and not sent to the consumer, by a nak."""
        seqs = self.sub.give_back()
        if seqs:
            at_once(self.acks.settle(Settlement("nak", seqs, [], 0, ""), None))

    # Pulling -------------------------------------------------------------------------------------
    async def _pump(self) -> None:
        sub = self.sub
        # The client names the next message it needs. It may have been removed since, and only a
        # `gap` would tell the client.
        if self._frame.opt_start_seq or self._frame.opt_start_cursor:
            try:
                await self._report_loss(INT64_MAX)
            except ApiError as error:
                await self._recover(error)
        while not sub.leaving:
            self._push(sub.take())
            if sub.may_send:
                await asyncio.sleep(0)
                continue
            terms = sub.wanted()
            if terms is None:
                await self._wait_for_credit()
                continue
            # Do not pull what the client cannot take yet: other subscribers could have the
            # messages.
            await self._host.wait_writable()
            try:
                await self._deliver(await self._pull(terms))
                self._retry_s = _RETRY_MIN_S
            except ApiError as error:
                await self._recover(error)
            # A pull that finds messages never suspends this task. Let other tasks run.
            await asyncio.sleep(0)

    async def _pull(self, terms: PullTerms) -> PullResult:
        sub = self.sub
        return await self._host.link.pull(
            PullRequest(
                stream=sub.stream,
                consumer=sub.consumer,
                batch=terms.batch,
                max_bytes=terms.max_bytes,
                expires_ns=min(_EXPIRES_NS, sub.expires_max_ns or _EXPIRES_NS),
                columns=not sub.acks,
            )
        )

    async def _wait_for_credit(self) -> None:
        self._more.clear()
        try:
            async with asyncio.timeout(self._touch_s):
                await self._more.wait()
        except TimeoutError:
            if self.sub.own:
                await self._touch()

    async def _touch(self) -> None:
        """Use the consumer (an empty acknowledgement), so that it is not removed as inactive."""
        sub = self.sub
        try:
            await self._host.link.acknowledge(sub.stream, sub.consumer, [], False)
        except ApiError as error:
            await self._recover(error)

    async def _recover(self, error: ApiError) -> None:
        """Repair the subscription after a failed call, or raise _GoneError."""
        while True:
            try:
                await self._retry_after(error)
                return
            except ApiError as another:
                error = another

    async def _retry_after(self, error: ApiError) -> None:
        sub, spec = self.sub, error.spec
        if spec is errors.PULL_TOO_SMALL:
            # The next message alone exceeds the limit of a batch. It has credit, so ask for it.
            sub.too_large()
        elif spec is errors.PULL_LIMIT:
            # Someone lowered the limits of the consumer: read them again.
            await self._pause()
            sub.limited(await self._host.link.consumer_info(sub.stream, sub.consumer))
        elif sub.ordered and spec in (errors.CONSUMER_NOT_FOUND, errors.CONSUMER_DELETED):
            await self._resume()
        elif spec.retryable:
            await self._pause()
        else:
            raise _GoneError(_GONE.get(spec, spec.title))

    async def _pause(self) -> None:
        await asyncio.sleep(self._retry_s)
        self._retry_s = min(2 * self._retry_s, _RETRY_MAX_S)

    # Pushing -------------------------------------------------------------------------------------
    async def _deliver(self, result: PullResult) -> None:
        pulled = _pulled(result)
        if self.sub.ordered and not await self._follows(pulled):
            return
        if pulled is not None:
            self._remember(result)
            self._push(self.sub.take(pulled))

    def _remember(self, result: PullResult) -> None:
        """Keep the addresses of the deliveries, which their acknowledgements must carry."""
        addresses = result.addresses or {0: (result.shard_id, result.consumer_id, result.epoch)}
        if addresses == self.acks.addresses:
            return
        # This is a new consumer, or the same in a new epoch. Storage refuses acknowledgements of an
        # earlier epoch.
        self.sub.ledger.clear()
        self.acks.addresses = addresses
        if self.sub.acks:
            self._sign = signer(self._host.tokens, self.sub.stream, self.sub.consumer, result)

    def _push(self, pulled: Pulled | None) -> None:
        if pulled is not None:
            self.sub.sent(pulled, time.monotonic_ns())
            self._host.push(self.sub, pulled, self._sign)

    # Order ---------------------------------------------------------------------------------------
    async def _follows(self, pulled: Pulled | None) -> bool:
        """Return True if ``pulled`` follows the messages taken before it.

        Otherwise note what an empty pull proves, or resume with a new consumer.
        """
        sub = self.sub
        if sub.order is not None:
            return await self._follows_in_shards(sub.order, pulled)
        if pulled is None:
            # An empty pull proves that nothing is left up to the end that was seen before it began,
            # but nothing about later messages.
            sub.passed(self._covered_seq)
            self._covered_seq = await self._report_loss(INT64_MAX)
            return False
        if not sub.in_order(pulled):
            await self._resume()
            return False
        if sub.leaves_a_hole(pulled):
            await self._report_loss(pulled.first_seq)
        sub.advance(pulled)
        return True

    async def _follows_in_shards(self, order: ShardedOrder, pulled: Pulled | None) -> bool:
        deliveries = pulled.deliveries if isinstance(pulled, Listed) else []
        if not deliveries:
            order.passed()
            await self._report_loss(INT64_MAX)
            order.cover()
            return False
        if not order.in_order(deliveries):
            await self._resume()
            return False
        if order.leaves_a_hole(deliveries):
            order.stop_before(deliveries)
            await self._report_loss(INT64_MAX)
        order.advance(deliveries)
        return True

    async def _report_loss(self, before_seq: int) -> int:
        """Send a ``gap`` frame if unsent messages have left the stream.

        Returns the last sequence of the stream.
        """
        info = await self._host.link.stream_info(self.sub.stream)
        if self.sub.order is not None:
            self.sub.order.look_at(info)
            for shard, (first, last) in self.sub.order.lost():
                cause = "the messages are no longer in the stream"
                gap = Gap(sid=self.sub.sid, first=first, last=last, cause=cause, shard=shard)
                self._host.send(gap)
        state = info.state
        lost = self.sub.lost_below(state.first_seq, before_seq)
        if lost is not None:
            first, last = lost
            cause = "the messages are no longer in the stream"
            self._host.send(Gap(sid=self.sub.sid, first=first, last=last, cause=cause))
        return state.last_seq

    async def _resume(self) -> None:
        """Replace a lost consumer by a new one that starts at the next unsent message."""
        sub = self.sub
        assert self._config is not None
        await self._pause()
        # The consumer may still exist: a lost delivery, or one to another client, broke the order.
        await self._delete(sub.consumer)
        self._covered_seq = 0
        config = msgspec.structs.replace(
            self._config,
            deliver_policy="by_start_sequence",
            opt_start_seq=0 if sub.order else sub.next_seq,
            opt_start_time_ns=0,
            opt_start_cursor="",
        )
        if sub.order is not None:
            config = msgspec.structs.replace(config, opt_start_cursor=sub.order.taken_to())
        info = await self._make(config)
        await self._bound.to(sub.stream, info.config.name)
        sub.opened(info, time.monotonic_ns(), sub.next_seq)
        if sub.order is not None:
            sub.order.resumed(info)

    # The consumer --------------------------------------------------------------------------------
    async def _make(self, config: ConsumerConfig) -> ConsumerInfo:
        """Create the subscription's own consumer under a new random name."""
        self._own_name = secrets.token_hex(_NAME_BYTES)
        named = msgspec.structs.replace(config, name=self._own_name)
        stream, link = self.sub.stream, self._host.link
        try:
            made, _ = await link.put_consumer(stream, named, "create", None, False)
        except ApiError as error:
            if error.spec is not errors.CONSUMER_THRESHOLD_EXCEEDED:
                raise
            # Use the maximum that the stream allows. The feed adapts its touches to it below.
            named = msgspec.structs.replace(named, inactive_threshold_ns=0)
            made, _ = await link.put_consumer(stream, named, "create", None, False)
        idle_s = made.config.inactive_threshold_ns / NS_PER_S
        self._touch_s = min(_TOUCH_S, idle_s / _TOUCHES)
        return made

    async def _delete(self, consumer: str) -> None:
        with contextlib.suppress(ApiError):  # the inactive threshold removes it otherwise
            await self._host.link.delete_consumer(self.sub.stream, consumer)


def _pulled(result: PullResult) -> Pulled | None:
    """Return the messages of a pull, or None if there are none."""
    if result.columns is not None:
        return result.columns
    return Listed(result.deliveries) if result.deliveries else None


def _own_config(frame: Sub) -> ConsumerConfig:
    """Return the consumer configuration for a subscription that names no consumer.

    Raises INVALID_FIELD and CONSUMER_CONFIG_INVALID.
    """
    if frame.replay_policy == "original":
        message = "original is not available in this version"
        raise invalid_field("/replay_policy", message, errors.CONSUMER_CONFIG_INVALID)
    draft = ConsumerDraft(
        name=_UNNAMED,
        durable=False,
        ack_policy="none" if frame.ordered else "explicit",
        filter_subjects=tuple(frame.filter_subjects or ()),
        deliver_policy=frame.deliver_policy or "all",
        inactive_threshold_ns=_INACTIVE_NS,
        num_replicas=frame.num_replicas or 0,
        mem_storage=bool(frame.mem_storage),
    )
    if frame.opt_start_seq is not None:
        draft["opt_start_seq"] = frame.opt_start_seq
    if frame.opt_start_cursor is not None:
        if frame.opt_start_seq is not None or frame.opt_start_time is not None:
            raise invalid_field(
                "/opt_start_cursor", "cannot be used together with opt_start_seq or opt_start_time"
            )
        config = normalise_consumer(draft)
        return msgspec.structs.replace(
            config, deliver_policy="by_start_sequence", opt_start_cursor=frame.opt_start_cursor
        )
    if frame.opt_start_time is not None:
        try:
            draft["opt_start_time_ns"] = parse_time(frame.opt_start_time)
        except ValueError as error:
            raise invalid_field("/opt_start_time", str(error)) from None
    return normalise_consumer(draft)
