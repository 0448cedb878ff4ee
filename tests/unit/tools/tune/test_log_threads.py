"""Logs of public threads, with the cause each thread ended with: how many are explained.

Of these 288, all but the last 42 (Q) were read while the catalogue of messages was written, so they
show that nothing got lost, not how the tool does on other logs; that is measured on logs that nobody has read
(`benchmarks/tune_logs.py`).
"""

from __future__ import annotations

from pathlib import Path

import pytest

from benchmarks.tune_logs import names_cause, read_case, read_cases
from drumline.tools.tune.log_findings import has_trouble, log_findings
from drumline.tools.tune.nccl_log import NcclLog

THREADS = Path(__file__).parents[3] / "data" / "nccl" / "threads"
FLOOR = 283
# Slow or waiting, and no error in them.
WITHOUT_ERROR = {
    "08-default-image",
    "12-two-nics",
    "21-dgx-os-upgrade",
    "24-ib-33gb",
    "25-no-ofi",
    "46-own-gpu-only",
    "52-nic-no-gdr",
    "68-one-side-gdr",
    "L049",
    "M005",
    "M011",
    "Q021",
    "Q030",
    "Q034",
}


def test_the_cause_of_the_threads_is_the_first_finding() -> None:
    cases = read_cases(THREADS)
    wrong = [case.name for case in cases if not case.is_right]
    assert len(cases) == 288
    assert len(cases) - len(wrong) >= FLOOR, wrong


@pytest.mark.parametrize("path", sorted(THREADS.glob("*.log")), ids=lambda path: path.stem)
def test_no_failed_job_is_called_healthy(path: Path) -> None:
    log = NcclLog()
    with path.open("rb") as file:
        log.read(file, path.name)
    findings = log_findings(log)
    assert has_trouble(findings) or path.stem in WITHOUT_ERROR


def test_a_list_of_names_must_be_there_as_a_whole() -> None:
    assert names_cause("NCCL_CROSS_NIC=0", [["rail"], ["nccl_cross_nic"]])
    assert not names_cause("rank 0 failed", [["rank 0", "longer"]])


def test_a_case_is_judged_by_its_first_finding(tmp_path: Path) -> None:
    log = tmp_path / "a.log"
    log.write_text("RuntimeError: CUDA error: invalid device ordinal\n")
    log.with_suffix(".json").write_text('{"cause": "x", "names": [["visible", "gpus"]]}')
    assert read_case(log).is_right
