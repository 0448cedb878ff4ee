"""MLflow as a tracker. Its own variables set it up: MLFLOW_TRACKING_URI, MLFLOW_EXPERIMENT_NAME."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from drumline.metrics.trackers.tracker import Outcome, Record, load_package

_MEDIA = "media"
_TAG = "drumline.run"
_STATUS: Mapping[Outcome, str] = {"finished": "FINISHED", "preempted": "KILLED", "failed": "FAILED"}

# What a server takes in one request.
_MAX_METRICS = 1000
_MAX_PARAMS = 100


class MLflow:
    """Settings are parameters, which MLflow never changes: they stay those that the run began with.
    Images and text are artifacts."""

    name = "mlflow"
    keeps_past = False

    def __init__(self, folder: Path, config: Mapping[str, Any]) -> None:
        self._folder = folder
        self._config = config
        self._mlflow = load_package("mlflow", tracker="mlflow")

        # Else it prints the server's address at the end, and a password that is in it.
        variables = load_package("mlflow.environment_variables", tracker="mlflow")
        variables.MLFLOW_SUPPRESS_PRINTING_URL_TO_STDOUT.set(True)

        self._client: Any = None
        """None: the run has not begun."""

        self._run = ""
        """The id that MLflow gave it; empty: it has not begun."""

        self._params: Mapping[str, str] = {}
        """What MLflow has already."""

        self._is_continued = False
        """Whether an earlier start of the run began it."""

        self._steps: dict[str, set[int]] = {}
        """By name, the steps that MLflow has, where it was asked."""

    def open(self, run: str, *, resume_step: int) -> str:
        """Add the settings that MLflow does not have."""
        if not self._run:
            self._begin(run)

        missing = []
        for name, value in self._config.items():
            if name not in self._params:
                missing.append(self._mlflow.entities.Param(name, str(value)))

        for batch in _batches(missing, _MAX_PARAMS):
            self._client.log_batch(self._run, params=batch, synchronous=True)

        return f"run {self._run}"

    def _begin(self, run: str) -> None:
        """Start MLflow's run with this tag, or continue it."""
        self._client = self._mlflow.MlflowClient()
        tag_filter = f"tags.`{_TAG}` = '{run}'"
        earlier_runs = self._mlflow.search_runs(filter_string=tag_filter, output_format="list")
        self._is_continued = bool(earlier_runs)

        if earlier_runs:
            started = self._mlflow.start_run(run_id=earlier_runs[0].info.run_id)
        else:
            name = self._folder.resolve().name
            started = self._mlflow.start_run(run_name=name, tags={_TAG: run})

        self._run = started.info.run_id
        self._params = started.data.params

    def has(self, name: str, step: int) -> bool:
        """Of a run that MLflow continues it is asked, once for each name."""
        if not self._is_continued:
            return False

        if name not in self._steps:
            history = self._client.get_metric_history(self._run, _allowed(name))
            self._steps[name] = {metric.step for metric in history}
        return step in self._steps[name]

    def write(self, records: Sequence[Record]) -> None:
        """Numbers first, in few requests; then each artifact."""
        metrics = [metric for record in records for metric in self._metrics_of(record)]
        for batch in _batches(metrics, _MAX_METRICS):
            self._client.log_batch(self._run, metrics=batch, synchronous=True)

        for record in records:
            self._write_artifacts(record)
            for name in self._steps.keys() & record.values.keys():
                self._steps[name].add(record.step)

    def _metrics_of(self, record: Record) -> Iterator[Any]:
        """The numbers of a record."""
        milliseconds = int(record.time * 1000)
        for name, value in record.values.items():
            if isinstance(value, float):
                allowed_name = _allowed(name)
                yield self._mlflow.entities.Metric(allowed_name, value, milliseconds, record.step)

    def _write_artifacts(self, record: Record) -> None:
        """Its images and texts, as `media/NAME-00000040.txt`."""
        for name, value in record.values.items():
            if isinstance(value, Path):
                self._client.log_artifact(self._run, str(value), _MEDIA)
            elif isinstance(value, str):
                file_name = re.sub(r"[^A-Za-z0-9_.-]+", "-", name)
                file = f"{_MEDIA}/{file_name}-{record.step:08d}.txt"
                self._client.log_text(self._run, value, file)

    def close(self, outcome: Outcome) -> None:
        """As MLflow names the outcomes: a run that was preempted is `KILLED`."""
        self._mlflow.end_run(_STATUS[outcome])


def _batches(values: list[Any], size: int) -> Iterator[list[Any]]:
    for start in range(0, len(values), size):
        yield values[start : start + size]


def _allowed(name: str) -> str:
    """The name in the letters that MLflow takes."""
    return re.sub(r"[^\w./: -]", "_", name, flags=re.ASCII)
