"""Settings of ``upr-server``: command line, environment, file, ``--print-config``, and the manual's table."""

import os
import re
from pathlib import Path

import pytest
from click.testing import CliRunner

from tests.conftest import StartServer
from upr.cli import server as command
from upr.cli.server import main
from upr.config import OPTIONS, ServerConfig
from upr_client import Client
from upr_protocol.errors import InvalidArgumentError
from upr_protocol.limits import format_duration, format_size, parse_duration, parse_size

MANUAL = Path(__file__).parents[2] / "upr" / "OPERATORS.md"


@pytest.mark.parametrize(
    ("text", "seconds"),
    [
        ("500ms", 0.5),
        ("30s", 30),
        ("5m", 300),
        ("1.5h", 5400),
        ("3d", 259_200),
        ("0.1 s", 0.1),
        ("0", 0),
        ("0.25", 0.25),
    ],
)
def test_durations(text: str, seconds: float) -> None:
    assert parse_duration(text, bare=True) == seconds
    assert parse_duration(f" {text.upper()} ", bare=True) == seconds
    assert parse_duration(format_duration(seconds)) == seconds


@pytest.mark.parametrize(
    ("text", "size"),
    [
        ("0", 0),
        ("1000", 1000),
        ("7B", 7),
        ("64MiB", 64 * 2**20),
        ("32m", 32 * 2**20),
        ("1.5 GiB", 3 * 2**29),
        ("2k", 2048),
        ("1TiB", 2**40),
    ],
)
def test_sizes(text: str, size: int) -> None:
    assert parse_size(text) == parse_size(f" {text.lower()} ") == size
    assert parse_size(format_size(size)) == size


@pytest.mark.parametrize(
    "text", ["", "h", "-1s", "nan", "inf", "1w", "1h30m", "4000", "1e3s", "٣s", "0.5h", "3h"]
)
def test_what_is_no_duration_or_out_of_range(text: str) -> None:
    with pytest.raises(
        InvalidArgumentError, match=r"must be a duration of 1h to 2h.* 1\.5h or 3d"
    ) as caught:
        parse_duration(text, 3600, 7200)
    assert (", with its unit (" in str(caught.value)) == (text == "4000")


@pytest.mark.parametrize(
    "text", ["", "-1", "1MB", "1500.5", "1.3KiB", "1e3", "9" * 30, "1023", "2KiB"]
)
def test_what_is_no_size_or_out_of_range(text: str) -> None:
    with pytest.raises(InvalidArgumentError, match=r"must be a size of 1KiB to 2047B .*64MiB"):
        parse_size(text, 1024, 2047)


@pytest.mark.parametrize("text", ["0MB", "0 potatoes"])
def test_no_amount_of_what_is_no_unit_is_a_size(text: str) -> None:
    with pytest.raises(InvalidArgumentError, match="must be a size of 0 to"):
        parse_size(text)


def printed(
    *arguments: str, environment: dict[str, str] | None = None, status: int = 0
) -> dict[str, str]:
    """Return the settings that are printed, by name, with their origin; or the error as ``error``."""
    done = CliRunner().invoke(main, [*arguments, "--print-config"], env=environment)
    assert done.exit_code == status, done.output
    if status:
        assert done.stdout == ""
        assert done.stderr.count("\n") == 1
        return {"error": done.stderr}
    return dict(re.findall(r"^(\S+) = (.*)$", done.stdout, re.MULTILINE))


def test_each_origin_counts_before_the_next(tmp_path: Path) -> None:
    file = tmp_path / "server.toml"
    file.write_text(
        'data = "from the file"\ntail-bytes = "96MiB"\nflush-seconds = 0.5\npurge-hold = "4d"\n'
        'insecure = true\nreplicate-from = ["a:1", "b:2"]\nfailover-log-records = 30\n'
    )
    environment = {"UPR_SERVER_TAIL_BYTES": "1000000", "UPR_SERVER_PURGE_HOLD": "5d"}
    environment |= {"UPR_SERVER_CONFIG": str(file), "UPR_SERVER_INSECURE": "0"}
    found = printed("--purge-hold", "6d", environment=environment)
    for name, told in (
        ("data", f'"from the file"  # {file}'),
        ("flush-seconds", f'"500ms"  # {file}'),
        ("replicate-from", f'"a:1,b:2"  # {file}'),
        ("failover-log-records", f'"30"  # {file}'),
        ("tail-bytes", '"1000000B"  # UPR_SERVER_TAIL_BYTES'),
        ("insecure", "false  # UPR_SERVER_INSECURE"),
        ("purge-hold", '"6d"  # --purge-hold'),
        ("tombstone-age", '"3d"  # default'),
    ):
        assert found[name] == told


