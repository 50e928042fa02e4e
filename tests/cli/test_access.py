"""``upr-admin token`` and ``context``, and every command against a server with TLS and identities."""

import json
import os
import re
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import click
import pytest
from click.testing import CliRunner, Result

from tests.client.certificates import make_certificate
from tests.conftest import StartServer
from tests.harness import RunningServer, wait_until
from upr.cli import admin, cat
from upr.cli import server as server_command
from upr.service.access.identities import (
    add_identity,
    digest_of,
    read_identities,
    revoke_identity,
)
from upr_backup.cli import commands as backup
from upr_spark.options import read_connection

TOKEN = "UPR_TOKEN_FILE"
COMMANDS = {"admin": admin.main, "cat": cat.main, "backup": backup.main}


class World:
    """A server with TLS and identities, and a person's environment."""

    def __init__(self, start: StartServer, folder: Path) -> None:
        self.folder = folder
        self.certificate = make_certificate(folder)
        self.ca = folder / "chain.pem"
        self.identities = folder / "identities"
        self.contexts = folder / "config" / "contexts.json"
        self.secrets: list[str] = []
        self.token("root", "read", "write", "replicate", "admin")
        options = ["--tls-cert", str(self.ca), "--tls-key", str(folder / "key.pem")]
        self.server: RunningServer = start("--tokens", str(self.identities), *options)
        self.target = self.server.target

    def run(
        self, program: str, *arguments: str, status: int = 0, stdin: str = "", **environment: str
    ) -> Result:
        """Run a command, with no more of the environment than is said; no secret may be in what it prints."""
        left_out: dict[str, str | None] = {k: None for k in os.environ if k.startswith("UPR_")}
        done = CliRunner().invoke(
            COMMANDS[program],
            arguments,
            input=stdin,
            env={**left_out, "UPR_CONTEXTS": str(self.contexts), **environment},
        )
        assert done.exit_code == status, (arguments, done.output)
        for secret in self.secrets:
            assert secret not in done.stdout + done.stderr
        return done

    def token(self, name: str, *roles: str) -> Path:
        """Add an identity, and return a file of its token."""
        chosen = [word for role in roles for word in ("--role", role)]
        done = self.run("admin", "token", "add", name, *chosen, "--tokens", str(self.identities))
        token = done.stdout.strip()
        assert token not in done.stderr
        assert token not in self.identities.read_text()
        self.secrets.append(token)
        path = self.folder / f"{name}.token"
        path.write_text(token + "\n")
        return path


@pytest.fixture
def world(server_process: StartServer, tmp_path: Path) -> World:
    return World(server_process, tmp_path)


def test_tokens_are_added_listed_and_revoked(world: World) -> None:
    tokens = ("--tokens", str(world.identities))
    world.token("loader", "read:orders", "read:users", "write")
    certified = ("--role", "read", "--certificate", "indexer.example", "--key-prefix", "a/")
    added = world.run("admin", "token", "add", "indexer", *certified, *tokens)
    assert added.stdout == "added: indexer, known by its certificate\n"
    again = world.run("admin", "token", "add", "loader", "--role", "read", *tokens, status=4)
    assert again.stderr == "error: there is an identity 'loader' already\n"
    listed = world.run("admin", "token", "list", *tokens).stdout.splitlines()
    roles = ["read:", "orders,", "users;", "write:", "all"]
    assert listed[2].split() == ["loader", "(token)", *roles, "all"]
    found = json.loads(world.run("admin", "token", "list", "--json", *tokens).stdout)
    assert found[1:] == [
        {"name": "loader", "certificate": None, "read": ["orders", "users"], "write": True},
        {
            "name": "indexer",
            "certificate": "indexer.example",
            "read": True,
            "key_prefixes": ["a/"],
        },
    ]
    assert world.identities.stat().st_mode & 0o777 == 0o600
    with world.identities.open("a") as file:
        file.write("# by hand\n")
    world.run("admin", "token", "revoke", "loader", *tokens)
    assert "loader" not in world.identities.read_text()
    assert "# by hand" in world.identities.read_text()
    assert (
        "there is no identity"
        in world.run("admin", "token", "revoke", "loader", *tokens, status=3).stderr
    )


def test_commands_at_once_lose_nothing_and_links_stay(tmp_path: Path) -> None:
    path, link = tmp_path / "identities", tmp_path / "link"
    link.symlink_to(path)
    names = [f"n{i}" for i in range(16)]
    with ThreadPoolExecutor(8) as pool:
        list(pool.map(lambda name: add_identity(link, name, {"read": None}), names))
        assert {one.name for one in read_identities(path).all} == set(names)
        assert all(pool.map(lambda name: revoke_identity(link, name), names[1:]))
    assert [one.name for one in read_identities(path).all] == names[:1]
    assert link.is_symlink()
    assert sorted(file.name for file in tmp_path.iterdir()) == ["identities", "link"]


