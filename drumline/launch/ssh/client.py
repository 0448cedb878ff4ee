"""How a command is started on another host: OpenSSH's own client, with the user's own config, keys and jump hosts."""

from __future__ import annotations

import shlex
from collections.abc import Mapping, Sequence
from pathlib import PurePath

from drumline.errors import UsageError
from drumline.launch.hosts import Host

VARIABLE = "DRUMLINE_SSH"
CONNECT_TIMEOUT_S = 10
# A cut network looks like silence, not like an end. Our own heartbeats notice first (`remote.py`), and say so.
ALIVE_EVERY_S = 5
ALIVE_COUNT = 5
OPTIONS = (
    "BatchMode=yes",  # nobody is there to type a password
    f"ConnectTimeout={CONNECT_TIMEOUT_S}",
    f"ServerAliveInterval={ALIVE_EVERY_S}",
    f"ServerAliveCountMax={ALIVE_COUNT}",
    # A connection that is there already may be used; one that we open is ours alone, and ends with us.
    "ControlMaster=no",
    "ForwardAgent=no",
    "ForwardX11=no",
)


def ssh_client(given: str | None, environment: Mapping[str, str]) -> list[str]:
    """The words that call ssh: `--ssh 'ssh -F file'`, else DRUMLINE_SSH, else plain `ssh`."""
    text = given or environment.get(VARIABLE) or "ssh"
    try:
        words = shlex.split(text)
    except ValueError as error:
        raise UsageError(f"--ssh {text!r} cannot be read: {error}", next_step="close its quotes") from error
    return words or ["ssh"]


def ssh_words(client: Sequence[str], host: Host, command: Sequence[str], *, cwd: PurePath) -> list[str]:
    """To be started here: the command on that host, in that folder. Nothing secret belongs into it: whoever may list
    processes reads it, here and there; secrets go through the command's stdin."""
    options = [word for option in OPTIONS for word in ("-o", option)]
    # ssh hands one text to the shell over there, so it is quoted as a whole here.
    remote = shlex.join(["env", f"--chdir={cwd}", *command])
    return [*client, *options, "-T", "--", host.name, remote]
