"""Every built-in task trains on two ranks, from its own defaults."""

from __future__ import annotations

import sys
import tempfile
from pathlib import Path

import numpy as np
import pytest

from drumline.config import PRESETS, read_flags, read_layers, resolve
from drumline.runs.events import read_events
from drumline.training.tasks.built_in import BUILT_IN, load_task
from tests.jobs import train_on

SHORT = (
    "--train.steps 3 --train.batch_size 8 --optim.warmup_steps 0 --log.every_steps 1 --log.display none "
    "--watch.sidecar off"
)
SMALL = {
    "digits": "--model.widths 4 --data.augment",
    "cifar10": "--model.widths 4 --model.blocks 1 --log.trackers tensorboard",
    "text": "--model.layers 1 --model.width 16 --model.heads 2 --model.context 16 --train.eval_batch_size 4096",
    "synthetic": "--model.widths 4 --data.image_size 8 --model.activation_checkpointing --data.samples 64",
    "synthetic tokens": "--data.name synthetic_tokens --model.name gpt --model.layers 1 --model.width 16 "
    "--model.heads 2 --model.context 8 --model.dropout 0.1 --data.samples 64",
}
METRICS = {
    "digits": {"loss", "accuracy"},
    "cifar10": {"loss", "accuracy"},
    "text": {"loss", "perplexity"},
    "synthetic": {"loss", "accuracy"},
    "synthetic tokens": {"loss", "perplexity"},
}


def fake_cifar10(folder: Path) -> Path:
    """The binary version with a few random records in each file."""
    random = np.random.default_rng(0)
    for name in [*(f"data_batch_{number}" for number in range(1, 6)), "test_batch"]:
        records = random.integers(0, 256, (4, 3073), dtype=np.uint8)
        records[:, 0] %= 10
        path = folder / "cifar-10-batches-bin" / f"{name}.bin"
        path.parent.mkdir(exist_ok=True, parents=True)
        path.write_bytes(records.tobytes())
    return folder


def test_every_built_in_task_is_tried() -> None:
    assert {name.split()[0] for name in SMALL} == set(BUILT_IN) == set(PRESETS)


@pytest.mark.parametrize("name", SMALL)
def test_a_built_in_task_trains(tmp_path: Path, name: str) -> None:
    task = name.split()[0]
    environment = {"DATASET_DIR": str(fake_cifar10(tmp_path / "data"))} if task == "cifar10" else {}
    flags = read_flags([*SHORT.split(), *SMALL[name].split()])
    config = resolve(
        read_layers(flags, config_file=None, environment=environment),
        PRESETS[task].defaults,
        task=task,
    )
    assert train_on(2, config, load_task(task), tmp_path / "run").step == 3
    events = list(read_events(tmp_path / "run" / "events" / "rank-00000.jsonl"))
    assert [event["step"] for event in events if event["kind"] == "train"] == [1, 2, 3]
    shares = [event["data_share"] for event in events if event["kind"] in ("train", "end")]
    assert len(shares) == 4
    assert all(0 < share <= 1 for share in shares)
    assert all(event["tflop_per_s"] > 0 for event in events if event["kind"] in ("train", "end"))
    per_sample = config.model.context if "perplexity" in METRICS[name] else 0
    assert (events[-1]["tokens_per_s"] or 0) == pytest.approx(
        per_sample * events[-1]["samples_per_s"]
    )
    assert events[-1]["metrics"].keys() == METRICS[name]
    assert any((tmp_path / "run").glob("tensorboard/*tfevents*")) == bool(config.log.trackers)


def accuracy_of_the_demo(run: Path, *flags: str) -> float:
    """What `make demo` trains, to its end."""
    quiet = ["--log.display", "none", "--watch.sidecar", "off"]
    layers = read_layers(read_flags([*quiet, *flags]), config_file=None, environment={})
    train_on(
        2, resolve(layers, PRESETS["digits"].defaults, task="digits"), load_task("digits"), run
    )
    (end,) = [e for e in read_events(run / "events" / "rank-00000.jsonl") if e["kind"] == "end"]
    return float(end["metrics"]["accuracy"])


@pytest.mark.soak
def test_the_demo_learns_to_read_digits(tmp_path: Path) -> None:
    """A small part of it; all of it, and better, is `make soak-demo`."""
    part = ("--model.widths", "16", "--train.epochs", "6", "--train.batch_size", "32")
    assert accuracy_of_the_demo(tmp_path, *part) >= 0.9


if __name__ == "__main__":
    with tempfile.TemporaryDirectory() as folder:
        reached = accuracy_of_the_demo(Path(folder))
    print(f"the demo reads {reached:.1%} of the digits")
    sys.exit(reached < 0.98)
