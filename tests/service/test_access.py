"""Access: identities with roles, TLS, and files that change, against real servers."""

import asyncio
import contextlib
import json
import os
import ssl
import subprocess
import sys
from collections.abc import AsyncIterator, Callable
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import grpc
import pytest
from click.testing import CliRunner
from google.protobuf import descriptor_pool
from google.protobuf.message_factory import GetMessageClass
from grpc_health.v1 import health_pb2
from grpc_reflection.v1alpha import reflection_pb2

from tests.client.certificates import Certificate, make_certificate, sign_anew
from tests.conftest import StartServer
from tests.harness import RunningServer, poll, until, wait_until
from tests.service.bucket_state import break_journal
from tests.service.pages import ask as ask_page
from tests.service.pages import http_of
from upr.cli import admin
from upr.service.access.files import Watched, signature
from upr.service.access.identities import add_identity, revoke_identity
from upr.service.access.rules import RULES, Access, Permit, Scope
from upr.service.overload.callers import Callers
from upr.service.overload.gate import Gate, Opened
from upr.service.overload.intake import Intake
from upr_client import AsyncClient, Client
from upr_client.errors import (
    BucketNotFoundError,
    InvalidArgumentError,
    PermissionDeniedError,
    TooManyError,
    UnauthenticatedError,
    UnavailableError,
    UprError,
)
from upr_protocol.limits import ADMIN_SOCKET
from upr_protocol.partitioning import partition_of
from upr_protocol.wire.grpc import error_from_call
from upr_protocol.wire.v1 import (
    admin_service_pb2,
    change_stream_service_pb2,
    key_value_service_pb2,
    replica_service_pb2,
)
from upr_protocol.wire.v1.admin_service_pb2_grpc import AdminServiceStub

CLOSED = {"UPR_SERVER_OPEN_ADMIN": "0"}
SERVICE = "upr.v1.ChangeStreamService"
POOL = descriptor_pool.Default()
OURS = (
    admin_service_pb2,
    change_stream_service_pb2,
    key_value_service_pb2,
    replica_service_pb2,
)
Roles = dict[str, set[str] | None]


class Guarded:
    """A server with identities, and their file."""

    def __init__(self, start: StartServer, folder: Path, *options: str) -> None:
        self.file = folder / "identities"
        self.owner = self.add("root", dict.fromkeys(("read", "write", "replicate", "admin")))
        soon = {"upr.service.access.files.LOOK_SECONDS": 0.05}
        self.server: RunningServer = start(
            "--tokens", str(self.file), *options, environment=CLOSED, constants=soon
        )
        self.target = self.server.target

    def add(self, name: str, roles: Roles, certificate: str = "", **more: Any) -> str:
        return add_identity(self.file, name, roles, certificate, **more)

    def taken(self) -> int:
        """How often the server has taken the file anew."""
        return self.server.log_text().count("a changed file is used")

    def changed(self, change: Callable[[], Any]) -> Any:
        """Change the file, and wait until the server has it."""
        before = self.taken()
        found = change()
        wait_until(lambda: self.taken() > before, self.server.log_text)
        return found


@pytest.fixture
def guarded(server_process: StartServer, tmp_path: Path) -> Guarded:
    return Guarded(server_process, tmp_path)


def metadata(token: str) -> tuple[tuple[str, str], ...]:
    return (("authorization", f"Bearer {token}"),) if token else ()


def request_of(method: Any, fields: dict[str, Any]) -> Any:
    """The request of a method, or the Open of a call with many, with some fields."""
    request = GetMessageClass(method.input_type)()
    message = request.open if method.client_streaming and hasattr(request, "open") else request
    for name, value in fields.items():
        setattr(message, name, value)
    if message is not request:
        message.SetInParent()
    return request


async def answer(channel: Any, method: Any, request: Any, token: str) -> Any:
    """Call a method, and return its answer, or the first one of many."""
    path = f"/{method.containing_service.full_name}/{method.name}"
    kinds = {
        (False, False): channel.unary_unary,
        (False, True): channel.unary_stream,
        (True, True): channel.stream_stream,
    }
    kind = kinds[method.client_streaming, method.server_streaming]
    called = kind(
        path,
        request_serializer=type(request).SerializeToString,
        response_deserializer=GetMessageClass(method.output_type).FromString,
    )
    if method.client_streaming:
        call = called(metadata=metadata(token), timeout=30)
        # A call that is refused at its beginning may be over before anything is written.
        with contextlib.suppress(asyncio.InvalidStateError):
            await call.write(request)
        found = await call.read()
        call.cancel()
    elif method.server_streaming:
        call = called(request, metadata=metadata(token), timeout=30)
        found = await call.read()
        call.cancel()
    else:
        found = await called(request, metadata=metadata(token), timeout=30)
    return found


