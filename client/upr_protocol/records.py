"""Fixed-width records on the wire, little-endian; see ``change_stream_service.proto``."""

from typing import Final

import numpy as np

POSITION: Final = np.dtype([("partition", "<u4"), ("seqno", "<u8")])
"""One record of Ack.positions, Heartbeat.high_seqnos and Frame.purge_seqnos, 12 bytes."""

START: Final = np.dtype(
    [("partition", "<u4"), ("failover_id", "<u8"), ("seqno", "<u8"), ("data_id", "<u8")]
)
"""One record of Start.table, 28 bytes; an id of 0 is none."""

STARTED: Final = np.dtype(
    [
        ("partition", "<u4"),
        ("token", "<u4"),
        ("failover_id", "<u8"),
        ("high_seqno", "<u8"),
        ("purge_seqno", "<u8"),
        ("born", "<u4"),
    ]
)
"""One record of StartAnswers.started, 36 bytes; ``born`` is 1 when the failover log is that one id at 0."""
