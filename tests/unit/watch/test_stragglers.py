"""Which rank or host slows a run, and in which phase, only from heartbeats; and no false alarms."""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from dataclasses import replace

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from drumline.watch import stragglers as stragglers_module
from drumline.watch.cluster_state import ClusterState
from drumline.watch.heartbeat import Phase
from drumline.watch.stragglers import Straggler, Stragglers, TimeAgainstPeers
from tests.unit.watch.simulated_run import SimulatedRun

USUAL = {
    Phase.DATA: 0.002,
    Phase.FORWARD: 0.02,
    Phase.BACKWARD: 0.04,
    Phase.OPTIMIZER: 0.005,
    Phase.BETWEEN: 0.001,
}
FOUR = ("node-a", "node-a", "node-b", "node-b")
Times = Callable[[int, int, Phase], float]


def told(
    times: Times, *, hosts: Sequence[str] = FOUR, steps: int = 150, **options: object
) -> list[Straggler]:
    """All that is said of a run whose ranks take so many times as long as usual."""

    def work(rank: int, step: int, phase: Phase) -> float:
        return USUAL[phase] * times(rank, step, phase)

    run = SimulatedRun(hosts, work, steps, **options)  # type: ignore[arg-type]
    stragglers = Stragglers(2.0)
    return [
        straggler
        for now, picture in run.pictures()
        for straggler in stragglers.observe(picture, now)
    ]


def slow(who: int, factor: float, *phases: Phase) -> Times:
    return lambda rank, step, phase: (
        factor if rank == who and (not phases or phase in phases) else 1.0
    )


@pytest.mark.parametrize(
    ("times", "rank", "phase", "factor"),
    [
        (slow(3, 5), 3, "forward", 5),  # and its backward, of which nobody can tell
        (slow(0, 5, Phase.FORWARD), 0, "forward", 5),
        (slow(2, 30, Phase.DATA), 2, "data", 30),
        (
            slow(1, 60, Phase.BETWEEN),
            1,
            "host code between steps",
            7,
        ),  # peers wait there too, at a log line
        (slow(1, 10, Phase.OPTIMIZER), 1, "optimizer", 10),
        (slow(2, 9, Phase.OPTIMIZER, Phase.FORWARD), 2, "forward", 9),
    ],
)
@pytest.mark.parametrize("hosts", [FOUR, FOUR[1:3]])
def test_the_slow_one_is_named_once_with_its_phase(
    times: Times, rank: int, phase: str, factor: float, hosts: Sequence[str]
) -> None:
    on_two = len(hosts) == 2
    moved: Times = (
        (lambda straggler, step, phase: times(rank if straggler == 1 else -1, step, phase))
        if on_two
        else times
    )
    (straggler,) = told(moved, hosts=hosts)
    assert straggler.rank == (1 if on_two else rank)
    assert straggler.host == hosts[straggler.rank or 0]
    assert phase in straggler.what
    assert straggler.factor == pytest.approx(factor, rel=0.25)


def test_a_rank_that_is_slow_only_in_backward_is_not_found() -> None:
    assert told(slow(3, 5, Phase.BACKWARD)) == []


def test_the_logs_collective_every_step_does_not_turn_it_round() -> None:
    (straggler,) = told(slow(1, 10, Phase.OPTIMIZER), hosts=("a", "b"), log_every=1)
    assert (straggler.rank, straggler.phase) == (1, Phase.OPTIMIZER)


@pytest.mark.parametrize("waits_in", [Phase.FORWARD, Phase.BETWEEN])
@pytest.mark.parametrize("hosts", [FOUR, ("a", "b")])
def test_on_cuda_a_wait_that_shows_elsewhere_is_not_taken_for_work(
    waits_in: Phase, hosts: Sequence[str]
) -> None:
    (straggler,) = told(slow(1, 50, Phase.DATA), hosts=hosts, waits_in=waits_in)
    assert (straggler.rank, straggler.phase) == (1, Phase.DATA)


