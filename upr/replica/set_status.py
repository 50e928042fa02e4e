"""Status of a set, as one server tells it to operators: its part in its set: what it is, since when, and what is wrong.

It only looks. What is wrong with etcd and with grants is logged where it is found; what is only seen from here, once when it
has lasted for PATIENCE_SECONDS, and once when it is over.
"""

import asyncio
import logging
from collections.abc import Mapping
from typing import Final, Protocol

from upr.replica.fencing import Rows
from upr.replica.inventory import LOOK_SECONDS
from upr.replica.ownership import Ownership
from upr.service.buckets.catalog import Catalog
from upr_protocol.errors import UprError
from upr_protocol.wire.v1.types_pb2 import SetPart

log = logging.getLogger(__name__)

PATIENCE_SECONDS = 5.0
"""Time that something must last which is so for a moment after each start."""
ETCD: Final = "etcd"
GRANTS: Final = "grants"
BUCKETS: Final = "buckets"
COUNTED: Final = "counted"
COPIES: Final = "copies"
UPSTREAM: Final = "upstream"
UNFIT: Final = "unfit"


class Cluster(Protocol):
    """What says who is active in a cluster, without an operator: the map, and who changes it when."""

    @property
    def name(self) -> str:
        """Its name."""

    @property
    def rows(self) -> Rows:
        """Where the row is changed."""

    @property
    def trouble(self) -> UprError | None:
        """Why the server takes no part; None while it does."""

    @property
    def bucket_trouble(self) -> UprError | None:
        """Why a bucket is not as the map says; None while all are."""

    @property
    def silent_seconds(self) -> float:
        """Time since etcd answered last."""

    def has_key(self, directory: str) -> bool:
        """Return whether a server has a key in etcd, which says that it runs."""

    async def begin(self, ownership: Ownership, *, force: bool) -> None:
        """Make the map, where there is none, because an operator orders it: see ``Keeper.begin``."""

    async def run(self, ownership: Ownership) -> None:
        """Take part until cancelled."""


class SetStatus:
    """What is told of one server's part in its set.

    Args:
        min_copies: counted replicas without which no write is taken.
    """

    def __init__(
        self, ownership: Ownership, catalog: Catalog, cluster: Cluster | None, min_copies: int
    ) -> None:
        self._ownership = ownership
        self._catalog = catalog
        self._cluster = cluster
        self._min_copies = min_copies
        self._owner = ownership.standing.row.owner
        self._since: float | None = None
        self._changes = 0
        self._began: dict[str, float] = {}
        self._lasting: dict[str, UprError] = {}

    async def run(self) -> None:
        loop = asyncio.get_running_loop()
        self._since = loop.time()
        while True:
            # Here nothing waits for the disk.
            self._ownership.inventory.look(loop.time())
            self._look(loop.time())
            await asyncio.sleep(LOOK_SECONDS)

    def _look(self, now: float) -> None:
        owner = self._ownership.standing.row.owner
        if owner != self._owner:
            # The first one that is heard of is no change.
            self._changes += bool(self._owner)
            self._owner, self._since = owner, now
        seen = {
            COUNTED: self._nobody_counted(),
            COPIES: self._too_few(),
            UNFIT: self._not_fit(),
        }
        for what, error in seen.items():
            began = self._began.setdefault(what, now)
            if error is None:
                del self._began[what]
                if self._lasting.pop(what, None) is not None:
                    seconds = round(now - began, 1)
                    log.info("set trouble is over", extra={"trouble": what, "seconds": seconds})
            elif now - began >= PATIENCE_SECONDS:
                if what not in self._lasting:
                    log.warning("set trouble", extra={"trouble": what, "error": error.message})
                self._lasting[what] = error

    def _nobody_counted(self) -> UprError | None:
        """Return that the owner of a cluster is the only one that is counted."""
        ownership, own = self._ownership, self._ownership.standing.directory
        if self._cluster is None or not ownership.active or ownership.standing.row.counted - {own}:
            return None
        return UprError(
            "no other server is counted: nobody can follow this one if it fails",
            reason="NOBODY_COUNTED",
            hint="start the other servers of the cluster; 'upr-admin topology' shows who is in step",
            retriable=True,
        )

    def _too_few(self) -> UprError | None:
        """Return why the active server refuses writes, in the first bucket in which it does."""
        if not (self._min_copies and self._ownership.active):
            return None
        found = (host.bucket.copies.shortage(self._min_copies) for host in self._catalog.hosts)
        return next(filter(None, found), None)

    def _not_fit(self) -> UprError | None:
        """Return why the others have this replica as not in step although it follows: they ask whether it could serve."""
        standing = self._ownership.standing
        if self._ownership.active or standing.row.owner in ("", standing.directory):
            return None
        unfit = self._ownership.inventory.unfit
        return unfit and UprError(
            f"this replica is not in step, because it could not be the active server: {unfit.message}",
            reason=unfit.reason,
            hint="free some space, mend the disk, or see to the dead partition",
            retriable=True,
        )

    @property
    def waiting(self) -> str:
        """Why the server takes no part in its cluster, or does not serve, in words; empty while it does."""
        fencing, cluster = self._ownership.fencing, self._cluster
        if fencing is None or cluster is None:
            return ""
        return fencing.trouble or str(cluster.trouble or "")

    @property
    def troubles(self) -> Mapping[str, UprError | None]:
        """What is wrong, by kind; None where nothing is."""
        fencing, cluster = self._ownership.fencing, self._cluster
        found = dict[str, UprError | None].fromkeys((ETCD, BUCKETS, GRANTS, COUNTED, COPIES, UNFIT))
        found[UPSTREAM] = self._ownership.following.problem
        if cluster is not None and (error := cluster.trouble) is not None:
            found[ETCD] = UprError(
                f"cluster {cluster.name}: {error.message}",
                reason=error.reason,
                hint=error.hint,
                retriable=error.retriable,
            )
        if cluster is not None:
            found[BUCKETS] = cluster.bucket_trouble
        if fencing is not None and fencing.trouble:
            found[GRANTS] = UprError(
                f"this server takes and answers no write: {fencing.trouble}",
                reason="NOT_GRANTED",
                hint="start the counted servers, or mend the links to them and to etcd; 'upr-admin topology' shows them",
                retriable=True,
            )
        return found | self._lasting

    @property
    def part(self) -> SetPart:
        """What is told of it as a whole."""
        ownership, cluster, fencing = self._ownership, self._cluster, self._ownership.fencing
        now = asyncio.get_running_loop().time()
        part = SetPart(
            state=self._state(),
            counted=len(ownership.standing.row.counted),
            owner_seconds=now - self._since if self._since is not None and self._owner else 0.0,
            owner_changes=self._changes,
        )
        if cluster is not None and fencing is not None:
            part.cluster, part.etcd_seconds = cluster.name, cluster.silent_seconds
            part.grant_seconds = fencing.serving_seconds if ownership.active else 0.0
        return part

    def _state(self) -> str:
        ownership = self._ownership
        if ownership.claiming:
            return "claiming"
        if ownership.active:
            return "owner" if self._catalog.may_serve() else "waiting"
        follows = any(one.connected for one in ownership.inventory.upstream_states.values())
        return "replica" if follows else "waiting"
