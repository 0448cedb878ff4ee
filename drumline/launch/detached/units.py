"""Has the system start the keeper of a job: now and after each reboot as a user unit of systemd,
elsewhere once, as a session of its own; and removes the unit."""

from __future__ import annotations

import os
import pwd
import re
import shutil
import subprocess
import sys
from collections.abc import Mapping, Sequence
from contextlib import suppress
from pathlib import Path

from drumline.base.errors import DrumlineError
from drumline.base.processes import processes_of_command
from drumline.base.untrusted import make_own_folder, open_append, replace_text
from drumline.launch.detached.job_folder import JobFolder

UNIT = """\
[Unit]
Description=drumline: {unit}
StartLimitIntervalSec=0

[Service]
ExecStart={words}
Restart=on-failure
RestartSec=5
KillMode=mixed
TimeoutStopSec={stop_s:.0f}
OOMPolicy=continue

[Install]
WantedBy=default.target
"""
KEEPER = "drumline.launch.detached.keeper"
# The users whose manager runs without a login.
LINGERING = Path("/var/lib/systemd/linger")
# Variables, specifiers and other escapes of ExecStart.
ESCAPED = str.maketrans({"\\": "\\\\", '"': '\\"', "\n": "\\n", "%": "%%", "$": "$$"})
# How long systemd waits for the keeper after the grace period of its ranks.
STOP_S = 15.0
TOOL_S = 20.0
# Variables of the ssh session that started the job, which do not outlive it.
OF_SESSION = re.compile(r"SSH_.*|XDG_(SESSION|RUNTIME|SEAT|VTNR).*|DBUS_.*|_|SHLVL|TERM|MAIL")
OWN_GROUP = Path("/proc/self/cgroup")
LOGIND = ("org.freedesktop.login1", "/org/freedesktop/login1", "org.freedesktop.login1.Manager")


def lasting_variables(environment: Mapping[str, str]) -> dict[str, str]:
    """Those with which a keeper runs, however it is started."""
    return {name: value for name, value in environment.items() if not OF_SESSION.fullmatch(name)}


def start_keeper(folder: JobFolder, *, grace_s: float) -> str:
    """Start it; what the user has to know about it, or nothing."""
    words = [sys.executable, "-m", KEEPER, str(folder.path)]
    if python_path := os.environ.get("PYTHONPATH"):
        words = ["/usr/bin/env", f"PYTHONPATH={python_path}", *words]
    linger = f"run `loginctl enable-linger {_user()}` there, with sudo if it is refused"
    later = "to change that for later jobs, "
    if shutil.which("systemctl") is None:
        reason = "it has no systemd; launch the job again after a reboot"
    elif not (LINGERING / _user()).exists():
        reason = f"without a login no user manager of systemd runs there; {later}{linger}"
    elif not _systemctl("show-environment"):
        check = f"check the service user@{os.geteuid()} there"
        reason = f"`systemctl --user` does not answer there; {later}{check}"
    else:
        _start_unit(folder, words, grace_s)
        return ""

    if _ends_with_login():
        raise DrumlineError(
            "the job would end with this login: logind.conf has KillUserProcesses=yes there",
            next_step=f"{linger}; then launch again",
        )
    with open_append(folder.log) as log:
        command = ["setsid", "--fork", *words]
        subprocess.run(command, stdin=subprocess.DEVNULL, stdout=log, stderr=log, check=False)
    return f"after a reboot of {os.uname().nodename} the job does not start again: {reason}"


def keepers(folder: JobFolder) -> list[int]:
    """The process of its keeper, from its start on."""
    return processes_of_command("-m", KEEPER, str(folder.path))


def remove(folder: JobFolder, *, stops: bool = False) -> None:
    """The unit of its keeper, if it has one. `stops`: the keeper too, and its next start."""
    unit = _unit_file(folder)
    if unit.is_file():
        _systemctl("disable", "--quiet", *(["--now"] if stops else []), unit.name)
        with suppress(OSError):
            unit.unlink()
        _systemctl("daemon-reload")


def quoted(words: Sequence[str]) -> str:
    """As ExecStart reads them."""
    return " ".join(f'"{word.translate(ESCAPED)}"' for word in words)


def _unit_file(folder: JobFolder) -> Path:
    """Where systemd looks for units of this user."""
    config_home = Path(os.environ.get("XDG_CONFIG_HOME") or Path.home() / ".config")
    return config_home / "systemd" / "user" / f"{folder.unit}.service"


def _user() -> str:
    """Whose manager starts the keeper."""
    return pwd.getpwuid(os.geteuid()).pw_name


def _start_unit(folder: JobFolder, words: Sequence[str], grace_s: float) -> None:
    """Write the unit, and have systemd start it now and after each reboot."""
    unit = _unit_file(folder)
    make_own_folder(unit.parent, follow_links=True)
    text = UNIT.format(unit=folder.unit, words=quoted(words), stop_s=grace_s + STOP_S)
    replace_text(unit, text)
    if not (_systemctl("daemon-reload") and _systemctl("enable", "--quiet", "--now", unit.name)):
        remove(folder, stops=True)
        raise DrumlineError(
            f"systemctl --user could not start {unit.name}",
            next_step="check that `systemctl --user` works there, or `loginctl disable-linger`",
        )


def _ends_with_login() -> bool:
    """Whether logind ends all processes of this login with it."""
    properties = ["KillUserProcesses", "KillOnlyUsers", "KillExcludeUsers"]
    done = _tool(["busctl", "get-property", *LOGIND, *properties], os.environ)
    answers = done.stdout.splitlines() if done else []
    if len(answers) != 3 or "/session-" not in OWN_GROUP.read_text(encoding="utf-8"):
        return False
    is_on, only, excluded = answers
    user = f'"{_user()}"'
    # root, if nobody is named
    if user in excluded or (excluded == "as 0" and os.geteuid() == 0):
        return False
    return is_on == "b true" if only == "as 0" else user in only


def _systemctl(*words: str) -> bool:
    """Whether it succeeded."""
    runtime = {"XDG_RUNTIME_DIR": f"/run/user/{os.geteuid()}"}
    done = _tool(["systemctl", "--user", *words], {**runtime, **os.environ})
    return done is not None and done.returncode == 0


def _tool(
    words: Sequence[str], environment: Mapping[str, str]
) -> subprocess.CompletedProcess[str] | None:
    """None: it is not installed, or does not end."""
    try:
        return subprocess.run(
            words,
            capture_output=True,
            env=dict(environment),
            encoding="utf-8",
            errors="surrogateescape",
            timeout=TOOL_S,
            check=False,
        )
    except (OSError, subprocess.SubprocessError):
        return None