async def ask(channel: Any, method: Any, request: Any, token: str) -> UprError | None:
    """Call a method, and return the error that it is refused with."""
    try:
        await answer(channel, method, request, token)
    except grpc.aio.AioRpcError as error:
        if error.details() == "Internal error from Core":
            # gRPC's client says this of a call that ends while it writes. It is asked again, as the SDK does.
            return await ask(channel, method, request, token)
        return error_from_call(error)
    return None


async def served(target: str, token: str) -> list[Any]:
    """The methods of all services that the server tells by reflection."""
    request = reflection_pb2.ServerReflectionRequest(list_services="")
    async with grpc.aio.insecure_channel(target) as channel:
        listing = channel.stream_stream(
            "/grpc.reflection.v1alpha.ServerReflection/ServerReflectionInfo",
            request_serializer=reflection_pb2.ServerReflectionRequest.SerializeToString,
            response_deserializer=reflection_pb2.ServerReflectionResponse.FromString,
        )
        call = listing(iter([request]), metadata=metadata(token))
        answers = [answer async for answer in call]
    names = [one.name for one in answers[0].list_services_response.service]
    # Of the server's own service for sets reflection says nothing.
    names.append("upr.v1.ReplicaService")
    return [m for name in sorted(set(names)) for m in POOL.FindServiceByName(name).methods]


@pytest.mark.asyncio
async def test_every_method_has_a_rule_and_none_but_health_is_open(guarded: Guarded) -> None:
    methods = await served(guarded.target, guarded.owner)
    paths = {f"/{m.containing_service.full_name}/{m.name}" for m in methods}
    assert paths == set(RULES)
    for module in OURS:
        for service in module.DESCRIPTOR.services_by_name.values():
            assert {f"/{service.full_name}/{m.name}" for m in service.methods} <= paths
    async with grpc.aio.insecure_channel(guarded.target) as channel:
        for method in methods:
            if method.full_name in ("grpc.health.v1.Health.Check", "grpc.health.v1.Health.Watch"):
                assert await ask(channel, method, health_pb2.HealthCheckRequest(), "") is None
                for name in ("bucket/default", "bucket/none"):
                    request = health_pb2.HealthCheckRequest(service=name)
                    error = await ask(channel, method, request, "")
                    assert isinstance(error, UnauthenticatedError), method.full_name
                continue
            for token in ("", "upr_made-up"):
                error = await ask(channel, method, request_of(method, {}), token)
                assert isinstance(error, UnauthenticatedError), method.full_name
                assert not error.retriable
                assert "made-up" not in str(error)
    assert "made-up" not in guarded.server.log_text()


@pytest.mark.asyncio
async def test_another_bucket_cannot_be_used_or_guessed_at(guarded: Guarded) -> None:
    """Whether there is such a bucket or not, the refusal is the same to the letter."""
    roles: Roles = {"read": {"mine"}, "write": {"mine"}, "admin": {"mine"}}
    token = guarded.changed(lambda: guarded.add("one", roles))
    with Client(guarded.target, token=guarded.owner) as owner:
        for name in ("mine", "theirs"):
            owner.admin.create_bucket(name)
    checked, others = 0, []
    async with grpc.aio.insecure_channel(guarded.target) as channel:
        for method in await served(guarded.target, guarded.owner):
            rule = RULES[f"/{method.containing_service.full_name}/{method.name}"]
            if rule.scope is not Scope.BUCKET:
                continue
            words = []
            for name in ("theirs", "nowhere"):
                fields = {rule.bucket: f"bucket/{name}" if rule.is_open else name}
                error = await ask(channel, method, request_of(method, fields), token)
                assert isinstance(error, PermissionDeniedError), method.full_name
                words.append((str(error), error.reason, error.retriable))
            assert words[0] == words[1], method.full_name
            checked += 1
    assert checked >= 20
    with Client(guarded.target, token=token) as client:
        assert [info.name for info in client.admin.buckets()] == ["mine"]
        assert [info.name for info in client.admin.status().buckets] == ["mine"]
        client.bucket("mine").set(b"k", b"v")
        assert client.bucket("mine").get(b"k") == b"v"
        # The whole server is not its own.
        with pytest.raises(PermissionDeniedError):
            client.admin.promote(force=True)
        client.admin.drop_bucket("mine")
    async with grpc.aio.insecure_channel(guarded.target) as channel:
        for method in await served(guarded.target, guarded.owner):
            rule = RULES[f"/{method.containing_service.full_name}/{method.name}"]
            if rule.scope is Scope.BUCKET and method.name != "CreateBucket":
                name = "bucket/mine" if rule.is_open else "mine"
                error = await ask(channel, method, request_of(method, {rule.bucket: name}), token)
                others.append(error)
                assert "theirs" not in f"{error} {error and error.hint}", method.full_name
    assert any(isinstance(error, BucketNotFoundError) for error in others)


