"""What the doctor learns of the machine that the tests run on, and how it reads what tools and
files tell."""

from __future__ import annotations

import json
import os
import socket
import subprocess
import sys
import threading
from importlib import metadata
from pathlib import Path

import pytest

from drumline.base.background import in_background
from drumline.tools.doctor.finding import has_problems
from drumline.tools.doctor.machine import machine_facts
from drumline.tools.doctor.machine.folder_hashes import MAX_CODE_FILES
from drumline.tools.doctor.machine.known_variables import NOT_SHOWN, shown_variables
from drumline.tools.doctor.machine.machine_checks import machine_findings, num_visible_gpus
from drumline.tools.doctor.machine.machine_facts import (
    HostSettings,
    disk_facts,
    file_system_of,
    gpu_facts,
    host_facts,
    installed_packages,
    read_nvidia_smi,
)
from drumline.tools.doctor.machine.summary import machine_rows
from tests.unit.tools.doctor.machines import healthy

# In the form that nvidia-smi writes.
GPUS = """\
0, GPU-1f0a2c7e-9a52-7c39-8a05-3f1d1f0a2c7e, NVIDIA H200, 143771, 1, 570.172.08
1, GPU-2f0a2c7e-9a52-7c39-8a05-3f1d1f0a2c7e, NVIDIA H200, 143771, [N/A], 570.172.08
"""
PROCESSES = """\
GPU-2f0a2c7e-9a52-7c39-8a05-3f1d1f0a2c7e, 4711, /opt/env/bin/python --token hidden
GPU-2f0a2c7e-9a52-7c39-8a05-3f1d1f0a2c7e, 4712, [Not Found]
"""


def test_this_machine_is_what_it_is(tmp_path: Path) -> None:
    (tmp_path / "code").mkdir()
    (tmp_path / "code" / "train.py").write_text("print(1)")
    (tmp_path / "data").mkdir()
    (tmp_path / "data" / "0.bin").write_bytes(b"0123")
    folders = (str(tmp_path / name) for name in ("runs/new", "code", "data"))
    facts = host_facts(HostSettings(os.environ, *folders))
    assert json.loads(json.dumps(facts)) == facts
    assert facts["host"] == socket.gethostname()
    assert facts["python"] == ".".join(map(str, sys.version_info[:3]))
    assert facts["torch"].startswith(metadata.version("torch"))
    assert facts["packages"]["numpy"] == metadata.version("numpy")
    assert facts["packages"]["drumline"] != "?"
    assert facts["cpus"]["count"] == os.cpu_count()
    assert facts["memory"]["bytes"] > facts["memory"]["available_bytes"] > 0
    assert facts["shm"]["bytes"] >= facts["shm"]["free_bytes"] > 0
    assert facts["disk"]["parent"] == str(tmp_path)
    assert facts["disk"]["error"] == ""
    assert facts["disk"]["file_system"] != "?"
    assert "127.0.0.1" in [interface["address"] for interface in facts["interfaces"]]
    assert list(facts["code"]["files"]) == ["train.py"]
    assert (facts["data"]["files"], facts["data"]["bytes"]) == (1, 4)
    assert not list((tmp_path / "data").glob("*tmp*"))
    assert all(finding.where == facts["host"] for finding in machine_findings(facts))


def test_the_doctor_knows_a_machine_without_loading_torch() -> None:
    code = (
        "import sys, drumline.tools.doctor.machine.machine_facts, drumline.tools.doctor.machine.machine_checks, "
        "drumline.tools.doctor.cluster, drumline.tools.doctor.ranks.rank_processes;"
        "sys.exit(any(name in sys.modules for name in ('torch', 'numpy', 'rich')))"
    )
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0


def test_nvidia_smi_is_read() -> None:
    facts = read_nvidia_smi(GPUS, PROCESSES)
    assert facts["driver"] == "570.172.08"
    assert facts["gpu_error"] == ""
    first, second = facts["gpus"]
    assert (first["index"], first["name"], first["processes"]) == (0, "NVIDIA H200", [])
    assert (first["memory_bytes"] >> 20, first["used_bytes"] >> 20) == (143771, 1)
    assert second["used_bytes"] is None
    assert second["processes"] == [{"pid": 4711, "name": "python"}, {"pid": 4712, "name": "?"}], (
        "arguments of other people's programs are not shown"
    )
    assert read_nvidia_smi("", "") == {"driver": None, "gpus": [], "gpu_error": ""}


