"""What to do next when following, without I/O: the same in both flavours, and in the tests' simulated world.

A shell connects, sends, receives, stores and calls the application; in which order, and what anything that the
server says means for that, is decided here.
"""

from collections import deque
from collections.abc import Callable, Iterable, Mapping
from typing import Final

import numpy as np

from upr_client.changes_options import ChangesOptions
from upr_client.delivered import Taken, batch_of, rollback_of
from upr_client.events import ChangeBatch, Rollback
from upr_client.incoming import Clock, Incoming, named
from upr_client.ledger import Ledger
from upr_client.membership import Membership
from upr_client.messages import ack_message, is_of_group, start_message
from upr_client.ownership import Ownership, fenced
from upr_client.progress import ChangesStatus, Progress
from upr_client.recent_keys import RecentKeys
from upr_client.reconnecting import Reconnecting
from upr_client.saving import Saving
from upr_client.steps import Outcome, Step
from upr_protocol.block import U64
from upr_protocol.consumer import ConsumerSession, Fate, ProtocolError, State, fate_of
from upr_protocol.errors import InvalidArgumentError, RollbackError, UprError
from upr_protocol.limits import PARTITIONS
from upr_protocol.position import Position
from upr_protocol.wire.status import error_of
from upr_protocol.wire.v1 import change_stream_service_pb2 as stream_pb2

_FINISH_SECONDS: Final = 1.0


