"""NCCL's debug logs: who is connected how, what went wrong, and logs that are damaged.

Lines are as NCCL's source writes them (2.21 to 2.30). `tests/data/nccl/` has logs of two ranks on
an H200 (NCCL 2.28.9), as tests/gpu/test_nccl_logs.py makes them.
"""

from __future__ import annotations

import io
import os
import random
import re
from pathlib import Path

import pytest

from drumline.tools.tune import logged_links, nccl_log
from drumline.tools.tune.log_findings import log_findings
from drumline.tools.tune.log_report import log_as_json, log_lines
from drumline.tools.tune.nccl_log import NcclLog

RECORDED = Path(__file__).parents[3] / "data" / "nccl"


def recorded(name: str) -> Path:
    return RECORDED / name


def read(*texts: str | bytes | Path) -> NcclLog:
    log = NcclLog()
    for text in texts:
        content = (
            text.read_bytes()
            if isinstance(text, Path)
            else text.encode()
            if isinstance(text, str)
            else text
        )
        log.read(io.BytesIO(content), "train.log")
    return log


def info(host: str, pid: int, text: str, gpu: int = 0) -> str:
    return f"{host}:{pid}:{pid + 7} [{gpu}] NCCL INFO {text}\n"


def warn(host: str, pid: int, text: str, gpu: int = 0) -> str:
    """As NCCL 2.28 does; 2.30 adds the function, earlier versions have no time."""
    return f"\n[2026-11-17 08:00:00] {host}:{pid}:{pid + 9} [{gpu}] misc/socket.cc:71 NCCL WARN {text}\n"


def begun(host: str, pid: int, rank: int, size: int) -> str:
    name = f"ncclCommInitRankConfig comm 0x5{rank} rank {rank} nranks {size} cudaDev 0 nvmlDev 0 busId 1a commId 0x7"
    return info(host, pid, "NCCL version 2.28.9+cuda13.0") + info(host, pid, f"{name} - Init START")


def done(host: str, pid: int, rank: int, size: int) -> str:
    text = f"ncclCommInitRank comm 0x5{rank} rank {rank} nranks {size} cudaDev 0 nvmlDev 0 busId 1a - Init COMPLETE"
    return begun(host, pid, rank, size) + info(host, pid, text)


def four_ranks() -> str:
    """Two hosts with two GPUs each: NVLink inside, RoCE between."""
    text = ""
    for rank in range(4):
        host = f"gpu-0{rank // 2}"
        pid = 100 + rank
        text += info(
            host, pid, "NET/IB : Using [0]mlx5_0:1/RoCE [1]mlx5_1:1/RoCE [RO]; OOB eth0:10.0.0.1<0>"
        )
        text += info(host, pid, "Using network IB") + done(host, pid, rank, 4)
        text += info(
            host, pid, f"Channel 00/0 : {rank}[{rank % 2}] -> {rank ^ 1}[1] via P2P/CUMEM/read"
        )
        text += info(
            host, pid, f"Channel 01/0 : {rank}[{rank % 2}] -> {rank ^ 1}[1] via P2P/CUMEM/read"
        )
    text += info(
        "gpu-00", 101, "Channel 00/0 : 1[1] -> 2[0] [send] via NET/IB/1/GDRDMA(PCI)/Shared"
    )
    text += info(
        "gpu-01", 102, "Channel 00/0 : 1[1] -> 2[0] [receive] via NET/IB/0/GDRDMA(PCI)/Shared"
    )
    return text + info("gpu-01", 103, "Channel 00/0 : 3[1] -> 0[0] [send] via NET/IB/1(2)/GDRDMA")


def problems(log: NcclLog) -> list[str]:
    return [finding.check for finding in log_findings(log) if finding.level == "problem"]


def test_a_recorded_log_shows_ranks_transport_and_interface() -> None:
    log = read(*(recorded(f"sockets-rank{rank}.log") for rank in range(2)))
    assert (log.world_size, sorted(log.ranks)) == (2, [0, 1])
    assert len(log.versions) == 1
    assert all(re.fullmatch(r"2\.\d+\.\d+\+cuda\d+\.\d+", version) for version in log.versions)
    links = {
        (link.source, link.target): (link.transport, link.device, link.num_channels > 0)
        for link in log.links()
    }
    assert links == {
        (0, 1): ("NET/Socket", "lo 127.0.0.1", True),
        (1, 0): ("NET/Socket", "lo 127.0.0.1", True),
    }
    assert problems(log) == []
    assert [finding.check for finding in log_findings(log)] == ["transport", "transport"], (
        "they are on one host"
    )


