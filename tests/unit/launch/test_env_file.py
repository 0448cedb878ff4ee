from __future__ import annotations

from pathlib import Path

import pytest

from drumline.base.errors import UsageError
from drumline.launch.env_file import read_env_file
from drumline.launch.node_plan import NodePlan

WHOLE = """\
# the first node
NUMBER_OF_NODES=2
export NODE_RANK = 1
NUMBER_OF_GPUS="4"   # all of them
MASTER_ADDR='node-a'
MASTER_PORT=29500  # open to the group

DDP_TIMEOUT_SECONDS=120
DATASET_DIR="/data/with space"
OUTPUT_DIR=/runs
NCCL_DEBUG=INFO
PASSWORD="it's #1\\n\\"so\\""
"""


def env_file(folder: Path, text: str) -> Path:
    path = folder / ".env"
    path.write_text(text)
    return path


def problems_of(folder: Path, text: str) -> list[str]:
    with pytest.raises(UsageError) as caught:
        read_env_file(env_file(folder, text))
    return [line.replace(f"{folder}/", "") for line in str(caught.value).splitlines()]


def test_a_whole_file_is_read(tmp_path: Path) -> None:
    file = read_env_file(env_file(tmp_path, WHOLE))
    variables = file.variables
    assert file.node == NodePlan(num_nodes=2, node_rank=1, num_procs=4, endpoint="node-a:29500")
    assert file.task_defaults("digits") == [
        ("--dist.train_timeout_s", "120"),
        ("--data.dir", "/data/with space"),
        ("--run", "/runs/digits"),
    ]
    assert variables["PASSWORD"] == 'it\'s #1\n"so"'
    assert variables["NUMBER_OF_GPUS"] == "4"
    assert file.other_names == ["NCCL_DEBUG", "PASSWORD"]


def test_what_may_be_empty_or_missing(tmp_path: Path) -> None:
    short = "NUMBER_OF_NODES=1\nNODE_RANK=0\nNUMBER_OF_GPUS=1\nMASTER_ADDR=10.0.0.1\nMASTER_PORT=1\nOUTPUT_DIR=\n"
    file = read_env_file(env_file(tmp_path, short + "DDP_TIMEOUT_SECONDS= # none\n"))
    assert [value for _, value in file.task_defaults("digits")] == [None, None, None]


def test_every_mistake_is_named_with_its_line_and_no_secret_is_shown(tmp_path: Path) -> None:
    text = """\
NUMBER_OF_NODES=two
NODE_RANKS=0
NUMBER_OF_GPUS=0
MASTER_PORT=70000
MASTER_ADDR=-x
AWS_SECRET_ACCESS_KEY: hunter2
TOKEN="hunter2
DATASET_DIR=/a
DATASET_DIR=/b
DDP_TIMEOUT_SECONDS=-1
"""
    assert problems_of(tmp_path, text) == [
        "10 problems in .env:",
        "  - .env:2: NODE_RANKS is not known; did you mean 'NODE_RANK'?",
        "  - .env:6: the line is not KEY=VALUE",
        "  - .env:7: the quotes of TOKEN are not closed, or text follows them",
        "  - .env:9: DATASET_DIR is set twice (first in .env:8)",
        "  - .env:1: NUMBER_OF_NODES is 'two'; give a number of nodes (3), or the smallest and the largest (2:3)",
        "  - .env:3: NUMBER_OF_GPUS is '0'; a whole number from 1 up is needed",
        "  - .env:4: MASTER_PORT is '70000'; a whole number from 1 to 65535 is needed",
        "  - .env:10: DDP_TIMEOUT_SECONDS is '-1'; a whole number from 1 up is needed",
        "  - .env:5: MASTER_ADDR: '-x': a host's name does not start with a dash; ssh would read it as a flag",
        "  - .env: missing: NODE_RANK",
    ]


def test_a_node_rank_beyond_the_nodes(tmp_path: Path) -> None:
    wrong = WHOLE.replace("NODE_RANK = 1", "NODE_RANK=2")
    assert problems_of(tmp_path, wrong) == [
        "1 problem in .env:",
        "  - .env:3: NODE_RANK is '2'; a whole number from 0 to 1 is needed",
    ]


@pytest.mark.parametrize(
    ("key", "meant"),
    [
        ("MASTER_ADDRESS", "MASTER_ADDR"),
        ("NUM_OF_NODES", "NUMBER_OF_NODES"),
        ("node_rank", "NODE_RANK"),
    ],
)
def test_what_looks_like_a_typo_is_rejected(tmp_path: Path, key: str, meant: str) -> None:
    assert f"  - .env:13: {key} is not known; did you mean {meant!r}?" in problems_of(
        tmp_path, f"{WHOLE}{key}=1\n"
    )


def test_values_do_not_show_in_a_repr(tmp_path: Path) -> None:
    assert "so" not in repr(read_env_file(env_file(tmp_path, WHOLE)))


def test_a_file_that_cannot_be_read(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match=r"none cannot be read: No such file") as caught:
        read_env_file(tmp_path / "none")
    assert caught.value.next_step == "check the path of --env-file"
    (tmp_path / "binary").write_bytes(b"\xff")
    with pytest.raises(UsageError, match="cannot be read: it is not text"):
        read_env_file(tmp_path / "binary")


def test_fewer_nodes_may_do(tmp_path: Path) -> None:
    file = tmp_path / ".env"
    rest = "NODE_RANK=2\nNUMBER_OF_GPUS=1\nMASTER_ADDR=a\nMASTER_PORT=1\n"
    file.write_text(f"NUMBER_OF_NODES=2:3\n{rest}")
    node = read_env_file(file).node
    assert (node.min_nodes, node.num_nodes) == (2, 3)
    file.write_text(f"NUMBER_OF_NODES=2:\n{rest}")
    with pytest.raises(UsageError, match="NUMBER_OF_NODES is '2:'; give a number of nodes"):
        read_env_file(file)
