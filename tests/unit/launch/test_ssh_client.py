"""What went wrong with a host, in a sentence."""

from __future__ import annotations

import pytest

from drumline.base.errors import ExitCode
from drumline.launch.hosts import Host
from drumline.launch.ssh.client import not_reached, was_lost


@pytest.mark.parametrize(
    ("code", "output_line", "what", "step"),
    [
        (
            255,
            "ssh: Could not resolve hostname b: Name unknown",
            "its name does not resolve here",
            "check the name",
        ),
        (
            255,
            "me@b: Permission denied (publickey).",
            "it rejected the ssh key",
            "ssh-copy-id me@b",
        ),
        (
            255,
            "Host key verification failed.",
            "its host key is not the known one",
            "run `ssh me@b` once",
        ),
        (
            255,
            "ssh: connect to host b port 22: Connection refused",
            "it refuses ssh connections",
            "start sshd",
        ),
        (
            255,
            "ssh: connect to host b port 22: Connection timed out",
            "it is unreachable",
            "start me@b",
        ),
        (
            255,
            "Connection timed out during banner exchange",
            "its sshd accepts the connection",
            "restart sshd",
        ),
        (
            255,
            "kex_exchange_identification: odd",
            "ssh could not log in",
            "check what `ssh me@b` says",
        ),
        (
            125,
            "env: cannot change directory to '/c': No such file",
            "the folder /c does not exist there",
            "--sync",
        ),
        (
            125,
            "env: unrecognized option '--chdir=/c'",
            "its `env` does not know --chdir",
            "coreutils",
        ),
        (127, "env: '/p': No such file or directory", "there is no Python at /p", "--python PATH"),
        (126, "env: '/p': Permission denied", "there is no Python at /p", "--python PATH"),
        (1, "/p: No module named drumline", "/p cannot import drumline there", "the same version"),
        (9, "", "its program exited (exit code 9)", "check what"),
    ],
)
def test_a_host_that_was_not_reached(code: int, output_line: str, what: str, step: str) -> None:
    error = not_reached(
        Host("me@b"), code, ["Welcome", output_line] if output_line else [], python="/p", cwd="/c"
    )
    assert error.what.startswith(f"me@b: {what}")
    assert step in str(error.next_step)
    assert output_line in error.what
    assert error.exit_code is ExitCode.PREFLIGHT_FAILED


def test_a_host_that_was_lost() -> None:
    host = Host("b")
    assert was_lost(host, 255, ["Timeout, server b not responding."]).what == (
        "the connection to b was lost: Timeout, server b not responding."
    )
    assert was_lost(host, -15, []).what == "the connection to b was lost: it was closed"
    assert (
        was_lost(host, 137, []).what
        == "the connection to b was lost: its supervisor exited with 137"
    )
    assert was_lost(host, 255, []).exit_code is ExitCode.TRAINING_FAILED
