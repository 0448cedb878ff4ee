"""`drumline launch --print skypilot|parallelcluster`: files that their own schemas accept, and
every refusal."""

from __future__ import annotations

import gzip
import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from drumline.cli import main
from drumline.cli.cloud_file import EFA_TYPES

WHY = "pip install 'drumline[dev]' brings it"
yaml = pytest.importorskip("yaml", reason=WHY)
SKYPILOT = Path(__file__).parents[3] / "data/skypilot/task.json"
PARALLELCLUSTER = Path(sys.prefix, "schemas")
CLUSTER = [
    *("--print", "parallelcluster", "--type", "g6.12xlarge", "--region", "us-east-1"),
    *("--subnet", "subnet-12345678", "--ssh-from", "192.0.2.7/32"),
]
# Its own loader, in a process without ours: one error or `None` for each document.
LOAD = """
import json, sys
from pcluster.schemas.cluster_schema import ClusterSchema
for document in json.load(sys.stdin):
    try:
        ClusterSchema(cluster_name="x").load(document)
        print("None")
    except Exception as error:
        print(error)
"""


@pytest.fixture(name="printed")
def make_printed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> Any:
    monkeypatch.chdir(tmp_path)

    def printed(*words: str) -> str:
        code = main(["launch", *words])
        out, err = capsys.readouterr()
        assert code == 0, err
        return str(out)

    return printed


def valid_for_skypilot(text: str) -> dict[str, Any]:
    validator = pytest.importorskip("jsonschema", reason=WHY).Draft202012Validator(
        json.loads(SKYPILOT.read_text())
    )
    document: dict[str, Any] = yaml.safe_load(text)
    assert [error.message for error in validator.iter_errors(document)] == []
    document["resources"]["instance_typ"] = "x"
    document["num_node"] = 2
    assert len(list(validator.iter_errors(document))) == 2, "the schema takes anything"
    return dict(yaml.safe_load(text))


def test_a_skypilot_task_is_valid(printed: Any, tmp_path: Path) -> None:
    text = printed(
        "--print",
        "skypilot",
        "--accelerators",
        "A100:8",
        "--procs",
        "8",
        "digits",
        "--train.epochs",
        "3",
    )
    task = valid_for_skypilot(text)
    assert task["resources"] == {
        "accelerators": "A100:8",
        "use_spot": False,
        "disk_size": 150,
        "autostop": {"idle_minutes": 60, "down": True},
    }
    assert (task["name"], task["num_nodes"], task["secrets"]) == (
        "digits",
        2,
        {"DRUMLINE_SECRET": None},
    )
    wheel = "'./drumline-wheels/drumline-0.1.0-py3-none-any.whl[aws,storage]'"
    assert task["setup"] == f"pip install --quiet {wheel}\n"
    assert sorted(path.name for path in (tmp_path / "drumline-wheels").iterdir()) == [
        "drumline-0.1.0-py3-none-any.whl"
    ]
    assert text.startswith(
        "# Written by drumline launch --print skypilot. Start it with:\n"
        '#   sky launch --cluster digits --secret DRUMLINE_SECRET="$(openssl rand -hex 32)" FILE\n'
        "# The disks are lost with the nodes: --checkpoint.mirror keeps checkpoints in a bucket.\n"
    )


def test_a_skypilot_task_on_spot_instances_of_aws(printed: Any) -> None:
    words = [
        "--type",
        "g6.12xlarge",
        "--zone",
        "us-east-1a",
        "--spot",
        "--max-price",
        "3",
        "--nodes",
        "1",
    ]
    text = printed(
        "--print=skypilot", *words, "--idle-minutes", "0", "train.py", "--note", "a 'b'\n  c é"
    )
    task = valid_for_skypilot(text)
    assert task["resources"] == {
        "infra": "aws/*/us-east-1a",
        "instance_type": "g6.12xlarge",
        "use_spot": True,
        "max_hourly_cost": 3.0,
        "disk_size": 150,
    }
    assert "secrets" not in task
    assert "#   sky jobs launch FILE\n" in text
    assert task["run"].endswith(" -- train.py --note 'a '\"'\"'b'\"'\"'\n  c é'\n")


def test_each_node_of_a_skypilot_task_is_a_node_of_the_job(printed: Any, tmp_path: Path) -> None:
    """The script runs in bash as SkyPilot runs it; a stand-in for drumline shows its arguments."""
    run = yaml.safe_load(
        printed("--print", "skypilot", "--type", "x", "--grace", "9", "train.py", "a b", "$HOME")
    )["run"]
    program = tmp_path / "drumline"
    program.write_text('#!/bin/sh\nprintf "%s\\n" "$@"\n')
    program.chmod(0o755)
    variables = {
        "SKYPILOT_NODE_IPS": "10.0.0.1\n10.0.0.2",
        "SKYPILOT_NUM_NODES": "2",
        "SKYPILOT_NODE_RANK": "1",
    }
    environment = {"PATH": f"{tmp_path}:/usr/bin:/bin", **variables}
    done = subprocess.run(
        ["bash", "-c", run], env=environment, capture_output=True, text=True, check=True
    )
    assert done.stdout.splitlines() == [
        *("launch", "--nodes", "2", "--node-rank", "1", "--master", "10.0.0.1", "--grace=9.0"),
        *("--", "train.py", "a b", "$HOME"),
    ]


