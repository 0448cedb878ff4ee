"""Which rank is named, for which cause, in which sentence; and which is not."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import pytest

import drumline
from drumline.base.rank_environment import LauncherLink
from drumline.base.untrusted import from_json
from drumline.net.dial import Reason
from drumline.watch.cluster_state import (
    ANSWER_OF,
    Answer,
    ClusterState,
    LostNode,
    NodeState,
    RankState,
)
from drumline.watch.diagnosis.diagnosis import Cause, Diagnosis
from drumline.watch.diagnosis.evidence import Evidence
from drumline.watch.diagnosis.exited import find_lost_connection
from drumline.watch.diagnosis.stack_frames import is_in_collective, is_loading, users_frame
from drumline.watch.diagnosis.watchdog import diagnose, stop_symptoms
from drumline.watch.failure_kind import FailureKind
from drumline.watch.heartbeat import Phase
from tests.unit.watch.diagnosis.sample_ranks import (
    CLOSED,
    IN_ALL_REDUCE,
    IN_BACKWARD,
    IN_QUEUE,
    TORCH,
    WORKER_IN_SAMPLE,
    blocked_rank,
    cluster,
    late_rank,
    rank_state,
    recorded,
    reduced,
    worker,
)

IN_LOSS = (
    "/usr/lib/python3.11/threading.py:327 in wait",
    "/home/me/job/losses.py:44 in contrastive",
    "/venv/lib/python3.11/site-packages/drumline/training/steps/eager.py:80 in _forward",
)
B_GONE = LostNode(node=1, host="node-b", ranks=(4, 5, 6, 7), no_heartbeat_s=3.4, how="no answer")


def found(cluster_state: ClusterState) -> Diagnosis:
    diagnosis = diagnose(cluster_state)
    assert diagnosis is not None
    assert from_json(Diagnosis, asdict(diagnosis)) == diagnosis
    return diagnosis


def ended(rank: int, exit: int | None, **changes: Any) -> RankState:
    usual: dict[str, Any] = {
        "phase": Phase.FORWARD,
        "state": "X",
        "exit": exit,
        "state_s": 0.6,
        "age_s": 0.7,
    }
    return rank_state(rank, **{**usual, **changes})


def dragged(rank: int, **changes: Any) -> RankState:
    return rank_state(
        rank,
        **{
            "phase": Phase.FAILED,
            "failure": CLOSED,
            "failure_kind": FailureKind.LOST_PEER,
            "age_s": 0.5,
            **changes,
        },
    )


WHOLE = [
    pytest.param(
        cluster(ended(5, -9), *(dragged(rank) for rank in (0, 1, 2, 3, 4, 6, 7))),
        Cause.KILLED,
        "failure: rank 5 on node-b was killed by SIGKILL at step 812, in forward; 7 ranks lost the connection to it. "
        "Try: find out who sent it: an operator, a batch system, or the kernel's OOM killer (dmesg on node-b)",
        id="killed",
    ),
    pytest.param(
        cluster(
            ended(
                5,
                -9,
                killed_after_s=0.0,
                killed_by="launcher",
                killed_because="node 0 (node-a) restarted",
            )
        ),
        Cause.ENDED,
        "failure: rank 5 on node-b was killed by drumline's launcher at step 812, in forward, because node 0 (node-a) "
        "restarted. Try: look for the cause of that; the ranks resume from the newest checkpoint",
        id="ended",
    ),
    pytest.param(
        cluster(ended(5, -9, memory="the limit of 512 MiB of its control group", phase=Phase.DATA)),
        Cause.OUT_OF_MEMORY,
        "failure: rank 5 on node-b ran out of memory and was killed at step 812, in the DataLoader (the limit of 512 "
        "MiB of its control group). Try: raise the memory limit, or lower the batch size or the number of DataLoader"
        " workers",
        id="out of memory",
    ),
    pytest.param(
        cluster(
            rank_state(2, phase=Phase.FAILED, failure="ValueError: bad label 17", age_s=0.9),
            *(dragged(rank) for rank in (0, 1, 3)),
        ),
        Cause.EXCEPTION,
        "failure: rank 2 on node-a crashed at step 812: ValueError: bad label 17; 3 ranks lost the connection to it. "
        "Try: read its traceback at the end of its log",
        id="exception",
    ),
    pytest.param(
        cluster(late_rank(3, Phase.FORWARD, state="T", collectives=(), answers=False)),
        Cause.STOPPED,
        "hang: rank 3 on node-a is stopped by a signal, in forward since step 812; 7 ranks are blocked in all_reduce "
        "#4410. Try: find out who stopped it; kill -CONT 4703 on node-a resumes it, if it still runs",
        id="stopped",
    ),
    pytest.param(
        cluster(
            late_rank(
                5, Phase.DATA, stack=IN_QUEUE, workers=(worker(0), worker(1, "T", WORKER_IN_SAMPLE))
            )
        ),
        Cause.STOPPED,
        "hang: rank 5 on node-b has been in the DataLoader since step 812 (worker 1 is stopped by a signal at "
        "data/images.py:31 in __getitem__); 7 ranks are blocked in all_reduce #4410. Try: find out who stopped it; "
        "kill -CONT 5001 on node-b resumes it, if it still runs",
        id="stopped worker",
    ),
    pytest.param(
        cluster(late_rank(5, Phase.FORWARD, state="t", collectives=(), answers=False)),
        Cause.DEBUGGED,
        "stall: rank 5 on node-b is held by a debugger, in forward since step 812; 7 ranks are blocked in "
        "all_reduce #4410. Try: continue process 4705 on node-b in the debugger, or detach",
        id="debugged",
    ),
    pytest.param(
        cluster(
            late_rank(
                5, Phase.DATA, stack=IN_QUEUE, workers=(worker(0), worker(1, "S", WORKER_IN_SAMPLE))
            )
        ),
        Cause.DATASET,
        "stall: rank 5 on node-b has been in the DataLoader since step 812 (worker 1 is blocked at data/images.py:31 "
        "in __getitem__); 7 ranks are blocked in all_reduce #4410. Try: check what data/images.py:31 in __getitem__ "
        "waits for: a file, a server, a lock; its stack is in the diagnosis file",
        id="dataset in a worker",
    ),
    pytest.param(
        cluster(
            late_rank(
                5,
                Phase.DATA,
                stack=IN_QUEUE,
                workers=(worker(0), worker(1, "S", (), in_fork_s=6.2)),
            )
        ),
        Cause.DATASET,
        "stall: rank 5 on node-b has been in the DataLoader since step 812 (worker 1 is stuck in fork); 7 ranks are "
        "blocked in all_reduce #4410. Try: use Python 3.12 or newer (in 3.11 a thread of torch can block a fork), or"
        " ddp.loader, which forks such a worker again; gdb -p 5001 on node-b shows what it waits for",
        id="worker stuck in fork",
    ),
    pytest.param(
        cluster(late_rank(5, Phase.FORWARD, stack=IN_LOSS)),
        Cause.USER_CODE,
        "stall: rank 5 on node-b has been in forward since step 812 (job/losses.py:44 in contrastive), without using "
        "the CPU; 7 ranks are blocked in all_reduce #4410. Try: check what job/losses.py:44 in contrastive waits "
        "for; its stack is in the diagnosis file",
        id="user code",
    ),
    pytest.param(
        cluster(late_rank(5, Phase.FORWARD, stack=IN_LOSS[1:], answers=False, collectives=())),
        Cause.GIL,
        "stall: rank 5 on node-b holds the GIL at job/losses.py:44 in contrastive, in forward since step 812: a call "
        "into C does not return; 7 ranks are blocked in all_reduce #4410. Try: check what job/losses.py:44 in "
        "contrastive calls; a C extension should release the GIL before it blocks",
        id="gil",
    ),
    pytest.param(
        cluster(
            late_rank(5, Phase.BETWEEN, stack=(f"{TORCH}/cuda/__init__.py:985 in synchronize",))
        ),
        Cause.NOT_ENTERED,
        "stall: rank 5 on node-b did not enter all_reduce #4410 of [77290]: it has been at cuda/__init__.py:985 in "
        "synchronize, between steps since step 812; 7 ranks are blocked in all_reduce #4410. Try: check why it is "
        "not in that collective: often an `if` that differs across ranks; its stack is in the diagnosis file",
        id="not entered",
    ),
    pytest.param(
        cluster(
            blocked_rank(
                2, stack=IN_ALL_REDUCE, collectives=(*recorded(4409, waits=False), reduced(4410, 1))
            )
        ),
        Cause.MISMATCH,
        "hang: ranks are in different collectives at step 812, in backward (job/train.py:31 in training_step): rank 2"
        " on node-a: all_reduce #4410 of [1]; the others: all_reduce #4410 of [77290]. Try: make every rank call the"
        " same collectives in the same order with the same shapes (look for one behind `if rank == ...`, and for "
        "batches of different length)",
        id="mismatch",
    ),
    pytest.param(
        cluster(late_rank(3, Phase.LEFT)),
        Cause.LEFT_EARLY,
        "hang: rank 3 on node-a left the loop after step 812, before the others; 7 ranks are blocked in all_reduce "
        "#4410. Try: give every rank the same number of batches (DDPManager.loader does), and let no rank break or "
        "return on its own",
        id="left early",
    ),
    pytest.param(
        cluster(
            rank_state(0, phase=Phase.LEFT),
            rank_state(
                1, phase=Phase.LEAVING, age_s=600.0, stack=("/home/me/job/close.py:7 in upload",)
            ),
            world_size=2,
        ),
        Cause.TEARDOWN,
        "stall: rank 1 on node-a left the loop 10 min 00 s ago and has not exited: it is closing its files, workers "
        "and process group (job/close.py:7 in upload). Try: check in its stack what it waits for; release CUDA "
        "graphs before the process group is destroyed",
        id="teardown",
    ),
    pytest.param(
        cluster(lost=(B_GONE,)),
        Cause.UNREACHABLE,
        "stall: no heartbeat from node-b for 3.4 s (no answer), with ranks 4-7; with two nodes, either node-b or "
        "node-a may be cut off; 4 ranks are blocked in all_reduce #4410. Try: check whether node-b is up, then check"
        " cable and security group between node-a and node-b: drumline doctor --hosts node-a,node-b",
        id="unreachable",
    ),
    pytest.param(
        cluster(
            late_rank(
                0, Phase.SAVE, state="D", state_s=12.0, stack=("/home/me/job/save.py:9 in store",)
            )
        ),
        Cause.STORAGE,
        "stall: rank 0 on node-a waits for storage that does not answer, in a save since step 812 (job/save.py:9 in "
        "store): in the kernel (state D) for 12 s without reading or writing a byte; 7 ranks are blocked in "
        "all_reduce #4410. Try: check the file systems of node-a (df, dmesg: a network mount whose server is down); "
        "a process in state D cannot be killed before its storage answers",
        id="storage",
    ),
    pytest.param(
        cluster(late_rank(5, Phase.COMPILE, cpu=0.98, state="R", age_s=900.0)),
        Cause.COMPILING,
        "stall: rank 5 on node-b has been in torch.compile for 15 min 00 s, at step 812; 7 ranks are blocked in "
        "all_reduce #4410. Try: wait: a large model may take minutes; TORCH_LOGS=dynamo,inductor shows what torch "
        "compiles",
        id="compiling",
    ),
    pytest.param(
        cluster(late_rank(5, Phase.FORWARD, stack=IN_LOSS[1:], cpu=0.98, state="R")),
        Cause.SLOW,
        "stall: rank 5 on node-b is slow but alive: in forward since step 812 (1.0 cores, at job/losses.py:44 in "
        "contrastive); 7 ranks are blocked in all_reduce #4410. Try: wait, or raise watch.hang_s if it often takes "
        "so long; its stack is in the diagnosis file",
        id="slow",
    ),
    pytest.param(
        cluster(
            late_rank(5, Phase.FORWARD, stack=IN_LOSS[1:], cpu=0.04, is_starved=True, answers=None)
        ),
        Cause.SLOW,
        "stall: rank 5 on node-b is slow but alive: in forward since step 812 (0.04 cores, waiting for a CPU of a "
        "crowded machine, at job/losses.py:44 in contrastive); 7 ranks are blocked in all_reduce #4410. Try: wait, or "
        "raise watch.hang_s if it often takes so long; its stack is in the diagnosis file",
        id="slow on a crowded machine",
    ),
    pytest.param(
        cluster(world_size=2),
        Cause.UNKNOWN,
        "stall: no progress since step 812, and no rank stands out: ranks 0, 1 on node-a in all_reduce #4410 of "
        "[77290]. Try: read the stacks in the diagnosis file; if all are in one collective, test the network: "
        "drumline doctor",
        id="unknown",
    ),
]


@pytest.mark.parametrize(("given", "cause", "sentence"), WHOLE)
def test_each_cause_in_one_sentence(given: ClusterState, cause: Cause, sentence: str) -> None:
    diagnosis = found(given)
    assert diagnosis.cause is cause
    assert diagnosis.sentence(sentence.partition(":")[0]) == sentence
    assert diagnosis.is_certain == (sentence.partition(":")[0] != "stall")
    # What it is judged by has come through JSON from other nodes.
    assert (
        diagnose(
            replace(given, nodes=tuple(from_json(NodeState, asdict(node)) for node in given.nodes))
        )
        == diagnosis
    )


@pytest.mark.parametrize(
    ("link", "host", "sentence"),
    [
        (
            LauncherLink(silent_nodes=(1,), num_nodes=2),
            "node-b",
            "no heartbeat from node-b for 3.4 s (no answer), with ranks 4-7; the launcher receives none from it either",
        ),
        (
            LauncherLink(is_cut_off=True, num_nodes=2),
            "node-a",
            "node-a is cut off from the other nodes: no heartbeat from the launcher either; it has received no "
            "heartbeat from node-b for 3.4 s",
        ),
        (
            LauncherLink(num_nodes=2),
            "node-b",
            "no heartbeat from node-b for 3.4 s (no answer), with ranks 4-7; the launcher receives heartbeats from "
            "both node-b and node-a",
        ),
        (
            LauncherLink(silent_nodes=(1,), num_nodes=3),
            "node-b",
            "with two nodes, either node-b or node-a may be",
        ),
    ],
    ids=[
        "the other is cut off",
        "this host is cut off",
        "both are heard",
        "other nodes than the launcher has",
    ],
)
def test_the_launcher_knows_which_end_of_a_link_is_cut_off(
    link: LauncherLink, host: str, sentence: str
) -> None:
    diagnosis = found(replace(cluster(lost=(B_GONE,)), launcher=link))
    assert (diagnosis.cause, diagnosis.host) == (Cause.UNREACHABLE, host)
    assert sentence in diagnosis.what


def test_only_while_all_processes_are_healthy_a_lost_host_may_return() -> None:
    assert found(cluster(lost=(B_GONE,))).may_return
    refuses = replace(B_GONE, how="connection refused", answer=Answer.REFUSED, no_heartbeat_s=6.0)
    lost_peer = rank_state(
        0, phase=Phase.FAILED, failure="reset by peer", failure_kind=FailureKind.LOST_PEER
    )
    for state in (cluster(lost=(refuses,)), cluster(lost_peer, lost=(B_GONE,))):
        diagnosis = found(state)
        assert diagnosis.cause is Cause.UNREACHABLE
        assert diagnosis.is_certain
        assert not diagnosis.may_return


def test_every_cause_has_its_sentence_here() -> None:
    assert {case.values[1] for case in WHOLE} == set(Cause)


def test_the_first_to_end_is_the_cause_not_those_who_fell_with_it() -> None:
    # Its launcher ended these after the first one raised, and the last one only after its time of
    # grace.
    raised = rank_state(
        6,
        phase=Phase.FAILED,
        failure="KeyError: 'label'",
        age_s=40.0,
        state="X",
        state_s=39.0,
        exit=1,
    )
    asked_to_stop = [ended(rank, -15, state_s=35.0) for rank in (0, 1, 2)]
    diagnosis = found(
        cluster(raised, *asked_to_stop, ended(3, -9, state_s=5.0), *(dragged(r) for r in (4, 5, 7)))
    )
    assert (diagnosis.cause, diagnosis.rank, diagnosis.host) == (Cause.EXCEPTION, 6, "node-b")
    # No exit codes under another launcher, and no failure in the one that was killed: it is gone,
    # the others talk.
    diagnosis = found(cluster(ended(1, None), *(dragged(rank) for rank in (0, 2, 3))))
    assert (diagnosis.cause, diagnosis.rank) == (Cause.KILLED, 1)
    assert diagnosis.what == (
        "rank 1 on node-a exited at step 812, in forward, for an unknown reason; 3 ranks lost the connection to it"
    )
    # A level 0 script says nothing but exit codes: the first to end is the best guess.
    codes = [
        rank_state(rank, step=0, state="X", exit=1, state_s=1.2 if rank != 1 else 2.4)
        for rank in range(4)
    ]
    diagnosis = found(cluster(*codes, world_size=4))
    assert (diagnosis.rank, diagnosis.step) == (1, None)
    assert diagnosis.what == "rank 1 on node-a exited with code 1"
    # Of those that it ended at once because of it, the launcher says nothing.
    quiet = [ended(rank, None, step=0, state_s=1.2) for rank in (0, 2, 3)]
    diagnosis = found(cluster(codes[1], *quiet, world_size=4))
    assert diagnosis.what == "rank 1 on node-a exited with code 1"
    # What its launcher killed long after it is not the cause, though its end is the plainer one.
    assert found(cluster(*codes, ended(0, -9, step=0, state_s=0.3), world_size=4)).rank == 1


@pytest.mark.parametrize(
    ("exit", "end", "next_step"),
    [
        (-11, "was killed by SIGSEGV at", "check the end of its log: a library crashed in it"),
        (-6, "was killed by SIGABRT at", "as gloo does when ranks enter different collectives"),
        (-7, "was killed by SIGBUS at", "(a full /dev/shm gives SIGBUS)"),
        (-64 - 1, "was killed by signal 65 at", "find out who sent it"),
        (
            3,
            "exited with code 3 at step 812, in forward",
            "read its traceback at the end of its log",
        ),
    ],
)
def test_other_ends(exit: int, end: str, next_step: str) -> None:
    diagnosis = found(cluster(ended(5, exit)))
    assert diagnosis.what.startswith(f"rank 5 on node-b {end}")
    assert next_step in diagnosis.next_step


@pytest.mark.parametrize(
    ("kind", "next_step"),
    [
        (FailureKind.DISK_FULL, "free some space on that file system"),
        (FailureKind.OUT_OF_MEMORY, "lower the batch size, or accumulate"),
        (FailureKind.WORKER_DIED, "for what killed the worker: often it is out of memory"),
        (FailureKind.OTHER, "read its traceback"),
    ],
)
def test_an_error_of_its_own_says_what_to_do(kind: FailureKind, next_step: str) -> None:
    failed = rank_state(2, phase=Phase.FAILED, failure="OSError: text", failure_kind=kind)
    diagnosis = found(cluster(failed, *(dragged(r) for r in (0, 1, 3))))
    assert (diagnosis.cause, diagnosis.rank) == (Cause.EXCEPTION, 2)
    assert next_step in diagnosis.next_step


def test_a_kill_by_the_launcher_is_named_as_its_own() -> None:
    killed = ended(2, -9, killed_after_s=15.0, killed_by="launcher")
    diagnosis = found(cluster(killed, *(dragged(rank) for rank in (0, 1, 3))))
    assert (diagnosis.cause, diagnosis.rank) == (Cause.ENDED, 2)
    assert diagnosis.what.startswith(
        "rank 2 on node-a was killed by drumline's launcher at step 812, in forward, 15 s after it was asked to exit; "
    )
    assert diagnosis.next_step == "check the end of its log for what it was doing", (
        "torch's limit may have been it"
    )
    saved = [ended(rank, 75) for rank in (0, 1, 3, 4, 5, 6, 7)]
    assert find_lost_connection(Evidence(cluster(killed, *saved))) is None, (
        "the launcher reports it"
    )


def test_ranks_that_drumline_kills_for_a_reason_are_named_with_it() -> None:
    why = {
        "killed_after_s": 0.0,
        "killed_by": "watchdog",
        "killed_because": "no heartbeat from node-b for 20 s",
    }
    diagnosis = found(cluster(*(ended(rank, -9, **why) for rank in range(8))))
    assert (diagnosis.cause, diagnosis.rank) == (Cause.ENDED, 0)
    assert diagnosis.what == (
        "rank 0 on node-a was killed by drumline's watchdog at step 812, in forward, because no heartbeat from node-b "
        "for 20 s"
    )
    assert "find out who sent it" not in diagnosis.next_step
    other_ranks = [ended(rank, -9, **why) for rank in (0, 1, 2, 4, 5, 6, 7)]
    first = found(cluster(ended(3, -9), *other_ranks))
    assert first.what == "rank 3 on node-a was killed by SIGKILL at step 812, in forward", (
        "only that one is another's"
    )


def test_an_exit_code_without_an_error_is_no_report_of_the_rank() -> None:
    raised = found(cluster(rank_state(2, phase=Phase.FAILED, failure="OSError: text"), dragged(0)))
    assert raised.is_ranks_error, "the rank prints it with its traceback"
    silent = found(cluster(ended(2, 9), dragged(0)))
    assert silent.what.startswith("rank 2 on node-a exited with code 9")
    assert not silent.is_ranks_error, "nobody else prints it"


def test_only_lost_connections_name_the_first_and_say_that_it_is_none() -> None:
    diagnosis = found(
        cluster(*(dragged(rank, age_s=3.0 if rank == 2 else 0.5) for rank in range(8)))
    )
    assert (diagnosis.cause, diagnosis.rank) == (Cause.EXCEPTION, 2)
    assert diagnosis.what.startswith(
        "rank 2 on node-a lost its connection to the other ranks at step 812: RuntimeError"
    )
    assert diagnosis.what.endswith("no rank was seen to fail before it")
    # At first it may still come out that a host is gone, unless nobody is left to see it.
    echoes = [dragged(rank) for rank in range(8)]
    assert found(cluster(*echoes)).is_certain is False
    assert found(cluster(*(replace(echo, state="X", exit=1) for echo in echoes))).is_certain
    # Where a host went silent, it is the cause of them.
    diagnosis = found(cluster(*(dragged(rank) for rank in range(4)), lost=(B_GONE,)))
    assert (diagnosis.cause, diagnosis.host) == (Cause.UNREACHABLE, "node-b")


def b_alone(*ranks: RankState, how: str, up_s: float, answer: Answer = Answer.NONE) -> ClusterState:
    """Node b, whose sidecar has never heard that of node a: of the ranks there nothing is known."""
    node = NodeState(node=1, host="node-b", ranks=ranks)
    a = LostNode(node=0, host="node-a", ranks=(), no_heartbeat_s=up_s, how=how, answer=answer)
    return ClusterState(me=1, nodes=(node,), never_seen=(a,))


def test_a_host_that_was_lost_before_its_first_heartbeat() -> None:
    echoes = [dragged(rank, state="X", exit=1, age_s=0.5, state_s=0.5) for rank in range(4, 8)]
    # All that are known of have ended, but they are not all that there are.
    early = found(b_alone(*echoes, how="", up_s=0.7))
    assert (early.cause, early.is_certain) == (Cause.EXCEPTION, False)
    old = [replace(echo, age_s=2.9) for echo in echoes]
    assert found(b_alone(*old, how="no answer", up_s=2.9)).is_certain is False
    diagnosis = found(b_alone(*old, how="no answer", up_s=3.1))
    assert (diagnosis.cause, diagnosis.host, diagnosis.rank, diagnosis.is_certain) == (
        Cause.UNREACHABLE,
        "node-a",
        None,
        True,
    )
    assert diagnosis.what.startswith("no heartbeat from node-a for 3.1 s (no answer)")
    # A port may be closed to us while the ranks train: that alone blames nobody.
    standing = b_alone(*(blocked_rank(rank) for rank in range(4, 8)), how="no answer", up_s=3.1)
    assert found(standing).cause is not Cause.UNREACHABLE
    # A host that goes down refuses connections first.
    assert (
        found(b_alone(*old, how=Reason.REFUSED, answer=Answer.REFUSED, up_s=2.9)).is_certain
        is False
    )
    late = [replace(echo, age_s=4.6) for echo in echoes]
    assert found(b_alone(*late, how="", up_s=4.7)).is_certain, (
        "the launcher waits no longer than 5.5 s"
    )


def test_a_rank_that_was_ended_unseen_is_no_cause_where_a_host_was_never_seen() -> None:
    """The launcher of b ended rank 4, and nothing recorded that: its peer lost the connection to a."""
    lost_peer = dragged(5, state="X", exit=1, age_s=5.0, state_s=4.9)
    unexplained = ended(4, None, state_s=4.8)
    early = found(b_alone(replace(unexplained, state_s=2.0), lost_peer, how="", up_s=2.9))
    assert (early.cause, early.rank, early.is_certain) == (Cause.KILLED, 4, False)
    diagnosis = found(b_alone(unexplained, lost_peer, how="no answer", up_s=5.2))
    assert (diagnosis.cause, diagnosis.host, diagnosis.rank) == (
        Cause.UNREACHABLE,
        "node-a",
        None,
    )
    # Nobody lost a connection: the port of a may only be closed to us.
    alone = found(b_alone(unexplained, how="no answer", up_s=5.2))
    assert (alone.cause, alone.rank, alone.is_certain) == (Cause.KILLED, 4, True)


@pytest.mark.parametrize(
    "ending", [{"exit": 1}, {"exit": 143, "failure": "", "failure_kind": FailureKind.OTHER}]
)
def test_a_lost_connection_is_certain_when_the_other_nodes_were_heard_since(
    ending: dict[str, Any],
) -> None:
    """The launcher ends a rank by SIGTERM, too, when another one has lost its connection."""
    lost = dragged(0, state="X", exit=1, age_s=2.6, state_s=2.5)
    second_rank = dragged(1, state="X", **{"age_s": 2.6, "state_s": 2.4, **ending})
    for heartbeat_age_s, is_certain in ((0.4, True), (2.8, False)):
        cluster_state = cluster(
            lost, second_rank, world_size=8, node_0={"heartbeat_age_s": {1: heartbeat_age_s}}
        )
        assert found(cluster_state).is_certain is is_certain, heartbeat_age_s
    # It spoke once, before it had seen a rank of its own.
    begins = NodeState(node=1, host="node-b")
    me = NodeState(node=0, host="node-a", ranks=(lost, second_rank), heartbeat_age_s={1: 2.8})
    assert found(ClusterState(me=0, nodes=(me, begins))).is_certain is False


def test_a_rank_that_was_asked_to_stop_is_no_cause_unless_it_is_alone() -> None:
    stopped = [
        rank_state(
            rank,
            phase=Phase.FAILED,
            failure="KeyboardInterrupt",
            failure_kind=FailureKind.INTERRUPTED,
            exit=130,
        )
        for rank in range(8)
    ]
    assert diagnose(cluster(*stopped)) is None
    assert diagnose(cluster(*(ended(rank, -15) for rank in range(8)))) is None
    diagnosis = found(cluster(ended(3, -15), *(dragged(rank) for rank in (0, 1, 2))))
    assert (diagnosis.cause, diagnosis.rank) == (Cause.KILLED, 3)
    assert diagnosis.what.startswith(
        "rank 3 on node-a was killed by SIGTERM at step 812, in forward; 3 ranks lost"
    )
    # The launcher ends the rest after a host was lost.
    diagnosis = found(
        cluster(*(ended(rank, -15) for rank in (0, 1)), dragged(2), dragged(3), lost=(B_GONE,))
    )
    assert diagnosis.cause is Cause.UNREACHABLE


def test_an_exit_for_an_unknown_reason_may_follow_a_lost_host() -> None:
    """The launcher ended that rank, after another one had lost its peer, and notes no exits of its
    own making."""
    unknown = ended(2, None, state_s=1.2)
    lost_peer = dragged(3, state="X", exit=1, age_s=1.4, state_s=1.3)
    heard = found(cluster(unknown, lost_peer, node_0={"heartbeat_age_s": {1: 0.2}}))
    assert (heard.cause, heard.rank, heard.is_certain) == (Cause.KILLED, 2, True)
    unheard = found(cluster(unknown, lost_peer, node_0={"heartbeat_age_s": {1: 1.5}}))
    assert (unheard.rank, unheard.is_certain) == (2, False)
    assert found(cluster(unknown, lost_peer, lost=(B_GONE,))).cause is Cause.UNREACHABLE


@pytest.mark.parametrize(
    ("state", "state_s", "is_fault"), [("T", 0.9, False), ("T", 1.1, True), ("t", 9.0, False)]
)
def test_a_rank_that_continues_within_a_second_or_is_debugged_is_no_fault(
    state: str, state_s: float, is_fault: bool
) -> None:
    rank = late_rank(3, Phase.FORWARD, state=state, state_s=state_s)
    assert bool(stop_symptoms([rank])) is is_fault
    assert found(cluster(rank)).is_certain is is_fault


def test_a_job_that_is_stopped_as_a_whole_may_be_continued() -> None:
    every = [late_rank(rank, Phase.FORWARD, state="T", collectives=()) for rank in range(4)]
    diagnosis = found(cluster(*every, world_size=4))
    assert (diagnosis.cause, diagnosis.is_certain) == (Cause.STOPPED, False)
    assert diagnosis.what.endswith(
        "is stopped by a signal, in forward since step 812; so are ranks 1-3 on node-a"
    )
    assert found(cluster(*every[1:], world_size=4)).is_certain
    killed = ended(0, -9)
    assert found(cluster(killed, *every[1:], world_size=4)).cause is Cause.KILLED


def test_on_many_hosts_a_sentence_stays_one() -> None:
    """32 hosts with 8 ranks each."""

    def big(
        *odd: RankState,
        every: Callable[[int], RankState] = blocked_rank,
        lost: tuple[LostNode, ...] = (),
    ) -> ClusterState:
        ranks = [every(rank) for rank in range(256)]
        for odd_rank in odd:
            ranks[odd_rank.rank] = odd_rank
        nodes = [
            NodeState(
                node=node,
                host=f"node-{node}",
                ranks=tuple(
                    replace(rank, host=f"node-{node}") for rank in ranks[8 * node : 8 * node + 8]
                ),
            )
            for node in range(32)
        ]
        return ClusterState(me=0, nodes=tuple(nodes), lost=lost)

    def everywhere(rank: int) -> RankState:
        return late_rank(
            rank, Phase.FORWARD, stack=(f"/home/me/job/train.py:{rank} in main",), collectives=()
        )

    def alone(rank: int) -> RankState:
        collective = replace(reduced(4410), number=rank)
        return blocked_rank(rank, collectives=(replace(collective, group=f"group {rank}"),))

    away = tuple(
        LostNode(
            node=n,
            host=f"node-{n}",
            ranks=tuple(range(8 * n, 8 * n + 8)),
            no_heartbeat_s=4.0,
            how="no answer",
        )
        for n in range(1, 24)
    )
    states = {
        "dataset": big(late_rank(77, Phase.DATA)),
        "left": big(*(late_rank(rank, Phase.LEFT) for rank in range(0, 256, 9))),
        "stopped": big(*(late_rank(rank, Phase.FORWARD, state="T") for rank in range(0, 256, 2))),
        "mismatch": big(
            *(blocked_rank(r, collectives=(reduced(4410, 3),)) for r in range(0, 256, 3))
        ),
        "everywhere": big(every=everywhere),
        "unknown": big(every=alone),
        "unreachable": big(lost=away),
        "killed": big(*(ended(rank, -9) for rank in range(40, 130))),
    }
    for what, cluster_state in states.items():
        sentence = found(cluster_state).sentence("hang")
        assert len(sentence) < 600, (what, sentence)
    assert "; 255 ranks are blocked in all_reduce #4410" in found(states["dataset"]).what
    assert "; 252 ranks elsewhere" in found(states["unknown"]).what


def test_gloo_ends_a_rank_that_receives_more_than_it_expects() -> None:
    aborted = ended(2, -6, phase=Phase.BACKWARD, stack=IN_ALL_REDUCE)
    diagnosis = found(cluster(aborted, *(dragged(rank) for rank in (0, 1, 3)), world_size=4))
    assert (diagnosis.cause, diagnosis.rank) == (Cause.MISMATCH, 2)
    assert diagnosis.what == (
        "rank 2 on node-a entered a different collective than the others, or one with a different size, at step 812, "
        "in backward (job/train.py:31 in training_step): rank 2 on node-a: all_reduce; gloo aborted rank 2 on node-a "
        "(SIGABRT), as it does when a rank receives more data than it expects"
    )
    # The others leave what they were in as they fail.
    other_ranks = [dragged(rank, collectives=recorded(4410, waits=True)) for rank in (0, 1, 3)]
    assert (
        "): rank 2 on node-a: all_reduce; the others: all_reduce #4410 of [77290]; gloo aborted rank 2 on node-a"
        in (found(cluster(aborted, *other_ranks, world_size=4)).what)
    )
    in_backward = ended(2, -6, phase=Phase.BACKWARD, stack=IN_BACKWARD)
    assert (
        ": rank 2 on node-a: all_reduce of gradients; "
        in found(cluster(in_backward, *other_ranks, world_size=4)).what
    )
    # All but one: then that one sent too much.
    many = [ended(rank, -6, phase=Phase.BACKWARD) for rank in (0, 1, 3)]
    assert found(cluster(*many, dragged(2), world_size=4)).rank == 2
    # An abort elsewhere is an abort.
    assert found(cluster(ended(2, -6, phase=Phase.FORWARD, stack=IN_LOSS))).cause is Cause.KILLED


def test_a_rank_that_was_left_behind_by_an_early_exit() -> None:
    diagnosis = found(
        cluster(
            ended(3, 0, phase=Phase.LEFT),
            *(dragged(rank) for rank in (0, 1)),
            blocked_rank(2),
            world_size=4,
        )
    )
    assert (diagnosis.cause, diagnosis.rank) == (Cause.LEFT_EARLY, 3)
    assert diagnosis.what == (
        "rank 3 on node-a left the loop after step 812 and exited with code 0, before the others; "
        "ranks 0, 1 on node-a lost the connection"
    )
    # Most have left: the odd one is the one with a batch too many.
    diagnosis = found(cluster(*(late_rank(rank, Phase.LEFT) for rank in (0, 1, 2)), world_size=4))
    assert (diagnosis.cause, diagnosis.rank) == (Cause.LEFT_EARLY, 3)
    assert diagnosis.what == (
        "rank 3 on node-a continued in the loop after step 812, where ranks 0-2 on node-a left it; "
        "1 rank is blocked in all_reduce #4410"
    )


def test_a_rank_that_left_calls_other_collectives() -> None:
    """At the end of a run ranks call one more collective, with the number of the others' bucket."""
    barrier = replace(reduced(4410, op="broadcast"), is_done=False)
    early = late_rank(3, Phase.LEFT, collectives=(*recorded(4409, waits=False), barrier))
    assert (found(cluster(early)).cause, found(cluster(early)).rank) == (Cause.LEFT_EARLY, 3)
    # Gloo may end the one or the other for it.
    torn = ended(3, -6, phase=Phase.LEFT)
    diagnosis = found(cluster(torn, *(dragged(rank) for rank in (0, 1, 2)), world_size=4))
    assert (diagnosis.cause, diagnosis.rank) == (Cause.LEFT_EARLY, 3)
    diagnosis = found(
        cluster(early, ended(1, -6, phase=Phase.BACKWARD), dragged(0), dragged(2), world_size=4)
    )
    assert (diagnosis.cause, diagnosis.rank) == (Cause.LEFT_EARLY, 3)


