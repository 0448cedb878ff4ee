"""When a diagnosis is reported, when it is acted on, and that a healthy run gets no alarm: in
simulated time."""

from __future__ import annotations

import random
from dataclasses import replace
from itertools import pairwise
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from drumline.watch.cluster_state import ClusterState, RankState
from drumline.watch.diagnosis.diagnosis import Alarm, Cause
from drumline.watch.diagnosis.watchdog import IdleTime, Watchdog
from drumline.watch.failure_kind import FailureKind
from drumline.watch.heartbeat import Phase
from tests.unit.watch.diagnosis.sample_ranks import CLOSED, IN_QUEUE, cluster, late_rank, worker
from tests.unit.watch.diagnosis.simulated import (
    FOR_EVER,
    Change,
    Run,
    Step,
    end_of,
    flight,
    simulate,
    watch,
)

IN_LOSS = ("/home/me/job/losses.py:44 in contrastive",)


def healthy(
    world_size: int,
    base_s: float,
    slow: float,
    stalled: int | None,
    compiled: int | None,
    seed: int,
) -> Run:
    """A run of any pace with all that may hold up a healthy one: evaluations, saves, a rank that is
    slow, a pause to compile, data that comes late."""
    chance = random.Random(seed)
    steps = []
    for number in range(24):
        longer = {(0, Phase.FORWARD): base_s * slow * chance.uniform(0.8, 1.25)} if slow > 1 else {}
        if number == stalled:
            longer[0, Phase.DATA] = 20.0
        steps.append(
            Step(
                data_s=base_s * chance.uniform(0.8, 1.25) / 3,
                forward_s=50.0 if number == compiled else base_s * chance.uniform(0.8, 1.25),
                backward_s=base_s * chance.uniform(0.8, 1.25),
                longer={} if number == compiled else longer,
                evaluation_s=chance.uniform(5, 150) if number % 8 == 7 else 0.0,
                save_s=chance.uniform(1, 50) if number % 7 == 6 else 0.0,
            )
        )
    return Run(simulate(steps, world_size=world_size))


@pytest.mark.slow
@settings(max_examples=6, derandomize=True)
@given(
    world_size=st.integers(1, 4),
    base_s=st.floats(0.02, 4.0),
    slow=st.sampled_from([1.0, 2.0, 5.0]),
    stalled=st.sampled_from([None, 16]),
    compiled=st.sampled_from([None, 0, 22]),
    seed=st.integers(0, 1000),
    gather_s=st.sampled_from([0.2, 1.0, 2.0]),
)
def test_a_healthy_run_is_never_acted_on_and_only_stalled_data_is_reported(
    gather_s: float, **case: Any
) -> None:
    run = healthy(**case)
    alarms, recoveries, gathered = watch(run, until=end_of(run) + 20, gather_s=gather_s)
    words = [
        (raised.alarm, raised.diagnosis.cause) for raised in alarms if raised.diagnosis.since_s < 60
    ]
    assert words in ([], [(Alarm.STALL, Cause.DATASET)]) if case["stalled"] else not words, words
    # An evaluation of minutes may be reported after one, and after two; that it hangs is said of
    # nothing.
    assert all(raised.alarm is Alarm.STALL for raised in alarms)
    assert bool(alarms) <= len(recoveries) <= len(alarms)
    assert all(later - sooner >= 3 for sooner, later in zip(gathered, gathered[2:], strict=False))


FAULT_STEP = 20
FAULT_RANK = 2


def broken(phase: Phase, change: Change | None, others: Change | None = None) -> tuple[Run, float]:
    """Four ranks on two nodes; one never comes out of this phase of one step. Also: when that
    began."""
    steps = [Step() for _ in range(FAULT_STEP)] + [Step(longer={(FAULT_RANK, phase): FOR_EVER})]
    run = Run(simulate(steps, world_size=4))
    begun = run.lines[FAULT_RANK][-1].at
    for rank in range(4):
        if (own_change := change if rank == FAULT_RANK else others) is not None:
            run.broken[rank] = (begun, own_change)
    return run, begun


