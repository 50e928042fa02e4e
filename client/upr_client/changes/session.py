"""The session of a consumer: what to do next when following, decided without I/O, and for the tests' simulated world too.

A shell connects, sends, receives, stores and calls the application; in which order, and what anything that the
server says means for that, is decided here.
"""

import enum
from collections import deque
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Final, NamedTuple

import numpy as np

from upr_client import backoff
from upr_client.changes.events import (
    Change,
    ChangeBatch,
    HandedOut,
    RecentKeys,
    Rollback,
    decode_frame,
)
from upr_client.changes.groups import Membership, Ownership, fenced, is_of_group
from upr_client.changes.ledger import Ledger
from upr_client.changes.link import Clock, Reconnecting, ack_message, start_message
from upr_client.changes.options import ChangesOptions
from upr_client.changes.partition_states import PartitionStates, named
from upr_client.changes.status import ChangesStatus, Progress
from upr_protocol.block import U64
from upr_protocol.consumer import Consumer, Fate, State, fate_of
from upr_protocol.errors import InvalidArgumentError, ProtocolError, RollbackError, UprError
from upr_protocol.failover import FailoverLog, WriteToken, WrittenSeqno
from upr_protocol.limits import PARTITIONS
from upr_protocol.position import Position
from upr_protocol.position_table import PositionTable
from upr_protocol.wire.grpc import error_of
from upr_protocol.wire.v1 import change_stream_service_pb2 as stream_pb2


class Step(enum.Enum):
    """Next action for the I/O loop."""

    FINISH = "finish"
    """Every partition ended for good: store, and end the call."""
    UNDO = "undo"
    """Let the application undo; see ``rollback``."""
    CONNECT = "connect"
    """Open a call; see ``open_message``."""
    LOAD = "load"
    """Load positions from the server, by ``ownership``; ``begin`` or ``not_begun`` follows."""
    SAVE = "save"
    """Store the positions that changed; see ``begin_save``."""
    RELEASE = "release"
    """Hand over with ``let_go_of_share``, and send what ``release`` gives."""
    RECEIVE = "receive"
    """Send what ``due`` gives, and receive the next message; see ``take``."""


class Outcome(NamedTuple):
    """Result of one message.

    Args:
        batch: for the application, None for nothing.
        lost: why the call is of no use any more, None when it is; see ``lost``.
        finish_seconds: how long the server may take to end such a call; 0: it is ended at once.
        fatal: why a partition cannot be followed any more, None when each can.
        consumed: the message, unless it is held: its credit can go back.
    """

    batch: ChangeBatch | None = None
    lost: UprError | None = None
    finish_seconds: float = 0.0
    fatal: UprError | None = None
    consumed: stream_pb2.FollowResponse | None = None


UNSAVED: Final = "positions were not stored: what was handled since they were comes again"
_FENCED_SECONDS: Final = 1.0
"""Time for which a refused save waits for news of the call: a restarted server knows no owner."""


