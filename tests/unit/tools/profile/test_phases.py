"""The phases of steps and the user's lines in them, from synthetic traces and samples."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from drumline.base.errors import UsageError
from drumline.runs.profile_files import (
    WORKERS,
    Collection,
    Pause,
    SampledLine,
    StackSample,
    StackSamples,
    ThreadUse,
    facts_path,
)
from drumline.runs.profile_result import LineCost, ProfileResult, read_profile
from drumline.tools.profile.intervals import length_until, union
from drumline.tools.profile.phases import costliest, mean_lines, usual_count
from drumline.tools.profile.profile_analysis import analyse
from drumline.tools.profile.rank_trace import TraceStep, counted_steps
from tests.unit.tools.scale.profiles import entry, gloo_step, mark, write_rank

BASE_NS = 10**18
MS_NS = 1_000_000
PHASES = ("data", "forward", "backward", "hook Slow", "optimizer", "evaluation", WORKERS)
GETITEM = SampledLine(file="task.py", line=5, function="Data.__getitem__", source="sleep(1)")
SLEEP = SampledLine(file="task.py", line=9, function="Slow.after_step", source="time.sleep(1)")
REDUCE = SampledLine(file="task.py", line=20, function="Mine.loss", library="torch")
METRIC = SampledLine(file="task.py", line=30, function="Metric.update")
STATEMENT = SampledLine(file="task.py", line=50, function="train")
NO_LINE = SampledLine(file="", line=0, function="")
LINES = (NO_LINE, GETITEM, SLEEP, REDUCE, METRIC, STATEMENT)


def sample(
    until_ms: float, phase: str, line: SampledLine = NO_LINE, cpu_ms: float = 0
) -> StackSample:
    until_ns = BASE_NS + round(until_ms * MS_NS)
    return StackSample(until_ns, round(cpu_ms * MS_NS), PHASES.index(phase), LINES.index(line))


def step_samples(start: float) -> list[StackSample]:
    """Of a step of `gloo_step`: between 80 and 90 ms and from 95 ms on no operation runs."""
    return [
        sample(start + 10, "data", GETITEM, cpu_ms=1),
        sample(start + 20, "forward", REDUCE, cpu_ms=10),
        sample(start + 80, "backward"),
        sample(start + 88, "hook Slow", SLEEP),
        sample(start + 100, "optimizer", cpu_ms=12),
    ]


def profiled(
    run: Path, stacks: StackSamples, *more: dict[str, Any], **facts: object
) -> ProfileResult:
    """One rank of two steps of 100 ms, with `more` entries."""
    steps = [gloo_step(n, (n - 2) * 100, bucket_at=30, reduced_at=80) for n in (2, 3)]
    entries = [*steps[0], *steps[1], *more, mark("drumline.end", 200, 200)]
    write_rank(run, 0, entries, world_size=1, stacks=stacks, **facts)
    return analyse(run)


def two_steps(**changes: object) -> StackSamples:
    samples = (*step_samples(0), *step_samples(100))
    stacks = StackSamples(began_ns=BASE_NS, phases=PHASES, lines=LINES, samples=samples)
    return replace(stacks, **changes)  # type: ignore[arg-type]


def test_phases_add_up_to_the_step_and_have_lines(tmp_path: Path) -> None:
    result = profiled(tmp_path, two_steps())
    assert sum(result.phases_s.values()) == pytest.approx(result.step_s)
    expected = {"data": 10, "forward": 10, "hook Slow": 8, "optimizer": 12}
    for phase, ms in expected.items():
        assert result.phases_s[phase] == pytest.approx(ms / 1e3), phase
    assert result.phases_s["communication, exposed"] == pytest.approx(0.05), "30 to 80 ms"
    assert result.phases_s["backward"] == pytest.approx(0.01)
    by_function = {line.function: line for line in result.lines}
    data = by_function["Data.__getitem__"]
    assert (data.phase, data.source, data.text) == ("data", "task.py:5", "sleep(1)")
    assert (data.own_s, data.cpu_s) == (pytest.approx(0.01), pytest.approx(0.001))
    assert by_function["Slow.after_step"].own_s == pytest.approx(0.008)
    assert by_function["Mine.loss"].own_s == 0, "it was in torch, which computed"
    assert read_profile(tmp_path).lines == result.lines


def test_operations_that_are_no_layers_count_for_their_line(tmp_path: Path) -> None:
    copies = [entry("aten::copy_", start + 12, start + 18) for start in (0, 100)]
    sums = [entry("aten::add", start + 18, start + 19) for start in (0, 100)]
    result = profiled(tmp_path, two_steps(), *copies, *sums)
    seconds = {line.function: line.seconds for line in result.special_lines}
    assert seconds == {"Mine.loss": pytest.approx(0.006)}, "what makes a batch is data"
    assert {kernel.name: kernel.is_layer for kernel in result.kernels}["aten::copy_"] is False


def test_a_garbage_collection_is_taken_from_the_phase_that_it_interrupts(tmp_path: Path) -> None:
    asked = SampledLine(file="task.py", line=40, function="f", source="gc.collect()")
    rows = tuple(
        Collection(BASE_NS + begin * MS_NS, BASE_NS + (begin + 4) * MS_NS, len(LINES))
        for begin in (83, 183)
    )
    result = profiled(tmp_path, two_steps(lines=(*LINES, asked), collections=rows))
    assert result.phases_s["garbage collection"] == pytest.approx(0.004)
    assert result.phases_s["hook Slow"] == pytest.approx(0.004)
    assert result.collections is not None
    assert (result.collections.source, result.collections.full) == ("task.py:40", 1.0)
    assert result.collections.is_asked_for


def test_collectives_of_the_user_have_a_line(tmp_path: Path) -> None:
    waiting = [
        row._replace(line=LINES.index(REDUCE)) if row.phase == PHASES.index("backward") else row
        for row in two_steps().samples
    ]
    steps = [gloo_step(n, (n - 2) * 100, bucket_at=30, reduced_at=80) for n in (2, 3)]
    entries = [e for step in steps for e in step if "AccumulateGrad" not in e["name"]]
    write_rank(
        tmp_path,
        0,
        [*entries, mark("drumline.end", 200, 200)],
        world_size=1,
        stacks=two_steps(samples=tuple(waiting)),
    )
    result = analyse(tmp_path)
    (line,) = result.collective_lines
    assert (line.source, line.seconds) == ("task.py:20", pytest.approx(0.05))
    assert result.communication_phases_s == {"backward": pytest.approx(0.05)}
    assert result.other_kinds == {"allreduce": 1.0}


def computing_twice(*statements: SampledLine) -> tuple[StackSamples, list[dict[str, Any]]]:
    """A forward pass of 10 ms with a gradient, and 8 ms without one; `statements`: those of
    both."""
    rows = []
    numbers = []
    entries = []
    for start in (0, 100):
        rows += [
            sample(start + 10, "data"),
            sample(start + 20, "forward", REDUCE),
            sample(start + 80, "backward"),
            sample(start + 90, "forward", METRIC),
            sample(start + 100, "optimizer"),
        ]
        numbers += [LINES.index(line) for line in (NO_LINE, statements[0], NO_LINE, statements[1])]
        numbers.append(0)
        arrow = entry("fwdbwd", start + 10, start + 10, "fwdbwd") | {"ph": "s", "id": start}
        entries += [entry("aten::cdist", start + 82, start + 90), arrow]
    return two_steps(samples=tuple(rows), statements=tuple(numbers)), entries


def test_a_statement_whose_operations_have_no_gradient_is_named(tmp_path: Path) -> None:
    stacks, entries = computing_twice(GETITEM, STATEMENT)
    (line,) = profiled(tmp_path, stacks, *entries).undifferentiated
    assert (line.source, line.function) == ("task.py:30", "Metric.update")
    assert (line.seconds, line.caller) == (pytest.approx(0.008 + 0.002), "task.py:50")


def test_operations_are_counted_for_the_line_that_calls_them_itself(tmp_path: Path) -> None:
    stacks, entries = computing_twice(GETITEM, STATEMENT)
    operations = {82, 84, 86}
    for start in (0, 100):
        for begin in operations:
            begins = start + begin
            arrow = entry("fwdbwd", begins, begins, "fwdbwd") | {"ph": "s", "id": begins}
            entries += [entry("aten::mul", begins, begins + 1), arrow]
    entries = [e for e in entries if e["name"] != "aten::cdist"]
    result = profiled(tmp_path, stacks, *entries)
    lines = {line.function: line for line in result.lines}
    metric = lines["Metric.update"]
    assert (metric.operations, metric.library_operations) == (len(operations), 0)
    assert metric.host_s == pytest.approx(0.010 - 0.003)
    assert metric.backward_s == pytest.approx(0.75 * result.phases_s["backward"]), "3 of 4 arrows"
    loss = lines["Mine.loss"]
    assert (loss.operations, loss.library_operations) == (0, 1), "torch's own code calls it"


def test_operations_that_make_a_batch_are_not_those_of_the_next_line(tmp_path: Path) -> None:
    late = two_steps(samples=tuple(row for row in two_steps().samples if row.phase))
    batch = [
        entry("aten::select", start + begin, start + begin + 1)
        for start in (0, 100)
        for begin in (1, 3, 5)
    ]
    result = profiled(tmp_path, late, *batch)
    lines = {line.function: line for line in result.lines}
    assert lines["Mine.loss"].library_operations == 1


def test_a_function_without_a_gradient_inside_a_forward_pass_is_named(tmp_path: Path) -> None:
    stacks, entries = computing_twice(STATEMENT, STATEMENT)
    (line,) = profiled(tmp_path, stacks, *entries).undifferentiated
    assert (line.source, line.caller) == ("task.py:30", "")


def test_where_nothing_has_a_gradient_it_is_not_known(tmp_path: Path) -> None:
    stacks, entries = computing_twice(GETITEM, STATEMENT)
    operations = [entry for entry in entries if entry["ph"] == "X"]
    assert profiled(tmp_path, stacks, *operations).undifferentiated == ()


def test_workers_that_start_in_a_step_take_what_it_waits_longer(tmp_path: Path) -> None:
    rows = [*step_samples(0), *step_samples(100)]
    hook = next(row for row in rows if row.phase == PHASES.index("hook Slow"))
    rows[rows.index(hook)] = hook._replace(phase=PHASES.index(WORKERS), line=0)
    starts = profiled(tmp_path, two_steps(samples=tuple(rows))).worker_starts
    assert starts is not None
    assert (starts.num_steps, starts.seconds) == (1, pytest.approx(0.008 / 2))
    assert profiled(tmp_path, two_steps()).worker_starts is None


def test_pauses_are_counted_beside_the_steps_without_them(tmp_path: Path) -> None:
    pause = Pause("evaluation", 3, BASE_NS + 150 * MS_NS, BASE_NS + 190 * MS_NS)
    samples = (*step_samples(0), sample(150, "forward"), sample(190, "evaluation", METRIC))
    result = profiled(tmp_path, two_steps(samples=samples), pauses=(pause,))
    assert result.num_steps == 1, "the step with the pause is not counted"
    assert result.step_s == pytest.approx(0.1)
    assert result.pauses_s == {"evaluation": pytest.approx(0.02)}, "40 ms in two steps"
    line = next(line for line in result.lines if line.phase == "evaluation")
    assert (line.source, line.seconds) == ("task.py:30", pytest.approx(0.02))


def test_steps_that_all_have_a_pause_last_until_it(tmp_path: Path) -> None:
    pauses = tuple(
        Pause("save", step, BASE_NS + begin * MS_NS, BASE_NS + (begin + 5) * MS_NS)
        for step, begin in ((2, 95), (3, 195))
    )
    result = profiled(tmp_path, two_steps(), pauses=pauses)
    assert result.step_s == pytest.approx(0.095)
    assert result.pauses_s == {"save": pytest.approx(0.005)}


def test_a_step_that_a_device_begins_after_the_pause_has_no_negative_time() -> None:
    steps = [TraceStep(2, 1.0, 2.0), TraceStep(3, 2.0, 3.0)]
    pauses = [
        Pause("save", 2, 900 * MS_NS, 950 * MS_NS),
        Pause("save", 3, 2500 * MS_NS, 2600 * MS_NS),
    ]
    assert counted_steps(steps, pauses, 0) == [TraceStep(2, 1.0, 1.0), TraceStep(3, 2.0, 2.5)]


def test_torchs_python_counts_where_it_calls_no_operations(tmp_path: Path) -> None:
    """From 88 ms on a step runs torch's Python between the phases."""
    phases = (*PHASES, "rest")
    rows = [
        row._replace(phase=len(PHASES), line=LINES.index(REDUCE))
        if row.phase == PHASES.index("optimizer")
        else row
        for row in two_steps().samples
    ]
    result = profiled(tmp_path, two_steps(phases=phases, samples=tuple(rows)))
    line = next(line for line in result.lines if line.phase == "rest")
    assert line.function == "Mine.loss"
    assert line.own_s == pytest.approx(0.0068, abs=1e-3)


