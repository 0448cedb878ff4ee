"""docs/compare.md and its scripts: the line counts are those of the files, and the Drumline scripts
do what it says.

The scripts of the other libraries are run by `make compare`.
"""

from __future__ import annotations

import importlib
import re
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from torch.nn.functional import cross_entropy

from drumline.base.user_code import load_class
from drumline.config.schema import Config

ROOT = Path(__file__).parents[2]
FOLDER = ROOT / "examples" / "compare"
PAGE = (ROOT / "docs" / "compare.md").read_text()
WITHOUT_CODE = '''"""A docstring."""

from common import (
    show,
)

# A comment.
show(1,
     2)
'''
WITH_CODE = '''def one():
    """A docstring."""

    text = """two
    lines"""  # and a comment
    return show(text)
'''


@pytest.fixture(name="runner")
def import_runner(monkeypatch: pytest.MonkeyPatch) -> Iterator[Any]:
    monkeypatch.syspath_prepend(FOLDER)
    yield importlib.import_module("run")
    for name in ("run", "common"):
        del sys.modules[name]


def test_lines_of_code_are_counted_without_imports_and_comments(
    runner: Any, tmp_path: Path
) -> None:
    file = tmp_path / "script.py"
    for text, lines in ((WITHOUT_CODE, 0), (WITH_CODE, 4), (WITHOUT_CODE + WITH_CODE, 4)):
        file.write_text(text)
        assert runner.code_lines(file) == lines


def test_the_page_has_the_line_counts_of_the_files(runner: Any) -> None:
    shown = re.findall(r"\[(\d+)\]\(\.\./examples/compare/(\w+)\.py\)", PAGE)
    assert {name: int(lines) for lines, name in shown} == {
        f"{job}_{library}": runner.code_lines(runner.script(job, library))
        for job in runner.JOBS
        for library in runner.LIBRARIES
    }
    assert all(line in PAGE for line in runner.line_counts())


@pytest.mark.parametrize("library", ["lightning", "accelerate", "trainer", "drumline"])
def test_the_page_for_newcomers_shows_the_scripts_as_they_are(library: str) -> None:
    code = (FOLDER / f"f1_{library}.py").read_text().partition("\n\n")[2]
    assert (
        f"```python no-run\n{code.strip()}\n```" in (ROOT / "docs" / "coming-from.md").read_text()
    )


@pytest.mark.soak
def test_the_metrics_of_the_f1_script_are_those_of_scikit_learn(runner: Any) -> None:
    # not in every worker of the suite
    from sklearn.metrics import confusion_matrix, f1_score

    task = load_class(f"{FOLDER / 'f1_drumline.py'}:Job")(Config())
    data = task.eval_data()
    model = task.model()
    outputs = task.loss(model, data.columns).outputs
    results = {}
    for name, metric in task.metrics().items():
        metric.update(*outputs)
        results[name] = metric.compute()
    labels = data.columns["labels"]
    chosen = runner.chosen(model, data)
    assert results["f1"].item() == pytest.approx(
        f1_score(labels, chosen, average="macro"), abs=1e-6
    )
    assert results["confusion"].tolist() == confusion_matrix(labels, chosen).tolist()


@pytest.mark.soak
def test_the_loss_of_the_tokens_script_is_a_mean_over_tokens() -> None:
    task = load_class(f"{FOLDER / 'tokens_drumline.py'}:Job")(Config())
    batch = task.collate(list(task.eval_data()))
    model = task.model()
    loss = task.loss(model, batch)
    assert loss.weight == (batch["labels"] != -100).sum() == loss.outputs[0]
    true = cross_entropy(model(batch["tokens"]).transpose(1, 2), batch["labels"])
    assert (loss.total / loss.weight).item() == pytest.approx(true.item(), rel=1e-5)


@pytest.mark.soak
@pytest.mark.usefixtures("warm")
def test_the_ema_script_reports_the_accuracy_of_the_average_on_two_ranks(
    runner: Any, tmp_path: Path
) -> None:
    comparison = runner.compare_ema(runner.script("ema", "drumline"), tmp_path / "ema")
    assert comparison["accuracy reported"] == comparison["accuracy of the average"]
    assert 1 < int(comparison["stopped after"].removesuffix(" epochs")) < 60


@pytest.mark.usefixtures("warm")
def test_the_script_that_is_killed_runs(runner: Any, tmp_path: Path) -> None:
    """That a kill changes nothing is shown in tests/multiproc, for tasks and for loops;
    examples/gan.py is the last."""
    assert runner.run(runner.script("resume", "drumline"), tmp_path / "resume", ranks=1).weights
