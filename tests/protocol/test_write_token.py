"""Write tokens: their text, and which history has a write."""

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from upr_protocol.errors import InvalidArgumentError, WriteUndoneError
from upr_protocol.failover import FailoverLog, WriteToken, WrittenSeqno
from upr_protocol.limits import AT_LEAST_MAX, FAILOVER_ID_MAX, PARTITIONS, SEQNO_MAX

A, B, C, D = 0xA, 0xB, 0xC, 0xD
LOG = FailoverLog.from_pairs([(A, 0), (B, 10), (C, 20)])
TRIMMED = FailoverLog.from_pairs([(B, 10), (C, 20)])

writes = st.tuples(
    st.integers(0, PARTITIONS - 1), st.integers(1, FAILOVER_ID_MAX), st.integers(1, SEQNO_MAX)
)


@given(st.integers(0, 2**64 - 1), st.lists(writes, max_size=20))
def test_a_token_comes_back_from_its_text(version: int, some: list[tuple[int, int, int]]) -> None:
    token = WriteToken.of(version, some)
    text = str(token)
    assert WriteToken.parse(text) == token
    assert text.isascii()
    assert not set(text) & set(' ;"\\')
    for partition, failover_id, seqno in some:
        (found,) = [one for one in token.writes if one[:2] == (partition, failover_id)]
        assert found.seqno >= seqno


def test_joined_tokens_have_the_last_write_of_each_partition_and_id() -> None:
    one = WriteToken.of(1, [(3, A, 5), (3, A, 4), (7, A, 1)])
    other = WriteToken.of(1, [(3, A, 2), (3, B, 12)])
    assert (one | other).writes == ((3, A, 5), (3, B, 12), (7, A, 1))
    assert (one | other).within({7, 8}) == ((7, A, 1),)
    with pytest.raises(InvalidArgumentError, match="must be equal"):
        one | WriteToken.of(2, [])
    full = [(n % PARTITIONS, 1 + n // PARTITIONS, 1) for n in range(AT_LEAST_MAX)]
    assert len(WriteToken.of(1, full).writes) == AT_LEAST_MAX
    with pytest.raises(InvalidArgumentError, match="must be at most"):
        WriteToken.of(1, [*full, (0, 99, 1)])


@pytest.mark.parametrize(
    "text",
    [
        "",
        "7",
        f"{1:016x}:",
        f"{1:016x}:3-{A:016x}",
        f"{1:016x}:3-{A:016x}-0",
        f"{1:016x}:1024-{A:016x}-1",
        f"{1:016x}:3-{0:016x}-1",
        f"{1:016x}:3-{A:016x}-{SEQNO_MAX + 1}",
        f"{1:016x}:3-{A:016x}-1,",
        f"{1:016X}".replace("0", "G") + f":3-{A:016x}-1",
        "x" * 100_000,
        None,
        f"{1:016x}:3-{A:016x}-1".encode(),
    ],
)
def test_other_texts_are_refused(text: Any) -> None:
    if text == f"{1:016x}:":
        assert WriteToken.parse(text).writes == ()
        return
    with pytest.raises(InvalidArgumentError) as refused:
        WriteToken.parse(text)
    assert len(str(refused.value)) < 300


@pytest.mark.parametrize(
    ("log", "failover_id", "seqno", "complete", "newest", "expected"),
    [
        # Given, and there.
        (LOG, A, 10, 10, False, True),
        (LOG, B, 11, 25, False, True),
        (LOG, C, 25, 25, True, True),
        # Given, and not there yet: complete only below it.
        (LOG, C, 26, 25, False, False),
        (LOG, C, 26, 25, True, False),
        # A record below it: that branch was left.
        (LOG, A, 11, 5, False, None),
        (LOG, B, 21, 25, True, None),
        # An id that the log does not have: of later on, unless nothing is later.
        (LOG, D, 30, 25, False, False),
        (LOG, D, 25, 25, False, False),
        (LOG, D, 30, 25, True, None),
        (LOG, D, 25, 25, True, None),
        # Older than the log.
        (TRIMMED, A, 10, 25, True, True),
        (TRIMMED, A, 11, 25, True, None),
    ],
)
def test_whether_a_history_has_a_write(
    log: FailoverLog,
    failover_id: int,
    seqno: int,
    complete: int,
    newest: bool,
    expected: bool | None,
) -> None:
    written = WrittenSeqno(3, failover_id, seqno)
    if expected is None:
        with pytest.raises(WriteUndoneError, match="a failover undid it"):
            written.is_in(log, complete, newest=newest)
    else:
        assert written.is_in(log, complete, newest=newest) is expected
