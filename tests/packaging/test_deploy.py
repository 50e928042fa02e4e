"""The files in ``deploy/``: metrics and commands that they name are those of real servers."""

import json
import os
import re
import shlex
import shutil
import socket
import subprocess
import sys
import zipfile
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from tests.client.certificates import make_certificate
from tests.conftest import StartServer
from tests.harness import wait_until
from tests.service.pages import ask, http_of
from upr.cli.server import main
from upr.cli.settings import config_of
from upr.config import ServerConfig
from upr_client import Client
from upr_client.backoff import LONGEST_SECONDS

ROOT = Path(__file__).resolve().parent.parent.parent
DEPLOY = ROOT / "deploy"
ALERTS = (ROOT / "deploy" / "alerts.yml").read_text()
DASHBOARD: dict[str, Any] = json.loads((ROOT / "deploy" / "grafana.json").read_text())
MANUAL = (ROOT / "upr" / "OPERATORS.md").read_text()
NAME = re.compile(r"\b(?:upr|process)_[a-z_]+\b")
# The rules are written in a part of YAML that these lines are all of.
RULE = re.compile(
    r"""      - alert: (?P<name>Upr[A-Za-z]+)
        expr: (?P<expr>\S.*)
(?:        for: \d+m
)?        labels:
          severity: (?:page|ticket)
        annotations:
          summary: "(?P<summary>[^"\\]+\.)"
          action: "(?P<action>[^"\\]+) \(OPERATORS\.md, (?P<heading>[^)]+)\)\."
"""
)
RULES = list(RULE.finditer(ALERTS))


def expressions() -> list[str]:
    """Return all expressions of the dashboard, those of its variables too."""
    found = [target["expr"] for panel in DASHBOARD["panels"] for target in panel["targets"]]
    return found + [
        variable["query"]
        for variable in DASHBOARD["templating"]["list"]
        if variable["type"] == "query"
    ]


def samples(server_process: StartServer, folder: Path) -> set[str]:
    """Return the names of all samples of a server with all ports and a consumer, of its replica, and of one of a cluster
    with TLS.
    """
    http = ("--http", "127.0.0.1:0")
    upstream = server_process(*http, "--text", "127.0.0.1:0")
    with Client(upstream.target) as client:
        client.bucket().set(b"key", b"value")
        client.admin.reset_consumer("default", "consumer", "now", create=True)
    replica = server_process(*http, "--replicate-from", upstream.target)
    there, here = http_of(upstream), http_of(replica)
    wait_until(lambda: ask(here, "/readyz").status == 200, "a replica in step")
    wait_until(lambda: "upr_peer_lag_rows{" in ask(there, "/metrics").body, "a replica")
    make_certificate(folder)
    tls = "--tls-cert", str(folder / "chain.pem"), "--tls-key", str(folder / "key.pem")
    alone = http_of(server_process(*http, "--cluster", "etcd://127.0.0.1:9/prod", *tls))
    text = "".join(ask(address, "/metrics").body for address in (there, here, alone))
    return {
        line.partition(" ")[0].partition("{")[0] for line in text.splitlines() if line[0] != "#"
    }


def test_every_metric_that_is_named_exists(server_process: StartServer, tmp_path: Path) -> None:
    exposed = samples(server_process, tmp_path)
    seeing = MANUAL.partition("## Seeing")[2].partition("\n## ")[0]
    for text in (*expressions(), *(rule["expr"] for rule in RULES)):
        named = set(NAME.findall(text))
        assert named - exposed == set(), text
    families = {re.sub(r"_(bucket|count|sum)$", "", name) for name in exposed}
    assert {n for n in NAME.findall(seeing) if n not in families} == set()


def test_every_metric_that_is_named_is_in_the_table_of_the_manual() -> None:
    rows = "".join(
        line for line in MANUAL.splitlines() if line.startswith(("| `upr_", "| `process_"))
    )
    told = set(NAME.findall(rows))
    for text in (*expressions(), *(rule["expr"] for rule in RULES)):
        families = {re.sub(r"_(bucket|count|sum)$", "", name) for name in NAME.findall(text)}
        assert families - told == set(), text


