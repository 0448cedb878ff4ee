"""Writes a run folder as a run leaves it, in milliseconds: for tests of what reads run folders
only."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from blake3 import blake3

from drumline.runs import manifest
from drumline.runs.manifest import FileRecord, Manifest

BEGIN = 1_790_000_000.0
START_S = 10.0
STEP_S = 0.1
RESTART_S = 8.0
LOG_EVERY = 5
SAVE_EVERY = 50
HOST = "node-a"


def write_run(
    folder: Path,
    *,
    ranks: int = 4,
    steps: int = 200,
    slow_rank: int | None = None,
    fault_at: int | None = None,
    task: str = "digits",
    metric: str = "accuracy",
    message: str = "rank 1 on node-a is slow",
    settings: Mapping[str, str] | None = None,
    ended: bool = True,
) -> Path:
    """A run that saved every 50 steps; a slow rank was slow from the middle on; after a fault it
    was restarted from the newest save."""
    (folder / "events").mkdir(parents=True)
    lines = "".join(
        f"{name} = {json.dumps(value)}\n" for name, value in (settings or {"lr": "0.1"}).items()
    )
    (folder / "config.toml").write_text(f"[optim]\n{lines}")
    where = [{"rank": rank, "host": HOST, "pid": 1, "device": "cpu"} for rank in range(ranks)]
    environment = {
        "command": ["drumline", "train", task],
        "python": "3.11.7",
        "torch": "2.13.0",
        "ranks": where,
    }
    (folder / "environment.json").write_text(json.dumps(environment))
    for rank in range(ranks):
        events: list[dict[str, Any]] = []
        first = 0 if fault_at is None else fault_at // SAVE_EVERY * SAVE_EVERY
        spans = [(0, steps)] if fault_at is None else [(0, fault_at), (first, steps)]
        moment = BEGIN
        for number, (low, high) in enumerate(spans):
            moment += START_S if number == 0 else RESTART_S
            attempt = [{"kind": "start", "step": low, "time": moment, **_start(task, ranks, steps)}]
            if number:
                attempt.append(
                    {"kind": "resume", "step": low, "time": moment, "path": "x", "epoch": 1}
                )
            attempt.append(
                {"kind": "first_step", "step": low + 1, "time": moment, **_first_step(number)}
            )
            if number:
                attempt.append(
                    {"kind": "recovered", "step": low + 1, "time": moment, **_recovered(high)}
                )
            attempt += _steps(
                range(low, high), moment, is_slow=rank == slow_rank, half=steps // 2, metric=metric
            )
            moment = attempt[-1]["time"]
            if number == len(spans) - 1 and ended:
                attempt.append(
                    {"kind": "straggler", "step": high, "time": moment, "message": message}
                )
                attempt.append({"kind": "end", "step": high, "time": moment, **_end(metric)})
            events += [
                {"number": place, "rank": rank, "host": HOST, **event}
                for place, event in enumerate(attempt)
            ]
        append(folder, rank, *events)
    return folder


METRICS = [
    "loss",
    "accuracy",
    "perplexity",
    "f1",
    "precision",
    "recall",
    "auc",
    "calibration_error",
    "brier",
    "top5_accuracy",
    "bleu",
    "rouge",
]
SETS = ("clean", "noisy", "shifted")


def write_run_of_many_metrics(folder: Path, scale: float = 1.0) -> Path:
    """Twelve metrics in training, and of three evaluation sets."""
    write_run(folder, ranks=1, settings={"lr": str(scale)})
    events = []
    for line in (folder / "events" / "rank-00000.jsonl").read_text().splitlines():
        event = json.loads(line)
        values = {
            name: scale * place / max(1, event["step"])
            for place, name in enumerate(METRICS, start=1)
        }
        if event["kind"] == "train":
            event |= values
        elif event["kind"] == "evaluation":
            del event["loss"], event["accuracy"]
            for shift, name in enumerate(SETS, start=1):
                event |= {
                    f"{name}/{metric}": value + 0.1 * shift for metric, value in values.items()
                }
        events.append(event)
    (folder / "events" / "rank-00000.jsonl").unlink()
    append(folder, 0, *events)
    return folder


def write_checkpoint(root: Path, step: int) -> Path:
    """A complete checkpoint, with an empty model."""
    folder = root / f"step-{step:08d}"
    folder.mkdir(parents=True)
    (folder / "model.safetensors").write_bytes(b"")
    files = {"model.safetensors": FileRecord(0, blake3(b"").hexdigest())}
    (folder / "manifest.json").write_bytes(manifest.render(Manifest(step, "", {}, files)))
    return folder


def append(folder: Path, rank: int, *events: Any) -> None:
    with (folder / "events" / f"rank-{rank:05d}.jsonl").open("a") as file:
        file.writelines(f"{json.dumps(event)}\n" for event in events)


def _steps(
    steps: range, moment: float, *, is_slow: bool, half: int, metric: str
) -> Iterator[dict[str, Any]]:
    for step in range(steps.start + LOG_EVERY, steps.stop + 1, LOG_EVERY):
        moment += LOG_EVERY * STEP_S
        at: dict[str, Any] = {"step": step, "time": moment}
        numbers = {
            "loss": 2 / step,
            metric: 1 - 1 / step,
            "lr": 0.1,
            "samples_per_s": 1000.0,
            "data_share": 0.01,
        }
        yield {"kind": "train", **at, "epoch": 1, "seconds_left": 1.0, **numbers}
        own = 0.07 if is_slow and step > half else 0.02
        seconds = {"data": 0.01, "forward": own, "backward": STEP_S - own - 0.02, "optimizer": 0.01}
        yield {
            "kind": "phases",
            **at,
            "phases_s": {name: LOG_EVERY * duration_s for name, duration_s in seconds.items()},
        }
        if step % SAVE_EVERY == 0:
            moment += 1.5
            at["time"] = moment
            yield {
                "kind": "evaluation",
                **at,
                "epoch": 1,
                "samples": 9,
                "seconds": 1.0,
                "loss": 3 / step,
                metric: 0.9,
            }
            yield {
                "kind": "checkpoint",
                **at,
                "path": "x",
                "bytes": 10,
                "seconds": 1,
                "copy": "host",
                "blocked_s": 0.5,
            }


def _start(task: str, ranks: int, steps: int) -> dict[str, Any]:
    job = {"task": task, "run": "runs/x", "world_size": ranks, "device": "cpu", "backend": "gloo"}
    size = {"model_parameters": 1234, "train_samples": 640, "eval_samples": 64, "batch_size": 32}
    return {**job, **size, "precision": "fp32", "lr": 0.1, "epochs": 1, "total_steps": steps}


def _first_step(number: int) -> dict[str, Any]:
    seconds = RESTART_S - 1 if number else START_S
    return {
        "seconds": seconds,
        "since": "rank" if number else "command",
        "parts": {"python and torch": seconds},
    }


def _recovered(step: int) -> dict[str, Any]:
    who = {"cause": "killed", "about_rank": 1, "about_host": HOST}
    return {**who, "seconds": RESTART_S, "seconds_to_diagnosis": 1.0, "lost_steps": 20}


def _end(metric: str) -> dict[str, Any]:
    return {
        "epoch": 1,
        "seconds": 30.0,
        "samples_per_s": 990.0,
        "metrics": {"loss": 0.1, metric: 0.9},
        "best_step": 50,
    }