@pytest.mark.parametrize("phase", [Phase.SAVE, Phase.EVALUATION, Phase.BETWEEN])
def test_the_last_rank_at_the_end_of_a_run_is_not_left_behind(phase: Phase) -> None:
    last = late_rank(3, phase, cpu=0.9, stack=("/home/me/job/save.py:9 in store",))
    diagnosis = found(
        cluster(*(late_rank(rank, Phase.LEFT) for rank in (0, 1, 2)), last, world_size=4)
    )
    assert (diagnosis.cause, diagnosis.rank) == (Cause.SLOW, 3)
    # In a loop of the user's own there are no such phases; that it is in no collective is seen all
    # the same.
    report = late_rank(3, Phase.USER, stack=("/home/me/job/report.py:9 in upload",))
    diagnosis = found(
        cluster(*(late_rank(rank, Phase.LEFT) for rank in (0, 1, 2)), report, world_size=4)
    )
    assert (diagnosis.cause, diagnosis.rank, diagnosis.is_certain) == (Cause.USER_CODE, 3, False)
    assert diagnose(cluster(*(late_rank(rank, Phase.LEFT) for rank in range(8)))) is None
    # In a loop of the user's own, rank 0 has something left to do alone: its stack says so, or it
    # could not be asked.
    for stack in ((), ("job/export.py:7 in upload", "job/train.py:40 in <module>")):
        alone = late_rank(0, Phase.USER, stack=stack, collectives=recorded(4409, waits=False))
        diagnosis = diagnose(
            cluster(*(late_rank(rank, Phase.LEFT) for rank in (1, 2, 3)), alone, world_size=4)
        )
        assert diagnosis is None or not diagnosis.is_certain, diagnosis
    assert diagnose(cluster(*(rank_state(rank, state="X", exit=75) for rank in range(8)))) is None


