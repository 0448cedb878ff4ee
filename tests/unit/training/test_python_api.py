"""drumline.train and drumline.load: how a class is named for the ranks, what is refused, what a
failure raises."""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path
from types import ModuleType

import pytest

import drumline
from drumline.base.errors import (
    DrumlineError,
    HangError,
    Place,
    PreflightError,
    TrainingError,
    UsageError,
)
from drumline.base.rank_environment import ERROR_FILE, ErrorRecord, read_error, write_error
from drumline.training.python_api import error_of, read_result, run_command, spec_of
from drumline.training.tasks.built_in import ImageClassification


class Nested:
    class Inner:
        pass


def class_in(module: str, name: str = "Mine") -> type:
    return type(name, (), {"__module__": module, "__qualname__": name})


@pytest.fixture
def main(monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    """A __main__ as a notebook has it: without a file."""
    module = ModuleType("__main__")
    monkeypatch.setitem(sys.modules, "__main__", module)
    return module


def test_a_class_is_named_as_other_processes_find_it(
    main: ModuleType, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    assert spec_of(ImageClassification) == "drumline.training.tasks.built_in:ImageClassification"
    monkeypatch.chdir(Path(__file__).parent)
    main.__file__ = __file__
    assert spec_of(class_in("__main__")) == "test_python_api.py:Mine"
    monkeypatch.chdir(tmp_path)
    assert spec_of(class_in("__main__")) == f"{Path(__file__).resolve()}:Mine"
    # python -m drumline.base.errors
    main.__spec__ = sys.modules["drumline.base.errors"].__spec__
    assert spec_of(class_in("__main__")) == "drumline.base.errors:Mine"


def test_a_class_that_no_other_process_can_import_is_refused(main: ModuleType) -> None:
    with pytest.raises(UsageError) as raised:
        spec_of(class_in("__main__"))
    assert raised.value.lines() == [
        "Mine is defined in a notebook or at the prompt, and ranks are other processes, which cannot import it",
        "try: put it in a file: begin its cell, imports included, with `%%writefile my_task.py`, and call "
        "drumline.train('my_task.py:Mine')",
    ]
    with pytest.raises(
        UsageError,
        match=r"Nested\.Inner is defined inside a function or a class, and ranks are other",
    ):
        spec_of(Nested.Inner)


def test_a_rank_that_imports_the_calling_script_does_not_train_in_turn(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv(ERROR_FILE, "error.json")
    with pytest.raises(UsageError, match=r'put the call under `if __name__ == "__main__":`'):
        drumline.train("digits")


def test_it_is_not_called_on_the_ranks_of_a_launcher(monkeypatch: pytest.MonkeyPatch) -> None:
    for word in ("RANK=1", "WORLD_SIZE=2", "LOCAL_RANK=1", "MASTER_ADDR=a", "MASTER_PORT=1"):
        monkeypatch.setenv(*word.split("="))
    with pytest.raises(UsageError, match="a launcher has started this process as rank 1"):
        drumline.train("digits")


def test_wrong_settings_are_raised_with_all_problems(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    with pytest.raises(UsageError) as raised:
        drumline.train(
            "digits", lr=0.1, procs=0, **{"model.widths": (8, -1), "model.options": {"a b": True}}
        )
    assert raised.value.lines()[:-1] == [
        "4 problems in the configuration:",
        "- --procs: 0 must be at least 1",
        "- --lr: unknown setting; did you mean 'optim.lr'?",
        "- --model.widths: [8, -1], where -1 must be at least 1",
        "- --model.options.a b: 'a b' cannot be the name of a keyword argument",
    ]
    assert "did you mean 'optim.lr'?" in capsys.readouterr().out
    assert list(tmp_path.iterdir()) == []


def test_a_failure_comes_back_as_the_rank_reported_it(tmp_path: Path) -> None:
    file = tmp_path / "error.json"
    place = Place(host="gpu-02", rank=3, step=1841)
    write_error(
        {ERROR_FILE: str(file)}, ErrorRecord("ValueError: label 7", None, place, "Traceback: ...")
    )
    assert read_error(file) == ErrorRecord("ValueError: label 7", None, place, "Traceback: ...")
    error = error_of(1, file, tmp_path)
    assert isinstance(error, TrainingError)
    assert (str(error), error.place) == ("ValueError: label 7 [rank 3 on gpu-02, step 1841]", place)
    assert error.__notes__ == ["Traceback: ..."]
    write_error({}, ErrorRecord("no file is set", None, Place()))
    for code, kind in {2: UsageError, 3: PreflightError, 70: HangError}.items():
        assert type(error_of(code, file, tmp_path)) is kind


def test_a_failure_that_nobody_could_report(tmp_path: Path) -> None:
    nothing = tmp_path / "error.json"
    killed = error_of(-9, nothing, Path("runs/a"))
    preempted = error_of(75, nothing, Path("runs/a"))
    assert isinstance(killed, DrumlineError)
    assert killed.lines() == [
        "the run in runs/a ended early (killed by SIGKILL)",
        "try: read runs/a/logs",
    ]
    assert str(preempted).startswith(
        "the run in runs/a was preempted, and has saved\n  try: call drumline.train again"
    )
    assert isinstance(error_of(130, nothing, Path("runs/a")), KeyboardInterrupt)


def test_the_result_is_read_from_the_run_folder(tmp_path: Path) -> None:
    (tmp_path / "events").mkdir()
    end = {"kind": "end", "best_step": 7, "metrics": {"loss": "nan"}}
    lines = [{"kind": "start"}, {**end, "best_step": 3}, end]
    (tmp_path / "events" / "rank-00000.jsonl").write_text(
        "".join(f"{json.dumps(line)}\n" for line in lines)
    )
    result = read_result(tmp_path)
    assert result.best_checkpoint == tmp_path / "checkpoints" / "step-00000007"
    assert result.metrics["loss"] != result.metrics["loss"]
    assert [event["kind"] for event in result.events] == ["start", "end", "end"]


def test_what_a_command_prints_is_shown_here(capsys: pytest.CaptureFixture[str]) -> None:
    assert run_command(["--help"], {"PYTHONPATH": os.pathsep.join(sys.path)}) == 0
    assert capsys.readouterr().out.startswith("usage: drumline VERB")
