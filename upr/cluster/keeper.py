"""Keeper: takes a server's part in its cluster, so that the set has an owner without an operator.

It keeps the server's key in etcd, reads the map whenever that changes, and claims the ownership when two witnesses say that
the owner is gone: its key in etcd, and this server, which it has asked for no grant. What happens then is a promotion like
any other (``upr.replica.ownership``). While etcd is away nothing changes, and whoever owns goes on.
"""

import asyncio
import functools
import logging
import secrets
from collections.abc import Callable, Coroutine
from typing import Any

import lmdb

from upr import __version__
from upr.cluster.etcd import Etcd
from upr.cluster.map import Buckets, MapRows
from upr.cluster.registry import Found, Map, Place, Registry, decode_node, encode_node
from upr.config import ServerConfig
from upr.replica.fencing import ClaimedTooError, old_map
from upr.replica.ownership import RESUME_SECONDS, Ownership
from upr.replica.replica_service import ReplicaMethods
from upr.service.buckets.catalog import DEFAULT_BUCKET, Catalog
from upr.service.buckets.keepers import lasting
from upr_protocol.errors import (
    InvalidArgumentError,
    StorageFailedError,
    UnavailableError,
    UnknownOutcomeError,
    UprError,
    shown,
)
from upr_protocol.limits import ETCD_STALE_SECONDS
from upr_protocol.ownership import GRANT_SECONDS, Row, first_row
from upr_protocol.wire.v1.replica_service_pb2 import SetMember

log = logging.getLogger(__name__)

LEASE_SECONDS = 5
"""Time after which the key of a server is gone that is not heard any more."""
LOOK_SECONDS = 0.25
"""Interval at which a server looks whether it is to do something."""
MATCH_SECONDS = 1.0
"""Shortest time between two attempts to have the buckets that the map has."""
TURN_SECONDS = 1.0
"""Time that each further counted server waits before it claims."""
VAIN_SECONDS = 10.0
"""Time after which others claim where nobody served: who claimed cannot end it."""
_AWAY_HINT = "who is active goes on; until etcd answers nobody else becomes that, and nobody is counted or taken out"


