"""`drumline profile` and `drumline launch --profile` as a user types them."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from drumline.cli import main, profile_command
from drumline.tools.doctor.doctor_report import as_json
from tests.cli.test_command import drumline, torch_blocked
from tests.unit.tools.profile.test_merged_trace import processes_of
from tests.unit.tools.scale.profiles import two_ranks

SCRIPT = """
import sys, time, torch, torch.distributed as dist
from torch import nn
from torch.utils.data import DataLoader, TensorDataset
dist.init_process_group("gloo")
print("begins")
model = nn.parallel.DistributedDataParallel(nn.Linear(64, 8), bucket_cap_mb=4)
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
critic = torch.optim.SGD([nn.Parameter(torch.ones(1))], lr=0.1)
for step, (x,) in enumerate(DataLoader(TensorDataset(torch.randn(4 * int(sys.argv[1]), 64)), batch_size=4)):
    model(x).sum().backward()
    time.sleep(0.2 * dist.get_rank())
    optimizer.step()
    critic.step()
print("took", step + 1, "steps")
dist.destroy_process_group()
"""


AT_EXIT = """
import atexit
atexit.register(lambda: print("in a group at exit:", dist.is_initialized()))
"""


@pytest.mark.world_size(2)
@pytest.mark.usefixtures("warm")
def test_steps_of_a_script_are_profiled_and_it_is_ended_after_them(tmp_path: Path) -> None:
    (tmp_path / "train.py").write_text(AT_EXIT + SCRIPT)
    words = ["--procs", "2", "--steps", "4", "--run", "profiled", "--json", "train.py", "10000"]
    found = drumline("profile", *words, cwd=tmp_path)
    assert found.returncode == 0, found.stdout + found.stderr
    assert "begins" in found.stderr
    assert "took 10000 steps" not in found.stderr
    # Python's exit would free it with threads in it, which sometimes aborts the process.
    assert found.stderr.count("in a group at exit: False") == 2
    result = json.loads(found.stdout)
    assert (result["task"], result["first_step"], result["num_steps"], result["world_size"]) == (
        "train.py",
        10,
        4,
        2,
    )
    assert [rank["critical_steps"] for rank in result["ranks"]] == [0, 4]
    assert sum(result["parts_s"].values()) == pytest.approx(result["step_s"], rel=0.02)
    assert result["parts_s"]["data"] > 0
    assert (result["bucket_cap_mb"], [bucket["num_bytes"] for bucket in result["buckets"]]) == (
        4,
        [65 * 8 * 4],
    )
    assert result["advice"][0]["bottleneck"] == "slow_rank"
    merged = tmp_path / "profiled/profile/merged.trace.json.gz"
    assert [name.split(" on ")[0] for name in processes_of(merged)] == ["rank 0", "rank 1"]


@pytest.mark.world_size(2)
@pytest.mark.usefixtures("warm")
def test_a_launched_script_continues_after_the_profiled_steps(tmp_path: Path) -> None:
    (tmp_path / "train.py").write_text(SCRIPT)
    words = ["--procs", "2", "--profile", "3:6", "--profile-to", "here", "train.py", "9"]
    result = drumline("launch", *words, cwd=tmp_path)
    assert result.returncode == 0, result.stdout + result.stderr
    assert result.stdout.count("took 9 steps") == 2
    assert (
        "profile of train.py: steps 3 to 5, 2 ranks, cpu, gloo\nrank 1 is slow: the others wait"
        in result.stdout
    )
    assert "the trace of all ranks: " in result.stdout


def measured_on(host: str, rank: int, gb_per_s: float) -> dict[str, Any]:
    """What `drumline doctor --hosts a,b --json` prints of a rank."""
    numbers = {"world_size": 2, "all_reduce_bytes": 4 << 20, "all_reduce_gb_per_s": gb_per_s}
    result = {"rank": rank, "numbers": {**numbers, "all_reduce_latency_us": 80.2}, "findings": []}
    return {"host": host, "rank": rank, "result": result}


def test_the_profile_of_a_folder_is_shown_again(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    two_ranks(tmp_path)
    (tmp_path / "profile/profile.json").unlink()  # it is made again
    measured = tmp_path / "doctor.json"
    measured.write_text(
        as_json([], collectives=[measured_on("a", 0, 0.2), measured_on("b", 1, 0.1)])
    )
    assert main(["profile", str(tmp_path), "--doctor", str(measured)]) == 0
    shown = capsys.readouterr().out
    assert shown.startswith("profile of digits: steps 2 to 3, 2 ranks, cpu, gloo\nrank 1 is slow")
    assert "(53% of the network's)" in shown
    assert main(["profile", str(tmp_path), "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["network_bytes_per_s"] == 1e8


WRONG = [
    ([], "no TASK was given: one of digits"),
    (["digits", "--train.epochs", "1"], "--train.epochs: give --steps"),
    (["digits", "--steps", "2000"], "--steps: at most 1,000"),
    (["digits", "--optim.lr", "-1"], "optim.lr"),
    (["empty"], "empty has no profile"),
    (["missing.py"], "there is no file missing.py"),
    (["--try", "missing.py"], "--try: is for tasks, whose settings can be changed"),
    (["profiled", "--try"], "--try: is for tasks, whose settings can be changed"),
    (
        ["--optim.lr", "1", "train.py"],
        "--optim.lr: is a setting of a task; arguments of a script go after its name",
    ),
    (["profiled", "--no.such", "3"], "--no.such: unknown flag"),
    (["profiled", "digits"], "'digits': unexpected argument"),
    (
        ["profiled", "--optim.lr", "1"],
        "--optim.lr: is a setting of a task; arguments of a script go after its name, a run folder takes none",
    ),
    (["profiled", "--steps", "3"], "--steps: is for a new profile, but a run folder was given"),
    (["--procs", "2", "profiled"], "--procs: is for a new profile, but a run folder was given"),
    (["digits", "--no.such", "3"], "no.such"),
    (
        ["profiled", "--doctor", "none.json"],
        "--doctor: none.json has no measured all_reduce of several ranks",
    ),
    (
        ["digits", "--doctor", "none.json"],
        "--doctor: none.json has no measured all_reduce of several ranks",
    ),
]


@pytest.mark.parametrize(("words", "message"), WRONG)
def test_wrong_commands_are_explained(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    words: list[str],
    message: str,
) -> None:
    monkeypatch.chdir(tmp_path)
    Path("empty").mkdir()
    Path("train.py").write_text("raise SystemExit(2)")
    two_ranks(Path("profiled"))
    assert main(["profile", *words]) == 2
    assert message in capsys.readouterr().err


@pytest.mark.parametrize("has_profile", [False, True])
def test_a_task_comes_before_a_folder_of_its_name_without_a_profile(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, *, has_profile: bool
) -> None:
    monkeypatch.chdir(tmp_path)
    Path("digits").mkdir()
    if has_profile:
        two_ranks(Path("digits"))
    started: list[str] = []

    def run_command(words: list[str], *_: object) -> int:
        started.extend(words)
        return 7

    monkeypatch.setattr(profile_command, "run_command", run_command)
    assert main(["profile", "digits"]) == (0 if has_profile else 7)
    assert started[:2] == ([] if has_profile else ["train", "digits"])


def test_help_and_mistakes_need_no_torch(tmp_path: Path) -> None:
    shown = drumline("profile", "--help", cwd=tmp_path, **torch_blocked(tmp_path))
    assert (shown.returncode, shown.stdout.startswith("usage: drumline profile TASK")) == (
        0,
        True,
    ), shown.stderr
