"""What rank 0 shows: live on a terminal, plain lines elsewhere, nothing if nothing is wanted."""

from __future__ import annotations

import io
import os
import pty
import re
import sys
from collections.abc import Iterator
from contextlib import closing
from typing import Any

import pytest

from drumline.metrics.display import _FAULTS, Display, PlainDisplay
from drumline.metrics.live import LiveDisplay
from drumline.training.output import make_display
from drumline.watch.diagnosis.diagnosis import Cause

TWO_NODES = "torchrun --nnodes 2 --nproc-per-node 2 --rdzv-endpoint HOST:29500 -m drumline train digits --run runs/a"
START = {
    "task": "digits", "world_size": 2, "device": "cpu", "backend": "gloo", "model_parameters": 174970,
    "train_samples": 1437, "eval_samples": 360, "batch_size": 64, "batch_size_per_rank": 32, "accumulate": 1,
    "precision": "fp32",
    "lr": 0.1, "epochs": 20, "total_steps": 460, "run": "runs/digits",
}  # fmt: skip
END = {
    "step": 460, "epoch": 20, "seconds": 41.3, "samples_per_s": 8012.0, "run": "runs/digits", "best_step": 437,
    "resume_command": "drumline train digits --run runs/digits", "two_node_command": TWO_NODES,
    "metrics": {"accuracy": 0.98611, "loss": 0.0512},
}  # fmt: skip


def event(kind: str, **fields: Any) -> dict[str, Any]:
    return {"time": 1000.0, "number": 3, "kind": kind, "rank": 0, "host": "a", "step": 0, **fields}


def train(step: int, *, time: float = 1000.0, **fields: Any) -> dict[str, Any]:
    numbers = {
        "epoch": 1,
        "loss": 2.0 / step,
        "lr": 0.0964,
        "samples_per_s": 8123.0,
        "seconds_left": 41.0,
    }
    return event("train", **{**numbers, **fields, "time": time, "step": step})


def evaluation(epoch: int) -> dict[str, Any]:
    return event(
        "evaluation",
        step=23 * epoch,
        epoch=epoch,
        loss=0.5,
        accuracy=0.9,
        samples=360,
        seconds=0.21,
    )


def on_screen(text: str) -> str:
    """What is left for the eye: no colours, no cursor movements."""
    return re.sub(r"\x1b\[[0-9;?]*[a-zA-Z]", "", text)


def cursor_is_shown(stream: io.StringIO) -> bool:
    return stream.getvalue().rfind("\x1b[?25h") >= stream.getvalue().rfind("\x1b[?25l")


@pytest.fixture
def stream() -> io.StringIO:
    return io.StringIO()


@pytest.fixture
def live(stream: io.StringIO, monkeypatch: pytest.MonkeyPatch) -> Iterator[Display]:
    monkeypatch.setenv("COLUMNS", "80")
    monkeypatch.setenv("TERM", "xterm")
    display = make_display("live", stream)
    yield display
    display.close()