class Saving:
    """Saving of positions: changed ones, those due before a Start, and failed saves."""

    def __init__(
        self,
        options: ChangesOptions,
        states: PartitionStates,
        ledger: Ledger | None,
        ownership: Ownership | None,
        clock: Clock,
    ) -> None:
        self._seconds = options.tuning.save_seconds
        self._is_of_use = options.store is not None or ownership is not None
        self._states = states
        self._ledger = ledger
        self._ownership = ownership
        self._clock = clock
        self._saved_at = clock.now()
        self._urgent_taken = self._urgent_stored = 0
        self._stored: dict[int, Position] = {}
        self._failures = 0
        self._not_before = 0.0
        self._fenced_at: float | None = None

    # When.

    @property
    def has_changed(self) -> bool:
        """Return whether a position differs from the stored one; never where nothing stores them."""
        if not self._is_of_use:
            return False
        ledger, session = self._ledger, self._states.session
        # To the server go only positions that it has for sure: it refuses what is above its high seqno.
        changed = session.has_changed if self._ownership is None else session.has_sure_change
        return changed or (ledger is not None and ledger.has_changed)

    @property
    def is_urgent(self) -> bool:
        """Return whether a position must be stored before any Start: after a crash in between the old one must not be
        found."""
        return self._states.urgent != self._urgent_stored

    def is_due(self, now: float, hurry: bool) -> bool:
        seconds = self.next_due(now, hurry)
        return seconds is not None and seconds <= 0

    def next_due(self, now: float, hurry: bool) -> float | None:
        """In how many seconds there is something to store, None for not by itself; with ``hurry`` all changes are due."""
        if not (self.is_urgent or self.has_changed):
            return None
        if self._ownership is not None and not self._ownership.may_save:
            return None
        due = now if self.is_urgent or hurry else self._saved_at + self._seconds
        return max(due, self._not_before) - now

    # What.

    def load(self) -> None:
        self._saved_at = self._clock.now()

    def begin(self) -> list[int]:
        """Return the partitions whose positions may have changed; ``stored`` or ``failed`` follows."""
        self._saved_at = self._clock.now()
        # Positions that change during the save are stored next.
        self._urgent_taken = self._states.urgent
        if not self._is_of_use:
            return []
        session, in_server = self._states.session, self._ownership is not None
        changed = set(session.take_changed(sure=in_server))
        if self._ledger is not None:
            changed |= self._ledger.take_changed()
        changed.intersection_update(session.partitions)
        if in_server and (unsure := {p for p in changed if session.is_unsure(p)}):
            # Acknowledged meanwhile: they are stored once the server said that it has them.
            session.mark_changed(unsure)
            changed -= unsure
        return sorted(changed)

    def news(self, positions: Mapping[int, Position]) -> dict[int, Position]:
        """Return those that are not what was stored last: what is received and not acknowledged moves no position."""
        return {p: at for p, at in positions.items() if self._stored.get(p) != at}

    def stored(self, positions: Mapping[int, Position]) -> None:
        self._urgent_stored = self._urgent_taken
        self._failures, self._not_before, self._fenced_at = 0, 0.0, None
        if self._ledger is not None:
            self._stored.update(positions)
        if self._ownership is not None:
            self._ownership.stored(positions)

    def failed(self, positions: Iterable[int], *, wait: bool = False) -> None:
        """They could not be stored; ``wait``: try again after a pause only, which grows."""
        self._states.session.mark_changed(
            set(positions).intersection(self._states.session.partitions)
        )
        if wait:
            seconds = backoff.delay(self._failures, self._clock.random())
            self._not_before = self._clock.now() + seconds
            self._failures += 1

    def fenced(self, error: UprError) -> None:
        """The server said that this is no owner any more, and nothing was stored.

        When its positions were set back, or the server was started anew, the call ends and the next one owns again;
        when there is another owner the call ends with that.

        Raises:
            UprError: the error, if the call continues.
        """
        now = self._clock.now()
        if self._fenced_at is None:
            self._fenced_at = now
        elif now - self._fenced_at >= _FENCED_SECONDS:
            raise error

    def opened(self) -> None:
        self._failures, self._not_before, self._fenced_at = 0, 0.0, None

    def forget(self, partitions: Iterable[int]) -> None:
        for partition in partitions:
            self._stored.pop(partition, None)


_FINISH_SECONDS: Final = 1.0


