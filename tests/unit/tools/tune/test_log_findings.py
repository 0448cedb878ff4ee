"""Failures that people post, as they post them: the first finding names the cause, and no log is
called healthy beside a warning, an error or a time-out."""

from __future__ import annotations

import pytest

from drumline.tools.doctor.finding import Finding
from drumline.tools.tune.log_findings import has_trouble, log_findings
from drumline.tools.tune.log_report import log_lines
from tests.unit.tools.tune.test_job_faults import timed_out
from tests.unit.tools.tune.test_nccl_log import begun, done, four_ranks, info, read, warn

WRAPPED = (
    "[rank0]: torch.distributed.DistBackendError: NCCL error in: NCCLUtils.hpp:317, unhandled system error "
    "(run with NCCL_DEBUG=INFO for details), NCCL version 2.21.5\n"
    "[rank0]: ncclSystemError: System call (e.g. socket, malloc) or external library call failed.\n"
    "[rank0]: Last error:\n"
)


def first_finding(text: str) -> Finding:
    return log_findings(read(text))[0]


@pytest.mark.parametrize(
    ("text", "check"),
    [
        (warn("a", 1, "socketStartConnect: Connect to 10.0.0.2<4242> failed : Connection timed out"), "timeout"),
        (warn("a", 1, "socketPollConnect: Connect to 10.0.0.2<42> returned 113(No route to host) errno 115"), "route"),
        (warn("a", 1, "socketPollConnect: Connect to 10.0.0.2<42> returned 111(Connection refused) errno"), "refused"),
        (WRAPPED + "[rank0]: socketStartConnect: Connect to 10.0.0.2<42> failed : Connection timed out\n", "timeout"),
        (WRAPPED + "[rank0]: Error: failed to extend /dev/shm/nccl-a to 9 bytes\n", "shared memory"),
        (WRAPPED, "wrapped"),
        (timed_out(3, 812), "collective timeout"),
        (warn("a", 1, "NET/OFI Couldn't open AV. RC: -22, ERROR: Invalid argument"), "EFA"),
        (warn("a", 1, "NET/OFI Something that is not known"), "EFA"),
        (info("a", 1, "NET/OFI Selected provider is tcp, fabric is 10.0.0.0/16 (found 1 nics)"), "EFA"),
        (info("a", 1, "NCCL_P2P_DISABLE set by environment to 1."), "variable"),
        (info("a", 1, "NET/IB : GPU Direct RDMA Disabled for HCA 0 'mlx5_0'"), "GPUDirect RDMA off"),
        (
            info("a", 1, "Bootstrap : Using lo:127.0.0.1<0>") + info("b", 1, "Bootstrap : Using lo:127.0.0.1<0>"),
            "interface",
        ),
        (
            warn("a", 1, "socketProgress: Connection closed by remote peer b<4242>")
            + warn("a", 1, "Mismatched NCCL version detected : rank 0 version 22809 rank 1 version 22605"),
            "version",
        ),
    ],
)  # fmt: skip
def test_the_first_finding_names_the_cause(text: str, check: str) -> None:
    finding = first_finding(text)
    assert finding.check == check
    assert finding.fix


@pytest.mark.parametrize(
    "line",
    [
        warn("gpu-00", 100, "something that NCCL warns of for the first time"),
        "NCCL WARN a line that lost the name of its process\n",
        "[rank1]:[E1117 08:00:00.123 New.cpp:12] an error that is not known\n",
        "2026-11-17 08:00:00 ERROR the flux capacitor is empty\n",
        "the step timed out after 60 s\n",
        "RuntimeError: a kind of error that nobody has seen\n",
        timed_out(0, 9),
    ],
)
def test_no_log_is_healthy_beside_a_warning_an_error_or_a_timeout(line: str) -> None:
    log = read(four_ranks() + line)
    assert has_trouble(log_findings(log))
    assert not any("no problem" in text for text in log_lines(log))


def test_a_healthy_log_has_no_problem() -> None:
    log = read(four_ranks() + "step 10 loss 0.3, validation error: 0.1\n")
    assert log_findings(log) == []
    assert list(log_lines(log))[-1] == "result: no problem in these logs"
    assert log_findings(read(done("a", 1, 0, 1))) == []


NO_CARD = "NET/IB : No device found."
SOCKET = "Using network Socket"
TIME_LIMIT = (
    "slurmstepd: error: *** STEP 1.0 ON a CANCELLED AT 2026-01-01T00:00:00 DUE TO TIME LIMIT ***\n"
)


