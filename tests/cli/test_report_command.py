"""`drumline report` and `drumline runs` as a user types them, and the report at the end of a
run."""

from __future__ import annotations

import json
import threading
import time
import urllib.error
import urllib.request
from pathlib import Path
from urllib.parse import urlsplit

import pytest

from drumline.base.errors import UsageError
from drumline.cli import report_command, runs_command
from drumline.report import page
from drumline.report.page import report_at_end
from tests.cli.test_watch_command import job
from tests.ports import listening_addresses
from tests.report_runs import write_run


def test_a_report_is_written_where_it_was_asked_for(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    for name in ("a", "b"):
        write_run(tmp_path / name, ranks=1)
    for words in (["a"], ["a", "b"], ["a", "--to", "x.html"]):
        assert report_command.run(words) == 0
    assert capsys.readouterr().out == "report: a/report.html\nreport: report.html\nreport: x.html\n"
    for path in ("a/report.html", "report.html", "x.html"):
        assert Path(path).read_text().startswith("<!doctype html>")
    with pytest.raises(
        UsageError, match=r"missing/x\.html could not be written: No such file or directory"
    ):
        report_command.run(["a", "--to", "missing/x.html"])
    with pytest.raises(UsageError, match="no RUN was given"):
        report_command.run([])
    with pytest.raises(UsageError, match="no job trains in a"):
        report_command.run(["--live", "a"])
    with pytest.raises(UsageError, match="--live serves one run folder, and writes no file"):
        report_command.run(["--live", "a", "b"])


def test_an_error_in_the_report_is_a_warning(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    run = write_run(tmp_path / "run", ranks=1)
    report_at_end(run, prints=False)
    assert (run / "report.html").exists()
    assert capsys.readouterr().out == ""
    monkeypatch.setattr(page, "read_run", lambda path: 1 / 0)
    report_at_end(run)
    printed = capsys.readouterr().err
    assert (
        printed
        == "drumline: warning: the report could not be written: ZeroDivisionError: division by zero\n"
    )
    report_at_end(tmp_path / "never made")
    monkeypatch.undo()
    (run / "report.html").unlink()
    (run / "report.html").mkdir()
    report_at_end(run)
    printed = capsys.readouterr().err
    assert printed == f"drumline: warning: {run}/report.html could not be written: Is a directory\n"


def test_a_live_report_is_on_the_loopback_behind_its_token_until_the_run_ends(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(report_command, "REFRESH_S", 1.0)
    run = write_run(tmp_path / "run", ranks=1, ended=False)
    codes: list[int] = []
    with job(run) as at_work:
        serving = threading.Thread(
            target=lambda: codes.append(report_command.run(["--live", str(run)]))
        )
        serving.start()
        url = ""
        deadline = time.monotonic() + 30
        while not url and time.monotonic() < deadline:
            time.sleep(0.02)
            url = next(
                (word for word in capsys.readouterr().out.split() if word.startswith("http")), ""
            )
        port = urlsplit(url).port or 0
        assert listening_addresses(port) == {"127.0.0.1"}
        assert 'data-refresh="1"' in fetched(url)
        root = url[: url.index("/", len("http://")) + 1]
        others = {"": root, "token": f"{root}{'x' * 22}/", "more": f"{url}x"}
        assert {name: status_of(address) for name, address in others.items()} == dict.fromkeys(
            others, 404
        )
        assert status_of(url, Host="evil.example") == 404
        at_work.does("event", {"kind": "end", "step": 200, "number": 900})
        at_work.leaves()
        serving.join(timeout=30)
    assert codes == [0]
    assert capsys.readouterr().out == "the run has ended: done at step 200\n"
    assert not listening_addresses(port)


def fetched(url: str, **headers: str) -> str:
    with urllib.request.urlopen(urllib.request.Request(url, headers=headers), timeout=20) as answer:
        text: str = answer.read().decode()
        return text


def status_of(url: str, **headers: str) -> int:
    try:
        fetched(url, **headers)
    except urllib.error.HTTPError as error:
        return error.code
    return 200


def test_runs_are_a_table_or_json(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    run = write_run(tmp_path / "run", ranks=1, task="evil\x1b[2J.py:Task")
    assert runs_command.run([str(tmp_path)]) == 0
    heading, row = capsys.readouterr().out.splitlines()
    assert heading.split() == ["run", "task", "state", "step", "result", "size", "changed"]
    assert row.startswith(f"{run}  evil\\x1b[2J.py:Task")
    assert "  done   200/200  accuracy 90.00%, loss 0.0150  " in row
    assert runs_command.run(["--json", str(tmp_path)]) == 0
    (record,) = json.loads(capsys.readouterr().out)
    assert (record["run"], record["state"], record["step"]) == (str(run), "done", 200)
    assert record["metrics"]["accuracy"] == 0.9
    (tmp_path / "none").mkdir()
    assert runs_command.run([str(tmp_path / "none")]) == 0
    assert capsys.readouterr().out == f"there are no runs in {tmp_path / 'none'}\n"
    with pytest.raises(UsageError, match="there is no folder"):
        runs_command.run([str(tmp_path / "missing")])
