"""Every mode against ddp, with faults in every mode, and resumed from every mode in every other
(`make soak-modes`)."""

from __future__ import annotations

from itertools import product
from pathlib import Path

import pytest

from tests.cli.test_sharded_restarts import FAULTS, assert_recovers
from tests.multiproc.test_sharded_modes import (
    MODES,
    assert_compiles,
    assert_gpt_trains,
    assert_legs_train_on,
    assert_resumes,
    assert_trains_as_ddp,
)

WORLDS = {"ddp": 4, "zero1": 3, "fsdp": 2, "hsdp": 4}
OTHER_WORLDS = {"ddp": 1, "zero1": 2, "fsdp": 3, "hsdp": 2}


@pytest.mark.parametrize("world_size", [2, 4])
def test_every_mode_trains_as_ddp_does(tmp_path: Path, world_size: int) -> None:
    assert_trains_as_ddp(world_size, MODES[1:], tmp_path, epochs=3)


@pytest.mark.parametrize("policy", [True, "every:2"])
def test_every_mode_trains_a_gpt_in_each_precision(tmp_path: Path, policy: bool | str) -> None:
    assert_gpt_trains(tmp_path, fp32=MODES[1:], bf16=MODES[1:], policy=policy)


@pytest.mark.parametrize("policy", [True, False, "every:2"])
def test_every_mode_compiles_its_blocks(tmp_path: Path, policy: bool | str) -> None:
    assert_compiles(tmp_path, MODES[1:], policy)


@pytest.mark.parametrize(
    ("mode", "world_size"), [*product(("zero1", "fsdp"), (2, 3, 4)), ("hsdp", 2), ("hsdp", 4)]
)
def test_killed_and_resumed_is_bit_identical(tmp_path: Path, mode: str, world_size: int) -> None:
    assert_resumes(world_size, mode, tmp_path)


@pytest.mark.parametrize(("one", "other"), list(product(MODES, MODES)))
def test_every_mode_resumes_from_every_other(tmp_path: Path, one: str, other: str) -> None:
    assert_legs_train_on(
        [(one, WORLDS[one]), (other, OTHER_WORLDS[other]), (one, OTHER_WORLDS[one])], tmp_path
    )


@pytest.mark.usefixtures("warm")
@pytest.mark.parametrize(("mode", "world_size"), [("zero1", 2), ("fsdp", 3), ("hsdp", 4)])
def test_each_fault_is_named_and_recovered_from(tmp_path: Path, mode: str, world_size: int) -> None:
    assert_recovers(tmp_path, mode, world_size, FAULTS)
