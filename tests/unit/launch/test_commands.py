from __future__ import annotations

from drumline.launch.commands import resume_command, two_node_command


def test_resuming_is_the_same_command_less_the_wish_for_a_new_start() -> None:
    assert resume_command(["digits", "--fresh", "--run", "my run"]) == "drumline train digits --run 'my run'"


def test_on_two_nodes_torchrun_says_how_many_ranks_there_are() -> None:
    expected = (
        "torchrun --nnodes 2 --nproc-per-node 4 --rdzv-backend c10d --rdzv-endpoint FIRST_HOST:29500 "
        "-m -- drumline train digits --run x"
    )
    assert two_node_command(["digits", "--procs", "4", "--run", "x", "--fresh"], procs=4) == expected
    assert two_node_command(["--procs=4", "digits", "--run", "x"], procs=4) == expected