def test_a_token_goes_into_a_file_of_ones_own(world: World) -> None:
    out = world.folder / "new.token"
    add = ("admin", "token", "add", "new", "--role", "read", "--tokens", str(world.identities))
    assert world.run(*add, "--out", str(out)).stdout == f"added: new, its token is in {out}\n"
    assert out.stat().st_mode & 0o777 == 0o600
    assert digest_of(out.read_text().strip()) in world.identities.read_text()
    # Neither a file that is there nor an identity without a token.
    before = world.identities.read_text(), out.read_text()
    world.run(*add[:3], "newer", *add[4:], "--out", str(out), status=4)
    world.run(*add, "--out", str(world.folder / "other"), status=4)
    assert (world.identities.read_text(), out.read_text()) == before
    assert not (world.folder / "other").exists()


def test_the_commands_with_tls_and_a_token(world: World) -> None:
    """By options, by the environment, and refused without."""
    here = ("--target", world.target)
    shown = ("--tls-ca", str(world.ca), "--token-file", str(world.folder / "root.token"))
    by_environment: dict[str, Any] = {
        "UPR_TARGET": world.target,
        "UPR_TLS_CA": str(world.ca),
        TOKEN: str(world.folder / "root.token"),
    }
    rows = '{"key": "k", "value": "v"}\n'
    world.run("cat", "load", "jsonl", "-", *here, *shown, stdin=rows)
    followed = world.run("cat", "follow", "--until-now", **by_environment).stdout
    assert json.loads(followed.splitlines()[0])["key"] == "k"
    world.run("admin", "status", *here, *shown)
    (token,) = world.secrets
    world.run("admin", "partitions", "5", *here, "--tls-ca", str(world.ca), UPR_TOKEN=token)
    world.run("admin", "topology", **by_environment)
    repository = str(world.folder / "repository")
    world.run("backup", repository, "init", **by_environment)
    unnamed = world.run("backup", repository, "backup", *shown, status=2)
    assert "needs --target" in unnamed.stderr
    world.run("backup", repository, "verify", "--against-server", *shown, status=2)
    world.run("backup", repository, "backup", "--processes", "2", *here, *shown)
    world.run("admin", "bucket", "create", "another", **by_environment)
    world.run("backup", repository, "restore", "--bucket", "another", *here, *shown)
    world.run("backup", repository, "verify", "--against-server", *here, *shown)
    for file in Path(repository).rglob("*"):
        assert not file.is_file() or token.encode() not in file.read_bytes()
    refused = world.run("admin", "status", *here, "--tls-ca", str(world.ca), status=4)
    assert "takes a token" in refused.stderr
    # Not encrypted, and not trusted.
    world.run("admin", "status", *here, status=5)
    world.run("admin", "status", *here, "--tls", *shown[2:], status=5)
    half = world.run("admin", "status", *here, "--tls-cert", str(world.ca), status=2)
    assert "certificate and key" in half.stderr
    assert token not in world.server.log_text()


def test_what_is_wrong_with_the_tls_of_a_command_is_said(world: World) -> None:
    other = world.folder / "other"
    other.mkdir()
    make_certificate(other)
    key, cert = other / "key.pem", other / "chain.pem"
    port = world.target.rpartition(":")[2]
    more: tuple[object, ...]
    for target, ca, more, words in (
        (world.target, cert, (), "certificate is not trusted (is --tls-ca its authority?)"),
        (
            world.target,
            world.ca,
            ("--tls-cert", world.ca, "--tls-key", key),
            "does --tls-key belong",
        ),
        (f"localhost:{port}", world.ca, (), "its certificate is for another name"),
    ):
        asked = ("--target", target, "--tls-ca", str(ca), *map(str, more))
        assert words in world.run("admin", "status", *asked, status=5).stderr


def test_spark_connects_with_tls_and_a_token(world: World) -> None:
    options = {"endpoint": world.target, "tls": "true", "tls.ca": str(world.ca)}
    connection = read_connection({**options, "tokenFile": str(world.folder / "root.token")})
    with connection.open() as client:
        client.bucket("default").set(b"k", b"v")
        assert client.bucket("default").get(b"k") == b"v"
    assert world.secrets[0] not in repr(connection)


