"""The order of a proof: what is run, when it is run again, and what is never claimed. Legs are made
up here."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from drumline.base.errors import ConfigError
from drumline.tools.prove import prove as proof
from drumline.tools.prove.killed_run import Leg, RunFailedError
from drumline.tools.prove.proof_plan import Kill, ProofOptions
from drumline.tools.prove.prove import Proof

STEPS = 4


class Stage:
    """Stands in for the processes: writes what they would leave. `late` says how many kills come
    too late."""

    def __init__(
        self,
        *,
        late: int = 0,
        differs: dict[str, int] | None = None,
        evaluates: bool = False,
        losses: dict[str, float] | None = None,
        caches: bool = False,
        loses: str = "",
    ) -> None:
        self.loses = loses
        self.arguments: list[tuple[str, ...]] = []
        self.losses = losses or {}
        self.caches = caches
        self.late = late
        self.differs = differs or {}
        self.evaluates = evaluates
        self.said: list[str] = []
        self.started: list[tuple[str, int]] = []
        self.progress = 0

    def run_to_the_end(self, leg: Leg) -> None:
        from_step = self.progress if leg.name.startswith("leg") else 0
        self._write(leg, from_step, STEPS)
        events = [
            {"kind": "checkpoint", "step": step, "seconds": 0.1} for step in range(1, STEPS + 1)
        ]
        events += [{"kind": "evaluation", "step": STEPS, "seconds": 0.1}] * self.evaluates
        (leg.folder / "events").mkdir(exist_ok=True)
        (leg.folder / "events" / "rank-00000.jsonl").write_text("\n".join(map(json.dumps, events)))
        (leg.folder / "checkpoints" / f"step-{STEPS:08d}").mkdir(parents=True, exist_ok=True)

    def run_and_kill(self, leg: Leg, kill: Kill) -> bool:
        from_step = 0 if leg.name == "leg 1" else self.progress
        self._write(leg, from_step, kill.step)
        self.progress = kill.step
        self.late -= 1
        return self.late < 0

    def _write(self, leg: Leg, from_step: int, to_step: int) -> None:
        self.started.append((leg.name, leg.world_size))
        self.arguments.append(leg.arguments)
        restored = -1 if leg.name == self.loses else from_step
        folder = leg.folder / "trace"
        folder.mkdir(parents=True)
        lines: list[dict[str, Any]] = [
            {
                "kind": "start",
                "step": from_step,
                "world_size": 1,
                "tensors": {"w": restored},
                "unsaved": {},
            }
        ]
        lines[0]["unsaved"] = {"rope": "empty"} if self.caches else {}
        for step in range(from_step + 1, to_step + 1):
            changed = step >= self.differs.get(leg.name, STEPS + 1)
            batch = {
                "low": step,
                "high": step + 1,
                "indices": [step],
                "samples": [str(step)],
                "rest": "",
            }
            tensors = {"w": -1 if changed else step}
            lines.append(
                {
                    "kind": "step",
                    "step": step,
                    "epoch": 0,
                    "batches": [batch],
                    "tensors": tensors,
                    "unsaved": {"rope": "full"} if self.caches else {},
                }
            )
        if self.evaluates and to_step == STEPS:
            lines.append(
                {
                    "kind": "evaluated",
                    "step": STEPS,
                    "metrics": {"loss": self.losses.get(leg.name, 1.0)},
                }
            )
        (folder / "rank-00000.jsonl").write_text("\n".join(map(json.dumps, lines)) + "\n")


@pytest.fixture(name="prove")
def make_prove(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Any:
    def prove(stage: Stage, **options: Any) -> list[str]:
        monkeypatch.setattr(proof, "run_to_the_end", stage.run_to_the_end)
        monkeypatch.setattr(proof, "run_and_kill", stage.run_and_kill)
        proof_options = ProofOptions(
            **{"worlds": (1, 1), "steps": STEPS, "seed": 1, "moment": "step", **options}
        )
        is_proved = Proof(proof_options, ["task"], tmp_path, stage.said.append).run()
        result = "proved: " if is_proved else "not proved: "
        first = next(place for place, line in enumerate(stage.said) if line.startswith(result))
        stage.said, lines = stage.said[:first], stage.said[first:]
        return lines

    return prove


def test_proved(prove: Any) -> None:
    stage = Stage()
    assert prove(stage, kill_steps=(2, 3), worlds=(3, 1, 2), rank="0") == [
        "proved: 4 steps, 4 samples, 1 tensor: the same bits after 2 kills"
    ]
    assert stage.started == [("the reference run", 3), ("leg 1", 3), ("leg 2", 1), ("leg 3", 2)]
    assert stage.said == [
        "reference: 3 ranks, 4 steps without a kill",
        "leg 1: 3 ranks, killed with -9 after step 2 (rank 0)",
        "leg 2: 1 rank from step 2, killed with -9 after step 3 (rank 0)",
        "leg 3: 2 ranks from step 3, to the end",
    ]


@pytest.mark.parametrize("distance", [1e-6, 0.5])
def test_modes_are_compared_by_what_they_restore(
    prove: Any, monkeypatch: pytest.MonkeyPatch, distance: float
) -> None:
    """The bits of leg 2's own steps are others; its samples, and what it restored, are the same."""
    monkeypatch.setattr(proof, "weight_distance", lambda one, other: distance)
    stage = Stage(differs={"leg 2": 3})
    lines = prove(stage, kill_steps=(2,), worlds=(2, 3), rank="0", modes=("ddp", "fsdp"))
    assert stage.said[1:] == [
        "leg 1: 2 ranks in mode ddp, killed with -9 after step 2 (rank 0)",
        "leg 2: 3 ranks in mode fsdp from step 2, to the end",
    ]
    assert [leg[-1] for leg in stage.arguments] == [
        "--dist.mode=ddp",
        "--dist.mode=ddp",
        "--dist.mode=fsdp",
    ]
    if distance < 1e-2:
        assert lines == [
            "proved: 4 samples, 1 tensor: each mode resumed with the bits that the one before had saved; the weights "
            "after step 4 differ by 1.0e-06 of their size"
        ]
    else:
        assert lines[0] == (
            "not proved: the weights after step 4 differ by 5.0e-01 of their size from the run without a kill in "
            "mode ddp"
        )


