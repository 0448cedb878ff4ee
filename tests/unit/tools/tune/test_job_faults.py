"""Faults of a job from several lines: what comes first, ranks that wait for each other, conditions
that explain a fault, and lines that are not explained."""

from __future__ import annotations

import io

import pytest

from drumline.tools.doctor.finding import Finding
from drumline.tools.tune import job_faults
from drumline.tools.tune.log_findings import has_trouble, log_findings
from drumline.tools.tune.log_report import log_lines
from drumline.tools.tune.nccl_log import NcclLog
from tests.unit.tools.tune.test_nccl_log import begun, done, info, warn


def findings(*files: str) -> list[Finding]:
    log = NcclLog()
    for number, text in enumerate(files):
        log.read(io.BytesIO(text.encode()), f"{number}.log")
    return log_findings(log)


def checks(*files: str) -> list[str]:
    return [finding.check for finding in findings(*files)]


def timed_out(
    rank: int, number: int, operation: str = "ALLREDUCE", elements: int = 10, group: str = ""
) -> str:
    prefix = f"[rank{rank}]:[E1117 08:00:00.123 ProcessGroupNCCL.cpp:685]"
    work = f"WorkNCCL(SeqNum={number}, OpType={operation}, NumelIn={elements}, NumelOut={elements}, Timeout(ms)=600000)"
    text = f"{prefix} [Rank {rank}] Watchdog caught collective operation timeout: {work} ran for 600012 ms\n"
    if group:
        status = f"[PG ID {group} PG GUID {group}(x) Rank {rank}] failure detected by watchdog"
        status += f" at work sequence id: {number}"
        text += f"{prefix} {status} PG status: last enqueued work: {number}\n"
    return text


# Ranks that wait


def test_one_rank_that_waits_shows_that_another_did_not_join() -> None:
    (finding,) = findings(timed_out(3, 812))
    assert (finding.check, finding.where) == ("collective timeout", "rank 3")
    assert finding.what.startswith(
        "ALLREDUCE #812 timed out: another rank did not join it within 10 min"
    )


def test_what_a_collective_is_part_of_is_named() -> None:
    (finding,) = findings(timed_out(3, 812, "_ALLGATHER_BASE"))
    assert finding.what.startswith("_ALLGATHER_BASE #812 (parameters of FSDP or ZeRO-3")


def test_rank_0_is_late_if_all_others_wait_for_it() -> None:
    (finding,) = findings(timed_out(1, 5) + timed_out(2, 5))
    assert (finding.check, finding.where) == ("collective timeout", "ranks 1, 2")
    assert finding.what.startswith("rank 0 did not join ALLREDUCE #5 within 10 min")


def test_a_rank_of_the_log_that_does_not_wait_is_late() -> None:
    lines = "".join(timed_out(rank, 5) for rank in (0, 1, 3))
    (finding,) = findings("[rank2]: saving the checkpoint took long\n" + lines)
    assert finding.what.startswith("rank 2 did not join ALLREDUCE #5")


def test_what_was_done_last_is_shown() -> None:
    text = "Running tokenizer on dataset:   7%\n" + timed_out(1, 5) + timed_out(2, 5)
    what = findings(text)[0].what
    assert "the last work in the log: Running tokenizer on dataset:   7%" in what


@pytest.mark.parametrize(
    "second",
    [timed_out(1, 7, "BROADCAST"), timed_out(1, 7, elements=11), timed_out(1, 8)],
    ids=["another operation", "another size", "another number"],
)
def test_ranks_in_different_collectives_are_named(second: str) -> None:
    (finding,) = findings(timed_out(0, 7) + second)
    assert (finding.check, finding.where) == ("mismatch", "ranks 0, 1")
    assert "rank 0 in ALLREDUCE #7 (10 elements)" in finding.what


def test_collectives_of_different_groups_are_not_compared() -> None:
    text = timed_out(0, 7, group="0") + timed_out(1, 900, group="4")
    assert checks(text) == ["collective timeout", "collective timeout"]


def test_ranks_that_all_joined_point_to_the_path_between_them() -> None:
    (finding,) = findings(timed_out(0, 77) + timed_out(1, 77))
    assert "although ranks 0, 1 all joined it" in finding.what


def test_the_first_collective_over_p2p_that_hangs_is_p2p() -> None:
    text = "".join(
        done("a", 1 + rank, rank, 2)
        + info("a", 1 + rank, f"Channel 00/0 : {rank}[0] -> {1 - rank}[1] via P2P/IPC")
        for rank in range(2)
    )
    first, second = findings(text + timed_out(1, 1))
    assert (first.check, second.check) == ("silent link", "collective timeout")
    assert "P2P" in first.what
    assert checks(text + timed_out(1, 4000)) == ["collective timeout"], "it had worked before"