def died(exit: int, **facts: Any) -> Change:
    """Gone at once; how is known a little later."""
    return lambda s: {
        "state": "X",
        "state_s": s,
        "exit": exit if s > 0.3 else None,
        "cpu": 0.0,
        **facts,
    }


def loses_it(s: float) -> dict[str, Any]:
    return (
        {
            "phase": Phase.FAILED,
            "failure": CLOSED,
            "failure_kind": FailureKind.LOST_PEER,
            "age_s": s - 0.2,
        }
        if s > 0.2
        else {}
    )


def left(s: float) -> dict[str, Any]:
    return {
        "phase": Phase.LEFT,
        "age_s": s,
        "cpu": 0.0,
        "collectives": flight(FAULT_STEP, waits=False),
    }


def other_shape(s: float) -> dict[str, Any]:
    raised = flight(FAULT_STEP + 1, waits=True)
    return {
        "cpu": 0.0,
        "state": "S",
        "collectives": (*raised[:-1], replace(raised[-1], sizes=((1,),))),
    }


CERTAIN = {
    "killed": (Phase.FORWARD, died(-9), loses_it, Cause.KILLED, Alarm.FAILURE),
    "no memory": (
        Phase.DATA,
        died(-9, memory="the limit of 512 MiB"),
        loses_it,
        Cause.OUT_OF_MEMORY,
        Alarm.FAILURE,
    ),
    "exception": (
        Phase.FORWARD,
        lambda s: {"phase": Phase.FAILED, "failure": "ValueError: bad label", "age_s": s},
        loses_it,
        Cause.EXCEPTION,
        Alarm.FAILURE,
    ),
    "stopped": (
        Phase.FORWARD,
        lambda s: {"state": "T", "state_s": s, "cpu": 0.0, "answers": False, "collectives": ()},
        None,
        Cause.STOPPED,
        Alarm.HANG,
    ),
    "stopped worker": (
        Phase.DATA,
        lambda s: {"stack": IN_QUEUE, "workers": (worker(0, "T"), worker(1))},
        None,
        Cause.STOPPED,
        Alarm.HANG,
    ),
    "left": (Phase.DATA, left, None, Cause.LEFT_EARLY, Alarm.HANG),
    "left and ended": (
        Phase.DATA,
        lambda s: {**left(s), **died(0)(s)},
        loses_it,
        Cause.LEFT_EARLY,
        Alarm.FAILURE,
    ),
    "other shape": (Phase.BACKWARD, other_shape, None, Cause.MISMATCH, Alarm.HANG),
}
ALIVE = {
    "dataset": (Phase.DATA, lambda s: {"stack": IN_QUEUE}, Cause.DATASET),
    "user code": (
        Phase.FORWARD,
        lambda s: {"stack": IN_LOSS, "cpu": 0.0, "state": "S"},
        Cause.USER_CODE,
    ),
    "gil": (
        Phase.FORWARD,
        lambda s: {"stack": IN_LOSS, "cpu": 0.0, "state": "S", "answers": False, "collectives": ()},
        Cause.GIL,
    ),
    "storage": (Phase.DATA, lambda s: {"state": "D"}, Cause.STORAGE),
    "computes": (Phase.FORWARD, lambda s: {"stack": IN_LOSS}, Cause.SLOW),
}


@pytest.mark.parametrize("fault", CERTAIN)
def test_what_is_certain_is_acted_on_within_five_seconds_and_once(fault: str) -> None:
    phase, change, others, cause, alarm = CERTAIN[fault]
    run, begun = broken(phase, change, others)
    alarms, _, gathered = watch(run, until=begun + 400)
    assert [(raised.alarm, raised.diagnosis.cause) for raised in alarms] == [(alarm, cause)]
    assert (alarms[0].diagnosis.rank, alarms[0].diagnosis.host) == (FAULT_RANK, "node-b")
    assert alarms[0].at - begun <= 5
    assert len(gathered) <= 2


