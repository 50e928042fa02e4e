"""What operators order in a cluster, with real servers and a real etcd: it holds, whoever owns next."""

import contextlib
import shutil
from collections.abc import Callable
from contextlib import closing
from pathlib import Path
from typing import TypeVar

import pytest

from tests.client.certificates import make_certificate
from tests.cluster.clusters import drained, go_on, owner_of, start_cluster, stop
from tests.conftest import StartServer
from tests.etcd import running_etcd
from tests.harness import RunningServer
from tests.replica.sets import is_active, run, wait_for, wait_until_counted
from upr.storage.directory import DataDirectory
from upr_client import Client, UprError
from upr_protocol.errors import PartitionNotActiveError

T = TypeVar("T")

pytestmark = [pytest.mark.crash, pytest.mark.etcd, pytest.mark.long]


def versions(server: RunningServer) -> dict[str, int]:
    with Client(server.target) as client:
        return {one.name: one.version for one in client.admin.buckets()}


def ran(*arguments: str) -> str:
    done = run(*arguments)
    assert done.exit_code == 0, done.output
    return str(done.output)


def done(call: Callable[[], T]) -> T:
    """Make a call of the active server; again where it is refused, as on a busy machine the owner may be about to change."""
    found: list[T] = []

    def is_done() -> bool:
        with contextlib.suppress(PartitionNotActiveError):
            found.append(call())
        return bool(found)

    wait_for(is_done, "an active server")
    return found[0]


def test_buckets_outlive_their_owner_and_stay_dropped(
    server_process: StartServer, tmp_path: Path
) -> None:
    with running_etcd(tmp_path / "etcd") as etcd:
        servers = start_cluster(server_process, etcd)
        first, *others = servers
        with Client([server.target for server in servers]) as client:
            old = client.admin.create_bucket("orders").version
            client.admin.create_bucket("left")
            client.admin.drop_bucket("left")
            # Nobody else may have heard of either.
            first.kill()
            second = owner_of(others)
            assert versions(second).keys() == {"default", "orders"}
            assert versions(second)["orders"] == old
            assert client.bucket("orders").set(b"a", b"1")
            assert done(lambda: client.admin.drop_bucket("orders")) == old
            new = done(lambda: client.admin.create_bucket("orders")).version
            first.start()
            wait_for(lambda: versions(first).get("orders") == new, "the new bucket")
            assert versions(first) == versions(second)
            # On a busy machine it may be another one by now.
            second = owner_of(servers)
            wait_until_counted(servers, second)
            told = drained(second)
            third = owner_of([server for server in servers if server is not second])
            assert told == {"drained": True, "successor": third.target}
            assert "drained" in ran("drain", "--target", second.target)
            shown = ran("topology", "--target", second.target).splitlines()
            assert any(second.target in line and " drained " in line for line in shown)
            with Client(second.target) as one, pytest.raises(UprError, match="drained") as caught:
                one.admin.promote(takeover=True)
            assert caught.value.reason == "DRAINED"
            assert f"undrained: {second.target}" in ran(
                "drain", "--undo", "--target", second.target
            )
            wait_until_counted(servers, third)
            etcd.kill()
            with pytest.raises(UprError, match="nothing was changed"):
                client.admin.create_bucket("some")
            assert client.bucket("orders").set(b"b", b"2")


def test_the_files_that_etcd_is_shown_are_exchanged_while_a_server_runs(
    server_process: StartServer, tmp_path: Path
) -> None:
    tls = tmp_path / "tls"
    tls.mkdir()
    make_certificate(tls)
    chain, key = tls / "chain.pem", tls / "key.pem"
    with running_etcd(tmp_path / "etcd", tls=tls) as etcd:
        files = ("--cluster-ca", str(chain), "--tls-cert", str(chain), "--tls-key", str(key))
        server = server_process("--cluster", etcd.cluster, *files)

        def ordered(name: str) -> bool:
            with contextlib.suppress(UprError), Client(server.target, tls=chain) as client:
                client.admin.promote()
                client.admin.create_bucket(name)
                return True
            return False

        wait_for(lambda: ordered("before"), "a bucket")
        make_certificate(tls)
        etcd.kill()
        etcd.start()
        wait_for(lambda: ordered("after"), "another bucket, behind the exchange")


def test_a_clone_of_an_owner_that_is_alone_gives_way_to_it(
    server_process: StartServer, tmp_path: Path
) -> None:
    with running_etcd(tmp_path / "etcd") as etcd:
        owner = server_process("--cluster", etcd.cluster)
        ran("promote", "--target", owner.target)
        wait_for(lambda: is_active(owner) and bool(versions(owner)), "it to serve")
        stop(owner)
        copy = shutil.copytree(
            owner.data, tmp_path / "clone", ignore=shutil.ignore_patterns("admin.sock", "lock")
        )
        go_on(owner)
        with closing(DataDirectory(copy)) as directory:
            # As of a whole disk.
            directory.check_place(may_be_moved=True)
        clone = server_process("--cluster", etcd.cluster, "--data", str(copy))
        words = "one answers at"
        wait_for(lambda: words in ran("topology", "--target", clone.target), "it to be told")
        wait_for(lambda: not is_active(clone), "it to step down")
        assert is_active(owner)


def test_a_cluster_without_a_bucket_changes_its_owner(
    server_process: StartServer, tmp_path: Path
) -> None:
    with running_etcd(tmp_path / "etcd") as etcd:
        servers = start_cluster(server_process, etcd, 2)
        first, second = servers
        with Client([server.target for server in servers]) as client:
            client.admin.drop_bucket("default")
            wait_for(lambda: not versions(second), "no bucket")
            told = drained(first)
            assert told == {"drained": True, "successor": second.target}
            assert "may become active" in ran("drain", "--undo", "--target", first.target)
            wait_until_counted(servers, second)
            second.kill()
            owner_of([first])
            client.admin.create_bucket("some")
            assert client.bucket("some").set(b"a", b"1")