@pytest.mark.parametrize(
    ("script", "gpu_error"),
    [
        ("sleep 60", "nvidia-smi did not answer within 0.3 s"),
        (
            "echo 'NVIDIA-SMI has failed because'; exit 9",
            "nvidia-smi failed: NVIDIA-SMI has failed because",
        ),
        ("exit 9", "nvidia-smi failed: no output"),
        ("echo 'No devices were found'; exit 6", ""),
    ],
)
def test_an_nvidia_smi_that_fails_or_hangs(
    tmp_path: Path, script: str, gpu_error: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    program = tmp_path / "nvidia-smi"
    program.write_text(f"#!/bin/sh\n{'exec ' if 'sleep' in script else ''}{script}\n")
    program.chmod(0o755)
    (tmp_path / "version").write_text(
        "NVRM version: NVIDIA UNIX x86_64 Kernel Module  570.172.08  Tue Jul  8\n"
    )
    information = tmp_path / "gpus" / "0000:0f:00.0" / "information"
    information.parent.mkdir(parents=True)
    information.write_text(
        "Model: \t\t NVIDIA H200\nIRQ:   \t\t 257\nGPU UUID: \t GPU-1f0a\nVideo BIOS: \t\n"
    )
    monkeypatch.setattr(machine_facts, "DRIVER_FOLDER", tmp_path)
    environment = {"PATH": f"{tmp_path}:/usr/bin:/bin"}
    monkeypatch.setattr(machine_facts, "TIME_LIMIT_S", 0.3 if "sleep" in script else 20)
    seen = gpu_facts(environment)
    assert (seen["driver"], seen["gpu_error"]) == ("570.172.08", gpu_error)
    assert [(gpu["index"], gpu["name"], gpu["uuid"]) for gpu in seen["gpus"]] == [
        (0, "NVIDIA H200", "GPU-1f0a")
    ]
    facts = healthy(**seen)
    rows = dict(machine_rows(facts))
    assert (rows["driver"], rows["GPU 0"]) == ("570.172.08", "NVIDIA H200")
    assert not has_problems(machine_findings(facts)), "it may only be slow"


def test_code_of_which_only_a_part_is_read_is_shown_as_that() -> None:
    files = {f"{number}.py": "1" for number in range(MAX_CODE_FILES)}
    code = {"folder": "src", "files": files, "hash": "abc"}
    rows = dict(machine_rows(healthy(code=code)))
    assert rows["code"] == "src: the first 2,000 files, abc"


def test_a_machine_is_shown_in_lines() -> None:
    code = {"folder": "src", "files": {"a.py": "1"}, "hash": "abc"}
    data = {"folder": "/data", "files": 3, "bytes": 2048, "hash": "def", "complete": False}
    variables = {
        "NCCL_DEBUG": "WARN",
        "NCCL_RINGS": "x",
        "NCCL_BLOCKING_WAIT": "0",
        "NCCL_OWN": NOT_SHOWN,
    }
    facts = healthy(code=code, data=data, variables=variables, visible_gpus="0,1")
    assert machine_rows(facts) == [
        ("host", "node-a (10.0.0.1), Linux 6.8 x86_64"),
        ("Python", "3.12.3, /env/bin/python"),
        ("torch", "2.13.0+cu128, CUDA 12.8, NCCL 2.27.5"),
        ("driver", "570.86.15"),
        ("GPU 0", "NVIDIA H100 80GB HBM3, 80 GiB"),
        ("GPU 1", "NVIDIA H100 80GB HBM3, 80 GiB"),
        ("CUDA_VISIBLE_DEVICES", "'0,1'"),
        ("processors", "32 of 32"),
        ("memory", "512 GiB, 400 GiB free"),
        ("shared memory", "256 GiB, 256 GiB free"),
        ("open files", "65536"),
        ("run folder", "runs (nfs4, 1000 GiB, 500 GiB free)"),
        ("network", "lo 127.0.0.1, MTU 65536"),
        ("network", "eth0 10.0.0.1, MTU 1500, gloo and NCCL would use it"),
        ("clock", "synchronized"),
        ("code", "src: 1 files, abc"),
        ("data", "/data: at least 3 files, 2 KiB, def"),
        ("variable", "NCCL_DEBUG=WARN (how much NCCL logs (VERSION, WARN, INFO, TRACE))"),
        ("variable", "NCCL_RINGS=x (has no effect any more)"),
        ("variable", "NCCL_BLOCKING_WAIT=0 (an old name; see TORCH_NCCL_BLOCKING_WAIT)"),
        ("variable", f"NCCL_OWN={NOT_SHOWN} (not known to drumline)"),
    ]
    bare = healthy(
        gpus=[],
        torch=None,
        driver=None,
        visible_gpus=None,
        shm=None,
        open_files={"soft": None, "hard": None},
        cpus={"count": 8, "usable": 4, "quota": 2.5},
        memory={"bytes": 2048, "available_bytes": None, "limit_bytes": 1024},
        disk={"folder": "runs", "unreachable": "no answer within 1 s"},
        clock={"synchronised": None},
    )
    shown = dict(machine_rows(bare))
    assert (shown["torch"], shown["driver"], shown["GPUs"]) == ("not installed", "none", "none")
    assert shown["CUDA_VISIBLE_DEVICES"] == "not set"
    assert shown["processors"] == "4 of 8, the container's quota is 2.5"
    assert shown["memory"] == "2 KiB, 0 bytes free, the container's limit is 1 KiB"
    assert (shown["shared memory"], shown["open files"], shown["clock"]) == (
        "none",
        "no limit",
        "?",
    )
    assert shown["run folder"] == "runs: no answer within 1 s"


def test_how_many_gpus_torch_would_see() -> None:
    values = {None: 2, "": 0, "0": 1, "1,0": 2, "0,0": 0, "0,7,1": 1, "GPU-1": 1, "MIG-a,MIG-b": 2}
    assert {value: num_visible_gpus(healthy(visible_gpus=value)) for value in values} == values
    assert num_visible_gpus(healthy(cuda=None)) == 0


def test_a_call_that_does_not_return_is_given_up() -> None:
    never = threading.Event()
    with pytest.raises(TimeoutError):
        in_background(never.wait).result(0.05)
    never.set()
    with pytest.raises(ZeroDivisionError):
        in_background(lambda: 1 // 0).result(20)
    assert in_background(lambda: 7).result(20) == 7


def test_packages_are_those_that_would_be_imported(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for file, name, version in (
        ("first/torch-2.11.0.dist-info/METADATA", "torch", "2.11.0"),
        ("first/Own_Tool.egg-info/PKG-INFO", "Own_Tool", "0.3"),
        ("second/torch-2.13.0+cpu.dist-info/METADATA", "torch", "2.13.0+cpu"),
        ("second/numpy-2.4.6.dist-info/METADATA", "numpy", "2.4.6"),
        ("second/not_a_package/METADATA", "no", "1"),
    ):
        (tmp_path / file).parent.mkdir(parents=True)
        (tmp_path / file).write_text(f"Name: {name}\nVersion: {version}\n")
    (tmp_path / "first/broken-1.0.dist-info").mkdir()
    monkeypatch.setattr(
        sys, "path", [str(tmp_path / "first"), str(tmp_path / "second"), str(tmp_path / "none")]
    )
    assert installed_packages() == {"numpy": "2.4.6", "own-tool": "0.3", "torch": "2.11.0"}


def test_the_version_of_torch_is_that_of_the_torch_that_would_be_imported(tmp_path: Path) -> None:
    (tmp_path / "torch").mkdir()
    (tmp_path / "torch" / "__init__.py").write_text("raise SystemExit('imported')")
    (tmp_path / "torch" / "version.py").write_text(
        "from typing import Optional\n__version__ = '2.12.0+cu130'\ncuda: Optional[str] = '13.0'\n"
    )
    metadata = tmp_path / "nvidia_nccl_cu13-2.28.9.dist-info" / "METADATA"
    metadata.parent.mkdir()
    metadata.write_text("Name: nvidia-nccl-cu13\nVersion: 2.28.9\n")
    code = (
        "from drumline.tools.doctor.machine.machine_facts import *; print(torch_facts(installed_packages())); "
        "import sys; sys.modules['torch'] = None; print(torch_facts({}))"
    )
    environment = {
        **os.environ,
        "PYTHONPATH": f"{tmp_path}:{os.environ.get('PYTHONPATH', Path.cwd())}",
    }
    completed = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, env=environment, check=True
    )
    assert completed.stdout.splitlines() == [
        "{'torch': '2.12.0+cu130', 'cuda': '13.0', 'nccl': '2.28.9'}",
        "{'torch': None, 'cuda': None, 'nccl': None}",
    ]


def test_values_of_unknown_variables_are_not_shown() -> None:
    environment = {
        "NCCL_DEBUG": "INFO\x1b[2J",
        "NCCL_MY_PLUGIN": "something",
        "CUDA_API_TOKEN": "hunter2",
        "HOME": "/root",
        "OMP_NUM_THREADS": "4",
        "NCCL_IB_HCA": "x" * 1000,
    }
    shown = shown_variables(environment)
    assert shown == {
        "CUDA_API_TOKEN": NOT_SHOWN,
        "NCCL_DEBUG": "INFO?[2J",
        "NCCL_IB_HCA": "x" * 200,
        "NCCL_MY_PLUGIN": NOT_SHOWN,
        "OMP_NUM_THREADS": "4",
    }


def test_the_file_system_is_that_of_the_nearest_mount(tmp_path: Path) -> None:
    mounts = (
        f"/dev/a / ext4 rw 0 0\nserver:/x {tmp_path}/my\\040volume nfs4 rw 0 0\n"
        f"tmpfs {tmp_path}/my\\040volumes tmpfs rw 0 0\n"
    )
    assert file_system_of(tmp_path / "my volume" / "runs", mounts) == "nfs4"
    assert file_system_of(tmp_path, mounts) == "ext4"
    assert file_system_of(tmp_path, "") == "?"


def test_a_folder_that_cannot_be_written_to_says_why() -> None:
    facts = disk_facts(Path("/proc/no/such"))
    assert facts["parent"] == "/proc"
    assert facts["error"]
