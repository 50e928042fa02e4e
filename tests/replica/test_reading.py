"""Reading from a set of servers: from the active one, whichever that is, or from any; and reading what was written."""

import os
import threading
from collections.abc import Iterator
from contextlib import contextmanager, suppress

import grpc
import pytest

from tests.conftest import StartServer
from tests.proxy import Proxy
from tests.replica.sets import (
    SOON,
    is_active,
    run,
    start_set,
    state_of,
    wait_for,
    wait_until_counted,
    wait_until_equal,
)
from upr_client import Change, Client, Rollback, ServerPositions, WriteToken
from upr_client.errors import (
    BehindError,
    InvalidArgumentError,
    UnavailableError,
    UprError,
    WriteUndoneError,
)
from upr_protocol.wire.grpc import error_from_call
from upr_protocol.wire.v1.change_stream_service_pb2 import LoadPositionsRequest
from upr_protocol.wire.v1.change_stream_service_pb2_grpc import ChangeStreamServiceStub


@contextmanager
def held_back(proxy: Proxy) -> Iterator[None]:
    """Have a replica receive nothing."""
    proxy.black_hole("to client")
    try:
        yield
    finally:
        proxy.heal()


def test_reading_goes_to_the_active_server_unless_any_will_do(server_process: StartServer) -> None:
    owner, replica = start_set(server_process)
    with Client(owner.target) as client:
        client.bucket().set(b"k", b"v")
    wait_until_equal([owner, replica])
    with Client(replica.target) as client:
        bucket = client.bucket()
        assert bucket.get(b"k", read_from="any") == b"v"
        with bucket.changes(until="now", read_from="any") as changes:
            assert [one.key for one in changes if isinstance(one, Change)] == [b"k"]
        with bucket.materialize(read_from="any") as view:
            assert view.ready(30)
            assert view[b"k"] == b"v"
        # It was read here, and writing would go elsewhere.
        assert client.target == replica.target
        assert bucket.get(b"k") == b"v"
        assert client.target == owner.target
        assert bucket.get(b"k", read_from="any") == b"v"
    for ask in (
        lambda bucket: list(bucket.changes(until="now").__enter__()),
        lambda bucket: bucket.cut("c").__enter__(),
        lambda bucket: list(bucket.changes(until="now", resume=ServerPositions("c")).__enter__()),
    ):
        with Client(replica.target) as client:
            ask(client.bucket())
            assert client.target == owner.target
    with Client(replica.target, token="t") as client:
        # It may not go where it was not told to.
        with pytest.raises(UprError) as refused:
            client.bucket().get(b"k", seconds=0.2)
        assert (refused.value.reason, refused.value.owner) == ("PARTITION_NOT_ACTIVE", owner.target)
        with pytest.raises(InvalidArgumentError, match='must be "active"'):
            client.bucket().changes(resume=ServerPositions("c"), read_from="any")


def test_calls_about_one_server_go_to_the_one_that_was_given(server_process: StartServer) -> None:
    owner, replica = start_set(server_process)
    with Client(replica.target) as client:
        client.bucket().set(b"k", b"v")
        assert client.target == owner.target
        assert all(bucket.upstream for bucket in client.admin.status().buckets)
        client.admin.promote(takeover=True)
        assert is_active(replica)
        # The former owner names the new one.
        assert client.bucket().get(b"k") == b"v"
        assert client.target == replica.target
    with Client([owner.target, replica.target]) as client:
        owner.kill()
        # Not the one behind it, now or later.
        for call in (client.admin.status, lambda: client.admin.promote(force=True)):
            with pytest.raises(UnavailableError):
                call()
        assert is_active(replica)
        owner.start()

        def is_asked() -> bool:
            # gRPC connects again after a pause.
            with suppress(UnavailableError):
                return all(bucket.upstream for bucket in client.admin.status().buckets)
            return False

        wait_for(is_asked, "the first endpoint")


def test_a_replica_that_nobody_met_since_its_start_names_another_server(
    server_process: StartServer,
) -> None:
    owner, replica = start_set(server_process)
    with Client(owner.target) as client:
        client.bucket().set(b"k", b"v")
    wait_until_equal([owner, replica])
    unmet = server_process("--replicate-from", replica.target, "--anonymous")
    with Client(unmet.target) as client:
        assert client.bucket().get(b"k") == b"v"
        assert client.target == owner.target
    with Client(unmet.target) as client:
        # As every change, this too is one for the active server.
        assert not client.admin.forget_consumer("default", "nobody")
    replica.terminate()
    replica.start()
    with Client(replica.target) as client:
        assert client.bucket().get(b"k") == b"v"
        assert client.target == owner.target


def test_a_replica_does_not_give_positions(server_process: StartServer) -> None:
    _, replica = start_set(server_process)
    with grpc.insecure_channel(replica.target) as channel:
        request = LoadPositionsRequest(bucket="default", consumer="c")
        with pytest.raises(grpc.RpcError) as refused:
            ChangeStreamServiceStub(channel).LoadPositions(request, timeout=30)
    assert error_from_call(refused.value).reason == "PARTITION_NOT_ACTIVE"


