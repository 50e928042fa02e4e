"""The server's calls for stored positions in the simulated network: the service's own methods, on a loop driven by steps.

Nothing of them happens but in a step: a request arrives when the network brings it, the store takes a transaction
when the seed says so, and a crash may come before or after that.
"""

import asyncio
from collections import deque
from collections.abc import Callable
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

from upr.engine.groups import Hold
from upr.service.admin import AdminMethods
from upr.service.buckets.keepers import ConsumerSaver, Rows, micros
from upr.service.change_stream import ChangeStreamMethods
from upr.service.clock import Clock
from upr.service.storage_trouble import Troubles
from upr_protocol.errors import UnavailableError, UprError
from upr_protocol.limits import FAILOVER_LOG_RECORDS
from upr_protocol.wire.v1 import admin_service_pb2 as admin
from upr_protocol.wire.v1 import change_stream_service_pb2 as wire

if TYPE_CHECKING:
    from tests.simulation.grouped import GroupWorld


class Asked:
    """One call of a client, and what became of it.

    Args:
        owner: as whom it was made, see ``GroupWorld.owners``.
        saves: of SavePositions, what number each position has in the history.

    Attributes:
        answer: what has arrived at the client; None: nothing yet, or never.
    """

    def __init__(
        self, request: Any, due: float, owner: str = "", saves: dict[int, int] | None = None
    ) -> None:
        self.request = request
        self.due = due
        self.owner = owner
        self.saves = saves or {}
        self.answer: Any = None
        self._answer_due: tuple[float, Any] | None = None

    def answered(self, answer: Any, due: float | None) -> None:
        """The server, or the network, has an answer; None: it gets lost."""
        if due is not None:
            self._answer_due = due, answer

    def arrived(self, now: float) -> Any:
        """Return the answer once it is there, an UprError too."""
        if self._answer_due is not None and self._answer_due[0] <= now:
            self.answer = self._answer_due[1]
        return self.answer


class _Loop(asyncio.SelectorEventLoop):
    """A loop with the clock of the network."""

    def __init__(self, clock: Callable[[], float]) -> None:
        self._clock = clock
        super().__init__()

    def time(self) -> float:
        return self._clock()

    def turn(self) -> None:
        """Let everything go on that waits for nothing."""
        while self._ready:  # type: ignore[attr-defined]
            self.call_soon(self.stop)
            self.run_forever()


class Keeper:
    """One process's part of it.

    Attributes:
        failover_log_records, acknowledged, bucket: as of the service of a bucket.
        check_active: as of that service, which is active.
        disk: this too, open all the time, with clock and store.
    """

    def __init__(self, world: "GroupWorld") -> None:
        self.world = world
        self.disk = self
        self.check_open = lambda: None
        self.clock = Clock(
            day=lambda: micros(world.network.now), boot=lambda: micros(world.network.now)
        )
        self.failover_log_records = FAILOVER_LOG_RECORDS
        self.bucket, self.store = world.bucket, world.store
        self.check_active = lambda: None
        self._loop = _Loop(lambda: world.network.now)
        self.acknowledged = ConsumerSaver(
            self.bucket.consumer_positions, self._write, Troubles("default", lambda: None)
        )
        # What the methods of the services need: a catalog of one bucket.
        self._service = SimpleNamespace(_catalog=self)
        self._transactions: deque[tuple[Callable[[], Rows], asyncio.Future[None]]] = deque()
        self._tasks: dict[asyncio.Task[Any], Asked | None] = {}
        hold = self.bucket.owners.hold

        def recorded_hold(*args: Any) -> Hold:
            held = hold(*args)
            asked = self._tasks[asyncio.current_task()]  # type: ignore[index]
            assert asked is not None
            world.accepted(asked, held.partitions.tolist())
            return held

        self.bucket.owners.hold = recorded_hold  # type: ignore[method-assign, assignment]
        reset = self.bucket.owners.reset

        def recorded_reset(name: str) -> int:
            asked = self._tasks[asyncio.current_task()]  # type: ignore[index]
            assert asked is not None
            world.resetting(name, list(asked.request.partitions))
            return reset(name)

        self.bucket.owners.reset = recorded_reset  # type: ignore[method-assign]
        forget = self.bucket.consumer_positions.forget

        def recorded_forget(name: str) -> bool:
            world.forgetting(name)
            return forget(name)

        self.bucket.consumer_positions.forget = recorded_forget  # type: ignore[method-assign]

    # What the methods ask of the catalog.

    def find(self, *_: Any) -> "Keeper":
        """Return the host of the bucket."""
        return self

    of = find

    async def in_reader(self, call: Callable[[], Any]) -> Any:
        """Have the store read, a moment later."""
        await asyncio.sleep(0)
        return call()

    async def _write(self, rows: Callable[[], Rows]) -> None:
        future = self._loop.create_future()
        self._transactions.append((rows, future))
        await future

    # Steps.

    def take(self, asked: Asked) -> None:
        """A request has arrived."""
        method: Any = {
            wire.SavePositionsRequest: ChangeStreamMethods.SavePositions,
            wire.LoadPositionsRequest: ChangeStreamMethods.LoadPositions,
            admin.ResetConsumerRequest: AdminMethods.ResetConsumer,
            admin.ForgetConsumerRequest: AdminMethods.ForgetConsumer,
        }[type(asked.request)]
        request = type(asked.request).FromString(asked.request.SerializeToString())
        asked.request = request
        self._begin(method(self._service, request, None), asked)

    def save_acknowledged(self) -> None:
        """Have what was acknowledged stored, as the service does about once a second."""
        self._begin(self.acknowledged.save(), None)

    def _begin(self, coroutine: Any, asked: Asked | None) -> None:
        task = self._loop.create_task(coroutine)
        self._tasks[task] = asked
        self._loop.turn()
        self.answer()

    def step(self) -> bool:
        """Make one transaction of those that wait; False when none does."""
        if not self._transactions:
            return False
        rows, future = self._transactions.popleft()
        made = rows()
        self.world.store.put_consumers(made)
        self.world.stored_rows(made)
        if self.world.rng.random() < 0.01 and not self.world.settling:
            self.world.crash()
            self.world.count("crashes before a save was answered")
            return True
        future.set_result(None)
        self._loop.turn()
        self.answer()
        return True

    def answer(self) -> None:
        """Take note of what has come to its end."""
        for task in [task for task in self._tasks if task.done()]:
            asked = self._tasks.pop(task)
            error = task.exception()
            assert error is None or isinstance(error, UprError), error
            if asked is not None:
                self.world.answered(asked, task.result() if error is None else error)

    def die(self) -> None:
        """The process ends: who has no answer gets none."""
        for asked in self._tasks.values():
            if asked is not None:
                asked.answered(UnavailableError("the connection was lost"), self.world.late())
        self._tasks = {}
        while tasks := asyncio.all_tasks(self._loop):
            for task in tasks:
                task.cancel()
            self._loop.turn()
        self._loop.close()
