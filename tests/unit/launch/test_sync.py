"""`--sync` that is told to end in the middle; what it copies is looked at on real hosts, in `tests/multinode`."""

from __future__ import annotations

import signal
import threading
import time
from pathlib import Path

import pytest

from drumline.launch.hosts import Host
from drumline.launch.node import guard
from drumline.launch.ssh.sync import Sync


def test_ctrl_c_ends_what_was_started(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("drumline.launch.ssh.sync.GRACE_S", 0.2)
    code, client = tmp_path / "code", tmp_path / "ssh"
    code.mkdir()
    (code / "train.py").touch()
    client.write_text("#!/bin/sh\ntrap '' TERM INT\nsleep 1000\n")
    client.chmod(0o755)
    sync = Sync(code, [str(client)], "python")
    main = threading.main_thread().ident

    def interrupt() -> None:
        deadline = time.monotonic() + 20
        while len(guard.job_processes(sync.job)) < 4 and time.monotonic() < deadline:
            time.sleep(0.02)
        assert main
        signal.pthread_kill(main, signal.SIGINT)

    threading.Thread(target=interrupt).start()
    with pytest.raises(KeyboardInterrupt):
        sync.run([Host("a"), Host("b")])
    assert guard.job_processes(sync.job) == []
