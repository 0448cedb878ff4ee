"""`drumline prove-resume` with real jobs and real kills: what holds is proved, and what breaks it
is named."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import time
from pathlib import Path

import pytest

from drumline.base.errors import DrumlineError, ExitCode
from drumline.cli import prove_resume_command
from tests.cli.test_command import ROOT, drumline, python_m, torch_blocked
from tests.conftest import children_that_stay

TASKS = """
import os
import time
import torch
from torch import nn
from drumline import Loss, Task

class Rows(torch.utils.data.Dataset):
    def __init__(self):
        self.rows = torch.arange(120.0).reshape(40, 3) / 120
    def __len__(self):
        return 40
    def __getitem__(self, index):
        return self.rows[index]

class Sound(Task):
    defaults = {"train.steps": 100, "train.batch_size": 4, "optim.lr": 0.01, "optim.warmup_steps": 50}
    def model(self):
        return nn.Linear(3, 1)
    def train_data(self):
        return Rows()
    def loss(self, model, batch):
        time.sleep(0.05)  # so that a kill is in time on a busy machine too
        return Loss(model(batch).square().sum())

class Unseeded(Sound):
    def train_data(self):
        class Noisy(Rows):
            def __getitem__(self, index):
                generator = torch.Generator().manual_seed(int.from_bytes(os.urandom(4), "little"))
                return self.rows[index] + torch.rand(3, generator=generator)
        return Noisy()

class Remembering(Sound):
    seen = 0
    def loss(self, model, batch):
        self.seen += 1
        loss = super().loss(model, batch)
        return Loss(loss.total * self.seen)

class Averaging(Sound):
    # A running mean in a plain attribute, used in evaluation alone.
    mean = 0.0
    def eval_data(self):
        return Rows()
    def loss(self, model, batch):
        loss = super().loss(model, batch)
        if model.training:
            self.mean = 0.9 * self.mean + 0.1 * float(batch.mean())
            return loss
        return Loss(loss.total + self.mean)

class Cached(Sound):
    # A table that is computed at the first use, in a buffer that is not saved.
    defaults = Sound.defaults | {"checkpoint.every_steps": 5}
    def model(self):
        class Rotary(nn.Linear):
            def __init__(self):
                super().__init__(3, 1)
                self.register_buffer("table", torch.zeros(3), persistent=False)
            def forward(self, rows):
                if not self.table.any():
                    self.table = torch.cos(torch.arange(3.0))
                return super().forward(rows * self.table)
        return Rotary()

class Drawing(Sound):
    check_mean = False  # its noise may make a sum look like a mean

    def model(self):
        class Noisy(nn.Linear):
            def forward(self, rows):
                return super().forward(rows) * (1 + int.from_bytes(os.urandom(2), "little") / 65536)
        return Noisy(3, 1)

class Failing(Sound):
    def loss(self, model, batch):
        raise ValueError("no loss today")