def test_near_misses_of_data() -> None:
    # The worker of a rank that waits itself is not the cause yet.
    diagnosis = found(
        cluster(
            blocked_rank(1, workers=(worker(0, "T"),)), late_rank(5, Phase.FORWARD, stack=IN_LOSS)
        )
    )
    assert (diagnosis.cause, diagnosis.rank) == (Cause.USER_CODE, 5)
    gone = found(
        cluster(late_rank(5, Phase.DATA, stack=IN_QUEUE, workers=(worker(0, "Z", ()), worker(1))))
    )
    assert (gone.cause, gone.is_certain) == (Cause.DATASET, True)
    assert "(worker 0 has exited)" in gone.what
    in_fork = found(
        cluster(late_rank(5, Phase.DATA, stack=IN_QUEUE, workers=(worker(0, in_fork_s=31.0),)))
    )
    assert in_fork.is_certain, "no hook of the user's takes so long"
    stuck = found(
        cluster(late_rank(5, Phase.DATA, stack=IN_QUEUE, workers=(worker(0, "D"), worker(1))))
    )
    assert stuck.cause is Cause.STORAGE
    busy = worker(1, "R", WORKER_IN_SAMPLE[1:], cpu=0.97)
    assert (
        "(worker 1 computes with 1.0 cores at data/images.py:31"
        in found(cluster(late_rank(5, Phase.DATA, workers=(worker(0), busy)))).what
    )
    # Without workers the dataset is in the rank's own stack; level 0 has nothing else.
    own_cause = found(
        cluster(late_rank(5, Phase.START, step=0, age_s=7.0, stack=WORKER_IN_SAMPLE[:3]))
    )
    assert own_cause.cause is Cause.DATASET
    assert (
        "rank 5 on node-b has been in the DataLoader since step 0 (data/images.py:31 in __getitem__);"
        in own_cause.what
    )
    held = found(cluster(late_rank(5, Phase.DATA, answers=False, collectives=())))
    assert "(holding the GIL)" in held.what
    in_c = late_rank(5, Phase.DATA, answers=False, collectives=(), stack=WORKER_IN_SAMPLE[1:])
    assert found(cluster(in_c)).cause is Cause.GIL


