"""What `drumline launch` does when a sidecar has ended its ranks and reports why.

The sidecar here is a stand-in, except where a script is watched by the real one.
"""

from __future__ import annotations

import json
import re
import socket
from collections import Counter
from pathlib import Path

import pytest

from tests.cli.test_launch_command import env_file, finish, start
from tests.ranks import free_port

pytestmark = pytest.mark.usefixtures("warm")
SENTENCE = "hang: rank 1 on b stands. Try: look"
# Ranks that stand still. Beside the first of each node is who ends them, and speaks when the agent
# has noted how.
SCRIPT = """
import json, os, subprocess, sys, time
from pathlib import Path
folder, rank = Path(os.environ["DRUMLINE_WATCH_DIR"]), os.environ["RANK"]
names = ("DRUMLINE_WATCH_DIR", "DRUMLINE_SECRET", "DRUMLINE_WATCH_NODES", "DRUMLINE_SCRIPT_WATCH")
with open(f"starts-{rank}", "a") as starts:
    starts.write(json.dumps({name: os.environ.get(name) for name in names}) + "\\n")
(folder / f"pid-{rank}").write_text(str(os.getpid()))
if os.environ["LOCAL_RANK"] == "0":
    words = [sys.executable, "sidecar.py", str(folder), os.environ["LOCAL_WORLD_SIZE"], *sys.argv[1:]]
    subprocess.Popen(words, start_new_session=True)
time.sleep(600)
"""
SIDECAR = """
import json, os, signal, sys, time
from pathlib import Path
folder, count, alarm, action, all_nodes = Path(sys.argv[1]), int(sys.argv[2]), *sys.argv[3:]
(folder / "sidecar.pid").write_text(str(os.getpid()))
starts = lambda: {len(path.read_text().splitlines()) for path in Path().glob("starts-*")}
while len(pids := [p for p in folder.glob("pid-*") if p.read_text()]) < count:
    time.sleep(0.02)
while len(list(Path().glob("starts-*"))) < int(all_nodes) or len(starts()) > 1:
    time.sleep(0.02)
for path in pids:
    os.kill(int(path.read_text()), signal.SIGKILL)
while "-9\\n" not in [path.read_text() for path in folder.glob("exit-?????")]:
    time.sleep(0.02)
sentence = f"{alarm}: rank 1 on b stands. Try: look"
record = {"alarm": alarm, "action": action, "sentence": sentence, "what": "rank 1 on b stands"}
(folder / "partial").write_text(json.dumps(record))
(folder / "partial").replace(folder / "diagnosis.json")
"""


@pytest.fixture(autouse=True)
def _scripts(tmp_path: Path) -> None:
    (tmp_path / "stands.py").write_text(SCRIPT)
    (tmp_path / "sidecar.py").write_text(SIDECAR)


def starts_of(folder: Path, rank: int) -> list[dict[str, str]]:
    return [json.loads(line) for line in (folder / f"starts-{rank}").read_text().splitlines()]


AGAIN = "drumline: restarting the ranks (restart 1 of {}); the script starts from the beginning\n"


@pytest.mark.parametrize(
    ("alarm", "action", "restarts", "code", "said"),
    [
        ("hang", "stop", 2, 70, f"drumline: {SENTENCE}\n"),
        (
            "hang",
            "restart",
            1,
            70,
            f"drumline: {SENTENCE}\n{AGAIN.format(1)}drumline: {SENTENCE}\n",
        ),
        ("failure", "restart", 0, 1, f"drumline: {SENTENCE.replace('hang', 'failure')}\n"),
    ],
)
def test_the_diagnosis_explains_the_end_and_decides_on_a_restart(
    tmp_path: Path, alarm: str, action: str, restarts: int, code: int, said: str
) -> None:
    words = ["--procs", "2", "--max-restarts", str(restarts), "stands.py", alarm, action, "2"]
    ended = finish(start(*words, cwd=tmp_path))[0]
    assert ended == (code, "", said)
    starts = starts_of(tmp_path, 0)
    assert starts == starts_of(tmp_path, 1)
    assert len(starts) == said.count("restarting") + 1
    assert len({start["DRUMLINE_WATCH_DIR"] for start in starts}) == len(starts), (
        "each start has its own"
    )
    assert {len(start["DRUMLINE_SECRET"]) for start in starts} == {64}
    assert len({start["DRUMLINE_SECRET"] for start in starts}) == len(starts)
    assert {start["DRUMLINE_WATCH_NODES"] for start in starts} == {None}
    assert {start["DRUMLINE_SCRIPT_WATCH"] for start in starts} == {None}
    assert not any(Path(start["DRUMLINE_WATCH_DIR"]).parent.exists() for start in starts)