@pytest.mark.parametrize("fault", ALIVE)
def test_a_stall_is_reported_in_seconds_and_again_and_acted_on_after_hang_s(fault: str) -> None:
    phase, change, cause = ALIVE[fault]
    run, begun = broken(phase, change)
    alarms, _, gathered = watch(run, until=begun + 700, hang_s=600.0)
    *stalls, hang = alarms
    assert {(raised.alarm, raised.diagnosis.cause, raised.diagnosis.rank) for raised in stalls} == {
        (Alarm.STALL, cause, FAULT_RANK)
    }
    first, *again = [raised.at - begun for raised in stalls]
    assert first <= (15 if fault == "computes" else 5)
    assert len(again) == 5
    assert 30 <= again[0] <= 33
    assert all(1.9 <= later / sooner <= 2.2 for sooner, later in pairwise(again)), again
    assert (hang.alarm, hang.diagnosis.cause, hang.diagnosis.rank) == (
        Alarm.HANG,
        cause,
        FAULT_RANK,
    )
    assert 600 <= hang.at - begun <= 603
    assert len(gathered) <= 25, "it is not asked over and over again"


def test_without_patience_what_may_be_innocent_is_only_reported() -> None:
    run, begun = broken(Phase.FORWARD, ALIVE["user code"][1])
    watchdog = Watchdog(hang_s=None, world_size=4)
    alarms, _, _ = watch(run, until=begun + 2000, watchdog=watchdog)
    assert {raised.alarm for raised in alarms} == {Alarm.STALL}
    lasting = watchdog.with_duration(alarms[0].diagnosis, ends_job=True)
    assert lasting.what.startswith(alarms[0].diagnosis.what)
    assert lasting.what.endswith(" s so far")
    assert lasting.next_step.endswith("; the watchdog does not end the job for this")
    impatient = Watchdog(hang_s=600.0, world_size=4)
    (first, *_), _, _ = watch(run, until=begun + 20, watchdog=impatient)
    assert impatient.with_duration(first.diagnosis, ends_job=True) == first.diagnosis, (
        "the first report needs no time"
    )
    watch(run, until=begun + 100, watchdog=impatient)
    assert impatient.with_duration(first.diagnosis, ends_job=True).next_step.endswith(
        "; the watchdog ends the job after 10 min 00 s"
    )


def test_a_lost_host_is_reported_soon_and_ended_when_it_does_not_return() -> None:
    run, begun = broken(Phase.FORWARD, None)
    run.silent_from = {1: begun}
    (warning, raised), _, _ = watch(run, until=begun + 100)
    assert (warning.alarm, warning.diagnosis.cause) == (Alarm.STALL, Cause.UNREACHABLE)
    assert warning.at - begun <= 5
    assert (raised.alarm, raised.diagnosis.cause, raised.diagnosis.host) == (
        Alarm.HANG,
        Cause.UNREACHABLE,
        "node-b",
    )
    assert 20 <= raised.at - begun <= 25
    assert (warning.diagnosis.is_certain, raised.diagnosis.is_certain) == (False, False), (
        "it may return"
    )


def test_a_host_that_is_silent_is_not_lost_where_the_run_moves_or_the_sidecar_slept() -> None:
    run, begun = broken(Phase.FORWARD, None)
    run.silent_from = {1: begun}
    moving = Run(simulate([Step()] * 200, world_size=4))
    moving.silent_from = {1: 10.0}
    assert watch(moving, until=40)[0] == [], "its sidecar died, or the way to it; the ranks meet"
    # The sidecar got no CPU for a while: it heard nobody, and saw nothing move, for that reason
    # alone.
    watchdog = Watchdog(hang_s=60.0, world_size=4)
    for now in range(20):
        watchdog.observe(moving.cluster(now * 0.5), now * 0.5)
    watchdog.observe(moving.cluster(9.5), 30.0)
    assert not watchdog.wants_evidence
    late = replace(moving.cluster(9.5), lost=run.cluster(begun + 20).lost)
    watchdog.observe(late, 30.5)
    assert not watchdog.wants_evidence


