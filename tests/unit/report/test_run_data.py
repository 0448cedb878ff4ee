"""What is read from run folders: whole ones, restarted ones, huge ones, and ones that were damaged
or are hostile."""

from __future__ import annotations

import json
import os
import random
from itertools import pairwise
from pathlib import Path

import pytest

from drumline.report import event_sample
from drumline.report.curves import Curves, table_rows, thinned
from drumline.report.goodput import RunClock, goodput_of
from drumline.report.heat_map import make_heat_map
from drumline.report.run_data import read_run
from drumline.report.run_list import list_runs
from drumline.runs.scaling_result import MeasuredSize, Measurement, write_scaling
from tests.report_runs import append, write_checkpoint, write_run

OLD_RUN = Path(__file__).parents[2] / "data" / "run-0.1"


def test_a_run_has_its_result_curves_and_moments(tmp_path: Path) -> None:
    run = read_run(write_run(tmp_path / "run"))
    assert (run.state, run.step, run.num_restarts, run.num_saves) == ("done", 200, 0, 4)
    assert (run.facts["task"], run.facts["world_size"], run.metrics) == (
        "digits",
        4,
        {"loss": 0.015, "accuracy": 0.9},
    )
    curves = {(curve.chart, curve.label): curve for curve in run.curves}
    assert list(curves) == [
        ("loss", "training"),
        ("loss", "evaluation"),
        ("accuracy", "training"),
        ("accuracy", "evaluation"),
        ("learning rate", "training"),
        ("samples/s", "training"),
        ("waiting for data", "training"),
    ]
    assert curves["loss", "training"].steps == list(range(5, 201, 5))
    assert curves["loss", "evaluation"].values == [3 / step for step in (50, 100, 150, 200)]
    assert [moment.kind for moment in run.moments] == [
        "start",
        *["checkpoint"] * 4,
        "straggler",
        "end",
    ]
    assert run.environment == {
        "command": "drumline train digits",
        "torch": "2.13.0",
        "Python": "3.11.7",
        "node-a (cpu)": "ranks 0-3",
    }
    assert run.settings == {"optim.lr": "0.1"}
    assert {rank: len(times) for rank, times in run.phases.items()} == dict.fromkeys(range(4), 40)


def test_the_parts_of_the_time_add_up_and_repeated_steps_are_lost(tmp_path: Path) -> None:
    run = read_run(write_run(tmp_path / "run", fault_at=120))
    goodput = goodput_of(run.attempts)
    # 220 steps were taken; 20 of the 120 before the fault again. Saves at 50, 100, then 150 and
    # 200.
    assert goodput.seconds == pytest.approx(
        {
            "training": 20.0,
            "evaluation": 4.0,
            "start": 10.0,
            "saves": 2.0,
            "restarts": 8.0,
            "steps repeated": 2.0,
        }
    )
    assert goodput.total_s == pytest.approx(RunClock(run.attempts).seconds) == pytest.approx(46.0)
    assert goodput.share == pytest.approx(24 / 46)
    loss = run.curves[0]
    assert loss.steps == list(range(5, 201, 5)), "the repeated steps are there once"


def test_a_command_that_was_refused_repeats_no_steps(tmp_path: Path) -> None:
    folder = write_run(tmp_path / "run", ranks=1, fault_at=120)
    before = goodput_of(read_run(folder).attempts)
    refusal = {"kind": "error", "number": 0, "step": 0, "time": 2e9, "message": "no"}
    append(folder, 0, refusal)
    run = read_run(folder)
    assert run.state == "done"
    assert goodput_of(run.attempts) == before


def test_the_time_between_two_commands_is_not_counted(tmp_path: Path) -> None:
    folder = write_run(tmp_path / "run", ranks=1)
    later = read_run(folder).attempts[-1].last + 86_400
    append(folder, 0, {"number": 0, "kind": "start", "step": 200, "time": later, "task": "digits"})
    append(folder, 0, {"number": 1, "kind": "train", "step": 205, "time": later + 3, "loss": 0.1})
    run = read_run(folder)
    clock = RunClock(run.attempts)
    assert (len(run.attempts), run.num_restarts) == (2, 0)
    assert clock.seconds == pytest.approx(39.0)
    assert clock.at(later) == pytest.approx(36.0)
    assert goodput_of(run.attempts).total_s == pytest.approx(39.0)


