"""Access as a server starts: files and addresses that it refuses, and where its admin socket is."""

import os
import subprocess
import sys
import time
from datetime import datetime, timedelta
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner

from tests.client.certificates import make_certificate, sign_anew
from tests.harness import RunningServer, wait_until
from tests.service.pages import http_of, numbers
from upr.cli.server import main
from upr.service.access.files import Certificates, validity_of
from upr.service.access.identities import add_identity
from upr.service.logs import EventLimit
from upr.service.server import Server
from upr_client import Client


def refused(folder: Path, *options: str, listen: str = "127.0.0.1:0") -> str:
    """Start a server in this process, which must end with status 2; return what it says."""

    async def started(_: Server) -> None:
        raise AssertionError("it would start")

    data = str(folder / "data")
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Server, "start", started)
        # The log of this process is pytest's.
        patch.setattr("upr.service.logs.configure", lambda _: EventLimit())
        done = CliRunner().invoke(main, ["--data", data, "--listen", listen, *options])
    assert done.exit_code == 2, done.output
    return done.output


@pytest.mark.parametrize("name", ["with blanks, commas and 100%", "x" * 100])
def test_data_directories_with_unusual_paths(tmp_path: Path, name: str) -> None:
    folder = tmp_path / name
    folder.mkdir()
    server = RunningServer(folder, environment={"UPR_SERVER_OPEN_ADMIN": "0"}).start()
    try:
        admin = [sys.executable, "-m", "upr.cli", "admin", "bucket", "drop", "default", "--yes"]
        done = subprocess.run([*admin, "--data", str(server.data)], capture_output=True, text=True)
        too_long = len(os.fsencode(server.data / "admin.sock")) > 107
        is_left_out = too_long or "," in str(server.data)
        assert done.returncode == (5 if is_left_out else 0), done.stderr
        assert ("there is no admin socket" in server.log_text()) == is_left_out
        if is_left_out:
            why = "must be at most 107" if too_long else "has a comma"
            assert why in server.log_text()
            assert "no admin socket" in done.stderr
    finally:
        server.close()


@pytest.mark.parametrize(
    ("line", "words"),
    [
        ('{"name": "a"}', "neither a token nor"),
        ('{"name": "a", "certificate": "c", "reads": true}', "other fields"),
        ('{"name": "a", "certificate": "c", "read": "orders"}', "must be true or a list"),
        ('{"name": "a", "certificate": "c", "replicate": ["orders"]}', "must be true"),
        ('{"name": "a", "token_sha256": "upr_abc"}', "64 hex digits"),
        ('{"name": "a", "certificate": "c", "read": true, "key_prefixes": "a"}', "list of texts"),
        ('{"name": "a", "certificate": "c", "read": true, "key_prefixes": [""]}', "not empty"),
        ('{"name": "a", "certificate": "c", "read": true, "key_prefixes": []}', "must be some"),
        (
            r'{"name": "a", "certificate": "c", "read": true, "key_prefixes": ["\udcff"]}',
            "must be UTF-8",
        ),
        (
            '{"name": "a", "certificate": "c", "admin": true, "key_prefixes": ["a"]}',
            "read and write only",
        ),
        ('{"name": "a", "certificate": "c"}\n{"name": "a", "certificate": "d"}', "name occurs"),
        (
            '{"name": "a", "certificate": "c"}\n{"name": "b", "certificate": "c"}',
            "certificate occurs",
        ),
        ("[1]", "other fields"),
        ("", "has no identity"),
        ("{", "no JSON"),
    ],
)
def test_a_malformed_file_is_refused_at_the_start(tmp_path: Path, line: str, words: str) -> None:
    file = tmp_path / "identities"
    file.write_text(f"# who may what\n\n{line}\n" if line else "\n")
    said = refused(tmp_path, "--tokens", str(file))
    assert words in said
    assert "upr_abc" not in said


@pytest.mark.parametrize(
    ("names", "words"),
    [
        (["cert"], "must be a certificate with its key"),
        (["client-ca"], "must be a certificate with its key"),
        (["cert", "other-key"], "cannot be used"),
        (["cert", "no-key"], "No such file"),
        (["cert", "key", "no-client-ca"], "No such file"),
        (["cert", "key", "own-ca", "text"], "it knows no credentials"),
    ],
)
def test_tls_that_cannot_be_is_refused_at_the_start(
    tmp_path: Path, names: list[str], words: str
) -> None:
    (tmp_path / "other").mkdir()
    make_certificate(tmp_path)
    make_certificate(tmp_path / "other")
    paths = {
        "cert": ("--tls-cert", tmp_path / "chain.pem"),
        "key": ("--tls-key", tmp_path / "key.pem"),
        "client-ca": ("--tls-client-ca", tmp_path / "chain.pem"),
        "other-key": ("--tls-key", tmp_path / "other" / "key.pem"),
        "no-key": ("--tls-key", tmp_path / "none"),
        "no-client-ca": ("--tls-client-ca", tmp_path / "none"),
        "own-ca": ("--tls-client-ca", tmp_path / "chain.pem"),
        "text": ("--text", "127.0.0.1:0"),
    }
    assert words in refused(tmp_path, *(str(part) for name in names for part in paths[name]))


