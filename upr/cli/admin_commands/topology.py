"""``upr-admin topology``, ``promote``, ``takeover`` and ``drain``: who is in a set of servers, who is active, how that changes."""

from dataclasses import asdict
from typing import TYPE_CHECKING

import click

from upr_cli_kit.options import (
    ADDRESS,
    check_of_target,
    client_option,
    login_options,
    open_client,
    target_option,
)
from upr_cli_kit.output import (
    Group,
    columns,
    confirm,
    note,
    output_options,
    print_done,
    print_json,
    print_result,
)
from upr_cli_kit.screen import watched_output_options
from upr_cli_kit.times import duration
from upr_protocol.errors import UprError
from upr_protocol.limits import ETCD_STALE_SECONDS

if TYPE_CHECKING:
    from upr_client import Client
    from upr_client.admin import Promotion, SetMember, SetPart, Topology

_COLUMNS = ("address", "directory", "state", "counted", "in step", "epoch", "lag")
_CLUSTER_COLUMNS = ("grant", "in etcd")
"""Further columns where the set is a cluster."""
_seconds_option = click.option(
    "--timeout",
    "seconds",
    type=duration(0.1),
    default="1m",
    show_default=True,
    help="How long it may take.",
)


@click.group("topology", cls=Group, bare="show")
def topology() -> None:
    """Show who is in the set of servers, or forget one. Alone it is 'topology show'."""


@topology.command("show")
@target_option
@watched_output_options
def show(target: str, as_json: bool) -> None:
    """Show who is active, who is counted, and who is behind, as far as the server knows.

    In a cluster "grant" is how long a server's grant still holds at its owner, and "in etcd" whether its key there says that
    it runs: - while etcd does not answer.
    """
    with open_client(target) as client:
        found = client.admin.topology()
    if as_json:
        print_json(asdict(found))
        return
    click.echo(f"set {found.replica_set or '-'}, epoch {found.epoch}")
    part = found.part
    if part is not None and part.cluster:
        click.echo(f"this server: {part_words(part)}")
    in_cluster = part is not None and bool(part.cluster)
    titles = (*_COLUMNS, *(_CLUSTER_COLUMNS if in_cluster else ()))
    click.echo(columns(titles, (_row(member, found, in_cluster) for member in found.members)))
    if found.waiting:
        # One that goes on all the same has trouble.
        goes_on = part is not None and part.state in ("owner", "replica")
        note(f"{'trouble' if goes_on else 'this server waits'}: {found.waiting}")
    if found.promised > found.epoch:
        note(_change_of(found))


def part_words(part: "SetPart") -> str:
    """Return the part of a server in its set, for people."""
    changes = f"{part.owner_changes} change{'' if part.owner_changes == 1 else 's'} before"
    known = f"the owner is known for {part.owner_seconds:.0f} s"
    if not part.owner_seconds:
        known = "no owner is known"
    words = [part.state, f"{part.counted} counted", known, changes]
    if part.cluster:
        words[0] = f"{part.state} in cluster {part.cluster}"
        words.append(f"etcd silent for {part.etcd_seconds:.1f} s")
        if part.state == "owner":
            words.append(f"grants for {part.grant_seconds:.1f} s")
    return ", ".join(words)


def _row(member: "SetMember", found: "Topology", in_cluster: bool) -> tuple[object, ...]:
    # Of others only the owner knows it.
    known = member.reached and (found.active or member.directory == found.directory)
    row = (
        member.address or "-",
        member.directory,
        member.state,
        *("yes" if yes else "no" for yes in (member.counted, member.in_step)),
        member.epoch or "-",
        member.lag if known else "-",
    )
    grant = f"{member.grant_seconds:.1f} s" if member.grant_seconds else "-"
    is_old = found.part is not None and found.part.etcd_seconds > ETCD_STALE_SECONDS
    key = "-" if is_old else "yes" if member.has_key else "no"
    return (*row, grant, key) if in_cluster else row


@topology.command("forget")
@click.argument("server")
@client_option
@output_options
def forget(server: str, client: "Client", as_json: bool) -> None:
    """Count SERVER no more, which will not come back: its directory, or HOST:PORT. Ask the active server.

    While a counted server is away it holds purging up, and keeps new ones from counting. Remove its data directory: if it
    came back and were promoted before it has heard of this, what was acknowledged since could be undone.
    """
    print_done(as_json, "forgotten", client.admin.forget_server(server))