@pytest.mark.asyncio
async def test_what_is_told_of_the_server_names_no_bucket_of_others(
    server_process: StartServer, tmp_path: Path
) -> None:
    guarded = Guarded(server_process, tmp_path, "--http", "127.0.0.1:0")
    token = guarded.changed(lambda: guarded.add("one", {"read": {"mine"}}))
    some = guarded.changed(lambda: guarded.add("some", {"read": None}, prefixes=["a"]))
    with Client(guarded.target, token=guarded.owner) as owner:
        version = owner.admin.create_bucket("theirs").version
        for _ in range(3):
            owner.bucket("theirs").set(b"k", b"v")
    guarded.server.kill()
    guarded.server.start(environment={"UPR_FAILPOINTS": "promote.after_row=kill"})
    with Client(guarded.target, token=guarded.owner) as owner, pytest.raises(UprError):
        owner.admin.promote(force=True)
    # A promotion that was cut off is not taken up again while a bucket is damaged, and the reason names that bucket.
    guarded.server.wait()
    break_journal(guarded.server, version)
    guarded.server.start()
    with Client(guarded.target, token=guarded.owner) as owner:
        wait_until(lambda: "theirs" in owner.admin.topology().waiting, guarded.server.log_text)
    told = []
    async with grpc.aio.insecure_channel(guarded.target) as channel:
        for method in await served(guarded.target, guarded.owner):
            if RULES[f"/{method.containing_service.full_name}/{method.name}"].scope is Scope.SOME:
                for shown in (token, some):
                    found = await answer(channel, method, request_of(method, {}), shown)
                    assert "theirs" not in str(found), method.full_name
                    told += [found.waiting] if method.name == "GetTopology" else []
    page = await asyncio.to_thread(http_of, guarded.server)
    for shown in (token, some, guarded.owner):
        said = await asyncio.to_thread(ask_page, page, "/api/status", shown=f"Bearer {shown}")
        assert said.status == 200
        assert ("theirs" in said.body) == (shown == guarded.owner)
        told += [json.loads(said.body)["set"]["waiting"]]
    # That it waits is told to all.
    assert len(told) == 5
    assert all(told)


def test_a_reader_s_backups_have_purging_wait_and_no_other_consumer_is_reset(
    guarded: Guarded,
) -> None:
    token = guarded.changed(lambda: guarded.add("reader", {"read": None}))
    with Client(guarded.target, token=token) as client:
        admin, now = client.admin, datetime.now(UTC)
        admin.reset_consumer("default", "upr-backup-1", now, create=True)
        others: Any = [("another", now), ("upr-backup-1", now), ("upr-backup-1", "beginning")]
        for number, (name, to) in enumerate(others):
            create = number != 1
            with pytest.raises(PermissionDeniedError, match="the role admin"):
                admin.reset_consumer("default", name, to, create=create)


def test_a_role_is_no_other_role(guarded: Guarded) -> None:
    made = {role: guarded.add(role, {role: None}) for role in ("read", "write", "admin")}
    made["replicate"] = guarded.changed(lambda: guarded.add("replicate", {"replicate": None}))
    actions: dict[str, Callable[[Client], Any]] = {
        "set": lambda client: client.bucket().set(b"k", b"v"),
        "get": lambda client: client.bucket().get(b"k"),
        "list": lambda client: client.admin.buckets(),
        "quota": lambda client: client.admin.set_bucket_quota("default", 10**9),
        "storage": lambda client: client.admin.storage("default"),
    }
    allowed: dict[str, list[str]] = {}
    for role, token in made.items():
        with Client(guarded.target, token=token) as client:
            for name, action in actions.items():
                with contextlib.suppress(PermissionDeniedError):
                    action(client)
                    allowed.setdefault(role, []).append(name)
    assert allowed == {
        "read": ["get", "list", "storage"],
        "write": ["set"],
        "admin": ["list", "quota", "storage"],
        "replicate": ["list"],
    }


@pytest.mark.asyncio
async def test_a_reader_is_no_replica(guarded: Guarded) -> None:
    reader = guarded.add("reader", {"read": None})
    replica = guarded.changed(lambda: guarded.add("replica", {"replicate": None}))
    kinds = change_stream_service_pb2.FollowKind
    with Client(guarded.target, token=reader) as client:
        version = client.admin.buckets()[0].version
    (follow,) = [m for m in POOL.FindServiceByName(SERVICE).methods if m.name == "Follow"]
    async with grpc.aio.insecure_channel(guarded.target) as channel:
        for token, kind, refused in (
            (reader, kinds.FOLLOW_KIND_REPLICA, True),
            (reader, kinds.FOLLOW_KIND_ANONYMOUS_REPLICA, True),
            (reader, kinds.FOLLOW_KIND_CONSUMER, False),
            (replica, kinds.FOLLOW_KIND_CONSUMER, True),
            (replica, kinds.FOLLOW_KIND_REPLICA, False),
        ):
            named = {"directory": "0123456789abcdef"} if token == replica else {}
            opening = request_of(follow, {"bucket": "default", "kind": kind, **named})
            error = await ask(channel, follow, opening, token)
            if refused:
                assert isinstance(error, PermissionDeniedError), (token, kind)
            elif token == replica:
                assert error is not None
                assert error.reason == "WRONG_REPLICA_SET"
            else:
                assert error is None
        (save,) = [m for m in POOL.FindServiceByName(SERVICE).methods if m.name == "SavePositions"]
        for method in (follow, save):
            fields: dict[str, Any] = {"bucket": "default", "consumer": "replica:0123456789abcdef"}
            if method is save:
                fields["bucket_version"] = version
            error = await ask(channel, method, request_of(method, fields), reader)
            assert isinstance(error, InvalidArgumentError), method.full_name
            assert "must not begin with 'replica:'" in error.message
    with Client(guarded.target, token=reader) as client:
        # What a server needs to be a replica is not told: it would drop what it is not shown.
        assert client.admin.topology().replica_set
        listed = await listed_set(guarded.target, reader)
        assert listed == ""
    assert await listed_set(guarded.target, replica) != ""


