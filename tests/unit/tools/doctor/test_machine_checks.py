"""The doctor's findings about one machine: the text and the fix of each, from hand-made facts."""

from __future__ import annotations

from typing import Any

from drumline.tools.doctor.finding import Finding, has_problems, sorted_findings
from drumline.tools.doctor.machine.machine_checks import machine_findings
from tests.unit.tools.doctor.machines import GIB, gpu, healthy, network

MIB = 1 << 20
DISK = healthy()["disk"]
SHM_FIX = (
    "docker run --shm-size=8g (or --ipc=host); in Kubernetes an emptyDir with medium: Memory at /dev/shm; "
    "on your own machine: mount -o remount,size=8G /dev/shm"
)
GPU_FIX = "unset CUDA_VISIBLE_DEVICES, or export CUDA_VISIBLE_DEVICES=0,1"


def shm(size: int, free: int | None = None) -> dict[str, Any]:
    return {"shm": {"bytes": size, "free_bytes": size if free is None else free}}


def said(*, many_hosts: bool = False, **changes: Any) -> list[tuple[str, str, str]]:
    """Level, sentence and fix of each finding about a machine that is healthy but for this."""
    reported = machine_findings(healthy(**changes), many_hosts=many_hosts)
    assert all(finding.where == "node-a" for finding in reported)
    assert all(finding.fix for finding in reported if finding.level == "problem")
    return [(finding.level, finding.what, finding.fix) for finding in reported]


def test_nothing_is_reported_about_a_healthy_machine() -> None:
    assert said() == []
    assert said(many_hosts=True) == []
    assert said(gpus=[], cuda=None, driver=None, nccl=None) == []


