"""The snapshot markers that a consumer remembers, thinned so that they stay few.

Source: specification, "Snapshot Markers and Deduplication": clients keep some history of received markers; and
the project's design, "Handshake": the newest 16, then exponentially, at least 2.
"""

from bisect import bisect_left, bisect_right
from collections.abc import Iterable, Sequence

from upr_protocol.errors import InvalidArgumentError
from upr_protocol.failover import check_seqno
from upr_protocol.limits import MARKERS_MAX, MARKERS_NEWEST

# A history is thinned when it reaches twice its bound, so that thinning costs a constant a marker.
_THIN_AT = 2 * MARKERS_MAX


def _thin(markers: Sequence[int], newest: int) -> tuple[int, ...]:
    split = len(markers) - newest
    if split <= 0:
        return tuple(markers)
    last = markers[-1]
    kept: list[int] = []
    scale = -1
    for marker in markers[:split]:
        # Ascending markers have falling distances, so the first one of a scale is its oldest. The oldest must
        # stay: were it the newest, one that has just grown into a scale would always push out the one about to
        # grow out of it, and the far scales would run dry.
        its_scale = (last - marker).bit_length()
        if its_scale != scale:
            kept.append(marker)
            scale = its_scale
    kept.extend(markers[split:])
    return tuple(kept)


def thin_markers(markers: Sequence[int], newest: int = MARKERS_NEWEST) -> tuple[int, ...]:
    """Return the markers worth keeping, ascending.

    The ``newest`` ones (1 or more) all stay, and of the older ones the oldest in each power of two of distance
    from the newest marker. So at most ``newest`` + 48 are left, 64 by default, at least 2 where there were 2, and
    the oldest is always among them. Thinning the result again changes nothing.

    Args:
        markers: seqnos, 0 to 2^48 - 1, strictly ascending.
        newest: how many of the newest stay whatever their distance.

    Raises:
        InvalidArgumentError: a seqno is out of range or not above the one before it, or ``newest`` is below 1.
    """
    if newest < 1:
        raise InvalidArgumentError(f"newest is {newest}, at least 1 marker is kept")
    return _thin(check_markers(markers), newest)


def check_markers(markers: Iterable[int]) -> tuple[int, ...]:
    """Return the markers when they are strictly ascending seqnos, 0 to 2^48 - 1.

    Raises:
        InvalidArgumentError: one is out of range or not above the one before it.
    """
    checked: list[int] = []
    for marker in markers:
        seqno = check_seqno(marker, "one of markers")
        if checked and seqno <= checked[-1]:
            raise InvalidArgumentError(
                f"marker {seqno} follows {checked[-1]}, markers must be ascending"
            )
        checked.append(seqno)
    return tuple(checked)


class MarkerHistory:
    """The markers of one partition as a consumer receives them.

    Bounded however many are added: never more than twice ``MARKERS_MAX`` inside, and never more than
    ``MARKERS_MAX`` in ``as_tuple()``.

    Args:
        markers: those of a stored position, ascending.

    Raises:
        InvalidArgumentError: they are not ascending seqnos.
    """

    __slots__ = ("_seqnos",)

    def __init__(self, markers: Iterable[int] = ()) -> None:
        self._seqnos: list[int] = []
        self.add_many(markers)

    def __len__(self) -> int:
        return len(self._seqnos)

    def __repr__(self) -> str:
        return f"MarkerHistory({self.as_tuple()!r})"

    @property
    def newest(self) -> int | None:
        """The newest marker, None when there is none."""
        return self._seqnos[-1] if self._seqnos else None

    def add(self, seqno: int) -> None:
        """Remember a marker at ``seqno``, 0 to 2^48 - 1.

        One that equals the newest is ignored, because an idle partition may repeat its marker; so is one at 0,
        because starting from 0 needs none.

        Raises:
            InvalidArgumentError: it is out of range, or below the newest; nothing was changed.
        """
        check_seqno(seqno, "marker")
        seqnos = self._seqnos
        newest = seqnos[-1] if seqnos else 0
        if seqno < newest:
            raise InvalidArgumentError(
                f"marker {seqno} follows {newest}, markers must be ascending",
                hint="after a rollback call truncate_above first",
            )
        if seqno == newest:
            return
        seqnos.append(seqno)
        if len(seqnos) >= _THIN_AT:
            seqnos[:] = _thin(seqnos, MARKERS_NEWEST)

    def add_many(self, seqnos: Iterable[int]) -> None:
        """Remember several markers, ascending.

        Raises:
            InvalidArgumentError: one is out of range, or below the one before it; those before it were added.
        """
        for seqno in seqnos:
            self.add(seqno)

    def truncate_above(self, seqno: int) -> None:
        """Forget the markers above ``seqno``; one at it stays.

        Raises:
            InvalidArgumentError: it is out of range.
        """
        check_seqno(seqno)
        del self._seqnos[bisect_right(self._seqnos, seqno) :]

    def newest_before(self, seqno: int, inclusive: bool = False) -> int | None:
        """The newest marker below ``seqno`` (with ``inclusive``: at or below it), None when there is none.

        Raises:
            InvalidArgumentError: it is out of range.
        """
        check_seqno(seqno)
        bisect = bisect_right if inclusive else bisect_left
        index = bisect(self._seqnos, seqno)
        return self._seqnos[index - 1] if index else None

    def as_tuple(self) -> tuple[int, ...]:
        """The markers to store, ascending and thinned.

        What is left out is forgotten: whoever keeps data for each stored marker must not be asked for another one later.
        """
        self._seqnos[:] = thinned = _thin(self._seqnos, MARKERS_NEWEST)
        return thinned
