"""The table of DL037 says what the installed torch says, and its findings say what to write."""

from __future__ import annotations

import importlib
import inspect

import pytest
import torch

from drumline_lint.rules.dl037_unknown_argument import ACCEPTED, MEANT
from reading_cases import findings_in

# Other versions of torch from 2.0 on have them, or have them no more.
NOT_IN_EVERY_VERSION = {
    "_ranks", "batched_grad_copy", "bucket_cap_mb_list", "check_reduction", "delay_all_reduce_named_params",
    "device_id", "device_mesh", "forward_sync_buffers", "group_desc", "group_dst", "group_src", "in_order",
    "init_sync", "param_to_hook_all_reduce", "pin_memory_device", "skip_all_reduce_unused_params", "sort_ranks",
    "timeout", "use_local_synchronization",
}  # fmt: skip


@pytest.mark.parametrize("name", ACCEPTED)
def test_the_table_is_that_of_torch(name: str) -> None:
    module, _, last = name.rpartition(".")
    found = getattr(importlib.import_module(module), last)
    called = found.__init__ if inspect.isclass(found) else inspect.unwrap(found)
    there = set(inspect.signature(called).parameters) - {"self"}
    listed = set(ACCEPTED[name].split())
    assert there <= listed, f"torch {torch.__version__} has more"
    assert listed - there <= NOT_IN_EVERY_VERSION, "names that no torch has"


def test_what_was_meant_is_not_accepted_anyway() -> None:
    assert not [(name, argument) for name, argument in MEANT if argument in ACCEPTED[name].split()]


@pytest.mark.parametrize(
    ("call", "message", "fix"),
    [
        (
            "DDP(m, timeout=5)",
            "DDP has no argument 'timeout': the call raises a TypeError",
            "give the timeout to init_process_group",
        ),
        (
            "DDP(m, find_unused_params=True)",
            "DDP has no argument 'find_unused_params': the call raises a TypeError",
            "did you mean 'find_unused_parameters'?",
        ),
        (
            "dist.get_rank(xyz=1)",
            "dist.get_rank has no argument 'xyz': the call raises a TypeError",
            "it has: group",
        ),
    ],
)
def test_the_words_of_a_finding(call: str, message: str, fix: str) -> None:
    text = f"""\
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel as DDP

dist.barrier()
{call}
"""
    (found,) = [one for one in findings_in((("a.py", text),)) if one.rule == "DL037"]
    assert (found.message, found.fix) == (message, fix)
