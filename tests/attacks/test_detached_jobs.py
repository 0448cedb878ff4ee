"""A detached job: what another local user, a hostile job file and a hostile host can do with it."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from dataclasses import asdict
from pathlib import Path
from typing import Any

import pytest

from drumline.base.errors import UsageError
from drumline.base.untrusted import from_json
from drumline.launch.detached import units
from drumline.launch.detached.job_folder import JobFolder, JobRecord, folders_of
from drumline.launch.node_plan import NodePlan, Program
from tests.unit.launch.test_detached_node import make_folder, make_spec

STEAL = """
import os, sys
from pathlib import Path
os.setuid(int(sys.argv[1]))
folder = Path(sys.argv[2])
for path in (folder / "spec.json", folder / "state.json"):
    for flags in (os.O_RDONLY, os.O_WRONLY | os.O_CREAT):
        try:
            os.open(path, flags)
        except PermissionError:
            continue
        sys.exit(f"{path} could be opened")
"""


def test_another_user_neither_reads_nor_stops_a_job(tmp_path: Path, other_user: int) -> None:
    job = make_folder(tmp_path)
    for folder in (*job.path.parents[:2], *tmp_path.parents):
        if folder.stat().st_uid == os.geteuid() and folder != Path("/"):
            folder.chmod(folder.stat().st_mode | 0o055)
    job.path.parent.chmod(0o755)
    done = subprocess.run(
        [sys.executable, "-c", STEAL, str(other_user), str(job.path)],
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr


def test_a_job_of_another_user_is_refused(tmp_path: Path, other_user: int) -> None:
    job = make_folder(tmp_path)
    os.chown(job.path / "spec.json", other_user, other_user)
    with pytest.raises(PermissionError, match="belongs to user id"):
        job.spec()
    os.chown(job.path / "spec.json", 0, 0)
    os.chown(job.path, other_user, other_user)
    with pytest.raises(PermissionError, match="belongs to user id"):
        job.spec()
    assert folders_of(tmp_path / "jobs") == []


def test_a_folder_that_others_may_write_to_is_refused(tmp_path: Path) -> None:
    job = make_folder(tmp_path)
    job.path.chmod(0o777)
    with pytest.raises(PermissionError, match=r"others can write to it \(mode 777\)"):
        job.spec()


def test_links_and_pipes_are_not_followed(tmp_path: Path) -> None:
    job = make_folder(tmp_path)
    spec = job.path / "spec.json"
    spec.rename(tmp_path / "elsewhere.json")
    spec.symlink_to(tmp_path / "elsewhere.json")
    with pytest.raises(OSError, match="a symbolic link"):
        job.spec()
    spec.unlink()
    os.mkfifo(spec)
    with pytest.raises(OSError, match="a FIFO"):
        job.spec()

    (tmp_path / "linked").symlink_to(tmp_path / "jobs", target_is_directory=True)
    folder = JobFolder(tmp_path / "linked" / "x" / "node-0")
    with pytest.raises(OSError, match="not a folder"):
        folder.create(make_spec(tmp_path))


def test_the_name_of_a_job_leads_nowhere_else(tmp_path: Path) -> None:
    make_folder(tmp_path)
    for name in ("../jobs/digits-1a2b3c", "*", "digits-1a2b3c/../digits-1a2b3c"):
        with pytest.raises(UsageError, match="is not a job's name"):
            folders_of(tmp_path / "jobs", name)


def test_a_process_of_another_user_is_not_taken_for_a_keeper(
    tmp_path: Path, other_user: int
) -> None:
    job = make_folder(tmp_path)
    pretend = ["/bin/sh", "-c", "read line", "-m", units.KEEPER, str(job.path)]
    with subprocess.Popen(pretend, stdin=subprocess.PIPE, user=other_user, cwd="/") as process:
        wait_for_command(process)
        assert units.keepers(job) == []
    with subprocess.Popen(pretend, stdin=subprocess.PIPE) as process:
        wait_for_command(process)
        assert units.keepers(job) == [process.pid]


def wait_for_command(process: subprocess.Popen[bytes]) -> None:
    """Popen returns a moment before the process has its new command line."""
    while not Path(f"/proc/{process.pid}/cmdline").read_bytes():
        time.sleep(0.001)


@pytest.mark.parametrize(
    "text", ["", "[" * 10_000, '{"restarts_left": "x"}', '{"first_start": 1e999}']
)
def test_a_hostile_state_is_damage(tmp_path: Path, text: str) -> None:
    job = make_folder(tmp_path)
    (job.path / "state.json").write_text(text)
    with pytest.raises(ValueError, match=r"\S"):
        job.state()
    assert job.ended_at() is None


def record(**fields: Any) -> dict[str, Any]:
    """As a host answers."""
    known = {
        "name": "x",
        "hosts": ["a", "b"],
        "node": asdict(NodePlan()),
        "program": asdict(Program(("x.py",))),
        "state": "running",
        "why": "",
        "code": None,
        "step": 1,
        "since": 1.0,
        "logs": "/logs",
        "run": "",
        "is_json": False,
    }
    return json.loads(json.dumps({**known, **fields}))  # type: ignore[no-any-return]


@pytest.mark.parametrize("name", ["-oProxyCommand=touch x", "a b", "$(x)", "", "a;b"])
def test_a_host_cannot_name_others_that_ssh_would_misread(name: str) -> None:
    hostile = from_json(JobRecord, record(hosts=["a", name]))
    assert hostile.host(0).name == "a"
    with pytest.raises(UsageError):
        hostile.host(1)


@pytest.mark.parametrize("fields", [{"hosts": 7}, {"node": []}, {"since": "x"}, {"code": [1]}])
def test_a_hosts_answer_has_a_form(fields: dict[str, Any]) -> None:
    with pytest.raises(ValueError, match=r"\S"):
        from_json(JobRecord, record(**fields))
