"""Manifests, Compose files and Dockerfiles: what is read of them, and that hostile ones do no harm."""

from __future__ import annotations

from pathlib import Path

import pytest

from drumline_lint.linter import check
from drumline_lint.reading.launchers import launches
from drumline_lint.reading.manifest import parse_size, read_dockerfile, read_manifest
from drumline_lint.reading.parse import read_bytes
from drumline_lint.rules import all_rules
from drumline_lint.settings import Settings

PATH = Path("job.yaml")
POD = """\
kind: Job
spec:
  parallelism: 4
  template:
    spec:
      containers:
        - name: train
          env:
            - {name: NNODES, value: "4"}
          command: [bash, -c]
          args:
            - %s
"""


def words_of(text: str) -> list[str]:
    """The words of the only launch."""
    (script,) = read_manifest(PATH, text).scripts
    (launch,) = launches(script)
    words = [*launch.name, *(flag.word for flag in launch.flags.values()), *launch.arguments]
    return [script.text[word.start : word.end] for word in words]


@pytest.mark.parametrize(
    "code",
    [
        "torchrun --nnodes=4 train.py",
        "'torchrun --nnodes=4 train.py'",
        '"torchrun --nnodes=4 train.py"',
        "|\n              cd /app\n              torchrun \\\n                --nnodes=4 train.py",
        ">\n              torchrun\n              --nnodes=4\n              train.py",
        ">-\n              cd /app &&\n              exec torchrun --nnodes=4 train.py",
    ],
)
def test_the_code_of_a_shell_in_any_style_of_yaml(code: str) -> None:
    assert words_of(POD % code) == ["torchrun", "--nnodes=4", "train.py"]


def test_a_list_of_words_and_its_variables() -> None:
    text = POD.replace("[bash, -c]", "[torchrun]") % '"--nnodes=$(NNODES)"\n            - train.py'
    (script,) = read_manifest(PATH, text).scripts
    (launch,) = launches(script)
    assert launch.value("nnodes") == "4"


def test_a_place_is_the_line_of_the_file_also_where_yaml_folds_lines() -> None:
    (script,) = read_manifest(
        PATH, POD % ">\n              torchrun\n              train.py"
    ).scripts
    (launch,) = launches(script)
    place = script.place(launch.arguments[0])
    assert (place.line, place.column) == (14, 15)


def test_replicas_of_one_job_are_counted_together() -> None:
    group = "{replicas: %d, template: {spec: {containers: [{name: pytorch, command: [torchrun, a.py]}]}}}"
    text = f"kind: PyTorchJob\nspec:\n  pytorchReplicaSpecs:\n    Master: {group % 1}\n    Worker: {group % 3}\n"
    containers = [script.container for script in read_manifest(PATH, text).scripts]
    assert [container.replicas for container in containers if container] == [4, 4]


def test_merge_keys_and_aliases_are_followed() -> None:
    text = (
        "x-base: &base\n  shm_size: 2gb\n  environment: &env {NCCL_DEBUG: WARN}\n"
        "services:\n  a:\n    <<: *base\n    environment: {<<: *env, RANK: 0}\n    command: torchrun a.py\n"
    )
    (script,) = read_manifest(PATH, text).scripts
    assert script.container is not None
    assert script.container.shared_memory == 2 << 30
    assert {assignment.name for assignment in script.assignments} == {"NCCL_DEBUG", "RANK"}


def test_yaml_without_a_launch_is_not_counted() -> None:
    readings = [
        read_bytes(Path("config.yaml"), b"lr: 0.1\n"),
        read_bytes(Path("notes.yaml"), b"run: use torchrun\n"),
        read_bytes(Path("chart.yaml"), b"kind: Job\n{{ if x }}\ncommand: torchrun\n{{ end }}\n"),
        read_bytes(Path("broken.yaml"), b"run: [torchrun\n"),
        read_bytes(Path("crd.yaml"), b"kind: torchrun\na: " + b"x" * 300_000),
        read_bytes(PATH, (POD % "torchrun --nnodes=4 train.py").encode()),
    ]
    report = check(readings, all_rules(), Settings(chosen=frozenset(all_rules())))
    assert report.files_read == 1
    assert [reading.problems for reading in readings] == [[]] * len(readings)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("kind: [torchrun", "the YAML cannot be parsed: while parsing a flow sequence"),
        ("kind: torchrun\na: " + "[" * 100_000, "the YAML cannot be parsed: "),
    ],
)
def test_what_cannot_be_read_is_a_problem(text: str, message: str) -> None:
    (problem,) = read_bytes(PATH, text.encode()).problems
    assert problem.message.startswith(message)


