"""What a launch over ssh does when sidecars have ended all ranks and say why. The sidecars here are stand-ins."""

from __future__ import annotations

from pathlib import Path

from tests.cli.test_diagnosis_command import SCRIPT, SENTENCE, SIDECAR, starts_of
from tests.multinode import processes
from tests.multinode.test_ssh_launch import Desk, MakeTestbed


def test_ranks_that_were_ended_on_all_hosts_restart_once_and_the_diagnosis_is_printed_once(
    make_testbed: MakeTestbed, tmp_path: Path
) -> None:
    desk = Desk(make_testbed("a", "b", warm=True), tmp_path)
    (tmp_path / "stands.py").write_text(SCRIPT)
    (tmp_path / "sidecar.py").write_text(SIDECAR)
    job = desk.launch(
        *("--hosts", "a,b", "--procs", "1", "--max-restarts", "1", "--logs", "logs"),
        *("stands.py", "hang", "restart", "2"),
    )
    job.wait_for("restarting the ranks")
    secret = starts_of(tmp_path, 0)[0]["DRUMLINE_SECRET"]
    assert not any(secret in processes.command(pid) for host in desk.bed for pid in host.space.pids())
    code, text = job.wait(), job.text()
    assert code == 70, text
    told = [starts_of(tmp_path, rank) for rank in range(2)]
    assert [len(one) for one in told] == [2, 2], text
    assert len({one["DRUMLINE_SECRET"] for each in told for one in each}) == 2, "each start has its own"
    for first, second in zip(*told, strict=True):
        assert first["DRUMLINE_SECRET"] == second["DRUMLINE_SECRET"]
        assert first["DRUMLINE_WATCH_NODES"] == second["DRUMLINE_WATCH_NODES"]
        assert [word.partition(":")[0] for word in first["DRUMLINE_WATCH_NODES"].split(",")] == ["a", "b"]
    assert text.count(SENTENCE) == 2, "before the restart, and as the last word"
    assert text.endswith(f"drumline: {SENTENCE}\ndrumline: logs in logs on each host\n")
    assert "failed first" not in text
    assert secret not in text + "".join(path.read_text() for path in (tmp_path / "logs").iterdir())
