"""The files for Prometheus and Grafana, against the metrics of real servers."""

import json
import re
from pathlib import Path
from typing import Any

from tests.conftest import StartServer
from tests.harness import wait_until
from tests.service.pages import ask, http_of
from upr_client import Client

ROOT = Path(__file__).resolve().parent.parent.parent
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


def samples(server_process: StartServer) -> set[str]:
    """Return the names of all samples of a server with a consumer, and of its replica."""
    http = ("--http", "127.0.0.1:0")
    upstream = server_process(*http)
    with Client(upstream.target) as client:
        client.bucket().set(b"key", b"value")
        client.admin.reset_consumer("default", "consumer", "now", create=True)
    replica = server_process(*http, "--replicate-from", upstream.target)
    there, here = http_of(upstream), http_of(replica)
    wait_until(lambda: ask(here, "/readyz").status == 200, "a replica in step")
    wait_until(lambda: "upr_peer_lag_rows{" in ask(there, "/metrics").body, "a replica")
    text = ask(there, "/metrics").body + ask(here, "/metrics").body
    return {
        line.partition(" ")[0].partition("{")[0] for line in text.splitlines() if line[0] != "#"
    }


def test_every_metric_that_is_named_exists(server_process: StartServer) -> None:
    exposed = samples(server_process)
    seeing = MANUAL.partition("## Seeing")[2].partition("\n## ")[0]
    for text in (*expressions(), *(rule["expr"] for rule in RULES)):
        named = set(NAME.findall(text))
        assert named - exposed == set(), text
    families = {re.sub(r"_(bucket|count|sum)$", "", name) for name in exposed}
    assert {n for n in NAME.findall(seeing) if n not in families} == set()


def test_the_rules_have_their_form() -> None:
    head = ALERTS[: ALERTS.index("      - alert")]
    assert head.splitlines()[1:] == ["groups:", "  - name: upr", "    rules:"]
    assert head + "".join(rule[0] for rule in RULES) == ALERTS
    assert len({rule["name"] for rule in RULES}) == len(RULES) > 10
    for rule in RULES:
        for opening, closing in ("()", "{}", "[]"):
            assert rule["expr"].count(opening) == rule["expr"].count(closing), rule["expr"]


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
