"""What a script is known to say: its variables, its Slurm options, and what it starts, behind
whatever."""

from __future__ import annotations

from pathlib import Path

import pytest

from drumline_lint.reading.launchers import launches
from drumline_lint.reading.shell import Script


def script(text: str) -> Script:
    return Script(Path("job.sh"), text)


def values(text: str) -> dict[str, str | None]:
    read = script(text)
    return {found.name: read.constant(found.value) for found in read.assignments}


@pytest.mark.parametrize(
    ("text", "name", "value"),
    [
        ("PORT=29500", "PORT", "29500"),
        ("export PORT='29500' HOST=a", "PORT", "29500"),
        ('a=1\nPORT="2950$a"', "PORT", "29501"),
        ("PORT=$((1 + 2))", "PORT", None),
        ("PORT=${PORT:-29500}", "PORT", None),
        ("PORT=$1", "PORT", None),
        ("a=1\na=2\nPORT=$a", "PORT", None),
        ("a=1\na+=2\nPORT=$a", "PORT", None),
        ("for a in 1 2; do PORT=$a; done\na=1", "PORT", None),
        ("read -r a\na=1\nPORT=$a", "PORT", None),
        ("if true; then a=1; fi\nPORT=$a", "PORT", None),
        ("a=$b\nb=$a\nPORT=$a", "PORT", None),
        ("#SBATCH --nodes=3\nPORT=$SLURM_NNODES", "PORT", "3"),
        ("#SBATCH -N 2-4\nPORT=$SLURM_NNODES", "PORT", None),
        ("PORT=", "PORT", ""),
    ],
)
def test_what_a_variable_is_known_to_be(text: str, name: str, value: str | None) -> None:
    assert values(text)[name] == value


def test_what_is_exported() -> None:
    text = "a=1\nexport b=2\nc=3 run\nd=4\nexport d\ndeclare -x e=5\nenv f=6 run\nlocal g=7\n"
    read = script(text)
    assert read.exported == {"b", "d", "e"}
    assert {one.name for one in read.assignments if one.is_for_command} == {"c", "f"}


def test_slurm_options_in_all_their_forms() -> None:
    text = (
        "#!/bin/bash\n"
        "#SBATCH --nodes=2 --exclusive  # both\n"
        "#SBATCH -n 4 -J name\n"
        "#SBATCH --gpus-per-node a100:4\n"
        "##SBATCH --nodes=9\n"
        "#SBATCH -c8\n"
        "#SBATCH --tasks-per-node=2\n"
        "echo\n"
        "#SBATCH --nodes=5\n"
    )
    header = script(text).sbatch
    numbers = {
        name: header.number(name)
        for name in ("nodes", "ntasks", "cpus-per-task", "ntasks-per-node")
    }
    assert numbers == {"nodes": 2, "ntasks": 4, "cpus-per-task": 8, "ntasks-per-node": 2}
    assert (header.gpus_per_node, header.has_whole_nodes, header.number("job-name")) == (
        4,
        True,
        None,
    )


@pytest.mark.parametrize(
    ("header", "is_whole"),
    [
        ("--exclusive", True),
        ("--exclusive=user", False),
        ("--mem=0", True),
        ("--gres=gpu:8", True),
        ("--gres=gpu:2", False),
        ("--gres=gpu:4 --array=0-3", False),
        ("--gres=gpu:4 --nodes=2", True),
        ("--gres=gpu:2 --nodes=2", False),
        ("--nodes=2", False),
    ],
)
def test_when_a_job_has_its_nodes_for_itself(header: str, is_whole: bool) -> None:
    assert script(f"#SBATCH {header}\n").sbatch.has_whole_nodes == is_whole