@pytest.mark.parametrize("waits_in", [Phase.BACKWARD, Phase.OPTIMIZER])
def test_a_rank_that_compiles_in_every_step_is_not_slow_nor_those_that_wait_for_it(
    waits_in: Phase,
) -> None:
    def work(rank: int, step: int, phase: Phase) -> float:
        return 0.5 * (rank == 1) if phase is Phase.COMPILE else USUAL[phase]

    run = SimulatedRun(("a", "b"), work, 150, compiles=True, waits_in=waits_in)
    stragglers = Stragglers(2.0)
    assert [
        straggler
        for now, picture in run.pictures()
        for straggler in stragglers.observe(picture, now)
    ] == []


def test_a_host_is_named_when_all_its_ranks_are_slow() -> None:
    (straggler,) = told(lambda rank, step, phase: 4.0 if rank >= 2 else 1.0)
    assert (straggler.host, straggler.rank) == ("node-b", None)
    assert straggler.sentence.startswith(
        "straggler: all ranks on node-b take 4.0x as long as their peers in forward (80 ms per step, peers 20 ms), "
        "which costs the run 0.06 s per step. Try: check what else runs on node-b"
    )
    many = [f"node-{number // 8}" for number in range(32)]
    (straggler,) = told(
        lambda rank, step, phase: 3.0 if 8 <= rank < 16 else 1.0, hosts=many, steps=60
    )
    assert (straggler.host, straggler.rank) == ("node-1", None)


def test_what_is_near_the_limit_has_to_last() -> None:
    def for_a_while(rank: int, step: int, phase: Phase) -> float:
        return 2.5 if rank == 1 and phase is Phase.FORWARD and 30 <= step < 80 else 1.0

    assert told(for_a_while, steps=300) == []
    assert [straggler.rank for straggler in told(slow(1, 2.5, Phase.FORWARD), steps=300)] == [1]


def test_it_is_named_again_when_it_begins_again(monkeypatch: pytest.MonkeyPatch) -> None:
    def twice(rank: int, step: int, phase: Phase) -> float:
        is_slow = rank == 3 and phase is Phase.FORWARD and (50 <= step < 120 or step >= 400)
        return 5.0 if is_slow else 1.0

    assert [straggler.rank for straggler in told(twice, steps=500)] == [3]
    monkeypatch.setattr(stragglers_module, "FORGET_S", 5.0)
    assert [straggler.rank for straggler in told(twice, steps=500)] == [3, 3]
    assert [straggler.rank for straggler in told(slow(3, 5.0, Phase.FORWARD), steps=500)] == [3]


def test_hosts_of_which_the_news_is_late_are_compared_all_the_same() -> None:
    for seed in range(4):
        chance = random.Random(seed)

        def late(host: str, chance: random.Random = chance) -> float:
            # so that now and then there is no news at all
            return chance.uniform(0.0, 0.6)

        slow_one = SimulatedRun(FOUR, lambda r, s, p: USUAL[p] * (5 if r == 3 else 1), 100)
        stragglers = Stragglers(2.0)
        reported = [
            straggler
            for now, it in slow_one.pictures(lag_s=late)
            for straggler in stragglers.observe(it, now)
        ]
        assert [straggler.rank for straggler in reported] == [3]
        nobody = SimulatedRun(FOUR, lambda r, s, p: USUAL[p], 150)
        stragglers = Stragglers(2.0)
        assert [
            straggler
            for now, it in nobody.pictures(lag_s=late)
            for straggler in stragglers.observe(it, now)
        ] == []


def test_it_is_named_within_seconds() -> None:
    run = SimulatedRun(FOUR, lambda r, s, p: USUAL[p] * (5 if r == 3 and s >= 40 else 1), 120)
    began = next(time for time, phase, step in run.marks[3] if step == 40)
    stragglers = Stragglers(2.0)
    named = next(now for now, picture in run.pictures() if stragglers.observe(picture, now))
    assert named - began < 8