def test_what_is_printed_is_a_file_of_the_same_settings(tmp_path: Path) -> None:
    given = ["--data", 'a"b\\cü', "--flush-seconds", "0.25", "--open-admin"]
    given += ["--advertise", "h:7", "--reader-timeout", "1.5h", "--tail-bytes", "1.5MiB"]
    done = CliRunner().invoke(main, [*given, "--print-config"])
    file = tmp_path / "again.toml"
    file.write_text(done.stdout)
    again = printed("--config", str(file))
    values = {name: told.rpartition("  # ")[0] for name, told in again.items()}
    first = re.findall(r"^(\S+) = (.*)  # ", done.stdout, re.MULTILINE)
    assert values == dict(first)
    assert {told.rpartition("# ")[2] for told in again.values()} == {str(file)}


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("tail_bytes = 1", "the setting tail_bytes is unknown; is tail-bytes meant?"),
        ("[server]\nlisten = 'h:1'", "the setting server is unknown"),
        ("data-moved = true", "data-moved is for one start; give --data-moved on the command line"),
        ("qqq = 1", "'upr-server --help' lists them"),
        ("tail-bytes = '5 potatoes'", "tail-bytes: '5 potatoes' must be a size of 1B to"),
        ("tail-bytes = true", "tail-bytes is True; must be a text or a number"),
        ("purge-hold = 5", "purge-hold: '5' must be a duration of 0s to 36500d, with its unit"),
        ("insecure = 'no'", "insecure is 'no'; must be true or false"),
        ("data = 5", "data is 5; must be a text, in quotes"),
        ('data = "a\\u0000"', "data is 'a\\x00'; must be without null bytes"),
        ('tls-cert = "\\u0000"', "tls-cert is '\\x00'; must be without null bytes"),
        ("listen = 'here'", "listen: 'here' is not HOST:PORT"),
        ("log-format = 'xml'", "log-format: 'xml' is not one of"),
        ("listen =", "cannot be read: Invalid value (at end of document)"),
        ("x = " + "[" * 100_000, "cannot be read: maximum recursion depth exceeded"),
    ],
)
def test_what_a_file_cannot_say(text: str, words: str, tmp_path: Path) -> None:
    file = tmp_path / "server.toml"
    file.write_text(text)
    error = printed("--data", "x", "--config", str(file), status=2)["error"]
    assert error.startswith(f"error: {file}")
    assert words in error


@pytest.mark.parametrize("address", ["0.0.0.0:7711", "[::]:7711", "[::0]:7711", "db1:0"])
def test_an_address_that_nobody_can_call_is_not_advertised(address: str, tmp_path: Path) -> None:
    # The others would be told it, and call themselves.
    error = printed("--data", "x", "--advertise", address, status=2)["error"]
    assert f"address is {address}; must be one of this host, and a port from 1 to 65535" in error
    file = tmp_path / "server.toml"
    file.write_text(f'advertise = "{address}"\n')
    error = printed("--data", "x", "--config", str(file), status=2)["error"]
    assert error.startswith(f"error: {file}: advertise: address is {address}; must be")


@pytest.mark.parametrize(
    "address", ["0.0.0.0:7711", "[::]:7711", "[::0]:7711", "[0:0:0:0:0:0:0:0]:7711"]
)
def test_who_listens_on_every_address_has_to_advertise_one(address: str) -> None:
    assert ServerConfig(data=Path("x"), listen=address).is_unreachable
    assert not ServerConfig(data=Path("x"), listen=address, advertise="db1:7711").is_unreachable
    assert not ServerConfig(data=Path("x"), listen="[::1]:7711").is_unreachable


def test_what_the_environment_cannot_say() -> None:
    error = printed("--data", "x", environment={"UPR_SERVER_TAIL_BYTES": "0"}, status=2)["error"]
    assert "UPR_SERVER_TAIL_BYTES: tail-bytes: '0' must be a size of 1B to" in error


def test_unknown_names_elsewhere() -> None:
    # Kubernetes tells of the services upr-server, upr-server-1 and upr-server-metrics.
    known = {"UPR_SERVER_PORT_7711_TCP_ADDR": "10.0.0.1", "UPR_SERVER_SERVICE_HOST": "10.0.0.1"}
    known |= {"UPR_SERVER_1_SERVICE_HOST": "10.0.0.1", "UPR_SERVER_1_PORT_7711_TCP": "tcp://h:1"}
    known |= {"UPR_SERVER_METRICS_PORT": "tcp://h:1", "UPR_SERVER_VERSION": "1"}
    assert "data" in printed("--data", "x", environment={**known, "UPR_SERVER_VERBOSE": "1"})
    for variable, hint in (
        ("UPR_SERVER_FLUSH_SECOND", "is UPR_SERVER_FLUSH_SECONDS meant?"),
        ("UPR_SERVER_IMAGE", "'upr-server --help' lists them"),
    ):
        error = printed("--data", "x", environment={variable: "1"}, status=2)["error"]
        assert f"{variable} is unknown; unset it if it is another program's; {hint}" in error
    assert "--flush-seconds" in printed("--data", "x", "--flush-second", "1", status=2)["error"]