class Following:
    """Everything of ``AsyncChanges`` that is decided and not done.

    Attributes:
        taken: batches that the application has and did not consume completely.
        ownership: of positions that are kept in the server; None for others.
        ledger: what is handed out and not acknowledged; None when asking for more acknowledges.
        holding: whether frames, and what comes behind them, wait.
    """

    def __init__(
        self,
        options: ChangesOptions,
        *,
        say: Callable[[str], None],
        clock: Clock,
        bucket: str = "",
    ) -> None:
        self.taken: HandedOut | None = None
        self.holding = False
        self.ownership: Ownership | None = None
        if options.kept_in_server:
            self.ownership = Ownership(options.name, options.member)
        self.ledger = Ledger() if options.acknowledge == "manual" else None
        self.progress = Progress()
        self._options = options
        self._say = say
        self._clock = clock
        self._lease_now = clock.lease or clock.now
        self._keys = RecentKeys(options.tuning.recent_key_bytes)
        self._states = PartitionStates(options.session({}, bucket), self.progress, say, clock)
        self._saving = Saving(options, self._states, self.ledger, self.ownership, clock)
        self._calls = Reconnecting(
            options.tuning.heartbeat_seconds,
            options.tuning.retry_seconds,
            self.progress,
            say,
            clock,
        )
        self._held: deque[stream_pb2.FollowResponse] = deque()
        self._assigned: set[int] = set()
        self._revoked: list[int] = []
        self._opening_at = self._lease_now()
        self._endpoint, self._servers = "", 1

    @property
    def session(self) -> Consumer:
        return self._states.session

    @property
    def handshakes(self) -> deque[tuple[int, str, str]]:
        return self._states.handshakes

    def load(self, positions: Mapping[int, Position]) -> None:
        """Go on from stored positions; before anything else. Raises as ``ChangesOptions.session``."""
        self._states.session = self._options.session(positions, self.session.bucket)
        self._begin(self.session.partitions)
        self._calls.heard()
        self._saving.load()

    def _begin(self, partitions: Sequence[int]) -> None:
        at = np.array(partitions, np.int64)
        self._keys.begin(at, self.session.seqnos(at))
        if self.ledger is not None:
            for partition, position in self.session.positions(partitions).items():
                self.ledger.begin(partition, position)

    def next_step(self, connected: bool) -> Step:
        """Return what to do now; ``connected``: there is a call."""
        now = self._clock.now()
        if self.has_lapsed:
            if connected and not self._to_load and self._saving.is_due(now, hurry=True):
                # By the server's clock the lease may still run, and these positions were consumed while this member
                # owned them.
                return Step.SAVE
            self._lapse()
        if self.session.finished:
            return Step.FINISH
        if self.session.undoing:
            return Step.UNDO
        if not connected:
            return Step.CONNECT
        if self._to_load:
            return Step.LOAD
        releasable = bool(self._releasable())
        if self._saving.is_due(now, hurry=releasable):
            return Step.SAVE
        return Step.RELEASE if releasable and not self._saving.has_changed else Step.RECEIVE

    @property
    def _to_load(self) -> set[int]:
        return set() if self.ownership is None else self.ownership.to_load

    @property
    def is_started(self) -> bool:
        """Whether every partition that is followed was started: whatever is written from now on will be handed out."""
        membership = self._membership
        if membership is not None and not membership.is_told:
            return False
        if self._saving.is_urgent:
            # Where it began is not stored yet: after a crash now would be later.
            return False
        return not self._to_load and self.session.all_started

    @property
    def _is_full(self) -> bool:
        ledger, tuning = self.ledger, self._options.tuning
        return ledger is not None and (
            ledger.outstanding >= tuning.unacknowledged_max
            or ledger.outstanding_bytes >= tuning.unacknowledged_bytes
        )

    @property
    def waits_for_acknowledgements(self) -> bool:
        """Return whether further acknowledgements lead to an action."""
        return bool(self._held or (self._membership and self._membership.releasing))

    # Consumption by the application.

    def may_hand_out(self, partition: int) -> bool:
        """Whether what was received of a partition may still be handed out: not when it was lost meanwhile, or a
        member's lease has ended. What was consumed before that still counts, if the server agrees.
        """
        if self._is_over():
            self.let_go()
            return False
        return self.session.state(partition) is not State.IDLE

    def may_handle(self, change: Change) -> bool:
        """As ``may_hand_out``, of a change that was handed out and waits for its handler."""
        return self.ledger is not None and not self._is_over() and self.ledger.waits(change)

    def _is_over(self) -> bool:
        """As ``has_lapsed``, which then stays: what is passed over comes again only if all is begun anew."""
        if self._membership is None or not self.has_lapsed:
            return False
        self._membership.end()
        return True

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
                "the changes are in the middle of a batch, which iteration began",
                hint="continue to iterate, or use batches() or run() from the beginning",
            )
        taken, self.taken = self.taken, None
        if taken is None:
            return
        if isinstance(taken.item, Rollback):
            self.undone(taken.item)
        elif taken.delivery is not None:
            self.session.acknowledge(taken.delivery)

    def position(self, partition: int) -> Position:
        """The position of what was dealt with; ``acknowledge_part`` comes first."""
        received = self.session.position(partition)
        return received if self.ledger is None else self.ledger.position(partition, received)

    def has(self, token: WriteToken, complete: Sequence[int] | None = None) -> bool:
        """Return whether writes were dealt with, as far as their partitions are followed; ``acknowledge_part`` comes first.

        Args:
            complete: the last complete marker of each partition that was dealt with; None for those of the positions.

        Raises:
            WriteUndoneError: one was undone.
        """
        membership = self._membership
        other = self.session.bucket_version not in (0, token.bucket_version)
        if other or (membership is not None and not membership.is_told):
            return False
        followed = set(self.session.partitions)
        # What is being begun is the member's already.
        share = followed if membership is None else followed | membership.owned
        return all(
            one.partition in followed and self._has(one, complete) for one in token.within(share)
        )

    def _has(self, one: WrittenSeqno, complete: Sequence[int] | None) -> bool:
        at = self.position(one.partition)
        if at.failover_id is None:
            return False
        if complete is not None:
            marker = complete[one.partition]
        else:
            marker = at.seqno if at.horizon == at.seqno else max(at.markers, default=0)
        return one.is_in(at.log or FailoverLog.born(at.failover_id), marker)

    def begin_save(self) -> Mapping[int, Position]:
        """Return the positions to store, in one atomic write; ``saved`` or ``not_saved`` follows."""
        self.acknowledge_part()
        changed = self._saving.begin()
        if unknown := self._to_load.intersection(changed):
            # Under the new generation they would be stored over those that an operator has set meanwhile. Once they are
            # loaded they are due at once, as any of them may have been.
            self._saving.failed(unknown)
            self._states.urgent += 1
            changed = [partition for partition in changed if partition not in unknown]
        if self.ownership is not None:
            # In the server they would be positions of the bucket that there is now. Their rollback changes them.
            changed = [p for p in changed if not self.session.is_of_another(p)]
        if not changed:
            return {}
        if self.ledger is None:
            return self.session.positions(changed)
        return self._saving.news({p: self.position(p) for p in changed})

    def saved(
        self, positions: Mapping[int, Position], refused: Iterable[int] = ()
    ) -> stream_pb2.FollowRequest | None:
        """They are stored, but for those refused as another's. Return what to tell the server, None for nothing.

        Raises:
            FencedError: a sole owner is none any more.
        """
        gone = set(refused)
        kept = {p: at for p, at in positions.items() if p not in gone} if gone else positions
        self._saving.stored(kept)
        ownership = self.ownership
        if ownership is None:
            return ack_message(PositionTable.of(kept)) if kept else None
        if gone and ownership.membership is None:
            raise fenced(ownership.consumer, gone)
        if gone and ownership.was_told_meanwhile:
            self.not_saved({p: positions[p] for p in gone})
        elif gone and ownership.membership is not None:
            self._lose(ownership.membership.forget(gone), "they are another member's by now")
        return None

    def not_saved(self, positions: Mapping[int, Position], *, wait: bool = False) -> None:
        self._saving.failed(positions, wait=wait)

    def fenced(self, error: UprError) -> None:
        self._saving.fenced(error)

    @property
    def is_unsaved(self) -> bool:
        return self._saving.has_changed or (self.ownership is not None and self.session.has_changed)

    # Undoing.

    def rollback(self) -> Rollback:
        """Return what the application has to undo next.

        Raises:
            RollbackError: it has no way to handle a rollback, or chose to fail.
        """
        undoing = self.session.undoing
        first = undoing[0]
        if self._options.on_rollback in (None, "fail"):
            raise RollbackError(
                f"{len(undoing)} partitions must roll back; the first is {first.partition}, from seqno "
                f"{first.from_seqno} to {first.seqno}: {first.words}",
                hint='undo the data above that seqno and resume: pass on_rollback=a function, "event" or "restart"',
            )
        return Rollback(
            first.partition,
            first.from_seqno,
            first.seqno,
            first.old_id,
            first.new_id,
            first.rule,
            first.words,
            *self._keys.above(first.partition, first.seqno),
        )

    def offer(self, rollback: Rollback) -> Rollback:
        """Hand a rollback to the application; it is undone when the application asks for the next item."""
        self.taken = HandedOut(rollback)
        return rollback

    def undone(self, rollback: Rollback) -> None:
        partition = rollback.partition
        if not any(item.partition == partition for item in self.session.undoing):
            # Meanwhile the partition went to another member.
            return
        self.session.undone(partition)
        self._keys.drop_above(partition, rollback.seqno)
        if self.ledger is not None:
            self.ledger.drop_above(partition, self.session.position(partition))
        self._states.urgent += 1

    # The call.

    def open_message(self, bucket: str) -> stream_pb2.Open:
        """Return the first message of a call that is opened now."""
        self._opening_at = self._lease_now()
        if self._membership is not None:
            self._membership.opening()
        version = self._calls.version(self.session.bucket_version)
        return self._options.open_message(bucket, version, self._calls.interval)

    def opened(self, opened: stream_pb2.Opened, endpoint: str = "", servers: int = 1) -> None:
        """The call was accepted at an endpoint; ``servers``: how many the client knows."""
        self._endpoint, self._servers = endpoint, servers
        self._calls.opened()
        self._held.clear()
        self.session.opened(opened.bucket_version)
        self._saving.opened()
        if self.ownership is not None:
            # The server may have read the Open behind the end of the lease.
            self._is_over()
            lost = self.ownership.opened(opened, self.session.partitions, self._opening_at)
            self._lose(lost, "the server was started anew, or the lease has ended")

    def not_opened(self, error: UprError) -> bool:
        """The call was not accepted. Return whether to open another one at once; else ``lost`` follows."""
        return self._calls.not_opened(error, self.session.bucket_version)

    def lost(self, error: UprError, longest: float | None = None) -> float:
        """The call is lost. Return how many seconds to wait before the next one; see ``Reconnecting.lost``."""
        self.session.disconnected()
        self._held.clear()
        return self._calls.lost(error, longest)

    def due(self) -> tuple[list[stream_pb2.FollowRequest], float | None]:
        """Return the messages to send now, and the seconds until the next action; None if none is planned."""
        now = self._clock.now()
        messages = []
        waits: list[float] = []
        if not self._saving.is_urgent:
            due, next_due = self._states.retries.split(self.session.ready(), now)
            if due:
                messages.append(start_message(self.session, due, self._options.until_now))
            if next_due is not None:
                waits.append(next_due - now)
        saving_due = self._saving.next_due(now, hurry=bool(self._releasable()))
        if saving_due is not None:
            waits.append(saving_due)
        membership = self._membership
        if membership is not None:
            messages += membership.due(self._lease_now())
            waits.append(membership.next_due(self._lease_now()))
        return messages, max(min(waits), 0.0) if waits else None

    # Positions in the server, and groups.

    def not_begun(self, partitions: Iterable[int]) -> None:
        """They could not be begun, and are to be loaded again."""
        assert self.ownership is not None
        gone = set(partitions)
        self.ownership.lost(gone)
        self.ownership.to_load.update(gone)

    def begin(self, anew: Mapping[int, Position | None]) -> None:
        """Follow partitions from these positions, None for none.

        Raises:
            PositionBucketError: a position is of a bucket of another name.
        """
        if self._membership is not None:
            self._assigned.update(anew)
        self.session.unfollow(set(anew).intersection(self.session.partitions))
        self.session.follow(anew)
        self._saving.forget(anew)
        self._begin(sorted(anew))

    def _revoke(self, partitions: Iterable[int]) -> None:
        gone = self._assigned.intersection(partitions)
        self._assigned -= gone
        self._revoked += sorted(gone)

    def take_revoked(self, of_all: bool) -> list[int]:
        """Return, once, the partitions that were begun and are this member's no more; ``of_all``: none is any more."""
        if of_all:
            self._revoke(self._assigned)
        revoked, self._revoked = self._revoked, []
        return revoked

    @property
    def _membership(self) -> Membership | None:
        return self.ownership.membership if self.ownership is not None else None

    def _take_of_group(self, message: stream_pb2.FollowResponse) -> None:
        membership, now = self._membership, self._lease_now()
        if membership is None or self.ownership is None:
            raise ProtocolError("the server sent an assignment to a call that names no member")
        if message.WhichOneof("message") == "assignment":
            share = membership.assigned(message.assignment, now)
        else:
            share = membership.renewed(message.renewed.number, now)
        if share is None:
            return
        self._lose(share.lost, "")
        self.ownership.to_load.update(share.gained)
        # Partitions to release are followed no further, but this member still stores their positions.
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
        self._revoke(partitions)
        self.session.unfollow(set(partitions).intersection(self.session.partitions))
        self.progress.mended(set(partitions))
        self._saving.forget(partitions)
        if self.ledger is not None:
            self.ledger.end(partitions)
        if why:
            self._say(f"{named(partitions)} lost: {why}")

    @property
    def has_lapsed(self) -> bool:
        """Return whether a member's lease has ended, by its own clock."""
        return self._membership is not None and self._membership.expired(self._lease_now())

    def _lapse(self) -> None:
        assert self._membership is not None
        gone = self._membership.expire(self._lease_now())
        if gone:
            self._abandon()
            self._lose(gone, "the lease has ended")

    def let_go(self) -> None:
        """Hand out nothing more of what the application iterates over; what it consumed of that counts."""
        self.acknowledge_part()
        self._abandon()

    def _abandon(self) -> None:
        self.taken = None
        self.session.abandon()

    def heard(self, message: stream_pb2.FollowResponse) -> None:
        """A message about a member's share arrived, and is taken later; from any thread."""
        if self._membership is None:
            return
        if message.HasField("renewed"):
            self._membership.heard(message.renewed.number, self._lease_now())
        else:
            self._membership.arrived(message.assignment)

    def renewals(self) -> tuple[list[stream_pb2.FollowRequest], bool]:
        """Return what a member's lease needs to be sent now, and whether an answer is awaited."""
        membership = self._membership
        if membership is None or self.has_lapsed:
            return [], False
        return membership.due(self._lease_now()), membership.awaits_answer

    def _releasable(self) -> list[int]:
        membership = self._membership
        if membership is None or not membership.releasing:
            return []
        busy = self.ledger.waiting() if self.ledger is not None else ()
        return membership.releasable(self._lease_now(), busy)

    def let_go_of_share(self) -> list[int]:
        """Lose what can be handed over, and return it; ``release`` follows."""
        given = self._releasable()
        self._lose(given, "")
        return given

    def release(self, partitions: list[int]) -> stream_pb2.FollowRequest:
        """Hand over what was let go of; return what tells the server, to be sent before anything else."""
        assert self._membership is not None
        return self._membership.released(partitions)

    # Messages of the server.

    def take(self, message: stream_pb2.FollowResponse, highs: U64) -> Outcome:
        """Handle a message; ``highs`` are the high seqnos of the call's heartbeats.

        Raises:
            UprError: a partition cannot be followed any more, or not so.
        """
        self._calls.heard()
        if is_of_group(message):
            return self._in_bounds(lambda: self._take_of_group(message))
        if message.WhichOneof("message") == "ended" and not message.ended.streams:
            # Nothing comes behind it, and what waits comes again in the next call.
            return self._call_ended(error_of(message.ended.problem))
        kind = message.WhichOneof("message")
        waits = self.holding or self._is_full or self._held
        if waits and kind not in ("heartbeat", "start_answers"):
            # In order: what ends a stream must not overtake its last frame. Bounded by the credit, which a held frame
            # does not give back. An answer may: a Start is sent only when all that was said of its partition before is
            # taken.
            self._held.append(message)
            return Outcome()
        return self._in_bounds(lambda: self._take(message, highs))._replace(consumed=message)

    def take_held(self, highs: U64) -> Outcome | None:
        """As ``take``, of the oldest message that came while nothing more could be handed out; None when there is none."""
        if not self._held or self._is_full or self.holding:
            return None
        message = self._held.popleft()
        return self._in_bounds(lambda: self._take(message, highs))._replace(consumed=message)

    def _in_bounds(self, take: Callable[[], Outcome | None]) -> Outcome:
        try:
            outcome = take() or Outcome()
        except InvalidArgumentError as error:
            # The message is out of range or was damaged on the way: nothing of it was used.
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
            fatal = self._states.take_answers(message.start_answers)
            elsewhere = self._states.elsewhere if self._options.any_server else None
            if elsewhere is not None and self._calls.leaves(self._endpoint, self._servers):
                self._states.retries.moved()
                return Outcome(lost=elsewhere, fatal=fatal)
            self._calls.answered()
            if self.session.all_started:
                self._calls.all_started()
            if begun := self._states.take_begun():
                self._begin(sorted(begun))
        elif kind == "heartbeat":
            self._calls.beat()
            self.session.highs(np.arange(PARTITIONS), highs)
        elif kind == "ended":
            fatal = self._states.take_ended(message.ended)
        elif kind == "opened":
            raise ProtocolError("the server sent Opened twice")
        if fatal is None and self._states.stuck and self._options.group is None:
            fatal = self._states.nothing_left()
        return None if fatal is None else Outcome(fatal=fatal)

    def _take_frame(self, frame: stream_pb2.Frame) -> ChangeBatch | None:
        delivery = self.session.frame(*decode_frame(frame))
        if delivery is None:
            # Nothing in it belongs to an open stream.
            return None
        self._states.retries.succeeded(delivery.partitions)
        self.progress.received(delivery, self._clock.now())
        self._calls.brought()
        self._keys.add(delivery.blocks)
        batch = ChangeBatch(delivery.blocks, delivery=delivery)
        self.taken = HandedOut(batch)
        return batch

    def hand_out(self) -> None:
        taken = self.taken
        if self.ledger is None or taken is None or isinstance(taken.item, Rollback):
            return
        if taken.delivery is not None:
            self.ledger.hand_out(taken.delivery, taken.item)

    def _call_ended(self, error: UprError) -> Outcome:
        self.session.disconnected()
        if self.session.finished:
            return Outcome()
        error.retriable = fate_of(error.reason) is not Fate.FAILED
        # The half-close was sent when the message arrived; the server ends the call then.
        return Outcome(lost=error, finish_seconds=_FINISH_SECONDS)

    # Queries.

    def status(self, connected: bool) -> ChangesStatus:
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
