"""docs/metrics.md, the dashboard and the alert rules are what the metrics' declarations make, and
name no metric that there is not."""

from __future__ import annotations

import json
import shutil
import subprocess
from pathlib import Path

import pytest
import yaml

from drumline.watch.sidecar.prometheus_metrics import METRICS
from tests.metrics_pages import DASHBOARD, PAGE, RULES, dashboard, metrics_in, page, rules

MADE_BY = "make metrics"


def test_the_page_has_every_metric() -> None:
    text = PAGE.read_text()
    assert text == page(text), MADE_BY
    assert metrics_in(text) == set(METRICS)


@pytest.mark.parametrize(("path", "made"), [(DASHBOARD, dashboard()), (RULES, rules())])
def test_files_are_made_from_the_declarations(path: Path, made: str) -> None:
    assert path.read_text() == made, MADE_BY
    assert metrics_in(made) <= set(METRICS)


def test_the_dashboard_shows_every_metric() -> None:
    shown = metrics_in(DASHBOARD.read_text())
    by_step = {"learning_rate", "rank_phase", "checkpoints", "checkpoint_step"}
    assert set(METRICS) - shown == by_step
    panels = json.loads(DASHBOARD.read_text())["panels"]
    assert len({panel["id"] for panel in panels}) == len(panels)


def test_every_alert_says_where(tmp_path: Path) -> None:
    (group,) = yaml.safe_load(RULES.read_text())["groups"]
    for rule in group["rules"]:
        summary = rule["annotations"]["summary"]
        assert "$labels.run" in summary or "$labels.host" in summary, rule["alert"]


CASES = """
rule_files: [{rules}]
evaluation_interval: 1m
tests:
  - interval: 1m
    input_series:
      - series: 'drumline_step{{run="r",host="h",rank="0"}}'
        values: '0+5x10 50x60'
      - series: 'drumline_heartbeat_age_seconds{{run="r",host="h",rank="0"}}'
        values: '0x10 0+60x60'
      - series: 'drumline_rank_phase{{run="r",host="h",rank="0",phase="forward"}}'
        values: '1x80'
      - series: 'drumline_rank_up{{run="r",host="h",rank="1"}}'
        values: '1x10 0x60'
      - series: 'drumline_faults_total{{run="r",host="h",alarm="stall",cause="stopped"}}'
        values: '0x10 1x60'
      - series: 'drumline_step{{run="r",host="h",rank="9"}}'
        values: '7x80'
      - series: 'drumline_rank_phase{{run="r",host="h",rank="9",phase="compile"}}'
        values: '1x80'
    alert_rule_test:
      - {{eval_time: 9m, alertname: DrumlineHang}}
      - {{eval_time: 9m, alertname: DrumlineHeartbeatOld}}
      - {{eval_time: 9m, alertname: DrumlineRankDown}}
      - eval_time: 12m
        alertname: DrumlineHang
        exp_alerts:
          - exp_labels: {{severity: warning, run: r, host: h, alarm: stall, cause: stopped}}
            exp_annotations: {{summary: "r: the watchdog has diagnosed a stall (stopped)"}}
      - eval_time: 13m
        alertname: DrumlineRankDown
        exp_alerts:
          - exp_labels: {{severity: warning, run: r, host: h, rank: 1}}
            exp_annotations: {{summary: "r: rank 1 on h has exited or is stopped"}}
      - eval_time: 20m
        alertname: DrumlineHeartbeatOld
        exp_alerts:
          - exp_labels: {{severity: warning, run: r, host: h, rank: 0}}
            exp_annotations: {{summary: "r: rank 0 on h has shown no progress for 5 minutes"}}
      - eval_time: 40m
        alertname: DrumlineNoStep
        exp_alerts:
          - exp_labels: {{severity: warning, run: r, host: h, rank: 0}}
            exp_annotations: {{summary: "r: rank 0 on h has taken no step for 15 minutes"}}
"""


def test_promtool_accepts_the_rules_and_they_fire(tmp_path: Path) -> None:
    if shutil.which("promtool") is None:
        pytest.skip("promtool is not installed (apt-get install prometheus)")
    cases = tmp_path / "cases.yml"
    cases.write_text(CASES.format(rules=RULES))
    for words in (
        ("check", "rules", RULES),
        ("check", "config", "--syntax-only", RULES.with_name("prometheus.yml")),
        ("test", "rules", cases),
    ):
        done = subprocess.run(["promtool", *words], capture_output=True, text=True, check=False)
        assert done.returncode == 0, done.stdout + done.stderr