def test_a_parallelcluster_file_is_valid(printed: Any, tmp_path: Path) -> None:
    if not PARALLELCLUSTER.is_dir():
        pytest.skip("make setup brings aws-parallelcluster")
    (tmp_path / "run.toml").write_text(
        '[aws]\nnodes = 4\nspot = true\nmax_price = 3\nvolume = "fs-12345678"\n'
    )
    plain = printed(*CLUSTER, "--gpus", "4", "digits")
    large_text = printed(
        *CLUSTER, "--config", "run.toml", "--efa", "--key", "k", "--ami", "ami-12345678", "train.py"
    )
    documents = [yaml.safe_load(text) for text in (plain, large_text, large_text)]
    documents[2]["Scheduling"]["SlurmQueues"][0]["CapacityTyp"] = "SPOT"
    environment = {
        **os.environ,
        "PYTHONPATH": str(PARALLELCLUSTER),
        "AWS_DEFAULT_REGION": "us-east-1",
    }
    written = json.dumps(documents)
    command = [sys.executable, "-c", LOAD]
    done = subprocess.run(
        command, input=written, env=environment, capture_output=True, text=True, check=True
    )
    assert done.stdout.splitlines() == [
        *(
            "None",
            "None",
            "{'Scheduling': {'SlurmQueues': {0: {'CapacityTyp': ['Unknown field.']}}}}",
        )
    ]
    assert (
        "#   /mnt/shared/drumline/bin/drumline launch --slurm --partition train --nodes 2 --gpus 4 -- digits "
        "--run /mnt/shared/runs/digits\n"
    ) in plain
    assert documents[0]["SharedStorage"][0]["EfsSettings"] == {
        "Encrypted": True,
        "DeletionPolicy": "Retain",
    }
    queue = documents[1]["Scheduling"]["SlurmQueues"][0]
    assert queue["CapacityType"] == "SPOT"
    assert queue["ComputeResources"][0]["MaxCount"] == 4
    assert queue["ComputeResources"][0]["Efa"] == {"Enabled": True}
    assert queue["ComputeResources"][0]["SpotPrice"] == 3.0
    assert documents[1]["SharedStorage"][0]["EfsSettings"] == {"FileSystemId": "fs-12345678"}


def test_what_is_in_this_folder_can_be_installed(printed: Any, tmp_path: Path) -> None:
    """It is copied to the nodes: a wheel, or a project with the extras that the task needs."""
    (tmp_path / "dist").mkdir()
    (tmp_path / "dist/drumline-0.1.0-py3-none-any.whl").touch()
    (tmp_path / "pyproject.toml").write_text('[project]\nname = "my_project"\n')
    requirements = "dist/drumline-0.1.0-py3-none-any.whl .[train] torch==2.13.0"
    task = valid_for_skypilot(
        printed("--print", "skypilot", "--type", "x", "--install", requirements, "digits")
    )
    installs = "dist/drumline-0.1.0-py3-none-any.whl '.[train]' torch==2.13.0\n"
    assert task["setup"] == f"pip install --quiet {installs}"
    assert f"bin/pip install {installs}" in printed(*CLUSTER, "--install", requirements, "digits")


def test_an_argument_cannot_leave_the_comment(printed: Any) -> None:
    text = printed(*CLUSTER, "train.py", "a\nRegion: mars")
    assert yaml.safe_load(text)["Region"] == "us-east-1"


