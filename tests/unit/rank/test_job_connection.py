"""Which failure a rank reports when it has lost its peers, and no rank has reported an error of its
own."""

from __future__ import annotations

import json
import os
from pathlib import Path

import pytest

from drumline.base.errors import Place
from drumline.base.rank_environment import read_failure
from drumline.rank.failure import Failure
from drumline.rank.watched import job_connection
from drumline.rank.watched.job_connection import JobConnection

LOST = RuntimeError("Connection closed by peer [10.77.0.2]:26840")
LEFT_EARLY = {"what": "rank 1 on b left the loop", "rank": 1, "host": "b"}


@pytest.fixture(name="folder")
def _folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A watch folder whose sidecar lives."""
    (tmp_path / "sidecar.pid").write_text(str(os.getpid()))
    monkeypatch.setattr(JobConnection, "watch_folder", property(lambda self: tmp_path))
    monkeypatch.setattr(job_connection, "DIAGNOSED_S", 0.1)
    return tmp_path


def claim(error: Exception, folder: Path) -> Failure | None:
    failure = Failure(Place("a", 0, 5), str(error), 1)
    environment = {"DRUMLINE_FAILURE_FILE": str(folder / "failure.json")}
    return JobConnection().claim_failure(error, failure, environment=environment)


def diagnose(folder: Path, **content: object) -> None:
    diagnosis = {**LEFT_EARLY, **content}
    sentence = f"failure: {diagnosis['what']}. Try: look"
    record = {"alarm": "failure", "action": "none", "sentence": sentence, **diagnosis}
    (folder / "diagnosis.json").write_text(json.dumps(record))


def test_a_rank_that_lost_a_peer_reports_what_the_diagnosis_blames(folder: Path) -> None:
    diagnose(folder)
    first = claim(LOST, folder)
    assert first is not None
    assert first.sentence == "rank 1 on b left the loop"
    record = read_failure(folder / "failure.json")
    assert record is not None
    assert record.rank == 1, "the launcher reads it as well"
    assert claim(ValueError("label 7"), folder) is None, "its own error"


def test_without_a_diagnosis_of_another_rank_it_reports_itself(folder: Path) -> None:
    assert claim(LOST, folder) is None
    diagnose(folder, rank=0)
    assert claim(LOST, folder) is None
    record = read_failure(folder / "failure.json")
    assert record is not None
    assert record.rank == 0
