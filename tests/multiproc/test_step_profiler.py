"""`log.profile` on two ranks: their traces, and what is found in them."""

from __future__ import annotations

import time
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn

from drumline.base.rank_environment import Topology
from drumline.base.text import MIB
from drumline.rank.profiled.trace_capture import TraceCapture
from drumline.report.profile.bucket_plan import filled
from drumline.report.profile.profile_words import headline
from drumline.runs.profile_files import JobFacts
from drumline.tools.profile.profile_analysis import analyse
from drumline.training.tasks.base import Loss
from tests.jobs import Classify, make_config, train_here, train_on
from tests.ranks import run_ranks


class SlowOnRank1(Classify):
    """Rank 1 takes 200 ms longer in each step, much more than a busy machine does to rank 0; the
    gradients are in two buckets."""

    def model(self) -> nn.Module:
        return nn.Sequential(
            nn.Linear(6, 300), *(nn.Linear(300, 300) for _ in range(3)), nn.Linear(300, 2)
        ).double()

    def loss(self, model: nn.Module, batch: Any) -> Loss:
        if dist.get_rank() == 1:
            time.sleep(0.2)
        return super().loss(model, batch)


def test_a_slow_rank_is_named_and_the_parts_add_up(tmp_path: Path) -> None:
    """Steps 5 to 9, of which the first and the last, after which the run evaluates, are left
    out."""
    config = make_config(batch_size=8, samples=48, steps=10)
    config = replace(
        config,
        log=replace(config.log, profile="5:10"),
        dist=replace(config.dist, bucket_cap_mb=0.7),
    )
    train_on(2, config, SlowOnRank1, tmp_path)
    result = analyse(tmp_path)
    assert (result.world_size, result.backend, result.device, result.num_steps) == (
        2,
        "gloo",
        "cpu",
        3,
    )
    assert sum(result.parts_s.values()) == pytest.approx(result.step_s, rel=0.02)
    assert [rank.critical_steps for rank in result.ranks] == [0, 3]
    assert result.pauses_s["evaluation"] > 0
    without_pauses = replace(result, pauses_s={})
    assert headline(without_pauses).startswith("rank 1 is slow: the others wait")
    assert result.ranks[0].parts_s["waiting_for_rank"] > 0.1
    num_parameters = 6 * 300 + 300 + 3 * (300 * 300 + 300) + 300 * 2 + 2
    assert sum(bucket.num_bytes for bucket in result.buckets) == num_parameters * 8
    assert len(result.buckets) == 2
    ready = [bucket.ready_s for bucket in result.buckets]
    assert ready == sorted(ready)
    assert 0 < result.buckets[0].backward_s < result.buckets[0].ready_s
    assert result.parts_s["data"] > 0
    # From the last layer on: the bias and the weight of each, as DDP has filled two buckets.
    layers = [[2, 600], *[[300, 300 * 300]] * 3, [300, 1800]]
    sizes = [8 * size for layer in layers for size in layer]
    assert sorted(tensor.num_bytes for tensor in result.tensors) == sorted(sizes)
    plan = filled([tensor.num_bytes for tensor in result.tensors], int(0.7 * MIB))
    assert [sum(result.tensors[number].num_bytes for number in bucket) for bucket in plan] == [
        bucket.num_bytes for bucket in result.buckets
    ]
    times = [tensor.ready_s + tensor.host_s for tensor in result.tensors]
    assert times == sorted(times)
    assert min(result.ranks[1].host_s) > 0.2, "it sleeps in Python"
    assert result.settings["dist.bucket_cap_mb"] == "0.7"
    assert result.unprofiled_step_s is not None
    assert all(rank.cpu_wait_s is not None for rank in result.ranks)


class FailsInSilentStep(Classify):
    """Anomaly detection is on from the beginning; a step fails when it is off for the profile."""

    def model(self) -> nn.Module:
        torch.autograd.set_detect_anomaly(True)
        return super().model()

    def loss(self, model: nn.Module, batch: Any) -> Loss:
        if not torch._C.is_anomaly_enabled():
            raise KeyboardInterrupt
        return super().loss(model, batch)


def interrupt_before_profiled_steps(folder: Path) -> bool:
    """Returns whether a step was interrupted, and anomaly detection is as it was."""
    config = make_config(batch_size=8, samples=48, steps=12)
    config = replace(config, log=replace(config.log, profile="10:12"))
    try:
        train_here(config, FailsInSilentStep, folder)
    except KeyboardInterrupt:
        is_restored = torch.set_anomaly_enabled is torch._C.set_anomaly_enabled
        return is_restored and torch.is_anomaly_enabled()
    return False


def test_a_run_that_is_interrupted_leaves_the_users_modes_on(tmp_path: Path) -> None:
    assert run_ranks(1, interrupt_before_profiled_steps, tmp_path) == [True]


def profile_with_an_open_collective(folder: Path) -> bool:
    """Rank 0 ends its profile while it waits for rank 1. Returns whether the collective had ended
    before the profiler stopped."""
    dist.init_process_group("gloo")
    rank = dist.get_rank()
    topology = Topology(rank=rank, world_size=2, local_world_size=2)
    capture = TraceCapture(range(2, 4), folder, topology, JobFacts(task="train.py"))
    for number in range(4):
        capture.begin_step(number)
        if number == 3:
            time.sleep(0.5 * rank)
            work = dist.all_reduce(torch.ones(3), async_op=True)
    stop = capture._profiler.stop_trace
    ended = []
    capture._profiler.stop_trace = lambda: (ended.append(work.is_completed()), stop())
    capture.begin_step(4)
    work.wait()
    dist.destroy_process_group()
    return capture.is_done and ended == [True]


def test_the_profiler_does_not_stop_before_the_collectives_that_it_records(tmp_path: Path) -> None:
    """gloo's thread would write into memory that is free by then, and the rank could crash."""
    assert run_ranks(2, profile_with_an_open_collective, tmp_path) == [True, True]