def test_nodes_whose_ranks_are_all_ended_at_once_restart_together_once(tmp_path: Path) -> None:
    port = free_port()
    files = [env_file(tmp_path, f"{rank}.env", nodes=2, rank=rank, port=port) for rank in range(2)]
    words = ["stands.py", "hang", "restart", "2"]
    ended = finish(
        *(start("--max-restarts", "1", "--env-file", file, *words, cwd=tmp_path) for file in files)
    )
    assert [code for code, *_ in ended] == [70, 70], ended
    starts = [starts_of(tmp_path, rank) for rank in range(2)]
    assert [len(start) for start in starts] == [2, 2], ended
    for first, second in zip(*starts, strict=True):
        assert first["DRUMLINE_SECRET"] == second["DRUMLINE_SECRET"]
        assert first["DRUMLINE_WATCH_NODES"] == second["DRUMLINE_WATCH_NODES"]
        assert first["DRUMLINE_WATCH_DIR"] != second["DRUMLINE_WATCH_DIR"]
        nodes = [alarm.rpartition(":") for alarm in first["DRUMLINE_WATCH_NODES"].split(",")]
        assert [host for host, *_ in nodes] == ["127.0.0.1"] * 2
        assert len({number for *_, number in nodes}) == 2
    for _, _, errors in ended:
        lines = Counter(line for line in errors.splitlines() if line.startswith("drumline:"))
        assert lines[f"drumline: {SENTENCE}"] >= 1, errors
        assert sum(count for line, count in lines.items() if "restarting the ranks" in line) == 1


# As SIDECAR, with the furthest step of its ranks: 10 more in each start, until they stay at 30.
GETS_FURTHER = SIDECAR.replace(
    "for path in pids:",
    """step = min(10 * max(starts()), 30)
(folder / "furthest-step").write_text(str(step))
for path in pids:""",
    1,
)


@pytest.mark.parametrize("num_nodes", [1, 2])
def test_a_restart_counts_only_against_the_same_step(tmp_path: Path, num_nodes: int) -> None:
    (tmp_path / "sidecar.py").write_text(GETS_FURTHER)
    words = ["--max-restarts", "1", "stands.py", "hang", "restart", str(num_nodes)]
    if num_nodes == 1:
        ended = finish(start("--procs", "1", *words, cwd=tmp_path))
    else:
        port = free_port()
        files = [
            env_file(tmp_path, f"{rank}.env", nodes=2, rank=rank, port=port) for rank in range(2)
        ]
        ended = finish(*(start("--env-file", file, *words, cwd=tmp_path) for file in files))
    assert [code for code, *_ in ended] == [70] * num_nodes, ended
    for rank in range(num_nodes):
        assert len(starts_of(tmp_path, rank)) == 4, (
            "three get further; the fourth does not, and no restart is left"
        )
    if num_nodes == 1:
        assert ended[0][2].count("restarting the ranks (restart 1 of 1)") == 3


def test_a_watched_script_is_run_as_it_is(tmp_path: Path) -> None:
    (tmp_path / "own.py").write_text(
        "import json, os, sys\nfrom pathlib import Path\n"
        "watch = json.loads(os.environ['DRUMLINE_SCRIPT_WATCH'])\n"
        "is_there = Path(os.environ['DRUMLINE_WATCH_DIR'], 'rank-00000.heartbeat').exists()\n"
        "print(__name__, sys.argv, is_there, *(watch[name] for name in ('on_hang', 'hang_s', 'run')))\n"
    )
    words = [
        "--procs",
        "1",
        "--watch",
        "--on-hang",
        "report",
        "--hang-after",
        "9.5",
        "own.py",
        "--watch",
    ]
    code, output, errors = finish(start(*words, cwd=tmp_path))[0]
    assert (code, errors) == (0, "")
    assert output.startswith(
        f"__main__ ['own.py', '--watch'] True report 9.5 {tmp_path}/runs/launch/"
    ), output


