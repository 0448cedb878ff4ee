"""Why a host did not answer over ssh, and what to type: from ssh's exit code and its last words."""

from __future__ import annotations

import shlex
from typing import NamedTuple

SSH_FAILED = 255
NOT_FOUND = 127
NO_FOLDER = 125


class Trouble(NamedTuple):
    """A cause, and its remedy."""

    what: str
    fix: str


# The first words that are found decide; {} is the host as ssh takes it.
SAID = (
    ("could not resolve hostname", "its name does not resolve here", "add {} to /etc/hosts or DNS, or give an address"),
    ("connection refused", "nothing listens at its ssh port", "start sshd on {}"),
    ("no route to host", "the host is down, or has no way to here", "start {} and check its network"),
    ("timed out", "no answer at its ssh port: it is down, or drops packets", "start {}, or open TCP 22 to it"),
    ("permission denied", "ssh may not log in without a password", "ssh-copy-id {}"),
    ("host key verification failed", "its host key is not the known one", "ssh {} once by hand, and compare the key"),
    ("no module named", "its Python has no drumline", "install drumline on {}, or name another Python with --python"),
)  # fmt: skip


def trouble(host: str, code: int | None, words: str) -> Trouble:
    """Of a host that ssh (or the program behind it) gave up on."""
    last = words.splitlines()[-1].strip() if words else ""
    for said, what, fix in SAID:
        if said in words.lower():
            return Trouble(f"{what} ({last})", fix.format(shlex.quote(host)))
    if code == NO_FOLDER:
        return Trouble(
            f"this folder is not there ({last})", "run doctor in a folder that every host has, or copy it"
        )
    if code == NOT_FOUND or "no such file" in words.lower():
        return Trouble(
            f"a program is missing there ({last})", "give the path of Python on that host with --python"
        )
    how = "without a word" if not last else f"with: {last}"
    return Trouble(
        f"the doctor's program ended {how} (exit code {code})",
        f"ssh {shlex.quote(host)} true, and look what it says",
    )
