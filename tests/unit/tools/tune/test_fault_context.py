"""Lines around a fault that show its deeper cause."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from drumline.tools.tune.known_messages import NEAR, context_data, known_messages
from drumline.tools.tune.log_findings import log_findings
from tests.unit.tools.tune.test_job_faults import timed_out
from tests.unit.tools.tune.test_nccl_log import four_ranks, read

CASES = Path(__file__).parents[3] / "data" / "nccl" / "contexts.txt"
OUT_OF_MEMORY = (
    "[rank1]: torch.OutOfMemoryError: CUDA out of memory. GPU 1 has a total capacity of 79.15 GiB\n"
)
SAVED = '[rank{}]:   File "/w/train.py", line 30, in save_checkpoint\n'
CLOSED = "socketProgress: Connection closed by remote peer 10.0.0.{}<42>\n"
# What the finding itself is made of, beside contexts.
OTHER_KINDS = {"collective timeout", "exception", "unknown"}


def recorded_cases() -> list[tuple[str, str, str]]:
    """Kind, a part of the deeper cause, and the log."""
    blocks = CASES.read_text(encoding="utf-8").split("\n== ")[1:]
    cases = []
    for block in blocks:
        title, _, lines = block.partition("\n")
        kind, _, cause = title.partition(" | ")
        cases.append((kind, cause, lines))
    return cases


def first_text(text: str) -> str:
    return log_findings(read(text))[0].what


@pytest.mark.parametrize(("kind", "cause", "lines"), recorded_cases())
def test_the_first_finding_says_the_deeper_cause(kind: str, cause: str, lines: str) -> None:
    finding = log_findings(read(lines))[0]
    assert finding.check == kind
    assert "here most likely: " in finding.what
    assert cause in finding.what.partition("here most likely: ")[2]


def test_every_context_has_a_case() -> None:
    texts = [first_text(lines) for _, _, lines in recorded_cases()]
    missing = [
        context.what
        for context in context_data().context
        if not any(text.endswith(f"here most likely: {context.what}") for text in texts)
    ]
    assert missing == []


def test_contexts_name_kinds_and_clues_that_exist() -> None:
    kinds = {message.kind for message in known_messages().messages} | OTHER_KINDS
    names = {clue.name for clue in context_data().clue}
    used: set[str] = set()
    for context in context_data().context:
        assert set(context.kinds) <= kinds
        used.update(context.here, context.near, context.anywhere)
    assert used == names


def test_texts_of_clues_are_in_lower_case() -> None:
    for clue in context_data().clue:
        assert [text for text in clue.texts if text != text.lower()] == []


def test_lines_without_a_clue_leave_the_finding_as_it_is() -> None:
    assert "here most likely" not in first_text(OUT_OF_MEMORY)


@pytest.mark.parametrize(("rank", "is_near"), [(1, True), (0, False)])
def test_a_clue_is_of_the_same_process(rank: int, is_near: bool) -> None:
    what = first_text(SAVED.format(rank) + OUT_OF_MEMORY)
    assert ("the save gathers" in what) == is_near


@pytest.mark.parametrize(("num_between", "is_near"), [(NEAR - 2, True), (NEAR + 2, False)])
def test_a_clue_far_from_the_fault_does_not_count(num_between: int, is_near: bool) -> None:
    between = "[rank1]: step\n" * num_between
    for text in (
        SAVED.format(1) + between + OUT_OF_MEMORY,
        OUT_OF_MEMORY + between + SAVED.format(1),
    ):
        assert ("the save gathers" in first_text(text)) == is_near


def test_lines_of_other_ranks_between_them_do_not_count() -> None:
    between = "[rank2]: step\n" * 1000
    assert "the save gathers" in first_text(SAVED.format(1) + between + OUT_OF_MEMORY)


def test_a_clue_of_the_line_itself_is_not_one_beside_it() -> None:
    port = "[c10d] The server socket has failed to bind to [::]:{} (errno: 98 - Address already in use).\n"
    assert "default port" in first_text(port.format(29500))
    assert "default port" not in first_text("listens at 29500\n" + port.format(4000))


def test_the_line_with_the_details_may_come_after_the_first_one() -> None:
    lines = "Unhandled exception <class 'torch.cuda.OutOfMemoryError'> in proc 2311.\n"
    lines += "Load optimizer a.pt\n"
    lines += "OutOfMemoryError: CUDA out of memory. Tried to allocate 1 GiB (GPU 0; 10 GiB total)\n"
    assert "loaded the checkpoint onto GPU 0" in first_text(lines)


def test_what_a_log_says_of_an_exception_is_not_the_exception() -> None:
    text = "core - Exception:\nTraceback (most recent call last):\nValueError: a number\n"
    assert "ValueError" in first_text(text)


@pytest.mark.parametrize(
    "lines",
    [
        "offload_param=None offload_optimizer=None cpu_offload=None\nfailed (exitcode: -9) local_rank: 2\n",
        "fp16: False, bf16: True\nRuntimeError: found NaN in the loss\n",
        "gradient_checkpointing=False\nRuntimeError: Expected to mark a variable ready only once.\n",
        "INFO Saving checkpoint to a/b\n" + OUT_OF_MEMORY.removeprefix("[rank1]: "),
        "Fetching files: 100%|####| 15/15 [00:10<00:00]\n" + timed_out(1, 500),
    ],
)
def test_what_a_log_says_in_passing_is_no_clue(lines: str) -> None:
    assert "here most likely" not in first_text(lines)


def test_clues_are_no_faults() -> None:
    """A job that saves, evaluates and resumes is healthy."""
    clues = [
        line
        for _, _, lines in recorded_cases()
        for line in lines.splitlines()
        if re.match(
            r"(?:Sav|Load|Runn|Download|Build|Epoch|args|GPU 0: |model: |export|INFO|#SBATCH|torchrun --)",
            line,
        )
    ]
    assert len(clues) > 15
    findings = log_findings(read(four_ranks() + "\n".join(clues) + "\n"))
    assert [finding for finding in findings if finding.level == "problem"] == []


def test_errors_that_name_another_nccl_than_the_banner_show_two_versions() -> None:
    banner = "NCCL version 2.14.3+cuda11.7\n"
    error = "DistBackendError: NCCL error in: x.cpp:1, internal error, NCCL version {}\n"
    assert "2.14.3+cuda11.7, 2.19.3" in first_text(banner + error.format("2.19.3"))
    # the second is how an older torch prints 2.12.12
    for same in ("2.14.3", "21.2.12"):
        assert "differs" not in first_text(banner + error.format(same))