def test_the_directory_must_be_named(tmp_path: Path) -> None:
    file = tmp_path / "server.toml"
    file.write_text('data = ""\n')
    for given in ([], ["--config", str(file)]):
        for more in ([], ["--print-config"]):
            done = CliRunner().invoke(main, [*given, *more], env={"UPR_SERVER_DATA": ""})
            assert done.exit_code == 2
            assert "--data" in done.stderr


def test_a_file_may_begin_with_a_byte_order_mark(tmp_path: Path) -> None:
    file = tmp_path / "server.toml"
    file.write_text('data = "x"\n', encoding="utf-8-sig")
    assert printed("--config", str(file))["data"] == f'"x"  # {file}'


def test_none_may_be_written_as_nothing(tmp_path: Path) -> None:
    file = tmp_path / "server.toml"
    file.write_text('tokens = ""\nhttp = ""\nreplicate-from = []\n')
    assert {"tokens", "http", "replicate-from"} & set(
        printed("--data", "x", "--config", str(file))
    ) == set()


def test_what_is_for_one_start_is_on_the_command_line_alone() -> None:
    moved = {"UPR_SERVER_DATA_MOVED": "1"}
    error = printed("--data", "x", environment=moved, status=2)["error"]
    assert "data-moved is for one start; give --data-moved on the command line" in error
    assert "data-moved" not in printed("--data", "x", "--data-moved")


def test_a_server_takes_its_file(server_process: StartServer, tmp_path: Path) -> None:
    file = tmp_path / "server.toml"
    file.write_text('tail-bytes = "3MiB"\n')
    server = server_process("--config", str(file))
    with Client(server.target) as client:
        (bucket,) = client.admin.status().buckets
    assert bucket.tail_limit_bytes == 3 * 2**20


def test_the_file_in_the_manual(tmp_path: Path) -> None:
    file = tmp_path / "server.toml"
    file.write_text(MANUAL.read_text().partition("## Settings\n")[2].split("```\n")[1])
    found = printed("--config", str(file))
    assert found["tombstone-age"] == f'"5d"  # {file}'
    assert found["replicate-from"].startswith('"10.0.0.1:7711,10.0.0.2:7711"')


def test_the_manual_has_the_table_of_settings() -> None:
    lines = ["| option | default | |", "|---|---|---|"]
    defaults = {one.name: one.default for one in main.params}
    for name, (_, option) in OPTIONS.items():
        default = defaults[name.replace("-", "_")]
        shown = option.otherwise or (f"`{default}`" if isinstance(default, str) else "")
        lines.append(f"| `--{name}` | {shown} | {option.words.replace('|', '/')} |")
    assert "\n".join(lines) in MANUAL.read_text()


@pytest.mark.parametrize(
    ("version", "given", "found"),
    [
        ("1.79.1", None, None),
        ("1.80.0", None, "-event_engine_client,-event_engine_listener"),
        ("1.85.3", None, "-event_engine_client,-event_engine_listener"),
        ("1.85.3", "of its own", "of its own"),
        # It may not know them any more, and would say so on stderr.
        ("1.86.0.dev1", None, None),
        ("2.0.0", None, None),
    ],
)
def test_grpc_polls_where_it_can_be_asked_to(
    version: str, given: str | None, found: str | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(command, "version", lambda _: version)
    monkeypatch.setenv("GRPC_VERBOSITY", "ERROR")
    # Also if it is not there: then what the command sets is taken back at the end.
    monkeypatch.setenv("GRPC_EXPERIMENTS", given or "")
    if given is None:
        monkeypatch.delenv("GRPC_EXPERIMENTS")
    command._set_up_grpc()
    assert os.environ.get("GRPC_EXPERIMENTS") == found
    assert os.environ["GRPC_VERBOSITY"] == "ERROR"


def test_the_ready_file_of_an_earlier_start_is_gone(
    server_process: StartServer, tmp_path: Path
) -> None:
    """It says that a server is ready and where, so who waits for it must not read that of one which is not there any more."""
    running = server_process()
    ready = tmp_path / "ready"
    for data, is_there in ((running.data, True), (tmp_path / "other", False)):
        ready.write_text("127.0.0.1:1\n")
        given = ["--data", str(data), "--listen", running.target, "--ready-file", str(ready)]
        done = CliRunner().invoke(main, given)
        assert done.exit_code == 2, done.output
        # The file of a server that runs on the directory is its own.
        assert ready.exists() == is_there, done.output
