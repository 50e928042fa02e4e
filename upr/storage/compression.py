"""How a bucket's stored blocks are compressed."""

from upr.storage.merge import Compress
from upr_protocol.errors import DataDirectoryError
from upr_protocol.wire.codec import compress_block
from upr_protocol.wire.compression import zstd_available

COMPRESSIONS = ("", "zstd")
"""What ``Identity.compression`` may be."""


def compressor(compression: str) -> Compress | None:
    """Return what is made of each block before it is stored, None for nothing.

    Args:
        compression: a bucket's setting.

    Raises:
        DataDirectoryError: it is unknown here, or what it needs is not installed.
    """
    if compression not in COMPRESSIONS:
        raise DataDirectoryError(
            f"the bucket's blocks are compressed with {compression!r}, known is zstd",
            hint="it was made by a newer release: run that",
        )
    if not compression:
        return None
    if not zstd_available():
        raise DataDirectoryError(
            "the bucket's blocks are compressed with zstd, and zstandard is not installed",
            hint="install upr-stream[server]",
        )
    return compress_block
