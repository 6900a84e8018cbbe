"""The alert rules in deploy/prometheus, by Prometheus's own tool."""

import re
import shutil
import subprocess
from pathlib import Path

import pytest
import yaml

from tests.unit.service.engines import new_metrics

RULES_FILE = Path(__file__).resolve().parents[2] / "deploy" / "prometheus" / "alerts.yml"
RULES = yaml.safe_load(RULES_FILE.read_text())["groups"][0]["rules"]
CASES = Path(__file__).with_name("alerts_test.yml")


def test_what_is_wrong_raises_its_alert_and_a_healthy_server_raises_none(tmp_path):
    promtool = shutil.which("promtool")
    if promtool is None:
        pytest.skip("promtool is not installed: Debian's package prometheus has it")
    shutil.copy(RULES_FILE, tmp_path)
    cases = shutil.copy(CASES, tmp_path)
    subprocess.run([promtool, "check", "rules", str(RULES_FILE)], check=True, capture_output=True)
    result = subprocess.run(
        [promtool, "test", "rules", cases], capture_output=True, text=True, check=False
    )
    assert result.returncode == 0, result.stdout + result.stderr


def test_every_alert_has_a_case():
    names = {test["name"] for test in yaml.safe_load(CASES.read_text())["tests"]}
    assert {rule["alert"] for rule in RULES} <= names


@pytest.mark.parametrize("rule", RULES, ids=lambda rule: rule["alert"])
def test_every_metric_of_a_rule_is_told_by_the_server(rule):
    metrics = new_metrics()
    metrics.of_texts  # noqa: B018 - it makes the metrics of texts
    told = {
        next(iter(collector.describe())).name for collector in metrics._registry._collector_to_names
    }
    names = re.findall(r"mlcd_\w+", rule["expr"])
    assert {re.sub("_(bucket|sum|count|total)$", "", name) for name in names} <= told
    assert set(rule["annotations"]) == {"summary", "remedy"}
    assert rule["labels"]["severity"] in {"page", "ticket"}