def test_it_waits_a_moment_for_the_record_of_how_a_rank_ended() -> None:
    late = lambda s: {**died(-9)(s), "exit": -9 if s > 0.9 else None}  # noqa: E731
    run, begun = broken(Phase.FORWARD, late, loses_it)
    (raised,), _, _ = watch(run, until=begun + 20, gather_s=0.1)
    assert raised.diagnosis.what == (
        "rank 2 on node-b was killed by SIGKILL at step 20, in forward; 3 ranks lost the connection to it"
    )
    assert raised.at - begun <= 3


def test_lost_connections_are_reported_when_there_is_no_better_reason() -> None:
    run, begun = broken(Phase.FORWARD, loses_it, loses_it)
    (raised,), _, _ = watch(run, until=begun + 100)
    assert (raised.alarm, raised.diagnosis.cause) == (Alarm.FAILURE, Cause.EXCEPTION)
    assert 2.5 <= raised.at - begun <= 6
    run.silent_from = {1: begun - 1}
    (raised,), _, _ = watch(run, until=begun + 100)
    assert (raised.diagnosis.cause, raised.diagnosis.host) == (Cause.UNREACHABLE, "node-b")


def test_a_host_that_was_lost_before_its_first_heartbeat_is_reported_by_the_others() -> None:
    """Of the other node nothing is known: neither its ranks nor, for a while, whether it
    answers."""
    run, begun = broken(Phase.FORWARD, loses_it, loses_it)
    run.unheard_from = {1: begun - 0.5}
    (raised,), _, _ = watch(run, until=begun + 100, gather_s=0.1)
    assert (raised.alarm, raised.diagnosis.cause) == (Alarm.FAILURE, Cause.UNREACHABLE)
    assert raised.diagnosis.host == "node-b"
    assert raised.at - begun <= 5


def test_the_first_steps_and_the_start_are_waited_for() -> None:
    slow_start = Run(simulate([Step()] * 5, world_size=4, start_s=200.0))
    alarms, recoveries, _ = watch(slow_start, until=end_of(slow_start))
    assert [raised.alarm for raised in alarms] in ([], [Alarm.STALL])
    assert all(raised.at >= 60 for raised in alarms)
    # One rank compiles longer than the others in the first step.
    first = Step(longer={(1, Phase.FORWARD): 55.0})
    assert watch(Run(simulate([first, *[Step()] * 9], world_size=4)), until=70)[0] == []
    # What is certain is certain from the start.
    stuck = Run(simulate([Step(longer={(1, Phase.FORWARD): FOR_EVER})], world_size=4))
    stuck.broken[1] = (
        1.2,
        lambda s: {"state": "T", "state_s": s, "answers": False, "collectives": ()},
    )
    (one,), _, _ = watch(stuck, until=30)
    assert (one.alarm, one.diagnosis.cause) == (Alarm.HANG, Cause.STOPPED)
    assert one.at <= 6.2
    assert not recoveries or recoveries[0].sentence.startswith("the run continues after ")


@pytest.mark.parametrize(("slowdown", "not_before_s"), [(1.0, 10.0), (4.0, 40.0)])
def test_the_first_step_is_late_by_the_start_times_of_the_slowest_host(
    slowdown: float, not_before_s: float
) -> None:
    run = Run(
        simulate([Step(longer={(1, Phase.FORWARD): FOR_EVER})], world_size=4), slowdown=slowdown
    )
    run.broken[1] = (1.2, lambda s: {"cpu": 0.0, "state": "S", "stack": IN_LOSS})
    alarms, _, _ = watch(run, until=not_before_s + 20)
    assert [raised.alarm for raised in alarms][:1] == [Alarm.STALL]
    assert alarms[0].at >= not_before_s
    assert alarms[0].at < 1.5 * not_before_s + 10


