"""Killed with SIGKILL while it writes, replaces or removes, the store never loses a saved
checkpoint."""

from __future__ import annotations

import os
import subprocess
import sys
import tempfile
from pathlib import Path

import pytest

# In memory where that can be: flushing costs nothing there, and SIGKILL is as sudden as on any
# disk.
MEMORY = "/dev/shm" if os.access("/dev/shm", os.W_OK) else None


@pytest.mark.slow
@pytest.mark.usefixtures("warm")
def test_killed_at_every_moment_and_at_any_time() -> None:
    script = Path(__file__).with_name("crashes.py")
    with tempfile.TemporaryDirectory(dir=MEMORY, prefix="drumline-") as folder:
        result = subprocess.run(
            [sys.executable, str(script), folder],
            env={**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)},
            capture_output=True,
            text=True,
            timeout=120,
        )
    assert result.returncode == 0, result.stderr