def test_a_rank_in_state_d_that_reads_is_slow_and_no_more() -> None:
    diagnosis = found(cluster(late_rank(0, Phase.SAVE, state="D", has_io=True)))
    assert (diagnosis.cause, diagnosis.is_certain) == (Cause.SLOW, False)
    assert "(reading or writing files)" in diagnosis.what


def test_two_ranks_in_different_collectives_lean_on_what_came_before() -> None:
    """The bucket is what followed the loss each time before; to the other's operation nothing
    leads."""
    extra = blocked_rank(
        1, collectives=(*recorded(4409, waits=False, size=1), reduced(4410, 7, op="broadcast"))
    )
    extra = replace(extra, collectives=(*blocked_rank(0).collectives[:-1], extra.collectives[-1]))
    diagnosis = found(cluster(extra, world_size=2))
    assert (diagnosis.cause, diagnosis.rank) == (Cause.MISMATCH, 1)
    assert (
        "rank 1 on node-a: broadcast #4410 of [7]; rank 0 on node-a: all_reduce #4410 of [77290]"
        in diagnosis.what
    )
    out = replace(
        extra, collectives=(*extra.collectives[:-1], replace(reduced(4410, op="barrier"), sizes=()))
    )
    diagnosis = found(cluster(out, world_size=2))
    assert (diagnosis.cause, diagnosis.rank) == (Cause.MISMATCH, 1)
    assert diagnosis.next_step.startswith(
        "check whether it left the loop before the others; if not, make every rank"
    )
    # Nothing came before: then nobody is blamed alone.
    pair = [blocked_rank(rank, collectives=(reduced(1, 5 + rank),)) for rank in range(2)]
    diagnosis = found(cluster(*pair, world_size=2))
    assert (diagnosis.cause, diagnosis.rank, diagnosis.host) == (Cause.MISMATCH, None, "node-a")
    assert diagnosis.what == (
        "ranks are in different collectives at step 812, in backward: rank 0 on node-a: all_reduce #1 of [5]; "
        "rank 1 on node-a: all_reduce #1 of [6]; it is unknown which one is wrong"
    )