def test_a_stall_that_was_reported_recovers() -> None:
    steps = [Step()] * 20 + [Step(longer={(1, Phase.DATA): 20.0})] + [Step()] * 20
    alarms, recoveries, gathered = watch(Run(simulate(steps, world_size=4)), until=60)
    assert [(raised.alarm, raised.diagnosis.cause, raised.diagnosis.rank) for raised in alarms] == [
        (Alarm.STALL, Cause.DATASET, 1)
    ]
    assert [raised.diagnosis for raised in recoveries] == [alarms[0].diagnosis]
    assert 18 <= recoveries[0].idle_s <= 21
    assert recoveries[0].sentence == (
        f"the run continues after {recoveries[0].idle_s:.0f} s (it was held up by rank 1 on node-a)"
    )
    assert len(gathered) <= 6


def test_a_run_that_recovers_while_evidence_is_collected_is_not_reported() -> None:
    """Data that comes after 3.4 s: asked for at the first suspicion, and judged when the run is
    well again."""
    steps = [Step()] * 20 + [Step(longer={(1, Phase.DATA): 3.4})] + [Step()] * 20
    alarms, recoveries, gathered = watch(Run(simulate(steps, world_size=4)), until=40, gather_s=1.5)
    assert (alarms, recoveries) == ([], [])
    assert len(gathered) == 1


def test_a_run_that_always_waits_so_long_is_not_told_of_it_again() -> None:
    steps = [
        Step(longer={(1, Phase.DATA): 12.0}) if number % 10 == 9 else Step()
        for number in range(100)
    ]
    alarms, _, _ = watch(Run(simulate(steps, world_size=4)), until=200)
    assert len(alarms) == 2, "twice, then it is known"


def test_a_run_that_ends_in_order_gets_no_message() -> None:
    run = Run(simulate([Step()] * 20, world_size=4))
    over = end_of(run)
    run.broken = {rank: (over + rank * 3, died(0, phase=Phase.LEFT)) for rank in range(4)}
    run.silent_from = {1: over + 10}
    assert watch(run, until=over + 60) == ([], [], [])
    # The first rank has a long report to make, for which nobody waits, and uses no CPU for it.
    reports = lambda s: (  # noqa: E731
        {**left(s - 700), "collectives": flight(20, waits=False)}
        if s >= 700
        else {
            "phase": Phase.USER,
            "stack": IN_LOSS,
            "cpu": 0.0,
            "state": "S",
            "num_marks": 900,
            "age_s": s,
        }
    )
    run.broken = {0: (over, reports), **dict.fromkeys((1, 2, 3), (over, left))}
    run.silent_from = {}
    assert [raised.alarm for raised in watch(run, until=over + 800)[0]] == [Alarm.STALL], (
        "once, as nobody waits"
    )
    # Preempted: with its own exit code.
    run.broken = {rank: (over, died(75, phase=Phase.LEFT)) for rank in range(4)}
    assert watch(run, until=over + 60)[0] == []