def test_a_thread_is_reported_with_its_line(tmp_path: Path) -> None:
    threads = (ThreadUse("hog", 0.1, 2), ThreadUse("lineless", 0.1, 0))
    (thread,) = profiled(tmp_path, two_steps(threads=threads)).threads
    assert (thread.name, thread.source, thread.cores) == ("hog", "task.py:9", pytest.approx(0.5))


def test_damaged_samples_are_refused(tmp_path: Path) -> None:
    profiled(tmp_path, two_steps())
    path = facts_path(tmp_path / "profile", 0)
    document = json.loads(path.read_text())
    document["stacks"]["samples"][0][3] = 99
    path.write_text(json.dumps(document))
    with pytest.raises(UsageError, match="its samples of stacks are damaged"):
        analyse(tmp_path)


def test_the_length_of_a_set_before_times() -> None:
    intervals = union([(1.0, 2.0), (4.0, 6.0)])
    times = np.array([0.5, 1.5, 3.0, 5.0, 9.0])
    assert length_until(intervals, times).tolist() == [0.0, 0.5, 1.0, 2.0, 3.0]
    assert length_until(union([]), times).tolist() == [0.0] * 5


def test_what_a_statement_calls_between_the_phases_is_one_cost() -> None:
    places = [(0, GETITEM), (0, METRIC), (0, STATEMENT), (1, GETITEM)]
    stacks = StackSamples(
        phases=("rest", "forward"),
        lines=LINES,
        samples=tuple(StackSample(0, 0, phase, LINES.index(line)) for phase, line in places),
        statements=(LINES.index(STATEMENT),) * 4,
    )
    lines = costliest(stacks, {"seconds": np.array([1.0, 2.0, 0.5, 4.0])})
    assert [(line.phase, line.source, line.seconds, line.caller) for line in lines] == [
        ("forward", "task.py:5", 4.0, ""),
        ("rest", "task.py:30", 3.0, "task.py:50"),
        ("rest", "task.py:50", 0.5, ""),
    ]


def test_lines_are_means_over_ranks_for_each_caller() -> None:
    line = LineCost(
        phase="forward", source="task.py:7", seconds=0.2, own_s=0.0, cpu_s=0.0, operations=8
    )
    of_loss = replace(line, caller="train.py:1")
    of_metric = replace(line, caller="train.py:2", seconds=0.1, operations=4)
    means = mean_lines([[of_loss, of_metric], [replace(of_loss, function="inner")]])
    assert [(mean.caller, mean.seconds, mean.operations) for mean in means] == [
        ("train.py:1", 0.2, 8),
        ("train.py:2", 0.05, 2),
    ]


@pytest.mark.parametrize(("num_steps", "usual"), [(3, 400.0), (5, 0.0)])
def test_operations_that_a_long_sample_has_in_few_steps_are_not_the_lines(
    num_steps: int, usual: float
) -> None:
    counts = np.array([400, 410, 0])
    steps = np.array([0, 1, num_steps - 1])
    assert usual_count(counts, steps, np.array([0, 1])) == usual