def test_the_rules_have_their_form() -> None:
    head = ALERTS[: ALERTS.index("      - alert")]
    assert head.splitlines()[1:] == ["groups:", "  - name: upr", "    rules:"]
    assert head + "".join(rule[0] for rule in RULES) == ALERTS
    assert len({rule["name"] for rule in RULES}) == len(RULES) > 10
    for rule in RULES:
        for opening, closing in ("()", "{}", "[]"):
            assert rule["expr"].count(opening) == rule["expr"].count(closing), rule["expr"]


def test_what_a_rule_tells_of_its_value_can_be_read() -> None:
    """As it stands Prometheus writes 9.31594239e+08, and 4.002397394136808."""
    assert len(re.findall(r"\$value\b", ALERTS)) > 5
    assert re.findall(r"\$value(?! \| humanize)", ALERTS) == []


def test_a_consumer_that_is_behind_is_one_alarm_of_a_set() -> None:
    """Replicas have the positions of consumers too, and would tell it once more each."""
    (rule,) = [rule["expr"] for rule in RULES if "upr_consumer_lag_rows" in rule["expr"]]
    assert rule.endswith(' and on (instance) upr_active{job="upr"} == 1')


def test_one_writer_that_tries_again_and_again_is_enough_for_an_alarm() -> None:
    """Its pauses grow, and what it is refused for lasts."""
    (rule,) = (rule for rule in RULES if rule["name"] == "UprWritesRefused")
    refused = re.match(r'increase\(upr_refusals_total\{.*"(.*)"\}\[(\d)m\]\) > 0 or ', rule["expr"])
    assert refused is not None
    assert {"NO_ROOM", "QUOTA_EXCEEDED"} < {*refused[1].split("|")}
    assert 60 * int(refused[2]) > 4 * LONGEST_SECONDS


def test_every_alarm_is_in_the_manual() -> None:
    headings = re.findall(r"^## (.+)$", MANUAL, re.MULTILINE)
    seeing = MANUAL.partition("## Seeing")[2].partition("\n## ")[0]
    assert sorted(re.findall(r"^\| `(Upr\w+)`", seeing, re.MULTILINE)) == sorted(
        rule["name"] for rule in RULES
    )
    for rule in RULES:
        assert rule["heading"] in headings


def test_the_panels_of_the_dashboard_are_whole() -> None:
    ids = [panel["id"] for panel in DASHBOARD["panels"]]
    places = {(panel["gridPos"]["x"], panel["gridPos"]["y"]) for panel in DASHBOARD["panels"]}
    assert len(set(ids)) == len(places) == len(ids) > 15
    for panel in DASHBOARD["panels"]:
        assert panel["title"]
        assert panel["targets"]
        assert all('job="upr"' in target["expr"] for target in panel["targets"])


def settings(arguments: list[str], environment: dict[str, str] | None = None) -> ServerConfig:
    """Return what upr-server makes of a command line, which must be right."""
    with pytest.MonkeyPatch.context() as patch:
        for name, value in (environment or {}).items():
            patch.setenv(name, value)
        context = main.make_context("upr-server", list(arguments))
    return config_of(context.params)


UNIT = (DEPLOY / "upr-server.service").read_text()
CONTAINER = (DEPLOY / "Containerfile").read_text()
INSTRUCTION = re.compile(r"^([A-Z]+) ((?:.*\\\n)*.*)$", re.MULTILINE)
COMPOSED = {name: (DEPLOY / name).read_text() for name in ("compose.yml", "compose-set.yml")}


def last(instruction: str) -> str:
    """Return the arguments of the last instruction of a name in the container file."""
    told: list[str] = [told for name, told in INSTRUCTION.findall(CONTAINER) if name == instruction]
    return told[-1]


def of_image() -> dict[str, str]:
    found = dict(pair.split("=", 1) for pair in last("ENV").split())
    return {name: value for name, value in found.items() if name != "PATH"}