def test_every_plain_event_has_its_line(stream: io.StringIO) -> None:
    display = make_display("plain", stream)
    display(event("start", **START))
    display(event("resume", step=23, epoch=2, path="runs/digits/checkpoints/step-00000023"))
    display(train(30))
    display(evaluation(3))
    display(event("checkpoint", step=46, path="x", bytes=1412345, seconds=0.031))
    copy = {"copy": "device", "blocked_s": 0.006}
    display(event("checkpoint", step=50, path="x", bytes=1412345, seconds=1.2, **copy))
    display(
        event(
            "checkpoint", step=51, path="x", bytes=1412345, seconds=1.2, **{**copy, "copy": "none"}
        )
    )
    display(event("note", message="a note"))
    display(event("warning", message="small batches"))
    display(event("straggler", message="straggler: rank 3", about_rank=3, about_host="b"))
    display(event("stall", message="stall: rank 1", about_rank=1, about_host="a"))
    display(event("error", message="printed elsewhere"))

    lines = stream.getvalue().splitlines()
    assert lines[0] == "digits on 2 ranks (cpu, gloo)"
    assert [re.sub(r"^\d\d:\d\d:\d\d ", "@ ", line) for line in lines[1:]] == [
        "  model        174,970 parameters, fp32",
        "  data         1,437 samples for training, 360 for evaluation",
        "  batch        64 a step: 2 ranks x 32",
        "  rate         0.1 at its peak",
        "  length       20 epochs, 460 steps",
        "  run folder   runs/digits",
        "@ resumed at step 23 from runs/digits/checkpoints/step-00000023",
        "@ step  30/460   loss 0.0667   lr 0.0964   8,123 samples/s   0:41 left",
        "@ epoch  3/20   loss 0.5000   accuracy 90.00%   in 210 ms",
        "@ saved step 46 (1.41 MB in 31 ms)",
        "@ saved step 50 (1.41 MB in 1.2 s, training paused 6 ms)",
        "@ saved step 51 (1.41 MB in 1.2 s)",
        "@ a note",
        "@ warning: small batches",
        "@ straggler: rank 3",
        "@ stall: rank 1",
    ]


@pytest.mark.parametrize("kind", ["plain", "live"])
@pytest.mark.parametrize(("share", "words"), [(0.124, "12%"), (0.0501, "5%"), (0.049, None)])
def test_waiting_for_data_is_shown_where_it_matters(
    stream: io.StringIO, live: Display, kind: str, share: float, words: str | None
) -> None:
    display = live if kind == "live" else make_display("plain", stream)
    display(event("start", **START))
    display(train(30, data_share=share))
    during = on_screen(stream.getvalue())
    display(event("end", **END, data_share=share))
    after = on_screen(stream.getvalue())
    assert (f"8,123 samples/s   waits for data {words}" in during) == (words is not None)
    assert (f"for data {words} of the time" in after) == (words is not None)
    assert words is not None or "for data" not in after


FAST = {
    "tokens_per_s": 1039744.0,
    "tflop_per_s": 412.3,
    "mfu": 0.4167,
    "communication_share": 0.081,
}
SLOW = {"tokens_per_s": None, "tflop_per_s": 0.01234, "mfu": None, "communication_share": 0.02}


@pytest.mark.parametrize(
    ("fields", "words", "exposed"),
    [
        (FAST, ["1,039,744 tokens/s", "412 TFLOP/s", "MFU 41.7%"], True),
        (SLOW, ["12.3 GFLOP/s"], False),
        ({"communication_share": None}, [], False),
    ],
)
def test_speeds_are_shown_as_far_as_they_are_known(
    stream: io.StringIO, fields: dict[str, float | None], words: list[str], exposed: bool
) -> None:
    display = make_display("plain", stream)
    display(event("start", **START))
    display(train(30, **fields))
    display(event("end", **END, **fields, checkpoint_pause_s=0.031, start_s=24.2))
    communication = ["exposed communication 8%"] if exposed else []
    assert (
        "   ".join(["8,123 samples/s", *words, *communication, "0:41 left\n"]) in stream.getvalue()
    )
    end = stream.getvalue().partition("done:")[2]
    assert f"  speed        {', '.join(['8,012 samples/s', *words])}\n" in end
    assert "  first step   24 s with warm-up, not part of the speed\n" in end
    assert ("  exposed      communication 8% of the time\n" in end) == exposed
    assert "  saves        paused training 31 ms in all\n" in end


@pytest.mark.parametrize(
    ("num_steps", "heading"),
    [
        (460, "done: 460 steps in 41 s"),
        (60, "done: 460 steps, the last 60 in 41 s"),
        (0, "done: 460 steps, all before this start"),
    ],
)
def test_the_time_is_that_of_the_steps_of_this_start(
    stream: io.StringIO, num_steps: int, heading: str
) -> None:
    display = make_display("plain", stream)
    display(event("start", **START))
    display(event("end", **END, num_steps=num_steps))
    assert f"{heading}\n" in stream.getvalue()