def test_contexts(world: World) -> None:
    root = ("--tls-ca", str(world.ca), "--token-file", str(world.folder / "root.token"))
    reader = world.token("reader", "read")
    wait_until(lambda: "a changed file is used" in world.server.log_text(), world.server.log_text)
    world.run("admin", "context", "add", "root", "--target", world.target, *root)
    own = ("--target", world.target, "--tls-ca", str(world.ca), "--token-stdin")
    world.run("admin", "context", "add", "reader", *own, stdin=reader.read_text())
    for file in world.contexts.parent.iterdir():
        assert file.stat().st_mode & 0o777 == 0o600
    assert world.secrets[-1] not in world.contexts.read_text()
    create = ("admin", "bucket", "create")
    world.run(*create, "a")
    # A token is for the server of its context, and goes to no other.
    world.run(*create, "b", "--target", world.target, "--tls-ca", str(world.ca), status=4)
    world.run(*create, "b", "--context", "reader", status=4)
    world.run(*create, "b", UPR_CONTEXT="reader", status=4)
    world.run("admin", "context", "use", "reader")
    world.run(*create, "b", status=4)
    listed = world.run("admin", "context", "list").stdout.splitlines()
    assert [line.split()[:2] for line in listed[1:]] == [["*", "reader"], ["root", world.target]]
    both = ("--context", "root", "--target", world.target)
    world.run(*create, "b", *both, status=2)
    # Of the environment nothing goes to the server of a context or of a directory, and what is typed counts.
    root_token, reader_token = world.secrets[0], world.secrets[1]
    world.run(*create, "c", "--context", "reader", UPR_TOKEN=root_token, status=4)
    by_root = {TOKEN: str(world.folder / "root.token")}
    world.run(*create, "c", "--context", "reader", **by_root, status=4)
    world.run(*create, "c", "--data", str(world.server.data), UPR_TOKEN=reader_token)
    world.run("admin", "status", "--target", world.target, *root, UPR_CONTEXT="reader")
    world.run("admin", "status", "--target", world.target, *root, UPR_DATA="/nowhere")
    world.run("admin", "context", "remove", "reader")
    assert [file.name for file in world.contexts.parent.iterdir()] == ["contexts.json"]
    world.run("admin", "status", "--context", "reader", status=3)
    world.run("admin", "context", "use", "root")
    world.run(*create, "b")


def test_a_context_that_is_replaced_is_told(tmp_path: Path) -> None:
    for target, told in (("a:1", "added: x, a:1\n"), ("b:2", "added: x, b:2, in place of a:1\n")):
        command = ["context", "add", "x", "--target", target]
        environment = {"UPR_CONTEXTS": str(tmp_path / "contexts.json")}
        assert CliRunner().invoke(admin.main, command, env=environment).stdout == told


@pytest.mark.parametrize("name", ["a\0", "\ud800", 5])
def test_a_file_of_contexts_with_what_is_no_path_is_malformed(name: object, tmp_path: Path) -> None:
    file = tmp_path / "contexts.json"
    fields = {"target": "127.0.0.1:1", "tls_ca": name}
    file.write_text(json.dumps({"current": "x", "contexts": {"x": fields}}))
    done = CliRunner().invoke(admin.main, ["status"], env={"UPR_CONTEXTS": str(file)})
    assert (done.exit_code, done.stderr) == (
        2,
        f"error: the file of contexts {file} is malformed (remove it, and add the contexts again)\n",
    )


@pytest.mark.parametrize(
    ("command", "words"), [(["context"], "malformed"), (["token", "list"], "no JSON object")]
)
def test_a_file_of_brackets_is_no_error_of_the_program(
    command: list[str], words: str, tmp_path: Path
) -> None:
    file = tmp_path / "file"
    file.write_text("[" * 100_000)
    names = ("UPR_CONTEXTS", "UPR_SERVER_TOKENS")
    done = CliRunner().invoke(admin.main, command, env=dict.fromkeys(names, str(file)))
    assert done.exit_code == 2, done.stderr
    assert words in done.stderr


def test_takeovers_and_backups_take_a_context_by_its_name(world: World) -> None:
    root = ("--tls-ca", str(world.ca), "--token-file", str(world.folder / "root.token"))
    world.run("admin", "context", "add", "root", "--target", world.target, *root)
    world.run("admin", "context", "use", "root")
    repository = ("backup", str(world.folder / "repository"))
    # The current one is for what a person does at a terminal: a backup goes to the server that its repository names.
    missing = world.run(*repository, "init", status=2)
    assert "'--target'" in missing.stderr
    assert "--context" in missing.stderr
    world.run(*repository, "init", "--context", "root", "--target", world.target, status=2)
    world.run(*repository, "init", "--context", "root", UPR_TARGET="127.0.0.1:9")
    assert "needs --target or --context" in world.run(*repository, "backup", *root, status=2).stderr
    world.run(*repository, "backup", UPR_CONTEXT="root", UPR_TOKEN="upr_made-up")
    world.run(*repository, "verify", "--against-server", "--context", "root")
    world.run(*repository, "restore", "--context", "root", "--bucket", "another", "--create-bucket")
    there = ("admin", "takeover", "--to", world.target)
    assert "takes a token" in world.run(*there, "--tls-ca", str(world.ca), status=4).stderr
    assert world.run(*there, "--context", "root").stdout == f"active: {world.target}, epoch 1\n"


def test_no_command_takes_a_secret_as_an_argument() -> None:
    """Everyone on the machine sees arguments; secrets come out of files."""

    def options_of(command: Any) -> Iterator[Any]:
        yield from command.params
        for child in getattr(command, "commands", {}).values():
            yield from options_of(child)

    commands = (admin.main, cat.main, server_command.main, backup.main)
    found = {
        name: option.type
        for command in commands
        for option in options_of(command)
        for name in option.opts
        if re.search("token|tls-key|password|secret", name)
    }
    assert {"--token-file", "--tokens", "--tls-key"} <= found.keys()
    for name, kind in found.items():
        assert isinstance(kind, click.Path | click.types.BoolParamType), name
