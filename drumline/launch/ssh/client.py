"""Runs a command on another host with OpenSSH's client and the user's config, keys and jump hosts.

A failure is explained from ssh's exit code and messages: what happened, and what to do.
"""

from __future__ import annotations

import re
import shlex
from collections.abc import Mapping, Sequence
from pathlib import PurePath
from typing import NamedTuple

from drumline.base.errors import DrumlineError, PreflightError, TrainingError, UsageError
from drumline.launch.hosts import Host

CONNECT_TIMEOUT_S = 10
ALIVE_INTERVAL_S = 5
SSH_OPTIONS = (
    "-oBatchMode=yes",  # never ask for a password
    f"-oConnectTimeout={CONNECT_TIMEOUT_S}",
    # A cut connection stays open in ssh. Where we send heartbeats of our own
    # (`host_connection.py`), ssh has more time.
    f"-oServerAliveInterval={ALIVE_INTERVAL_S}",
    "-oServerAliveCountMax=5",
    # An existing shared connection may be used; one that we open is not shared, and ends with us.
    "-oControlMaster=no",
    "-oForwardAgent=no",
    "-oForwardX11=no",
)
SSH_FAILED = 255
# ssh's messages, what each means, and what to do; the first match counts.
OF_SSH = (
    (
        r"Could not resolve hostname",
        "its name does not resolve here",
        "check the name, and add it to DNS or /etc/hosts: `ssh {host}` must work",
    ),
    (
        r"Permission denied",
        "it rejected the ssh key",
        "`ssh {host}` must work without a password: ssh-copy-id {host}",
    ),
    (
        r"Host key verification failed|REMOTE HOST IDENTIFICATION HAS CHANGED",
        "its host key is not the known one",
        "run `ssh {host}` once and check what it asks",
    ),
    (
        r"Connection refused",
        "it refuses ssh connections",
        "start sshd on {host}, or set its port in ~/.ssh/config",
    ),
    (
        r"during banner exchange",
        "its sshd accepts the connection and does not answer: it hangs, or the host is overloaded",
        "restart sshd on {host} from its console",
    ),
    (
        r"timed out|No route to host|Network is unreachable|not responding",
        "it is unreachable: it is down, or a firewall drops the packets",
        "start {host}, or open its ssh port (TCP 22)",
    ),
)
# Messages of `env` and Python on the host:
OF_COMMAND = (
    (
        r"cannot change directory",
        "the folder {cwd} does not exist there",
        "copy it there (`drumline launch --sync` does), or share it between hosts",
    ),
    (
        r"unrecognized option.*chdir|illegal option",
        "its `env` does not know --chdir",
        "install GNU coreutils 8.28 or later",
    ),
    (
        r"{python}.*(No such file|not found|Permission denied)",
        "there is no Python at {python}",
        "set its path on the hosts: --python PATH",
    ),
    (
        r"No module named|ModuleNotFoundError|SyntaxError|ImportError",
        "{python} cannot import drumline there",
        "install the same version there, or set the Python that has it: --python PATH",
    ),
)
STUCK = (
    (
        r"",
        "ssh connects, but nothing starts",
        "check what `ssh {host} {python} -V` waits for: the login's own commands, or a file system",
    ),
)


def ssh_client(flag_value: str | None, environment: Mapping[str, str]) -> list[str]:
    """The words that call ssh: `--ssh 'ssh -F file'`, else DRUMLINE_SSH, else plain `ssh`."""
    text = flag_value or environment.get("DRUMLINE_SSH") or "ssh"
    try:
        words = shlex.split(text)
    except ValueError as error:
        raise UsageError(
            f"--ssh {text!r} cannot be read: {error}", next_step="close its quotes"
        ) from error

    return words or ["ssh"]


def ssh_words(
    client: Sequence[str],
    host: Host,
    command: Sequence[str],
    *,
    cwd: PurePath,
) -> list[str]:
    """The local command that runs a command on that host, in that folder. Secrets go through its
    stdin: anyone who can list processes can read a command line, on either host."""
    # ssh passes one text to the remote shell, so it is quoted as a whole.
    remote = shlex.join(["env", f"--chdir={cwd}", *command])
    return [*client, *SSH_OPTIONS, "-T", "--", host.name, remote]


def remote_module(module: str, python: str, python_path: str | None) -> list[str]:
    """The words that run it, as arguments of `env`."""
    words = [python, "-m", module]
    return [f"PYTHONPATH={python_path}", *words] if python_path else words


def no_client(word: str, error: OSError) -> PreflightError:
    """The error when this machine cannot start ssh."""
    what = f"{word} cannot be started: {error.strerror}"
    return PreflightError(what, next_step="install OpenSSH's client, or set how to call it: --ssh")


class SshProblem(NamedTuple):
    """Why a command failed, with the last line of output; and what to do."""

    what: str
    next_step: str


def ssh_problem(
    host: str,
    code: int,
    output: Sequence[str],
    *,
    python: str,
    cwd: str,
    is_stuck: bool = False,
) -> SshProblem:
    """Why a command over ssh failed. `is_stuck`: it did not start, and was ended."""
    place = {"host": host, "python": python, "cwd": cwd}
    explanations: Sequence[tuple[str, str, str]] = OF_COMMAND
    if is_stuck:
        explanations = STUCK
    elif code == SSH_FAILED:
        explanations = OF_SSH

    last = last_line(output) or f"exit code {code}"
    for pattern, what, step in explanations:
        if re.search(pattern.replace("{python}", re.escape(python)), "\n".join(output)):
            return SshProblem(f"{what.format(**place)} ({last})", step.format(**place))

    what = "ssh could not log in" if code == SSH_FAILED else "its program exited"
    return SshProblem(f"{what} ({last})", f"check what `ssh {host}` says")


def last_line(output: Sequence[str]) -> str:
    """The last one that is not blank; empty if there is none."""
    return next((line.strip() for line in reversed(output) if line.strip()), "")


def not_reached(
    host: Host,
    code: int,
    output: Sequence[str],
    *,
    python: str,
    cwd: str,
    is_stuck: bool = False,
) -> DrumlineError:
    """The error for a host on which no supervisor started."""
    problem = ssh_problem(host.name, code, output, python=python, cwd=cwd, is_stuck=is_stuck)
    return PreflightError(f"{host.name}: {problem.what}", next_step=problem.next_step)


def was_lost(host: Host, code: int | None, output: Sequence[str]) -> DrumlineError:
    """The error for a host on which ranks ran. The host may be up: only the connection is known to
    be lost."""
    is_closed = code is None or code < 0 or code == SSH_FAILED
    unknown = "it was closed" if is_closed else f"its supervisor exited with {code}"
    return TrainingError(
        f"the connection to {host.name} was lost: {last_line(output) or unknown}",
        next_step="check that it is up and its network works; its part of the job has ended, or will within seconds",
    )