async def listed_set(target: str, token: str) -> str:
    """The set of servers that the list of buckets names."""
    async with grpc.aio.insecure_channel(target) as channel:
        stub: Any = AdminServiceStub(channel)
        request = admin_service_pb2.ListBucketsRequest()
        return str((await stub.ListBuckets(request, metadata=metadata(token))).replica_set)


@pytest.mark.asyncio
async def test_streams_of_a_revoked_identity_end(guarded: Guarded) -> None:
    token = guarded.changed(lambda: guarded.add("reader", {"read": None}))
    async with (
        AsyncClient(guarded.target, token=guarded.owner) as owner,
        AsyncClient(guarded.target, token=token) as client,
    ):
        await owner.bucket().set(b"k", b"v")

        async def follow(who: AsyncClient) -> None:
            async with who.bucket().changes() as changes:
                with pytest.raises(UnauthenticatedError):
                    async for _ in changes.batches():
                        pass

        task = asyncio.create_task(follow(client))
        staying = asyncio.create_task(follow(owner))
        await poll(owner.admin.status, lambda found: found.follow_calls == 2)
        revoke_identity(guarded.file, "reader")
        await task
        # It did not leave by itself.
        assert "CREDENTIALS_ENDED" in guarded.server.log_text()
        # Others are left alone.
        assert (await owner.admin.status()).follow_calls == 1
        staying.cancel()
        await asyncio.gather(staying, return_exceptions=True)


@pytest.mark.asyncio
async def test_a_call_whose_error_is_on_its_way_is_not_ended_again(tmp_path: Path) -> None:
    """gRPC takes one end of a call, and the call counts until its client has taken that."""
    file = tmp_path / "identities"
    token = add_identity(file, "root", dict.fromkeys(("admin",)))
    access = Access(file)
    callers = Callers()
    gate = Gate(Intake(), callers, {}, access)
    told: list[str] = []
    taken = asyncio.Event()

    class Context:
        def peer(self) -> str:
            return "ipv4:127.0.0.1:1"

        def invocation_metadata(self) -> tuple[tuple[str, str], ...]:
            return metadata(token)

        async def abort(self, code: object, words: str, *_: object) -> None:
            told.append(words)
            await taken.wait()
            raise grpc.aio.AbortError

    async def work(requests: Any, context: Any, permit: Permit, opened: Opened) -> None:
        opened.append(callers.open("Follow", "a"))
        raise TooManyError("no more")

    context: Any = Context()
    run: Any = gate._admitted("/upr.v1.AdminService/GetStatus", work)
    call = asyncio.create_task(run(None, context))
    await until(lambda: bool(told))
    revoke_identity(file, "root")
    assert access.watched is not None
    # A file is taken when it was seen unchanged.
    await access.watched.look()
    assert await access.watched.look()
    access.identities_changed()
    for _ in range(5):
        await asyncio.sleep(0)
    assert callers._open
    taken.set()
    with pytest.raises(grpc.aio.AbortError):
        await call
    assert told == ["no more"]
    assert not callers._open


