"""Every line of real jobs is a JSON object with `--log.format json`, and files in the run folder are
as they were."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from drumline.base.json_output import FORMAT

# Two ranks that print by Python, past it, and as an object; the second one fails.
SCRIPT = """
import json, os
print("hello")
os.write(2, b"from C\\n")
print(json.dumps({"metric": 3}))
if os.environ["RANK"] == "1":
    raise ValueError("bad label")
"""


def lines_of(folder: Path, words: str, code: int, **variables: str) -> list[dict[str, Any]]:
    done = subprocess.run(
        [sys.executable, "-m", "drumline", *words.split()],
        cwd=folder, env={**os.environ, "GLOO_SOCKET_IFNAME": "lo", **variables},
        capture_output=True, text=True, check=False, timeout=120,
    )  # fmt: skip
    assert (done.returncode, done.stderr) == (code, ""), done.stdout
    lines = [json.loads(line) for line in done.stdout.splitlines()]
    assert all(isinstance(line, dict) and line["host"] for line in lines)
    return lines


@pytest.mark.usefixtures("warm")
def test_a_script(tmp_path: Path) -> None:
    (tmp_path / "script.py").write_text(SCRIPT)
    lines = lines_of(tmp_path, "launch --procs 2 --max-restarts 0 script.py", 1, **{FORMAT: "json"})
    messages = [line.get("message") for line in lines]
    assert {"hello", "from C"} <= set(messages)
    (error,) = [line for line in lines if line.get("level") == "error"]
    assert error["message"].endswith("ValueError: bad label")
    assert "rank 1" in messages[-1]
    assert any(line.get("metric") == 3 for line in lines)


@pytest.mark.usefixtures("warm")
def test_a_task(tmp_path: Path) -> None:
    words = "train digits --procs 2 --model.widths 4 --train.batch_size 64 --train.steps 12 --log.format json --run run"
    lines = lines_of(tmp_path, words, 0)
    events = {line["event"]: line for line in lines if "event" in line}
    assert events["train"]["step"] == 10
    assert events["train"]["rank"] == 0
    assert 0 < events["train"]["loss"] < 5
    assert events["end"]["message"].startswith("done: 12 steps")
    log = (tmp_path / "run" / "logs" / "rank-00000.log").read_text()
    assert "saved step 12" in log
    assert "{" not in log
