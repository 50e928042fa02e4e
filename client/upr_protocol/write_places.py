"""Places of writes: numbers that say where in a sequence blocks belong, and which content they are part of.

A number from 2^62 on is bit 62, 10 bits of the place, 40 bits of a digest of the content, and 12 bits that count the
content's blocks. Of a producer each place has one content: the first that came.
"""

from collections.abc import Iterable
from typing import Final

PLACES: Final = 1024
"""Places of a name: 0 to 1023."""
PLACE_BLOCKS: Final = 4096
"""Blocks of a place at most."""
FIRST_PLACE_NUMBER: Final = 2**62
"""Numbers from here on are those of places."""

_CONTENT_SHIFT: Final = 12
_PLACE_SHIFT: Final = 52


def place_number(place: int, digest: bytes) -> int:
    """Return the number of the first block of a place.

    Args:
        place: 0 to PLACES - 1.
        digest: of the content; its first 5 bytes count.
    """
    content = place << 40 | int.from_bytes(digest[:5])
    return FIRST_PLACE_NUMBER | content << _CONTENT_SHIFT


def place_of(number: int) -> int:
    """Return the place of a number from FIRST_PLACE_NUMBER on."""
    return (number >> _PLACE_SHIFT) % PLACES


def same_content(number: int, other: int) -> bool:
    """Whether two numbers are of blocks of the same place and content."""
    return number >> _CONTENT_SHIFT == other >> _CONTENT_SHIFT


def place_is_taken(number: int, last: int, of_place: Iterable[int]) -> bool:
    """Return whether a number's place has other content, or was skipped.

    Args:
        last: the producer's largest number.
        of_place: known numbers of the same place; needed only where ``number`` is below ``last``.
    """
    if last < FIRST_PLACE_NUMBER or place_of(number) > place_of(last) or same_content(number, last):
        return False
    return place_of(number) == place_of(last) or not any(
        same_content(number, other) for other in of_place
    )