class Following:
    """Everything of ``AsyncChanges`` that is decided and not done.

    Args:
        partitions: which to follow, None for all.
        say: takes words for people.

    Attributes:
        taken: what the application has and did not consume whole.
        ownership: of positions that are kept in the server; None for others.
        ledger: what is handed out and not acknowledged; None when asking for more acknowledges.
        progress: counts.
    """

    def __init__(
        self,
        options: ChangesOptions,
        partitions: Iterable[int] | None,
        *,
        say: Callable[[str], None],
        clock: Clock,
    ) -> None:
        self.taken: Taken | None = None
        self.ownership: Ownership | None = None
        if options.kept_in_server:
            self.ownership = Ownership(options.group or options.consumer, options.member)
        self.ledger = Ledger() if options.acknowledge == "manual" else None
        self.progress = Progress()
        self._options = options
        self._say = say
        self._clock = clock
        self._keys = RecentKeys(options.recent_key_bytes)
        self._incoming = Incoming(options.session(partitions, {}), self.progress, say, clock)
        self._saving = Saving(options, self._incoming, self.ledger, self.ownership, clock)
        self._offered: list[Rollback] = []
        self._calls = Reconnecting(
            options.heartbeat_seconds, options.retry_seconds, self.progress, say, clock
        )
        self._held: deque[stream_pb2.FollowResponse] = deque()
        self._opening_at = clock.now()

    @property
    def session(self) -> ConsumerSession:
        """The state machine of the partitions."""
        return self._incoming.session

    @property
    def handshakes(self) -> deque[tuple[int, str, str]]:
        """The newest rollback answers: partition, rule, words."""
        return self._incoming.handshakes

    def load(self, positions: Mapping[int, Position]) -> None:
        """Go on from stored positions; before anything else."""
        self._incoming.session = self._options.session(self.session.partitions, positions)
        for partition in self.session.partitions:
            self._begin(partition)
        self._calls.heard()
        self._saving.load()

    def _begin(self, partition: int) -> None:
        self._keys.begin(partition, self.session.seqno(partition))
        if self.ledger is not None:
            self.ledger.begin(partition, self.session.position(partition))

    def next_step(self, connected: bool) -> Step:
        """Return what to do now; ``connected``: there is a call."""
        now = self._clock.now()
        if self.has_lapsed:
            if connected and self._saving.is_due(now, hurry=True):
                # By the server's count the lease may go on, and what it stores was consumed while it was this one's.
                return Step.SAVE
            self._lapse(now)
        if self.session.finished:
            return Step.FINISH
        if self.session.undoing:
            return Step.UNDO
        if not connected:
            return Step.CONNECT
        if self.ownership is not None and self.ownership.to_load:
            return Step.LOAD
        releasable = bool(self._releasable(now))
        if self._saving.is_due(now, hurry=releasable):
            return Step.SAVE
        return Step.RELEASE if releasable and not self._saving.has_changed else Step.RECEIVE

    @property
    def _is_full(self) -> bool:
        ledger = self.ledger
        return ledger is not None and ledger.outstanding >= self._options.unacknowledged_max

    @property
    def waits_for_acknowledgements(self) -> bool:
        """Whether something is to be done once more is acknowledged."""
        return bool(self._held or (self._membership and self._membership.releasing))

    # What the application has consumed.

    def may_hand_out(self, partition: int) -> bool:
        """Whether what was received of a partition may still be handed out: not when it was lost meanwhile, or a
        member's lease has ended. What was consumed before that still counts, if the server agrees.
        """
        if self.has_lapsed:
            self.acknowledge_part()
            self._let_go()
            return False
        return self.session.state(partition) is not State.IDLE

    def acknowledge_part(self) -> None:
        """Count what was consumed of the batch that is being iterated over."""
        if self.taken is not None and self.taken.delivery is not None:
            self.session.acknowledge_part(self.taken.delivery, *self.taken.consumed())

    def acknowledge(self) -> None:
        """The application asks for the next batch: all before it was received, and undone.

        Raises:
            InvalidArgumentError: not all of it was: it was asked for one by one before.
        """
        if self.taken is not None and self.taken.has_more:
            raise InvalidArgumentError(
                "the changes were iterated one by one, in the middle of what came together",
                hint="go on one by one, or take batches, or run, from the beginning",
            )
        taken, self.taken = self.taken, None
        if taken is not None and taken.delivery is not None:
            self.session.acknowledge(taken.delivery)
        offered, self._offered = self._offered, []
        for rollback in offered:
            self.rolled_back(rollback)

    def position(self, partition: int) -> Position:
        """The position of what was dealt with; ``acknowledge_part`` comes first."""
        received = self.session.position(partition)
        return received if self.ledger is None else self.ledger.position(partition, received)

    def begin_save(self) -> dict[int, Position]:
        """Return the positions to store, in one atomic write; ``saved`` or ``not_saved`` follows."""
        self.acknowledge_part()
        return self._saving.news({p: self.position(p) for p in self._saving.begin()})

    def saved(
        self, positions: Mapping[int, Position], refused: Iterable[int] = ()
    ) -> stream_pb2.FollowRequest | None:
        """They are stored, but for those refused as another's. Return what to tell the server, None for nothing.

        Raises:
            FencedError: a sole owner is none any more.
        """
        gone = set(refused)
        kept = {p: at for p, at in positions.items() if p not in gone}
        self._saving.stored(kept)
        ownership = self.ownership
        if ownership is None:
            return ack_message((p, at.seqno) for p, at in kept.items()) if kept else None
        if gone and ownership.membership is None:
            raise fenced(ownership.consumer, gone)
        if gone and ownership.was_told_meanwhile:
            self.not_saved({p: positions[p] for p in gone})
        elif gone and ownership.membership is not None:
            self._lose(ownership.membership.forget(gone), "they are another member's by now")
        return None

    def not_saved(self, positions: Mapping[int, Position], *, wait: bool = False) -> None:
        """They could not be stored; ``wait``: that is to be tried again after a pause only."""
        self._saving.failed(positions, wait=wait)

    def fenced(self, error: UprError) -> None:
        """Storing was refused as another's; see ``Saving.fenced``."""
        self._saving.fenced(error)

    # Undoing.

    def rollbacks(self) -> list[Rollback]:
        """Return what the application has to undo.

        Raises:
            RollbackError: it did not say how it wants to be told, or that it wants to fail.
        """
        rollbacks = [
            rollback_of(item, self._keys.above(item.partition, item.seqno))
            for item in self.session.undoing
        ]
        if self._options.on_rollback in (None, "fail"):
            first = rollbacks[0]
            raise RollbackError(
                f"{len(rollbacks)} partitions must roll back, the first is {first.partition}, from seqno "
                f"{first.from_seqno} to {first.seqno}: {first.words}",
                hint='undo the data above and go on: pass on_rollback=a function, "event" or "restart"',
            )
        return rollbacks

    def offer(self, rollbacks: list[Rollback]) -> ChangeBatch:
        """Return them as a batch; they are undone when the application asks for the next one."""
        self._offered = list(rollbacks)
        batch = ChangeBatch([], [], rollbacks)
        self.taken = Taken(batch, None)
        return batch

    def rolled_back(self, rollback: Rollback) -> None:
        """The application undid a partition's data."""
        partition = rollback.partition
        if not any(item.partition == partition for item in self.session.undoing):
            # Meanwhile the partition went to another member.
            return
        self.session.rolled_back(partition)
        self._keys.rolled_back(partition, rollback.seqno)
        if self.ledger is not None:
            self.ledger.rolled_back(partition, self.session.position(partition))
        self._incoming.must_save += 1

    # The call.

    def open_message(self, bucket: str) -> stream_pb2.Open:
        """Return the first message of a call that is opened now."""
        self._opening_at = self._clock.now()
        version = self._calls.version(self.session.bucket_version)
        return self._options.open_message(bucket, version, self._calls.interval)

    def opened(self, opened: stream_pb2.Opened) -> None:
        """The call was accepted."""
        self._calls.opened()
        self._held.clear()
        self.session.opened(opened.bucket_version)
        self._saving.opened()
        if self.ownership is not None:
            lost = self.ownership.opened(opened, self.session.partitions, self._opening_at)
            self._lose(lost, "the server was started anew")

    def not_opened(self, error: UprError) -> bool:
        """The call was not accepted. Return whether to open another one at once; else ``lost`` follows."""
        return self._calls.not_opened(error, self.session.bucket_version)

    def lost(self, error: UprError) -> float:
        """The call is lost. Return how many seconds to wait before the next one.

        Raises:
            UprError: trying again does not mend it, or was tried for long enough.
        """
        self.session.disconnected()
        self._held.clear()
        return self._calls.lost(error)

    def due(self) -> tuple[list[stream_pb2.FollowRequest], float | None]:
        """Return what is to be sent now, and after how many seconds there is more to do, None for not by itself."""
        now = self._clock.now()
        messages = []
        waits: list[float] = []
        if not self._saving.must:
            due, next_due = self._incoming.retries.split(self.session.ready(), now)
            if due:
                messages.append(start_message(self.session, due, self._options.until_now))
            if next_due is not None:
                waits.append(next_due - now)
        saving_due = self._saving.next_due(now, hurry=bool(self._releasable(now)))
        if saving_due is not None:
            waits.append(saving_due)
        membership = self._membership
        if membership is not None:
            messages += membership.due(now)
            waits.append(membership.next_due(now))
        return messages, max(min(waits), 0.0) if waits else None

    # Positions in the server, and groups.

    def loaded(self, response: stream_pb2.LoadPositionsResponse) -> None:
        """The server said what it has stored of the partitions that were to be loaded.

        Raises:
            InvalidArgumentError: a position is out of range or contradicts itself.
        """
        assert self.ownership is not None
        anew = self.ownership.found(response)
        self.session.unfollow(set(anew).intersection(self.session.partitions))
        self.session.follow(anew)
        self._saving.forget(anew)
        for partition in anew:
            self._begin(partition)

    @property
    def _membership(self) -> Membership | None:
        return self.ownership.membership if self.ownership is not None else None

    def _take_of_group(self, message: stream_pb2.FollowResponse) -> None:
        membership, now = self._membership, self._clock.now()
        if membership is None or self.ownership is None:
            raise ProtocolError("an assignment, and this is no member of a group")
        if message.WhichOneof("message") == "assignment":
            share = membership.assigned(message.assignment, now)
        else:
            share = membership.renewed(message.renewed.number, now)
        if share is None:
            return
        self._lose(share.lost, "")
        self.ownership.to_load.update(share.gained)
        # What is to be handed over is followed no further, and its position is still this member's to store.
        self.session.finish(set(share.release).intersection(self.session.partitions))
        self.session.resume(set(share.kept).intersection(self.session.partitions))
        self._say(
            f"generation {membership.generation}: {len(membership.owned)} partitions, {len(share.gained)} more, "
            f"{len(share.lost)} fewer, {len(share.release)} to be handed over"
        )

    def _lose(self, partitions: list[int], why: str) -> None:
        if not partitions:
            return
        assert self.ownership is not None
        self.ownership.lost(partitions)
        self.session.unfollow(set(partitions).intersection(self.session.partitions))
        self.progress.mended(set(partitions))
        self._saving.forget(partitions)
        if self.ledger is not None:
            self.ledger.end(partitions)
        if why:
            self._say(f"{named(partitions)} lost: {why}")

    @property
    def has_lapsed(self) -> bool:
        """Whether a member's lease has ended, by its own count."""
        return self._membership is not None and self._membership.expired(self._clock.now())

    def _lapse(self, now: float) -> None:
        assert self._membership is not None
        gone = self._membership.expire(now)
        if gone:
            self._let_go()
            self._lose(gone, "the lease has ended")

    def _let_go(self) -> None:
        """Of what was handed out as one batch nothing more is."""
        self.taken, self._offered = None, []
        self.session.abandon()

    def renewals(self) -> tuple[list[stream_pb2.FollowRequest], bool]:
        """Return what a member's lease needs to be sent now, and whether an answer is awaited."""
        membership = self._membership
        if membership is None or self.has_lapsed:
            return [], False
        return membership.due(self._clock.now()), membership.awaits_answer

    def _releasable(self, now: float) -> list[int]:
        membership = self._membership
        if membership is None or not membership.releasing:
            return []
        return membership.releasable(now, self.ledger.waiting() if self.ledger is not None else ())

    def release(self) -> stream_pb2.FollowRequest:
        """Hand over what can be handed over; return what tells the server."""
        assert self._membership is not None
        given = self._releasable(self._clock.now())
        message = self._membership.released(given)
        self._lose(given, "")
        return message

    # What a message means.

    def take(self, message: stream_pb2.FollowResponse, highs: U64) -> Outcome:
        """Take a message; ``highs`` are the high seqnos that the call's heartbeats told.

        Raises:
            UprError: a partition cannot be followed any more, or not so.
        """
        self._calls.heard()
        if is_of_group(message):
            return self._in_bounds(lambda: self._take_of_group(message))
        if message.WhichOneof("message") == "ended" and not message.ended.streams:
            # Nothing comes behind it, and what waits comes again in the next call.
            return self._call_ended(error_of(message.ended.problem))
        if (self._is_full or self._held) and message.WhichOneof("message") != "heartbeat":
            # In order: what ends a stream must not overtake its last frame. Bounded by the credit.
            self._held.append(message)
            return Outcome()
        return self._in_bounds(lambda: self._take(message, highs))

    def take_held(self, highs: U64) -> Outcome | None:
        """Take the oldest message that came while nothing more could be handed out; None when there is none to be taken.

        Raises:
            UprError: as ``take``.
        """
        if not self._held or self._is_full:
            return None
        message = self._held.popleft()
        return self._in_bounds(lambda: self._take(message, highs))

    def _in_bounds(self, take: Callable[[], Outcome | None]) -> Outcome:
        try:
            outcome = take() or Outcome()
        except InvalidArgumentError as error:
            # What the server sent is out of range, or damaged on the way: nothing of it was used.
            return Outcome(lost=ProtocolError(error.message))
        except ProtocolError as error:
            return Outcome(lost=error)
        if outcome.fatal is not None:
            raise outcome.fatal
        return outcome

    def _take(self, message: stream_pb2.FollowResponse, highs: U64) -> Outcome | None:
        kind = message.WhichOneof("message")
        fatal: UprError | None = None
        if kind == "frame":
            return Outcome(self._take_frame(message.frame))
        if kind == "start_answers":
            self._calls.answered()
            fatal = self._incoming.take_answers(message.start_answers)
            for partition in self._incoming.take_begun():
                self._begin(partition)
        elif kind == "heartbeat":
            self._calls.beat()
            self.session.highs(np.arange(PARTITIONS), highs)
        elif kind == "ended":
            fatal = self._incoming.take_ended(message.ended)
        elif kind == "opened":
            raise ProtocolError("the server said opened twice")
        return None if fatal is None else Outcome(fatal=fatal)

    def _take_frame(self, frame: stream_pb2.Frame) -> ChangeBatch | None:
        delivery = self._incoming.take_frame(frame)
        if delivery is None:
            return None
        self._calls.brought()
        self._keys.add(delivery.blocks)
        batch = batch_of(delivery)
        self.taken = Taken(batch, delivery)
        return batch

    def hand_out(self) -> None:
        """What was taken is handed out."""
        if self.ledger is not None and self.taken is not None and self.taken.delivery is not None:
            self.ledger.hand_out(self.taken.delivery, self.taken.batch)

    def _call_ended(self, error: UprError) -> Outcome:
        self.session.disconnected()
        if self.session.finished:
            return Outcome()
        error.retriable = fate_of(error.reason) is not Fate.FAILED
        # The half-close was sent when the message arrived; the server ends the call then.
        return Outcome(lost=error, finish_seconds=_FINISH_SECONDS)

    # What can be asked.

    def status(self, connected: bool) -> ChangesStatus:
        """Return a snapshot."""
        ownership = self.ownership
        membership = self._membership
        return self.progress.status(
            self.session,
            self._clock.now(),
            self._clock.wall(),
            connected=connected,
            unacknowledged=self.ledger.outstanding if self.ledger is not None else 0,
            member=self._options.member,
            generation=ownership.generation if ownership is not None else 0,
            owned=len(membership.owned) if membership is not None else 0,
        )