def test_ranks_between_those_that_wait_are_late() -> None:
    (finding,) = findings("".join(timed_out(rank, 77) for rank in (0, 1, 3)))
    assert finding.what.startswith("rank 2 did not join ALLREDUCE #77")
    (finding,) = findings(timed_out(0, 77) + timed_out(9, 77))
    assert "although ranks 0, 9 all joined it" in finding.what, "most ranks have no lines here"


@pytest.mark.parametrize(
    ("operations", "elements"),
    [(("SEND", "RECV"), (10, 10)), (("ALLTOALL_BASE", "ALLTOALL_BASE"), (10, 7))],
)
def test_collectives_that_may_differ_across_ranks_are_no_mismatch(
    operations: tuple[str, str], elements: tuple[int, int]
) -> None:
    lines = [timed_out(rank, 77, operations[rank], elements[rank]) for rank in range(2)]
    assert checks("".join(lines)) == ["collective timeout"]


def test_a_barrier_is_named() -> None:
    (finding,) = findings(timed_out(1, 77, elements=1))
    assert finding.what.startswith("ALLREDUCE #77 (a barrier) timed out")


# What comes first


def test_an_exception_of_one_rank_comes_before_the_timeouts_of_others() -> None:
    text = timed_out(1, 5) + timed_out(2, 5) + "[rank0]: ValueError: label 7 is out of range\n"
    first, second = findings(text)
    assert (first.check, first.where) == ("exception", "rank 0")
    assert "ValueError: label 7 is out of range" in first.what
    assert second.check == "collective timeout"


def test_a_version_mismatch_comes_before_closed_connections() -> None:
    closed = warn("a", 1, "socketProgress: Connection closed by remote peer b<4242>")
    mismatch = warn(
        "a", 1, "Mismatched NCCL version detected : rank 0 version 22809 rank 1 version 22605"
    )
    assert checks(closed + mismatch) == ["version", "closed"]
    differs = done("a", 1, 0, 2) + done("b", 2, 1, 2).replace("2.28.9", "2.27.5")
    assert checks(closed + differs)[0] == "version"


def test_of_two_causes_the_earlier_one_comes_first_across_files() -> None:
    late = "[2026-11-17 08:00:09] a:1:2 [0] misc/x.cc:1 NCCL WARN Cuda failure 'out of memory'\n"
    early = "[rank1]:[E1117 08:00:01.5 x.cpp:1] RuntimeError: CUDA error: invalid device ordinal\n"
    assert checks(late, early)[:2] == ["wrong GPU count", "CUDA memory"]
    assert checks(early, late)[:2] == ["wrong GPU count", "CUDA memory"]


def test_what_repeats_other_lines_is_shown_only_without_them() -> None:
    wrapped = "[rank0]: torch.distributed.DistBackendError: NCCL error in: NCCLUtils.cpp:94, unhandled system error\n"
    assert checks(wrapped) == ["wrapped"]
    assert checks(wrapped + warn("a", 1, "Accept failed: Too many open files")) == ["open files"]


def test_the_last_error_of_nccl_is_read_from_torchs_exception() -> None:
    text = (
        "[rank4]: torch.distributed.DistBackendError: NCCL error in: NCCLUtils.cpp:94, unhandled system error\n"
        "[rank4]: Last error:\n[rank4]: Call to ibv_reg_mr failed with error Cannot allocate memory\n"
    )
    (finding,) = findings(text)
    assert (finding.check, finding.where) == ("locked memory", "rank 4")


def test_an_exception_comes_before_ranks_in_different_collectives() -> None:
    waits = timed_out(1, 7) + timed_out(2, 8)
    assert checks("[rank0]: ValueError: x\n" + waits) == ["exception", "mismatch"]


def test_an_error_that_is_not_known_comes_before_the_launchers_summary() -> None:
    summary = "torch.distributed.elastic.multiprocessing.errors.ChildFailedError:\n"
    first, second = findings("ERROR the flux capacitor is empty\n" + summary)
    assert (first.level, first.check, second.check) == ("problem", "unknown", "launcher's summary")
    assert first.what == "ERROR the flux capacitor is empty"
    assert first.fix


def test_an_interrupt_follows_from_what_made_the_user_wait() -> None:
    assert (
        checks("KeyboardInterrupt\n" + warn("a", 1, "Cuda failure 'out of memory'"))[0]
        == "CUDA memory"
    )


