"""The dashboard and the alerts read what the product exports."""

from __future__ import annotations

import json
import re
import runpy

import pytest
import yaml

pytest.importorskip("promql_parser", reason="needs promql-parser, which reads the expressions")

from tests.unit.deploy import exported, promql  # noqa: E402
from tests.unit.docs.test_pages import anchors  # noqa: E402

DEPLOY = exported.CHECKOUT / "deploy"
DASHBOARD = json.loads((DEPLOY / "grafana" / "specstore.json").read_text())
PANELS = [panel for panel in DASHBOARD["panels"] if panel["type"] != "row"]
RULES = yaml.safe_load((DEPLOY / "prometheus" / "specstore.rules.yml").read_text())
ALERTS = [rule for group in RULES["groups"] for rule in group["rules"]]
# Of DOUBLE, MIRROR or a GPU alone, or what another figure of the same panel says already.
NOT_SHOWN = {
    "specstore_draft_guesses",
    "specstore_draft_messages",
    "specstore_draft_phrase_tokens",
    "specstore_draft_prefill_seconds",
    "specstore_draft_prefilled_tokens",
    "specstore_draft_rows",
    "specstore_early_exit_tokens",
    "specstore_early_outcomes",
}


@pytest.fixture(scope="module")
def metrics() -> exported.Exported:
    sglang = exported.of_sglang()
    if not sglang:
        pytest.skip("needs SGLang, whose own metrics the dashboard shows too")
    return exported.of_the_service() | exported.of_sharing() | exported.of_the_engine() | sglang


@pytest.fixture(scope="module")
def values() -> set[str]:
    return exported.strings_of_the_code()


def at_an_interval(expression: str) -> str:
    return expression.replace("$__rate_interval", "5m")


@pytest.mark.parametrize("panel", PANELS, ids=lambda panel: panel["title"])
def test_a_panel_reads_what_is_exported(panel, metrics, values):
    for target in panel["targets"]:
        shown = re.findall(r"\{\{(\w+)\}\}", target["legendFormat"])
        assert promql.problems(at_an_interval(target["expr"]), metrics, values, shown) == []


@pytest.mark.parametrize("alert", ALERTS, ids=lambda alert: alert["alert"])
def test_an_alert_reads_what_is_exported(alert, metrics, values):
    shown = re.findall(r"\$labels\.(\w+)", alert["annotations"]["summary"])
    assert promql.problems(alert["expr"], metrics, values, shown) == []


def test_the_variables_read_what_is_exported(metrics):
    queries = [
        variable["query"] for variable in DASHBOARD["templating"]["list"] if variable["type"] == "query"
    ]
    assert len(queries) == 2
    for query in queries:
        name, label = re.fullmatch(r"label_values\((\w+), (\w+)\)", query).groups()
        assert name in metrics
        assert label in promql.SCRAPED


@pytest.mark.parametrize(
    ("expression", "problem"),
    [
        ("rate(specstore_step_seconds_total[5m])", "specstore_step_seconds_total is no metric"),
        ('specstore_sessions{tier="live"}', "specstore_sessions has no label tier"),
        ('specstore_client_failures_total{reason="tardy"}', "reason is never tardy"),
        ("sum by (tier) (specstore_sessions)", "no metric has a label tier"),
        ("specstore_bytes / on (source) specstore_tokens", "no metric has a label source"),
    ],
)
def test_an_expression_that_reads_something_else_is_found(expression, problem, metrics, values):
    assert promql.problems(expression, metrics, values) == [problem]


def test_every_metric_of_the_product_is_on_the_dashboard(metrics):
    read = {
        name
        for panel in PANELS
        for target in panel["targets"]
        for name in promql.metrics(at_an_interval(target["expr"]))
    }
    endings = r"_(total|bucket|sum|count|created)$"
    of_ours = {re.sub(endings, "", name) for name in metrics if name.startswith("specstore_")}
    assert of_ours - {re.sub(endings, "", name) for name in read} == NOT_SHOWN


def test_every_alert_has_its_heading_in_the_runbook():
    page = exported.CHECKOUT / "docs" / "runbook.md"
    for alert in ALERTS:
        file, _, anchor = alert["annotations"]["runbook"].partition("#")
        assert exported.CHECKOUT / file == page
        assert anchor == alert["alert"].lower()
        assert anchor in anchors(page)
    headings = set(re.findall(r"^## (\w+)$", page.read_text(), re.MULTILINE))
    assert headings == {alert["alert"] for alert in ALERTS}


def test_the_dashboard_is_what_its_program_writes():
    pytest.importorskip(
        "grafana_foundation_sdk", reason="needs grafana-foundation-sdk, which knows Grafana's schema"
    )
    program = runpy.run_path(str(DEPLOY / "grafana" / "dashboard.py"))
    assert json.loads(program["text"]()) == DASHBOARD