def test_the_unit_starts_the_server_with_its_file() -> None:
    program, *arguments = shlex.split(re.findall("^ExecStart=(.*)$", UNIT, re.MULTILINE)[0])
    assert program.endswith("/bin/upr-server")
    assert arguments == ["--config", "/etc/upr/server.toml"]
    found = settings(["--config", str(DEPLOY / "server.toml")])
    (state,) = re.findall("^StateDirectory=(.*)$", UNIT, re.MULTILINE)
    assert found.data == Path("/var/lib") / state
    assert (found.http, found.log_format) == ("127.0.0.1:9711", "json")
    # What stands in comments is right too.
    lines = (DEPLOY / "server.toml").read_text().replace("# ", "").splitlines()
    told = [line for line in lines if re.match(r"[a-z-]+ = ", line)]
    assert len(told) == 9
    for line in told:
        name, value = line.split(" = ")
        settings([f"--{name}", json.loads(value), "--data", "x"])


@pytest.mark.skipif(shutil.which("systemd-analyze") is None, reason="there is no systemd")
def test_systemd_understands_the_unit(tmp_path: Path) -> None:
    program = Path(sys.executable).with_name("upr-server")

    def verified(text: str) -> tuple[int, str]:
        unit = tmp_path / "upr-server.service"
        unit.write_text(text.replace("/opt/upr/bin/upr-server", str(program)))
        command = ["systemd-analyze", "verify", str(unit)]
        done = subprocess.run(command, capture_output=True, text=True, check=False)
        return done.returncode, done.stderr

    assert verified(UNIT) == (0, "")
    assert "LokPersonality" in verified(UNIT.replace("LockPersonality", "LokPersonality"))[1]
    command = ["systemd-analyze", "security", "--offline=true", "--threshold=20"]
    verified(UNIT)
    subprocess.run([*command, str(tmp_path / "upr-server.service")], check=True)


@pytest.mark.parametrize("mark", ["", "@"], ids=["a file", "abstract"])
def test_systemd_is_told_when_the_server_serves_and_stops(
    mark: str, server_process: StartServer, tmp_path: Path
) -> None:
    with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as manager:
        path = f"{mark}{tmp_path / 'notify'}"
        manager.bind(path.replace("@", "\0"))
        manager.settimeout(60)
        server = server_process(environment={"NOTIFY_SOCKET": path})
        assert manager.recv(100) == b"READY=1"
        assert server.terminate() == 0
        assert manager.recv(100) == b"STOPPING=1"


def test_the_container_runs_the_server_as_nobody_special() -> None:
    assert last("USER") == "7711:7711"
    assert last("STOPSIGNAL") == "SIGTERM"
    assert last("VOLUME") == of_image()["UPR_SERVER_DATA"] == "/data"
    program, *options = json.loads(last("ENTRYPOINT"))
    assert program == "upr-server"
    found = settings(options, of_image())
    assert not options
    assert (found.data, found.listen) == (Path("/data"), "127.0.0.1:7711")
    assert f"http://{found.http}/healthz" in last("HEALTHCHECK")
    assert last("EXPOSE") == "7711"
    # Every line is an instruction, the rest of one, a comment, or empty.
    rest = INSTRUCTION.sub("", CONTAINER)
    assert [line for line in rest.splitlines() if line and not line.startswith("#")] == []


