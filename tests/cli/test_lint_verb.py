"""`drumline lint` is the command of drumline-lint under another name; without torch. And our own
code is clean."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from benchmarks.lint_speed import generate, parts_of
from drumline.base.errors import UsageError
from drumline.cli import lint_command, main
from drumline.config import FlagValues
from drumline.launch.node_plan import NodePlan, Program, torchrun_command
from drumline.launch.slurm import batch_text
from drumline_lint.findings import Severity
from drumline_lint.linter import Report, check, read_all
from drumline_lint.reading.discovery import find_files
from drumline_lint.reading.parse import read_bytes
from drumline_lint.rules import all_rules
from drumline_lint.settings import Settings

ROOT = Path(__file__).parents[2]
LINTER = ROOT / "packages/drumline-lint"
PAGES = sorted([*ROOT.glob("docs/*.md"), *ROOT.glob("*.md")])


def linted(*arguments: str, cwd: Path) -> subprocess.CompletedProcess[str]:
    """The real command, where importing torch is an error."""
    block = cwd / "no_torch"
    block.mkdir(exist_ok=True)
    for name in ("torch", "numpy", "rich"):
        (block / f"{name}.py").write_text(f"raise ImportError('{name} was imported')")
    return subprocess.run(
        [sys.executable, "-m", "drumline", "lint", *arguments],
        cwd=cwd,
        env={**os.environ, "PYTHONPATH": os.pathsep.join(map(str, (block, ROOT, LINTER)))},
        capture_output=True,
        text=True,
        check=False,
        timeout=60,
    )


def messages_of(*scripts: str) -> list[str]:
    readings = [
        read_bytes(Path(f"{number}.sh"), text.encode()) for number, text in enumerate(scripts)
    ]
    return [f"{finding.rule} {finding.message}" for finding in report_of(readings).findings]


def report_of(readings: list) -> Report:  # type: ignore[type-arg]
    rules = all_rules()
    return check(readings, rules, Settings(chosen=frozenset(rules)))


def test_without_the_linter_the_verb_says_how_to_get_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "drumline_lint", None)
    with pytest.raises(UsageError) as error:
        lint_command.run(["."])
    assert error.value.what == (
        "the linter is a package of its own, drumline-lint, and is not installed"
    )
    assert error.value.next_step == (
        "pip install ./packages/drumline-lint in a checkout, or pip install "
        "'git+https://github.com/OWNER/drumline#subdirectory=packages/drumline-lint'"
    )


def test_the_verb_is_the_linter(tmp_path: Path) -> None:
    (tmp_path / "train.py").write_text(
        "import torch\nfrom torch.nn.parallel import DistributedDataParallel as DDP\n"
        "torch.distributed.init_process_group('gloo')  # torchrun --nproc-per-node 2 train.py\n"
        "model = DDP(torch.nn.Linear(8, 2))\ntorch.save(model.module.state_dict(), 'model.pt')\n"
    )
    result = linted("train.py", "--select", "unguarded-save", cwd=tmp_path)
    assert (result.returncode, result.stderr) == (1, "")
    assert result.stdout.startswith("train.py:5:1: warning DL014 unguarded-save: ")
    assert linted("train.py", "--exit-zero", cwd=tmp_path).returncode == 0


def test_the_verb_has_its_own_name_in_help_and_errors(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["lint", "--help"]) == 0
    assert capsys.readouterr().out.startswith("usage: drumline lint PATH")
    assert main(["lint", "--formt"]) == 2
    error = capsys.readouterr().err
    assert error.startswith(
        "drumline: error: drumline lint has no flag --formt; did you mean '--format'?\n"
    )
    assert "try: read drumline lint --help" in error


def test_the_benchmark_reads_what_it_generates(tmp_path: Path) -> None:
    lines = generate(tmp_path, 10)
    assert 2000 < lines < 3000
    assert {"finding and parsing", "names, and the rest"} <= set(parts_of(tmp_path))
    result = linted("project000", "--format", "json", "--no-config", cwd=tmp_path)
    document = json.loads(result.stdout)
    assert (document["files"], document["problems"]) == (10, [])
    assert document["summary"]["shown"]["warning"] > 0


@pytest.mark.parametrize(
    "folder",
    [
        pytest.param("drumline", marks=pytest.mark.soak),
        "examples",
        "benchmarks",
        "packages/drumline-lint/drumline_lint",
    ],
)
def test_our_own_code_is_clean(folder: str) -> None:
    planted = ROOT / "benchmarks/planted"  # mistakes are what these jobs are for
    files = [path for path in find_files([ROOT / folder]).files if planted not in path.parents]
    assert len(files) > 3
    report = report_of(read_all(files))
    assert not report.problems
    bad = [finding for finding in report.findings if finding.severity is not Severity.NOTE]
    assert [f"{finding.place} {finding.rule}" for finding in bad] == []


def test_commands_on_our_pages_are_clean() -> None:
    blocks = [
        part.replace("\n$ ", "\n").removeprefix("$ ")
        for page in PAGES
        if page.name != "lint.md"
        for block in re.findall(
            r"^```(?:sh|bash|console|text)\n(.*?)^```", page.read_text(), re.DOTALL | re.MULTILINE
        )
        # A script that a command prints is a file of its own.
        for part in re.split(r"^(?=#!/)", block, flags=re.MULTILINE)
    ]
    assert any("torchrun" in text for text in blocks)
    assert messages_of(*blocks) == []


@pytest.mark.parametrize("num_nodes", [1, 2])
def test_what_our_launchers_write_is_clean(num_nodes: int) -> None:
    node = NodePlan(
        num_nodes=num_nodes, num_procs=8, endpoint="node-a:29500" if num_nodes > 1 else ""
    )
    line = " ".join(torchrun_command(node, Program(("train.py",))))
    command = ["drumline", "launch", "--srun", "--procs", "8", "digits"]
    batch = batch_text("job", command, FlagValues({"nodes": num_nodes, "gpus": 8}))
    assert "srun" in batch
    assert "torchrun" in line
    assert messages_of(line, batch) == []
