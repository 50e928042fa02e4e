"""Connections to this server and to its peers, all of one shape, so that one piece of code measures all of them."""

import asyncio
import re
from collections import Counter
from collections.abc import AsyncIterator, Sequence
from pathlib import Path
from typing import Any, Final, Protocol, runtime_checkable

import aiormq
import asyncpg
import grpc
import nats
import nats.js.api
import psycopg2.extras
import pyarrow as pa
import rstream
from aetcd import rpc as etcd
from redis import asyncio as redis

from tools.bench.common import Row, batches
from upr_client import AsyncClient, FilePositions

ROWS_AT_ONCE: Final = 1_000
"""Rows of one bulk write, and of one read of Redis."""
WRITES_AT_ONCE: Final = 8
"""Bulk writes under way at a time."""

_NAME: Final = "changes"
_SECONDS: Final = 30.0
_CONNECTIONS: Final = 16
"""Of one client of Redis or PostgreSQL, whose connections do one thing at a time; more are slower on two cores."""
_NONE: Final = b""
"""Value of a deletion, for peers that have none."""
_GUEST: Final = {"username": "guest", "password": "guest"}
"""Who may connect to a new RabbitMQ."""


def _store(path: str, position: str) -> None:
    Path(path).write_text(position)


def _stored(path: str) -> str:
    return Path(path).read_text()


def _packed(key: bytes, value: bytes | None) -> bytes:
    """Return a change as one message, for peers whose messages have no key."""
    return bytes([len(key)]) + key + (value or _NONE)


def _row(message: bytes) -> Row:
    return message[1 : 1 + message[0]], message[1 + message[0] :] or None


class Store(Protocol):
    """Connection of one client. Each write returns when the store has acknowledged it."""

    async def open(self) -> None:
        """Connect."""

    async def close(self) -> None:
        """End the connection."""

    async def create(self) -> None:
        """Make what changes are kept in; called once, on an empty store."""

    async def set(self, key: bytes, value: bytes) -> None:
        """Write one change."""

    async def write(self, rows: Sequence[Row]) -> None:
        """Write many changes, in the way of the store that is meant for it."""

    def drain(self, total: int) -> AsyncIterator[list[Row]]:
        """Yield all changes from the beginning; ``total`` were written."""

    def follow(self) -> AsyncIterator[list[Row]]:
        """Yield an empty list once nothing can be missed, and then each change that is written from there on."""

    async def remember(self, path: str) -> None:
        """Follow until something has come, and store where a consumer of it resumes."""

    async def resume(self, path: str) -> list[Row]:
        """Load that, follow from there, and return the changes that came first; at least 1."""


@runtime_checkable
class KeyedStore(Protocol):
    """Store in which a key can be read."""

    async def keep(self, rows: Sequence[tuple[bytes, bytes]]) -> None:
        """Write values to where they are found by their keys; called once."""

    async def get(self, key: bytes) -> bytes | None:
        """Read the value of a key."""


class Upr:
    """This server. A write is acknowledged after fsync."""

    def __init__(self, address: str) -> None:
        self._client = AsyncClient(address)
        self._bucket = self._client.bucket()

    async def open(self) -> None:
        """The first call connects."""

    async def close(self) -> None:
        await self._client.close()

    async def create(self) -> None:
        """The bucket is there."""

    async def set(self, key: bytes, value: bytes) -> None:
        await self._bucket.set(key, value)

    async def write(self, rows: Sequence[Row]) -> None:
        await self._bucket.write_many(rows)

    async def drain(self, total: int) -> AsyncIterator[list[Row]]:
        async with self._bucket.changes(until="now") as changes:
            async for batch in changes.batches():
                yield batch.items()

    async def arrow(self) -> AsyncIterator[pa.RecordBatch]:
        """Yield all changes from the beginning as Arrow record batches."""
        async with self._bucket.changes(until="now") as changes:
            async for batch in changes.batches():
                yield batch.to_arrow()

    async def follow(self) -> AsyncIterator[list[Row]]:
        async with self._bucket.changes(start="now") as changes:
            await changes.ready()
            yield []
            async for batch in changes.batches():
                yield batch.items()

    async def remember(self, path: str) -> None:
        async with self._bucket.changes(resume=FilePositions(path), until="now") as changes:
            async for _ in changes.batches():
                pass

    async def resume(self, path: str) -> list[Row]:
        # Closed with the connection, as the peers' streams are.
        changes = await self._bucket.changes(resume=FilePositions(path)).__aenter__()
        async for batch in changes.batches():
            if batch.rows:
                rows: list[Row] = batch.items()
                return rows
        raise AssertionError("the stream ended")

    async def keep(self, rows: Sequence[tuple[bytes, bytes]]) -> None:
        await self._bucket.write_many(rows)

    async def get(self, key: bytes) -> bytes | None:
        return await self._bucket.get(key)