def test_a_shape_mismatch_as_gloo_leaves_it() -> None:
    """One rank got enough data to continue with the next number; the other two wait at the one that
    differs."""
    odd = blocked_rank(
        1, collectives=(*recorded(12, waits=False)[:-1], reduced(12, is_done=True), reduced(13, 3))
    )
    even = blocked_rank(
        2, collectives=(*recorded(12, waits=False)[:-1], reduced(12, is_done=True), reduced(13, 2))
    )
    ahead = blocked_rank(
        0, collectives=(reduced(12, is_done=True), reduced(13, 2, is_done=True), reduced(14))
    )
    diagnosis = found(cluster(ahead, odd, even, world_size=3))
    assert (diagnosis.cause, diagnosis.rank) == (Cause.MISMATCH, 1)
    assert (
        "rank 1 on node-a: all_reduce #13 of [3]; the others: all_reduce #13 of [2]"
        in diagnosis.what
    )


def test_sizes_may_differ_where_they_need_not_be_the_same() -> None:
    root = blocked_rank(0, collectives=(reduced(9, 8, op="scatter"),))
    other_ranks = [
        blocked_rank(rank, collectives=(reduced(9, 0, op="scatter"),)) for rank in range(1, 4)
    ]
    assert found(cluster(root, *other_ranks, world_size=4)).cause is Cause.UNKNOWN
    whole = [
        blocked_rank(rank, collectives=(reduced(9, rank, op="all_gather", is_done=True),))
        for rank in range(4)
    ]
    assert found(cluster(*whole, world_size=4)).cause is not Cause.MISMATCH, "it came to its end"


