"""A profile names a planted bottleneck first, on gloo; `make soak-profile` has the others, and what
changes bring."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from drumline.report.profile.advice import advise
from drumline.tools.profile.profile_analysis import analyse
from tests.jobs import make_config, train_on
from tests.planted_jobs import SlowData


@pytest.mark.soak
@pytest.mark.world_size(2)
def test_a_slow_dataset_is_named_first(tmp_path: Path) -> None:
    """That a slow rank is named is shown by test_step_profiler.py."""
    config = make_config(batch_size=64, steps=9)
    config = replace(
        config, log=replace(config.log, profile="3:8"), task={"load_s": 0.01, "passes": 8}
    )
    train_on(2, replace(config, dist=replace(config.dist, threads=1)), SlowData, tmp_path)
    result = analyse(tmp_path)
    advice = advise(result)
    assert advice[0].bottleneck == "data", advice
    assert sum(result.parts_s.values()) == pytest.approx(result.step_s, rel=0.02)
    assert result.cores_per_rank
    assert result.loading_cores is not None
    assert result.loading_cores < 0.5, "it waits for storage"
    assert int((advice[0].settings or {})["data.workers"]) > 1
