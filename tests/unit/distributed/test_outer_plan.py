"""When parts of a model have their rounds, how parameters are split into parts, and what bytes lose."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from drumline.config.schema import sync_interval
from drumline.distributed.delta_sum import BLOCK, decode, encode
from drumline.distributed.outer_sync import SyncPlan, split_evenly

WRONG = ("diloco", "diloco:0", "diloco:x", "local:-3", "adam:4", "diloco:\u0663", "diloco:9999999999", "")


@pytest.mark.parametrize(
    ("text", "steps"), [("step", 0), ("local:1", 1), ("diloco:500", 500), *((text, None) for text in WRONG)]
)
def test_the_forms_of_the_setting(text: str, steps: int | None) -> None:
    assert sync_interval(text) == steps


def test_each_part_has_one_round_in_h_steps() -> None:
    plan = SyncPlan(every=10, parts=3)
    rounds = {step: [part for part in range(3) if plan.is_due(part, step)] for step in range(1, 21)}
    assert {step: parts for step, parts in rounds.items() if parts} == {
        3: [0], 6: [1], 10: [2], 13: [0], 16: [1], 20: [2]
    }  # fmt: skip


@pytest.mark.parametrize("count", [1, 2, 3, 4, 5])
def test_parts_are_consecutive_and_about_as_large(count: int) -> None:
    sizes = [100, 1, 100, 1, 98]
    parameters = {str(number): nn.Parameter(torch.zeros(size)) for number, size in enumerate(sizes)}
    parts = split_evenly(parameters, count)
    assert [name for part in parts for name in part] == list(parameters)
    assert len(parts) == count
    assert all(parts)
    largest = max(sum(one.numel() for one in part.values()) for part in parts)
    assert largest <= 300 / count + 100


@pytest.mark.parametrize(("wire", "bytes_each", "most"), [("fp32", 4, 0.0), ("bf16", 2, 1 / 256), ("int8", 1, 1 / 254)])
def test_what_bytes_lose(wire: str, bytes_each: int, most: float) -> None:
    torch.manual_seed(1)
    rows = torch.randn(3, 4 * BLOCK) * torch.logspace(-6, 3, 4).repeat_interleave(BLOCK)
    rows[1, :BLOCK] = 0.0
    sent = encode(rows, wire)
    assert sent.dtype == torch.uint8
    assert sent.shape[1] == pytest.approx(4 * BLOCK * bytes_each, rel=0.02)
    again = decode(sent, wire, torch.float32)
    largest = rows.unflatten(1, (-1, BLOCK)).abs().amax(2, keepdim=True)
    assert ((again - rows).unflatten(1, (-1, BLOCK)).abs() <= most * largest + 1e-30).all()