@pytest.mark.asyncio
async def test_every_kind_of_call_ends_with_its_credentials(guarded: Guarded) -> None:
    """When the identity is revoked, when it loses the role, and when its token is another one."""
    roles: Roles = {"read": {"default"}, "write": {"default"}, "admin": {"default"}}
    names = ("revoked", "robbed", "replaced")
    tokens = {name: guarded.add(name, roles) for name in names[:-1]}
    tokens["replaced"] = guarded.changed(lambda: guarded.add("replaced", roles))
    services = ("upr.v1.ChangeStreamService", "upr.v1.KeyValueService", "upr.v1.AdminService")
    found = {m.name: m for s in services for m in POOL.FindServiceByName(s).methods}

    async def begin(channel: Any, token: str) -> list[Any]:
        shown = metadata(token)
        raw = {"request_serializer": bytes, "response_deserializer": bytes}
        # A method with one request, which is held back.
        held = channel.stream_unary("/upr.v1.AdminService/DropBucket", **raw)(metadata=shown)
        await held.wait_for_connection()
        calls = [held]
        for name in ("Follow", "Write"):
            path = f"/{found[name].containing_service.full_name}/{name}"
            call = channel.stream_stream(path, **raw)(metadata=shown)
            fields = {"bucket": "default"}
            await call.write(request_of(found[name], fields).SerializeToString())
            await call.read()
            calls.append(call)
        request = health_pb2.HealthCheckRequest(service="bucket/default")
        watch = channel.unary_stream("/grpc.health.v1.Health/Watch", **raw)
        calls.append(watch(request.SerializeToString(), metadata=shown))
        await calls[-1].read()
        return calls

    async def to_its_end(call: Any) -> None:
        while await call.read() is not grpc.aio.EOF:
            pass

    def lose() -> None:
        other = guarded.file.with_name("other")
        add_identity(other, "replaced", roles)
        lines = [json.loads(line) for line in guarded.file.read_text().splitlines()]
        kept = [one for one in lines if one["name"] not in ("revoked", "replaced")]
        for one in kept:
            if one["name"] == "robbed":
                one |= {role: ["another"] for role in roles}
        text = "".join(json.dumps(one) + "\n" for one in kept)
        other.write_text(text + other.read_text())
        os.replace(other, guarded.file)

    async with grpc.aio.insecure_channel(guarded.target) as channel:
        calls = {name: await begin(channel, token) for name, token in tokens.items()}
        await asyncio.to_thread(guarded.changed, lose)
        # What it asks for is not known yet: it is checked with the roles of now.
        drop = request_of(found["DropBucket"], {"name": "default"})
        await calls["robbed"][0].write(drop.SerializeToString())
        await calls["robbed"][0].done_writing()
        for name, begun in calls.items():
            for call in begun:
                with pytest.raises(grpc.aio.AioRpcError) as ended:
                    await (call if call is begun[0] else to_its_end(call))
                error = error_from_call(ended.value)
                if name == "robbed" and call is begun[0]:
                    assert isinstance(error, PermissionDeniedError)
                else:
                    assert isinstance(error, UnavailableError), (name, error)
                    assert "credentials of this call" in error.message, name
    with Client(guarded.target, token=guarded.owner) as owner:
        assert [one.name for one in owner.admin.buckets()] == ["default"]


@pytest.mark.asyncio
async def test_a_file_is_read_when_it_is_whole_and_until_it_can_be(tmp_path: Path) -> None:
    path, failing = tmp_path / "file", [OSError(24, "Too many open files"), RecursionError()]
    path.write_text("1")
    watched = Watched("the file", [path], lambda: path.read_text())

    def failing_load() -> str:
        if failing:
            raise failing.pop()
        return path.read_text()

    path.write_text("12")
    assert not await watched.look()
    path.write_text("123")
    # It was growing a moment ago.
    assert not await watched.look()
    watched._load = failing_load
    for _ in range(2):
        assert not await watched.look()
        assert watched.problem is not None
        assert watched.value == "1"
    assert await watched.look()
    assert (watched.value, watched.problem) == ("123", None)
    assert not await watched.look()
    # Who may read it is news too.
    before = signature([path])
    path.chmod(0o640)
    assert signature([path]) != before


def test_pages_take_a_role_for_all_buckets(server_process: StartServer, tmp_path: Path) -> None:
    guarded = Guarded(server_process, tmp_path, "--http", "127.0.0.1:0")
    some, writer = guarded.add("some", {"read": {"default"}}), guarded.add("w", {"write": None})
    seen = guarded.changed(lambda: guarded.add("prometheus", {"read": None}))
    address = http_of(guarded.server)
    for page in ("/healthz", "/readyz"):
        assert ask_page(address, page).status == 200
    for token in ("", "unknown", some, writer):
        found = ask_page(address, "/metrics", shown=f"Bearer {token}" if token else "")
        assert (found.status, found.headers["www-authenticate"]) == (401, "Bearer")
        assert found.body == "refused\n"
    assert ask_page(address, "/metrics", shown=f"Basic {seen}").status == 401
    found = ask_page(address, "/metrics", shown=f"Bearer {seen}")
    assert (found.status, "upr_" in found.body) == (200, True)
    assert seen not in guarded.server.log_text()


def ports_of(pid: int) -> set[int]:
    """Return the TCP ports on which a process listens."""
    descriptors = Path(f"/proc/{pid}/fd").iterdir()
    sockets = {os.readlink(one) for one in descriptors if one.exists() or one.is_symlink()}
    found = set()
    for table in ("tcp", "tcp6"):
        for line in Path(f"/proc/{pid}/net/{table}").read_text().splitlines()[1:]:
            fields = line.split()
            if fields[3] == "0A" and f"socket:[{fields[9]}]" in sockets:
                found.add(int(fields[1].rpartition(":")[2], 16))
    return found