@pytest.mark.parametrize(
    ("times", "options"),
    [
        (lambda r, s, p: 1.0, {}),
        (lambda r, s, p: 1.9 if r == 1 else 1.0, {}),  # below the factor
        (
            lambda r, s, p: 2.5 if r == 1 and p is Phase.DATA else 1.0,
            {"steps": 100},
        ),  # a small part of a step
        (
            lambda r, s, p: 900.0 if r == 1 and s == 60 and p is Phase.DATA else 1.0,
            {},
        ),  # one slow step
        (lambda r, s, p: 100.0 if r == 1 and s < 5 else 1.0, {}),  # the first ones
        (lambda r, s, p: 6.0 if s % 4 == r else 1.0, {}),  # all in turn
        (lambda r, s, p: 1.0, {"save_every": 7}),
    ],
)
def test_nobody_is_named_for_nothing(times: Times, options: dict[str, int]) -> None:
    assert told(times, **options) == []  # type: ignore[arg-type]


@settings(derandomize=True)
# five slow steps of one rank within three seconds
@example(seed=1325, noise=0.07084109439990632, ranks=5)
@example(seed=1898, noise=0.15697211157185303, ranks=2)
@given(seed=st.integers(0, 2**32), noise=st.floats(0, 1.5), ranks=st.integers(2, 6))
def test_a_loaded_machine_makes_no_stragglers(seed: int, noise: float, ranks: int) -> None:
    """Every phase of every step is longer by chance, some of them much."""
    chance = random.Random(seed)

    def times(rank: int, step: int, phase: Phase) -> float:
        return 1 + chance.expovariate(1) * noise + (20 if chance.random() < 0.01 else 0)

    assert told(times, hosts=[f"node-{rank % 2}" for rank in range(ranks)], steps=120) == []


def test_a_restarted_job_is_followed_from_its_start() -> None:
    run = SimulatedRun(FOUR, lambda r, s, p: USUAL[p] * (5 if r == 3 else 1), 60)
    pictures = [picture for _, picture in run.pictures()]
    stragglers = Stragglers(2.0)

    def restarted(picture: ClusterState) -> ClusterState:
        nodes = [
            replace(node, ranks=tuple(replace(rank, pid=rank.pid + 50) for rank in node.ranks))
            for node in picture.nodes
        ]
        return replace(picture, nodes=tuple(nodes))

    half = len(pictures) // 4
    assert [
        straggler for picture in pictures[:half] for straggler in stragglers.observe(picture, 0)
    ] == []
    # a host is not heard
    fewer = replace(pictures[half], nodes=pictures[half].nodes[:1])
    assert stragglers.observe(fewer, 0) == []
    assert (
        len(
            [
                straggler
                for picture in pictures
                for straggler in stragglers.observe(restarted(picture), 0)
            ]
        )
        == 1
    )


def test_the_sentence() -> None:
    named = Straggler("node-b", 3, Phase.FORWARD, TimeAgainstPeers(0.412, 0.081))
    assert named.sentence == (
        "straggler: rank 3 on node-b takes 5.1x as long as its peers in forward (412 ms per step, peers 81 ms), which "
        "costs the run 0.33 s per step. Try: check what else runs on node-b, its clock speed and temperature; "
        "drumline doctor compares hosts"
    )
    data = Straggler("b", 1, Phase.DATA, TimeAgainstPeers(0.5, 0.0004)).sentence
    assert "takes over 100x as long as its peers in data (500 ms per step, peers" in data
    assert "peers 0.4 ms)" in data
    assert "DataLoader workers (data.workers)" in data
    host_code = Straggler("b", 1, Phase.BETWEEN, TimeAgainstPeers(0.5, 0.1))
    assert host_code.sentence.endswith(
        "between steps that the others do not: logs, trackers, callbacks"
    )