"""
KILL = ["--steps", "6", "--kill-at", "3", "--kill-in", "step", "--dist.device", "cpu"]


@pytest.fixture(name="folder")
def make_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    (tmp_path / "tasks.py").write_text(TASKS)
    (tmp_path / "tmp").mkdir()
    monkeypatch.setenv("TMPDIR", str(tmp_path / "tmp"))
    return tmp_path


@pytest.mark.soak
@pytest.mark.usefixtures("warm")
def test_a_built_in_task_on_two_ranks_is_proved(folder: Path) -> None:
    result = drumline(
        *(
            "prove-resume",
            "digits",
            "--model.widths",
            "8",
            "--world",
            "2",
            "--kill-in",
            "save",
            "--seed",
            "1",
        ),
        *("--steps", "20", "--kill-rank", "all", "--dist.device", "cpu"),
        cwd=folder,
    )
    assert result.returncode == 0, result.stdout + result.stderr
    first, changed, reference, *legs, leg_1, leg_2, last = result.stdout.splitlines()
    assert first == "kills are drawn from --seed 1"
    assert changed == "changed for the proof: checkpoint.every_steps 2 (it was 0)"
    assert reference == "reference: 2 ranks, 20 steps without a kill"
    assert all("trying again with an earlier one" in line for line in legs)
    assert re.fullmatch(r"leg 1: 2 ranks, killed with -9 .* step \d+ \(ranks 0, 1\)", leg_1)
    assert re.fullmatch(r"leg 2: 2 ranks from step \d+, to the end", leg_2)
    assert last == "proved: 20 steps, 1,280 samples, 31 tensors: the same bits after 1 kill"
    assert not list((folder / "tmp").glob("drumline-prove-*"))


@pytest.mark.soak
@pytest.mark.usefixtures("warm")
def test_another_number_of_ranks_is_proved_in_the_elastic_mode(folder: Path) -> None:
    model = (
        "--model.widths",
        "8",
        "--model.dropout",
        "0.2",
        "--data.augment",
        "--train.shards",
        "4",
    )
    result = drumline(
        *("prove-resume", "digits", "--world", "2,1", "--seed", "4", "--steps", "9", *model),
        cwd=folder,
    )
    assert result.returncode == 0, result.stdout + result.stderr
    lines = result.stdout.splitlines()
    assert "the legs have different numbers of ranks (2, 1): --train.exact elastic is on" in lines
    assert lines[-1] == "proved: 9 steps, 576 samples, 31 tensors: the same bits after 1 kill"


@pytest.mark.soak
@pytest.mark.usefixtures("warm")
def test_two_kills_in_one_save_and_a_cache_that_is_not_saved(folder: Path) -> None:
    result = drumline(
        *(
            "prove-resume",
            "tasks.py:Cached",
            "--world",
            "1,1,1",
            "--kill-in",
            "save",
            "--kill-at",
            "6,7",
        ),
        *("--steps", "12", "--dist.device", "cpu"),
        cwd=folder,
    )
    assert result.returncode == 0, result.stdout + result.stderr
    lines = result.stdout.splitlines()
    assert lines[1] == "changed for the proof: optim.warmup_steps 6 (it was 50)"
    assert lines[-2] == "proved: 12 steps, 48 samples, 4 tensors: the same bits after 2 kills"
    assert lines[-1].startswith("  note: the buffer table (persistent=False) is not in checkpoints")


@pytest.mark.usefixtures("warm")
@pytest.mark.parametrize(
    ("task", "difference", "cause"),
    [
        (
            "Unseeded",
            r"sample \d+ \(position 0 of epoch 1\) differs at step 1 \[leg 1\]",
            "unseeded randomness in the dataset: sample ",
        ),
        pytest.param(
            "Remembering",
            r"weight differs after step \d, and \d other tensors with it \[leg 2\]",
            "state outside the checkpoint, in the model, the task or the optimizer",
            marks=pytest.mark.soak,
        ),
        (
            "Drawing",
            r"weight differs after step 1, and \d other tensors with it \[leg 1\]",
            "a non-deterministic kernel, or randomness in the model or its loss that is not from the global generators",
        ),
        (
            "Averaging",
            r"loss of the evaluation after step \d is \S+, not \S+ \[leg 2\]",
            "state outside the checkpoint, used in evaluation",
        ),
    ],
)
def test_what_breaks_it_is_named(folder: Path, task: str, difference: str, cause: str) -> None:
    result = drumline("prove-resume", f"tasks.py:{task}", *KILL, cwd=folder)
    assert result.returncode == 1, result.stdout + result.stderr
    assert not result.stderr
    said, because, advice, kept = result.stdout.splitlines()[-4:]
    assert re.fullmatch(f"not proved: {difference}", said), result.stdout
    if task == "Remembering" and (
        resumed := re.search(r"leg 2: 1 rank from step (\d)", result.stdout)
    ):
        assert f"after step {int(resumed[1]) + 1}, " in said, (
            "the first step that a new process takes"
        )
    assert because.startswith(f"  likely cause: {cause}")
    assert advice.startswith("  try: ")
    root = Path(kept.removeprefix("  folder: "))
    assert (root / "reference" / "trace" / "rank-00000.jsonl").exists()
    assert (root / "killed" / "trace-leg-1" / "rank-00000.jsonl").exists()


@pytest.mark.usefixtures("warm")
def test_a_job_that_fails_by_itself_is_shown(folder: Path) -> None:
    result = drumline("prove-resume", "tasks.py:Failing", *KILL, cwd=folder)
    assert result.returncode == 1
    assert "drumline: error: the reference run failed by itself with exit code 1:" in result.stderr
    assert "ValueError: no loss today" in result.stderr
    assert "reference.log" in result.stderr
    assert list((folder / "tmp").iterdir())


@pytest.mark.usefixtures("warm")
@pytest.mark.parametrize(("number", "world"), [(signal.SIGINT, 2), (signal.SIGHUP, 1)])
def test_nothing_is_left_of_a_proof_that_is_broken_off(
    folder: Path, number: signal.Signals, world: int
) -> None:
    process = subprocess.Popen(
        [
            *python_m("drumline"),
            "prove-resume",
            "digits",
            "--world",
            str(world),
            "--steps",
            "5000",
            "--model.widths",
            "8",
            "--dist.device",
            "cpu",
        ],
        cwd=folder,
        env={**os.environ, "PYTHONPATH": str(ROOT)},
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        # Whoever started these tests may not want to hear of the signal (nohup), and that is
        # inherited.
        preexec_fn=lambda: signal.signal(number, signal.SIG_DFL),
    )
    while process.poll() is None and not list(
        (folder / "tmp").glob(f"*/reference/trace/rank-{world - 1:05d}.jsonl")
    ):
        time.sleep(0.05)
    process.send_signal(number)
    _, errors = process.communicate(timeout=60)
    assert process.returncode == 128 + number, errors
    assert errors == "drumline: interrupted; its folder was removed\n"
    assert not children_that_stay()
    assert not list((folder / "tmp").glob("drumline-prove-*"))


def test_all_mistakes_come_at_once_and_before_torch(folder: Path) -> None:
    result = drumline(
        *(
            "prove-resume",
            "digit",
            "--world",
            "2,0",
            "--steps",
            "none",
            "--kill-in",
            "sav",
            "--kill-rank",
            "5",
        ),
        *("--kill-at", "3,2", "--train.epochs", "2", "--optim.lr", "-1"),
        cwd=folder,
        **torch_blocked(folder),
    )
    assert result.returncode == 2, result.stderr
    for part in (
        "'digit': there is no such task; did you mean 'digits'?",
        "--world: [2, 0], where 0 must be at least 1",
        "--steps: 'none' is not a whole number",
        "--kill-in: 'sav' is not one of step, save, evaluation, any; did you mean 'save'?",
        "--train.epochs: use --steps instead",
        "--optim.lr: -1.0 must be above 0",
        "read drumline prove-resume --help",
    ):
        assert part in result.stderr, f"{part} is missing in {result.stderr}"
    assert "--kill-at" not in result.stderr, "what depends on a wrong number is not judged"


def test_kills_that_cannot_be_are_refused() -> None:
    refusal = refused("digits", "--world", "2", "--kill-at", "3,2", "--kill-rank", "5")
    assert (
        "--kill-rank: '5' is neither 'all' nor a rank of every leg that is killed (0 to 1)"
        in refusal
    )
    assert "--kill-at: 2 steps for 1 kill (--world 2,2)" in refusal
    few = refused("digits", "--world", "9,2", "--steps", "1")
    assert "--steps: 1 is too few: " in few
    assert "; give at least 4" in few
    assert "--world: 9 ranks cannot share 8 shards (train.shards)" in few


def refused(*words: str) -> str:
    """Why, said in this process."""
    with pytest.raises(DrumlineError) as caught:
        prove_resume_command.run(words)
    assert caught.value.exit_code == ExitCode.USAGE
    return str(caught.value)


def test_a_task_that_is_not_there_is_reported_before_anything_runs(
    folder: Path, request: pytest.FixtureRequest
) -> None:
    request.getfixturevalue("warm")
    (folder / "broken.py").write_text("import nothing_of_this_name")
    for task, message in (
        ("task.py:Sound", f"there is no file task.py (looked in {folder})"),
        ("tasks.py:Sond", "tasks.py has no class 'Sond'; did you mean 'Sound'?"),
        (
            "broken.py:Sound",
            "broken.py:Sound cannot be loaded: ModuleNotFoundError: No module named 'nothing_of",
        ),
    ):
        result = drumline("prove-resume", task, cwd=folder)
        assert result.returncode == 2
        assert message in result.stderr
        assert not result.stdout


def test_wrong_places_are_reported(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(folder)
    assert "no TASK was given" in refused()
    full = refused("digits", "--keep", ".")
    assert "the folder . is not empty\n  try: choose another with --keep DIR" in full
    assert "the folder tasks.py/x cannot be made or written: Not a directory" in refused(
        "digits", "--keep", "tasks.py/x"
    )
    launched = {
        "RANK": "0",
        "WORLD_SIZE": "1",
        "LOCAL_RANK": "0",
        "MASTER_ADDR": "x",
        "MASTER_PORT": "1",
    }
    for name, value in launched.items():
        monkeypatch.setenv(name, value)
    assert "prove-resume is run once, but a launcher has started this process" in refused("digits")


def test_help_says_what_it_takes(folder: Path) -> None:
    result = drumline("prove-resume", "--help", cwd=folder, **torch_blocked(folder))
    assert result.returncode == 0
    for flag in (
        "--world",
        "--steps",
        "--kill-at",
        "--kill-in",
        "--kill-rank",
        "--seed",
        "--keep",
        "--config",
    ):
        assert f"\n  {flag}  " in result.stdout
    assert "exit codes: 0 proved, 1 not proved, or a run failed, 2 wrong usage, 3 " in result.stdout
