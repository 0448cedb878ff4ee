"""Rewrites what is made from the metrics that drumline/watch/sidecar/prometheus_metrics.py declares:
the tables of docs/metrics.md, and the dashboard and alert rules in examples/prometheus.

make metrics
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import yaml

from drumline.watch.sidecar.prometheus_metrics import (
    OF_GPUS,
    OF_NODE,
    OF_RUN,
    PREFIX,
    MetricDeclaration,
)

ROOT = Path(__file__).parents[1]
PAGE = ROOT / "docs" / "metrics.md"
DASHBOARD = ROOT / "examples" / "prometheus" / "dashboard.json"
RULES = ROOT / "examples" / "prometheus" / "alerts.yml"
NOTE = "# Made from the metrics' declarations by `make metrics`.\n"
BEGIN = "<!-- made by make metrics -->\n"
END = "<!-- end -->\n"
TABLES = {
    "Of each rank and node": OF_NODE,
    "Of the host's GPUs": OF_GPUS,
    "Of the run, on the node of rank 0": OF_RUN,
}

# title: unit of Grafana, and what is drawn with its legend
PANELS: Mapping[str, tuple[str, Mapping[str, str]]] = {
    "Step": ("none", {"{{run}}": "max by (run) (drumline_step)"}),
    "Loss": ("none", {"{{run}}": "drumline_loss"}),
    "Samples and tokens a second": (
        "none", {"{{run}} samples": "drumline_samples_per_second", "{{run}} tokens": "drumline_tokens_per_second"},
    ),
    "MFU, waiting for data, exposed communication": (
        "percentunit",
        {
            "{{run}} MFU": "drumline_mfu_ratio", "{{run}} data": "drumline_data_wait_ratio",
            "{{run}} communication": "drumline_exposed_communication_ratio",
        },
    ),
    "Heartbeat age": ("s", {"{{run}} rank {{rank}} {{host}}": "drumline_heartbeat_age_seconds"}),
    "Ranks that have exited or are stopped": (
        "none", {"{{run}} rank {{rank}} {{host}}": "1 - drumline_rank_up"},
    ),
    "Time by phase": (
        "percentunit", {"{{run}} {{phase}}": "avg by (run, phase) (rate(drumline_phase_seconds_total[2m]))"},
    ),
    "Restarts, faults, stragglers": (
        "none",
        {
            "{{run}} restarts": "max by (run) (drumline_restarts_total)",
            "{{run}} {{alarm}}: {{cause}}": "drumline_faults_total > 0",
            "{{run}} stragglers": "drumline_stragglers_total",
        },
    ),
    "Age of the newest checkpoint": ("s", {"{{run}}": "drumline_checkpoint_age_seconds"}),
    "Checkpoints that are not in the mirror": ("none", {"{{run}}": "drumline_mirror_backlog"}),
    "GPU utilisation": ("percentunit", {"{{host}} {{gpu}}": "drumline_gpu_utilization_ratio"}),
    "GPU memory": (
        "percentunit", {"{{host}} {{gpu}}": "drumline_gpu_memory_used_bytes / drumline_gpu_memory_bytes"},
    ),
    "GPU temperature": ("celsius", {"{{host}} {{gpu}}": "drumline_gpu_temperature_celsius"}),
    "GPU throttling and ECC errors": (
        "none",
        {
            "{{host}} {{gpu}} {{reason}}": "drumline_gpu_throttled",
            "{{host}} {{gpu}} {{kind}}": "increase(drumline_gpu_ecc_errors_total[5m])",
        },
    ),
}  # fmt: skip
BUSY = "start|compile|compiled|evaluation|save|leaving|left"
# name: what is true, for how long, and what it says
ALERTS = {
    "DrumlineHang": (
        'increase(drumline_faults_total{alarm=~"stall|hang"}[10m]) > 0', "0m",
        "{{ $labels.run }}: the watchdog has diagnosed a {{ $labels.alarm }} ({{ $labels.cause }})",
    ),
    "DrumlineFailure": (
        'increase(drumline_faults_total{alarm="failure"}[10m]) > 0', "0m",
        "{{ $labels.run }}: a rank has exited ({{ $labels.cause }})",
    ),
    "DrumlineNoStep": (
        f'changes(drumline_step[15m]) == 0 unless on (run, host, rank) drumline_rank_phase{{phase=~"{BUSY}"}}', "5m",
        "{{ $labels.run }}: rank {{ $labels.rank }} on {{ $labels.host }} has taken no step for 15 minutes",
    ),
    "DrumlineHeartbeatOld": (
        f'drumline_heartbeat_age_seconds > 300 unless on (run, host, rank) drumline_rank_phase{{phase=~"{BUSY}"}}',
        "1m", "{{ $labels.run }}: rank {{ $labels.rank }} on {{ $labels.host }} has shown no progress for 5 minutes",
    ),
    "DrumlineRankDown": (
        "drumline_rank_up == 0", "1m",
        "{{ $labels.run }}: rank {{ $labels.rank }} on {{ $labels.host }} has exited or is stopped",
    ),
    "DrumlineCheckpointOld": (
        "drumline_checkpoint_age_seconds > 4 * 3600", "0m",
        "{{ $labels.run }}: the newest checkpoint is {{ $value | humanizeDuration }} old",
    ),
    "DrumlineMirrorBacklog": (
        "drumline_mirror_backlog > 0", "30m",
        "{{ $labels.run }}: {{ $value }} checkpoints are not in the mirror",
    ),
    "DrumlineGpuThermalThrottling": (
        'avg_over_time(drumline_gpu_throttled{reason="thermal"}[5m]) > 0.5', "5m",
        "GPU {{ $labels.gpu }} on {{ $labels.host }} lowers its clocks because it is hot",
    ),
    "DrumlineGpuEccErrors": (
        'increase(drumline_gpu_ecc_errors_total{kind="uncorrected"}[10m]) > 0', "0m",
        "GPU {{ $labels.gpu }} on {{ $labels.host }} has uncorrected memory errors",
    ),
}  # fmt: skip


def tables() -> str:
    parts = []
    for title, metrics in TABLES.items():
        rows = "".join(_row(name, metric) for name, metric in metrics.items())
        parts.append(f"**{title}**\n\n| metric | labels | what |\n| --- | --- | --- |\n{rows}")
    return "\n".join(parts)


def _row(name: str, metric: MetricDeclaration) -> str:
    labels = ", ".join(f"`{label}`" for label in metric.labels)
    return f"| `{PREFIX}{name}` | {labels} | {metric.doc} |\n"


def page(text: str) -> str:
    """The page with its tables as they should be."""
    before, _, rest = text.partition(BEGIN)
    _, _, after = rest.partition(END)
    return f"{before}{BEGIN}{tables()}{END}{after}"


def dashboard() -> str:
    return json.dumps(
        {
            "title": "Drumline",
            "uid": "drumline",
            "schemaVersion": 39,
            "editable": True,
            "refresh": "10s",
            "time": {"from": "now-1h", "to": "now"},
            "templating": {"list": [_data_source(), _run_variable()]},
            "panels": [_panel(number, title) for number, title in enumerate(PANELS)],
        },
        indent=1,
    ) + "\n"  # fmt: skip


def _data_source() -> dict[str, Any]:
    return {"name": "source", "type": "datasource", "query": "prometheus"}


def _run_variable() -> dict[str, Any]:
    return {
        "name": "run",
        "type": "query",
        "datasource": {"type": "prometheus", "uid": "${source}"},
        "query": "label_values(drumline_step, run)",
        "includeAll": True,
        "multi": True,
        "current": {"text": "All", "value": "$__all"},
        "refresh": 2,
    }


def _panel(number: int, title: str) -> dict[str, Any]:
    unit, drawn = PANELS[title]
    return {
        "id": number + 1,
        "title": title,
        "type": "timeseries",
        "datasource": {"type": "prometheus", "uid": "${source}"},
        "gridPos": {"x": number % 2 * 12, "y": number // 2 * 8, "w": 12, "h": 8},
        "fieldConfig": {"defaults": {"unit": unit}, "overrides": []},
        "targets": [
            {"refId": chr(ord("A") + index), "expr": of_run(expression), "legendFormat": legend}
            for index, (legend, expression) in enumerate(drawn.items())
        ],
    }


def of_run(expression: str) -> str:
    """The expression for the runs that are chosen."""
    return re.sub(r"(drumline_\w+)", r'\1{run=~"$run"}', expression)


def rules() -> str:
    alerts = [
        {
            "alert": name,
            "expr": expression,
            "for": duration,
            "labels": {"severity": "warning"},
            "annotations": {"summary": summary},
        }
        for name, (expression, duration, summary) in ALERTS.items()
    ]
    groups = {"groups": [{"name": "drumline", "rules": alerts}]}
    return NOTE + yaml.safe_dump(groups, sort_keys=False, width=1000)


def metrics_in(text: str) -> set[str]:
    """The names of metrics in a file."""
    return set(re.findall(rf"\b{PREFIX}(\w+)", text))


def main() -> None:
    PAGE.write_text(page(PAGE.read_text(encoding="utf-8")), encoding="utf-8")
    DASHBOARD.write_text(dashboard(), encoding="utf-8")
    RULES.write_text(rules(), encoding="utf-8")


if __name__ == "__main__":
    main()
