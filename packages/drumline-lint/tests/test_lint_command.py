"""`drumline-lint` as a user types it: what it prints, and its exit codes; without torch."""

from __future__ import annotations

import contextlib
import json
import os
import pty
import re
import shlex
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
import yaml

import drumline_lint
from drumline_lint import command
from drumline_lint.command import main
from made_up_rules import RULES

ROOT = Path(__file__).parents[1]
CODE = "bad()\nodd()\n"


@pytest.fixture(name="here")
def work_in_a_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """With rules of the tests, and three files of which one is clean."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(command, "all_rules", lambda: RULES)
    (tmp_path / "a.py").write_text(CODE)
    (tmp_path / "b.py").write_text("poor()\n")
    (tmp_path / "c.py").write_text("x = 1\n")
    return tmp_path


class Outcome:
    """Of a command."""

    def __init__(self, code: int, out: str, err: str) -> None:
        self.code = code
        self.out = out
        self.err = err
        self.lines = out.splitlines()


Lint = Callable[..., Outcome]


@pytest.fixture(name="lint")
def make_lint(capsys: pytest.CaptureFixture[str], here: Path) -> Lint:
    def lint(*arguments: str) -> Outcome:
        code = main(arguments)
        return Outcome(code, *capsys.readouterr())

    return lint


def python_m(*arguments: str, cwd: Path, **more: object) -> subprocess.CompletedProcess[str]:
    """The real command, where importing torch is an error."""
    block = cwd / "no_torch"
    block.mkdir(exist_ok=True)
    for name in ("torch", "numpy", "rich"):
        (block / f"{name}.py").write_text(f"raise ImportError('{name} was imported')")
    return subprocess.run(
        [sys.executable, "-m", "drumline_lint", *arguments],
        cwd=cwd,
        env={**os.environ, "PYTHONPATH": f"{block}{os.pathsep}{ROOT}"},
        capture_output=True,
        text=True,
        check=False,
        timeout=60,
        **more,  # type: ignore[call-overload]
    )


def test_findings_are_reported_and_fail(lint: Lint) -> None:
    result = lint("a.py", "b.py", "c.py")
    assert (result.code, result.err) == (1, "")
    assert result.lines == [
        "a.py:1:1: error DL101 bad-call: bad() is called",
        "    | bad()",
        "    | ^~~~~",
        "    fix: call good() instead",
        "b.py:1:1: warning DL102 poor-call: poor() is called",
        "    | poor()",
        "    | ^~~~~~",
        "    fix: call good() instead",
        "1 error, 1 warning in 2 of 3 files; 1 can be fixed (--fix); 1 note not shown (--severity note)",
    ]


def test_exit_codes(lint: Lint, here: Path) -> None:
    assert lint("c.py").code == 0
    assert lint("b.py").code == 1
    assert lint("b.py", "--severity", "error").code == 0
    assert lint("a.py", "--select", "odd-call").code == 0, "notes never fail, though they are shown"
    assert lint(".", "--exit-zero").code == 0
    (here / "d.py").write_text("(")
    unread = lint(".")
    assert unread.code == 2
    assert "b.py:1:1: warning DL102" in unread.out, "the rest goes on"
    assert unread.lines[-1].startswith(
        "1 error, 1 warning in 2 of 3 files; 1 file could not be read;"
    )
    assert lint(".", "--exit-zero").code == 0, "beside unreadable files, too"
    assert lint("--exit-zero").code == 2, "wrong usage stays wrong"
    assert lint(".", "--exclude", "d.py", "--ignore=DL1").code == 0
    assert lint(".", "--ignore", "DL000,bad-call", "--ignore", "DL102").code == 0


@pytest.mark.parametrize(("external", "is_kept"), [([], False), (["DL"], True)])
def test_ruff_keeps_noqa_of_external_rules(here: Path, external: list[str], is_kept: bool) -> None:
    """What docs/lint.md says about ruff's `lint.external`."""
    ruff = pytest.importorskip("ruff").find_ruff_bin()
    (here / "a.py").write_text("bad()  # noqa: DL101\n")
    # which of the two it is depends on ruff's version
    settings = f"preview = true\nlint.select = ['RUF100', 'RUF102']\nlint.external = {external}\n"
    (here / "ruff.toml").write_text(settings)
    subprocess.run([ruff, "check", "--fix", "-q", "--no-cache", "a.py"], cwd=here, check=True)
    assert ("noqa" in (here / "a.py").read_text()) is is_kept