@pytest.mark.parametrize(
    ("name", "kind", "words"),
    [
        ("no-interface-rank0.log", "interface", " names none"),
        ("killed-rank0.log", "closed", "closed its connection"),
        ("duplicate-gpu-rank0.log", "duplicate GPU", "ranks 0 and 1 use the same GPU"),
    ],
)
def test_a_recorded_fault_is_named(name: str, kind: str, words: str) -> None:
    log = read(recorded(name))
    assert problems(log)[0] == kind
    assert words in log_findings(log)[0].what


def test_what_is_printed() -> None:
    fault = warn("gpu-01", 102, "socketProgress: Connection closed by remote peer gpu-00<4242>")
    assert list(log_lines(read(four_ranks() + fault))) == [
        "NCCL 2.28.9+cuda13.0: logs of 4 of 4 ranks on 2 hosts, network IB",
        "  gpu-00: ranks 0, 1; mlx5_0 1/RoCE and mlx5_1 1/RoCE",
        "  gpu-01: ranks 2, 3; mlx5_0 1/RoCE and mlx5_1 1/RoCE",
        "NET/IB/GDRDMA over mlx5_1 1/RoCE: 1 -> 2 and 3 -> 0 (1 channel)",
        "P2P/CUMEM: 0 <-> 1 and 2 <-> 3 (2 channels)",
        "problem: rank 2 on gpu-01: the process at gpu-00<4242> closed its connection: it exited or was killed, "
        "its node or network card failed, or the network between the two nodes did (a faulty link, InfiniBand)",
        "  fix: read the log of that rank first (drumline launch --watch names the rank that failed first), and "
        "dmesg of that node; if no process failed there, check the network of the node (ibstat, cable, ethtool -S) "
        "and exclude an unhealthy node; NCCL_SOCKET_IFNAME with the interface that joins the hosts; "
        "if the address is no host of the job: a port scan or health check, which NCCL 2.27.3 and newer ignore",
        "result: 1 problem, the first to look at: rank 2 on gpu-01",
    ]


def test_json_has_every_rank_and_link() -> None:
    document = log_as_json(read(four_ranks()))
    assert [(rank["rank"], rank["host"], rank["pid"]) for rank in document["ranks"]] == [
        (0, "gpu-00", 100), (1, "gpu-00", 101), (2, "gpu-01", 102), (3, "gpu-01", 103),
    ]  # fmt: skip
    assert (document["versions"], len(document["links"]), document["findings"], document["partial"]) == (
        ["2.28.9+cuda13.0"], 6, [], False,
    )  # fmt: skip


def split(rank: int) -> str:
    """Groups of the GPUs of the same number, {0, 2} and {1, 3}, of the world of `four_ranks`."""
    host = f"gpu-0{rank // 2}"
    pid = 100 + rank
    text = f"ncclCommSplit comm 0x9{rank} rank {rank // 2} nranks 2 cudaDev 0 nvmlDev 0 busId 1a"
    begun = f"{text} parent 0x5{rank} splitCount 1 color {rank % 2} key 0- Init START"
    return info(host, pid, begun) + info(host, pid, f"{text} commId 0x0 - Init COMPLETE")


@pytest.mark.parametrize(
    ("pid", "ranks"),
    [(100, (0, 1, 2, 3)), (101, (1,))],
    ids=["fits the world too", "no log of the other"],
)
def test_ranks_of_a_group_that_is_not_known_are_shown_as_such(
    pid: int, ranks: tuple[int, ...]
) -> None:
    sends = info("gpu-00", pid, "Channel 00/0 : 0[0] -> 1[0] [send] via NET/Socket/0")
    log = read(four_ranks(), *map(split, ranks), sends)
    assert "NET/Socket: 0 -> 1 (1 channel; ranks of an unknown communicator)" in list(
        log_lines(log)
    )
    assert log_findings(log) == []


