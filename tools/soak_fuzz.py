"""Damage whatever is read from peers and disks, for a long time. Run by ``tools/dev.py soak --fuzz``."""

import sys
import time

from tests.fuzz import fuzz, targets
from tools.demo import say, soak_parser

ROUND = 2_000
REPORT_SECONDS = 30.0


def main() -> int:
    """Return 0 when every input gave a value or the declared error."""
    options = soak_parser("fuzz", __doc__).parse_args()
    seed = options.seed
    ends = time.monotonic() + options.minutes * 60
    said = time.monotonic()
    inputs = 0
    while time.monotonic() < ends:
        for target in targets():
            try:
                fuzz(target, seed, ROUND)
            except AssertionError as error:
                print(f"VIOLATION (seed {seed}): {error}", file=sys.stderr)
                return 1
            inputs += ROUND
        seed += 1
        if time.monotonic() - said >= REPORT_SECONDS:
            said = time.monotonic()
            say(f"{inputs} inputs")
    say(f"{inputs} inputs, each a value or the declared error")
    return 0


if __name__ == "__main__":
    sys.exit(main())