def test_hosts_that_are_late_are_not_gone() -> None:
    assert found(cluster(lost=(replace(B_GONE, no_heartbeat_s=2.5),))).is_certain is False
    assert (
        found(
            cluster(lost=(replace(B_GONE, how=Reason.REFUSED, answer=Answer.REFUSED),))
        ).is_certain
        is False
    )
    quiet = found(cluster(lost=(replace(B_GONE, how=""),)))
    assert quiet.is_certain is False
    assert "(it accepts connections, but its sidecar sends nothing)" in quiet.what
    # its sidecar died, and was not started again
    for how in (Reason.NO_REPLY, Reason.CLOSED):
        mute = found(
            cluster(lost=(replace(B_GONE, how=how, answer=ANSWER_OF[how], no_heartbeat_s=500.0),))
        )
        assert (mute.is_certain, mute.host) == (False, "node-b")
        assert mute.next_step == "find out what ended the job on node-b; the host itself is up"
    refused = found(
        cluster(
            lost=(replace(B_GONE, how=Reason.REFUSED, answer=Answer.REFUSED, no_heartbeat_s=6.0),)
        )
    )
    assert refused.is_certain
    assert refused.next_step == "find out what ended the job on node-b; the host itself is up"
    second_host = LostNode(node=2, host="node-c", ranks=(8,), no_heartbeat_s=3.1, how="no answer")
    d = NodeState(
        node=3,
        host="node-d",
        ranks=(blocked_rank(9, host="node-d"),),
        heartbeat_age_s={1: 4.0, 2: 4.0},
    )
    cluster_state = cluster(lost=(B_GONE, second_host))
    assert (
        "; none from node-c either"
        in found(replace(cluster_state, nodes=(*cluster_state.nodes, d))).what
    )