EXAMPLES = {
    "Mismatched NCCL version detected : rank 0 version 22809 rank 1 version 22605": "rank 0 has NCCL 22809, rank 1",
    "Duplicate GPU detected : rank 0 and rank 1 both on CUDA device 3b000": "ranks 0 and 1 use the same GPU",
    "Bootstrap : no socket interface found": "NCCL finds no network interface",
    "NET/Socket : no interface found": "NCCL finds no network interface",
    "Bootstrap Root : rank 3 of 8 ranks has already checked in": "two processes are rank 3 of 8",
    "Bootstrap Root : mismatch in info from procs, nranks 8 vs 4, nroots 1 vs 1, iroot 0 vs 0": "expects 8 ranks",
    "Cuda failure 'out of memory'": "no memory left",
    "Cuda failure 35 'CUDA driver version is insufficient for CUDA runtime version'": "driver version is insufficient",
    "Cuda failure 700 'an illegal memory access was encountered'": "CUDA failed: an illegal memory access",
    "Call to ibv_reg_mr failed with error Cannot allocate memory": "InfiniBand may not lock enough memory",
    "NET/IB: Got completion from peer 10.0.0.2<4791> with status=IBV_WC_RETRY_EXC_ERR(12) opcode=x": "IBV_WC_RETRY",
    "NET/IB : Got completion from peer 10.0.0.2<4791> with error 12, opcode 0, len 0, vendor err 129": "(error 12)",
    "NET/IB : mlx5_0:1 async fatal event: port error": "(mlx5_0:1 port error)",
    "NET/IB : Attempted to connect incompatible devices: [0]mlx5_0:1/IB and [1]mlx5_1:1/RoCE.": "InfiniBand and RoCE",
    "Call to ibv_modify_qp failed with 110 Connection timed out, on dev mlx5_0:1": "two RoCE cards",
    "Error: failed to extend /dev/shm/nccl-mN4Xw1 to 9637888 bytes, error: No space left on device (28)": "/dev/shm",
    "Error while creating shared memory segment /dev/shm/nccl-a (size 1), error: No space left on device": "/dev/shm",
    "socketTryAccept: Accept failed: Too many open files": "too many open files",
    "Failed to bind NVLink SHARP (NVLS) Multicast memory of size 2048 : CUDA error 401 'x'.": "NVLink switch refuses",
    "P2P is disabled between NVLINK connected GPUs 0 and 1. This should not be the case": "GPUs 0 and 1 are connected",
    "Failed to initialize any NET plugin": "none of the network modules",
    "Error : no algorithm/protocol available for function AllReduce with datatype ncclFloat32.": "cannot do AllReduce",
    "Message truncated : received 1024 bytes instead of 256": "a rank sent 1024 bytes where 256 were expected",
    "NET/Socket : peer 10.0.0.2<1> message truncated : receiving 1024 bytes instead of 256. If you": "sent 1024 bytes",
    "socketStartConnect: connect to 10.0.0.2<4242> failed : Network is unreachable": "no route to 10.0.0.2<4242>",
    "socketPollConnect: connect to 10.0.0.2<42> returned No route to host, exceeded error retry count": "route",
    "socketPollConnect: connect to 10.0.0.2<42> returned Connection timed out, exceeded error retry count": "no answer",
    "socketStartConnect: connect to 10.0.0.2<42> returned Connection refused, exceeded error retry count": "refused",
    "socketProgress: Connection closed by remote peer gpu-01<33555>": "the process at gpu-01<33555> closed",
    "socketProgressOpt: Call to recv from 10.0.0.2<42> failed : Connection reset by peer": "10.0.0.2<42> closed its",
    "[Proxy Service 1] Failed to execute operation Connect from rank 1, retcode 3": "proxy thread failed: Failed to",
}  # fmt: skip


@pytest.mark.parametrize(("text", "words"), EXAMPLES.items())
def test_a_warning_is_a_sentence_with_what_to_do(text: str, words: str) -> None:
    (finding,) = log_findings(read(warn("gpu-02", 9, text)))
    assert words in finding.what
    assert finding.fix
    assert finding.where == "gpu-02 (process 9)"
    newer = f"gpu-02:9:9 [3] /nccl/src/misc/socket.cc:71 (socketProgress) NCCL WARN {text}\n"
    assert log_findings(read(newer))[0].what == finding.what


def test_a_warning_that_is_not_known_is_shown_as_it_is() -> None:
    (finding,) = log_findings(read(warn("gpu-02", 9, "Net : something new")))
    assert (finding.level, finding.what) == ("warning", "NCCL warns: Net : something new")


def test_a_connection_that_is_tried_again_is_no_fault() -> None:
    text = "socketStartConnect: connect to 10.0.0.2<42> returned Connection refused, retrying (1/34) after sleep"
    assert log_findings(read(info("gpu-02", 9, text) + warn("gpu-02", 9, text))) == []


