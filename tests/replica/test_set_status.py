"""What operators are told of a part in a set, by a time that the test sets."""

import asyncio
import contextlib
import logging
from types import SimpleNamespace
from typing import Any

import pytest
from click.testing import CliRunner

from tests.harness import until
from tests.replica.members import Start, never, write
from upr.cli import admin as commands
from upr.cli.admin_commands import topology
from upr.replica.inventory import Inventory
from upr.replica.set_status import COPIES, COUNTED, PATIENCE_SECONDS, UNFIT, SetStatus
from upr.replica.upstream_stream import UpstreamStream
from upr.service.admin import replicas_of
from upr_client.admin import Promotion
from upr_protocol.errors import (
    NoRoomError,
    StorageFailedError,
    TooFewReplicasError,
    UprError,
)
from upr_protocol.ownership import Row, Standing

A, B, C = "a" * 16, "b" * 16, "c" * 16
SHORT = TooFewReplicasError("too few")


class Part:
    """A server of a cluster, as far as it is looked at; it owns, counts itself, and has a bucket that lacks replicas."""

    def __init__(self, caplog: pytest.LogCaptureFixture) -> None:
        self._caplog = caplog
        caplog.set_level(logging.INFO)
        self.short: TooFewReplicasError | None = SHORT
        copies = SimpleNamespace(shortage=lambda count: self.short if count == 2 else None)
        host = SimpleNamespace(bucket=SimpleNamespace(copies=copies))
        catalog: Any = SimpleNamespace(hosts=[host], may_serve=lambda: True)
        cluster: Any = SimpleNamespace(
            trouble=None, bucket_trouble=None, name="prod", silent_seconds=0.0
        )
        fencing = SimpleNamespace(trouble="", serving_seconds=1.0)
        ownership: Any = SimpleNamespace(
            active=True,
            claiming=False,
            following=SimpleNamespace(problem=None),
            fencing=fencing,
            inventory=SimpleNamespace(upstream_states={}, unfit=None),
        )
        self.ownership = ownership
        self.knows(A, A)
        self.set_status = SetStatus(ownership, catalog, cluster, 2)

    def knows(self, owner: str, *counted: str) -> None:
        self.ownership.standing = Standing(A, Row(4, 2, owner, bool(owner), frozenset(counted)))

    def look(self, now: float) -> list[tuple[str, str]]:
        """Look at a time, and return what was logged."""
        self._caplog.clear()
        self.set_status._look(now)
        return [(one.message, one.trouble) for one in self._caplog.records]  # type: ignore[attr-defined]

    @property
    def wrong(self) -> set[str]:
        return {what for what, error in self.set_status.troubles.items() if error is not None}


def test_what_lasts_is_said_once_and_so_is_its_end(caplog: pytest.LogCaptureFixture) -> None:
    part = Part(caplog)
    assert part.look(10.0) == []
    assert part.wrong == set()
    # What is over before then is no trouble.
    part.knows(A, A, B)
    assert part.look(11.0) == []
    part.knows(A, A)
    assert part.look(12.0) == []
    assert part.look(10.0 + PATIENCE_SECONDS) == [("set trouble", COPIES)]
    assert part.look(12.0 + PATIENCE_SECONDS) == [("set trouble", COUNTED)]
    assert part.look(90.0) == []
    assert part.wrong == {COPIES, COUNTED}
    assert part.set_status.troubles[COPIES] is SHORT
    part.short = None
    assert part.look(91.0) == [("set trouble is over", COPIES)]
    # An owner no more: it is no trouble of this server.
    part.ownership.active = False
    assert part.look(92.0) == [("set trouble is over", COUNTED)]
    assert part.look(99.0) == []
    assert part.wrong == set()


def test_a_replica_that_follows_and_could_not_serve_says_why_it_is_not_in_step(
    caplog: pytest.LogCaptureFixture,
) -> None:
    part = Part(caplog)
    part.short = None
    part.ownership.inventory.unfit = NoRoomError("the disk of this server has no room for writes")
    # The owner goes on, and a server that knows of none is in no set yet.
    for owner in (A, ""):
        part.knows(owner, B)
        part.ownership.active = owner == A
        assert part.look(0.0) == part.look(PATIENCE_SECONDS) == []
    part.knows(B, A)
    assert part.look(20.0) == []
    assert part.look(20.0 + PATIENCE_SECONDS) == [("set trouble", UNFIT)]
    assert str(part.set_status.troubles[UNFIT]) == (
        "this replica is not in step, because it could not be the active server: the disk of this server has no"
        " room for writes (free some space, mend the disk, or see to the dead partition)"
    )
    part.ownership.inventory.unfit = None
    assert part.look(40.0) == [("set trouble is over", UNFIT)]
    assert part.wrong == set()


def test_changes_of_owner_are_counted_and_the_first_is_none(
    caplog: pytest.LogCaptureFixture,
) -> None:
    part = Part(caplog)
    part.set_status._owner = ""
    seen = []

    async def told() -> tuple[int, str]:
        one = part.set_status.part
        return one.owner_changes, one.state

    for owner in (A, A, B, C, C):
        part.knows(owner, B)
        part.ownership.active = owner == A
        part.look(0.0)
        seen.append(asyncio.run(told()))
    assert seen == [(0, "owner")] * 2 + [(1, "waiting"), (2, "waiting"), (2, "waiting")]


