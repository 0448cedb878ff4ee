"""From the first difference to the likely cause.

Two runs that nobody interrupted tell the kinds apart: if these differ already, the job is not the same twice, and no
checkpoint can help; if they agree, what was lost in the kill is something that no checkpoint holds.
"""

from __future__ import annotations

from dataclasses import dataclass

from drumline.prove.compare import Difference


@dataclass(frozen=True)
class Cause:
    """Why two runs are not the same, and what to do about it."""

    what: str
    next_step: str


GENERATORS = "the global generators of torch, numpy or random"


def not_repeatable(found: Difference) -> Cause:
    """Two runs of the same command, none of them interrupted, differ."""
    if found.kind in ("sample", "batch"):
        return Cause(
            f"unseeded randomness in the dataset: {found.name} is not the same twice, though nobody interrupted the "
            "run",
            f"draw from {GENERATORS}, which are seeded anew for every sample, or "
            "from the draws that a BatchDataset is given; a generator of your own needs a seed that follows from the "
            "index",
        )
    if found.kind == "order":
        return Cause(
            "the dataset is not the same twice: the order of samples follows from its length, the seed and the epoch",
            "let len(dataset) be the same at every start",
        )
    if found.step == 0:
        return Cause(
            f"unseeded randomness in model(): {found.name} starts from other values each time",
            "draw initial weights from torch's global generator, which is seeded before model() is called",
        )
    where, same = (
        ("evaluation", "weights") if found.kind == "evaluation" else ("the model or its loss", "samples")
    )
    return Cause(
        f"a non-deterministic kernel, or randomness in {where} that is not from {GENERATORS}: the {same} are the "
        f"same twice, but {found.name} is not, though nobody interrupted the run",
        f"try --train.deterministic; draw what is random in {where} from {GENERATORS}, whose state is saved",
    )


def lost_in_the_kill(found: Difference, *, worlds: tuple[int, int]) -> Cause:
    """Only the run that was killed differs. `worlds`: ranks of the run without kills, and of the leg that differs."""
    if found.kind in ("sample", "batch", "order"):
        return _of_the_data(found)
    used = ", used in evaluation" if found.kind == "evaluation" else ""
    if worlds[0] != worlds[1]:
        return Cause(
            f"arithmetic that depends on the number of ranks ({worlds[0]} and {worlds[1]}), or state outside the "
            f"checkpoint{used}",
            f"prove it with --world {worlds[0]} first: if that holds, it is the number of ranks",
        )
    if found.unsaved:
        return Cause(
            f"state outside the checkpoint{used}: the buffer {found.unsaved[0]} has persistent=False and is not saved",
            "register it without persistent=False, or compute it anew from what is saved",
        )
    return Cause(
        f"state outside the checkpoint{used or ', in the model, the task or the optimizer'}: without kills the job "
        "gives the same bits twice, so it remembers something that a new process does not know",
        f"keep what {'evaluation' if used else 'the loss'} depends on in a buffer of the model (register_buffer) or in "
        "the optimizer's state; counters and caches that are plain attributes of the task or the model start anew",
    )


def _of_the_data(found: Difference) -> Cause:
    if found.kind != "order":
        return Cause(
            "state outside the checkpoint, in the dataset: without kills it gives the same samples twice, so it "
            "remembers something that a new process does not know",
            "let the stream's state_dict() and load_state_dict() hold everything that decides the next sample; one "
            "without them is read from its beginning, and must give the same each time"
            if found.of_a_stream
            else "let a sample depend on its index and the seeded generators alone, not on which samples came before",
        )
    return Cause(
        "the dataset has changed between the legs: the order of samples follows from its length, the seed and the "
        "epoch",
        "let a stream end at the same sample each time it is read"
        if found.of_a_stream
        else "let len(dataset) be the same at every start",
    )