def test_who_follows_goes_on_through_takeovers_from_one_address(
    server_process: StartServer,
) -> None:
    first, second = start_set(server_process)
    seen: list[bytes] = []
    said: list[str] = []
    with Client(first.target) as reader, Client(first.target) as writer:
        bucket = reader.bucket()
        changes = bucket.changes(resume=ServerPositions("c"), on_status=said.append)
        with changes:

            def follow() -> None:
                for one in changes:
                    assert not isinstance(one, Rollback)
                    if isinstance(one, Change):
                        seen.append(one.key)

            following = threading.Thread(target=follow)
            following.start()
            for number, target in enumerate([second, first, second]):
                done = run("takeover", "--to", target.target)
                assert done.exit_code == 0, done.output
                writer.bucket().set(b"%d" % number, b"v")
                wait_for(lambda number=number: len(seen) > number, f"a change: {said}")  # type: ignore[misc]
                assert reader.target == writer.target == target.target
                wait_until_counted([first, second], target)
            # Only one was named by the client; the other one it has heard of.
            first.kill()
            result = writer.bucket().set(b"last", b"v")
            changes.reached(result, 30)
            changes.stop()
            following.join()
    assert seen == [b"0", b"1", b"2", b"last"]


def test_a_client_that_never_met_the_new_owner_finds_it(server_process: StartServer) -> None:
    first, second = start_set(server_process)
    with Client(first.target) as writer, Client(first.target) as reader:
        writer.bucket().set(b"k", b"v")
        assert reader.bucket().get(b"k") == b"v"
        wait_until_equal([first, second])
        first.kill()
        assert run("promote", "--target", second.target).exit_code == 0
        assert reader.bucket().get(b"k") == b"v"
        writer.bucket().set(b"k", b"w")
        assert (writer.target, reader.target) == (second.target, second.target)


@pytest.mark.long
def test_a_large_value_comes_over_a_slow_link(server_process: StartServer) -> None:
    """Nothing else gets through before it: neither a heartbeat, nor the list of buckets, which shows that the owner lives."""
    owner = server_process()
    value = os.urandom(3_000_000)
    with Client(owner.target) as writer, Proxy(owner.target) as proxy:
        written = writer.bucket().set(b"k", value)
        proxy.limit(500_000)
        soon = SOON | {"upr.replica.replication.ANSWER_SECONDS": 2.0}
        command = ("--replicate-from", proxy.target, "--anonymous")
        replica = server_process(*command, constants=soon)
        with Client(replica.target) as reader:
            bucket = reader.bucket()
            # It takes 6 s.
            found = bucket.get(b"k", at_least=written, read_from="any", seconds=30)
        assert found == value
        assert "a call to the upstream ended" not in replica.log_text()


def test_what_was_written_is_waited_for_at_a_replica(server_process: StartServer) -> None:
    owner = server_process()
    with Proxy(owner.target) as proxy:
        replica = server_process("--replicate-from", proxy.target, "--anonymous")
        with Client(owner.target) as writer, Client(replica.target, token="t") as reader:
            bucket = reader.bucket()
            known = writer.bucket().set(b"k", b"old")
            assert bucket.get(b"k", at_least=known, read_from="any", seconds=30) == b"old"
            with bucket.materialize(read_from="any") as view, held_back(proxy):
                assert view.ready(30)
                token = writer.bucket().write_many([(b"k", b"new"), (b"other", b"v")]).token
                token = WriteToken.parse(str(token))
                assert bucket.get(b"k", read_from="any") == b"old"
                with pytest.raises(BehindError) as behind:
                    bucket.get(b"k", at_least=token, read_from="any", seconds=0.3)
                assert behind.value.retriable
                with pytest.raises(BehindError):
                    view.reached(token, 0.1)
                # It does not wait for what is in another partition than the key's.
                assert bucket.get(b"k", at_least=known, read_from="any") == b"old"

                found: list[bytes | None] = []
                waiting = [
                    threading.Thread(
                        target=lambda: found.append(
                            bucket.get(b"k", at_least=token, read_from="any", seconds=60)
                        )
                    ),
                    threading.Thread(target=lambda: view.reached(token, 60)),
                ]
                for one in waiting:
                    one.start()
                with Client(f"{replica.target},{owner.target}") as other:
                    # One that is behind leaves time for the next.
                    values = other.bucket().get_many(
                        [b"k", b"other"], at_least=token, read_from="any", seconds=5
                    )
                    assert values == {b"k": b"new", b"other": b"v"}
                assert found == []
                proxy.heal()
                for one in waiting:
                    one.join(60)
                assert found == [b"new"]
                assert view[b"k"] == b"new"


def test_a_token_of_what_was_undone_is_an_error(server_process: StartServer) -> None:
    old, new = start_set(server_process)
    with Client(old.target) as client:
        kept = client.bucket().set(b"k", b"kept")
        wait_until_equal([old, new])
        new.terminate()
        lost = client.bucket().set(b"k", b"lost")
    old.kill()
    new.start()
    assert run("promote", "--force", "--yes", "--target", new.target).exit_code == 0
    with Client(new.target) as client:
        later = client.bucket().set(b"k", b"later")
    old.start()
    wait_until_counted([old, new], new)
    wait_until_equal([old, new])
    for server in (new, old):
        with Client(server.target) as client:
            bucket = client.bucket()
            for read_from in ("active", "any"):
                with pytest.raises(WriteUndoneError, match="a failover undid it") as undone:
                    bucket.get(b"k", at_least=lost, read_from=read_from)
                assert not undone.value.retriable
                assert bucket.get(b"k", at_least=kept.token | later.token) == b"later"
            with bucket.materialize(read_from="any") as view:
                view.reached(kept.token | later.token, 30)
                with pytest.raises(WriteUndoneError):
                    view.reached(lost, 30)
    assert state_of(old.target) == state_of(new.target)