def test_all_ports_are_known_and_no_secret_is_told(
    server_process: StartServer, tmp_path: Path
) -> None:
    """Each port that is listened on is one whose methods or pages are asked without credentials above and beside."""
    chain, key = files_of(make_certificate(tmp_path), tmp_path, "server")
    options = ("--tls-cert", str(chain), "--tls-key", str(key), "--log-format", "json")
    guarded = Guarded(server_process, tmp_path, *options, "--http", "127.0.0.1:0")
    server, http = guarded.server, http_of(guarded.server)
    assert ports_of(server.pid) == {int(at.rpartition(":")[2]) for at in (server.target, http)}
    # The admin socket asks for nothing: only the owner of the directory may connect.
    assert (server.data / ADMIN_SOCKET).stat().st_mode & 0o077 == 0
    told = []
    for token in (guarded.owner, "upr_made-up"):
        with Client(server.target, tls=chain, token=token) as client:
            for call in (
                lambda: client.bucket().set(b"some key", b"some value"),
                lambda: client.bucket("none").get(b"some key"),
                lambda: client.bucket().set(b"x" * 5000, b"some value"),
            ):
                try:
                    call()
                except UprError as error:
                    told.append(f"{error} {error.hint} {error!r}")
        paths = ("/api/status", "/api/bucket?bucket=none", "/metrics", f"/{token}", "/page.js", "/")
        told += [str(ask_page(http, path, shown=f"Bearer {token}")) for path in paths[:3]]
        told += [ask_page(http, path).body for path in paths[3:]]
    assert len(told) >= 14
    command = Path(f"/proc/{server.pid}/cmdline").read_text()
    everything = "\n".join([*told, server.log_text(), command])
    (secret_line,) = key.read_text().splitlines()[1:2]
    for secret in (guarded.owner, "made-up", secret_line, "some key", "some value"):
        assert secret not in everything


@pytest.mark.long
def test_a_broken_file_changes_nothing_and_is_told_once(guarded: Guarded) -> None:
    text = guarded.file.read_text()
    log = guarded.server.log_text
    with Client(guarded.target, token=guarded.owner) as client:
        assert client.admin.status().problems == ()
        some = guarded.add("some", {"read": {"default"}})
        text = guarded.file.read_text()
        wait_until(lambda: guarded.taken() == 1, log)
        for broken in (
            "[" * 100_000,
            '{"name": "half',
            text + '{"name": "x", "token": "upr_secret"}\n',
        ):
            guarded.file.write_text(broken)
            wait_until(lambda: client.admin.status().problems, log)
        wait_until(lambda: client.admin.status().problems[0].reason == "IDENTITIES", log)
        (problem,) = client.admin.status().problems
        assert "upr_secret" not in str(problem)
        # It is about files and identities that are not those of every reader.
        with Client(guarded.target, token=some) as reader:
            assert reader.admin.status().problems == ()
        guarded.file.write_text(text)
        wait_until(lambda: not client.admin.status().problems, log)
        assert log().count("a changed file cannot be used") == 1
        assert "upr_secret" not in log()
        # A file that is emptied is an accident, however long it lasts; one whose last identity is revoked is none.
        guarded.file.write_text("")
        wait_until(lambda: client.admin.status().problems, log)
        assert "no identity" in client.admin.status().problems[0].message
        guarded.file.write_text(text)
        wait_until(lambda: not client.admin.status().problems, log)
        guarded.changed(lambda: revoke_identity(guarded.file, "some"))
        guarded.changed(lambda: revoke_identity(guarded.file, "root"))
        with pytest.raises(UnauthenticatedError):
            client.admin.status()


def files_of(certificate: Certificate, folder: Path, name: str) -> tuple[Path, Path]:
    """Put a certificate and its key into files."""
    chain, key = folder / f"{name}.pem", folder / f"{name}.key"
    chain.write_bytes(certificate.chain)
    key.write_bytes(certificate.key)
    return chain, key


@contextlib.asynccontextmanager
async def load(target: str, **options: Any) -> AsyncIterator[list[int]]:
    """Write without a pause, one client that stays and new ones; each write must be acknowledged."""
    counts = [0, 0]
    stop = asyncio.Event()

    async def staying() -> None:
        async with AsyncClient(target, **options) as client:
            bucket = client.bucket()
            while not stop.is_set():
                await bucket.set(b"staying %d" % (counts[0] % 1000), b"v")
                counts[0] += 1

    async def coming() -> None:
        while not stop.is_set():
            async with AsyncClient(target, **options) as client:
                await client.bucket().set(b"new %d" % (counts[1] % 1000), b"v")
                counts[1] += 1

    tasks = [asyncio.create_task(staying()), asyncio.create_task(coming())]
    try:
        yield counts
    finally:
        stop.set()
        await asyncio.gather(*tasks)


