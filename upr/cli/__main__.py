"""``python -m upr.cli server|admin|cat ...``: the commands where no console script is installed."""

import sys

from upr.cli import entry

COMMANDS = {"server": entry.server, "admin": entry.admin, "cat": entry.cat}


def main() -> None:
    name = sys.argv[1] if len(sys.argv) > 1 else ""
    if name not in COMMANDS:
        print(f"error: {name!r} is not one of {', '.join(COMMANDS)}", file=sys.stderr)
        sys.exit(2)
    del sys.argv[1]
    COMMANDS[name]()


if __name__ == "__main__":
    main()
