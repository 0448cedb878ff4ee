"""What is said of how runs begin and end, word by word, with the names of the snippet that shows
the mistake."""

from __future__ import annotations

import pytest

from drumline_lint.rules import all_rules
from reading_cases import findings_in

SAID = {
    "DL009": "DDP(torch.nn.Linear(8, 2)) wraps a model whose weights are drawn without a seed",
    "DL011": "torch.manual_seed(42) is the same on every rank, and so is all that RandomHorizontalFlip draws",
    "DL021": "dist.init_process_group is called, and nothing in this run calls destroy_process_group",
    "DL043": "random_split(data, [0.9, 0.1]) draws another split on every rank: what one rank tests on, another trains "
    "on",
    "DL025": "dist.init_process_group has no timeout: ranks wait for a stuck one for 10 minutes with NCCL",
}
SCRIPT = "import os\nimport torch.distributed as dist\n"
OTHERS = {
    "DL025": (
        "dist.init_process_group()",
        "dist.init_process_group has no timeout: ranks wait for a stuck one for 30 minutes",
    )
}


def messages(rule: str, text: str) -> list[str]:
    return [one.message for one in findings_in((("train.py", text),)) if one.rule == rule]


@pytest.mark.parametrize("rule", SAID)
def test_the_text_about_the_snippet(rule: str) -> None:
    assert messages(rule, all_rules()[rule].RULE.bad) == [SAID[rule]]


@pytest.mark.parametrize("rule", OTHERS)
def test_what_else_is_reported(rule: str) -> None:
    line, message = OTHERS[rule]
    assert messages(rule, SCRIPT + line) == [message]


@pytest.mark.parametrize(
    ("given", "waits"),
    [
        ('"NCCL"', "10 minutes with NCCL"),
        ('"gloo"', "30 minutes with Gloo"),
        ('"cpu:gloo,cuda:nccl"', "30 minutes"),
        ("backend=None", "30 minutes"),
        ('device_id=torch.device("cuda", 0)', "10 minutes with NCCL or 30 minutes with Gloo"),
        ("args.backend", "10 minutes with NCCL or 30 minutes with Gloo"),
    ],
)
def test_how_long_a_stuck_rank_is_waited_for(given: str, waits: str) -> None:
    line = f"import torch\ndist.init_process_group({given})"
    assert messages("DL025", SCRIPT + line) == [
        f"dist.init_process_group has no timeout: ranks wait for a stuck one for {waits}"
    ]
