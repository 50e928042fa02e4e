"""``upr-admin token`` and ``upr-admin context``: who a server's callers are, and the servers that a person uses."""

import os
import sys
from pathlib import Path
from typing import Any

import click

from upr.service.access.identities import (
    ROLES,
    add_identity,
    read_identities,
    revoke_identity,
)
from upr_cli_kit.contexts import (
    CONTEXT_FIELDS,
    contexts_path,
    find_context,
    read_contexts,
    write_contexts,
    write_private,
)
from upr_cli_kit.options import FILE, TARGET
from upr_cli_kit.output import (
    Group,
    columns,
    not_found,
    note,
    output_options,
    print_done,
    print_result,
)
from upr_protocol.limits import check_name

_tokens_option = click.option(
    "--tokens",
    type=FILE,
    required=True,
    envvar="UPR_SERVER_TOKENS",
    show_envvar=True,
    help="The file of identities that the server was given.",
)


def _parse_roles(
    context: click.Context, parameter: click.Parameter, values: tuple[str, ...]
) -> dict[str, set[str] | None]:
    """Return the buckets of each role that ``ROLE`` or ``ROLE:BUCKET`` names; None for all."""
    found: dict[str, set[str] | None] = {}
    for value in values:
        role, colon, bucket = value.partition(":")
        if role not in ROLES:
            raise click.BadParameter(f"{role!r} is not one of {', '.join(ROLES)}.")
        if colon and not bucket:
            raise click.BadParameter(f"{value!r} names no bucket.")
        if colon:
            # No bucket will ever have another name.
            check_name(bucket, "bucket")
        if not colon:
            found[role] = None
        elif (among := found.setdefault(role, set())) is not None:
            among.add(bucket)
    return found


@click.group("token", cls=Group)
def token() -> None:
    """Add, list and revoke the identities of a server's callers."""


@token.command("add")
@click.argument("name")
@click.option(
    "--role",
    "roles",
    multiple=True,
    required=True,
    callback=_parse_roles,
    metavar="ROLE[:BUCKET]",
    help="read, write, replicate or admin, for one bucket or for all; give it several times.",
)
@click.option(
    "--certificate",
    default="",
    metavar="NAME",
    help="Known by a client certificate with this common name or alternative name, and not by a token.",
)
@click.option(
    "--out",
    type=FILE,
    help="Put the token into a new file, which only you can read, and print nothing.",
)
@click.option(
    "--key-prefix",
    "prefixes",
    multiple=True,
    help="Its roles are for keys that begin with this; give it several times.",
)
@_tokens_option
@output_options
def add(
    name: str,
    roles: dict[str, set[str] | None],
    certificate: str,
    out: Path | None,
    prefixes: tuple[str, ...],
    tokens: Path,
    as_json: bool,
) -> None:
    """Add the identity NAME, and print its new token, this once: the file keeps a hash of it.

    A running server takes the file as it is within a second.
    """
    if out is not None and certificate:
        raise click.UsageError("--out is for a token, and with --certificate there is none")
    check_name(name, "identity")
    if out is not None:
        # Before the identity is there: without a place for its token nobody could use it.
        with open(os.open(out, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600), "w") as file:
            try:
                file.write(add_identity(tokens, name, roles, prefixes=prefixes) + "\n")
            except BaseException:
                out.unlink()
                raise
        print_done(as_json, "added", name, f"its token is in {out}", token_file=str(out))
        return
    made = add_identity(tokens, name, roles, certificate, prefixes)
    try:
        if as_json or not made:
            print_done(as_json, "added", name, "known by its certificate", token=made or None)
        else:
            note(f"the token of {name!r}, which is shown only now:")
            click.echo(made)
    except BaseException:
        # Nobody has seen the token.
        revoke_identity(tokens, name)
        raise


@token.command("list")
@_tokens_option
@output_options
def list_tokens(tokens: Path, as_json: bool) -> None:
    """Show the identities and their roles."""
    documents, rows = [], []
    for one in read_identities(tokens).all:
        document: dict[str, Any] = {"name": one.name, "certificate": one.certificate or None}
        words = []
        for role, among in one.roles.items():
            document[role] = True if among is None else sorted(among)
            words.append(f"{role}: {'all' if among is None else ', '.join(sorted(among))}")
        prefixes = [prefix.decode() for prefix in one.prefixes]
        if prefixes:
            document["key_prefixes"] = prefixes
        documents.append(document)
        keys = ", ".join(f"{prefix}*" for prefix in prefixes) or "all"
        rows.append((one.name, one.certificate or "(token)", "; ".join(words) or "-", keys))
    print_result(as_json, documents, columns(("name", "known by", "roles", "keys"), rows))