STOPS_ITSELF = """
import os, signal, torch
import torch.distributed as dist
dist.init_process_group("gloo")
for number in range(1000):
    dist.all_reduce(torch.ones(4))
    if number == 20 and dist.get_rank() == 1:
        os.kill(os.getpid(), signal.SIGSTOP)
"""


def test_a_script_that_knows_nothing_of_drumline_is_watched(tmp_path: Path) -> None:
    (tmp_path / "plain.py").write_text(STOPS_ITSELF)
    words = ["--watch", "--procs", "2", "--max-restarts", "1", "plain.py"]
    code, output, errors = finish(start(*words, cwd=tmp_path))[0]
    assert (code, output) == (70, ""), errors
    host = re.escape(socket.gethostname())
    stopped = rf"hang: rank 1 on {host} is stopped by a signal, .*; 1 rank is blocked in all_reduce #\d+\."
    message = rf"drumline: {stopped} Try: find out who stopped it; kill -CONT \d+ on {host} resumes it, .*\n"
    assert re.fullmatch(rf"{message}{re.escape(AGAIN.format(1))}{message}", errors), errors
    (folder,) = (tmp_path / "runs" / "launch").iterdir()
    names = ["0001-stopped.json", "0001-stopped.txt", "0002-stopped.json", "0002-stopped.txt"]
    assert sorted(path.name for path in (folder / "diagnoses").iterdir()) == names
    events = [
        json.loads(line) for line in (folder / "events" / "watch.jsonl").read_text().splitlines()
    ]
    assert [(event["kind"], event["rank"], event["action"]) for event in events] == [
        ("hang", 1, "restart")
    ] * 2


# Healthy: a process that it has forked ends and is not waited for; workers end with each epoch; and
# data comes late.
WAITS = """
import os, time, torch
from datetime import timedelta
import torch.distributed as dist
from torch.utils.data import DataLoader

class Numbers:
    def __len__(self):
        return 4

    def __getitem__(self, index):
        time.sleep(9 * (index == 2 and os.environ["RANK"] == "1" and os.environ["EPOCH"] == "1"))
        return torch.ones(1)

dist.init_process_group("gloo", timeout=timedelta(seconds=60))
if os.fork() == 0:
    os._exit(0)
for epoch in range(3):
    os.environ["EPOCH"] = str(epoch)
    for batch in DataLoader(Numbers(), num_workers=1, multiprocessing_context="fork"):
        dist.all_reduce(batch)
if os.environ["RANK"] == "0":
    backend = dist.distributed_c10d._get_default_group()._get_backend(torch.device("cpu"))
    print(backend.options._timeout.total_seconds())
dist.barrier()
dist.destroy_process_group()
"""


@pytest.mark.soak
def test_a_script_that_only_waits_is_not_ended_and_torch_waits_longer_than_the_watch(
    tmp_path: Path,
) -> None:
    (tmp_path / "waits.py").write_text(WAITS)
    code, output, errors = finish(
        start("--watch", "--hang-after", "50", "--procs", "2", "waits.py", cwd=tmp_path)
    )[0]
    assert (code, output) == (0, "140.0\n"), errors
    assert "hang: " not in errors


ENDS_WITHOUT_A_WORD = """
import os, sys, time
from pathlib import Path
while not Path(os.environ["DRUMLINE_WATCH_DIR"], "sidecar.pid").exists():
    time.sleep(0.02)
if os.environ["RANK"] == "1":
    sys.exit(3)
time.sleep(600)
"""


def test_a_watched_script_that_exits_without_a_message_is_reported(tmp_path: Path) -> None:
    (tmp_path / "ends.py").write_text(ENDS_WITHOUT_A_WORD)
    words = ["--watch", "--procs", "2", "--max-restarts", "1", "ends.py"]
    code, output, errors = finish(start(*words, cwd=tmp_path))[0]
    assert (code, output) == (3, ""), errors
    message = f"drumline: failure: rank 1 on {socket.gethostname()} exited with code 3. "
    first, again, last = errors.splitlines(keepends=True)
    assert first.startswith(message), errors
    assert (again, last) == (AGAIN.format(1), first), "once for each start"


