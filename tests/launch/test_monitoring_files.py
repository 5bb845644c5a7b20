"""The Grafana dashboard, alert rules and PodMonitor name what a run exports, and nothing else."""

import json
import re
from pathlib import Path

import pytest
import yaml

from rlcore.metrics.metric import Metric
from rlcore.metrics.names import METRICS
from rlcore.metrics.prometheus import ACTOR_GAUGES, exported_name
from rlcore.metrics.specs import LoggingSpec

LAUNCHERS = Path(__file__).parents[2] / "launchers"
DASHBOARD = json.loads((LAUNCHERS / "grafana-dashboard.json").read_text())
RULES = yaml.safe_load((LAUNCHERS / "alerts.yaml").read_text())["groups"][0]["rules"]
OF_THE_RUN = {"last_step_seconds", "phase_since_seconds", "planned_steps", "run"}
OF_THE_RUN |= {"attempts_total", "notes_total"}
ACTORS = {f"actor_{name}" for name in ACTOR_GAUGES}


def exported():
    def of(metric: Metric) -> str:
        return exported_name(metric.name) + ("_total" if metric.reduction == "sum" else "")

    own = {f"rlcore_{name}" for name in OF_THE_RUN | ACTORS}
    return own | {of(metric) for metric in METRICS}


def expressions():
    shown = [target["expr"] for panel in DASHBOARD["panels"] for target in panel["targets"]]
    return [*shown, *(rule["expr"] for rule in RULES)]


@pytest.mark.parametrize("expression", expressions())
def test_every_expression_names_metrics_that_a_run_exports(expression):
    names = re.findall(r"rlcore_[a-z0-9_]+", expression)
    if "__name__=~" in expression:
        assert re.fullmatch(r"rlcore_eval_.*_greedy", exported_name("eval/digits/greedy"))
        return
    if expression == 'up{job="rlcore"} == 0':  # Prometheus' own
        return
    assert names and set(names) - exported() == set()


def test_the_dashboard_has_what_grafana_requires_of_one():
    assert {"title", "uid", "schemaVersion", "panels", "templating"} <= DASHBOARD.keys()
    panels = DASHBOARD["panels"]
    assert len({panel["id"] for panel in panels}) == len(panels)
    places = {(p["gridPos"]["x"], p["gridPos"]["y"]) for p in panels}
    assert len(places) == len(panels)
    for panel in panels:
        assert panel["type"] == "timeseries" and panel["datasource"]["type"] == "prometheus"
        references = [target["refId"] for target in panel["targets"]]
        assert len(set(references)) == len(references)


def test_rules_and_monitor_have_the_fields_of_their_kinds():
    assert all(rule["alert"] and rule["annotations"]["summary"] for rule in RULES)
    text = (LAUNCHERS / "podmonitor.yaml").read_text()
    monitor = yaml.safe_load(text)
    assert (monitor["apiVersion"], monitor["kind"]) == ("monitoring.coreos.com/v1", "PodMonitor")
    assert monitor["spec"]["podMetricsEndpoints"][0]["port"] == "rlcore"
    keys = re.findall(r"logging\.(\w+)=", text)
    assert keys and set(keys) <= set(LoggingSpec.model_fields)
