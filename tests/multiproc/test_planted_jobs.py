"""A profile names a planted bottleneck first, on gloo; `make soak-profile` has the others, and what changes bring."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from drumline.config.schema import Config
from drumline.scale.advice import advise
from drumline.scale.profile_analysis import analyse
from drumline.tasks.base import Task
from tests.jobs import make_config, train_on
from tests.planted_jobs import HalfSpeed, SlowData


def profiled(task: type[Task]) -> Config:
    config = make_config(batch_size=64, steps=9)
    dist = replace(config.dist, threads=1)
    return replace(config, dist=dist, log=replace(config.log, profile="3:8"), task={"load_s": 0.01, "passes": 8})


@pytest.mark.world_size(2)
@pytest.mark.parametrize(("task", "bottleneck"), [(SlowData, "data"), (HalfSpeed, "slow_rank")])
def test_a_planted_bottleneck_is_named_first(task: type[Task], bottleneck: str, tmp_path: Path) -> None:
    config = profiled(task)
    if task is HalfSpeed:
        config = replace(config, task={**config.task, "load_s": 0.0})
    train_on(2, config, task, tmp_path)
    result = analyse(tmp_path)
    found = advise(result)
    assert found[0].bottleneck == bottleneck, found
    assert sum(result.parts_s.values()) == pytest.approx(result.step_s, rel=0.02)
    assert result.cores_per_rank
    if task is SlowData:
        assert result.loading_cores is not None
        assert result.loading_cores < 0.5, "it waits for storage"
        assert int((found[0].settings or {})["data.workers"]) > 1
