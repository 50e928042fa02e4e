"""A feed: the streams of one connection in one bucket, as lines. The engine's ``Follower`` reads; the handshake decides.

Each answer, end and frame becomes lines in the step in which the engine gives it. Only the text of a frame's rows is made later,
piece by piece.
"""

from collections.abc import Callable, Iterator, Sequence
from itertools import chain
from typing import NamedTuple

import numpy as np

from upr.engine.follower import Follower
from upr.engine.streams import (
    BUCKET_GONE,
    HISTORY_CHANGED,
    STOPPED,
    Answer,
    Ended,
    FollowOptions,
    Refused,
    RolledBack,
    StartRequest,
)
from upr.service.buckets.bucket_service import BucketService
from upr.service.conversation import tell_alarm
from upr.service.text.lines import (
    ALL,
    Replicate,
    Stretch,
    error_line,
    position_line,
    rdata,
    shown_name,
    split_token,
    token_of,
)
from upr.storage.store import ReadRequest
from upr_protocol.block import U64, Block
from upr_protocol.errors import BucketGoneError, UprError
from upr_protocol.flow import CreditWindow
from upr_protocol.limits import FRAME_BYTES, PARTITIONS
from upr_protocol.wire.codec import decode_block


class Lines(NamedTuple):
    """The lines of a frame.

    Args:
        size: of the frame, in bytes.
        cost: what it takes of the credit until ``Feed.sent``.
        pieces: of the text, made as they are asked for, in any thread.
    """

    size: int
    cost: int
    pieces: Iterator[bytes]