def test_a_mode_that_restores_other_bits_is_no_proof(prove: Any) -> None:
    stage = Stage(loses="leg 2")
    assert prove(stage, kill_steps=(2,), rank="0", modes=("ddp", "fsdp"))[0] == (
        "not proved: w differs as restored from the checkpoint of step 2 [leg 2]"
    )


def test_a_run_that_a_hook_ends_early_is_compared_to_its_own_end(prove: Any) -> None:
    stage = Stage()
    assert prove(stage, kill_steps=(2,), rank="0", steps=STEPS + 3) == [
        "proved: 4 steps, 4 samples, 1 tensor: the same bits after 1 kill"
    ]
    assert stage.said[1] == "a hook of the task ended it after step 4: so must the killed run"


def test_a_cache_that_is_in_no_checkpoint_is_a_note(prove: Any) -> None:
    proved, note = prove(Stage(caches=True))
    assert proved.startswith("proved: ")
    assert note == (
        "  note: the buffer rope (persistent=False) is not in checkpoints and differed at some step; nothing that was "
        "compared depends on it"
    )


def test_another_evaluation_is_no_proof(prove: Any) -> None:
    lines = prove(Stage(evaluates=True, losses={"leg 2": 2.0}))
    assert lines[0] == "not proved: loss of the evaluation after step 4 is 2.0, not 1.0 [leg 2]"
    assert lines[1].startswith("  likely cause: state outside the checkpoint, used in evaluation")


