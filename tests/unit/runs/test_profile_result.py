"""The document of a profile: what is written is read again, and anything else is refused with a
sentence."""

from __future__ import annotations

from pathlib import Path

import pytest

from drumline.base.errors import UsageError
from drumline.runs.profile_result import (
    PARTS,
    Bucket,
    HostSync,
    Kernel,
    ProfileResult,
    RankSteps,
    read_profile,
    write_profile,
)


def example() -> ProfileResult:
    parts = dict.fromkeys(PARTS, 0.5)
    rank = RankSteps(
        rank=0,
        host="a",
        step_s=(3.0,),
        compute_s=(0.5,),
        parts_s=parts,
        hidden_communication_s=0.1,
        critical_steps=1,
    )
    return ProfileResult(
        task="digits",
        world_size=1,
        num_nodes=1,
        device="cpu",
        backend="gloo",
        first_step=2,
        num_steps=1,
        batch_size=64,
        accumulate=1,
        precision=None,
        bucket_cap_mb=25.0,
        settings={"data.workers": "2"},
        step_s=3.0,
        parts_s=parts,
        hidden_communication_s=0.1,
        ranks=(rank,),
        buckets=(Bucket(num_bytes=4096, ready_s=0.1, backward_s=0.05, reduce_s=0.01),),
        other_collectives_s=0.0,
        other_collectives=0.0,
        kernels=(Kernel(name="aten::mm", seconds=0.2, calls=3.0),),
        syncs=(HostSync(source="train.py:7", call="item", seconds=0.1, calls=1.0),),
        network_bytes_per_s=None,
    )


def test_what_is_written_is_read_again(tmp_path: Path) -> None:
    path = write_profile(tmp_path, example())
    assert read_profile(tmp_path) == read_profile(path) == example()
    assert [file.name for file in path.parent.iterdir()] == ["profile.json"]


def test_anything_else_is_refused(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="has no profile") as caught:
        read_profile(tmp_path)
    assert (
        caught.value.next_step
        == "make one: drumline profile TASK, or train with --log.profile 10:20"
    )
    path = write_profile(tmp_path, example())
    path.write_text(path.read_text().replace("4096", '"many"'))
    with pytest.raises(
        UsageError, match=r"profile.json is not a profile: Expected `int`, got `str`"
    ):
        read_profile(tmp_path)
