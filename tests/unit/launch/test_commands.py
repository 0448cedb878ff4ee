from __future__ import annotations

from pathlib import Path

import pytest

from drumline.launch.commands import interrupted, resume_command, two_node_command


@pytest.mark.parametrize(
    ("words", "procs", "resumes"),
    [
        (["digits", "--fresh", "--run", "my run"], 1, "digits --run 'my run'"),
        (["digits", "--procs", "2"], 2, "digits --procs 2"),
        (["--procs=2", "digits"], 2, "--procs=2 digits"),
        (["digits"], 2, "digits --procs 2"),  # the launcher had it
    ],
)
def test_resuming_is_the_same_command_less_the_wish_for_a_new_start(
    words: list[str], procs: int, resumes: str
) -> None:
    assert resume_command(words, procs=procs) == f"drumline train {resumes}"


def test_after_an_interrupt_the_same_command_resumes_only_what_was_saved(tmp_path: Path) -> None:
    assert interrupted(None, ["digits"]) == (
        "interrupted; rerun the same command to resume from the newest checkpoint, if one was saved"
    )
    (tmp_path / "checkpoints" / ".step-00000005.partial").mkdir(parents=True)
    assert interrupted(tmp_path, ["digits", "--fresh"]) == (
        "interrupted before the first save; rerun the same command to start from the beginning"
    )
    (tmp_path / "checkpoints" / "step-00000005").mkdir()
    assert interrupted(tmp_path, ["digits"]) == (
        "interrupted; rerun the same command to resume from the newest checkpoint"
    )
    assert interrupted(tmp_path, ["digits", "--fresh"]) == (
        "interrupted; rerun the same command without --fresh to resume from the newest checkpoint"
    )


@pytest.mark.parametrize(
    ("words", "rest"),
    [
        ("digits --procs 4 --run x --fresh", "--run x"),
        ("--procs=4 digits --run x", "--run x"),
        ("--run digits digits", "--run digits"),
        ("--optim.lr=0.1 digits --run digits", "--optim.lr=0.1 --run digits"),
        ("--log.tensorboard digits", "--log.tensorboard"),
    ],
)
def test_on_two_nodes_the_launcher_has_its_flags_before_the_task(words: str, rest: str) -> None:
    command = two_node_command("digits", words.split(), procs=4)
    assert command == f"drumline launch --hosts HOST_A,HOST_B --procs 4 digits {rest}"