def test_version(lint: Lint) -> None:
    result = lint("--version")
    assert (result.code, result.out) == (0, f"drumline-lint {drumline_lint.__version__}\n")


@pytest.mark.skipif(sys.version_info >= (3, 12), reason="this Python can read it")
def test_an_f_string_over_several_lines_is_newer_syntax(lint: Lint, here: Path) -> None:
    (here / "d.py").write_text('print(\n    f"known: {\n        names\n    }"\n)\n')
    result = lint("d.py")
    assert result.code == 0
    assert "it has syntax of Python 3.12" in result.lines[0]


@pytest.mark.skipif(sys.version_info >= (3, 14), reason="this Python has the syntax")
def test_what_a_newer_python_could_read_is_a_note(lint: Lint, here: Path) -> None:
    (here / "d.py").write_text("try:\n    pass\nexcept TypeError, ValueError:\n    pass\n")
    result = lint("c.py", "d.py")
    this = f"{sys.version_info.major}.{sys.version_info.minor}"
    assert result.code == 0
    assert result.lines[0].startswith(
        "d.py:3:8: note DL000 unreadable: the file was not checked: "
        f"it has syntax of Python 3.14, and this is Python {this}"
    )
    assert result.lines[-1] == "nothing found in 1 file; 1 file could not be read"


def test_a_rule_that_fails_ends_nothing(lint: Lint, monkeypatch: pytest.MonkeyPatch) -> None:
    class Broken:
        RULE = RULES["DL201"].RULE

        @staticmethod
        def check(program: object, source: object) -> list[object]:
            raise KeyError("x")

    monkeypatch.setattr(command, "all_rules", lambda: {**RULES, "DL201": Broken})
    result = lint("b.py")
    assert result.code == 2
    assert "DL999 rule-failed: rule DL201 failed on this file" in result.out
    assert "b.py:1:1: warning DL102" in result.out
    assert lint("b.py", "--ignore", "DL201").code == 1


def test_settings_come_from_pyproject(lint: Lint, here: Path) -> None:
    (here / "pyproject.toml").write_text(
        '[tool.drumline.lint]\nignore = ["DL1"]\nseverity = "note"\n'
    )
    assert lint(".").lines[0].startswith("a.py:2:1: note DL201")
    assert lint(".", "--no-config").code == 1
    assert lint("a.py", "--select", "DL101").code == 1


def test_formats_and_output(lint: Lint, here: Path) -> None:
    assert json.loads(lint("a.py", "--format", "json").out)["summary"]["shown"]["error"] == 1
    assert lint("a.py", "--format=github").out.startswith("::error file=a.py,line=1,")
    silent = lint("a.py", "--format", "sarif", "--output", "out.sarif")
    assert (silent.code, silent.out) == (1, "")
    assert (
        json.loads((here / "out.sarif").read_text())["runs"][0]["results"][0]["ruleId"] == "DL101"
    )
    assert lint(".", "--statistics").lines == [
        "1  error    DL101  bad-call   a call of bad-call",
        "1  warning  DL102  poor-call  a call of poor-call",
        "1 error, 1 warning in 2 of 3 files; 1 can be fixed (--fix); 1 note not shown (--severity note)",
    ]


def test_fix_and_diff(lint: Lint, here: Path) -> None:
    shown = lint("a.py", "--diff")
    assert shown.code == 1
    assert shown.lines[:7] == [
        *("--- a/a.py", "+++ b/a.py", "@@ -1,2 +1,2 @@", "-bad()", "+good()", " odd()"),
        "a.py:1:1: error DL101 bad-call: bad() is called",
    ]
    assert (here / "a.py").read_text() == CODE
    both = lint("a.py", "--diff", "--fix")
    assert (both.code, both.lines[4]) == (0, "+good()")
    assert both.lines[-1] == "nothing found in 1 file; 1 fixed; 1 note not shown (--severity note)"
    assert (here / "a.py").read_text() == "good()\nodd()\n"
    again = lint("a.py", "--fix")
    assert again.out == "nothing found in 1 file; 1 note not shown (--severity note)\n"


def test_notebooks_are_read_and_not_written(lint: Lint, here: Path) -> None:
    text = json.dumps({"cells": [{"cell_type": "code", "source": ["x = 1\n", "bad()"]}]})
    (here / "n.ipynb").write_text(text)
    result = lint("n.ipynb", "--fix")
    assert result.code == 1
    assert result.lines[0] == "n.ipynb:cell 1:2:1: error DL101 bad-call: bad() is called"
    assert result.err == (
        "drumline-lint: 1 place in notebooks could be fixed, but notebooks are not written: edit them by hand\n"
    )
    assert (here / "n.ipynb").read_text() == text