def _change_of(found: "Topology") -> str:
    """Return what a change of owner has come to that is not done."""
    ends = "'upr-admin promote --target' with a counted server ends that"
    if not found.candidate:
        return f"nobody is active: epoch {found.promised} was met, and nobody has it; {ends}"
    if found.claiming:
        return (
            f"nobody is active now: {found.candidate} is becoming active in epoch {found.promised}"
        )
    back = ""
    if found.former and found.former != found.candidate:
        back = f"{found.former}, if it runs, becomes active again by itself within seconds; else "
    return f"nobody is active: {found.candidate} gave up becoming active in epoch {found.promised}; {back}{ends}"


@click.command("promote")
@click.option(
    "--force",
    is_flag=True,
    help="Go on without servers that cannot be reached; what only they have is undone when they come back.",
)
@click.option("--yes", is_flag=True, help="Do not ask, with --force.")
@_seconds_option
@target_option
@output_options
def promote(force: bool, yes: bool, seconds: float, target: str, as_json: bool) -> None:
    """Make the server at --target the active one of its set: its active server is dead.

    It hears every counted server first, so that nothing that one of them has is lost. If one cannot be reached, it is
    refused, and nothing is changed; --force goes on without it.
    """
    if force and not yes:
        confirm(
            "What only servers have that cannot be reached is undone when they come back. Go on?",
            "promote the server",
        )
    _promote(target, seconds, as_json, force=force)


@click.command("takeover")
@click.option("--to", type=ADDRESS, required=True, help="HOST:PORT of the server to be active.")
@login_options
@_seconds_option
@output_options
def takeover(to: str, seconds: float, as_json: bool) -> None:
    """Make another server the active one, without losing anything: the active one hands over.

    Writers are refused for a moment, and go on at the new one by themselves.
    """
    _promote(to, seconds, as_json, takeover=True)


@click.command("drain")
@click.option("--undo", is_flag=True, help="It may become active again.")
@_seconds_option
@target_option
@output_options
def drain(undo: bool, seconds: float, target: str, as_json: bool) -> None:
    """Have the server at --target become active no more, before it is stopped for maintenance.

    If it is active, the counted server that lacks least takes over, without losing anything. If that fails, the server may
    still be active: say it again. A restart undoes it too. Where a token is shown, --target names the other servers behind
    the one that is drained: the token goes nowhere else.
    """
    with open_client(target) as client:
        successor = client.admin.drain(undo=undo)
    first = target.partition(",")[0]
    if successor:
        hint = f"{first} is drained and active: say it again with --target {first},{successor}, if that is one of yours"
        check_of_target(successor, target, "who is to take over", f"{hint}, or --undo")
        with open_client(successor) as client:
            try:
                client.admin.promote(takeover=True, seconds=seconds)
            except UprError as error:
                # Who died just now is counted no more in a moment, and no force is needed.
                again = f"{first} is drained: say it again in some seconds, or --undo"
                error.hint = "; ".join(filter(None, (again, error.hint)))
                raise
    text = f"undrained: {first}, it may become active" if undo else f"drained: {first}"
    if successor:
        text += f", {successor} is active"
    print_result(as_json, {"drained": not undo, "successor": successor or None}, text)


def _promote(
    target: str, seconds: float, as_json: bool, *, force: bool = False, takeover: bool = False
) -> None:
    with open_client(target) as client:
        done = client.admin.promote(force=force, takeover=takeover, seconds=seconds)
    if as_json:
        document = asdict(done)
        names = ("bucket", "partition", "seqno", "high_seqno")
        document["lost"] = [dict(zip(names, one, strict=True)) for one in done.lost]
        print_json(document)
        return
    print_done(False, "active", target, f"epoch {done.epoch}")
    _tell_losses(done)


def _tell_losses(done: "Promotion") -> None:
    if done.records:
        note(f"{done.records} partitions got a failover record")
    for name in done.without:
        note(f"warning: without {name}: what only it has is undone when it comes back")
    for name in done.tables:
        note(
            f"warning: bucket {name}: the newest positions of consumers, cuts and numbers of producers may be lost;"
            " a write that is sent again may be applied twice"
        )
    for bucket, partition, seqno, high in done.lost:
        # Above 0 as well where it is not known here how much of it is there.
        what = f"{high - seqno} mutations above {seqno}" if seqno else f"mutations up to {high}"
        note(f"warning: bucket {bucket}, partition {partition}: {what} may be lost")