def test_a_node_without_any_heartbeat_is_cut_off_itself() -> None:
    c_gone = LostNode(node=2, host="node-c", ranks=(8, 9), no_heartbeat_s=3.6, how="no answer")
    diagnosis = found(cluster(lost=(B_GONE, c_gone)))
    assert (diagnosis.cause, diagnosis.host, diagnosis.rank) == (Cause.UNREACHABLE, "node-a", None)
    assert diagnosis.what == (
        "node-a is cut off from the other nodes: 2 of 3 nodes stopped sending heartbeats together; it has received "
        "no heartbeat from node-b and node-c for 3.6 s; 4 ranks are blocked in all_reduce #4410"
    )
    diagnosis = found(cluster(lost=(B_GONE,), node_0={"link": "eth0 is down"}))
    assert diagnosis.host == "node-a"
    assert diagnosis.what.startswith(
        "node-a is cut off from the other nodes: eth0 is down; it has received no heartbeat from node-b"
    )
    assert diagnosis.next_step.endswith("drumline doctor --hosts node-a,node-b")


def test_a_node_that_is_done_sends_no_heartbeats() -> None:
    """Its last one shows that it received those of the other, which has not exited yet."""
    done = [ended(rank, 0, phase=Phase.LEFT) for rank in range(4)]
    cluster_state = cluster(
        *done, node_0={"heartbeat_age_s": {1: 0.3}}, node_1={"heartbeat_age_s": {0: 4.0}}
    )
    assert found(cluster_state).cause is not Cause.UNREACHABLE


def test_pictures_with_little_in_them() -> None:
    assert diagnose(ClusterState(me=0, nodes=())) is None
    # Beats alone: who is behind in the step.
    few = [rank_state(rank, phase=Phase.BACKWARD) for rank in range(3)]
    diagnosis = found(cluster(*few, rank_state(3, phase=Phase.DATA), world_size=4))
    assert (diagnosis.cause, diagnosis.rank) == (Cause.DATASET, 3)
    assert diagnosis.what == (
        "rank 3 on node-a has been in the DataLoader since step 812; 3 ranks are waiting for it"
    )
    # Of several micro-batches, the data of the next one comes after the backward pass of the one
    # before.
    ahead = rank_state(3, phase=Phase.DATA, micro=2)
    diagnosis = found(
        cluster(
            *(rank_state(rank, phase=Phase.FORWARD, micro=2) for rank in range(3)),
            ahead,
            world_size=4,
        )
    )
    assert (diagnosis.cause, diagnosis.rank) == (Cause.USER_CODE, 0)
    # Work between steps comes before the data of the step that follows, and has its number.
    logs = rank_state(0, phase=Phase.BETWEEN, cpu=0.9)
    diagnosis = found(
        cluster(logs, *(rank_state(rank, phase=Phase.BACKWARD) for rank in (1, 2, 3)), world_size=4)
    )
    assert (diagnosis.cause, diagnosis.rank) == (Cause.SLOW, 0)
    # A loop of the user's own has data, and the rest.
    own_cause = [rank_state(rank, phase=Phase.USER, micro=1) for rank in range(3)]
    diagnosis = found(cluster(*own_cause, rank_state(3, phase=Phase.DATA), world_size=4))
    assert (diagnosis.cause, diagnosis.rank) == (Cause.DATASET, 3)
    # Level 0: collective numbers, and stacks.
    plain = [
        rank_state(rank, step=0, phase=Phase.USER, collective=40, stack=IN_ALL_REDUCE, age_s=60.0)
        for rank in range(3)
    ]
    behind = rank_state(3, step=0, phase=Phase.USER, collective=39, stack=IN_LOSS, age_s=60.0)
    diagnosis = found(cluster(*plain, behind, world_size=4))
    assert (diagnosis.cause, diagnosis.rank) == (Cause.USER_CODE, 3)
    assert diagnosis.what == (
        "rank 3 on node-a has been in user code for 1 min 00 s (job/losses.py:44 in contrastive), without using the "
        "CPU; 3 ranks are waiting for it"
    )
    # One rank could not be asked, and its stack says that it waits as the others do.
    mute = rank_state(2, phase=Phase.BACKWARD, stack=IN_BACKWARD)
    assert found(cluster(mute, late_rank(5, Phase.DATA))).rank == 5


