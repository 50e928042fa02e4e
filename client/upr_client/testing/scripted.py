"""A small server held in memory, for tests: it does on demand what is hard to force on a real one."""

from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from itertools import count, islice
from typing import Any, Final, Self

import grpc
from google.protobuf.message_factory import GetMessageClass

from upr_client.testing.calls import Call, FollowCall, State, WriteCall, micros, told_problem
from upr_client.testing.memory import Memory, Partition
from upr_client.writes import WriteResult
from upr_protocol.block import check_row
from upr_protocol.errors import (
    BucketGoneError,
    ClosedError,
    InvalidArgumentError,
    PartitionNotActiveError,
    UnavailableError,
    UprError,
)
from upr_protocol.failover import FailoverLog, check_failover_id, check_partition
from upr_protocol.handshake import answer_hello
from upr_protocol.limits import GET_KEYS_MAX
from upr_protocol.partitioning import partition_of
from upr_protocol.wire.codec import log_to_messages, position_from_message, problem_of
from upr_protocol.wire.grpc import SERVER_OPTIONS, code_of, metadata_of
from upr_protocol.wire.v1 import admin_service_pb2 as admin_pb2
from upr_protocol.wire.v1 import change_stream_service_pb2 as stream_pb2
from upr_protocol.wire.v1 import key_value_service_pb2 as kv_pb2
from upr_protocol.wire.v1 import types_pb2

_SERVICES = (
    (admin_pb2, "AdminService"),
    (stream_pb2, "ChangeStreamService"),
    (kv_pb2, "KeyValueService"),
)


