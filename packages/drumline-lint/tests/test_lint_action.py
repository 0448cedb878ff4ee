"""The GitHub Action: its steps run the linter as the inputs say, and run nothing that is in them."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import yaml

ROOT = Path(__file__).parents[1]
ACTION: dict[str, Any] = yaml.safe_load((ROOT / "action.yml").read_text())
STEPS = {step["name"]: step for step in ACTION["runs"]["steps"]}


def run_step(name: str, folder: Path, **inputs: str) -> subprocess.CompletedProcess[str]:
    """In bash as GitHub starts it, with a linter that stands where the first step puts it."""
    command = folder / "temp/drumline-lint/bin/drumline-lint"
    command.parent.mkdir(parents=True, exist_ok=True)
    command.write_text(f'#!/bin/sh\nexec "{sys.executable}" -m drumline_lint "$@"\n')
    command.chmod(0o755)
    defaults = {name: value["default"] for name, value in ACTION["inputs"].items()}
    variables = {
        variable: {**defaults, **inputs}[expression[1]]
        for variable, text in STEPS[name]["env"].items()
        if (expression := re.fullmatch(r"\$\{\{ inputs\.(\w+) \}\}", text))
    }
    return subprocess.run(
        ["bash", "--noprofile", "--norc", "-eo", "pipefail", "-c", STEPS[name]["run"]],
        cwd=folder,
        env={
            **os.environ,
            **variables,
            "RUNNER_TEMP": str(folder / "temp"),
            "PYTHONPATH": str(ROOT),
        },
        capture_output=True,
        text=True,
        check=False,
        timeout=120,
    )


def test_every_step_is_complete() -> None:
    assert set(ACTION) == {"name", "description", "inputs", "runs"}
    assert ACTION["runs"]["using"] == "composite"
    assert all(set(value) == {"description", "default"} for value in ACTION["inputs"].values())
    for step in ACTION["runs"]["steps"]:
        assert ("uses" in step) != ("run" in step)
        assert "run" not in step or step["shell"] == "bash"
        assert "${{" not in step.get("run", ""), "an input would be run"
        assert re.fullmatch(r"[\w/-]+@[0-9a-f]{40}", step.get("uses", "a@" + "0" * 40))


def test_findings_are_annotated_and_written(tmp_path: Path) -> None:
    code = "import torch\nimport torch.distributed as dist\ndist.init_process_group('nccl')\n"
    (tmp_path / "a.py").write_text(f"{code}if dist.get_rank() == 0: dist.barrier()\n")
    inputs = {"paths": "a.py", "arguments": "--select DL017 --no-config"}
    done = run_step("Annotate", tmp_path, **inputs)
    assert done.returncode == 1
    assert done.stdout.startswith("::error file=a.py,line=4,")
    assert run_step("Write SARIF", tmp_path, **inputs).returncode == 0
    report = json.loads((tmp_path / "temp/drumline-lint.sarif").read_text())
    assert [result["ruleId"] for result in report["runs"][0]["results"]] == ["DL017"]


def test_inputs_are_not_run(tmp_path: Path) -> None:
    done = run_step("Annotate", tmp_path, paths="$(touch${IFS}made)", since="$(touch made)")
    assert done.returncode == 2
    assert not (tmp_path / "made").exists()