def test_causes_come_before_what_follows_from_them() -> None:
    closed = "".join(
        warn("a", pid, f"socketProgress: Connection closed by remote peer b<{pid}>")
        for pid in range(5)
    )
    log = read(closed, warn("b", 77, "Cuda failure 'out of memory'"))
    assert problems(log)[0] == "CUDA memory"


def test_ranks_that_never_finish_their_start_and_missing_logs() -> None:
    findings = log_findings(read(begun("a", 1, 0, 3) + done("b", 2, 1, 3)))
    assert [(finding.check, finding.where) for finding in findings] == [
        ("initialization", "rank 0 on a"),
        ("logs", "every host"),
    ]
    assert findings[1].what == "no log of 1 of 3 ranks, the first is rank 2"


def test_versions_and_networks_that_differ() -> None:
    text = (
        done("a", 1, 0, 2)
        + info("a", 1, "Using network IB")
        + done("b", 2, 1, 2).replace("2.28.9", "2.27.5")
    )
    findings = log_findings(read(text + info("b", 2, "Using network Socket")))
    assert [(finding.level, finding.check) for finding in findings] == [
        ("problem", "version"),
        ("problem", "network"),
    ]
    assert findings[1].what.startswith("the network of NCCL differs across ranks: IB, Socket")


def test_the_version_in_an_error_of_torch_is_not_compared() -> None:
    error = (
        "[rank0]: torch.distributed.DistBackendError: NCCL error in: ProcessGroupNCCL.cpp:94, unhandled system error "
        "(run with NCCL_DEBUG=INFO for details), NCCL version 2.28.9\n"
    )
    log = read(done("a", 1, 0, 2) + done("b", 2, 1, 2) + error)
    assert (log.versions, "version" in problems(log)) == ({"2.28.9+cuda13.0"}, False)
    assert read("NCCL version 2.28.9+cuda13.0\n").versions == log.versions, "NCCL_DEBUG=VERSION"


def test_the_loopback_on_several_hosts_and_a_missing_plugin() -> None:
    text = ""
    for rank, host in enumerate(("a", "b")):
        text += info(host, rank, "NET/Plugin: Could not find: libnccl-net.so.") + info(
            host, rank, "Using network Socket"
        )
        text += info(host, rank, "NET/Socket : Using [0]lo:127.0.0.1<0>") + done(
            host, rank, rank, 2
        )
        text += info(
            host, rank, f"Channel 00/0 : {rank}[0] -> {1 - rank}[0] [send] via NET/Socket/0"
        )
    findings = log_findings(read(text))
    assert [(finding.level, finding.check) for finding in findings] == [
        ("problem", "interface")
    ] * 2 + [("note", "network")] * 2
    assert (
        findings[2].what
        == "NCCL found neither InfiniBand nor a plugin (libnccl-net.so), and uses TCP"
    )


@pytest.mark.parametrize(
    ("via", "transport", "device"),
    [
        ("SHM/direct/direct", "SHM/direct", ""),
        ("SHM/direct", "SHM/direct", ""),
        ("P2P/direct pointer/read", "P2P/direct", ""),
        ("P2P/IPC/read", "P2P/IPC", ""),
        ("P2P/MNNVL", "P2P/MNNVL", ""),
        ("P2P/indirect/1[1]/read", "P2P/indirect", ""),
        ("NET/AWS Libfabric/0/GDRDMA", "NET/AWS/GDRDMA", ""),
        ("NET/Socket/1/Shared", "NET/Socket", "eth1 fe80::1%eth1"),
    ],
)
def test_every_transport_is_known(via: str, transport: str, device: str) -> None:
    used = info("a", 1, "NET/Socket : Using [0]eth0:10.0.0.1<0> [1]eth1:fe80::1%eth1<0>")
    (link,) = read(used + info("a", 1, f"Channel 00/0 : 0[0] -> 1[1] via {via}")).links()
    assert (link.transport, link.device) == (transport, device)
    older = read(used + info("a", 1, f"Channel 00 : 0[1a000] -> 1[1b000] [send] via {via}")).links()
    assert [(link.transport, link.device) for link in older] == [(transport, device)]


# Damaged logs