@token.command("revoke")
@click.argument("name")
@_tokens_option
@output_options
def revoke(name: str, tokens: Path, as_json: bool) -> None:
    """Remove the identity NAME. Its open streams end within a second or so."""
    if not revoke_identity(tokens, name):
        raise not_found(f"identity {name!r}", "token list")
    print_done(as_json, "revoked", name)


@click.group("context", cls=Group, bare="list")
def context() -> None:
    """Keep servers and credentials under names, for yourself. Alone it is 'context list'.

    A command without --target uses the current context, and with --context NAME that one.
    """


@context.command("add")
@click.argument("name")
@click.option("--target", type=TARGET, required=True, help="HOST:PORT of the server.")
@click.option("--tls", is_flag=True, help="Encrypt, and trust the usual authorities.")
@click.option("--tls-ca", type=FILE, help="PEM file of the authorities to trust.")
@click.option("--tls-cert", type=FILE, help="PEM file to be known by.")
@click.option("--tls-key", type=FILE, help="PEM file of its key.")
@click.option("--token-file", type=FILE, help="File of the token.")
@click.option(
    "--token-stdin",
    is_flag=True,
    help="Read the token from stdin, and keep it in a file of its own.",
)
@output_options
def add_context(name: str, token_stdin: bool, as_json: bool, **fields: Any) -> None:
    """Add the context NAME, or replace it. The first one becomes the current one."""
    check_name(name, "context")
    current, contexts = read_contexts()
    if token_stdin:
        if fields["token_file"] is not None:
            raise click.UsageError("--token-stdin and --token-file do not go together")
        fields["token_file"] = _keep_token(name, sys.stdin.readline().strip())
    elif fields["token_file"] is None or fields["token_file"].absolute() != _kept_token(name):
        _drop_token(name, contexts)
    before = contexts.get(name)
    contexts[name] = {
        key: fields[key].absolute() if isinstance(fields[key], Path) else fields[key]
        for key in CONTEXT_FIELDS
        if fields[key]
    }
    write_contexts(current or name, contexts)
    target = fields["target"]
    words = target if before is None else f"{target}, in place of {before['target']}"
    print_done(as_json, "added", name, words, target=target)


def _kept_token(name: str) -> Path:
    """Return where --token-stdin puts the token of a context."""
    return contexts_path().with_name(f"{name}.token").absolute()


def _drop_token(name: str, contexts: dict[str, dict[str, Any]]) -> None:
    """Remove the file of a context's token that --token-stdin made."""
    if contexts.get(name, {}).get("token_file") == str(_kept_token(name)):
        _kept_token(name).unlink(missing_ok=True)


def _keep_token(name: str, text: str) -> Path:
    """Write a token into a file beside the contexts, which only its owner can read."""
    if not text:
        raise click.UsageError("there is no token on stdin")
    if "/" in name or name.startswith("."):
        raise click.UsageError("a context with a token of its own needs a name without '/'")
    path = _kept_token(name)
    write_private(path, text)
    return path


@context.command("use")
@click.argument("name")
@output_options
def use_context(name: str, as_json: bool) -> None:
    """Make NAME the current context."""
    _, contexts = read_contexts()
    find_context(name, contexts)
    write_contexts(name, contexts)
    print_done(as_json, "current", name)


@context.command("list")
@output_options
def list_contexts(as_json: bool) -> None:
    """Show the contexts; the current one has a star."""
    current, contexts = read_contexts()
    rows = [
        (
            "*" if name == current else " ",
            name,
            one["target"],
            "yes" if one.keys() & {"tls", "tls_ca", "tls_cert"} else "no",
            one.get("token_file", "-"),
        )
        for name, one in sorted(contexts.items())
    ]
    document = {"current": current or None, "contexts": contexts}
    print_result(as_json, document, columns(("", "name", "target", "tls", "token_file"), rows))


@context.command("remove")
@click.argument("name")
@output_options
def remove_context(name: str, as_json: bool) -> None:
    """Remove the context NAME. A file that --token-stdin made goes with it."""
    current, contexts = read_contexts()
    find_context(name, contexts)
    _drop_token(name, contexts)
    del contexts[name]
    write_contexts("" if current == name else current, contexts)
    print_done(as_json, "removed", name)
