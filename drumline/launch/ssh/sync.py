"""`--sync`: copies the code of the current folder to the same path on every host.

rsync copies over the same ssh, and compares checksums; it adds and replaces, and deletes nothing.
"""

from __future__ import annotations

import os
import re
import shlex
import subprocess
from collections.abc import Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor
from fnmatch import fnmatchcase
from pathlib import Path, PurePosixPath

from drumline.base.errors import DrumlineError, PreflightError, UsageError
from drumline.base.rank_environment import own_variables
from drumline.launch.hosts import Host
from drumline.launch.ssh.client import SSH_OPTIONS, no_client, not_reached, ssh_words

# Never code, whatever a .gitignore says.
EXCLUDED = (
    ".git",
    "runs",
    ".venv",
    "venv",
    "__pycache__",
    ".mypy_cache",
    ".ruff_cache",
    ".pytest_cache",
    "*.pyc",
    ".DS_Store",
    "node_modules",
)
MAX_AT_ONCE = 32
# Messages of shells: `bash: line 1: rsync: command not found`, `sh: 1: rsync: not found`.
NOT_FOUND = re.compile(r"rsync: (command )?not found")
INSTALL = "install rsync (apt-get install rsync), or copy the code yourself and leave --sync out"


def copy_code(
    folder: Path,
    client: Sequence[str],
    hosts: Sequence[Host],
    exclude: Sequence[str] = (),
) -> None:
    """Copy to all hosts at once."""
    if folder in (Path.home(), Path("/")):
        raise UsageError(
            f"--sync would copy all of {folder}",
            next_step="go to the folder of the project first",
        )

    files = code_files(folder, exclude)
    if not files:
        raise UsageError(f"--sync: there is no file to copy in {folder}")

    with ThreadPoolExecutor(min(MAX_AT_ONCE, len(hosts))) as pool:
        copies = [pool.submit(_copy_to, host, folder, client, files) for host in hosts]

    problems = []
    for copy in copies:
        try:
            copy.result()
        except DrumlineError as error:
            problems.append(error)

    if len({error.what for error in problems}) > 1:
        what = "; ".join(error.what for error in problems)
        raise PreflightError(what, next_step=problems[0].next_step)

    if problems:
        raise problems[0]


def _copy_to(host: Host, folder: Path, client: Sequence[str], files: Sequence[str]) -> None:
    """Make the folder there, and copy the files into it."""
    target = Path(host.folder or folder)
    words = ["mkdir", "-p", "--", str(target)]
    command = ssh_words(client, host, words, cwd=PurePosixPath("/"))
    try:
        done = _run(command, "")
    except OSError as error:
        raise no_client(command[0], error) from error

    if done.returncode:
        output = done.stderr.splitlines()
        raise not_reached(host, done.returncode, output, python="", cwd=str(target))

    # By content: a file of the same size and time may still differ.
    command = ["rsync", "--archive", "--checksum", "--protect-args", "--from0", "--files-from=-"]
    command += ["-e", shlex.join([*client, *SSH_OPTIONS])]
    command += ["--", f"{folder}/", f"{host}:{target}/"]
    try:
        done = _run(command, "\0".join(files))
    except FileNotFoundError:
        raise UsageError(
            "--sync needs rsync, which is not installed here", next_step=INSTALL
        ) from None

    if NOT_FOUND.search(done.stderr):
        raise PreflightError(f"{host.name}: rsync is not installed there", next_step=INSTALL)
    if done.returncode:
        first_line = done.stderr.strip().partition("\n")[0] or f"exit code {done.returncode}"
        raise PreflightError(
            f"{host.name}: the code could not be copied: {first_line}",
            next_step=f"check whether {target} can be written to there",
        )


def _run(words: Sequence[str], text: str) -> subprocess.CompletedProcess[str]:
    """Run it with this text as its stdin."""
    return subprocess.run(
        words,
        env=own_variables(),
        input=text,
        capture_output=True,
        encoding="utf-8",
        errors="replace",
        check=False,
    )


# Which files are code


def code_files(folder: Path, exclude: Sequence[str] = ()) -> list[str]:
    """Paths below the folder: in a git repository what git would add, otherwise all; without what
    is excluded."""
    patterns = [*EXCLUDED, *(pattern.rstrip("/") for pattern in exclude)]
    paths = _of_git(folder)
    if paths is None:
        paths = [str(path.relative_to(folder)) for path in folder.rglob("*")]

    return sorted(
        path
        for path in set(paths)
        if not is_excluded(path, patterns) and _is_link_or_file(folder / path)
    )


def _is_link_or_file(path: Path) -> bool:
    return path.is_symlink() or path.is_file()


def is_excluded(path: str, patterns: Iterable[str]) -> bool:
    """A pattern is the name of a file or folder at any depth, or a path from the top; `*` matches
    anything."""
    whole = PurePosixPath(path)
    tops = [str(whole), *(str(parent) for parent in whole.parents)]
    names = {*whole.parts, *tops} - {"."}
    return any(fnmatchcase(name, pattern) for pattern in patterns for name in names)


def _of_git(folder: Path) -> list[str] | None:
    """The paths, or None outside a repository."""
    command = ["git"]
    # A repository may name commands for git to run, and may not be trusted.
    for setting in ("core.fsmonitor=", "core.hooksPath=/dev/null", "protocol.allow=never"):
        command += ["-c", setting]

    command += ["ls-files", "--cached", "--others", "--exclude-standard", "-z"]
    try:
        done = subprocess.run(command, cwd=folder, capture_output=True, check=True)
    except (OSError, subprocess.CalledProcessError):
        return None

    return [os.fsdecode(name) for name in done.stdout.split(b"\0") if name]
