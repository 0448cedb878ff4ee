"""A loop of the user's own that is killed and resumed by `ddp.checkpoint` is the same run, bit for
bit."""

from __future__ import annotations

import os
import signal
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any
from unittest.mock import patch

import pytest
import torch
from torch import nn
from torch.nn.functional import binary_cross_entropy_with_logits as judge

from drumline import DDPManager
from drumline.base.errors import log
from drumline.report.verify.run_check import verify_run
from drumline.runs import catalog
from tests.jobs import NO_SIDECAR, Points
from tests.ranks import RanksFailed, run_ranks
from tests.stream_jobs import OwnPlace


class SeenHere:
    """What differs from rank to rank."""

    def __init__(self) -> None:
        self.sums: list[float] = []

    def state_dict(self) -> dict[str, Any]:
        return {"sums": torch.tensor(self.sums, dtype=torch.float64), "count": len(self.sums)}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.sums = state["sums"].tolist()


@contextmanager
def watched_log() -> Iterator[list[str]]:
    """The warnings of Drumline meanwhile."""
    messages: list[str] = []
    with patch.object(log, "warning") as warning:
        yield messages
    messages += [str(call.args[0]) for call in warning.call_args_list]


def train_gan(
    folder: Path, until: int, die_at: int = 0, stream: bool = False, augments: bool = True
) -> dict[str, Any]:
    """Two models, two optimizers, dropout, BatchNorm, noise and micro-batches; saves every second
    step."""
    with DDPManager(seed=3, watch=NO_SIDECAR) as ddp:
        jitter = 0.1 if augments else 0.0
        data: Any = OwnPlace(37, jitter=jitter) if stream else Points(37, jitter=jitter)
        loader = ddp.loader(
            data, batch_size=8, accumulate=2, compare=not stream, workers=0 if stream else 1
        )
        generator = ddp.wrap(
            nn.Sequential(nn.Linear(3, 8), nn.BatchNorm1d(8), nn.Linear(8, 6)).double()
        )
        critic = ddp.wrap(
            nn.Sequential(nn.Linear(6, 8), nn.Dropout(0.2), nn.Tanh(), nn.Linear(8, 1)).double()
        )
        optimizer_g = torch.optim.Adam(generator.parameters(), lr=0.01)
        optimizer_c = torch.optim.SGD(critic.parameters(), lr=0.05, momentum=0.9)
        seen = SeenHere()
        checkpoint = ddp.checkpoint(
            folder,
            generator=generator,
            critic=critic,
            optimizer_g=optimizer_g,
            optimizer_c=optimizer_c,
            loader=loader,
            seen=seen,
        )
        with watched_log() as warnings:
            started = step = checkpoint.resume()
        while step < until:
            for points, _ in loader:
                is_last = loader.is_last_micro_batch
                with ddp.no_sync(generator, critic, unless=is_last):
                    fake = generator(torch.randn(len(points), 3, dtype=torch.float64))
                    scores = critic(torch.cat([points, fake.detach()]))
                    labels = (torch.arange(len(scores)) < len(points)).double()[:, None]
                    (judge(scores, labels) * loader.scale).backward()
                    critic.requires_grad_(False)
                    fooled = judge(
                        ddp.unwrap(critic)(fake), torch.ones(len(fake), 1, dtype=torch.float64)
                    )
                    (fooled * loader.scale).backward()
                    critic.requires_grad_(True)
                seen.sums.append(float(points.sum()))
                if not is_last:
                    continue
                for optimizer in (optimizer_g, optimizer_c):
                    optimizer.step()
                    optimizer.zero_grad()
                step += 1
                if step == die_at:
                    ddp.barrier()
                    os.kill(os.getpid(), signal.SIGKILL)
                if step % 2 == 0:
                    checkpoint.save(step)
                if step == until:
                    break
        checkpoint.wait()
        loader.close()
        return {
            "started": started,
            "warnings": warnings,
            "weights": {
                key: one.tolist()
                for net in (generator, critic)
                for key, one in net.state_dict().items()
            },
            "seen": seen.sums,
            "noise": torch.rand(2).tolist(),
        }


def train_whole_and_killed(folder: Path, stream: bool) -> list[dict[str, Any]]:
    return [train_gan(folder / name, 9, 0, stream) for name in ("whole", "killed")]


@pytest.mark.filterwarnings("ignore:.*use of fork.*:DeprecationWarning")
@pytest.mark.parametrize(("world_size", "stream"), [(1, False), (2, True)])
def test_a_killed_gan_resumes_bit_identically(
    tmp_path: Path, world_size: int, stream: bool
) -> None:
    with pytest.raises(RanksFailed) as caught:
        run_ranks(world_size, train_gan, tmp_path / "killed", 9, 7, stream)
    assert set(caught.value.errors.values()) == {"the process ended without a word"}
    for rank, (one, other) in enumerate(
        run_ranks(world_size, train_whole_and_killed, tmp_path, stream)
    ):
        assert one.pop("started") == 0
        # the save of step 6 may not have been complete
        assert other.pop("started") in (4, 6), rank
        assert one == other
    assert catalog.list_steps(tmp_path / "killed/checkpoints") == [6, 8]
    report = verify_run(tmp_path / "killed", lambda text: None)
    assert (report.problems, report.last_valid_step) == ([], 8)


def test_on_another_number_of_ranks_the_samples_go_on(tmp_path: Path) -> None:
    """Each of the 37 once: 4 steps of 8 on two ranks, and the last of the epoch on one."""
    ranks = run_ranks(2, train_gan, tmp_path, 4, 0, False, False)
    (alone,) = run_ranks(1, train_gan, tmp_path, 5, 0, False, False)
    assert alone["warnings"] == [
        "the number of ranks changed since the checkpoint: 2 -> 1; each rank had its own state of seen: the states of "
        "missing ranks are not used, and new ranks get a copy of that of rank 1"
    ]
    assert alone["started"] == 4
    rest = alone["seen"][len(ranks[0]["seen"]) :]
    trained = [one for rank in ranks for one in rank["seen"]] + rest
    assert sum(trained) == pytest.approx(float(Points(37).inputs.sum()))