@pytest.mark.asyncio
async def test_certificates_and_tokens_change_under_load(
    server_process: StartServer, tmp_path: Path
) -> None:
    first = make_certificate(tmp_path, "first")
    second = make_certificate(tmp_path, "second")
    chain, key = files_of(first, tmp_path, "server")
    guarded = Guarded(server_process, tmp_path, "--tls-cert", str(chain), "--tls-key", str(key))
    trusted, shown = tmp_path / "trusted.pem", tmp_path / "token"
    trusted.write_bytes(first.chain + second.chain)
    shown.write_text(guarded.owner + "\n")
    host, _, port = guarded.target.rpartition(":")

    def presented() -> bytes:
        return ssl.get_server_certificate((host, int(port))).encode()

    async def more(counts: list[int]) -> None:
        before = list(counts)
        await until(lambda: all(c > b for c, b in zip(counts, before, strict=True)))

    async with load(guarded.target, tls=trusted, token=shown) as counts:
        await more(counts)
        assert await asyncio.to_thread(presented) == first.chain
        # The certificate alone does not go with the key.
        chain.write_bytes(second.chain)
        await until(lambda: "cannot be used" in guarded.server.log_text())
        await more(counts)
        assert await asyncio.to_thread(presented) == first.chain
        async with AsyncClient(guarded.target, tls=trusted, token=shown) as client:
            (problem,) = (await client.admin.status()).problems
            assert "certificate" in problem.message
            key.write_bytes(second.key)
            await poll(lambda: asyncio.to_thread(presented), lambda found: found == second.chain)
            await poll(client.admin.status, lambda found: not found.problems)
        await more(counts)
        # A new token beside the old one, then without that.
        roles: Roles = dict.fromkeys(("read", "write", "admin"))
        token = await asyncio.to_thread(guarded.changed, lambda: guarded.add("next", roles))
        shown.write_text(token)
        await more(counts)
        await asyncio.to_thread(guarded.changed, lambda: revoke_identity(guarded.file, "root"))
        await more(counts)
    with (
        Client(guarded.target, tls=trusted, token=guarded.owner) as revoked,
        pytest.raises(UnauthenticatedError),
    ):
        revoked.bucket().set(b"k", b"v")
    assert guarded.server.log_text().count("a changed file cannot be used") == 1


def test_a_client_certificate_is_an_identity(server_process: StartServer, tmp_path: Path) -> None:
    server, known = make_certificate(tmp_path, "server"), make_certificate(tmp_path, "indexer")
    other = make_certificate(tmp_path, "somebody")
    expired = Certificate(other.key, sign_anew(tmp_path, "20250101000000Z", "20260101000000Z"))
    chain, key = files_of(server, tmp_path, "server")
    authority = tmp_path / "clients.pem"
    authority.write_bytes(known.chain + other.chain + expired.chain)
    guarded = Guarded(
        server_process,
        tmp_path,
        *("--tls-cert", str(chain), "--tls-key", str(key), "--tls-client-ca", str(authority)),
    )
    guarded.changed(lambda: guarded.add("indexer of orders", {"read": {"default"}}, "indexer"))

    def client(shown: Certificate | None, token: str | None = None) -> Client:
        own = (None, None) if shown is None else (shown.key, shown.chain)
        tls = grpc.ssl_channel_credentials(server.chain, *own)
        return Client(guarded.target, tls=tls, token=token, request_timeout=5)

    with client(known) as one:
        assert one.bucket().get(b"k") is None
        with pytest.raises(PermissionDeniedError, match="indexer of orders"):
            one.bucket().set(b"k", b"v")
    with client(other) as one, pytest.raises(UnauthenticatedError):
        one.bucket().get(b"k")
    # A token says more than the certificate.
    with client(other, guarded.owner) as one:
        one.bucket().set(b"k", b"v")
    for shown in (None, expired):
        with client(shown, guarded.owner) as one, pytest.raises(UnavailableError) as failed:
            one.bucket().get(b"k")
        assert "(--tls-cert) that it trusts and that has not expired" in failed.value.hint