@pytest.mark.parametrize(
    ("text", "check"),
    [
        (f"NCCL INFO NCCL_IB_HCA set to mlx5_0\nNCCL INFO {NO_CARD}\nNCCL INFO {SOCKET}\n", "no InfiniBand"),
        (f"10:00:00 [1] NCCL INFO NCCL_IB_DISABLE set by environment to 0.\n[1] NCCL INFO {NO_CARD}\n"
         f"[1] NCCL INFO {SOCKET}\n", "no InfiniBand"),
        ("export NCCL_IB_HCA=mlx5_0\n" + info("a", 1, "Failed to open libibverbs.so[.1]") + info("a", 1, SOCKET)
         + begun("a", 1, 0, 2), "no InfiniBand library"),
        (info("a", 1, "Bootstrap : Using ib0:10.1.0.1<0>") + info("a", 1, NO_CARD) + info("a", 1, SOCKET)
         + TIME_LIMIT, "no InfiniBand"),
        ("/dev/infiniband\n" + info("a", 1, NO_CARD) + info("a", 1, SOCKET)
         + "torch.OutOfMemoryError: CUDA out of memory.\n", "CUDA memory"),
        (info("a", 1, "Assigned NET plugin IB to comm") + info("b", 1, "Assigned NET plugin Socket to comm"),
         "network"),
        (info("a", 1, "Channel 00/0 : 8[0] -> 0[0] [receive] via NET/IB/0/GDRDMA")
         + info("b", 1, "Channel 00/0 : 0[0] -> 8[0] [receive] via NET/IB/0") + TIME_LIMIT, "GPUDirect RDMA off"),
        ("10.0.0.0/20 dev eno1 proto kernel scope link src 10.0.3.1\n"
         "10.0.0.0/20 dev eno2 proto kernel scope link src 10.0.5.1\n" + info("a", 1, SOCKET), "shared network"),
        ("LD_PRELOAD=/usr/local/vgpu/libvgpu.so\n" + begun("a", 1, 0, 2), "preloaded library"),
        (WRAPPED + "[rank0]: ncclSocketInit: connecting to address  with family 0 is neither AF_INET(2) nor x\n",
         "interface"),
        (TIME_LIMIT, "time limit"),
    ],
)  # fmt: skip
def test_a_condition_comes_before_how_the_job_ended(text: str, check: str) -> None:
    assert first_finding(text).check == check


ROUTES = """10.0.0.0/20 dev eno1 proto kernel scope link src 10.0.3.1
10.0.0.0/20 dev eno2 proto kernel scope link src 10.0.5.1
"""
NO_ANSWER = "socketPollConnect: connect to 10.0.0.2<42> returned Connection timed out, exceeded error retry count"


def test_two_interfaces_in_one_network_explain_a_connection_that_fails() -> None:
    assert first_finding(ROUTES + warn("a", 1, NO_ANSWER)).check == "shared network"
    assert first_finding(warn("a", 1, NO_ANSWER)).check == "timeout"


def test_what_nccl_warned_of_comes_before_a_timeout_that_nothing_explains() -> None:
    text = "something that NCCL warns of for the first time"
    finding = first_finding(warn("a", 1, text) + timed_out(0, 9) + timed_out(1, 9))
    assert finding.what == f"NCCL warns: {text}"
    assert finding.level == "problem"
    known = first_finding(warn("a", 1, text) + warn("a", 1, NO_ANSWER) + timed_out(0, 9))
    assert known.check == "timeout"


@pytest.mark.parametrize(
    "text",
    [
        info("a", 1, NO_CARD) + info("a", 1, SOCKET) + done("a", 1, 0, 1),
        "NCCL_IB_DISABLE=0\n" + info("a", 1, NO_CARD) + info("a", 1, SOCKET) + done("a", 1, 0, 1),
        f"[0] NCCL INFO {NO_CARD}\n[0] NCCL INFO {SOCKET}\n",
        info("a", 1, "NET/Plugin: Failed to find ncclNetPlugin_v8 symbol.") + info("a", 1, "Using network IBext_v7"),
        "LD_PRELOAD=/usr/lib/libtcmalloc.so\n" + done("a", 1, 0, 1),
    ],
)  # fmt: skip
def test_sockets_without_a_sign_of_infiniband_are_no_problem(text: str) -> None:
    assert not has_trouble(log_findings(read(text)))


def test_a_line_without_a_prefix_shows_the_setting_of_the_job() -> None:
    line = "[rank0]: ncclSocketInit: connecting to address  with family 0 is neither AF_INET(2) nor AF_INET6(10)\n"
    finding = first_finding("[trainer0]:" + info("a", 1, "NCCL_SOCKET_IFNAME set to eth2") + line)
    assert finding.what == "NCCL finds no network interface: NCCL_SOCKET_IFNAME=eth2 names none"


def test_a_warning_without_the_name_of_its_process_is_shown() -> None:
    assert first_finding("[1] a.cc:7 NCCL WARN a new one\n").what == "NCCL warns: a new one"


@pytest.mark.parametrize(
    "line",
    [
        "W1118 09:58:00.1 run.py:793] master_addr is only used for static rdzv_backend and when rdzv_endpoint is not "
        "specified.",
        "E0000 00:00:1763459881.123456 4103 cuda_dnn.cc:8310] Unable to register cuDNN factory: Attempting to register "
        "factory for plugin cuDNN when one has already been registered",
        "Failed to load image Python extension: '/a.so: undefined symbol: _ZN3c10'If you don't plan on using image "
        "functionality, you can ignore this warning.",
        "collect2: error: ld returned 1 exit status",
        "WARNING:root:Could not import flash_attn: No module named 'flash_attn'",
        "+ python -m torch.distributed.run --rdzv-endpoint=n1:29500 --hostfile hosts train.py --ntasks=8",
        "pyxis: imported docker image: nvcr.io/nvidia/pytorch:24.05-py3",
        "frame #0: c10::Error::Error(c10::SourceLocation, std::string) + 0x96 (0x7f in /a/libc10.so)",
        "export CUDA_DEVICE_MAX_CONNECTIONS=1",
    ],
)
def test_what_healthy_jobs_print_is_no_problem(line: str) -> None:
    assert log_findings(read(four_ranks() + line + "\n")) == []