def test_lines_that_two_ranks_wrote_into_each_other() -> None:
    whole = four_ranks()
    text = (
        whole
        + "gpu-00:100:107 [0] NCCL INFO Channel 02/0 : 0[0] -> 1gpu-01:102:109 [0] NCCL INFO Using network IB\n"
    )
    text += "[default0]:gpu-00:100:107 [0] NCCL INFO Channel 03/0 : 0[0] -> 1[1] via P2P/CUMEM\n"
    log = read(text)
    assert {process.host for process in log.processes.values()} == {"gpu-00", "gpu-01"}
    assert len(log.links()) == len(read(whole).links())
    assert max(link.num_channels for link in log.links()) == 3


def test_a_log_that_is_cut_anywhere_is_read() -> None:
    whole = four_ranks().encode()
    complete = read(whole).links()
    for end in range(0, len(whole), 97):
        log = read(whole[:end])
        log_findings(log)
        assert {(link.source, link.target) for link in log.links()} <= {
            (link.source, link.target) for link in complete
        }


def test_garbage_between_lines_changes_nothing() -> None:
    chance = random.Random(3)
    whole = four_ranks().encode().splitlines(keepends=True)
    noisy = b"".join(
        part for line in whole for part in (chance.randbytes(300).replace(b"\n", b"") + b"\n", line)
    )
    assert read(noisy).links() == read(b"".join(whole)).links()
    assert log_findings(read(noisy)) == []


def test_bytes_that_are_flipped_do_not_stop_the_reader() -> None:
    chance = random.Random(5)
    text = bytearray(four_ranks().encode())
    for _ in range(300):
        text[chance.randrange(len(text))] = chance.randrange(256)
    log = read(bytes(text))
    assert list(log_lines(log))
    assert log_as_json(log)["lines"] > 0


def test_no_line_is_too_long() -> None:
    log = read(b"NCCL " + b"a:1" * 2_000_000 + b"\n" + four_ranks().encode())
    assert log.world_size == 4


def test_of_a_huge_log_the_beginning_and_the_end_are_read(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(nccl_log, "HALF_BYTES", 20_000)
    path = tmp_path / "nccl.log"
    fault = warn("gpu-01", 102, "Cuda failure 'out of memory'")
    path.write_text(four_ranks() + "a step\n" * 50_000 + fault)
    with path.open("rb") as file:
        log = NcclLog()
        log.read(file, path.name)
    assert log.is_partial
    assert (len(log.links()), problems(log)) == (6, ["CUDA memory"])
    note = "note: not all was read: of a long log the beginning and the end, and 50,000 connections at most"
    assert note in list(log_lines(log))


def test_of_a_pipe_the_end_is_read_too(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(nccl_log, "HALF_BYTES", 20_000)
    for num_steps, is_partial in ((4000, False), (7000, True)):
        begin, end = os.pipe()
        fault = warn("gpu-01", 102, "Cuda failure 'out of memory'")
        os.write(end, four_ranks().encode() + b"a step\n" * num_steps + fault.encode())
        os.close(end)
        with os.fdopen(begin, "rb") as pipe:
            log = NcclLog()
            log.read(pipe, "stdin")
            assert pipe.read() == b"", "who writes is not stopped"
        assert (log.is_partial, len(log.links()), problems(log)) == (is_partial, 6, ["CUDA memory"])


def test_a_log_of_too_many_connections_is_partial(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(logged_links, "MAX_CONNECTIONS", 4)
    log = read(four_ranks())
    assert (log.is_partial, len(log.links())) == (True, 4)


def differing(name: str, *values: str) -> list[str]:
    """What the first finding says of ranks that have these values of a variable of NCCL."""
    lines = "".join(
        info(f"gpu-0{rank}", 100, f"{name} set by environment to {value}.")
        for rank, value in enumerate(values)
    )
    return [finding.what for finding in log_findings(read(lines))][:1]


def test_variables_of_nccl_that_differ_across_hosts_are_named() -> None:
    (what,) = differing("NCCL_BUFFSIZE", "8388608", "4194304")
    assert "NCCL_BUFFSIZE differs across ranks: 4194304, 8388608" in what


def test_interfaces_may_differ_across_hosts() -> None:
    assert not any("differs" in what for what in differing("NCCL_SOCKET_IFNAME", "eth0", "eth1"))


def test_drivers_that_differ_across_hosts_are_named() -> None:
    drivers = info("gpu-00", 1, "cudaDriverVersion 12040") + info(
        "gpu-01", 1, "cudaDriverVersion 12080"
    )
    (finding, *_) = log_findings(read(drivers))
    assert "cudaDriverVersion differs across ranks: 12040, 12080" in finding.what
