"""What DL035's edits make of a file: arguments are kept, imports and uses changed together or not
at all."""

from __future__ import annotations

import pytest

from reading_cases import findings_in

HEAD = "import torch\nimport torch.distributed as dist\ndist.barrier()\n"


def mended(text: str) -> str:
    """The file after all edits of all findings, from the last to the first."""
    found = [finding for finding in findings_in((("a.py", text),)) if finding.rule == "DL035"]
    lines = text.splitlines(keepends=True)
    for edit in sorted(
        (edit for finding in found for edit in finding.edits),
        key=lambda edit: edit.start,
        reverse=True,
    ):
        assert edit.start[0] == edit.end[0]
        line = lines[edit.start[0] - 1].encode()
        lines[edit.start[0] - 1] = (
            line[: edit.start[1]] + edit.text.encode() + line[edit.end[1] :]
        ).decode()
    return "".join(lines)


@pytest.mark.parametrize(
    ("before", "after"),
    [
        ("a = torch.cuda.amp.GradScaler()", 'a = torch.amp.GradScaler("cuda")'),
        (
            "a = torch.cuda.amp.GradScaler(2.0, enabled=b)",
            'a = torch.amp.GradScaler("cuda", 2.0, enabled=b)',
        ),
        (
            "with torch.cuda.amp.autocast(é, d): é",
            'with torch.amp.autocast("cuda", enabled=é, dtype=d): é',
        ),
        ("with torch.cpu.amp.autocast(dtype=d): 1", 'with torch.amp.autocast("cpu", dtype=d): 1'),
        (
            "from torch.cuda.amp import autocast, GradScaler as G\nwith autocast(): G(init_scale=2)\nx: G",
            'from torch.amp import autocast, GradScaler as G\nwith autocast("cuda"): G("cuda", init_scale=2)\nx: G',
        ),
        (
            "with torch.cuda.amp.autocast(\n    a,\n    b,\n): 1",
            'with torch.amp.autocast("cuda",\n    enabled=a,\n    dtype=b,\n): 1',
        ),
    ],
)
def test_what_is_mechanical(before: str, after: str) -> None:
    assert mended(f"{HEAD}{before}\n") == f"{HEAD}{after}\n"


@pytest.mark.parametrize(
    "text",
    [
        "a = torch.cuda.amp.GradScaler(**settings)",
        "a = torch.cuda.amp.autocast(*settings)",
        "from torch.cuda.amp import autocast\nf(autocast)\nautocast()",
        "from torch.cuda.amp import autocast, custom_fwd\nautocast()",
        "from torch.cuda.amp import autocast\nautocast()\nautocast(**settings)",
        "from torch.cuda.amp import autocast\ndef f():\n    from mine import autocast\nautocast()",
        "from torch.cuda import amp\namp.autocast()",
        "a = (torch.cuda.amp.GradScaler)()",
        "@torch.cuda.amp.custom_fwd\ndef f(): pass",
    ],
)
def test_what_is_not_a_mistake_is_not_touched(text: str) -> None:
    assert mended(f"{HEAD}{text}\n") == f"{HEAD}{text}\n"
    assert [finding for finding in findings_in((("a.py", HEAD + text),)) if finding.rule == "DL035"]


def test_the_words_of_a_finding() -> None:
    (found,) = [
        finding
        for finding in findings_in((("a.py", f"{HEAD}torch.cuda.amp.autocast()"),))
        if finding.rule == "DL035"
    ]
    assert found.message == "torch.cuda.amp.autocast is deprecated since torch 2.4"
    assert found.fix == 'write torch.amp.autocast("cuda", ...)'