class Keeper:
    """Part of one server in its cluster."""

    def __init__(
        self, catalog: Catalog, registry: Registry, place: Place, address: Callable[[], str]
    ) -> None:
        self.rows = MapRows(registry, place, lambda: catalog.replica_set)
        self.buckets = Buckets(self.rows, catalog)
        self._catalog = catalog
        self._registry = registry
        self._place = place
        self.name = place.name
        self._address = address
        self._found: Found | None = None
        self._map: Map | None = None
        self._read_at = 0.0
        # When the newest reading was begun, and when the key of this server was set in this session.
        self._asked_at = self._set_at = 0.0
        self._tried_at = self._matched_at = -RESUME_SECONDS
        self._claimed: Row | None = None
        # The last time at which not both witnesses said that the owner is gone, and at which somebody was to serve.
        self._gone_at = self._served_at = 0.0
        # Who is in the row, with its first epoch there.
        self._first: tuple[str, int] = ("", 0)
        self._told: dict[str, Exception | None] = {}
        # A server that is the first of its set, or was killed while it became that.
        self._is_first = not catalog.hosts and not catalog.damaged

    @property
    def silent_seconds(self) -> float:
        """Time since etcd answered last, or since this server began to ask it."""
        return asyncio.get_running_loop().time() - self._read_at if self._read_at else 0.0

    def has_key(self, directory: str) -> bool:
        return self._found is not None and directory in self._nodes()

    async def run(self, ownership: Ownership) -> None:
        self._read_at = self._served_at = asyncio.get_running_loop().time()
        try:
            async with asyncio.TaskGroup() as tasks:
                tasks.create_task(lasting(lambda: self._keep_key(ownership)))
                tasks.create_task(lasting(self._watch))
                tasks.create_task(lasting(lambda: self._decide(ownership)))
        finally:
            await self._registry.close()

    def _tell(self, what: str, error: Exception | None = None) -> None:
        """Say in the log once that something fails, and once that it does no more."""
        before, self._told[what] = self._told.get(what), error
        if error is not None and before is None:
            log.warning("part of the cluster fails", extra={"part": what, "error": str(error)})
        elif error is None and before is not None:
            log.info("part of the cluster goes on", extra={"part": what})

    # etcd

    async def _keep_key(self, ownership: Ownership) -> None:
        """Keep the key that says that this server is there."""
        key = self._place.nodes + self._catalog.directory_id.encode()
        goes_on = functools.partial(self._tell, "the session with etcd")

        def began() -> None:
            self._set_at = asyncio.get_running_loop().time()
            goes_on()

        while True:
            try:
                if not self._gave_up(ownership):
                    found, known = await self.rows.found()
                    if known is not None:
                        # Those of that set would tell clients of this server.
                        self.rows.check_set(known)
                    there = found.entries.get(key)
                    await ownership.peers.check_alone(decode_node(there.value) if there else "")
                    self._set_at = 0.0
                    value = encode_node(self._address(), __version__)
                    session = self._registry.session(key, value, LEASE_SECONDS, began)
                    await self._until_given_up(session, ownership)
            except UprError as error:
                goes_on(error)
            else:
                # Also where none is to be had: another server is to claim.
                goes_on()
            await asyncio.sleep(LOOK_SECONDS)

    async def _until_given_up(
        self, session: Coroutine[Any, Any, None], ownership: Ownership
    ) -> None:
        task = asyncio.create_task(session)
        try:
            while not (task.done() or self._gave_up(ownership)):
                if self._key_is_gone:
                    log.warning("the key of this server was deleted in etcd: it is set again")
                    return
                await asyncio.wait({task}, timeout=LOOK_SECONDS)
            if task.done():
                task.result()
        finally:
            task.cancel()

    @property
    def _key_is_gone(self) -> bool:
        """Return whether somebody deleted the key that was set: its lease, which the session looks at, lives on."""
        is_known = self._set_at and self._asked_at > self._set_at
        return bool(is_known) and not self.has_key(self._catalog.directory_id)

    def _gave_up(self, ownership: Ownership) -> bool:
        """Return whether the map names this server, and another one is to claim: to them it is as if it were dead."""
        owner = "" if self._map is None else self._map.row.owner
        inventory = ownership.inventory
        failed = inventory.failure is not None or inventory.cannot_serve
        return failed and not ownership.active and owner == ownership.standing.directory

    async def _watch(self) -> None:
        """Read all that is kept of the cluster whenever it changes."""
        while True:
            try:
                asked = asyncio.get_running_loop().time()
                self._found, self._map = await self.rows.found()
                self._asked_at, self._read_at = asked, asyncio.get_running_loop().time()
                self._tell("reading from etcd")
                await self._registry.changed(self._place.prefix, self._found.revision)
            except UprError as error:
                self._tell("reading from etcd", error)
                await asyncio.sleep(LOOK_SECONDS)

    @property
    def trouble(self) -> UprError | None:
        found = next(filter(None, self._told.values()), None)
        if found is None or (isinstance(found, UprError) and found.hint):
            return found
        hint = _AWAY_HINT if isinstance(found, UnavailableError | UnknownOutcomeError) else ""
        return UprError(str(found), reason="CLUSTER_FAILS", hint=hint, retriable=True)

    @property
    def bucket_trouble(self) -> UprError | None:
        return self.buckets.trouble

    # Deciding

    async def _decide(self, ownership: Ownership) -> None:
        while True:
            try:
                await self._look(ownership)
            except ClaimedTooError:
                log.info("another server claimed first")
            except (UprError, OSError, lmdb.Error) as error:
                self._tell("taking part in the cluster", error)
            else:
                # What ended a claim goes on until the next one.
                if ownership.active or not self._has_just_tried:
                    self._tell("taking part in the cluster")
            await asyncio.sleep(LOOK_SECONDS)

    @property
    def _has_just_tried(self) -> bool:
        return asyncio.get_running_loop().time() - self._tried_at < RESUME_SECONDS

    async def _look(self, ownership: Ownership) -> None:
        now = asyncio.get_running_loop().time()
        if self._found is None or now - self._read_at > ETCD_STALE_SECONDS or ownership.claiming:
            return
        # What is awaited lets in a reading in which the map may be gone.
        known = self._map
        if known is None:
            await self._begin(ownership)
            return
        self.rows.check_set(known)
        row = known.row
        ownership.peers.heard_of(
            SetMember(directory=directory, address=address)
            for directory, address in self._nodes().items()
        )
        # Of two that began at once, each may have found no key.
        await ownership.peers.check_alone(self._nodes().get(ownership.standing.directory, ""))
        self._see_whether_it_serves(ownership, row, now)
        if row.owner != ownership.standing.directory:
            ownership.inventory.cannot_serve = False
        if not self._catalog.replica_set and row.owner == ownership.standing.directory:
            # It was killed while it made the map.
            self._catalog.join(known.replica_set)
        if row.serving and self._catalog.replica_set:
            await ownership.learned(row, row.epoch)
        elif row.serving:
            # Nothing is stored of a set that it has not joined: that may be given up.
            ownership.joins = (row.owner, self._nodes().get(row.owner, ""))
        await self._act(ownership, row, now)
        if ownership.active:
            await self._keep_buckets(self._map or known, now)
        else:
            self.buckets.tell(None)

    def _see_whether_it_serves(self, ownership: Ownership, row: Row, now: float) -> None:
        """Note that somebody serves, or is about to: who claims again has claimed in vain, however long that took."""
        is_there = not row.serving and row.owner in self._nodes()
        if not is_there or row.owner != self._first[0]:
            self._served_at, self._first = now, (row.owner, row.epoch)
        met = ownership.peers.met.get(row.owner)
        if row.epoch == self._first[1] and met is not None and met.claiming:
            self._served_at = now

    async def _keep_buckets(self, known: Map, now: float) -> None:
        """Have the buckets that the map has; the first server of a set begins with one."""
        if self._is_first and not (self._catalog.hosts or known.buckets):
            await self.buckets.create(DEFAULT_BUCKET)
        self._is_first = False
        if self.buckets.are(known):
            self.buckets.tell(None)
        elif now - self._matched_at >= MATCH_SECONDS:
            self._matched_at = now
            await self.buckets.match()

    async def _act(self, ownership: Ownership, row: Row, now: float) -> None:
        """Claim the ownership, or have it back, if it is this server's turn."""
        if self._has_just_tried or ownership.claiming:
            return
        if ownership.active:
            if (why := ownership.inventory.failure or self._hang(ownership)) is not None:
                await self._give_up(ownership, why)
                return
            # Who claimed died before it served, and counted servers wait for it.
            is_due = row.epoch > ownership.standing.row.epoch and row.owner not in self._nodes()
            if is_due and not row.serving:
                self._tried_at = now
                await ownership.step_down(fenced=False)
                await ownership.promote(seen=row)
        elif self._may_claim(ownership, row, now):
            if ownership.drained:
                raise UprError(
                    "the owner is gone, and this server is drained",
                    reason="DRAINED",
                    hint="start the owner, or 'upr-admin drain --undo' here",
                )
            # What was read may be old by now.
            _, known = await self.rows.found()
            if known is not None and known.row == row:
                self._tried_at = now
                if row != self._claimed:
                    back = row.owner == ownership.standing.directory
                    who = ownership.peers.named(row.owner)
                    log.warning("this server claims", extra={"owner": who, "back": back})
                self._claimed = row
                await ownership.promote(seen=row)
        else:
            self._check_there(ownership, row)
            await self._check_newest(row, ownership.standing.row)

    async def _check_newest(self, row: Row, own: Row) -> None:
        """Raise where the map is an old copy and who would set it right is not there: nobody claims by it."""
        if row.age < own.age and own.owner not in self._nodes():
            # What was read may be old by now.
            _, known = await self.rows.found()
            if known is not None and known.row.age < own.age:
                raise old_map(known.row, own)

    def _check_there(self, ownership: Ownership, row: Row) -> None:
        """Raise where nobody is there who would claim."""
        there = {ownership.standing.directory, *self._nodes()}
        if not there.isdisjoint(row.counted | {row.owner}):
            return
        if self._catalog.replica_set:
            raise ownership.peers.not_heard(row.counted)
        raise UprError(
            f"no counted server of the cluster {shown(self._place.name)} is there, so this new one can join none",
            reason="NOT_HEARD",
            hint="start them; if the whole cluster was given up, delete the keys in etcd that begin with"
            f" {self._place.prefix.decode()}",
            retriable=True,
        )

    def _nodes(self) -> dict[str, str]:
        """Return HOST:PORT of the servers that have a key, by directory."""
        assert self._found is not None
        prefix = self._place.nodes
        return {
            key.removeprefix(prefix).decode("ascii", "replace"): decode_node(entry.value)
            for key, entry in self._found.entries.items()
            if key.startswith(prefix)
        }

    def _hang(self, ownership: Ownership) -> StorageFailedError | None:
        """Return that the disk hangs, where another server can be active without this one's promise; None while it does not."""
        standing = ownership.standing
        return None if standing.directory in standing.row.counted else ownership.inventory.hangs

    async def _give_up(self, ownership: Ownership, why: StorageFailedError) -> None:
        """Own no more where what is written cannot be stored, if another server is there that claims then."""
        # What was read may be old by now, and without etcd nobody claims.
        self._found, _ = await self.rows.found()
        there = ownership.standing.row.counted & self._nodes().keys() - {
            ownership.standing.directory
        }
        peers = ownership.peers
        met = [peers.met[one] for one in there if peers.met_lately({one})]
        if ownership.active and any(one.in_step and not one.drained for one in met):
            log.warning("this server gives the ownership up", extra={"error": str(why)})
            if ownership.inventory.failure is None:
                # While the disk hangs this does not end: the key goes meanwhile, and the trouble is told.
                self._tell("taking part in the cluster", why)
                ownership.inventory.cannot_serve = True
            await ownership.step_down(fenced=True)

    def _may_claim(self, ownership: Ownership, row: Row, now: float) -> bool:
        """Return whether this server is to claim: the owner is gone, for both witnesses, and others had their turn."""
        own = ownership.standing.directory
        if row.owner == own:
            # A claim of its own failed; an owner that restarts resumes by itself.
            return not row.serving
        fencing = ownership.fencing
        if own not in row.counted or fencing is None:
            return False
        if (ownership.inventory.failure or ownership.inventory.hangs) is not None:
            return False
        in_vain = now - self._served_at > VAIN_SECONDS
        is_there = row.owner in self._nodes() and not in_vain
        if is_there or fencing.unasked_seconds < GRANT_SECONDS:
            self._gone_at = now
        # From the second witness on: often that is the key, which is gone for all at the same moment.
        turn = sorted(row.counted - {row.owner}).index(own)
        if not ownership.in_step:
            # Others have more, and the tables of it.
            turn += len(row.counted)
        return now - self._gone_at > turn * TURN_SECONDS

    async def _begin(self, ownership: Ownership) -> None:
        """Make the map, where there is none: of the row of who serves, or of a server that was alone until now.

        One that is new waits: the map of a set that is there may be lost, and a new one would keep that out for ever.
        """
        standing = ownership.standing
        if ownership.active:
            await self._make(ownership, standing.row)
        elif not standing.epoch and ownership.inventory.served():
            await self._make(ownership, first_row(standing.directory))
        else:
            new = "" if self._catalog.replica_set else ", and this server is new"
            raise UprError(
                f"there is no map of the cluster {shown(self._place.name)} in etcd{new}",
                reason="NO_MAP",
                hint="the server that was active makes it; in a cluster that never had one, 'upr-admin promote' at the first"
                " server does; one whose active server is lost takes 'upr-admin promote --force'",
            )

    async def begin(self, ownership: Ownership, *, force: bool) -> None:
        """Make the map, where there is none, of a server that is to be active.

        Args:
            force: also if it heard of an owner: an operator says that nobody was active after what it knows.

        Raises:
            UprError: WRONG_REPLICA_SET, there is one of another set, which no order may claim; NOT_HEARD, it is that of a
                set that this new server cannot join.
        """
        if ownership.active:
            return
        found, known = await self.rows.found()
        if known is not None:
            self.rows.check_set(known)
            if not self._catalog.replica_set:
                self._found = found
                self._check_there(ownership, known.row)
            return
        standing = ownership.standing
        if force or not standing.epoch:
            row = standing.row if standing.row.epoch else first_row(standing.directory)
            await self._make(ownership, row)

    async def _make(self, ownership: Ownership, row: Row) -> None:
        first = Map(self._catalog.replica_set or secrets.token_hex(8), row)
        if await self.rows.begin(first):
            log.warning("the map of the cluster was made", extra={"set": first.replica_set})
            if not self._catalog.replica_set:
                self._catalog.join(first.replica_set)
            await ownership.store(lambda standing: standing.learned(row))