def test_without_identities_only_the_owner_destroys(
    server_process: StartServer, tmp_path: Path
) -> None:
    server = server_process(environment=CLOSED)
    with Client(server.target) as client:
        client.admin.create_bucket("b")
        client.bucket().set(b"k", b"v")
        refused: list[Callable[[], Any]] = [
            lambda: client.admin.drop_bucket("b"),
            lambda: client.admin.forget_consumer("default", "nobody"),
            lambda: client.admin.reset_consumer("default", "nobody", "now", create=True),
            lambda: client.admin.reset_consumer("default", "upr-backup-1", "now", create=True),
            lambda: client.admin.reset_consumer("default", "upr-backup-1", datetime.now(UTC)),
            lambda: client.admin.promote(force=True),
        ]
        for action in refused:
            with pytest.raises(PermissionDeniedError, match=r"--data|--open-admin"):
                action()
        # It has purging wait for the next backup.
        client.admin.reset_consumer("default", "upr-backup-1", datetime.now(UTC), create=True)

    async def make_it_step_down() -> None:
        async with grpc.aio.insecure_channel(server.target) as channel:
            for method in POOL.FindServiceByName("upr.v1.ReplicaService").methods:
                if method.name in ("Meet", "Promise"):
                    error = await ask(channel, method, request_of(method, {}), "")
                    assert isinstance(error, PermissionDeniedError), method.name

    asyncio.run(make_it_step_down())
    # Only following is left.
    replica = server_process("--replicate-from", server.target, environment=CLOSED)
    wait_until(lambda: "no server of the set is met" in server.log_text(), server.log_text)
    with Client(replica.target) as client:

        def has_it() -> bool:
            with contextlib.suppress(UprError):
                return client.bucket().get(b"k", read_from="any") == b"v"
            return False

        wait_until(has_it, replica.log_text)
    assert "a call is refused" not in replica.log_text()
    replica.kill()
    socket = server.data / "admin.sock"
    assert socket.stat().st_mode & 0o777 == 0o700
    admin = [sys.executable, "-m", "upr.cli", "admin"]
    done = subprocess.run(
        [*admin, "bucket", "drop", "b", "--yes", "--data", str(server.data)],
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout.startswith("dropped: b, ")
    # A killed server leaves the socket, which the next one replaces.
    server.kill()
    assert socket.exists()
    server.start()
    with Client(f"unix:{socket}") as client:
        client.admin.drop_bucket("default")
    assert server.terminate() == 0
    assert not socket.exists()


@pytest.mark.long
def test_a_replica_follows_over_tls_with_a_token(
    server_process: StartServer, tmp_path: Path
) -> None:
    certificate = make_certificate(tmp_path)
    chain, key = files_of(certificate, tmp_path, "server")
    tls = ["--tls-cert", str(chain), "--tls-key", str(key)]
    links = ["--peer-ca", str(chain), "--peer-token-file", str(tmp_path / "peer")]
    (tmp_path / "peer").write_text("not-yet")
    guarded = Guarded(server_process, tmp_path, *tls, *links)
    both = ["--tokens", str(guarded.file), *tls, *links]
    replica = server_process("--replicate-from", guarded.target, *both, environment=CLOSED)
    options: dict[str, Any] = {"tls": chain, "token": guarded.owner}

    def in_step(other: Client) -> bool:
        found = other.admin.status().buckets
        return bool(found) and all(b.upstream and b.upstream.in_step for b in found)

    def counted(client: Client) -> None:
        wait_until(
            lambda: any(m.counted for m in client.admin.topology().members if not m.active),
            guarded.server.log_text,
        )

    with (
        Client(guarded.target, **options) as client,
        Client(replica.target, **options) as other,
    ):
        wait_until(
            lambda: "takes a token" in replica.log_text() or "unknown" in replica.log_text(),
            replica.log_text,
        )
        client.bucket().set(b"k", b"v")
        token = guarded.changed(lambda: guarded.add("set", {"replicate": None}))
        (tmp_path / "peer").write_text(token)

        wait_until(lambda: in_step(other), replica.log_text)
        wait_until(lambda: other.bucket().get(b"k", read_from="any") == b"v", replica.log_text)
        counted(client)
    # They meet both ways: a takeover takes the calls of each to the other, here with the certificates of now.
    new = make_certificate(tmp_path, "second")
    files_of(new, tmp_path, "server")
    for server in (guarded.server, replica):
        wait_until(lambda server=server: "TLS certificate" in server.log_text(), server.log_text)  # type: ignore[misc]
    assert guarded.server.terminate() == 0
    guarded.server.start()
    with (
        Client(guarded.target, **options) as client,
        Client(replica.target, **options) as other,
    ):
        wait_until(lambda: client.admin.topology().active, guarded.server.log_text)
        counted(client)
        wait_until(lambda: in_step(other), replica.log_text)
        wait_until(lambda: all(m.reached for m in other.admin.topology().members), replica.log_text)
        assert other.admin.promote(takeover=True).epoch
        (bucket,) = other.admin.buckets()
        wait_until(
            lambda: any(m.active for m in client.admin.topology().members), guarded.server.log_text
        )
    # What a server says of others is no reason to send them a token.
    file, shown = tmp_path / "undone.jsonl", tmp_path / "shown"
    row = {"partition": partition_of(b"u"), "seqno": 9, "key": "dQ==", "op": "set", "value": "dg=="}
    head = {"bucket": bucket.name, "version": f"{bucket.version:x}", "time": 1, "markers": {}}
    file.write_text(f"{json.dumps(head)}\n{json.dumps(row)}\n")
    shown.write_text(guarded.owner)
    for target, status in ((guarded.target, 4), (f"{guarded.target},{replica.target}", 0)):
        command = ["undone", "apply", str(file), "--if-unchanged", "--target", target]
        command += ["--tls-ca", str(chain), "--token-file", str(shown)]
        done = CliRunner().invoke(admin.main, command)
        assert done.exit_code == status, done.output
        assert (f"give --target {replica.target}" in done.output) == bool(status)
    for log in (guarded.server.log_text(), replica.log_text()):
        assert token not in log
        assert guarded.owner not in log