def test_the_opening_says_what_is_special(stream: io.StringIO) -> None:
    display = make_display("plain", stream)
    alone = {"world_size": 1, "backend": None, "batch_size_per_rank": 64}
    display(
        event("start", **{**START, **alone, "accumulate": 4, "epochs": None, "eval_samples": 0})
    )

    assert "digits on 1 rank (cpu)\n" in stream.getvalue()
    assert "64 a step: 1 rank x 64, in 4 micro-batches\n" in stream.getvalue()
    assert "1,437 samples for training\n" in stream.getvalue()
    assert re.search(r"length +460 steps\n", stream.getvalue())


def test_an_uneven_batch_is_shown_as_it_is(stream: io.StringIO) -> None:
    uneven = {"world_size": 3, "batch_size_per_rank": 64 / 3}
    make_display("plain", stream)(event("start", **{**START, **uneven}))

    assert "64 a step: 3 ranks x 21 or 22\n" in stream.getvalue()


def test_plain_steps_are_shown_every_few_seconds_only(stream: io.StringIO) -> None:
    display = PlainDisplay(stream)
    for step in range(1, 13):
        display(train(step, time=1000.0 + step))

    assert [line.split()[2] for line in stream.getvalue().splitlines()] == ["1/0", "6/0", "11/0"]


