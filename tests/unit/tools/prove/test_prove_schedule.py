"""When legs are killed: drawn from a seed, within what was asked for, and never before there is
something to resume."""

from __future__ import annotations

from typing import Any

import pytest

from drumline.tools.prove.proof_plan import (
    MAX_ATTEMPTS,
    ProofOptions,
    RunPattern,
    draw_kills,
    too_early,
    too_few_steps,
    wrong_options,
)

PATTERN: RunPattern = {"save": {2: 0.1, 4: 0.2, 6: 0.3, 8: 0.4}, "evaluation": {5: 1.0, 8: 2.0}}


def options(**given: Any) -> ProofOptions:
    return ProofOptions(**{"worlds": (2, 2), "steps": 8, "seed": 0, **given})


def test_there_is_a_kill_between_two_legs() -> None:
    assert not options(worlds=(2, 2)).is_elastic
    assert options(worlds=(4, 2, 3)).is_elastic
    assert options(worlds=(4, 2, 3)).num_kills == 2


def test_the_same_seed_gives_the_same_kills_and_others_differ() -> None:
    drawn = [draw_kills(options(seed=seed), PATTERN) for seed in range(30)]
    assert drawn == [draw_kills(options(seed=seed), PATTERN) for seed in range(30)]
    assert {kill.moment for (kill,) in drawn} == {"step", "save", "evaluation"}
    assert {kill.ranks for (kill,) in drawn} == {(0,), (1,)}
    assert len({kill.step for (kill,) in drawn}) > 3


@pytest.mark.parametrize("attempt", range(MAX_ATTEMPTS))
@pytest.mark.parametrize("worlds", [(1, 1), (2, 2), (4, 2, 3), (2, 2, 2, 2)])
def test_kills_rise_and_leave_something_to_resume(worlds: tuple[int, ...], attempt: int) -> None:
    for seed in range(50):
        kills = draw_kills(options(worlds=worlds, seed=seed), PATTERN, attempt=attempt)
        assert len(kills) == len(worlds) - 1
        assert all(kill.step > min(PATTERN["save"]) for kill in kills)
        assert all(
            rank < world for kill, world in zip(kills, worlds, strict=False) for rank in kill.ranks
        )
        steps = [kill.step for kill in kills if kill.moment == "step"]
        assert steps == sorted(steps)
        assert all(step < 8 for step in steps)


def test_options_are_followed() -> None:
    (kill,) = draw_kills(options(kill_steps=(3,), moment="step", rank="all"), PATTERN)
    assert (kill.moment, kill.step, kill.ranks, kill.usual_s) == ("step", 3, (0, 1), None)
    (kill,) = draw_kills(options(kill_steps=(3,), moment="save", rank="1"), PATTERN)
    assert (kill.moment, kill.step, kill.ranks, kill.usual_s) == ("save", 4, (1,), 0.2)
    (kill,) = draw_kills(options(kill_steps=(6,), moment="evaluation"), PATTERN)
    assert (kill.moment, kill.step, kill.usual_s) == ("evaluation", 8, 2.0)


def test_the_last_save_is_killed_where_it_is_written() -> None:
    for seed in range(20):
        (kill,) = draw_kills(options(kill_steps=(7,), moment="save", seed=seed), PATTERN)
        assert (kill.step, kill.ranks) == (8, (0,))


def test_a_job_without_evaluation_is_killed_between_steps() -> None:
    without: RunPattern = {**PATTERN, "evaluation": {}}
    (kill,) = draw_kills(options(kill_steps=(3,), moment="evaluation"), without)
    assert (kill.moment, kill.step) == ("step", 3)
    for seed in range(20):
        assert draw_kills(options(seed=seed), without)[0].moment != "evaluation"


def test_later_attempts_kill_earlier_and_at_once() -> None:
    first, second, third = (
        draw_kills(options(kill_steps=(7,), moment="save"), PATTERN, attempt=n)[0]
        for n in range(MAX_ATTEMPTS)
    )
    assert (first.step, second.step, second.wait) == (8, 4, 0.0)
    assert (third.moment, third.step, third.wait) == ("step", 3, 0.0)


@pytest.mark.parametrize(
    ("given", "problem"),
    [
        ({"kill_steps": (3, 4)}, "--kill-at: 2 steps for 1 kill (--world 2,2)"),
        (
            {"kill_steps": (3,), "worlds": (4, 2, 3)},
            "--kill-at: 1 step for 2 kills (--world 4,2,3)",
        ),
        ({"kill_steps": (8,)}, "--kill-at: 8 must be below --steps 8"),
        (
            {"kill_steps": (4, 3), "worlds": (2, 2, 2)},
            "--kill-at: 4,3 must rise and stay below --steps 8",
        ),
        (
            {"rank": "2"},
            "--kill-rank: '2' is neither 'all' nor a rank of every leg that is killed (0 to 1)",
        ),
        ({"rank": "one"}, "--kill-rank: 'one' is neither 'all' nor a rank"),
        ({"rank": "3", "worlds": (4, 2, 4)}, "(0 to 1)"),
        ({"modes": ("fsdp",)}, "--modes: 1 for 2 legs; give one for each, and at least 2"),
        ({"modes": ("ddp", "fsdp2")}, "--modes: 'fsdp2' is not one of ddp, zero1, fsdp, hsdp"),
    ],
)
def test_options_that_cannot_be_met(given: dict[str, Any], problem: str) -> None:
    (said,) = wrong_options(options(**given))
    assert problem in said


def test_options_that_can_be_met() -> None:
    for given in ({}, {"kill_steps": (3,)}, {"rank": "all"}, {"rank": "3", "worlds": (4, 2)}):
        assert not list(wrong_options(options(**given)))
        assert too_early(options(**given), PATTERN) is None


def test_what_only_the_first_run_shows() -> None:
    assert too_early(options(kill_steps=(2,)), PATTERN) == (
        "--kill-at: 2 is too early: the first checkpoint is that of step 2"
    )
    refusal = too_early(options(steps=4, worlds=(2, 2, 2)), PATTERN) or ""
    assert refusal.startswith("--steps: 4 is too few: the first checkpoint is that of step 2")
    assert refusal.endswith("give at least 5")
    assert too_early(options(steps=5, worlds=(2, 2, 2)), PATTERN) is None
    for steps, refusal in ((1, "--steps: 1 is too few"), (3, "--steps: 3 is too few")):
        problem = too_few_steps(options(steps=steps), first_save=2) or ""
        assert problem.startswith(refusal)
        assert problem.endswith("give at least 4")
    assert too_few_steps(options(steps=4), first_save=2) is None
