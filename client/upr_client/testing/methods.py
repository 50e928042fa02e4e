"""The methods of a scripted server, as gRPC calls them."""

from collections.abc import Callable, Iterator
from typing import Any

import grpc
from google.protobuf.message_factory import GetMessageClass

from upr_client.testing.follow_calls import FollowCall
from upr_client.testing.memory import Partition
from upr_client.testing.state import Call, State
from upr_client.testing.write_calls import WriteCall
from upr_protocol.errors import InvalidArgumentError, UprError
from upr_protocol.failover import check_failover_id, check_partition
from upr_protocol.handshake import answer_hello
from upr_protocol.limits import KEY_BYTES_MAX, KEY_BYTES_MIN
from upr_protocol.partitioning import partition_of
from upr_protocol.position import Position
from upr_protocol.wire.codec import log_to_messages, problem_of
from upr_protocol.wire.status import code_of, metadata_of
from upr_protocol.wire.v1 import admin_service_pb2 as admin_pb2
from upr_protocol.wire.v1 import change_stream_service_pb2 as stream_pb2
from upr_protocol.wire.v1 import key_value_service_pb2 as kv_pb2
from upr_protocol.wire.v1 import types_pb2

_KEYS_MAX = 1000
_SERVICES = (
    (admin_pb2, "AdminService"),
    (stream_pb2, "ChangeStreamService"),
    (kv_pb2, "KeyValueService"),
)


class Methods:
    """The methods that a scripted server has; each other one is UNIMPLEMENTED.

    Args:
        state: of the server.
    """

    def __init__(self, state: State) -> None:
        self._state = state

    def handlers(self) -> list[grpc.GenericRpcHandler]:
        """Return what is to be registered with gRPC."""
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
        """Serve a Follow call."""
        return FollowCall(self._state, requests, context).messages()

    def write(self, requests: Iterator[Any], context: Any) -> Iterator[Any]:
        """Serve a Write call."""
        return WriteCall(self._state, requests, context).messages()

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
        """Return whole failover logs."""
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
        """Return the newest values of keys."""
        memory = self._state.find(request)
        if not 1 <= len(request.keys) <= _KEYS_MAX:
            raise InvalidArgumentError(f"{len(request.keys)} keys, it must be 1 to {_KEYS_MAX}")
        answers = []
        for key in request.keys:
            if not KEY_BYTES_MIN <= len(key) <= KEY_BYTES_MAX:
                raise InvalidArgumentError(
                    f"a key of {len(key)} bytes, a key has {KEY_BYTES_MIN} to {KEY_BYTES_MAX}"
                )
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
        """Return what a consumer has stored."""
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
            _check_position(one, memory.version)
        newest = state.generations.get(request.consumer, 0)
        if request.generation != newest:
            fenced = UprError(
                f"generation {request.generation} of consumer {request.consumer!r} is over, the newest is {newest}",
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
        problem = problem_of(partition.refusal)
        return stream_pb2.HelloAnswer(partition=partition.number, problem=problem)
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


def _check_position(message: stream_pb2.Position, version: int) -> None:
    """Raise InvalidArgumentError when a position contradicts itself."""
    Position(
        version,
        message.failover_id if message.HasField("failover_id") else None,
        message.data_id if message.HasField("data_id") else None,
        message.seqno,
        message.horizon if message.HasField("horizon") else None,
        tuple(message.markers),
        None,
    )
