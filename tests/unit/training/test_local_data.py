"""Data from a bucket on the ranks of one machine: one copies, the others wait, each time that it is
asked for."""

from __future__ import annotations

import threading
from dataclasses import dataclass, replace
from datetime import timedelta
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch.distributed as dist

from drumline.config.schema import Config
from drumline.data.bucket_copy import BucketCopy
from drumline.rank.sealed_store import SealedStore
from drumline.training.job.evaluation_job import with_local_data


@dataclass(eq=False)
class Rank:
    """What it needs of a DDPManager."""

    rank: int
    connection: Any
    world_size: int = 2

    def get_local_rank(self) -> int:
        return self.rank

    def is_main_process(self) -> bool:
        return self.rank == 0


def test_ranks_wait_for_each_copy(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """With --dist.mode auto there are two: one for the choice of the mode, one for the run."""
    server = dist.TCPStore(
        "127.0.0.1", 0, is_master=True, wait_for_workers=False, timeout=timedelta(seconds=60)
    )
    heartbeat = SimpleNamespace(mark=lambda phase: None)
    ranks: list[Any] = [
        Rank(
            number,
            SimpleNamespace(heartbeat=heartbeat, store=SealedStore(base, "secret", "drumline")),
        )
        for number, base in enumerate(
            [server, dist.TCPStore("127.0.0.1", server.port, timeout=timedelta(seconds=60))]
        )
    ]
    config = Config()
    config = replace(
        config,
        data=replace(config.data, dir=f"file://{tmp_path}/data", cache=str(tmp_path / "cache")),
    )
    (tmp_path / "data").mkdir()
    (tmp_path / "data" / "points").write_text("1")
    returned = threading.Event()
    update = BucketCopy.update

    def hold(copy: BucketCopy) -> None:
        assert not returned.wait(0.5), "the other rank did not wait"
        update(copy)

    monkeypatch.setattr(BucketCopy, "update", hold)

    def ask() -> None:
        assert Path(with_local_data(config, ranks[1]).data.dir or "", "points").read_text() == "1"
        returned.set()

    for _ in range(2):
        returned.clear()
        thread = threading.Thread(target=ask, daemon=True)
        thread.start()
        with_local_data(config, ranks[0])
        thread.join()
        assert returned.is_set()