class Feed:
    """Streams of a bucket that the connection of a peer follows, with stability ``disk``, until ``close``.

    Attributes:
        is_gone: whether the bucket was dropped or opened again; a line said so.
    """

    def __init__(self, host: BucketService, peer: str, wake: Callable[[], None]) -> None:
        self.is_gone = False
        self._reserved = 0
        self._host = host
        self._wake = wake
        self._name = shown_name(host.bucket.identity.name)
        options = FollowOptions(peer=peer)
        self.follower = Follower(host.bucket, options, CreditWindow(FRAME_BYTES), wake)
        self._id: U64 = np.zeros(PARTITIONS, np.uint64)
        # The newest complete marker that the client was told, and the highest horizon.
        self._told: U64 = np.zeros(PARTITIONS, np.uint64)
        self._horizon: U64 = np.zeros(PARTITIONS, np.uint64)
        # Whether rows were sent since, as a batch that is still open.
        self._is_open = np.zeros(PARTITIONS, bool)
        self._said: list[bytes] = []
        host.bucket.add_follower(self.follower)
        host.users.add(self._bucket_gone)

    def close(self) -> None:
        self._host.bucket.remove_follower(self.follower)
        self._host.users.discard(self._bucket_gone)

    def _bucket_gone(self, error: BucketGoneError) -> None:
        why = HISTORY_CHANGED if error.reason == HISTORY_CHANGED.reason else BUCKET_GONE
        self.follower.end_all(why)
        self.is_gone = True
        self._wake()

    # Starting

    def start(self, asked: Sequence[Replicate]) -> None:
        """Answer requests, and open their streams, in this step."""
        wanted = [
            (partition, one.token)
            for one in asked
            for partition in ([one.partition] if one.partition is not None else range(PARTITIONS))
        ]
        requests = [self._request(partition, token) for partition, token in wanted]
        # Ends of streams that were here before go before the answers.
        self._take_ends()
        answers = self.follower.start(requests)
        for (_, token), request, answer in zip(wanted, requests, answers, strict=True):
            self._said.append(self._answer(token, request, answer))
        self._wake()

    def _request(self, partition: int, token: int | None) -> StartRequest:
        if token is None:
            return StartRequest(partition, None, 0, None, from_now=True)
        data_id, seqno = split_token(token)
        if not seqno:
            return StartRequest(partition, None, 0, None)
        # A token says under which id the data was received, and nothing of a newer id that the client was told. So the
        # data alone is judged. It is complete at its token, which is always a marker.
        newest = int(self._host.bucket.partitions.newest_id[partition])
        return StartRequest(partition, newest, seqno, data_id, horizon=seqno)

    def _answer(self, token: int | None, request: StartRequest, answer: Answer) -> bytes:
        partition = request.partition
        if isinstance(answer, Refused):
            return error_line(answer.error, self._name, partition)
        if isinstance(answer, RolledBack):
            tell_alarm(self._host.bucket.identity.name, answer)
            seqno = answer.answer.rollback_seqno or 0
            error = UprError(
                answer.answer.words,
                reason="ROLLBACK",
                hint="undo what is above, and ask with a token that you had there, or with 0",
            )
            return error_line(error, self._name, partition, seqno)
        seqno = request.seqno if answer.start_seqno is None else answer.start_seqno
        self._id[partition] = answer.failover_id
        self._told[partition] = self._horizon[partition] = seqno
        self._is_open[partition] = False
        new = token_of(answer.failover_id, seqno)
        return position_line(self._name, partition, new if token is None else token, new)

    # Lines

    def take_said(self) -> list[bytes]:
        """Return the answers and ends that were not taken yet, in order."""
        self._take_ends()
        said, self._said = self._said, []
        return said

    def _take_ends(self) -> None:
        # A stream that was stopped is one that the client asked for again.
        ends = [ended for ended in self.follower.take_ended() if ended.why is not STOPPED]
        self._said += map(self._end_line, ends)

    def _end_line(self, ended: Ended) -> bytes:
        partitions = sorted(partition for partition, _, _ in ended.streams)
        named = ALL if len(partitions) == PARTITIONS else ",".join(map(str, partitions))
        return error_line(ended.why.error(), self._name, named)

    def next_lines(self) -> Lines | None:
        """Return the lines of the next frame; None when there is nothing to send."""
        frame = self.follower.next_frame()
        if frame is None:
            return None
        blocks = [decode_block(data) for data in frame.blocks]
        pieces = [self._lines_of(block) for block in blocks]
        return Lines(frame.size, frame.cost, chain.from_iterable(pieces))

    def sent(self, lines: Lines) -> None:
        """Give back the credit of lines that were written, or are dropped."""
        self.follower.credit.give_back(lines.cost)

    def _lines_of(self, block: Block) -> Iterator[bytes]:
        """Return the lines of a block; what its markers mean for the client is decided now."""
        runs = block.runs
        stretches: list[Stretch] = []
        behind: list[bytes] = []
        for partition, rows, end, horizon in zip(
            runs["partition"].tolist(),
            runs["count"].tolist(),
            runs["end_seqno"].tolist(),
            runs["horizon"].tolist(),
            strict=True,
        ):
            horizon = max(horizon, int(self._horizon[partition]))
            self._horizon[partition] = horizon
            token = None
            if horizon <= end:
                token = token_of(int(self._id[partition]), end)
                if not rows:
                    behind.append(self._bare_marker(partition, token))
                self._told[partition] = end
            self._is_open[partition] = token is None and (rows > 0 or self._is_open[partition])
            stretches.append(Stretch(self._head(partition), rows, token))
        # A block has one run of a partition, so a marker without rows may go behind all rows.
        return chain(rdata(block, stretches), behind)

    def _head(self, partition: int) -> str:
        return f"RDATA {self._name} {partition} "

    def _bare_marker(self, partition: int, token: int) -> bytes:
        """Return the line of a marker whose rows were superseded or purged."""
        if self._is_open[partition]:
            # Rows of the batch were sent: a row of null ends it.
            return f"{self._head(partition)}{token} null\n".encode()
        old = token_of(int(self._id[partition]), int(self._told[partition]))
        return position_line(self._name, partition, old, token)

    # Reading the store

    @property
    def held(self) -> int:
        """Bytes that a read under way may bring, and of blocks that were read and not sent."""
        return self._reserved + self.follower.ready_bytes

    def next_read(self) -> tuple[list[ReadRequest], int] | None:
        """Return what to read of the store, and its limit in bytes; None for nothing. ``read`` must follow."""
        known = self.follower.unfit_bytes
        wanted = None if self.is_gone else self.follower.next_read()
        if wanted is not None:
            self._reserved = max(wanted[1], known)
        return wanted

    async def read(self, requests: list[ReadRequest], max_bytes: int) -> None:
        try:
            await self._host.read_for(self.follower, requests, max_bytes)
        finally:
            self._reserved = 0
            self._wake()

    def put_back(self) -> None:
        """Forget a large block that was read, because there is no room for it; it is read again."""
        if self.follower.ready_bytes > FRAME_BYTES:
            self.follower.put_back()