class Redis:
    """One stream of Redis; how often it is synced is set at its start."""

    def __init__(self, address: str) -> None:
        host, port = address.split(":")
        self._redis: Any = redis.Redis.from_pool(
            redis.BlockingConnectionPool(
                host=host,
                port=int(port),
                max_connections=_CONNECTIONS,
                timeout=None,
                socket_timeout=None,
            )
        )

    async def open(self) -> None:
        await self._redis.ping()

    async def close(self) -> None:
        await self._redis.aclose()

    async def create(self) -> None:
        """The first entry makes it."""

    async def set(self, key: bytes, value: bytes) -> None:
        await self._redis.xadd(_NAME, {b"k": key, b"v": value})

    async def write(self, rows: Sequence[Row]) -> None:
        pipeline = self._redis.pipeline(transaction=False)
        for key, value in rows:
            pipeline.xadd(_NAME, {b"k": key, b"v": value or _NONE})
        await pipeline.execute()

    async def _read(self, after: bytes | str, block: int | None) -> tuple[bytes, list[Row]]:
        answer = await self._redis.xread({_NAME: after}, count=ROWS_AT_ONCE, block=block)
        if not answer:
            return b"", []
        # A list in the second version of its protocol, a mapping in the third.
        pairs = answer.items() if isinstance(answer, dict) else answer
        [(_, entries)] = pairs
        if isinstance(answer, dict):
            [entries] = entries
        rows = [(fields[b"k"], fields[b"v"] or None) for _, fields in entries]
        return entries[-1][0], rows

    async def drain(self, total: int) -> AsyncIterator[list[Row]]:
        after: bytes | str = "0"
        while total:
            after, rows = await self._read(after, None)
            total -= len(rows)
            yield rows

    async def follow(self) -> AsyncIterator[list[Row]]:
        newest = await self._redis.xrevrange(_NAME, count=1)
        after = newest[0][0] if newest else "0"
        yield []
        while True:
            after, rows = await self._read(after, 0)
            yield rows

    async def remember(self, path: str) -> None:
        [(newest, _)] = await self._redis.xrevrange(_NAME, count=1)
        _store(path, newest.decode())

    async def resume(self, path: str) -> list[Row]:
        after = _stored(path)
        return (await self._read(after, 0))[1]

    async def keep(self, rows: Sequence[tuple[bytes, bytes]]) -> None:
        await self._redis.mset(dict(rows))

    async def get(self, key: bytes) -> bytes | None:
        value: bytes | None = await self._redis.get(key)
        return value