WRONG: list[tuple[dict[str, Any], str, str, str]] = [
    (
        {"torch": None, "cuda": None},
        "problem",
        "torch is not installed for /env/bin/python",
        "pip install 'torch>=2.11'",
    ),
    (
        {"torch": "2.9.1+cu128"},
        "problem",
        "torch 2.9.1+cu128 is older than 2.11",
        "pip install 'torch>=2.11'",
    ),
    (
        {"torch": "2.13.0+cpu", "cuda": None},
        "problem",
        "torch 2.13.0+cpu was built without CUDA and cannot use the 2 GPUs",
        "pip uninstall torch, and install a CUDA build",
    ),
    ({"gpus": []}, "note", "torch 2.13.0+cu128 was built for CUDA 12.8, but there is no GPU", ""),
    (
        {"gpus": [], "gpu_error": "nvidia-smi failed: no output"},
        "problem",
        "nvidia-smi failed: no output",
        "where it is slow: nvidia-smi -pm 1; where it fails: dmesg | grep -i nvrm, and restart the machine",
    ),
    (
        {"gpu_error": "nvidia-smi did not answer within 1.8 s"},
        "warning",
        "nvidia-smi did not answer within 1.8 s",
        "where it is slow: nvidia-smi -pm 1; where it fails: dmesg | grep -i nvrm, and restart the machine",
    ),
    (
        {"driver": "525.60.11"},
        "problem",
        "driver 525.60.11 is too old for CUDA 12.8, which torch was built for: 525.60.13 or later is needed",
        "update the driver (in a container, add cuda-compat), or install a build for an older CUDA",
    ),
    ({"visible_gpus": ""}, "problem", "CUDA_VISIBLE_DEVICES= hides 2 GPUs from torch", GPU_FIX),
    (
        {"visible_gpus": "0,0"},
        "problem",
        "CUDA_VISIBLE_DEVICES=0,0 lists 0 twice, so torch sees no GPU at all",
        GPU_FIX,
    ),
    (
        {"visible_gpus": "0,2,1"},
        "problem",
        "CUDA_VISIBLE_DEVICES=0,2,1 lists '2', which is not one of the 2 GPUs of this host: torch sees only the "
        "first 1",
        GPU_FIX,
    ),
    (
        {"visible_gpus": "GPU-7"},
        "problem",
        "CUDA_VISIBLE_DEVICES=GPU-7 lists 'GPU-7', which is not one of the 2 GPUs of this host: torch sees none",
        GPU_FIX,
    ),
    (
        {"gpus": [gpu(0), gpu(1, name="NVIDIA A100"), gpu(2)]},
        "warning",
        "the GPUs differ, and the slowest one slows all of them: NVIDIA H100 80GB HBM3: 0 and 2; NVIDIA A100: 1",
        "export CUDA_VISIBLE_DEVICES=0,2",
    ),
    (
        {"gpus": [gpu(0), gpu(1, processes=[{"pid": 7, "name": "python", "memory_bytes": None}])]},
        "warning",
        "already in use: GPU 1 by python (pid 7)",
        "stop them if they are yours, or export CUDA_VISIBLE_DEVICES=0",
    ),
    (
        {"gpus": [gpu(0, used_bytes=20 * GIB)]},
        "warning",
        "already in use: GPU 0 by a process that is not visible from here (20 GiB)",
        "stop them if they are yours",
    ),
    (
        shm(64 * MIB),
        "problem",
        "/dev/shm has 64 MiB free of 64 MiB, less than the 128 MiB needed: DataLoader workers and NCCL "
        "crash there with a bus error",
        SHM_FIX,
    ),
    (
        {**shm(16 * MIB), "gpus": [], "cuda": None},
        "problem",
        "/dev/shm has 16 MiB free of 16 MiB, less than the 32 MiB needed: DataLoader workers and NCCL "
        "crash there with a bus error",
        SHM_FIX,
    ),
    (
        {**shm(64 * MIB), "gpus": [], "cuda": None},
        "warning",
        "/dev/shm has 64 MiB free of 64 MiB, enough only for small batches: DataLoader workers and NCCL crash there "
        "with a bus error",
        SHM_FIX,
    ),
    (
        shm(8 * GIB, free=1 * MIB),
        "problem",
        "/dev/shm has 1 MiB free of 8 GiB, less than the 128 MiB needed: DataLoader workers and NCCL "
        "crash there with a bus error",
        "delete what dead processes left in /dev/shm",
    ),
    (
        {"shm": None},
        "problem",
        "there is no /dev/shm, through which DataLoader workers and NCCL pass tensors",
        SHM_FIX,
    ),
    (
        {"open_files": {"soft": 1024, "hard": 524288}},
        "warning",
        "a process may have 1024 open files; DataLoader workers and connections to other ranks may need more ("
        "'Too many open files', 'received 0 items of ancdata')",
        "ulimit -n 65536",
    ),
    (
        {"open_files": {"soft": 128, "hard": 128}},
        "problem",
        "a process may have 128 open files; DataLoader workers and connections to other ranks may need more ("
        "'Too many open files', 'received 0 items of ancdata')",
        "docker run --ulimit nofile=65536, or raise nofile in /etc/security/limits.conf",
    ),
    (
        {"memory": {"bytes": 64 * GIB, "available_bytes": 60 * GIB, "limit_bytes": GIB // 2}},
        "warning",
        "512 MiB of memory is free, of the container's limit of 512 MiB: a rank with DataLoader workers needs more",
        "stop other processes, or give the container more memory (docker run --memory)",
    ),
    (
        {"disk": {"folder": "runs", "unreachable": "no answer within 1.8 s"}},
        "problem",
        "the file system of runs does not respond: no answer within 1.8 s",
        "check that its server is up (mount, dmesg)",
    ),
    (
        {"disk": {**DISK, "error": "Read-only file system"}},
        "problem",
        "cannot write to /work, where the run will be saved: Read-only file system",
        "choose a folder that you can write to with --run PATH",
    ),
    (
        {"disk": {**DISK, "free_bytes": 100 * MIB}},
        "problem",
        "100 MiB free at /work, where the run will be saved",
        "free some space, or choose another folder with --run PATH",
    ),
    (
        {"disk": {**DISK, "free_bytes": 5 * GIB}},
        "warning",
        "5 GiB free at /work, where the run will be saved",
        "free some space, or choose another folder with --run PATH",
    ),
    (
        {"disk": {**DISK, "file_system": "overlay"}},
        "note",
        "the run will be saved in the container's own layer, and lost with the container (/work is overlay)",
        "choose a folder on a disk or a volume with --run PATH",
    ),
    (
        {"data": {"folder": "/data", "unreachable": "No such file or directory"}},
        "problem",
        "cannot read the data folder /data: No such file or directory",
        "copy or mount it there, or choose another folder with --data",
    ),
    (
        {"code": {"folder": "src", "unreachable": "no answer within 1.8 s"}},
        "problem",
        "cannot read the code folder src: no answer within 1.8 s",
        "copy or mount it there, or choose another folder with --code",
    ),
    (
        {"data": {"folder": "/data", "files": 0}},
        "problem",
        "the data folder /data is empty",
        "copy the data there, or check that its volume is mounted",
    ),
    (
        {"cpus": {"count": 64, "usable": 1, "quota": None}},
        "warning",
        "a process may use 1 of this host's 64 processors for 2 GPUs: DataLoader workers will compete for them",
        "raise the limit: srun --cpus-per-task=N, docker run --cpus=N or taskset",
    ),
    (
        {"clock": {"time": 1.0, "synchronised": False}},
        "note",
        "the clock is not synchronized (NTP): times in the logs of several hosts may not match",
        "timedatectl set-ntp true",
    ),
]


def test_what_is_wrong_is_a_sentence_with_a_fix() -> None:
    for changes, level, what, fix in WRONG:
        reported = said(**changes)
        assert (level, what, fix) in reported
        assert len([fault for fault in reported if fault[0] == "problem"]) == (
            level == "problem"
        ), what


def test_gpus_may_be_named_by_their_uuid_or_be_slices() -> None:
    for value in ("1", "0,1", "1, 0", "GPU-0aaa,GPU-1a", "MIG-12-34", "0"):
        assert said(visible_gpus=value) == [], value


LOOPBACK = {"gloo_interface": "lo", "addresses": ["127.0.1.1"]}
BRIDGED = {
    "interfaces": [
        network("lo", "127.0.0.1"),
        network("docker0", "172.17.0.1"),
        network("eth0", "10.0.0.1"),
    ],
    "nccl_interface": "docker0",
}
OUTSIDE = "which reaches no other host"


NOWHERE: list[tuple[dict[str, Any], str | None, str | None, str, str]] = [
    (
        {"addresses": [], "name_error": "Name or service not known"},
        "warning",
        "problem",
        "its host name does not resolve on itself (Name or service not known); torchrun and gloo need it",
        "add a line to /etc/hosts: 10.0.0.1 node-a",
    ),
    (
        LOOPBACK,
        None,
        "warning",
        "its host name resolves to 127.0.1.1 on itself, which no other host can reach",
        "map node-a to 10.0.0.1 in /etc/hosts",
    ),
    (
        LOOPBACK,
        "note",
        None,
        f"gloo would use the loopback (lo; GLOO_SOCKET_IFNAME is not set), {OUTSIDE}",
        "export GLOO_SOCKET_IFNAME=eth0",
    ),
    (
        {"nccl_interface": "lo", "variables": {"NCCL_SOCKET_IFNAME": "lo"}},
        "note",
        None,
        f"NCCL would use the loopback (lo; NCCL_SOCKET_IFNAME=lo), {OUTSIDE}",
        "export NCCL_SOCKET_IFNAME=eth0",
    ),
    (
        BRIDGED,
        "warning",
        None,
        "NCCL would use docker0 172.17.0.1 (NCCL_SOCKET_IFNAME is not set), a bridge inside this host",
        "export NCCL_SOCKET_IFNAME=eth0",
    ),
    (
        {"gloo_interface": None, "variables": {"GLOO_SOCKET_IFNAME": "eth9"}},
        "problem",
        "problem",
        "GLOO_SOCKET_IFNAME=eth9 names no interface of this host, which has lo 127.0.0.1 and eth0 10.0.0.1",
        "export GLOO_SOCKET_IFNAME=eth0",
    ),
]


def test_what_leads_nowhere_alone_and_with_other_hosts() -> None:
    for changes, alone, with_others, what, fix in NOWHERE:
        for many_hosts, level in ((False, alone), (True, with_others)):
            reported = said(many_hosts=many_hosts, **changes)
            assert [fault[0] for fault in reported if fault[1:] == (what, fix)] == (
                [] if level is None else [level]
            )


def test_a_machine_without_any_network_may_use_the_loopback() -> None:
    only = {
        "interfaces": [network("lo", "127.0.0.1")],
        "gloo_interface": "lo",
        "nccl_interface": "lo",
    }
    assert said(**only) == []


def test_problems_come_first_and_decide() -> None:
    reported = machine_findings(healthy(torch=None, cpus={"count": 1, "usable": 1, "quota": None}))
    assert [finding.level for finding in sorted_findings(reported)] == ["problem", "warning"]
    assert has_problems(reported)
    assert not has_problems([finding for finding in reported if finding.level != "problem"])
    assert Finding(level="note", check="x", where="a", what="b").line() == "note: a: b"
