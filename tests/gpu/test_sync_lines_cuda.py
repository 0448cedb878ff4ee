"""`drumline profile` of a script on a GPU: the lines that make the host wait are named."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest
import torch

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA GPU")
SCRIPT = """
import time, torch
from torch import nn
model = nn.Sequential(*[nn.Linear(4096, 4096) for _ in range(8)]).cuda()
optimizer = torch.optim.SGD(model.parameters(), lr=1e-4)
inputs = torch.randn(4096, 4096, device="cuda")
while True:
    loss = model(inputs).square().mean()
    loss.backward()
    optimizer.step()
    value = loss.item()
    inputs = inputs * 1.0
    torch.cuda.synchronize()
    time.sleep(0.02)
"""


def test_the_lines_that_wait_for_the_device_are_named(tmp_path: Path) -> None:
    (tmp_path / "train.py").write_text(SCRIPT)
    command = [
        sys.executable,
        "-m",
        "drumline",
        "profile",
        "--procs",
        "1",
        "--steps",
        "4",
        "--json",
        "train.py",
    ]
    done = subprocess.run(
        command, cwd=tmp_path, capture_output=True, text=True, timeout=240, check=False
    )
    assert done.returncode == 0, done.stderr
    result = json.loads(done.stdout)
    script = str(tmp_path / "train.py")
    lines = SCRIPT.splitlines()
    number = {
        call: next(number for number, line in enumerate(lines, 1) if call in line)
        for call in ("item", "synchronize")
    }
    syncs = {sync["source"]: sync for sync in result["syncs"]}
    assert syncs[f"{script}:{number['item']}"]["call"] == "cudaStreamSynchronize"
    assert syncs[f"{script}:{number['synchronize']}"]["call"] == "cudaDeviceSynchronize"
    parts = result["parts_s"]
    assert sum(parts.values()) == pytest.approx(result["step_s"], rel=0.02)
    assert parts["compute"] > 0.3 * result["step_s"]
    assert parts["gaps"] + parts["host_sync"] > 0.015