@pytest.mark.slow
def test_a_script_that_knows_nothing_of_us_moves_by_its_collectives() -> None:
    def plain(rank: RankState) -> RankState:
        return replace(rank, step=0, phase=Phase.USER, micro=0, num_marks=1)

    class Plain(Run):
        def cluster(self, now: float, *, closely: bool = False) -> ClusterState:
            whole = super().cluster(now, closely=closely)
            nodes = (replace(node, ranks=tuple(map(plain, node.ranks))) for node in whole.nodes)
            return replace(whole, nodes=tuple(nodes))

    usual, begun = broken(Phase.FORWARD, lambda s: {"stack": IN_LOSS, "cpu": 0.0, "state": "S"})
    run = Plain(usual.lines, broken=usual.broken)
    alarms, _, _ = watch(run, until=begun + 100)
    assert [(raised.alarm, raised.diagnosis.cause, raised.diagnosis.rank) for raised in alarms] == [
        (Alarm.STALL, Cause.USER_CODE, FAULT_RANK),
        (Alarm.STALL, Cause.USER_CODE, FAULT_RANK),
        (Alarm.HANG, Cause.USER_CODE, FAULT_RANK),
    ]
    assert alarms[0].at - begun <= 6
    # With heartbeats it is reported that they stop, and nothing is done as long as somebody
    # computes.
    alone = simulate([*[Step()] * 20, Step(evaluation_s=900.0)], world_size=4)
    alarms, _, _ = watch(Run(alone), until=1000)
    assert {raised.alarm for raised in alarms} == {Alarm.STALL}
    assert 60 <= alarms[0].at <= 90
    # The same loop, of which no collective is seen either: each rank evaluates on its own, for a
    # quarter of an hour.
    assert watch(Plain(alone), until=1000)[0] == []
    # It does so without the CPU (a queue is polled): that is reported, and no more.
    polls = lambda s: {"phase": Phase.USER, "stack": IN_LOSS, "cpu": 0.0, "state": "S"}  # noqa: E731
    idle = Plain(alone, broken=dict.fromkeys(range(4), (20.0, polls)))
    assert {raised.alarm for raised in watch(idle, until=850)[0]} == {Alarm.STALL}


def test_a_debugged_rank_is_noted_only() -> None:
    run, begun = broken(
        Phase.FORWARD, lambda s: {"state": "t", "cpu": 0.0, "answers": False, "collectives": ()}
    )
    alarms, _, _ = watch(run, until=begun + 700)
    assert [(raised.alarm, raised.diagnosis.cause) for raised in alarms] == [
        (Alarm.STALL, Cause.DEBUGGED)
    ]


def test_a_hang_that_was_only_reported_may_continue_and_recur() -> None:
    long = Step(longer={(1, Phase.DATA): 70.0})
    steps = [*[Step()] * 20, long, *[Step()] * 20, Step(longer={(1, Phase.DATA): FOR_EVER})]
    alarms, recoveries, _ = watch(Run(simulate(steps, world_size=4)), until=300)
    assert [raised.alarm for raised in alarms] == [Alarm.STALL, Alarm.STALL, Alarm.HANG] * 2
    assert len(recoveries) == 1
    assert recoveries[0].idle_s >= 60


def test_patience_is_the_users_but_for_the_first_steps() -> None:
    run, begun = broken(Phase.DATA, lambda s: {"stack": IN_QUEUE})
    assert [round(raised.at - begun) for raised in watch(run, until=400, hang_s=5.0)[0]][1:] in (
        [5],
        [6],
        [7],
    )
    first = Run(simulate([Step(longer={(1, Phase.DATA): FOR_EVER})], world_size=4))
    (*_, hang) = watch(first, until=100, hang_s=5.0)[0]
    assert hang.alarm is Alarm.HANG
    assert 60 <= hang.at <= 65


def test_a_breakpoint_is_waited_at_forever() -> None:
    pdb = (
        "/usr/lib/python3.11/cmd.py:126 in cmdloop",
        "/usr/lib/python3.11/pdb.py:361 in _cmdloop",
    )
    at_prompt = lambda s: {"stack": (*pdb, *IN_LOSS), "cpu": 0.0, "state": "S"}  # noqa: E731
    run, begun = broken(Phase.FORWARD, at_prompt)
    (raised,), _, _ = watch(run, until=begun + 2000)
    assert (raised.alarm, raised.diagnosis.cause, raised.diagnosis.rank) == (
        Alarm.STALL,
        Cause.DEBUGGED,
        FAULT_RANK,
    )
    # A program that was started under a debugger is not at its prompt for that.
    run, begun = broken(Phase.FORWARD, lambda s: {**at_prompt(s), "stack": (*IN_LOSS, *pdb)})
    assert watch(run, until=begun + 100)[0][-1].alarm is Alarm.HANG