@pytest.mark.parametrize(
    "text",
    [
        "torchrun --nnodes=2 --nproc_per_node 8 train.py --nnodes 9",
        "srun --label -N 2 torchrun --nnodes=2 --nproc-per-node 8 train.py",
        "A=b nohup env C=d time torchrun --nnodes 2 --nproc-per-node=8 train.py &",
        "exec python3 -u -m torch.distributed.run --nnodes 2 --nproc 8 train.py",
        'srun bash -c "cd x && torchrun --nnodes=2 --nproc_per_node=8 train.py"',
        "ssh -p 22 host torchrun --nnodes 2 --nproc-per-node 8 train.py",
        "ssh host 'cd x; torchrun --nnodes 2 --nproc-per-node 8 train.py'",
        "mpirun -np 2 -x PATH torchrun --nnodes 2 --nproc-per-node 8 train.py",
        "singularity exec --nv image.sif torchrun --nnodes 2 --nproc-per-node 8 train.py",
        "timeout -k 10 5h torchrun --nnodes 2 --nproc-per-node 8 train.py",
        "if torchrun --nnodes 2 --nproc-per-node 8 train.py; then echo; fi",
        "/opt/env/bin/torchrun --nnodes 2 --nproc-per-node 8 train.py",
        'n=2\nflags="--nnodes $n --nproc-per-node 8"\ntorchrun $flags train.py',
        'flags=(--nnodes 2 --nproc-per-node 8)\ntorchrun "${flags[@]}" train.py',
        'cmd="torchrun --nnodes 2 --nproc-per-node 8 train.py"\n$cmd',
        'flags=(--nnodes 2 --nproc-per-node 8)\ncmd="torchrun ${flags[@]} train.py"\neval $cmd',
        "torchrun --nnodes 2 --nproc-per-node 8 -- train.py --nnodes 3",
        "torchrun --nnodes 2 --nproc-per-node 8 -m package.train --rdzv-id 3",
    ],
)
def test_torchrun_is_found_with_its_own_flags(text: str) -> None:
    read = script(text)
    (launch,) = launches(read)
    flags = {name: read.constant(flag.value) for name, flag in launch.flags.items() if flag.value}
    assert (launch.kind, flags, launch.is_sure) == (
        "torchrun",
        {"nnodes": "2", "nproc-per-node": "8"},
        True,
    )


@pytest.mark.parametrize(
    "text",
    [
        "torchrun $flags train.py",
        "torchrun --nnodes 2 ${more} train.py",
        'torchrun "$one" --nnodes 2 train.py',
        'torchrun --nnodes 2 "$script"',
        'torchrun "${flags[@]}" train.py',
        "torchrun --a-flag-of-tomorrow 2 train.py",
        "export PET_NNODES=2\ntorchrun train.py",
    ],
)
def test_there_may_be_other_flags(text: str) -> None:
    assert [launch.is_sure for launch in launches(script(text))] == [False]


@pytest.mark.parametrize(
    ("text", "kinds"),
    [
        ("srun python train.py", ["python"]),
        ("python -m torch.distributed.launch train.py", ["torch.distributed.launch"]),
        ("echo torchrun train.py", []),
        ("which torchrun && pip install torchrun", []),
        ("# torchrun train.py", []),
        ("bash run.sh torchrun", []),
    ],
)
def test_what_is_started(text: str, kinds: list[str]) -> None:
    assert [launch.kind for launch in launches(script(text))] == kinds


def test_the_arguments_of_srun() -> None:
    read = script(
        'n=4\nsrun -n $n --cpus-per-task=8 --exclusive -w "$host" $more torchrun train.py'
    )
    (launch,) = launches(read)
    assert launch.srun is not None
    assert launch.srun.by_name == {
        "ntasks": "4",
        "cpus-per-task": "8",
        "exclusive": None,
        "nodelist": None,
    }
    assert not launch.srun.is_sure


def test_places_count_as_editors_do() -> None:
    read = script("é=1\r\nx torchrun\nA=é torchrun a")
    word = read.commands[-1].words[1]
    place = read.place(word)
    assert (place.path, place.line, place.column, place.end_line, place.end_column) == (
        "job.sh",
        3,
        5,
        3,
        13,
    )
    assert read.position(word.start) == (3, 5), "an edit counts bytes"


def test_noqa() -> None:
    assert script("a  # noqa: DL102\nb # noqa\n").silenced == {
        1: frozenset({"DL102"}),
        2: frozenset(),
    }


def test_a_command_over_several_lines_is_silenced_at_its_end() -> None:
    """Behind a backslash there can be no comment."""
    text = "a \\\n  --b \\\n  c  # noqa: DL102\nd\n# e \\\nf  # noqa\n"
    assert script(text).silenced == {
        **dict.fromkeys((1, 2, 3), frozenset({"DL102"})),
        6: frozenset(),
    }
