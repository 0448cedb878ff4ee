"""The words of a profile, as files: tests/data/profile/*.txt. To write them again:
UPDATE_WORDS=1."""

from __future__ import annotations

import os
from dataclasses import replace
from pathlib import Path

import pytest

from drumline.report.profile.profile_words import headline, words_of
from drumline.runs.profile_result import HostSync, LineCost, ProfileResult
from drumline.runs.step_times import LongStep, StepTimes
from tests.unit.tools.scale.profiles import DATA, nccl_ranks, two_ranks


def golden(name: str, result: ProfileResult) -> None:
    text = "\n".join(words_of(result)) + "\n"
    path = DATA / f"{name}.txt"
    if os.environ.get("UPDATE_WORDS"):
        path.write_text(text, encoding="utf-8")
    assert text == path.read_text(encoding="utf-8")


def test_words_of_two_ranks(tmp_path: Path) -> None:
    golden(
        "gloo-slow", replace(two_ranks(tmp_path), network_bytes_per_s=1e8, unprofiled_step_s=0.08)
    )


def test_words_of_several_hosts_with_a_rank_that_is_missing(tmp_path: Path) -> None:
    result = two_ranks(tmp_path, later_ms=3, host="b")
    golden(
        "missing",
        replace(
            result, world_size=4, missing_ranks={"2": "it is incomplete", "3": "it is incomplete"}
        ),
    )


@pytest.mark.parametrize("kind", ["slow", "tiny", "item"])
def test_words_of_ranks_on_a_gpu(tmp_path: Path, kind: str) -> None:
    golden(f"nccl-{kind}", nccl_ranks(tmp_path, kind))


def changed(result: ProfileResult, **parts_ms: float) -> ProfileResult:
    """Every rank with these parts."""
    parts = dict.fromkeys(result.parts_s, 0.0) | {name: ms / 1e3 for name, ms in parts_ms.items()}
    step_s = sum(parts.values())
    ranks = tuple(
        replace(rank, parts_s=parts, critical_steps=0, step_s=(step_s,)) for rank in result.ranks
    )
    return replace(result, parts_s=parts, step_s=step_s, ranks=ranks)


def test_stalls_and_the_percentile_are_of_all_steps_of_the_run(tmp_path: Path) -> None:
    result = two_ranks(tmp_path)
    times = StepTimes(
        rank=1,
        count=1240,
        median_s=0.1,
        p99_s=0.31,
        stalls=31,
        stalled_part=0.052,
        longest=(LongStep(step=812, seconds=0.7),),
    )
    text = "\n".join(words_of(replace(result, run_steps=times)))
    assert (
        "of 1,240 steps since the start (evaluations and saves left out): median 100 ms, 99th "
        "percentile 310 ms\n"
        "  31 stalls of more than twice the median took 5.2% of the time, the longest 700 ms "
        "(step 812)"
    ) in text
    few = "\n".join(words_of(replace(result, run_steps=replace(times, count=19))))
    assert "percentile" not in few


def test_the_largest_loss_is_first(tmp_path: Path) -> None:
    result = two_ranks(tmp_path)
    assert headline(result) == "rank 1 is slow: the others wait 30% of the step for it"
    assert (
        headline(changed(result, compute=99))
        == "the ranks compute 100% of the step; there is nothing worth changing"
    )
    slow_data = changed(result, compute=40, data=60)
    assert headline(slow_data) == "data is slow: the ranks wait 60% of the step for their batches"
    exposed = changed(result, compute=40, exposed_communication=60)
    assert headline(exposed).startswith("communication is exposed: the ranks wait 60% of the step")
    host = changed(result, compute=40, gaps=60)
    assert (
        headline(host)
        == "the ranks compute 40% of the step, and 60% is Python and launches; there is nothing worth changing"
    )
    syncs = (HostSync(source="train.py:7", call="cudaStreamSynchronize", seconds=0.05, calls=1.0),)
    gpu = replace(changed(result, compute=40, gaps=60), device="NVIDIA H200", syncs=syncs)
    assert headline(gpu).endswith("idle 60% of the step because of that, mostly in train.py:7")


def test_unknown_bytes_of_buckets_are_not_none(tmp_path: Path) -> None:
    """As those of PowerSGD's factors over gloo."""
    result = two_ranks(tmp_path)
    lines = words_of(replace(result, buckets=(replace(result.buckets[0], num_bytes=0),)))
    assert "1 bucket of gradients, of unknown bytes" in lines
    assert "  1:        ?, ready after 20.00 ms of compute, all-reduce 19.00 ms" in lines


def test_text_of_others_is_one_line(tmp_path: Path) -> None:
    hostile = replace(two_ranks(tmp_path), task="a\nb\x1b[31m", device="c\nd")
    assert all("\n" not in line and "\x1b" not in line for line in words_of(hostile))


def test_a_crowded_machine_is_named(tmp_path: Path) -> None:
    result = two_ranks(tmp_path)
    ranks = [replace(rank, cpu_wait_s=0.001 + 0.03 * rank.rank) for rank in result.ranks]
    crowded = replace(result, ranks=tuple(ranks))
    assert [line for line in words_of(crowded) if "CPU" in line] == [
        "rank 1 on a waited for a CPU in 31% of its steps: other processes used the cores, or ranks share them, and "
        "on a quiet machine the numbers differ"
    ]
    assert not [line for line in words_of(replace(result, ranks=(ranks[0],))) if "CPU" in line]


def test_phases_lines_and_the_mfu_are_shown(tmp_path: Path) -> None:
    line = LineCost(
        phase="hook Slow",
        source="task.py:9",
        function="Slow.after_step",
        text="time.sleep(1)",
        seconds=0.02,
        own_s=0.02,
        cpu_s=0.0,
    )
    result = replace(
        two_ranks(tmp_path),
        phases_s={"backward": 0.07, "hook Slow": 0.02, "log": 0.0001},
        pauses_s={"evaluation": 0.005},
        lines=(line,),
        step_tflop=5.0,
        peak_tflop_per_s=200.0,
    )
    lines = words_of(result)
    begin = lines.index("the same step by phase")
    assert lines[begin - 2 : begin + 8] == [
        "  the model computes 50 TFLOP/s, 25.0% of the 200 of its devices (MFU)",
        "",
        "the same step by phase",
        "  backward                        70.00 ms   70%",
        "  hook Slow                       20.00 ms   20%",
        "  rest                            10.00 ms   10%",
        "  on top, for evaluations: 5.00 ms a step",
        "",
        "your own Python takes",
        "     20.00 ms  hook Slow: task.py:9, in Slow.after_step: time.sleep(1)",
    ]