def test_the_standard_input(lint: Lint, monkeypatch: pytest.MonkeyPatch, here: Path) -> None:
    def typed(text: str, *arguments: str) -> Outcome:
        (here / "typed").write_text(text)
        with (here / "typed").open() as file:
            monkeypatch.setattr(sys, "stdin", file)
            return lint("-", *arguments)

    assert typed("\nbad()\n").lines[0] == "<stdin>:2:1: error DL101 bad-call: bad() is called"
    named = typed("bad()\n", "--stdin-filename", "src/x.py", "c.py")
    assert named.lines[0].startswith("src/x.py:1:1: error")
    assert named.lines[-1].startswith("1 error in 1 of 2 files")
    assert typed("echo 'x", "--stdin-filename", "x.sh").code == 0


@pytest.mark.parametrize(
    ("arguments", "messages"),
    [
        ([], ["no PATH was given", "try: give files or folders, as in: drumline-lint ."]),
        (["nowhere.py"], ["there is no nowhere.py"]),
        (["a.py", "--formt", "x"], ["drumline-lint has no flag --formt; did you mean '--format'?"]),
        (
            ["a.py", "--qqq=3"],
            ["drumline-lint has no flag --qqq\n", "try: read drumline-lint --help"],
        ),
        (
            ["a.py", "--format"],
            ["argument --format: expected one argument", "read drumline-lint --help"],
        ),
        (["a.py", "--format", "jsn"], ["argument --format: invalid choice: 'jsn' (choose from"]),
        (["a.py", "--severity", "x"], ["argument --severity: invalid choice: 'x' (choose from"]),
        (
            ["a.py", "--select", "bad-cal"],
            ["--select: there is no rule 'bad-cal'; did you mean 'bad-call'?"],
        ),
        (["--explain", "DL1"], ["--explain: there is no rule 'DL1'"]),
        (["a.py", "--stdin-filename", "x.py"], ["--stdin-filename belongs to the path -"]),
        (["-", "--fix"], ["what comes from the standard input cannot be fixed; use --diff"]),
        (
            ["a.py", "--statistics", "--format", "json"],
            ["--statistics are text", "summary.by_rule"],
        ),
        (["a.py", "--statistics", "--format", "github"], ["--statistics are text"]),
        (
            ["a.py", "--diff", "--format", "json"],
            ["--diff and --format json would both be on the standard"],
        ),
        (
            ["a.py", "--output", "no/where"],
            ["--output no/where cannot be written: No such file or directory"],
        ),
    ],
)
def test_wrong_usage_is_explained(lint: Lint, arguments: list[str], messages: list[str]) -> None:
    result = lint(*arguments)
    assert (result.code, result.out) == (2, "")
    assert result.err.startswith("drumline-lint: error: ")
    for message in messages:
        assert message in result.err


def test_the_rules_are_listed_and_explained(lint: Lint) -> None:
    assert [line.split()[0] for line in lint("--list").lines] == [
        "DL000",
        "DL999",
        "DL101",
        "DL102",
        "DL201",
    ]
    for word in ("DL102", "dl102", "poor-call"):
        assert lint("--explain", word).lines[0] == "DL102 poor-call (warning)"


def test_help_teaches(lint: Lint) -> None:
    result = lint("--help")
    assert result.code == 0
    assert lint("-h").out == result.out
    assert max(map(len, result.lines)) <= 80
    for flag in (
        *(
            "--format",
            "--select",
            "--ignore",
            "--severity",
            "--exclude",
            "--fix",
            "--diff",
            "--statistics",
        ),
        *("--explain", "--list", "--exit-zero", "--output", "--no-config", "--stdin-filename"),
    ):
        assert f"\n  {flag} " in result.out, flag
    assert "exit codes: 0 no error" in result.out


# As a process


def test_it_runs_without_torch_and_imports_nothing_that_it_reads(tmp_path: Path) -> None:
    (tmp_path / "train.py").write_text(
        "import torch\nfrom torch.nn.parallel import DistributedDataParallel as DDP\n"
        "torch.distributed.init_process_group()\n"
        "open('was-run', 'w')\nmodel = DDP(torch.nn.Linear(8, 2))\n"
        "torch.save(model.module.state_dict(), 'model.pt')\n"
    )
    result = python_m("train.py", "--select", "unguarded-save", cwd=tmp_path)
    assert (result.returncode, result.stderr) == (1, "")
    assert result.stdout.startswith("train.py:6:1: warning DL014 unguarded-save: ")
    assert not (tmp_path / "was-run").exists()


