"""`--sync`: the code of the current folder goes to the same place on every host, and is proved to be there.

rsync copies over the same ssh; it adds and replaces, and deletes nothing. Then every host says what its files hold, and
a host where they differ stops the start.
"""

from __future__ import annotations

import json
import re
import shlex
import subprocess
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path, PurePosixPath

from drumline.errors import PreflightError, UsageError
from drumline.launch.hosts import Host
from drumline.launch.node import guard
from drumline.launch.ssh.client import OPTIONS, ssh_words
from drumline.launch.ssh.errors import not_reached
from drumline.launch.ssh.tree import code_files, digests, tree_digest
from drumline.launch.topology import own_variables
from drumline.untrusted import parse_json

MAX_AT_ONCE = 32
MAX_NAMED = 5
GRACE_S = 2.0
# As shells say it: `bash: line 1: rsync: command not found`, `sh: 1: rsync: not found`.
NOT_FOUND = re.compile(r"rsync: (command )?not found")
INSTALL = "apt-get install rsync (or your system's way), or copy the code yourself and leave --sync out"


@dataclass(frozen=True)
class Sync:
    """The way to the hosts, and the folder."""

    folder: Path
    client: Sequence[str]
    python: str
    python_path: str | None = None
    job: str = field(default_factory=guard.new_job)
    """What is started here carries this name, and ends with us."""

    def run(self, hosts: Sequence[Host], exclude: Sequence[str] = ()) -> str:
        """Copy to all hosts at once; returns the hash of the code."""
        if self.folder in (Path.home(), Path("/")):
            raise UsageError(
                f"--sync would copy all of {self.folder}", next_step="go to the folder of the project first"
            )
        files = digests(self.folder, code_files(self.folder, exclude))
        if not files:
            raise UsageError(f"--sync: there is no file to copy in {self.folder}")
        watcher = guard.Guard(self.job, GRACE_S)
        with ThreadPoolExecutor(min(MAX_AT_ONCE, len(hosts))) as pool:
            try:
                errors = list(pool.map(_caught(lambda host: self._to(host, files)), hosts))
            finally:
                # After Ctrl-C too: the pool waits for its threads, and those for what they have started.
                watcher.close(has_succeeded=False)
        problems = [error for error in errors if error is not None]
        if len({error.what for error in problems}) > 1:
            raise PreflightError("; ".join(error.what for error in problems), next_step=problems[0].next_step)
        if problems:
            raise problems[0]
        return tree_digest(files)

    def _to(self, host: Host, files: dict[str, str]) -> None:
        self._call(host, ["mkdir", "-p", "--", str(self.folder)], "", cwd=PurePosixPath("/"))
        self._copy(host, files)
        given = [f"PYTHONPATH={self.python_path}"] if self.python_path else []
        command = [*given, self.python, "-m", "drumline.launch.ssh.tree"]
        answer = self._call(host, command, json.dumps(files), cwd=self.folder)
        if different := _names(host, answer):
            named = ", ".join(different[:MAX_NAMED]) + (", ..." if len(different) > MAX_NAMED else "")
            raise PreflightError(
                f"{host.name} has other code in {self.folder} after --sync: {named}",
                next_step="see whether something writes there, or --exclude what is no code",
            )

    def _copy(self, host: Host, files: dict[str, str]) -> None:
        options = [word for option in OPTIONS for word in ("-o", option)]
        # By content: a file of the same size and time may still be another one.
        command = ["rsync", "--archive", "--checksum", "--protect-args", "--from0", "--files-from=-"]
        command += [
            "-e",
            shlex.join([*self.client, *options]),
            "--",
            f"{self.folder}/",
            f"{host.name}:{self.folder}/",
        ]
        try:
            done = self._run(command, "\0".join(files))
        except FileNotFoundError:
            raise UsageError("--sync needs rsync, which is not installed here", next_step=INSTALL) from None
        if NOT_FOUND.search(done.stderr):
            raise PreflightError(f"{host.name}: rsync is not installed there", next_step=INSTALL)
        if done.returncode:
            last = (done.stderr.strip().splitlines() or [f"exit code {done.returncode}"])[0]
            raise PreflightError(
                f"{host.name}: the code could not be copied: {last}",
                next_step=f"see whether {self.folder} can be written to there",
            )

    def _run(self, words: Sequence[str], text: str) -> subprocess.CompletedProcess[str]:
        return subprocess.run(
            words,
            env={**own_variables(), guard.VARIABLE: self.job},
            input=text,
            capture_output=True,
            encoding="utf-8",
            errors="replace",
            check=False,
        )

    def _call(self, host: Host, command: Sequence[str], text: str, *, cwd: PurePosixPath | Path) -> str:
        words = ssh_words(self.client, host, command, cwd=cwd)
        try:
            done = self._run(words, text)
        except OSError as error:
            raise UsageError(
                f"{words[0]} cannot be started: {error.strerror}",
                next_step="install OpenSSH's client, or say how to call it: --ssh",
            ) from error
        if done.returncode:
            said = done.stderr.splitlines()
            raise not_reached(host, done.returncode, said, python=self.python, cwd=str(self.folder))
        return done.stdout


def _names(host: Host, answer: str) -> list[str]:
    try:
        names = parse_json(answer.rstrip().rpartition("\n")[2])
    except ValueError:
        names = None
    if not isinstance(names, list) or not all(isinstance(name, str) for name in names):
        raise PreflightError(
            f"{host.name} does not say which files it has after --sync",
            next_step=f"see what a login to {host.name} prints, or copy the code yourself and leave --sync out",
        )
    return names


def _caught(call: Callable[[Host], None]) -> Callable[[Host], PreflightError | UsageError | None]:
    """So that one host's error does not hide that another was given up."""

    def caught(host: Host) -> PreflightError | UsageError | None:
        try:
            call(host)
        except (PreflightError, UsageError) as error:
            return error
        return None

    return caught
