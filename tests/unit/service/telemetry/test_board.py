"""The board in deploy/grafana asks for nothing that the server does not tell."""

import json
import re
from pathlib import Path

import pytest
import yaml

from tests.unit.service.engines import new_metrics

DEPLOY = Path(__file__).resolve().parents[4] / "deploy"
BOARD = json.loads((DEPLOY / "grafana" / "dashboards" / "mlcd.json").read_text())
EXPRESSIONS = [target["expr"] for panel in BOARD["panels"] for target in panel.get("targets", ())]
PARTS = re.compile("_(bucket|sum|count)$")


def told():
    """Every metric that a server tells, with the labels of its series."""
    metrics = new_metrics()
    return {
        next(iter(collector.describe())).name: set(collector._labelnames)
        for collector in metrics._registry._collector_to_names
    }


def base(name, metrics):
    return next(
        (
            known
            for known in (name, PARTS.sub("", name), name.removesuffix("_total"))
            if known in metrics
        ),
        None,
    )


@pytest.mark.parametrize("expression", EXPRESSIONS)
def test_every_metric_and_label_of_the_board_is_told(expression):
    metrics = told()
    names = {name: base(name, metrics) for name in re.findall(r"mlcd_\w+", expression)}
    assert names
    assert None not in names.values(), names
    labels = set(re.findall(r'(\w+)=~?"', expression)) | {
        label for group in re.findall(r"by \(([^)]*)\)", expression) for label in group.split(", ")
    }
    assert labels <= {"le"}.union(*(metrics[known] for known in names.values()))
    assert ("le" in labels) == ("histogram_quantile" in expression)


def test_the_board_shows_what_was_asked_for():
    """The metrics of the design, each on some panel."""
    asked = (
        "requests request_duration_seconds queue_depth queue_wait_seconds batch_size rejected "
        "decode_duration_seconds inference_duration_seconds dropped cache_requests model_info "
        "label_lookup_duration_seconds index_search_duration_seconds"
    )
    shown = {base(name, told()) for name in re.findall(r"mlcd_\w+", " ".join(EXPRESSIONS))}
    assert {f"mlcd_{name}" for name in asked.split()} <= shown


def test_panels_do_not_lie_on_each_other():
    places = [
        (place["x"] + x, place["y"] + y)
        for place in (panel["gridPos"] for panel in BOARD["panels"])
        for x in range(place["w"])
        for y in range(place["h"])
    ]
    assert len(places) == len(set(places))
    assert len({panel["id"] for panel in BOARD["panels"]}) == len(BOARD["panels"])


def test_what_is_read_is_what_is_mounted():
    overlay = yaml.safe_load((DEPLOY / "compose" / "monitoring.yml").read_text())["services"]
    mounts = {
        volume["target"]: DEPLOY.parent / volume["source"]
        for service in overlay.values()
        for volume in service["volumes"]
        if isinstance(volume, dict)
    }
    assert all(source.exists() for source in mounts.values())
    provider = yaml.safe_load((DEPLOY / "grafana/provisioning/dashboards/mlcd.yml").read_text())[
        "providers"
    ][0]
    assert (mounts[provider["options"]["path"]] / "mlcd.json").is_file()
    assert set(overlay) == {"prometheus", "grafana"}
    source = yaml.safe_load(
        (DEPLOY / "grafana/provisioning/datasources/prometheus.yml").read_text()
    )["datasources"][0]
    assert source["url"] == "http://prometheus:9090"