@pytest.mark.parametrize(
    ("stack", "users", "loads", "meets"),
    [
        (
            ["torch/distributed/distributed_c10d.py:2991 in all_reduce", "train.py:31 in step"],
            "train.py:31 in step",
            0,
            1,
        ),
        # The launcher's wrapper is around every script that asks for it.
        (
            [
                "python3.11/threading.py:327 in wait",
                "losses.py:4 in loss",
                "torch/distributed/elastic/multiprocessing/errors/__init__.py:362 in wrapper",
            ],
            "losses.py:4 in loss",
            0,
            0,
        ),
        (
            [
                "PIL/Image.py:3 in open",
                "sets/images.py:9 in read",
                "torch/utils/data/_utils/fetch.py:54 in fetch",
            ],
            "sets/images.py:9 in read",
            1,
            0,
        ),
        (
            ["multiprocessing/connection.py:930 in wait", "drumline/data/loader.py:7 in fetch"],
            "",
            1,
            0,
        ),
        (
            ["<frozen runpy>:198 in _run", "/opt/conda/lib/python3.12/site-packages/x/y.py:1 in z"],
            "",
            0,
            0,
        ),
        (["/home/me/drumline/train.py:3 in main"], "drumline/train.py:3 in main", 0, 0),
        # A step of the user's that a collective's frames lie outside of is not in one.
        (
            ["model.py:2 in forward", "torch/distributed/fsdp/_state.py:62 in hook"],
            "model.py:2 in forward",
            0,
            0,
        ),
    ],
)
def test_whose_code_a_stack_is_in(stack: list[str], users: str, loads: int, meets: int) -> None:
    """Paths whole, or as a sidecar shortens them."""
    assert (users_frame(stack), is_loading(stack), is_in_collective(stack)) == (
        users,
        bool(loads),
        bool(meets),
    )


def test_every_module_of_ours_is_known_as_ours() -> None:
    """Else a hang in it would be blamed on the user's code."""
    package = Path(drumline.__file__).parent
    frames = [
        f"{path.relative_to(package.parent)}:1 in f"
        for path in package.rglob("*.py")
        if path.name != "__init__.py"
    ]
    assert [frame for frame in frames if users_frame([frame])] == []


def test_ranks_that_have_compiled_are_not_blamed_for_the_one_that_has_not() -> None:
    """They wait in no collective, so only their phases show it; the batch of another may come even
    later."""
    waiting = [rank_state(rank, phase=Phase.COMPILED, micro=1, age_s=300.0) for rank in (0, 1, 2)]
    compiles = rank_state(3, phase=Phase.COMPILE, micro=1, age_s=320.0, cpu=0.0)
    diagnosis = found(cluster(*waiting, compiles, world_size=4))
    assert (diagnosis.cause, diagnosis.rank, diagnosis.num_blocked) == (Cause.COMPILING, 3, 3)
    reads = rank_state(3, phase=Phase.DATA, micro=0, age_s=320.0)
    diagnosis = found(cluster(*waiting, reads, world_size=4))
    assert (diagnosis.cause, diagnosis.rank) == (Cause.DATASET, 3)
    # A recompilation in the forward pass; the others compute while they wait, and have no records.
    busy = [rank_state(rank, phase=Phase.BACKWARD, cpu=0.9) for rank in (0, 1, 2)]
    diagnosis = found(cluster(*busy, rank_state(3, phase=Phase.COMPILE, micro=1), world_size=4))
    assert (diagnosis.cause, diagnosis.rank) == (Cause.COMPILING, 3)


def test_a_rank_that_its_launcher_ended_is_no_cause() -> None:
    """Host b was powered off; its peer on a lost the connection, so the launcher ended the other."""
    for code in (None, -15):
        ended_rank = ended(2, code, asked_to_exit=True)
        lost_peer = dragged(3, state="X", exit=1, age_s=4.8, state_s=4.7)
        soon = replace(lost_peer, age_s=1.4, state_s=1.3)
        unheard = found(cluster(ended_rank, soon, node_0={"heartbeat_age_s": {1: 1.5}}))
        assert (unheard.cause, unheard.rank, unheard.is_certain) == (Cause.EXCEPTION, 3, False)
        late = found(cluster(ended_rank, lost_peer, node_0={"heartbeat_age_s": {1: 4.9}}))
        assert (late.cause, late.rank, late.is_certain) == (Cause.EXCEPTION, 3, True)
        gone = found(cluster(ended_rank, soon, lost=(B_GONE,)))
        assert (gone.cause, gone.host) == (Cause.UNREACHABLE, "node-b")
    # It had lost the connection, too, when it was asked to exit.
    both = dragged(2, state="X", exit=-15, asked_to_exit=True, age_s=1.4, state_s=1.2)
    first = found(cluster(both, soon, node_0={"heartbeat_age_s": {1: 1.4}}))
    assert (first.cause, first.rank, first.is_certain) == (Cause.EXCEPTION, 3, False)
    # On a busy host the last heartbeat of one that is gone is read late.
    read_late = found(cluster(both, soon, node_0={"heartbeat_age_s": {1: 0.6}}))
    assert (read_late.rank, read_late.is_certain) == (3, False)
    # Its own error came before that.
    failed = ended(2, None, asked_to_exit=True, phase=Phase.FAILED, failure="KeyError: 'x'")
    assert found(cluster(failed, dragged(3))).rank == 2


def test_a_sentence_has_one_full_stop_and_a_stopped_host_one_command() -> None:
    assert ".. Next" not in found(cluster(ended(5, 1, failure="it is Killed."))).sentence("failure")
    stopped = [late_rank(rank, Phase.FORWARD, state="T") for rank in (1, 2)]
    assert found(cluster(*stopped)).next_step.endswith(
        "kill -CONT 4701 4702 on node-a resumes it, if it still runs"
    )
