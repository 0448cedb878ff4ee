"""What the rules on data, devices and wrapping say."""

from __future__ import annotations

import pytest

from drumline_lint.findings import Finding
from drumline_lint.rules import all_rules
from reading_cases import findings_in

WRAP = "from torch.nn.parallel import DistributedDataParallel as DDP\n"
DATA = "from torch.utils.data import DataLoader, DistributedSampler\n"
TRAIN = "model = DDP(net)\nfor epoch in range(3):\n    for batch in loader:\n        model(batch).sum().backward()\n"
MESSAGES = {
    "DL003": [
        (
            WRAP + DATA + "loader = DataLoader(data, shuffle=True)\n" + TRAIN,
            "every rank trains on all of data: no sampler splits it",
        )
    ],
    "DL005": [
        (
            WRAP + DATA + "loader = DataLoader(data, sampler=DistributedSampler(data))\n" + TRAIN,
            "the DistributedSampler of data shuffles, but set_epoch is never called: every epoch has the same order",
        )
    ],
    "DL007": [
        (WRAP + "model = DDP(net, device_ids=[1])\n", "1 is the same GPU for all ranks of a host")
    ],
}


def _found(rule: str, text: str) -> list[Finding]:
    return [one for one in findings_in((("a.py", text),)) if one.rule == rule]


@pytest.mark.parametrize(
    ("rule", "text", "message"),
    [(rule, text, message) for rule, every in MESSAGES.items() for text, message in every],
)
def test_the_text(rule: str, text: str, message: str) -> None:
    (finding,) = _found(rule, text)
    assert finding.message == message
    assert finding.fix == all_rules()[rule].RULE.fix