def test_what_is_copied_into_the_image_can_be_installed(tmp_path: Path) -> None:
    copied = [told.split() for name, told in INSTRUCTION.findall(CONTAINER) if name == "COPY"]
    lines = (ROOT / ".dockerignore").read_text().splitlines()[1:]
    taken = {source for *sources, _ in copied for source in sources if "=" not in source}
    # What is in no image, and not even sent to its builder: secrets, and what was compiled for this machine.
    assert lines[0] == "*"
    assert {line[1:] for line in lines if line[0] == "!"} == taken - {"/opt/upr"}
    left_out = [line.removeprefix("**/") for line in lines if line[0] not in "!" and line != "*"]
    assert "*.so" in left_out
    for *sources, place in copied:
        for source in sources:
            if sources[0] == "--from=build":
                continue
            target = tmp_path / place.removeprefix("/")
            if (ROOT / source).is_dir():
                shutil.copytree(ROOT / source, target, ignore=shutil.ignore_patterns(*left_out))
            else:
                to = target / source if place.endswith("/") else target
                to.parent.mkdir(parents=True, exist_ok=True)
                shutil.copy(ROOT / source, to)
    assert "/opt/upr/bin/pip install --no-cache-dir '/src[server]'" in CONTAINER
    build = [sys.executable, "-m", "hatchling", "build", "-t", "wheel", "-d", str(tmp_path)]
    environment = {**os.environ, "CC": "no-such-compiler"}
    subprocess.run(build, cwd=tmp_path / "src", env=environment, check=True, capture_output=True)
    (made,) = tmp_path.glob("*.whl")
    with zipfile.ZipFile(made) as wheel:
        names = wheel.namelist()
    assert {"upr/cli/server.py", "upr_protocol/block.py"} <= set(names)
    assert [name for name in names if name.endswith(".so")] == []


def test_git_and_the_sdist_leave_secrets_out() -> None:
    command = ["git", "check-ignore", "--quiet", "deploy/secrets/key.pem"]
    subprocess.run(command, cwd=ROOT, check=True)


def test_the_health_check_of_the_container(server_process: StartServer) -> None:
    server = server_process("--http", "127.0.0.1:0")
    program, *arguments = json.loads(last("HEALTHCHECK").partition("CMD ")[2])
    assert program == "python"
    command = [sys.executable, *arguments]
    asked = [text.replace("127.0.0.1:9711", http_of(server)) for text in command]
    # The proxy of the machine, which podman tells every container of, is not asked.
    environment = {**os.environ, "http_proxy": "http://127.0.0.1:1"}
    subprocess.run(asked, env=environment, check=True)
    assert server.terminate() == 0
    assert subprocess.run(asked, capture_output=True, check=False).returncode != 0
    for text in COMPOSED.values():
        (test,) = re.findall("^ +test: (.*)$", text, re.MULTILINE)
        assert json.loads(test) == ["CMD", program, *arguments]


@pytest.mark.parametrize("name", COMPOSED)
def test_the_services_that_are_composed(name: str) -> None:
    text = COMPOSED[name]
    given = dict(re.findall(r"^    (UPR_SERVER_[A-Z_]+): (.*)$", text, re.MULTILINE))
    services = re.findall(r"^  (upr\d?):$", text, re.MULTILINE)
    commands = [json.loads(told) for told in re.findall("^    command: (.*)$", text, re.MULTILINE)]
    assert len(commands) == len(services) == (1 if name == "compose.yml" else 3)
    _, *options = json.loads(last("ENTRYPOINT"))
    found = [settings([*options, *one], {**of_image(), **given}) for one in commands]
    for one in found:
        assert one.listen == "0.0.0.0:7711"
        # Nobody is served without a word about it.
        assert one.insecure or (one.encrypted and one.tokens and one.peer_ca and one.peer_token)
    if len(found) > 1:
        assert [one.advertise for one in found] == [f"{service}:7711" for service in services]
        for service, one in zip(services, found, strict=True):
            others = {f"{other}:7711" for other in services} - {f"{service}:7711"}
            assert set(one.replicate_from) == (others if one is not found[0] else set())
        # The first server has another command when it has lost its volume.
        (later,) = re.findall("^    # command: (.*)$", text, re.MULTILINE)
        again = settings([*options, *json.loads(later)], {**of_image(), **given})
        assert again == replace(found[0], replicate_from=("upr2:7711", "upr3:7711"))
    else:
        assert re.findall(r'ports: \["([^"]*)"', text) == ["127.0.0.1:7711:7711"]
    dockerfile = re.findall("dockerfile: ([^}]*)}", text)
    assert {(ROOT / told).exists() for told in dockerfile} == {True}
    for word in ("read_only: true", "cap_drop: [ALL]", "no-new-privileges:true"):
        assert word in text