class Postgres:
    """A table of changes in PostgreSQL; who follows it is a logical replica."""

    _INSERT = "INSERT INTO changes (key, value) VALUES ($1, $2)"
    _READ = "SELECT seq, key, value FROM changes WHERE seq > $1 ORDER BY seq LIMIT $2"
    _GET = "SELECT value FROM kept WHERE key = $1"
    _INSERTED: Final = re.compile(rb"key\[bytea\]:'\\x(\w+)' value\[bytea\]:'\\x(\w+)'")
    _ROWS: Final = 10_000

    def __init__(self, address: str) -> None:
        self._address = f"postgresql://postgres@{address}/postgres"

    async def open(self) -> None:
        self._pool = await asyncpg.create_pool(
            self._address, min_size=1, max_size=_CONNECTIONS, ssl=False
        )

    async def close(self) -> None:
        await self._pool.close()

    async def create(self) -> None:
        await self._pool.execute(
            "CREATE TABLE changes (seq bigserial PRIMARY KEY, key bytea NOT NULL, value bytea)"
        )

    async def set(self, key: bytes, value: bytes) -> None:
        await self._pool.execute(self._INSERT, key, value)

    async def write(self, rows: Sequence[Row]) -> None:
        async with self._pool.acquire() as connection:
            await connection.copy_records_to_table(_NAME, records=rows, columns=["key", "value"])

    async def drain(self, total: int) -> AsyncIterator[list[Row]]:
        after = 0
        while total:
            records = await self._pool.fetch(self._READ, after, self._ROWS)
            after = records[-1][0]
            total -= len(records)
            yield [(key, value) for _, key, value in records]

    async def follow(self) -> AsyncIterator[list[Row]]:
        # The numbers of concurrent inserts become visible in any order, so only logical replication misses none.
        connection = await asyncio.to_thread(
            psycopg2.connect,
            self._address,
            connection_factory=psycopg2.extras.LogicalReplicationConnection,
        )
        cursor = connection.cursor()
        cursor.create_replication_slot("follower", output_plugin="test_decoding")
        cursor.start_replication("follower", decode=False)
        arrived = asyncio.Event()
        asyncio.get_running_loop().add_reader(connection.fileno(), arrived.set)
        try:
            yield []
            while True:
                await arrived.wait()
                arrived.clear()
                rows: list[Row] = []
                while (message := cursor.read_message()) is not None:
                    found = self._INSERTED.search(message.payload)
                    if found:
                        key, value = (bytes.fromhex(column.decode()) for column in found.groups())
                        rows.append((key, value))
                if rows:
                    yield rows
        finally:
            asyncio.get_running_loop().remove_reader(connection.fileno())
            connection.close()

    async def remember(self, path: str) -> None:
        newest = await self._pool.fetchval("SELECT coalesce(max(seq), 0) FROM changes")
        _store(path, str(newest))

    async def resume(self, path: str) -> list[Row]:
        records = await self._pool.fetch(self._READ, int(_stored(path)), ROWS_AT_ONCE)
        return [(key, value) for _, key, value in records]

    async def keep(self, rows: Sequence[tuple[bytes, bytes]]) -> None:
        async with self._pool.acquire() as connection:
            await connection.execute("CREATE TABLE kept (key bytea PRIMARY KEY, value bytea)")
            await connection.copy_records_to_table("kept", records=rows)

    async def get(self, key: bytes) -> bytes | None:
        value: bytes | None = await self._pool.fetchval(self._GET, key)
        return value


class Nats:
    """A stream of NATS JetStream with a file store."""

    def __init__(self, address: str) -> None:
        self._address = f"nats://{address}"

    async def open(self) -> None:
        self._connection = await nats.connect(self._address, pending_size=64 * 2**20)
        self._stream = self._connection.jetstream(
            timeout=_SECONDS, publish_async_max_pending=ROWS_AT_ONCE * WRITES_AT_ONCE
        )

    async def close(self) -> None:
        await self._connection.close()

    async def create(self) -> None:
        await self._stream.add_stream(name=_NAME, subjects=[_NAME])

    async def set(self, key: bytes, value: bytes) -> None:
        await self._stream.publish(_NAME, _packed(key, value))

    async def write(self, rows: Sequence[Row]) -> None:
        answers = [
            await self._stream.publish_async(_NAME, _packed(*row), wait_stall=_SECONDS)
            for row in rows
        ]
        await asyncio.gather(*answers)

    async def _messages(self, **options: Any) -> AsyncIterator[list[Row]]:
        subscription = await self._stream.subscribe(
            _NAME, ordered_consumer=True, pending_bytes_limit=-1, pending_msgs_limit=-1, **options
        )
        yield []
        async for message in subscription.messages:
            yield [_row(message.data)]

    async def drain(self, total: int) -> AsyncIterator[list[Row]]:
        async for rows in self._messages():
            total -= len(rows)
            yield rows
            if not total:
                return

    async def follow(self) -> AsyncIterator[list[Row]]:
        new = nats.js.api.ConsumerConfig(deliver_policy=nats.js.api.DeliverPolicy.NEW)
        async for rows in self._messages(config=new):
            yield rows

    async def remember(self, path: str) -> None:
        info = await self._stream.stream_info(_NAME)
        _store(path, str(info.state.last_seq))

    async def resume(self, path: str) -> list[Row]:
        first = nats.js.api.ConsumerConfig(
            deliver_policy=nats.js.api.DeliverPolicy.BY_START_SEQUENCE,
            opt_start_seq=int(_stored(path)) + 1,
        )
        async for rows in self._messages(config=first):
            if rows:
                return rows
        raise AssertionError("the stream ended")

    async def keep(self, rows: Sequence[tuple[bytes, bytes]]) -> None:
        self._kept = await self._stream.create_key_value(bucket="kept")
        for key, value in rows:
            await self._kept.put(key.decode(), value)

    async def get(self, key: bytes) -> bytes | None:
        value: bytes | None = (await self._kept.get(key.decode())).value
        return value