class Methods:
    """The methods that a scripted server has; each other one is UNIMPLEMENTED."""

    def __init__(self, state: State) -> None:
        self._state = state

    def handlers(self) -> list[grpc.GenericRpcHandler]:
        handlers = []
        for module, name in _SERVICES:
            service = module.DESCRIPTOR.services_by_name[name]
            methods: dict[str, grpc.RpcMethodHandler[Any, Any]] = {}
            for method in service.methods:
                function = getattr(self, _snake(method.name), None)
                if function is None:
                    continue
                read = GetMessageClass(method.input_type).FromString
                write = GetMessageClass(method.output_type).SerializeToString
                if method.client_streaming:
                    methods[method.name] = grpc.stream_stream_rpc_method_handler(
                        function, read, write
                    )
                else:
                    methods[method.name] = grpc.unary_unary_rpc_method_handler(
                        self._unary(method.name, function), read, write
                    )
            handlers.append(grpc.method_handlers_generic_handler(service.full_name, methods))
        return handlers

    def _unary(self, name: str, answer: Callable[[Any], Any]) -> Callable[[Any, Any], Any]:
        def wrapped(request: Any, context: Any) -> Any:
            state = self._state
            record = Call(name, [request])
            gone: list[bool] = []

            def leave() -> None:
                with state.changed:
                    gone.append(True)
                    state.changed.notify_all()

            error: UprError | None = None
            with state.changed:
                state.calls.append(record)
                state.changed.notify_all()
                if not context.add_callback(leave):
                    gone.append(True)
                state.wait_while_stalled(lambda: bool(gone))
                try:
                    state.check_reachable()
                    record.responses.append(answer(request))
                except UprError as refused:
                    error = refused
                record.open = False
                state.changed.notify_all()
            if error is not None:
                context.set_trailing_metadata(metadata_of(error))
                context.abort(code_of(error), error.message)
            return record.responses[0]

        return wrapped

    # Streaming.

    def follow(self, requests: Iterator[Any], context: Any) -> Iterator[Any]:
        return FollowCall(self._state, requests, context).call.messages()

    def write(self, requests: Iterator[Any], context: Any) -> Iterator[Any]:
        return WriteCall(self._state, requests, context).call.messages()

    # Asking.

    def hello(self, request: stream_pb2.HelloRequest) -> stream_pb2.HelloResponse:
        """Answer step 1 of the handshake."""
        memory = self._state.find(request)
        for asked in request.partitions:
            check_partition(asked.partition)
            if asked.HasField("failover_id"):
                check_failover_id(asked.failover_id)
        answers = [
            _hello_answer(memory[asked.partition], asked, request.with_log)
            for asked in request.partitions
        ]
        return stream_pb2.HelloResponse(bucket_version=memory.version, answers=answers)

    def get_failover_log(
        self, request: stream_pb2.GetFailoverLogRequest
    ) -> stream_pb2.GetFailoverLogResponse:
        memory = self._state.find(request)
        logs = [
            stream_pb2.PartitionFailoverLog(partition=one.number, records=log_to_messages(one.log))
            for one in self._state.chosen(request.partitions)
        ]
        return stream_pb2.GetFailoverLogResponse(bucket_version=memory.version, logs=logs)

    def get_partitions(
        self, request: admin_pb2.GetPartitionsRequest
    ) -> admin_pb2.GetPartitionsResponse:
        """Return the state of partitions: active, or dead while they are refused."""
        memory = self._state.find(request)
        infos = [_partition_info(one) for one in self._state.chosen(request.partitions)]
        return admin_pb2.GetPartitionsResponse(bucket_version=memory.version, partitions=infos)

    def get(self, request: kv_pb2.GetRequest) -> kv_pb2.GetResponse:
        memory = self._state.find(request)
        if not 1 <= len(request.keys) <= GET_KEYS_MAX:
            raise InvalidArgumentError(
                f"keys of a Get are {len(request.keys)}; must be 1 to {GET_KEYS_MAX}"
            )
        answers = []
        for key in request.keys:
            check_row(key, None)
            partition = memory[partition_of(key)]
            if partition.refusal is not None:
                answers.append(kv_pb2.GetAnswer(problem=problem_of(partition.refusal)))
                continue
            row = partition.newest(key)
            answers.append(
                kv_pb2.GetAnswer(
                    value=row.value if row else None,
                    seqno=row.seqno if row else 0,
                    failover_id=partition.log.newest.failover_id,
                )
            )
        return kv_pb2.GetResponse(bucket_version=memory.version, answers=answers)

    # Positions in the server.

    def load_positions(
        self, request: stream_pb2.LoadPositionsRequest
    ) -> stream_pb2.LoadPositionsResponse:
        memory = self._state.find(request)
        wanted = set(request.partitions)
        saved = self._state.saved.get(request.consumer, {})
        positions = [at for p, at in sorted(saved.items()) if not wanted or p in wanted]
        return stream_pb2.LoadPositionsResponse(bucket_version=memory.version, positions=positions)

    def save_positions(
        self, request: stream_pb2.SavePositionsRequest
    ) -> stream_pb2.SavePositionsResponse:
        """Store positions of a consumer; those of a call that was superseded are FENCED."""
        state = self._state
        memory = state.find(request)
        if request.member:
            raise InvalidArgumentError("the scripted server has no groups")
        for one in request.positions:
            check_partition(one.partition)
            position_from_message(one, memory.version)
        newest = state.generations.get(request.consumer, 0)
        if request.generation != newest:
            fenced = UprError(
                f"generation {request.generation} of consumer {request.consumer!r} is over; the newest is {newest}",
                reason="FENCED",
            )
            refused = [
                types_pb2.RefusedPartition(partition=one.partition, problem=problem_of(fenced))
                for one in request.positions
            ]
            return stream_pb2.SavePositionsResponse(refused_partitions=refused)
        saved = state.saved.setdefault(request.consumer, {})
        kept = state.acknowledged.setdefault(request.consumer, {})
        for one in request.positions:
            saved[one.partition] = one
            kept[one.partition] = one.seqno
        return stream_pb2.SavePositionsResponse()


def _snake(name: str) -> str:
    return "".join(f"_{c.lower()}" if c.isupper() else c for c in name).lstrip("_")


def _hello_answer(
    partition: Partition, asked: stream_pb2.HelloPartition, with_log: bool
) -> stream_pb2.HelloAnswer:
    if partition.refusal is not None:
        refused = problem_of(partition.refusal)
        return stream_pb2.HelloAnswer(partition=partition.number, problem=refused)
    failover_id = asked.failover_id if asked.HasField("failover_id") else None
    answer = answer_hello(partition.log, failover_id)
    return stream_pb2.HelloAnswer(
        partition=partition.number,
        rollback_seqno=answer.rollback_seqno,
        failover_id=answer.newest_id,
        high_seqno=partition.high,
        durable_seqno=partition.high,
        failover_log=log_to_messages(partition.log) if with_log else (),
        rule=answer.rule,
        words=answer.words,
    )


