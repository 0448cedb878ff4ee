"""Why a host could not be reached or was lost: from what ssh said and its exit code to a sentence and what to do."""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import NamedTuple

from drumline.errors import DrumlineError, PreflightError, TrainingError
from drumline.launch.hosts import Host

SSH_FAILED = 255
# What the controller adds when it has waited long enough.
NOT_STARTED = "nothing has started within"
STUCK = (
    NOT_STARTED,
    "ssh is there, but nothing starts",
    "see what `ssh {host} {python} -V` waits for: the login's own commands, or a file system",
)
# What is said, what that means, and what to do about it; the first that fits counts. By ssh itself:
OF_SSH = (
    (
        r"Could not resolve hostname",
        "its name is not known here",
        "check the name, and add it to DNS or /etc/hosts: `ssh {host}` must work",
    ),
    (
        r"Permission denied",
        "it refused our key",
        "`ssh {host}` must work without a password: ssh-copy-id {host}",
    ),
    (
        r"Host key verification failed|REMOTE HOST IDENTIFICATION HAS CHANGED",
        "its host key is not the known one",
        "type `ssh {host}` once and look at what it asks",
    ),
    (
        r"Connection refused",
        "nothing listens for ssh there",
        "start sshd on {host}, or give its port in ~/.ssh/config",
    ),
    (
        r"during banner exchange",
        "it lets ssh connect, and then says nothing: its sshd hangs, or the host is overloaded",
        "restart sshd on {host} from its console",
    ),
    (
        r"timed out|No route to host|Network is unreachable|not responding",
        "it does not answer: it is down, or a firewall drops what is sent to it",
        "start {host}, or open its ssh port (TCP 22)",
    ),
)
# By `env` or Python over there:
OVER_THERE = (
    (
        r"cannot change directory",
        "the folder {cwd} is not there",
        "copy it there (`drumline launch --sync` does), or share it between hosts",
    ),
    (
        r"unrecognized option.*chdir|illegal option",
        "its `env` knows no --chdir",
        "install GNU coreutils 8.28 or later",
    ),
    (
        r"{python}.*(No such file|not found|Permission denied)",
        "there is no Python at {python}",
        "say where it is on the hosts: --python PATH",
    ),
    (
        r"No module named|ModuleNotFoundError|SyntaxError|ImportError",
        "drumline cannot be loaded by {python} there",
        "install the same version there, or say where it is installed: --python PATH",
    ),
)


class Cause(NamedTuple):
    """Why, with what was said last; and what to do."""

    what: str
    next_step: str


def known_cause(host: str, code: int | None, said: Sequence[str], *, python: str, cwd: str) -> Cause | None:
    """Of a command over ssh that has failed; None when nothing of what was said is known."""
    text, place = "\n".join(said), {"host": host, "python": python, "cwd": cwd}
    for pattern, cause, step in (STUCK, *(OF_SSH if code == SSH_FAILED else OVER_THERE)):
        if re.search(pattern.replace("{python}", re.escape(python)), text):
            return Cause(f"{cause.format(**place)} ({last_words(said, code)})", step.format(**place))
    return None


def last_words(said: Sequence[str], code: int | None) -> str:
    return next((line.strip() for line in reversed(said) if line.strip()), f"exit code {code}")


def not_reached(host: Host, code: int, said: Sequence[str], *, python: str, cwd: str) -> DrumlineError:
    """A host on which nothing has begun."""
    what = "ssh could not log in" if code == SSH_FAILED else "the supervisor could not be started"
    unknown = Cause(f"{what} ({last_words(said, code)})", f"see what `ssh {host.name}` says")
    cause = known_cause(host.name, code, said, python=python, cwd=cwd) or unknown
    return PreflightError(f"{host.name}: {cause.what}", next_step=cause.next_step)


def was_lost(host: Host, code: int | None, said: Sequence[str]) -> DrumlineError:
    """A host on which ranks ran. It may be there: what is known is that the connection is not."""
    last = next((line for line in reversed(said) if line.strip()), None)
    is_silent = code is None or code < 0 or code == SSH_FAILED
    why = last or ("it was closed" if is_silent else f"its supervisor exited with {code}")
    return TrainingError(
        f"the connection to {host.name} was lost: {why}",
        next_step="see whether it is up and its network works; its part of the job has ended, or will within seconds",
    )