class RabbitStream:
    """A stream of RabbitMQ. A write is acknowledged before it is on the disk."""

    def __init__(self, address: str) -> None:
        host, port = address.split(":")
        at: dict[str, Any] = {"host": host, "port": int(port), **_GUEST}
        self._producer: Any = rstream.Producer(**at)
        self._consumer: Any = rstream.Consumer(**at)

    async def open(self) -> None:
        """Connect what finds streams; the first write connects what writes."""
        await self._consumer.start()

    async def close(self) -> None:
        await self._consumer.close()
        await self._producer.close()

    async def create(self) -> None:
        await self._consumer.create_stream(_NAME)

    async def set(self, key: bytes, value: bytes) -> None:
        await self._producer.send_wait(_NAME, _packed(key, value))

    async def write(self, rows: Sequence[Row]) -> None:
        left = len(rows)
        done = asyncio.get_running_loop().create_future()

        def confirmed(status: rstream.ConfirmationStatus) -> None:
            nonlocal left
            left -= 1
            if not status.is_confirmed:
                done.set_exception(RuntimeError(f"RabbitMQ refused a row: {status.response_code}"))
            elif not left:
                done.set_result(None)

        packed = [_packed(*row) for row in rows]
        await self._producer.send_batch(_NAME, packed, on_publish_confirm=confirmed)
        await done

    async def _chunks(
        self, start: rstream.OffsetType, offset: int | None = None
    ) -> AsyncIterator[tuple[int, list[Row]]]:
        """Yield (-1, []) once nothing can be missed, and then what came, with the offset of its last row."""
        arrived = asyncio.Event()
        last, rows = -1, list[Row]()

        def take(message: bytes, context: rstream.MessageContext) -> None:
            nonlocal last
            rows.append(_row(message))
            last = context.offset
            arrived.set()

        begin = rstream.ConsumerOffsetSpecification(start, offset)
        await self._consumer.subscribe(_NAME, take, offset_specification=begin)
        yield -1, []
        while True:
            await arrived.wait()
            arrived.clear()
            came, rows = rows, []
            yield last, came

    async def drain(self, total: int) -> AsyncIterator[list[Row]]:
        async for _, rows in self._chunks(rstream.OffsetType.FIRST):
            yield rows
            total -= len(rows)
            if not total:
                return

    async def follow(self) -> AsyncIterator[list[Row]]:
        async for _, rows in self._chunks(rstream.OffsetType.NEXT):
            yield rows

    async def remember(self, path: str) -> None:
        # Rows of a chunk come together, and nobody writes meanwhile.
        async for last, rows in self._chunks(rstream.OffsetType.LAST):
            if rows:
                return _store(path, str(last))

    async def resume(self, path: str) -> list[Row]:
        async for _, rows in self._chunks(rstream.OffsetType.OFFSET, int(_stored(path)) + 1):
            if rows:
                return rows
        raise AssertionError("the stream ended")


class RabbitQueue:
    """A quorum queue of RabbitMQ, whose log is synced before a write is acknowledged. Each change goes to one consumer, and the queue has the position."""

    def __init__(self, address: str) -> None:
        self._address = "amqp://{username}:{password}@".format(**_GUEST) + address

    async def open(self) -> None:
        self._connection = await aiormq.connect(self._address)
        self._channel: Any = await self._connection.channel()

    async def close(self) -> None:
        await self._connection.close()

    async def create(self) -> None:
        kind = {"x-queue-type": "quorum"}
        await self._channel.queue_declare(_NAME, durable=True, arguments=kind)

    async def set(self, key: bytes, value: bytes | None) -> None:
        await self._channel.basic_publish(_packed(key, value), routing_key=_NAME, wait=False)

    async def write(self, rows: Sequence[Row]) -> None:
        await asyncio.gather(*(self.set(*row) for row in rows))

    async def _messages(self) -> AsyncIterator[tuple[int, list[Row]]]:
        """Yield what came, with what acknowledges it."""
        arrived = asyncio.Event()
        last, rows = 0, list[Row]()

        async def take(message: aiormq.abc.DeliveredMessage) -> None:
            nonlocal last
            rows.append(_row(message.body))
            last = message.delivery_tag or 0
            arrived.set()

        await self._channel.basic_qos(prefetch_count=ROWS_AT_ONCE)
        await self._channel.basic_consume(_NAME, take)
        while True:
            await arrived.wait()
            arrived.clear()
            came, rows = rows, []
            yield last, came

    async def drain(self, total: int) -> AsyncIterator[list[Row]]:
        async for last, rows in self._messages():
            yield rows
            await self._channel.basic_ack(last, multiple=True)
            total -= len(rows)
            if not total:
                return

    async def follow(self) -> AsyncIterator[list[Row]]:
        # A queue keeps what nobody has taken.
        yield []
        async for rows in self.drain(-1):
            yield rows

    async def remember(self, path: str) -> None:
        queue = await self._channel.queue_declare(_NAME, passive=True)
        async for _ in self.drain(queue.message_count or 0):
            pass
        _store(path, "")

    async def resume(self, path: str) -> list[Row]:
        async for _, rows in self._messages():
            # Not acknowledged, so that the next one has it too.
            return rows
        raise AssertionError("the queue ended")