@pytest.mark.parametrize("mode", ["plain", "live"])
def test_the_summary_shows_results_folder_and_next_commands(
    mode: Any, stream: io.StringIO, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("COLUMNS", "80")
    with closing(make_display(mode, stream)) as display:
        display(event("start", **START))
        display(event("end", **END))

    text = on_screen(stream.getvalue())
    assert "done: 460 steps in 41 s" in text
    for label, value in [
        ("accuracy", "98.61%"), ("loss", "0.0512"), ("speed", "8,012 samples/s"),
        ("best", "the checkpoint of step 437"), ("run folder", "runs/digits"),
    ]:  # fmt: skip
        assert re.search(rf"\n +{label} +{re.escape(value)}\s*\n", text), label
    assert "drumline train digits --run runs/digits\n" in text
    assert text.split("on two nodes\n")[1].splitlines()[0].strip() == TWO_NODES


def test_what_hooks_log_is_shown_briefly_and_every_few_seconds_only(stream: io.StringIO) -> None:
    display = PlainDisplay(stream)
    for step in range(20):
        display(
            event(
                "logged",
                time=1000.0 + step,
                step=step,
                name="distance",
                type="scalar",
                value=step / 3,
            )
        )
    display(event("logged", step=7, name="sample", type="text", value="once upon a time " * 20))
    display(event("logged", step=7, name="digit", type="image", path="media/digit-00000007.png"))

    lines = [line[9:] for line in stream.getvalue().splitlines()]
    numbers = {0: "0.00", 5: "1.6667", 10: "3.3333", 15: "5.0000"}
    assert lines[:4] == [f"step {step}: distance {number}" for step, number in numbers.items()]
    assert lines[4].startswith("step 7: sample once upon a time once")
    assert lines[4].endswith("...")
    assert len(lines[4]) < 120
    assert lines[5:] == ["step 7: digit media/digit-00000007.png"]


def test_the_summary_says_why_a_hook_ended_the_run(stream: io.StringIO) -> None:
    PlainDisplay(stream)(event("end", **END, stopped="loss has not improved in 3 evaluations"))
    assert "  stopped      loss has not improved in 3 evaluations\n" in stream.getvalue()


def test_a_run_without_evaluation_has_no_best(stream: io.StringIO) -> None:
    make_display("plain", stream)(
        event("end", **{**END, "best_step": None, "two_node_command": None})
    )

    assert "best" not in stream.getvalue()
    assert "two nodes" not in stream.getvalue()


def test_a_run_that_took_no_step_has_no_speed(stream: io.StringIO) -> None:
    make_display("plain", stream)(event("end", **{**END, "samples_per_s": 0.0}))

    assert "accuracy" in stream.getvalue()
    assert "speed" not in stream.getvalue()


def test_no_display_shows_nothing(stream: io.StringIO) -> None:
    with closing(make_display("none", stream)) as display:
        for shown in (event("start", **START), train(1), evaluation(1), event("end", **END)):
            display(shown)

    assert stream.getvalue() == ""


def test_auto_is_plain_where_there_is_no_terminal(stream: io.StringIO) -> None:
    assert isinstance(make_display("auto", stream), PlainDisplay)


@pytest.mark.parametrize(("terminal", "expected"), [("xterm", LiveDisplay), ("dumb", PlainDisplay)])
def test_auto_is_live_on_a_terminal_that_can_move_its_cursor(
    terminal: str, expected: type[Display], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("TERM", terminal)
    controller, terminal_fd = pty.openpty()
    with os.fdopen(terminal_fd, "w") as stream:
        assert isinstance(make_display("auto", stream), expected)
    os.close(controller)


def test_the_bar_shows_the_newest_numbers_within_80_columns(
    live: Display, stream: io.StringIO
) -> None:
    live(event("start", **START))
    live(train(30))
    live(event("checkpoint", step=46, path="x", bytes=1, seconds=0.1))
    live(train(50, time=1001.0, accuracy=0.5, epoch=3))

    last = on_screen(stream.getvalue()).splitlines()[-2:]
    assert re.fullmatch(r" epoch  3/20 ━+.*━+ step  50/460  0:41 left", last[0])
    assert last[1].startswith(
        " loss 0.0400   accuracy 50.00%   lr 0.0964   8,123 samples/s   saved step 46"
    )
    assert max(len(line) for line in last) <= 80


def test_the_live_display_draws_ten_times_a_second_at_most(
    live: Display, stream: io.StringIO
) -> None:
    live(event("start", **START))
    live(train(1, time=1000.0))
    drawn = len(stream.getvalue())
    live(train(2, time=1000.05))
    assert len(stream.getvalue()) == drawn

    live(train(3, time=1000.11))
    assert len(stream.getvalue()) > drawn


def test_evaluations_and_warnings_stay_above_the_bar(live: Display, stream: io.StringIO) -> None:
    live(event("start", **START))
    live(train(30))
    live(evaluation(1))
    live(event("warning", message="small batches"))
    live(event("straggler", message="straggler: rank 3", about_rank=3, about_host="b"))
    live(event("stall", message="stall: rank 1", about_rank=1, about_host="a"))

    assert "epoch  1/20   loss 0.5000   accuracy 90.00%   in 210 ms" in on_screen(stream.getvalue())
    for words in ("warning: small batches", "straggler: rank 3", "stall: rank 1"):
        assert re.search(f"\x1b\\[33m{words}", stream.getvalue())
    assert on_screen(stream.getvalue()).splitlines()[-1].startswith(" loss 0.0667")


@pytest.mark.parametrize("ending", ["interrupt", "error", "end"])
def test_the_cursor_and_the_streams_are_left_as_found_however_it_ends(
    ending: str, live: Display, stream: io.StringIO
) -> None:
    before = sys.stdout, sys.stderr
    live(event("start", **START))
    live(train(30))
    # even now: nothing brings it back if the process is killed
    assert cursor_is_shown(stream)
    live(train(31, time=1000.01))  # too early to be drawn

    if ending == "interrupt":
        with pytest.raises(KeyboardInterrupt), closing(live):
            raise KeyboardInterrupt
    else:
        live(event(ending, **END, message="it broke"))

    assert cursor_is_shown(stream)
    assert (sys.stdout, sys.stderr) == before
    if ending != "end":
        # the last state stays on the screen
        assert " 31/460" in on_screen(stream.getvalue())
    live.close()  # once more does no harm


def test_the_header_says_which_group_the_rate_is_of(stream: io.StringIO) -> None:
    make_display("plain", stream)(event("start", **{**START, "lr_rates": 3}))
    assert "at its peak, the highest of the 3 rates of parameter groups\n" in stream.getvalue()


def test_a_resume_has_words_for_every_cause() -> None:
    assert set(_FAULTS) == {cause.value for cause in Cause}
