"""What the rules on data, devices and wrapping say, and how copies are mended."""

from __future__ import annotations

import ast

import pytest

from drumline_lint.findings import Finding
from drumline_lint.rules import all_rules
from reading_cases import findings_in

WRAP = "from torch.nn.parallel import DistributedDataParallel as DDP\n"
DATA = "from torch.utils.data import DataLoader, DistributedSampler\n"
TRAIN = "model = DDP(net)\nfor epoch in range(3):\n    for batch in loader:\n        model(batch).sum().backward()\n"
MESSAGES = {
    "DL002": [
        (
            WRAP + "net = Net()\nmodel = DDP(net)\nmodel.cuda()\n",
            "net is still on the CPU when DDP wraps it: it is moved in line 4",
        ),
        (
            "import torch.nn as nn\n"
            + WRAP
            + "model = DDP(nn.Linear(1, 1), device_ids=[local_rank])\n",
            "DDP is given device_ids, but nn.Linear(1, 1) was never moved from the CPU",
        ),
    ],
    "DL003": [
        (
            WRAP + DATA + "loader = DataLoader(data, shuffle=True)\n" + TRAIN,
            "every rank trains on all of data: no sampler splits it",
        )
    ],
    "DL004": [
        (
            DATA + "loader = DataLoader(data, shuffle=True, sampler=DistributedSampler(data))\n",
            "shuffle=True beside sampler=DistributedSampler(data): DataLoader raises a ValueError",
        )
    ],
    "DL005": [
        (
            WRAP + DATA + "loader = DataLoader(data, sampler=DistributedSampler(data))\n" + TRAIN,
            "the DistributedSampler of data shuffles, but set_epoch is never called: every epoch has the same order",
        )
    ],
    "DL006": [
        (
            "import torch.nn as nn\n" + WRAP + "net = nn.BatchNorm1d(4).cuda()\nmodel = DDP(net)\n",
            "net has BatchNorm (nn.BatchNorm1d), which sees only this rank's part of each batch",
        )
    ],
    "DL007": [
        (WRAP + "model = DDP(net.cuda(1))\n", "1 is the same GPU for all ranks of a host"),
        (
            WRAP + "model = DDP(net.to('cuda:0'))\n",
            "'cuda:0' is the same GPU for all ranks of a host",
        ),
    ],
    "DL039": [
        (
            DATA
            + "for x, y in DataLoader(data, sampler=DistributedSampler(data), pin_memory=True):\n"
            "    x.to(device)\n",
            "x is in pinned memory, but x.to(device) waits until it is copied",
        )
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


LOOP = (
    DATA
    + "loader = DataLoader(data, sampler=DistributedSampler(data), pin_memory=True)\nfor x, y in loader:\n    "
)


def _fixed_file(statement: str, loop: str = LOOP) -> str:
    """The statement with the edits of the only finding in it."""
    text = loop + statement + "\n"
    (finding,) = _found("DL039", text)
    lines = [line.encode() for line in text.split("\n")]
    for edit in sorted(finding.edits, key=lambda edit: edit.start, reverse=True):
        assert edit.start == edit.end, "it only adds"
        row, column = edit.start
        lines[row - 1] = lines[row - 1][:column] + edit.text.encode() + lines[row - 1][column:]
    mended = b"\n".join(lines).decode()
    ast.parse(mended)
    assert not finding.edits or not _found("DL039", mended)
    return mended.removeprefix(loop).removesuffix("\n")


@pytest.mark.parametrize(
    ("statement", "expected"),
    [
        ("x = x.to(device)", "x = x.to(device, non_blocking=True)"),
        ("x = x.cuda()", "x = x.cuda(non_blocking=True)"),
        ("x = x.cuda( )", "x = x.cuda( non_blocking=True)"),
        ("x = x.to(device=device)", "x = x.to(device=device, non_blocking=True)"),
        ("f('é', x.to(device), 1)", "f('é', x.to(device, non_blocking=True), 1)"),
        (
            "x = x.to(\n        device,\n    )",
            "x = x.to(\n        device, non_blocking=True,\n    )",
        ),
        ("z = x[0].to(device)", "z = x[0].to(device, non_blocking=True)"),
    ],
)
def test_a_copy_is_fixed(statement: str, expected: str) -> None:
    assert _fixed_file(statement) == expected


@pytest.mark.parametrize(
    "statement", ["x = x.to((device))", "x = x.to(\n        device  # here\n    )"]
)
def test_what_cannot_be_fixed_for_sure_is_left(statement: str) -> None:
    assert _fixed_file(statement) == statement


@pytest.mark.parametrize(
    "head",
    [
        "for batch in loader",
        "for step, batch in enumerate(tqdm(loader))",
        "for batch, other in zip(loader, more)",
    ],
)
def test_a_whole_batch_may_have_a_way_of_its_own_to_be_moved(head: str) -> None:
    loop = LOOP.replace("for x, y in loader", head)
    assert _fixed_file("batch = batch.to(device)", loop) == "batch = batch.to(device)"


def test_a_part_of_a_counted_batch_is_fixed() -> None:
    loop = LOOP.replace("for x, y in loader", "for step, (x, y) in enumerate(loader)")
    assert _fixed_file("x.cuda()", loop) == "x.cuda(non_blocking=True)"