class Etcd:
    """The keys of an etcd, over its own gRPC interface. A write is acknowledged after fsync; who follows them watches all."""

    _OPERATIONS: Final = 128
    """Most that etcd takes in a transaction."""

    def __init__(self, address: str) -> None:
        self._address = address

    async def open(self) -> None:
        # One answer of a watch has up to a thousand transactions.
        options = [("grpc.max_receive_message_length", -1)]
        self._channel = grpc.aio.insecure_channel(self._address, options)
        self._keys: Any = etcd.KVStub(self._channel)
        await self._channel.channel_ready()

    async def close(self) -> None:
        await self._channel.close()

    async def create(self) -> None:
        """The keys are there."""

    async def set(self, key: bytes, value: bytes) -> None:
        await self._keys.Put(etcd.PutRequest(key=key, value=value))

    async def write(self, rows: Sequence[Row]) -> None:
        for batch in batches(list(rows), self._OPERATIONS):
            # A transaction may change a key once.
            changes = [
                etcd.RequestOp(request_delete_range=etcd.DeleteRangeRequest(key=key))
                if value is None
                else etcd.RequestOp(request_put=etcd.PutRequest(key=key, value=value))
                for key, value in dict(batch).items()
            ]
            await self._keys.Txn(etcd.TxnRequest(success=changes))

    async def _newest(self) -> int:
        return int((await self._keys.Range(etcd.RangeRequest(key=b"\0"))).header.revision)

    async def _watch(self, start: int) -> AsyncIterator[tuple[int, list[Row]]]:
        """Yield (0, []) once nothing can be missed, and then what came, with the revision of its last row; 0 starts now."""
        call = etcd.WatchStub(self._channel).Watch()
        try:
            begin = etcd.WatchCreateRequest(key=b"\0", range_end=b"\0", start_revision=start)
            await call.write(etcd.WatchRequest(create_request=begin))
            while not (answer := await call.read()).canceled:
                rows = [
                    (one.kv.key, None if one.type == etcd.Event.DELETE else one.kv.value)
                    for one in answer.events
                ]
                yield answer.events[-1].kv.mod_revision if rows else 0, rows
        finally:
            call.cancel()

    async def drain(self, total: int) -> AsyncIterator[list[Row]]:
        newest = await self._newest()
        async for revision, rows in self._watch(1):
            yield rows
            if revision == newest:
                return

    async def follow(self) -> AsyncIterator[list[Row]]:
        async for _, rows in self._watch(0):
            yield rows

    async def remember(self, path: str) -> None:
        _store(path, str(await self._newest()))

    async def resume(self, path: str) -> list[Row]:
        async for _, rows in self._watch(int(_stored(path)) + 1):
            if rows:
                return rows
        raise AssertionError("the watch ended")

    async def keep(self, rows: Sequence[tuple[bytes, bytes]]) -> None:
        await self.write(rows)

    async def get(self, key: bytes) -> bytes | None:
        [found] = (await self._keys.Range(etcd.RangeRequest(key=key))).kvs
        value: bytes = found.value
        return value


def dealt(rows: list[Row]) -> list[list[list[Row]]]:
    """Deal rows to WRITES_AT_ONCE writers, much the same to each, in batches; those of a key to one, in their order."""
    lanes: list[list[Row]] = [[] for _ in range(WRITES_AT_ONCE)]
    sizes = [0] * WRITES_AT_ONCE
    lane_of = dict[bytes, list[Row]]()
    for key, count in Counter(key for key, _ in rows).most_common():
        least = sizes.index(min(sizes))
        lane_of[key] = lanes[least]
        sizes[least] += count
    for row in rows:
        lane_of[row[0]].append(row)
    return [batches(lane, ROWS_AT_ONCE) for lane in lanes]


async def write_all(store: Store, lanes: list[list[list[Row]]]) -> None:
    """Write all rows in bulk, a batch of each writer under way."""

    async def write(lane: list[list[Row]]) -> None:
        for batch in lane:
            await store.write(batch)

    await asyncio.gather(*map(write, lanes))