def test_the_slow_rank_stands_out_in_the_heat_map(tmp_path: Path) -> None:
    run = read_run(write_run(tmp_path / "run", slow_rank=2, fault_at=120))
    heat_map = make_heat_map(run.phases, run.hosts, RunClock(run.attempts))
    assert [row.rank for row in heat_map.slow_ranks] == [2]
    slow = heat_map.rows[2]
    assert slow.excess == pytest.approx(0.5, abs=0.05), "50 ms of 100 ms"
    assert (
        max(
            cell for row in heat_map.rows if row.rank != 2 for cell in row.cells if cell is not None
        )
        < 0.01
    )
    values = [cell for cell in slow.cells if cell is not None]
    assert values[0] == pytest.approx(0.0)
    assert values[-1] == pytest.approx(0.5)
    assert None in slow.cells, "nothing was done while it restarted"
    assert slow.step_s["forward"] > 1.5 * heat_map.rows[0].step_s["forward"]
    # Of many ranks the slow ones are shown.
    many = {rank: run.phases[2 if rank == 77 else 0] for rank in range(300)}
    large = make_heat_map(many, {}, RunClock(run.attempts))
    assert (len(large.rows), large.num_hidden) == (48, 252)
    assert [row.rank for row in large.slow_ranks] == [77]


def test_few_points_keep_the_extremes_and_gaps() -> None:
    draws = random.Random(3)
    values: list[float | None] = [draws.random() for _ in range(30_000)]
    values[13_337], values[27_777], values[500] = 99.0, -99.0, None
    points = thinned(range(30_000), values, 900)
    assert len(points) <= 900
    assert {
        (13_337, 99.0),
        (27_777, -99.0),
        (500, None),
        (0, values[0]),
        (29_999, values[-1]),
    } <= set(points)
    assert [step for step, _ in points] == sorted({step for step, _ in points})
    assert thinned([1, 2], [0.5, None], 900) == [(1, 0.5), (2, None)]


def test_a_table_of_curves_has_the_last_value_of_each() -> None:
    curves = Curves()
    for step in range(1, 101):
        curves.add({"kind": "train", "step": step, "loss": float(step)})
    curves.add({"kind": "evaluation", "step": 60, "loss": 7.0})
    rows = table_rows(curves.in_order())
    assert len(rows) == 12
    assert rows[0] == (1, [1.0, None])
    assert rows[-1] == (100, [100.0, 7.0])