def test_a_better_reason_is_reported_after_an_unknown_one() -> None:
    watchdog = Watchdog(hang_s=60.0, world_size=8)
    moving = [
        cluster(*(late_rank(rank, Phase.FORWARD, num_marks=beats) for rank in range(8)))
        for beats in (100, 101)
    ]
    for now, raised in enumerate(moving):
        assert watchdog.observe(raised, float(now)) is None
    for now in range(2, 8):
        watchdog.observe(moving[1], float(now))
    unknown = replace(_any_diagnosis(), cause=Cause.UNKNOWN, is_certain=False)
    assert watchdog.decide(None, moving[1], 8.0) is None
    assert watchdog.decide(unknown, moving[1], 8.1) is Alarm.STALL
    assert watchdog.decide(unknown, moving[1], 8.2) is None
    assert watchdog.decide(replace(unknown, cause=Cause.DATASET), moving[1], 8.3) is Alarm.STALL
    assert watchdog.decide(replace(unknown, cause=Cause.GIL), moving[1], 8.4) is None


def _any_diagnosis() -> Any:
    run, begun = broken(Phase.DATA, lambda s: {"stack": IN_QUEUE})
    return watch(run, until=begun + 20)[0][0].diagnosis


def test_one_long_wait_of_a_run_that_has_hardly_begun_is_not_usual() -> None:
    idle = IdleTime()
    beats = 0
    for now in range(60):
        beats += now in (1, 2, 3, 53)
        idle.observe(cluster(late_rank(0, Phase.FORWARD, num_marks=beats)), float(now), counts=True)
    assert idle.last_idle_s == 50
    assert idle.limit_s < 10


def test_long_computations_do_not_make_a_long_wait_usual() -> None:
    steps = [Step(forward_s=15.0 if number in (5, 9, 13) else 0.1) for number in range(FAULT_STEP)]
    run = Run(simulate([*steps, Step(longer={(FAULT_RANK, Phase.DATA): FOR_EVER})], world_size=4))
    begun = run.lines[FAULT_RANK][-1].at
    run.broken[FAULT_RANK] = (begun, lambda s: {"stack": IN_QUEUE})
    alarms, _, _ = watch(run, until=begun + 20)
    assert [(raised.alarm, raised.diagnosis.cause) for raised in alarms] == [
        (Alarm.STALL, Cause.DATASET)
    ]
    assert alarms[0].at - begun <= 5


@pytest.mark.parametrize("cpu", [1.0, pytest.param(0.0, marks=pytest.mark.soak)])
@pytest.mark.parametrize(("others", "limit_s"), [(Phase.COMPILED, 3600), (Phase.BACKWARD, 600)])
def test_a_compilation_before_the_first_step_may_take_an_hour_and_a_later_one_as_long_as_a_step(
    cpu: float, others: Phase, limit_s: int
) -> None:
    """Whether it computes, or waits for a lock of the compiler's cache."""
    run, begun = broken(Phase.FORWARD, lambda s: {"phase": Phase.COMPILE, "cpu": cpu, "state": "S"})
    for rank in {0, 1, 2, 3} - {FAULT_RANK}:
        run.broken[rank] = (begun, lambda s: {"phase": others, "state": "S", "cpu": 0.0})
    assert watch(run, until=begun + 290, hang_s=600.0)[0] == []
    *stalls, hang = watch(run, until=begun + limit_s + 100, hang_s=600.0)[0]
    assert {(raised.alarm, raised.diagnosis.cause, raised.diagnosis.rank) for raised in stalls} == {
        (Alarm.STALL, Cause.COMPILING, FAULT_RANK)
    }
    assert (hang.alarm, hang.diagnosis.cause, hang.diagnosis.rank) == (
        Alarm.HANG,
        Cause.COMPILING,
        FAULT_RANK,
    )
    assert limit_s <= hang.at - begun <= limit_s + 3
    if limit_s == 600:
        alarms = watch(
            run, until=begun + 2 * limit_s, watchdog=Watchdog(hang_s=None, world_size=4)
        )[0]
        assert {raised.alarm for raised in alarms} == {Alarm.STALL}