def test_a_file_is_written(
    printed: Any, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    text = printed(*CLUSTER, "digits")
    assert main(["launch", *CLUSTER, "--out", "cluster.yaml", "digits"]) == 0
    assert capsys.readouterr().err == (
        "drumline: wrote this installation to drumline-wheels, from which the nodes install it; keep it here\n"
        "drumline: wrote cluster.yaml; its first lines show how to start it\n"
    )
    assert (tmp_path / "cluster.yaml").read_text() == text


@pytest.mark.parametrize(
    ("words", "messages"),
    [
        (["--print", "skypilo", "digits"], ["'skypilo': there is no such task"]),
        (
            ["--print=skypilo", "digits"],
            ["--print: 'skypilo' is not skypilot | parallelcluster"],
        ),
        (["--print", "skypilot", "digits"], ["--print skypilot needs --accelerators or --type"]),
        (
            ["--print", "skypilot", "--hosts", "a,b", "--type", "x", "digits"],
            ["--hosts and --print skypilot exclude each other: each says where the job runs"],
        ),
        (
            [
                "--print",
                "skypilot",
                "--accelerators",
                "8",
                "--type",
                "x",
                "--subnet",
                "s",
                "--gpus",
                "8",
                "digits",
            ],
            [
                "--subnet: is not for --print skypilot",
                "--gpus: is not for --print skypilot",
                "--accelerators: '8' is not NAME or NAME:N, such as A100:8",
                "--accelerators and --type exclude each other: each says which GPUs a node has",
            ],
        ),
        (
            ["--print", "parallelcluster", "--region", "us-east-1", "digits"],
            [
                "--print parallelcluster needs --type and --subnet",
                "--ssh-from: is missing; ParallelCluster would open ssh of the head node to the whole internet",
            ],
        ),
        (
            [*CLUSTER, "--zone", "us-east-1a", "digits"],
            ["--zone: is not for --print parallelcluster"],
        ),
        (
            [*CLUSTER, "--efa", "4", "digits"],
            ["--efa: is on or off for --print parallelcluster; leave the number out"],
        ),
        (
            [*CLUSTER, "--slurm", "digits"],
            ["--slurm and --print parallelcluster exclude each other"],
        ),
        ([*CLUSTER, "--nnodes", "3:4", "digits"], ["--nnodes is 3:4, but there are 2 in --nodes"]),
        (
            [
                "--print",
                "skypilot",
                "--type",
                "x",
                "--install",
                "drumline dist/x.whl ../a",
                "digits",
            ],
            [
                "--install: dist/x.whl is not in this folder, which is all that the nodes get",
                "--install: ../a is not in this folder",
            ],
        ),
        *(
            (
                [*where, "digits", "--checkpoint.mirror", "s3://me:hunter2@bucket/runs"],
                ["checkpoint.mirror takes no user"],
            )
            for where in (
                CLUSTER,
                ["--print", "skypilot", "--type", "x"],
                ["--slurm", "--print"],
                ["--print"],
            )
        ),
        (["--type", "x", "digits"], ["--type: needs --print skypilot or --print parallelcluster"]),
    ],
)
def test_what_is_wrong_with_a_cloud_file(
    words: list[str],
    messages: list[str],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: Any,
) -> None:
    monkeypatch.chdir(tmp_path)
    assert main(["launch", *words]) == 2
    shown = capsys.readouterr().err
    assert [message for message in messages if message not in shown] == [], shown
    assert "hunter2" not in shown


def test_wheels_that_cannot_be_written_are_an_error_that_names_the_folder(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "drumline-wheels").touch()
    assert main(["launch", *CLUSTER, "digits"]) == 2
    assert (
        f"the wheels of this installation could not be written to {tmp_path / 'drumline-wheels'}: File exists"
    ) in capsys.readouterr().err


def test_parallelcluster_turns_efa_on_for_a_type_that_has_it(printed: Any) -> None:
    """As the help of --efa says."""

    def efa(*flags: str) -> tuple[Any, bool]:
        text = printed("--print", "parallelcluster", *CLUSTER[4:], *flags, "digits")
        document = yaml.safe_load(text)
        is_noted = "# EFA is off: if the type has it, write the file again with --efa.\n" in text
        return document["Scheduling"]["SlurmQueues"][0]["ComputeResources"][0].get("Efa"), is_noted

    assert efa("--type", "p5.48xlarge") == ({"Enabled": True}, False)
    assert efa("--type", "p5.48xlarge", "--no-efa") == (None, True)
    assert efa("--type", "g6.xlarge") == (None, True)
    assert efa("--type", "c5n.18xlarge", "--efa") == ({"Enabled": True}, False)


@pytest.mark.parametrize("end", ["\n", "\r", "\u2028", "\x85"])
def test_an_argument_of_the_script_stays_in_its_comment(printed: Any, end: str) -> None:
    text = printed(*CLUSTER, "train.py", "--note", f"x{end}Tags: [hostile] #")
    assert "Tags" not in yaml.safe_load(text)


def test_the_accelerated_types_with_efa_are_those_of_aws() -> None:
    """moto has AWS's own description of every type."""
    moto = pytest.importorskip("moto.ec2", reason=WHY)
    text = gzip.decompress(
        Path(moto.__file__).with_name("resources").joinpath("instance_types.json.gz").read_bytes()
    )
    accelerated = {
        name: kind
        for name, kind in json.loads(text).items()
        if name.startswith(("p", "g", "trn", "hpc"))
    }
    wrong = [
        name
        for name, kind in accelerated.items()
        if bool(EFA_TYPES.fullmatch(name)) != kind["NetworkInfo"].get("EfaSupported", False)
    ]
    assert (wrong, len(accelerated) > 50) == ([], True)