# The rank that ends itself writes the diagnosis as well, when rank 0 has told that it goes on.
DIES_ALWAYS = """
import os, signal, time
from pathlib import Path
from drumline.training.tasks import ImageClassification

RUN = Path("runs/DiesAlways")

class DiesAlways(ImageClassification):
    defaults = {
        "data.name": "digits", "model.widths": [4], "train.steps": 9, "train.batch_size": 32,
        "checkpoint.every_steps": 2,
    }

    def loss(self, model, batch):
        before = 2 if (RUN / "checkpoints/step-00000002").exists() else 0
        self.seen = getattr(self, "seen", before) + 1
        if self.seen == 4 and os.environ["RANK"] == "1":
            while not (Path(os.environ["DRUMLINE_WATCH_DIR"]) / "sidecar.pid").exists():
                time.sleep(0.05)
            count = len(list((RUN / "diagnoses").glob("*.json")))
            while (RUN / "events/rank-00000.jsonl").read_text().count('"recovered"') < count:
                time.sleep(0.05)
            os.kill(os.getpid(), signal.SIGKILL)
        return super().loss(model, batch)
"""


def test_a_task_that_fails_at_the_same_step_three_times_stops_and_reports_it(
    tmp_path: Path,
) -> None:
    (tmp_path / "mine.py").write_text(DIES_ALWAYS)
    code, output, errors = finish(
        start("--procs", "2", "--max-restarts", "9", "mine.py:DiesAlways", cwd=tmp_path)
    )[0]
    assert code == 70, errors
    assert errors.count("restarting the ranks") == 3, errors
    assert "error: the run has failed 3 times at step 3 and is not restarted:\n" in errors
    host = socket.gethostname()
    assert errors.count(f"  - rank 1 on {host} was killed by SIGKILL at step 3, in forward") == 3
    assert f" [rank 1 on {host}, step 3]\n" in errors
    assert "try: read runs/DiesAlways/diagnoses and fix the cause" in errors
    events = (
        (tmp_path / "runs" / "DiesAlways" / "events" / "rank-00000.jsonl").read_text().splitlines()
    )
    recovered = [event for line in events if (event := json.loads(line))["kind"] == "recovered"]
    assert [(event["step"], event["lost_steps"], event["about_rank"]) for event in recovered] == [
        (3, 1, 1)
    ] * 2
    assert all(event["seconds"] > event["seconds_to_diagnosis"] for event in recovered)
    begun = [event for line in events if (event := json.loads(line))["kind"] == "first_step"]
    assert [event["since"] for event in begun] == ["command", "rank", "rank"]
    assert ["launcher" in event["parts"] for event in begun] == [True, False, False]
    assert output.count(f"after rank 1 on {host} was killed at step 3; 1 step lost\n") == 2


CALLS_ONE_MORE = """
import os
import torch
import torch.distributed as dist
from drumline.training.tasks import ImageClassification

class CallsOneMore(ImageClassification):
    defaults = {"data.name": "digits", "model.widths": [8], "train.steps": 60, "train.batch_size": 64}
    seen = 0

    def loss(self, model, batch):
        self.seen += 1
        if self.seen == 20 and os.environ["RANK"] == "1":
            dist.all_reduce(torch.ones(3))
        return super().loss(model, batch)
"""


def test_an_extra_collective_is_named_with_what_each_side_called(tmp_path: Path) -> None:
    (tmp_path / "mine.py").write_text(CALLS_ONE_MORE)
    words = [
        "--procs",
        "2",
        "--max-restarts",
        "0",
        "mine.py:CallsOneMore",
        "--watch.on_hang",
        "stop",
    ]
    code, _, errors = finish(start(*words, cwd=tmp_path))[0]
    assert code != 0
    (told,) = [line for line in errors.splitlines() if "failure: " in line or "hang: " in line]
    assert "mine.py:14 in loss" in told, told
    host = re.escape(socket.gethostname())
    # Gloo ends rank 1 or makes it wait, by what arrives first.
    assert re.search(rf"rank 1 on {host}: all_reduce( #\d+ of \[3\])?; ", told), told
    # Where gloo ends rank 1, rank 0 may fail before it was asked; test_diagnose has the text of
    # both sides.
    rank_0 = re.search(rf"(the others|rank 0 on {host}): all_reduce #\d+ of \[\d+\]", told)
    assert rank_0 or "gloo aborted rank 1" in told, told
