"""How numbers and commands read."""

from __future__ import annotations

import math

import pytest

from drumline.base import text
from drumline.metrics import display


@pytest.mark.parametrize(
    ("seconds", "words"),
    [
        (0.0, "0 ms"), (0.0412, "41 ms"), (0.9994, "999 ms"), (0.9999, "1.0 s"), (9.94, "9.9 s"), (9.96, "10 s"),
        (59.4, "59 s"), (59.6, "1 min 00 s"), (725, "12 min 05 s"), (3599.9, "1 h 00 min"), (12000, "3 h 20 min"),
        (90000, "1 d 01 h"),
    ],
)  # fmt: skip
def test_durations(seconds: float, words: str) -> None:
    assert text.duration(seconds) == words


@pytest.mark.parametrize(
    ("seconds", "words"),
    [
        (0.2, "0:00"),
        (41, "0:41"),
        (725, "12:05"),
        (12011, "3:20:11"),
        (math.inf, "-:--"),
        (math.nan, "-:--"),
    ],
)
def test_clocks(seconds: float, words: str) -> None:
    assert text.clock(seconds) == words


@pytest.mark.parametrize(
    ("num_bytes", "words"),
    [(0, "0 B"), (999, "999 B"), (1000, "1 kB"), (1412345, "1.41 MB"), (999_700, "1 MB"), (3e9, "3 GB"),
     (5e12, "5 TB")],
)  # fmt: skip
def test_file_sizes(num_bytes: float, words: str) -> None:
    assert text.file_size(num_bytes) == words


@pytest.mark.parametrize(
    ("value", "words"),
    [
        (2.30259, "2.3026"),
        (0.0427, "0.0427"),
        (0.04, "0.0400"),
        (1.2e-5, "1.20e-05"),
        (12345.6, "12,346"),
        (math.nan, "nan"),
    ],
)
def test_numbers(value: float, words: str) -> None:
    assert display.number_text(value) == words


def test_an_accuracy_is_a_percentage() -> None:
    assert display.metric_text("accuracy", 0.98611) == "98.61%"
    assert display.metric_text("top5_accuracy", 1.0) == "100.00%"
    assert display.metric_text("perplexity", 12.5) == "12.5000"


def test_counts_and_speeds() -> None:
    assert text.plural(1, "step") == "1 step"
    assert text.plural(1437, "step") == "1,437 steps"
    assert display.speed(8123.4) == "8,123 samples/s"
    assert display.speed(3.42) == "3.42 samples/s"


def test_the_loss_comes_first_and_the_bookkeeping_stays_out() -> None:
    event = {
        "kind": "train",
        "step": 3,
        "accuracy": 0.5,
        "lr": 0.1,
        "loss": 1.0,
        "grad_norm": 2.0,
        "run": "x",
    }

    assert list(display.metrics_of(event)) == ["loss", "accuracy"]


@pytest.mark.parametrize(
    ("train_samples", "eval_samples", "words"),
    [
        (1437, 360, "1,437 samples for training, 360 for evaluation"),
        (1437, 0, "1,437 samples for training"),
        (None, 0, "a stream for training"),
        (None, None, "a stream for training, a stream for evaluation"),
        (1437, None, "1,437 samples for training, a stream for evaluation"),
    ],
)
def test_a_stream_has_no_number_of_samples(
    train_samples: int | None, eval_samples: int | None, words: str
) -> None:
    event = {
        "task": "digits", "world_size": 1, "device": "cpu", "backend": None, "model_parameters": 9, "batch_size": 8,
        "train_samples": train_samples, "eval_samples": eval_samples, "batch_size_per_rank": 8.0, "accumulate": 1,
        "precision": "fp32", "lr": 0.1, "epochs": None, "total_steps": 20, "run": "runs/a",
    }  # fmt: skip
    rows = dict(display.opening_page(event).rows)
    assert rows["data"] == words
    assert rows["length"] == "20 steps"


@pytest.mark.parametrize(
    ("since", "words"),
    [
        (
            "command",
            "first step 6.1 s after the command: launcher 1.2 s, python and torch 4.0 s, first step 840 ms",
        ),
        (
            "rank",
            "first step 6.1 s after this rank began: launcher 1.2 s, python and torch 4.0 s, first step 840 ms",
        ),
    ],
)
def test_the_first_step_is_shown_with_all_that_counts(since: str, words: str) -> None:
    parts = {
        "launcher": 1.2,
        "python and torch": 4.0,
        "folder": 0.06,
        "data": 0.0,
        "first step": 0.84,
    }
    event = {"kind": "first_step", "seconds": sum(parts.values()), "since": since, "parts": parts}
    assert display.event_line(event) == words
