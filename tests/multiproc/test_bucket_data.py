"""`--data.dir s3://...` on two ranks of one machine: one copies, the other waits, both train on the
copy."""

from __future__ import annotations

import os
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

pytest.importorskip("boto3", reason="pip install 'drumline[dev]' brings it")

from torch.utils.data import Dataset, TensorDataset

from drumline.config.schema import Config
from drumline.training.manager import RunManager
from drumline.training.saved.saved_run import evaluate_run, open_run
from tests.jobs import Classify, make_config, train_here
from tests.ranks import RanksFailed, run_ranks
from tests.store_server import Bucket, Proxy, environment


class FromFolder(Classify):
    """Reads its points from `data.dir`, as a user's task does."""

    def train_data(self) -> Dataset[Any]:
        import torch

        inputs = torch.from_numpy(np.load(Path(self.config.data.dir or "", "points.npy")))
        return TensorDataset(inputs, (inputs.sum(1) > 0).long())

    eval_data = train_data


def train_from_bucket(url: str, config: Config, run: Path) -> int:
    os.environ.update(environment(url))
    return train_here(config, FromFolder, run).step


def train_with_own_cache(url: str, config: Config, run: Path) -> int:
    """As on a machine of its own, with a cache that no other machine has."""
    os.environ.update({"LOCAL_RANK": "0", "LOCAL_WORLD_SIZE": "1"})
    cache = run.parent / f"cache-of-rank-{os.environ['RANK']}"
    return train_from_bucket(url, replace(config, data=replace(config.data, cache=str(cache))), run)


def evaluate_from_bucket(url: str, run: Path) -> int:
    os.environ.update(environment(url))
    with RunManager(device="cpu") as ddp:
        return int(evaluate_run(open_run(run, "last", task=FromFolder), ddp)["samples"])


@pytest.mark.world_size(2)
@pytest.mark.soak
def test_one_rank_copies_and_both_train(bucket: Bucket, tmp_path: Path) -> None:
    config = make_config(epochs=1)
    config = replace(
        config,
        data=replace(config.data, dir=f"{bucket.root}/points", cache=str(tmp_path / "cache")),
    )
    with Proxy(bucket.server) as proxy:
        np.save(tmp_path / "points.npy", np.random.default_rng(1).normal(size=(37, 6)))
        bucket.put("points/points.npy", (tmp_path / "points.npy").read_bytes())
        # Slow enough that the other rank waits for it.
        proxy.fault = lambda method, path: 0.5 if path.endswith("points.npy") else None
        assert run_ranks(2, train_from_bucket, proxy.url, config, tmp_path / "run") == [5, 5]
        again = replace(config, train=replace(config.train, epochs=2))
        assert run_ranks(2, train_from_bucket, proxy.url, again, tmp_path / "run") == [10, 10]
        assert run_ranks(1, evaluate_from_bucket, proxy.url, tmp_path / "run") == [37]
        paths = [path for method, path in proxy.requests if path.endswith("points.npy")]
        assert len(paths) == 1, "each start, or each rank, has fetched it"

        # A cache of each machine's own: for a finished run, and for one that resumes.
        assert run_ranks(2, train_with_own_cache, proxy.url, again, tmp_path / "run") == [10, 10]
        longer = replace(config, train=replace(config.train, epochs=3))
        assert run_ranks(2, train_with_own_cache, proxy.url, longer, tmp_path / "run") == [15, 15]
        paths = [path for method, path in proxy.requests if path.endswith("points.npy")]
        assert len(paths) == 3, "one more for each cache"
        assert list(tmp_path.glob("cache-of-rank-*/**/points.npy"))

        missing = replace(config, data=replace(config.data, dir="s3://no-such/points"))
        with pytest.raises(RanksFailed) as failed:
            run_ranks(2, train_from_bucket, proxy.url, missing, tmp_path / "other")
        assert "DataError: data.dir: there is no bucket no-such" in failed.value.errors[0]
        assert 1 in failed.value.errors, "the other rank waits for ever"
