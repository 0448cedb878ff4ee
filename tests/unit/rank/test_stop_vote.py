"""Ranks, each a thread with a connection of its own to a real store, agree on a step to stop at."""

from __future__ import annotations

import random
import threading
import time
from collections.abc import Callable
from datetime import timedelta

import pytest
import torch.distributed as dist

from drumline.rank import stop_vote
from drumline.rank.sealed_store import SealedStore
from drumline.rank.stop_vote import StopVote


@pytest.fixture
def store() -> SealedStore:
    store = dist.TCPStore(
        "127.0.0.1", 0, is_master=True, wait_for_workers=False, timeout=timedelta(seconds=60)
    )
    return SealedStore(store, "a secret")


def test_a_store_does_not_show_its_secret(store: SealedStore) -> None:
    assert "a secret" not in f"{store!r} {StopVote(store, 0, 1, int)!r}"


class Rank:
    """A rank that takes steps, and its watcher."""

    def __init__(self, store: SealedStore, rank: int, world_size: int, start: int = 0) -> None:
        self.step = start
        self.stopped_at = -1
        self.vote = StopVote(
            store.clone(), rank=rank, world_size=world_size, step=lambda: self.step
        )

    def train(self, meet: Callable[[], object], total: int) -> None:
        """A loop as the engine's: a look before the first step and after each."""
        self.vote.begin()
        while self.step < total and not self.vote.stops_at(self.step):
            meet()
            self.step += 1
        self.stopped_at = self.step

    def watch(self, pause: Callable[[], float], is_over: Callable[[], bool]) -> None:
        while not self.vote.is_decided and not is_over():
            self.vote.tick()
            time.sleep(pause())


def run_together(
    ranks: list[Rank], *, total: int, pause: Callable[[], float], asks: int, after: int
) -> None:
    """Steps in lockstep, as collectives make them; the watchers come when they come."""
    barrier = threading.Barrier(len(ranks), timeout=20)
    trainers = [threading.Thread(target=rank.train, args=(barrier.wait, total)) for rank in ranks]
    is_over = lambda: not any(thread.is_alive() for thread in trainers)  # noqa: E731
    watchers = [threading.Thread(target=rank.watch, args=(pause, is_over)) for rank in ranks]
    for thread in (*trainers, *watchers):
        thread.start()
    while ranks[asks].step < after:
        time.sleep(0.001)
    ranks[asks].vote.request({"rank": asks})
    for thread in (*trainers, *watchers):
        thread.join(20)
        assert not thread.is_alive()


@pytest.mark.parametrize("seed", range(4))
def test_ranks_at_any_pace_stop_at_the_same_step(store: SealedStore, seed: int) -> None:
    chance = random.Random(seed)
    ranks = [Rank(store, rank, 4, start=7) for rank in range(4)]
    # Watchers that are slower than the steps: proposals are missed, and made again.
    run_together(
        ranks,
        total=10**9,
        pause=lambda: chance.random() * 0.03,
        asks=chance.randrange(4),
        after=100,
    )
    assert len({rank.stopped_at for rank in ranks}) == 1
    assert all(rank.vote.cause is not None for rank in ranks)
    assert ranks[0].stopped_at > 100


def test_a_run_that_is_at_its_end_ends_as_ever(store: SealedStore) -> None:
    ranks = [Rank(store, rank, 2) for rank in range(2)]
    run_together(ranks, total=50, pause=lambda: 0.05, asks=1, after=45)
    assert [rank.stopped_at for rank in ranks] == [50, 50]


def test_before_the_first_step_nobody_takes_one(store: SealedStore) -> None:
    ranks = [Rank(store, rank, 2, start=30) for rank in range(2)]
    ranks[1].vote.request({"signal": "SIGTERM"})
    while any([rank.vote.tick() for rank in ranks]) or not ranks[0].vote.is_decided:  # noqa: C419
        pass
    for rank in ranks:
        rank.train(lambda: None, 100)
    assert [rank.stopped_at for rank in ranks] == [30, 30]
    assert [rank.vote.cause for rank in ranks] == [{"signal": "SIGTERM"}] * 2


def test_the_first_to_ask_is_the_cause(store: SealedStore) -> None:
    ranks = [Rank(store, rank, 2) for rank in range(2)]
    for number, rank in enumerate(ranks):
        rank.vote.request({"rank": number})
    ranks[1].vote.tick()
    assert ranks[1].vote.cause == {"rank": 0}


def test_without_a_request_nothing_stops(store: SealedStore) -> None:
    (rank,) = [Rank(store, 0, 1)]
    assert not rank.vote.tick()
    assert rank.vote.stop is None
    assert not rank.vote.stops_at(10**9)


def test_a_rank_that_waits_at_a_proposal_continues_when_a_later_one_replaces_it(
    store: SealedStore,
) -> None:
    first, second = (Rank(store, rank, 2) for rank in range(2))
    for rank in (first, second):
        rank.vote.begin()
    first.vote.request({})
    # both say where they are; rank 0 proposes step 1, and is bound by it
    for rank in (first, second, first, first):
        rank.vote.tick()
    first.step = second.step = 1
    waiting = threading.Thread(target=lambda: answers.append(first.vote.stops_at(1)))
    answers: list[bool] = []
    waiting.start()
    # it has not heard of the proposal, and goes on to its next step
    assert not second.vote.stops_at(1)
    assert not answers
    while not first.vote.is_decided:
        second.vote.tick()
        first.vote.tick()
    waiting.join(10)
    assert answers == [False]
    second.vote.tick()
    # twice as far ahead of the foremost
    assert first.vote.stop == second.vote.stop == 3


def test_a_rank_that_never_answers_makes_all_give_up_together(
    store: SealedStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(stop_vote, "PATIENCE_S", 0.2)
    ranks = [Rank(store, rank, 3) for rank in range(3)]
    ranks[1].vote.request({})
    while not all(rank.vote.is_decided for rank in ranks[:2]):
        for rank in ranks[:2]:
            rank.vote.tick()
    assert [rank.vote.stop for rank in ranks[:2]] == [None, None]
    assert ranks[1].vote.missing_ranks() == [2]
    while ranks[2].vote.tick() or not ranks[2].vote.is_decided:
        pass
    assert not ranks[2].vote.stops_at(10**9)


def test_a_store_that_is_gone_frees_the_loop(store: SealedStore) -> None:
    first, _ = (Rank(store, rank, 2) for rank in range(2))
    first.vote.stop = 0
    waiting = threading.Thread(target=lambda: answers.append(first.vote.stops_at(5)))
    answers: list[bool] = []
    waiting.start()
    first.vote.abandon()
    waiting.join(10)
    assert answers == [False]
