"""Who attacks: hosts of their own, as the tests of several nodes have them, and another user of
this machine."""

from __future__ import annotations

import os
import pwd
import shutil
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.multinode.conftest import make_testbed, pytest_collection_modifyitems
from tests.multinode.needs import SEARCH_PATH

__all__ = ["make_testbed", "pytest_collection_modifyitems"]


@pytest.fixture(scope="session")
def other_user() -> Iterator[int]:
    """The number of a user who may do what every user may, and no more."""
    if os.geteuid() != 0 or (add := shutil.which("useradd", path=SEARCH_PATH)) is None:
        pytest.skip("only root can make another user, with useradd")
    remove = add.replace("useradd", "userdel")
    prefix = "attacker-"
    for user in pwd.getpwall():  # of tests that were killed
        pid = user.pw_name.removeprefix(prefix)
        if pid != user.pw_name and not Path("/proc", pid).exists():
            subprocess.run([remove, user.pw_name], check=False)
    name = f"{prefix}{os.getpid()}"
    subprocess.run([add, "--no-create-home", name], check=True)
    yield pwd.getpwnam(name).pw_uid
    subprocess.run([remove, name], check=True)