def test_of_a_huge_event_file_windows_are_read(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "rank-00000.jsonl"
    with path.open("w") as file:
        events = ({"kind": "train", "step": step, "time": 1.0 + step} for step in range(10_000))
        file.writelines(f"{json.dumps(event)}\n" for event in events)
    monkeypatch.setattr(event_sample, "WINDOW_BYTES", 4096)
    steps = [event["step"] for event in event_sample.sampled_events(path, most_bytes=40_000)]
    assert (steps[0], steps[-1]) == (0, 9_999)
    assert 300 < len(steps) < 1500
    gaps = [after - before for before, after in pairwise(steps)]
    assert max(gaps) < 10_000 / 8
    assert list(event_sample.sampled_events(path, most_bytes=40_000, kind="phases")) == []


HOSTILE = [
    {"kind": "train", "step": -1, "time": 1.0, "loss": 1.0},
    {"kind": "train", "step": 1e3, "time": 1.0},
    {"kind": "train", "step": 10**40, "time": 1.0},
    {"kind": "train", "step": True, "time": 1.0},
    {"kind": "train", "step": 1, "time": "now"},
    {"kind": "train", "step": 1, "time": 1e300},
    {"kind": ["train"], "step": 1, "time": 1.0},
    {"kind": "phases", "step": 1, "time": 1.7e9, "phases_s": [1]},
    {"kind": "phases", "step": 1, "time": 1.7e9, "phases_s": {"forward": -1, "x": {}, "data": "1"}},
    {"kind": "start", "step": 0, "time": 1.7e9, "task": 5, "world_size": "9", "total_steps": [1]},
    {"kind": "first_step", "step": 1, "time": 1.7e9, "seconds": {}},
    {"kind": "recovered", "step": 1, "time": 1.7e9},
    {"kind": "checkpoint", "step": 1, "time": 1.7e9, "blocked_s": "x"},
    {"kind": "preempted", "step": 1, "time": 1.7e9, "signal": 4},
    {"kind": "logged", "step": 1, "time": 1.7e9, "type": "scalar", "name": [], "value": 1},
    {
        "kind": "evaluation",
        "step": 1,
        "time": 1.7e9,
        "loss": "nan",
        "x/y/z": 10**300,
        "seconds": None,
    },
    {
        "kind": "end",
        "step": 1,
        "time": 1.7e9,
        "metrics": [],
        "best_step": "x",
        "samples_per_s": {},
        "stopped": 3,
    },
    [1, 2],
    "x",
]


def test_a_damaged_folder_is_read_as_far_as_it_goes(tmp_path: Path) -> None:
    folder = write_run(tmp_path / "run", ended=False)
    append(folder, 0, *HOSTILE)
    with (folder / "events" / "rank-00001.jsonl").open("ab") as file:
        file.write(b'\xff\xfe{"kind": "phases"\n{"kind": "pha')
    (folder / "environment.json").write_text('{"ranks": [{"rank": []}]}')
    (folder / "config.toml").write_bytes(b"\xff = [")
    os.mkfifo(folder / "events" / "rank-00009.jsonl")
    (folder / "events" / "rank-00008.jsonl").symlink_to("/etc/passwd")
    (folder / "profile").mkdir()
    (folder / "profile" / "profile.json").write_text("{}")
    run = read_run(folder)
    assert run.step == 200
    assert len(run.phases[1]) == 40
    assert (run.environment, run.settings, run.profile) == ({}, {}, None)
    assert {moment.kind for moment in run.moments} <= {
        "start",
        "checkpoint",
        "recovered",
        "preempted",
        "end",
    }


def test_a_measured_scaling_is_a_curve_by_ranks(tmp_path: Path) -> None:
    run = write_run(tmp_path / "run", ranks=1)
    sizes = tuple(
        MeasuredSize(
            scaling="weak",
            nodes=1,
            ranks=ranks,
            batch_size=32,
            step_s=0.1,
            spread_s=0.01,
            speedup=ranks * efficiency,
            efficiency=efficiency,
            parts_s={},
            hidden_communication_s=0.0,
            run="x",
        )
        for ranks, efficiency in ((1, 1.0), (2, 0.9), (4, 0.8))
    )
    measured = Measurement(
        made_at=1.0, task="digits", device="cpu", shares_cores=False, sizes=sizes
    )
    write_scaling(run, measured)
    curve = read_run(run).curves[-1]
    assert (curve.chart, curve.label) == ("scaling efficiency", "measured, weak scaling")
    assert (curve.steps, curve.values) == ([1, 2, 4], pytest.approx([1.0, 0.9, 0.8]))
    (run / "scale" / "prediction-1.json").write_text("{}")
    assert read_run(run).state == "done", "what is damaged there is left out"


def test_a_run_of_version_0_1_is_read() -> None:
    run = read_run(OLD_RUN)
    assert (run.state, run.phases) == ("stopped", {})
    assert run.step > 0
    assert {curve.chart for curve in run.curves} >= {"loss", "samples/s"}


def test_runs_are_listed_by_time_and_damaged_ones_are_listed_as_such(tmp_path: Path) -> None:
    for age, name in enumerate(("new", "old", "broken", "killed")):
        folder = write_run(tmp_path / name, ranks=1, ended=name != "killed")
        if name == "broken":
            (folder / "events" / "rank-00000.jsonl").write_bytes(b"\x00\xff\n")
        for path in folder.rglob("*"):
            os.utime(path, (2e9 - age, 2e9 - age))
    (tmp_path / "own").mkdir()
    write_checkpoint(tmp_path / "own" / "checkpoints", 80)
    write_checkpoint(tmp_path / "own" / "checkpoints", 120)
    (write_checkpoint(tmp_path / "own" / "checkpoints", 160) / "model.safetensors").write_bytes(
        b"incomplete"
    )
    (tmp_path / "no run").mkdir()
    runs = list_runs(tmp_path)
    assert [(run.run.name, run.state) for run in runs] == [
        ("new", "done"),
        ("old", "done"),
        ("broken", "corrupt"),
        ("killed", "stopped"),
        ("own", "own loop"),
    ]
    own = runs[-1]
    assert (own.step, own.total_steps, own.stopped) == (120, None, None)
    newest = runs[0]
    assert (newest.task, newest.step, newest.total_steps, newest.changed) == (
        "digits",
        200,
        200,
        2e9,
    )
    assert newest.metrics == {"loss": 0.015, "accuracy": 0.9}
    assert newest.num_bytes == sum(path.stat().st_size for path in (tmp_path / "new").rglob("*.*"))
    assert [run.run.name for run in list_runs(tmp_path / "new")] == ["new"]