def check_cluster(config: ServerConfig) -> Place:
    """Return the place of the cluster that settings name.

    Raises:
        InvalidArgumentError: it is malformed, or does not fit the other settings.
    """
    place = Place.parse(config.cluster)
    if config.replicate_from or config.anonymous:
        raise InvalidArgumentError(
            "--cluster is given with --replicate-from or --anonymous; must be without",
            hint="the map of the cluster says whom a server follows",
        )
    if not config.meets:
        raise InvalidArgumentError(
            "--cluster is given without identities; must be with --tokens, --tls-client-ca or --open-admin",
            hint="with --open-admin everybody who can connect may say who is active",
        )
    if config.is_unreachable:
        raise InvalidArgumentError(
            f"--listen is {config.listen} with --cluster; must be one that the other servers reach, or be advertised",
            hint="give --advertise HOST:PORT with an address of this host",
        )
    return place


def replicate(
    catalog: Catalog,
    config: ServerConfig,
    address: Callable[[], str],
    registry: Registry | None = None,
) -> ReplicaMethods:
    """Return a server's part in its set, and in its cluster if it has one; ``registry`` is etcd by default.

    Raises:
        UprError: the settings do not fit, or a file cannot be read.
    """
    if not config.cluster:
        return ReplicaMethods(catalog, config, address)
    place = check_cluster(config)
    if registry is None:
        registry = Etcd(
            place.endpoints,
            ca=config.cluster_ca,
            cert=config.tls_cert,
            key=config.tls_key,
            user=config.cluster_user,
        )
    return ReplicaMethods(catalog, config, address, Keeper(catalog, registry, place, address))