@pytest.mark.parametrize("file", ["certificate", "client_ca", "peer_ca", "cluster_ca"])
def test_a_certificate_that_has_expired_is_told(tmp_path: Path, file: str) -> None:
    expired = tmp_path / file
    files = ("certificate", "client_ca", "peer_ca", "cluster_ca")
    for name in files:
        (tmp_path / name).mkdir()
        make_certificate(tmp_path / name)
    sign_anew(expired, "20250101000000Z", "20260101000000Z")
    own = tmp_path / "certificate"
    tls = ["--tls-cert", str(own / "chain.pem"), "--tls-key", str(own / "key.pem")]
    for option, name in zip(
        ("--tls-client-ca", "--peer-ca", "--cluster-ca"), files[1:], strict=True
    ):
        tls += [option, str(tmp_path / name / "chain.pem")]
    tls += ["--http", "127.0.0.1:0", "--cluster", "etcd://127.0.0.1:9/nobody"]
    shown = f"Bearer {add_identity(tmp_path / 'identities', 'a', {'read': None})}"
    server = RunningServer(tmp_path, *tls, "--tokens", str(tmp_path / "identities"))

    def told(name: str) -> dict[str, float]:
        found = numbers(http_of(server), shown)
        return {labels: value for (title, labels), value in found.items() if title == name}

    def problems(client: Client) -> list[Any]:
        found = client.admin.status().problems
        return [one for one in found if one.reason == "CERTIFICATE_EXPIRED"]

    try:
        server.start()
        with Client(f"unix:{server.data}/admin.sock") as client:
            (problem,) = problems(client)
            assert str(expired / "chain.pem") in problem.hint
            wait_until(lambda: "certificate" in server.log_text(), server.log_text)
            fine = dict.fromkeys((*files, "identities"), 0.0)
            assert told("upr_file_trouble") == fine | {file: 1.0}
            ends = told("upr_certificate_expires_timestamp_seconds")
            assert {name for name, end in ends.items() if end < time.time()} == {file}
            make_certificate(expired)
            wait_until(lambda: not problems(client), server.log_text)
            assert told("upr_file_trouble") == fine
        assert server.log_text().count("certificate expires, or has expired") == 1
    finally:
        server.close()


def test_the_authorities_of_an_etcd_that_is_not_called_are_not_read(tmp_path: Path) -> None:
    server = RunningServer(tmp_path, "--cluster-ca", str(tmp_path / "none")).start()
    server.close()


@pytest.mark.parametrize(
    ("first", "last", "before"),
    [
        ("20250101000000Z", "20250111000000Z", timedelta(days=1)),
        ("20491231000000Z", "20500110000000Z", timedelta(days=1)),
        # A tenth of it were a year.
        ("20250101000000Z", "20350101000000Z", timedelta(days=30)),
    ],
)
def test_the_end_of_a_certificate_is_told_before(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    first: str,
    last: str,
    before: timedelta,
) -> None:
    own, authorities = tmp_path / "own", tmp_path / "authorities.pem"
    own.mkdir()
    make_certificate(own)
    make_certificate(tmp_path)
    later = sign_anew(own, "20250101000000Z", "20610101000000Z")
    authorities.write_bytes(later + sign_anew(tmp_path, first, last))
    certificates = Certificates(own / "chain.pem", own / "key.pem", authorities)
    ends, hour = datetime.strptime(last, "%Y%m%d%H%M%S%z"), timedelta(hours=1)
    assert certificates.expiring.ends["client_ca"] == ends.timestamp()
    for at, reason in (
        (ends - before - hour, None),
        (ends - before + hour, "CERTIFICATE_EXPIRES"),
        (ends + hour, "CERTIFICATE_EXPIRED"),
    ):
        monkeypatch.setattr(time, "time", at.timestamp)
        assert certificates.expiring.troubles["certificate"] is None
        problem = certificates.expiring.troubles["client_ca"]
        assert (problem and problem.reason) == reason
    assert problem is not None
    assert f"{ends:%Y-%m-%d}" in str(problem)


@pytest.mark.parametrize(
    "text", [b"", b"-----BEGIN CERTIFICATE-----\nx\n-----END CERTIFICATE-----", b"\xff" * 9]
)
def test_what_tells_no_end_has_none(text: bytes) -> None:
    assert validity_of(text) is None


def test_another_address_needs_tls_and_identities(tmp_path: Path) -> None:
    make_certificate(tmp_path)
    add_identity(tmp_path / "identities", "a", {"read": None})
    tls = ["--tls-cert", str(tmp_path / "chain.pem"), "--tls-key", str(tmp_path / "key.pem")]
    tokens = ["--tokens", str(tmp_path / "identities")]
    for target, options, serves in (
        ("0.0.0.0:0", tls, False),
        ("0.0.0.0:0", tokens, False),
        ("0.0.0.0:0", [*tls, *tokens], True),
        ("0.0.0.0:0", ["--insecure"], True),
        # A socket that is no TCP: whoever connects there would be its owner.
        ("unix:7711", [*tls, *tokens], False),
    ):
        if not serves:
            words = "must be HOST:PORT" if target.startswith("unix") else "must be loopback"
            assert words in refused(tmp_path, *options, listen=target)
            continue
        server = RunningServer(tmp_path, *options)
        server.target = target
        try:
            server.start()
            assert ("--insecure" in options) == ("listening for everybody" in server.log_text())
            assert server.terminate() == 0
        finally:
            server.close()
            server.log.unlink()