# Conditions


def test_a_condition_is_a_problem_only_where_it_explains_one() -> None:
    device = "[rank1]:[W922 15:55:05.3 x.cpp:50] using GPU 0 as device used by this process is currently unknown.\n"
    (alone,) = findings(device)
    assert (alone.level, alone.check) == ("note", "device")
    first = findings(device + timed_out(1, 1))[0]
    assert (first.level, first.check) == ("problem", "device")
    assert checks(device + timed_out(1, 5000))[0] == "collective timeout", "earlier ones worked"
    failed = "[rank0]: ValueError: label 7 is out of range\n"
    assert checks(device + failed + timed_out(1, 1))[0] == "exception"


def test_a_missing_library_counts_only_where_sockets_are_used_between_hosts() -> None:
    missing = info("a", 1, "Failed to open libibverbs.so[.1]")
    inside = info("a", 1, "Channel 00/0 : 0[0] -> 1[1] via P2P/CUMEM")
    between = info("a", 1, "Channel 00/0 : 9[1] -> 0[0] [receive] via NET/Socket/0")
    assert checks(missing + inside) == []
    assert checks(missing + between) == ["no InfiniBand library"]


def test_infiniband_without_gpudirect_is_a_warning() -> None:
    link = info("a", 1, "Channel 00/0 : 0[0] -> 9[1] [send] via NET/IB/0")
    assert checks(link) == ["GPUDirect RDMA off"]
    assert checks(link.replace("NET/IB/0", "NET/IB/0/GDRDMA")) == []


@pytest.mark.parametrize(
    ("addresses", "words"),
    [
        (("lo:127.0.0.1", "lo:127.0.0.1"), "the loopback"),
        (("eth0:10.0.0.1", "docker0:172.17.0.1"), "a bridge of containers"),
    ],
)
def test_an_interface_that_no_other_host_reaches(addresses: tuple[str, str], words: str) -> None:
    text = "".join(
        info(host, 1, f"Bootstrap : Using {address}<0>")
        for host, address in zip("ab", addresses, strict=True)
    )
    first = findings(text)[0]
    assert first.check == "interface"
    assert words in first.what


def test_interfaces_in_different_networks_explain_a_connection_that_fails() -> None:
    text = info("a", 1, "Bootstrap: Using eth0:10.0.0.1<0>")
    text += info("b", 1, "Bootstrap: Using wlan0:192.168.4.2<0>")
    assert checks(text) == []
    failed = warn(
        "a", 1, "socketStartConnect: Connect to 192.168.4.2<4242> failed : Connection refused"
    )
    assert checks(text + failed) == ["interface", "refused"]
    exception = "[rank1]: ValueError: label 7 is out of range\n"
    assert checks(text + exception + failed)[0] == "exception"
    assert checks(text + timed_out(1, 5000)) == ["collective timeout"], "they had connected"


def test_different_networks_are_named_without_a_communicator() -> None:
    text = info("a", 1, "Using network IB") + info("b", 1, "Using network Socket")
    (finding,) = findings(text)
    assert finding.what.startswith("the network of NCCL differs across ranks: IB, Socket")


def test_ranks_that_connected_have_finished_their_start() -> None:
    text = begun("a", 1, 0, 1) + info("a", 1, "Connected all rings, use ring PXN 0 GDR 1")
    assert checks(text) == []


# Lines that are not explained


@pytest.mark.parametrize(
    "line",
    [
        "[rank0]:[E1117 08:00:00.123 Something.cpp:12] a thing that nobody knows",
        "E1117 08:00:00.123000 77 torch/new/thing.py:12] went wrong",
        "2026-11-17 08:00:00 ERROR the flux capacitor is empty",
        "the request timed out",
        "libfabric:7:8:efa:cq:some_function():12<warn> a warning of libfabric",
        "fatal: the frobnicator is gone",
    ],
)
def test_an_error_that_is_not_known_is_shown_and_no_log_is_healthy_beside_it(line: str) -> None:
    log = NcclLog()
    log.read(io.BytesIO((done("a", 1, 0, 1) + line + "\n").encode()), "train.log")
    (finding,) = log_findings(log)
    assert (finding.level, finding.check, finding.what) == ("warning", "unknown", line)
    assert has_trouble(log_findings(log))
    printed = list(log_lines(log))
    assert (
        printed[-1]
        == "result: 1 line that may be errors and are not explained here: read them first"
    )


