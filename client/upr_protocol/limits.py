"""Every limit and default of the protocol, in one place.

Units are in the names. A limit that bounds what a peer may send is checked where the message enters, and
the error names the value and the limit. Source: the specification ("Terminology"), and the project's design
for what the specification leaves open.
"""

from typing import Final

PARTITIONS: Final = 1024
SEQNO_BITS: Final = 48
SEQNO_MAX: Final = 2**SEQNO_BITS - 1
"""The largest seqno. The first mutation of a partition is 1; 0 means "nothing yet"."""

FAILOVER_ID_MAX: Final = 2**64 - 1
"""Failover ids are random, 64 bits, never 0."""
FAILOVER_LOG_MAX: Final = 25
"""Records kept in a failover log; the oldest leave first."""

KEY_BYTES_MIN: Final = 1
KEY_BYTES_MAX: Final = 4096
VALUE_BYTES_MAX: Final = 20 * 2**20
NAME_BYTES_MAX: Final = 200
"""Names of buckets, consumers, cuts, producers: 1 to 200 bytes of UTF-8 without control characters."""

BLOCK_COLUMN_BYTES: Final = 2**20
"""A block is cut when its columns reach this, unless it has one row."""
BLOCK_ROWS_MAX: Final = 2**18
"""Rows in one block. With one-byte keys and empty values 2^18 rows fill about 2.4 MiB of columns."""
RUN_SPAN_MAX: Final = 2**32 - 1
"""Seqnos that one run may span, because a row's offset in its run is a uint32."""

FRAME_BYTES: Final = 512 * 2**10
"""A frame is filled up to this; larger only when a single block is."""
FRAME_PLAIN_BYTES: Final = 4 * 2**20
"""Columns that the compressed blocks of a frame have when decompressed; more only when a single block has."""
MESSAGE_BYTES_MAX: Final = 24 * 2**20
"""The gRPC message limit, both ends: the largest value, its key and room for the envelope."""
WRITE_BLOCK_BYTES_MAX: Final = MESSAGE_BYTES_MAX - 64 * 2**10
"""Columns of one Write, so that the numbered block fits into a frame with its envelope."""

CREDIT_BYTES: Final = 8 * 2**20
"""Default window of a Follow call."""
CREDIT_BYTES_MAX: Final = 256 * 2**20
CREDIT_RETURN_FRACTION: Final = 4
"""A consumer returns credit when a quarter of its window is consumed."""

HEARTBEAT_SECONDS: Final = 5.0
HEARTBEAT_SECONDS_MIN: Final = 0.05
HEARTBEAT_SECONDS_MAX: Final = 3600.0
SILENT_INTERVALS: Final = 3
"""Silence for this many heartbeat intervals ends the call, at either side."""

MARKERS_NEWEST: Final = 16
"""The newest markers of a position are all kept; older ones are thinned exponentially."""
MARKERS_MIN: Final = 2
MARKERS_MAX: Final = MARKERS_NEWEST + SEQNO_BITS
"""At most one older marker for each power of two of distance."""

WRITES_IN_FLIGHT_MAX: Final = 64
"""Writes of one call whose answer is outstanding; the server reads no further until some are answered."""
WRITE_CALLS_MAX: Final = 1000
FOLLOW_CALLS_MAX: Final = 1000
"""Open calls of each kind at one server; further ones are refused, unary calls are not affected."""
OPEN_SECONDS: Final = 10.0
"""The first message of a call, Open, must come within this."""
WRITE_OUTCOME_SECONDS: Final = 30.0
"""A write that is not durable by then is answered "unknown": it stays numbered and may become durable."""
PRODUCER_SECONDS: Final = 24 * 3600
PRODUCERS_MAX: Final = 10_000
"""Producers are remembered for a day after their last write, the newest 10,000 of them."""

GET_KEYS_MAX: Final = 1000
"""Keys of one Get."""
GET_ANSWER_BYTES_MAX: Final = 16 * 2**20
"""Values of one Get's answer; what does not fit is asked for again. A single value may be larger."""
GET_CALLS_MAX: Final = 100
"""Open Gets at one server, of which a few are searched for at a time."""

TOMBSTONE_SECONDS: Final = 3 * 24 * 3600.0
"""Tombstones of this age may be purged, when everybody has passed them."""
PURGE_HOLD_SECONDS: Final = 7 * 24 * 3600.0
"""From this age on no stream and no consumer holds a tombstone up; only a cut does, while its lease lasts."""
CUT_LEASE_SECONDS: Final = 3600.0
"""Default lease of a cut."""
CUT_LEASE_SECONDS_MAX: Final = 30 * 24 * 3600.0
CUTS_MAX: Final = 64
"""Cuts of one bucket: each keeps merging from joining what lies on its two sides."""
CONSUMERS_MAX: Final = 1000
"""Registered consumers of one bucket."""
LEASE_SECONDS: Final = 30.0
"""Default lease of a member of a group: so long its partitions stay its own while nothing is heard of it."""
LEASE_SECONDS_MIN: Final = 1.0
LEASE_SECONDS_MAX: Final = 3600.0
MEMBERS_MAX: Final = 256
"""Members of one group."""
OWNERS_REMEMBERED: Final = 2000
"""Consumers whose last call without a member may still save, open or not; FOLLOW_CALLS_MAX of them can be open."""
BUCKETS_MAX: Final = 32
"""Buckets of one server: each has a journal, a store and threads of its own."""

DISK_RESERVE_BYTES: Final = 256 * 2**20
DISK_RESERVE_FRACTION: Final = 0.02
"""Room kept for flushing, which frees the journal: the smaller of the two."""

assert VALUE_BYTES_MAX + KEY_BYTES_MAX + 4096 <= WRITE_BLOCK_BYTES_MAX < MESSAGE_BYTES_MAX
assert MARKERS_MIN <= MARKERS_NEWEST
assert FRAME_BYTES < BLOCK_COLUMN_BYTES < CREDIT_BYTES <= CREDIT_BYTES_MAX
assert BLOCK_ROWS_MAX <= RUN_SPAN_MAX < SEQNO_MAX