@pytest.mark.parametrize(
    "text",
    [
        "kind: &a torchrun\nspec: &s {template: {spec: *s}, containers: [*s]}\n",
        "services: &s {a: *s, command: torchrun a.py, <<: *s}\n",
        "kind: torchrun\nspec: !!python/object/apply:os.system [exit]\n",
        "\n".join(
            ["a0: &a0 [torchrun]", *(f"a{n}: &a{n} [*a{n - 1}, *a{n - 1}]" for n in range(1, 60))]
        )
        + "\nkind: Job\nspec: {template: {spec: {containers: *a59}}}\n",
    ],
    ids=["cycle", "merged with itself", "a tag", "a billion aliases"],
)
def test_hostile_yaml_is_read_in_no_time(text: str) -> None:
    reading = read_bytes(PATH, text.encode())
    assert reading.problems == []
    check([reading], all_rules(), Settings(chosen=frozenset(all_rules())))


def test_a_dockerfile_has_variables_and_a_command() -> None:
    text = (
        "FROM base AS build\nENV LOST=1\nFROM build\nENV A=1 \\\n    # why\n    B='2 3'\nENV C 4\n"
        'ENTRYPOINT ["torchrun", "--standalone"]\nCMD ["train.py", "--lr=1"]\n'
    )
    script = read_dockerfile(Path("Dockerfile"), text)
    values = {item.name: item.value.plain for item in script.assignments}
    assert values == {"A": "1", "B": "2 3", "C": "4"}
    (launch,) = launches(script)
    assert ([*launch.flags], len(launch.arguments)) == (["standalone"], 2)


@pytest.mark.parametrize(
    ("text", "size"),
    [("64m", 64 << 20), ("16gb", 16 << 30), ("32Gi", 32 << 30), ("1024", 1024), ("$SHM", None)],
)
def test_sizes(text: str, size: int | None) -> None:
    assert parse_size(text) == size


SPAWNING = """\
import torch.distributed as dist
import torch.multiprocessing as mp


def work(rank):
    dist.init_process_group("gloo", rank=rank, world_size=2)


if __name__ == "__main__":
    mp.spawn(work, nprocs=2)
"""
FLAGGED = """\
import argparse
import torch.distributed as dist

dist.init_process_group("nccl")
parser = argparse.ArgumentParser()
parser.add_argument("--local_rank", type=int, default=0)
print(parser.parse_args().local_rank)
"""


@pytest.mark.parametrize(
    ("code", "launch", "shown"),
    [
        (SPAWNING, "torchrun --nproc-per-node=2 ./train.py", ["DL067"]),
        (SPAWNING, "python ./train.py", []),
        (SPAWNING, "torchrun --nproc-per-node=2 other.py", []),
        (FLAGGED, "torchrun --nproc-per-node=2 train.py", ["DL056"]),
        (FLAGGED, "python -m torch.distributed.launch --nproc_per_node=2 train.py", []),
    ],
)
def test_how_a_script_starts_a_python_file_decides(
    code: str, launch: str, shown: list[str]
) -> None:
    files = [
        read_bytes(Path("train.py"), code.encode()),
        read_bytes(Path("run.sh"), launch.encode()),
    ]
    rules = {number: all_rules()[number] for number in ("DL056", "DL067")}
    report = check(files, rules, Settings(chosen=frozenset(rules)))
    assert [finding.rule for finding in report.findings] == shown
