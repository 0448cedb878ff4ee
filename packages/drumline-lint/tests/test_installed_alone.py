"""The distribution by itself: built, installed without torch into the environment of its pre-commit
recipe, and run.

pre-commit installs the wheel that is built here, with the setuptools that virtualenv has in it; pip
takes its parsers from its index.
"""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
import yaml

ROOT = Path(__file__).parents[1]
WRONG = """import torch.distributed as dist

dist.init_process_group("gloo")
if dist.get_rank() == 0:
    dist.barrier()
dist.destroy_process_group()
"""
RIGHT = WRONG.replace("if dist.get_rank() == 0:\n    ", "")
pytest.importorskip("pre_commit", reason="pip install 'drumline[dev]' brings it")


def run(
    *command: object, cwd: Path, environment: dict[str, str] | None = None
) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [*map(str, command)],
        cwd=cwd,
        env=environment,
        capture_output=True,
        text=True,
        check=False,
        timeout=120,
    )


def build_wheel(folder: Path) -> Path:
    folder.mkdir()
    source = folder / "source"
    run("cp", "-rL", ROOT, source, cwd=folder)  # a build leaves files in its folder
    options = ("--no-deps", "--no-build-isolation", "--no-index", "--wheel-dir", folder)
    built = run(sys.executable, "-m", "pip", "wheel", *options, source, cwd=folder)
    assert built.returncode == 0, built.stderr
    (wheel,) = folder.glob("drumline_lint-*.whl")
    return wheel


def check_alone(home: Path, cwd: Path) -> None:
    """What pre-commit installed is the linter with its parsers of launch files, without torch, and
    runs by itself."""
    (programs,) = home.glob("*/py_env-*/bin")
    listed = run(programs / "python", "-m", "pip", "list", "--format=freeze", cwd=cwd).stdout
    own = {line.partition("==")[0].replace("_", "-") for line in listed.splitlines()} - {
        "pip",
        "setuptools",
    }
    parsers = {"PyYAML", "tree-sitter", "tree-sitter-bash"}
    assert own == {"drumline-lint", "pre-commit-placeholder-package", *parsers}
    result = run(programs / "drumline-lint", "train.py", cwd=cwd)
    assert (result.returncode, result.stderr) == (1, "")
    assert result.stdout.startswith("train.py:5:5: error DL017 collective-on-some-ranks: ")
    explained = run(programs / "drumline-lint", "--explain", "DL014", cwd=cwd)
    assert "Bad:\n\n    import torch\n" in explained.stdout


@pytest.mark.soak
def test_the_recipe_of_the_readme_runs_in_pre_commit_without_torch(tmp_path: Path) -> None:
    (recipe,) = re.findall(
        r"^```yaml\n(.*?)^```$", (ROOT / "README.md").read_text(), re.MULTILINE | re.DOTALL
    )
    config = yaml.safe_load(recipe)
    (hook,) = config["repos"][0]["hooks"]
    assert config["repos"][0]["repo"] == "local"
    assert [one.partition(" @ ")[0] for one in hook["additional_dependencies"]] == ["drumline-lint"]
    hook["additional_dependencies"] = [str(build_wheel(tmp_path / "wheel"))]
    (tmp_path / ".pre-commit-config.yaml").write_text(yaml.safe_dump(config))
    environment = {
        **os.environ,
        "PRE_COMMIT_HOME": str(tmp_path / "home"),
        "PIP_NO_BUILD_ISOLATION": "0",  # which is how pip spells "without isolation" in a variable
        "VIRTUALENV_SETUPTOOLS": "bundle",
        "GIT_CONFIG_GLOBAL": os.devnull,
    }
    for name, text in (
        ("train.py", WRONG),
        ("notes.txt", "no code"),
        ("run.sbatch", "#!/bin/bash\n"),
    ):
        (tmp_path / name).write_text(text)
    run("git", "init", "-q", cwd=tmp_path, environment=environment)
    run(
        "git",
        "add",
        ".pre-commit-config.yaml",
        "train.py",
        "notes.txt",
        "run.sbatch",
        cwd=tmp_path,
        environment=environment,
    )
    command = (sys.executable, "-m", "pre_commit", "run", "--all-files")
    failed = run(*command, cwd=tmp_path, environment=environment)
    assert failed.returncode == 1, failed.stdout + failed.stderr
    assert "train.py:5:5: error DL017 collective-on-some-ranks: " in failed.stdout
    assert "1 error in 1 of 2 files" in failed.stdout
    check_alone(tmp_path / "home", tmp_path)
    (tmp_path / "train.py").write_text(RIGHT)
    passed = run(*command, cwd=tmp_path, environment=environment)
    assert passed.returncode == 0, passed.stdout + passed.stderr
