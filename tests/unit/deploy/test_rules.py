"""Prometheus's own tool reads the rules and runs their tests."""

from __future__ import annotations

import subprocess

import yaml

from tests.support.system import require
from tests.unit.deploy.exported import CHECKOUT

FOLDER = CHECKOUT / "deploy" / "prometheus"
RULES, TESTS = "specstore.rules.yml", "specstore.rules.test.yml"


def promtool(*words: str) -> str:
    """Runs it beside the rules, and returns what it prints."""
    require("prometheus")
    done = subprocess.run(["promtool", *words], cwd=FOLDER, capture_output=True, text=True, timeout=60)
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


def test_the_rules_are_rules():
    assert "13 rules found" in promtool("check", "rules", RULES)


def test_the_rules_fire_as_their_tests_say():
    assert "SUCCESS" in promtool("test", "rules", TESTS)


def test_each_alert_is_seen_firing_and_silent():
    rules = yaml.safe_load((FOLDER / RULES).read_text())["groups"][0]["rules"]
    cases = [
        case
        for test in yaml.safe_load((FOLDER / TESTS).read_text())["tests"]
        for case in test["alert_rule_test"]
    ]
    alerts = {rule["alert"] for rule in rules}
    assert {case["alertname"] for case in cases if case["exp_alerts"]} == alerts
    assert {case["alertname"] for case in cases if not case["exp_alerts"]} == alerts