def test_what_a_forced_promotion_gives_up_is_told_for_each_partition(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    lost = (("default", 3, 20, 50), ("orders", 7, 0, 50))
    done = Promotion(4, 2, ("10.0.0.2:7711",), lost, ("orders",))

    def promote(*, force: bool, takeover: bool, seconds: float) -> Promotion:
        assert force
        return done

    client = SimpleNamespace(admin=SimpleNamespace(promote=promote))
    monkeypatch.setattr(topology, "open_client", lambda _: contextlib.nullcontext(client))
    result = CliRunner().invoke(
        commands.main, ["promote", "--force", "--yes", "--target", "10.0.0.1:7711"]
    )
    assert result.stderr.splitlines() == [
        "2 partitions got a failover record",
        "warning: without 10.0.0.2:7711: what only it has is undone when it comes back",
        "warning: bucket orders: the newest positions of consumers, cuts and numbers of producers may be lost;"
        " a write that is sent again may be applied twice",
        "warning: bucket default, partition 3: 30 mutations above 20 may be lost",
        "warning: bucket orders, partition 7: mutations up to 50 may be lost",
    ]


@pytest.mark.parametrize(
    ("targets", "token", "is_sent"),
    [
        ("10.0.0.1:1", True, False),
        ("10.0.0.1:1,10.0.0.2:2", True, True),
        ("10.0.0.1:1", False, True),
    ],
)
def test_a_drain_shows_its_token_to_no_server_that_the_target_does_not_name(
    monkeypatch: pytest.MonkeyPatch, targets: str, token: bool, is_sent: bool
) -> None:
    asked = list[str]()

    def opened(target: str) -> Any:
        asked.append(target)
        admin = SimpleNamespace(drain=lambda **_: "10.0.0.2:2", promote=lambda **_: None)
        return contextlib.nullcontext(SimpleNamespace(admin=admin))

    monkeypatch.setattr(topology, "open_client", opened)
    if token:
        monkeypatch.setenv("UPR_TOKEN", "upr_" + "a" * 43)
    result = CliRunner().invoke(commands.main, ["drain", "--target", targets])
    assert asked == [targets, "10.0.0.2:2"][: 1 + is_sent], result.output
    if is_sent:
        assert result.stdout == "drained: 10.0.0.1:1, 10.0.0.2:2 is active\n"
    else:
        assert "credentials go nowhere else" in result.stderr
        assert "--target 10.0.0.1:1,10.0.0.2:2" in result.stderr


def test_a_drain_whose_takeover_fails_says_what_ends_that_first(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def promote(**_: object) -> None:
        raise UprError("one that died is counted", reason="NOT_HEARD", hint="promote --force")

    admin = SimpleNamespace(drain=lambda **_: "10.0.0.2:2", promote=promote)
    client = contextlib.nullcontext(SimpleNamespace(admin=admin))
    monkeypatch.setattr(topology, "open_client", lambda _: client)
    result = CliRunner().invoke(commands.main, ["drain", "--target", "10.0.0.1:1"])
    assert result.exit_code != 0
    words = "is counted (10.0.0.1:1 is drained: say it again in some seconds, or --undo; promote"
    assert words in result.stderr


@pytest.mark.parametrize(("seconds", "key"), [(2.0, "yes"), (11.0, "-")])
def test_what_etcd_said_long_ago_is_not_told_as_of_now(seconds: float, key: str) -> None:
    member: Any = SimpleNamespace(
        address="a", directory=A, state="away", counted=True, in_step=False, epoch=0, lag=0,
        reached=False, grant_seconds=0.0, has_key=True,
    )  # fmt: skip
    found: Any = SimpleNamespace(active=True, part=SimpleNamespace(etcd_seconds=seconds))
    assert topology._row(member, found, True)[-1] == key


@pytest.mark.asyncio
async def test_a_replica_that_has_acknowledged_nothing_is_everything_behind(
    start: Start, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(UpstreamStream, "_acknowledge", never)
    owner = await start()
    for number in range(1, 4):
        await write(owner, number)
    await start(owner)
    await until(lambda: bool(replicas_of(owner.host.bucket)))
    assert [one.lag for one in replicas_of(owner.host.bucket)] == [3]


@pytest.mark.asyncio
async def test_what_a_set_does_goes_on_after_a_moment_without_memory(
    start: Start, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("upr.service.buckets.keepers.AGAIN_SECONDS", 0.0)
    monkeypatch.setattr("upr.replica.set_status.LOOK_SECONDS", 0.01)
    looks = list[object]()

    def look(*now: object) -> None:
        looks.append(now)
        if len(looks) == 1:
            raise MemoryError

    monkeypatch.setattr(SetStatus, "_look", look)
    replicating = (await start()).server._replicating
    assert replicating is not None
    await until(lambda: replicating.done() or len(looks) > 1)
    assert not replicating.done()


def test_what_hangs_is_a_write_that_neither_ends_nor_fails() -> None:
    tail = SimpleNamespace(durable=3, taken=4, range=lambda *_: [SimpleNamespace(data=b"row")])
    bucket = SimpleNamespace(stalled=False, failure=None, hangs=None, tail=tail)
    bucket.identity = SimpleNamespace(version=7)
    catalog: Any = SimpleNamespace(hosts=[SimpleNamespace(bucket=bucket)])
    inventory = Inventory(catalog)
    # A process that stood still was not waiting for its disk.
    for now in (100.0, 100.5, 200.0):
        inventory.look(now)
    assert inventory.hangs is None
    for step in range(20):
        inventory.look(200.5 + step / 2)
    assert inventory.hangs is not None
    assert "a write to the disk of this server has not ended for" in str(inventory.hangs)
    # Whoever asks is told why it failed.
    bucket.failure = StorageFailedError("a failed fsync")
    inventory.look(211.0)
    assert inventory.hangs is None
    bucket.failure, tail.durable, tail.taken = None, 4, 5
    inventory.look(211.5)
    assert inventory.hangs is None