def test_an_evaluation_that_was_never_done_is_found(
    prove: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    stage = Stage(evaluates=True)
    finish = stage.run_to_the_end

    def skip(leg: Leg) -> None:
        finish(leg)
        trace = leg.folder / "trace" / "rank-00000.jsonl"
        if leg.name == "leg 2":
            lines = trace.read_text().splitlines(keepends=True)
            trace.write_text("".join(line for line in lines if "evaluated" not in line))

    monkeypatch.setattr(stage, "run_to_the_end", skip)
    assert prove(stage)[0] == "not proved: the evaluation after step 4 was never done [leg 2]"


def test_a_kill_that_came_too_late_is_done_again_earlier(prove: Any) -> None:
    stage = Stage(late=1)
    assert prove(stage, kill_steps=(3,))[0].startswith("proved: ")
    assert "leg 1: the kill came too late; trying again with an earlier one" in stage.said
    assert stage.said[-2] == "leg 1: 1 rank, killed with -9 after step 2 (rank 0)"


def test_without_a_kill_there_is_no_proof(prove: Any) -> None:
    with pytest.raises(
        RunFailedError, match="the job ended before it could be killed, 3 times"
    ) as e:
        prove(Stage(late=9))
    assert "give it more --steps" in str(e.value)


def test_a_leg_with_nothing_left_to_do_proves_nothing(
    prove: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    stage = Stage()
    kill = stage.run_and_kill

    def kill_at_the_end(leg: Leg, wanted: Kill) -> bool:
        killed = kill(leg, wanted)
        stage.progress = STEPS
        return killed

    monkeypatch.setattr(stage, "run_and_kill", kill_at_the_end)
    with pytest.raises(RunFailedError, match="before it could be killed"):
        prove(stage)
    assert "leg 2: the kill came too late; trying again with an earlier one" in stage.said


def test_a_difference_before_the_kill_needs_no_other_leg(prove: Any) -> None:
    stage = Stage(differs={"leg 1": 2})
    lines = prove(stage, kill_steps=(3,))
    assert lines[0] == "not proved: w differs after step 2 [leg 1]"
    assert lines[1].startswith("  likely cause: a non-deterministic kernel")
    assert stage.started == [("the reference run", 1), ("leg 1", 1)]


@pytest.mark.parametrize(
    ("repeated", "cause"),
    [(STEPS + 1, "state outside the checkpoint, in the model"), (1, "a non-deterministic kernel")],
)
def test_a_difference_after_the_kill_is_looked_for_without_one(
    prove: Any, repeated: int, cause: str
) -> None:
    stage = Stage(differs={"leg 2": 3, "the repeated run": repeated})
    lines = prove(stage, kill_steps=(2,))
    assert lines[0] == "not proved: w differs after step 3 [leg 2]"
    assert lines[1].startswith(f"  likely cause: {cause}")
    assert stage.started[-1] == ("the repeated run", 1)


def test_a_difference_in_the_last_files_alone_is_found(prove: Any, tmp_path: Path) -> None:
    odd = tmp_path / "reference" / "checkpoints" / f"step-{STEPS:08d}" / "odd.json"
    odd.parent.mkdir(parents=True)
    odd.write_text("{}")
    assert prove(Stage())[0] == "not proved: odd.json of the checkpoint of step 4 differs [leg 2]"


def test_a_step_that_was_never_taken_is_found(prove: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    stage = Stage()
    kill = stage.run_and_kill

    def lose_a_step(leg: Leg, wanted: Kill) -> bool:
        killed = kill(leg, wanted)
        stage.progress += 1
        return killed

    monkeypatch.setattr(stage, "run_and_kill", lose_a_step)
    assert (
        prove(stage, kill_steps=(2,))[0] == "not proved: step 3 was never done by all ranks [leg 2]"
    )


@pytest.mark.parametrize("evaluates", [False, True])
def test_no_evaluation_to_kill_in(prove: Any, evaluates: bool) -> None:
    stage = Stage(evaluates=evaluates)
    prove(stage, moment="evaluation")
    said = "the job has no evaluation data: it is killed between steps instead" in stage.said
    assert said is not evaluates


def test_a_kill_before_the_first_checkpoint_is_refused(prove: Any) -> None:
    stage = Stage()
    with pytest.raises(ConfigError, match="--kill-at: 1 is too early"):
        prove(stage, kill_steps=(1,))
    assert stage.started == [("the reference run", 1)]