def test_python_code_needs_no_other_package(tmp_path: Path) -> None:
    """So that CI may install it without torch; manifests need PyYAML."""
    code = "import torch.distributed as dist\ndist.init_process_group()\n"
    (tmp_path / "run.py").write_text(f"{code}if dist.get_rank() == 0:\n    dist.barrier()\n")
    for arguments in (("--format", "github"), ("--format", "json"), ("--diff",), ("--statistics",)):
        result = subprocess.run(
            [sys.executable, "-S", "-m", "drumline_lint", "run.py", *arguments],
            cwd=tmp_path,
            env={**os.environ, "PYTHONPATH": str(ROOT)},
            capture_output=True,
            text=True,
            check=False,
        )
        assert (result.returncode, result.stderr) == (1, ""), arguments


def test_odd_names_can_be_shown(tmp_path: Path) -> None:
    name = os.fsdecode(b"\xff.py")
    (tmp_path / name).write_text("(")
    result = python_m(".", cwd=tmp_path)
    assert "DL000 unreadable" in result.stdout, result.stderr
    for form in ("json", "sarif", "github"):
        assert "DL000" in python_m(".", "--format", form, cwd=tmp_path).stdout


@pytest.mark.parametrize(("no_color", "coloured"), [("", True), ("1", False)])
def test_a_terminal_gets_colours_and_progress(
    tmp_path: Path, no_color: str, coloured: bool
) -> None:
    for number in range(command.MANY_FILES):
        (tmp_path / f"f{number}.py").write_text("x = 1\n")
    (tmp_path / "wrong.py").write_text("(")
    ours, theirs = pty.openpty()
    subprocess.run(
        [sys.executable, "-m", "drumline_lint", "."],
        cwd=tmp_path,
        env={**os.environ, "PYTHONPATH": str(ROOT), "NO_COLOR": no_color},
        stdout=theirs,
        stderr=theirs,
        check=False,
    )
    os.close(theirs)
    parts = []
    # the end of a terminal; on a busy machine its text arrives bit by bit
    with contextlib.suppress(OSError):
        while part := os.read(ours, 65536):
            parts.append(part)
    os.close(ours)
    shown = b"".join(parts).decode()
    assert f"reading file {command.MANY_FILES} of {command.MANY_FILES + 1}\r\x1b[K" in shown
    assert f"\r\x1b[Klooking at file 10 of {command.MANY_FILES + 1}" in shown
    assert "\r\x1b[Kwrong.py" in shown.replace("\x1b[1m", ""), "the line is cleared"
    assert ("\x1b[31merror\x1b[0m DL000" in shown) == coloured


def test_the_sarif_report_has_the_version(lint: Lint) -> None:
    (run,) = json.loads(lint("a.py", "--format", "sarif").out)["runs"]
    assert run["tool"]["driver"]["version"] == drumline_lint.__version__


def test_the_hook_of_pre_commit(tmp_path: Path) -> None:
    (hook,) = yaml.safe_load((ROOT.parents[1] / ".pre-commit-hooks.yaml").read_text())
    assert (hook["id"], hook["language"], hook["require_serial"]) == (
        "drumline-lint",
        "system",
        True,
    )
    assert {"python", "jupyter", "shell"} <= set(hook["types_or"])
    files = ["a.py", "b.ipynb", "c.sh", "d.bash", "e.sbatch", "f.slurm", "g.yaml", "h.yml"]
    files += ["Dockerfile", "Dockerfile.gpu", "train.dockerfile"]
    assert all(re.search(hook["files"], name) for name in files)
    assert not re.search(hook["files"], "notes.txt")
    program, *words = shlex.split(hook["entry"])
    assert program == "drumline-lint"
    for name in files:
        (tmp_path / name).write_text('{"cells": []}' if name.endswith("ipynb") else "echo = 1\n")
    result = subprocess.run(
        [sys.executable, "-m", "drumline_lint", *words, *files],
        cwd=tmp_path,
        env={**os.environ, "PYTHONPATH": str(ROOT)},
        capture_output=True,
        text=True,
        check=False,
    )
    assert (result.returncode, result.stderr) == (0, "")
    assert result.stdout == "nothing found in 9 files\n"
