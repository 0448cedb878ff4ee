from __future__ import annotations

import pytest

from drumline.launch.commands import resume_command, two_node_command


def test_resuming_is_the_same_command_less_the_wish_for_a_new_start() -> None:
    assert resume_command(["digits", "--fresh", "--run", "my run"]) == "drumline train digits --run 'my run'"


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