def test_lines_that_differ_only_in_numbers_are_shown_once() -> None:
    text = "".join(f"ERROR the disk {number} is sad\n" for number in range(7))
    (finding,) = findings(text)
    assert finding.what == "ERROR the disk 0 is sad (6 more like it)"


def test_of_many_lines_that_are_not_explained_the_first_are_shown(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(job_faults, "MAX_UNEXPLAINED", 2)
    text = "".join(f"ERROR {letter}\n" for letter in "abcde")
    assert [finding.what for finding in findings(text)] == ["ERROR a", "ERROR b"]


def test_a_healthy_log_of_torch_has_no_finding() -> None:
    text = (
        "Setting OMP_NUM_THREADS environment variable for each process to be 1 in default\n"
        "[rank0]:[W1117 08:00:00.1 socket.cpp:1] [c10d] The server socket is not yet listening, will retry.\n"
        "[W1117 08:00:01.1 socket.cpp:759] [c10d] The client socket cannot be initialized to connect to "
        "[localhost]:29500 (errno: 97 - Address family not supported by protocol).\n"
        "step 100 loss 0.31 error: 0.12 timeout=1800\r step 200 loss 0.30\n"
        "[rank0]:[W1117 09:00:00.1 x.cpp:1] Warning: WARNING: destroy_process_group() was not called before\n"
    )
    assert checks(text) == []


def test_a_first_try_that_fails_is_only_a_note() -> None:
    tried = "[W socket.cpp:663] [c10d] The client socket has failed to connect to [localhost]:29500 (errno: 99 - x).\n"
    (finding,) = findings(tried)
    assert (finding.level, finding.check) == ("note", "store")


def test_an_exception_with_harmless_words_is_an_exception() -> None:
    assert checks("ValueError: the page is broken, will retry\n") == ["exception"]


def test_colours_and_progress_bars_hide_no_message() -> None:
    bar = "  7%|7 | 70/1000\r  8%|8 | 80/1000\r"
    text = f"{bar}\x1b[36m(RayWorker pid=1)\x1b[0m a:1:2 [0] x.cc:1 NCCL WARN Cuda failure 'out of memory'\n"
    assert checks(text) == ["CUDA memory"]


# Exceptions


@pytest.mark.parametrize(
    "line",
    [
        "[rank3]: ValueError: " + "a long text " * 60,
        "[rank3]: Exception: something",
        "[rank3]: XYZ.core.SomeError: something",
        "[rank3]: queue.Empty",
        "  what():  something",
        "ValueError:",
    ],
)
def test_an_exception_has_any_length_and_module(line: str) -> None:
    assert checks(line + "\n" + timed_out(1, 5))[0] == "exception"


@pytest.mark.parametrize(
    "line",
    [
        "WARNING:root:could not import it: SomeError: nothing is there",
        "/lib/a.py:3: UserWarning: falling back: SomeError: nothing is there",
        "        except ValueError:",
    ],
)
def test_an_exception_that_was_handled_is_no_problem(line: str) -> None:
    assert "exception" not in checks(line + "\n")


def test_an_error_that_is_not_known_comes_before_a_closed_connection() -> None:
    closed = warn("a", 1, "socketProgress: Connection closed by remote peer b<4242>")
    first = findings(closed + "ERROR the flux capacitor is empty\n")[0]
    assert (first.level, first.check) == ("problem", "unknown")
    assert checks(timed_out(1, 900) + "ERROR the flux capacitor is empty\n")[0] != "unknown"


def test_a_time_out_says_more_than_a_closed_connection() -> None:
    closed = warn("a", 1, "socketProgress: Connection closed by remote peer b<4242>")
    assert checks(closed + timed_out(1, 900)) == ["collective timeout", "closed"]


@pytest.mark.parametrize(
    ("code", "text"),
    [(31, "illegal memory access"), (94, "ECC"), (149, "NVLink"), (119, "GSP"), (79, "bus")],
)
def test_the_number_of_an_xid_is_not_that_of_the_bus(code: int, text: str) -> None:
    what = findings(f"NVRM: Xid (PCI:0000:48:00): {code}, pid=1, name=python\n")[0].what
    assert text in what
    assert str(code) in what


@pytest.mark.parametrize(
    "line",
    [
        "vllm.engine.async_llm_engine.AsyncEngineDeadError: Background loop has errored already.",
        "asyncio.exceptions.CancelledError",
        "DeadlockDetectedException: DeadLock detected from rank: 3",
        "[rank3]: RuntimeError: DataLoader worker (pid 4711) is killed by signal: Terminated.",
        "[rank3]: DistBackendError: NCCL communicator was aborted on rank 3.",
    ],
)
def test_an_exception_that_another_fault_caused_comes_after_a_time_out(line: str) -> None:
    assert checks(line + "\n" + timed_out(1, 900))[0] == "collective timeout"


# Exceptions: where they were raised, what they follow from, and what only passes them on

FRAMES = (
    '  File "/opt/app/train.py", line 41, in train_one_epoch\n'
    "    loss = criterion(model(batch), label)\n"
    '  File "/opt/venv/lib/python3.11/site-packages/torch/nn/modules/loss.py", line 9, in forward\n'
    "    return F.loss(input)\n"
)


def test_an_exception_names_the_line_of_the_program() -> None:
    (finding,) = findings(f"Traceback (most recent call last):\n{FRAMES}ValueError: odd value 7\n")
    assert "ValueError: odd value 7" in finding.what
    assert "/opt/app/train.py, line 41, in train_one_epoch: loss = criterion(" in finding.what


def test_a_frame_belongs_to_its_rank() -> None:
    text = '[rank1]:   File "/opt/app/a.py", line 1, in save\n[rank0]: ValueError: odd value 7\n'
    (finding,) = findings(text)
    assert "a.py" not in finding.what


@pytest.mark.parametrize(
    "between",
    [
        "During handling of the above exception, another exception occurred:",
        "The above exception was the direct cause of the following exception:",
    ],
)
def test_exceptions_of_one_chain_are_one_finding(between: str) -> None:
    text = f"KeyError: 'shape'\n\n{between}\n\n{FRAMES}ValueError: odd value 7\n"
    (finding,) = findings(text)
    assert "KeyError: 'shape', then ValueError: odd value 7" in finding.what


def test_an_exception_that_ends_in_a_colon_has_its_next_line() -> None:
    (finding,) = findings("ValueError: these do not fit:\n - ds lr=1 vs hf lr=2\nmore\n")
    assert "these do not fit: - ds lr=1 vs hf lr=2" in finding.what


def test_the_rank_that_torchrun_saw_fail_first_comes_first() -> None:
    summary = "Root Cause (first observed failure):\n[0]:\n  rank      : 3 (local_rank: 1)\n"
    text = "[rank0]: ValueError: odd value 7\n[rank3]: ValueError: odd shape\n"
    assert findings(text)[0].where == "rank 0"
    assert findings(text + summary)[0].where == "rank 3"


EXTENSIONS = "Using /root/.cache/torch_extensions/py310_cu118 as PyTorch extensions root...\n"


def test_a_log_that_ends_in_a_known_wait_says_so() -> None:
    (finding,) = findings("epoch 1\n" + EXTENSIONS)
    assert (finding.level, finding.check) == ("warning", "hang")
    assert "TORCH_EXTENSIONS_DIR" in finding.fix


def test_a_wait_that_ended_is_not_shown() -> None:
    assert findings(EXTENSIONS + "step 7 loss 0.3\n" * 100) == []


def test_code_in_a_traceback_is_no_message() -> None:
    code = '  File "/opt/app/a.py", line 1, in f\n    raise RuntimeError("CUDA out of memory")\n'
    assert checks(code + "ValueError: odd value 7\n") == ["exception"]


def test_a_frame_with_a_label_is_no_error() -> None:
    label = "ERROR 05-25 17:13:32 [core.py:398] "
    frame = '  File "/opt/venv/lib/python3.11/site-packages/vllm/a.py", line 9, in f\n'
    assert checks(f"{label}{frame}{label}ValueError: odd value 7\n") == ["exception"]


def test_of_the_waits_in_which_a_log_ends_the_last_one_counts() -> None:
    registered = "All distributed processes registered. Starting with 4 processes\n"
    (finding,) = findings(registered + EXTENSIONS)
    assert "extension" in finding.what


def test_a_failure_says_more_than_the_wait_in_which_a_log_ends() -> None:
    assert checks(EXTENSIONS + "ValueError: odd value 7\n") == ["exception"]
    assert checks(EXTENSIONS + "RuntimeError: NCCL error: invalid usage\n") == ["wrapped"]
    assert checks(EXTENSIONS + "KeyboardInterrupt\n")[0] == "hang"


def test_an_exception_that_is_explained_names_the_line_of_the_program_too() -> None:
    (finding,) = findings(f"Traceback (most recent call last):\n{FRAMES}IndexError: list index\n")
    assert finding.check == "index"
    assert "(/opt/app/train.py, line 41, in train_one_epoch: loss = criterion(" in finding.what
