"""One member of a group that shares the partitions of a bucket; start several, in several terminals.

    python group.py --target 127.0.0.1:7711 --group indexer --member a
    python group.py --target 127.0.0.1:7711 --group indexer --member b

Each prints the changes of the partitions that are its own, which the server decides. End one (Ctrl-C), and the others
take over at once, from the positions that it stored in the server. Kill one, and they do when its lease has ended. The
last changes before its end may be printed twice, by two members.
"""

import argparse
import asyncio
import os
import signal
import sys

from upr_client import AsyncClient, Change, Group, Rollback, UprError


def say(words: object) -> None:
    print(words, file=sys.stderr, flush=True)


async def follow(options: argparse.Namespace) -> None:
    """Print the member's share until cancelled."""
    task = asyncio.current_task()
    assert task is not None
    for number in (signal.SIGINT, signal.SIGTERM):
        asyncio.get_running_loop().add_signal_handler(number, task.cancel)
    async with AsyncClient(options.target) as client:
        bucket = client.bucket(options.bucket)
        # An error when there is no server. Once this was answered, a server that is away is waited for.
        await client.admin.partitions(bucket, [0])
        changes = bucket.changes(
            resume=Group(options.group, member=options.member, lease_seconds=options.lease_seconds),
            on_rollback="event",
            # Says also what the member owns, whenever that changes.
            on_status=say,
        )
        async with changes:
            async for event in changes:
                if isinstance(event, Change):
                    print(
                        options.member,
                        event.partition,
                        event.seqno,
                        event.op,
                        event.key,
                        flush=True,
                    )
                elif isinstance(event, Rollback):
                    print(options.member, event.partition, event.seqno, "rollback", flush=True)


def main() -> int:
    parser = argparse.ArgumentParser(description="Share the changes of a bucket.")
    parser.add_argument("--target", default="127.0.0.1:7711", help="HOST:PORT of the server")
    parser.add_argument("--bucket", default="default")
    parser.add_argument("--group", required=True, help="who shares")
    parser.add_argument("--member", required=True, help="a name that is unique in the group")
    parser.add_argument("--lease-seconds", type=float, default=30.0, help="1 to 3600")
    try:
        asyncio.run(follow(parser.parse_args()))
    except BrokenPipeError:
        # Nobody reads any more, as after "| head": what is left in the buffer goes nowhere.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
    except asyncio.CancelledError:
        say("stopped; the others go on from here")
    except UprError as error:
        say(f"group: {error}")
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