def _partition_info(partition: Partition) -> admin_pb2.PartitionInfo:
    refusal = partition.refusal
    return admin_pb2.PartitionInfo(
        partition=partition.number,
        state=types_pb2.PARTITION_STATE_DEAD if refusal else types_pb2.PARTITION_STATE_ACTIVE,
        high_seqno=partition.high,
        durable_seqno=partition.high,
        purge_seqno=partition.purge,
        failover_id=partition.log.newest.failover_id,
        problem=problem_of(refusal) if refusal else None,
    )


_THREADS: Final = 256
_STOP_SECONDS: Final = 5.0


def keys_in(partition: int, number: int = 1, prefix: bytes = b"key-") -> list[bytes]:
    """Return ``number`` different keys that belong to a partition, 0 to 1023; always the same ones.

    Raises:
        InvalidArgumentError: the partition is out of range.
    """
    check_partition(partition)
    keys = (prefix + b"%d" % i for i in count())
    found = (key for key in keys if partition_of(key) == partition)
    return list(islice(found, max(number, 0)))


class ScriptedServer:
    """A server of one bucket in this process, on a free port of 127.0.0.1; used with ``with``.

    It keeps the protocol: followers get what is written, numbered and with snapshot markers, and the handshake is
    decided as a real server decides it. What it does besides is what a test asks of it. All methods may be called
    from any thread, beside asyncio too: only ``start``, ``stop`` and ``wait_for`` block. It has no groups and no
    cuts; for these there is ``ServerProcess``.

    Args:
        bucket: the name of its bucket.
    """

    def __init__(self, bucket: str = "default") -> None:
        self._state = State(bucket)
        self._grpc: grpc.Server | None = None
        self._threads: ThreadPoolExecutor | None = None
        self._target = ""

    # Beginning and end.

    @property
    def target(self) -> str:
        """Return its address, "host:port"; empty before the start."""
        return self._target

    @property
    def calls(self) -> list[Call]:
        """Every call that was made, oldest first."""
        with self._state.changed:
            return list(self._state.calls)

    def __enter__(self) -> Self:
        return self.start()

    def __exit__(self, *_: object) -> None:
        self.stop()

    def start(self) -> Self:
        """Listen and serve; nothing when it does.

        Raises:
            ClosedError: it was stopped.
        """
        if self._grpc is not None:
            return self
        if self._target:
            raise ClosedError("the scripted server was stopped", hint="make a new one")
        # Threads and not asyncio: with two event loops in one process, one of them the user's, grpc.aio logs errors.
        self._threads = ThreadPoolExecutor(_THREADS, thread_name_prefix="upr-scripted")
        self._grpc = grpc.server(self._threads, options=SERVER_OPTIONS)
        self._grpc.add_generic_rpc_handlers(tuple(Methods(self._state).handlers()))
        self._target = f"127.0.0.1:{self._grpc.add_insecure_port('127.0.0.1:0')}"
        self._grpc.start()
        return self

    def stop(self) -> None:
        """Cut all calls and end; doing it twice is harmless."""
        server, self._grpc = self._grpc, None
        if server is None or self._threads is None:
            return
        with self._state.changed:
            self._state.stalled = False
        self._cut("the scripted server was stopped")
        server.stop(None).wait(_STOP_SECONDS)
        self._threads.shutdown()

    # Writing.

    def write(self, key: bytes, value: bytes | None) -> WriteResult:
        """Set a key, or with None delete it, and send that to the followers.

        Raises:
            InvalidArgumentError: key or value is out of its range.
            UprError: the key's partition is refused.
        """
        return self.write_many([(key, value)])[0]

    def delete(self, key: bytes) -> WriteResult:
        """Delete a key, whether it is there or not; as ``write``."""
        return self.write(key, None)

    def write_many(self, rows: Iterable[tuple[bytes, bytes | None]]) -> list[WriteResult]:
        """Write many keys at once: in each partition they end in one snapshot marker.

        Returns:
            One result a row, in their order.

        Raises:
            InvalidArgumentError: a key or value is out of its range; nothing was written.
            UprError: a partition is refused; the others were written.
        """
        told = list(rows)
        for key, value in told:
            check_row(key, value)
        numbers = [partition_of(key) for key, _ in told]
        with self._state.changed:
            applied, refused = self._state.write(
                (number, key, value) for number, (key, value) in zip(numbers, told, strict=True)
            )
            if refused:
                raise next(iter(refused.values()))
            following = {number: start for number, (start, _) in applied.items()}
            results = []
            for number in numbers:
                following[number] += 1
                newest = self._state.memory[number].log.newest
                results.append(WriteResult(number, following[number], newest.failover_id))
            return results

    @contextmanager
    def no_markers(self) -> Iterator[None]:
        """Hold snapshot markers back: what is written inside, by whomever, does not end in one.

        At the end each partition that lacks one gets its marker, as by ``marker``.
        """
        with self._state.changed:
            self._state.markers_held += 1
        try:
            yield
        finally:
            with self._state.changed:
                self._state.markers_held -= 1
                if not self._state.markers_held:
                    for partition in self._state.memory:
                        if not partition.ends_in_marker:
                            partition.add_marker(micros())
                self._state.changed.notify_all()

    def marker(self, partition: int) -> int:
        """Send a snapshot marker, and return its seqno.

        It takes a seqno of its own, of which no change is shown: that of a row which was superseded at once.
        """
        with self._partition(partition) as one:
            return one.add_marker(micros())

    # Failing over.

    def roll_back(self, partition: int, seqno: int) -> int:
        """Let a node take over that has a partition only up to ``seqno``; rows above are lost.

        There is a new failover record, whose id is returned, and open streams end with HISTORY_CHANGED. What was
        merged or purged is whole again, as on a node that has not merged.

        Raises:
            InvalidArgumentError: there is no snapshot marker at that seqno.
        """
        with self._partition(partition) as one:
            failover_id = one.roll_back(seqno)
            words = "the history of the partition is another one now"
            self._end_streams(partition, "HISTORY_CHANGED", words, retriable=True)
            return failover_id

    def lose(self, *partitions: int) -> None:
        """Restart with the failover logs of these partitions lost, none for all: their ids are not known any more.

        The mutations stay. Every follower that had received some is told to roll back to 0.
        """
        with self._state.changed:
            for one in self._state.chosen(partitions):
                one.lose_log()
            self._restarted()

    def restart(self, clean: bool = True) -> None:
        """Restart: all calls are cut. Unclean, each partition gets a failover record at its last marker.

        What is above that marker is gone then. As with a real server there is no record, because there can be no
        loss, when nothing was written since the restart before.
        """
        with self._state.changed:
            if not clean and self._state.numbered:
                for one in self._state.memory:
                    one.roll_back(one.last_marker)
            self._restarted()

    def renew_bucket(self) -> None:
        """Drop the bucket and create it again, empty and with another version: calls end with BUCKET_GONE."""
        state = self._state
        with state.changed:
            state.memory = Memory()
            state.answers.clear()
            state.places.clear()
            state.acknowledged.clear()
            state.saved.clear()
            gone = BucketGoneError("the bucket was dropped")
            for call in list(state.streaming):
                if isinstance(call.role, FollowCall):
                    call.role.end_call(problem_of(gone))
                else:
                    call.fail(gone)
            state.changed.notify_all()

    # Merging and purging.

    def deduplicate(self, partition: int, runs: int = 2) -> None:
        """Merge a partition up to its newest marker: superseded rows vanish, and so do the markers between.

        What is left comes in at most so many runs (1 or more), of which only the last ends in a marker: the horizon
        of all of them is its seqno.

        Raises:
            InvalidArgumentError: ``runs`` is below 1.
        """
        if runs < 1:
            raise InvalidArgumentError(f"runs is {runs}; must be 1 or more")
        with self._partition(partition) as one:
            one.merge(runs)

    def purge(self, partition: int, seqno: int | None = None) -> int:
        """Merge a partition and drop its tombstones up to ``seqno``, None for all; return the purge seqno.

        The newest row stays in any case. Streams that stand between 0 and the purge seqno end with PURGED, and are
        then told to roll back to 0.
        """
        with self._partition(partition) as one:
            purged = one.purge_to(one.high if seqno is None else seqno)
            for call in self._follow_calls():
                call.purged(one)
            return purged

    # Disturbing.

    def stall(self) -> None:
        """Say nothing and hear nothing, not even in new calls, until ``resume``."""
        with self._state.changed:
            self._state.stalled = True

    def resume(self) -> None:
        """End what ``stall`` began."""
        with self._state.changed:
            self._state.stalled = False
            self._state.changed.notify_all()

    def disconnect(self) -> None:
        """Cut all Follow and Write calls; new ones are taken."""
        self._cut("the connection was cut")

    def lose_answers(self, count: int = 1) -> None:
        """Apply the next writes of a client, as many, and each time cut its call instead of answering."""
        with self._state.changed:
            self._state.answers_to_lose += count

    @contextmanager
    def unreachable(self) -> Iterator[None]:
        """Cut all calls, and refuse new ones as UNAVAILABLE until the block ends."""
        with self._state.changed:
            self._state.unreachable = True
            self._state.changed.notify_all()
        try:
            yield
        finally:
            with self._state.changed:
                self._state.unreachable = False

    def refuse(self, partition: int, error: UprError | None = None) -> None:
        """Answer every Start, Hello and write of a partition with this error, until ``accept``.

        Open streams go on. ``error.retriable`` decides whether a follower asks again.

        Args:
            error: None for PARTITION_NOT_ACTIVE, retriable.
        """
        with self._partition(partition) as one:
            one.refusal = error or PartitionNotActiveError(
                f"partition {partition} is refused", hint="until it is accepted", retriable=True
            )

    def accept(self, partition: int) -> None:
        """End what ``refuse`` began."""
        with self._partition(partition) as one:
            one.refusal = None

    def end(self, partition: int, reason: str, message: str = "", retriable: bool = True) -> None:
        """End the open streams of a partition with a reason: "STATE_CHANGED", "STORAGE_ERROR" and so on."""
        with self._partition(partition):
            self._end_streams(partition, reason, message or reason, retriable)

    def end_calls(self, reason: str, message: str = "", retriable: bool = True) -> None:
        """End the open Follow calls as a whole with a reason: "SHUTTING_DOWN", "SUPERSEDED" and so on."""
        with self._state.changed:
            for call in self._follow_calls():
                call.end_call(told_problem(reason, message or reason, retriable=retriable))

    def hold(self, partition: int, seqno: int) -> None:
        """Send no run that ends above a seqno, until ``release``; so a follower can be stopped at any place."""
        with self._partition(partition) as one:
            one.held = seqno

    def release(self, partition: int) -> None:
        """End what ``hold`` began."""
        with self._partition(partition) as one:
            one.held = None

    # Looking.

    def calls_of(self, method: str) -> list[Call]:
        """The calls of one method, "Follow" or "Write" or "Hello" and so on, oldest first."""
        return [call for call in self.calls if call.method == method]

    def positions(self, consumer: str = "") -> dict[int, int]:
        """Return partition -> seqno as a consumer acknowledged it last; "" for followers without a name."""
        with self._state.changed:
            return dict(self._state.acknowledged.get(consumer, {}))

    def state(self) -> dict[bytes, bytes]:
        """Return the keys and values of the bucket as they are now."""
        with self._state.changed:
            return {k: v for one in self._state.memory for k, v in one.state().items()}

    def high_seqno(self, partition: int) -> int:
        """Return the newest seqno of a partition."""
        with self._partition(partition) as one:
            return one.high

    def failover_log(self, partition: int) -> FailoverLog:
        """Return the failover log of a partition."""
        with self._partition(partition) as one:
            return one.log

    def wait_for(self, condition: Callable[[], object], seconds: float = 10.0) -> None:
        """Wait until ``condition()`` is true; it is asked whenever anything happened.

        Blocks: beside asyncio call it through ``asyncio.to_thread``.

        Raises:
            TimeoutError: it was not within ``seconds``.
        """
        with self._state.changed:
            if not self._state.changed.wait_for(condition, seconds):
                raise TimeoutError(f"what was waited for did not happen within {seconds:g} s")

    # How.

    @contextmanager
    def _partition(self, number: int) -> Iterator[Partition]:
        with self._state.changed:
            yield self._state.memory[check_partition(number)]
            self._state.changed.notify_all()

    def _follow_calls(self) -> Sequence[FollowCall]:
        roles = [call.role for call in self._state.streaming]
        return [role for role in roles if isinstance(role, FollowCall)]

    def _end_streams(self, partition: int, reason: str, words: str, retriable: bool) -> None:
        for call in self._follow_calls():
            call.end_stream(partition, told_problem(reason, words, retriable=retriable))

    def _restarted(self) -> None:
        self._state.server_id += 1
        self._state.numbered = False
        self._cut("the server was restarted")

    def _cut(self, words: str) -> None:
        with self._state.changed:
            for call in self._state.streaming:
                call.fail(UnavailableError(words))
            self._state.changed.notify_all()
