"""The Dockerfile's steps, one by one, over the root of this machine, and a pod in what they make, as
the kubelet would start it. Run in a mount and process namespace of its own, which takes all away:

    unshare --mount --pid --fork --mount-proc --kill-child python -m tests.multinode.image FOLDER

There is no registry here: this machine's own root, with a Python environment of its own, stands for
the base image. What it writes is one JSON line.
"""

from __future__ import annotations

import json
import os
import re
import shlex
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import yaml

ROOT = Path(__file__).parents[2]
TARGET = "cpu"
# The package index of this machine has torch for CPUs.
ARGUMENTS = {"TORCH_INDEX": "https://pypi.org/simple"}
PATH = "/venv/bin:/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin"
# It becomes process 1, a user without rights, and its root cannot be written to.
CONTAINER = """
set -e
mount --rbind {root} {root}
mount -o remount,bind,ro {root}
mount -t proc proc {root}/proc
for volume in runs tmp dev/shm; do mount --bind {volumes}/$volume {root}/$volume; done
cd {root}
exec chroot {root} setpriv --reuid 1000 --regid 1000 --clear-groups --no-new-privs \
    --bounding-set=-all --inh-caps=-all env -i --chdir=/work "$@"
"""


def instructions(text: str) -> Iterator[tuple[str, str]]:
    joined = re.sub(r"\\\n\s*", " ", text)
    for line in joined.splitlines():
        if line and not line.startswith("#"):
            keyword, _, rest = line.partition(" ")
            yield keyword, rest


class Stage:
    """The root of a stage: a layer over that of the stage that it begins from."""

    def __init__(self, folder: Path, name: str, parent: Stage | None) -> None:
        self.variables = dict(parent.variables) if parent else {}
        self.cwd = parent.cwd if parent else "/"
        self.layers = [folder / f"{name}.layer", *(parent.layers if parent else [])]
        self.root = folder / f"{name}.root"
        work = folder / f"{name}.work"
        for path in (self.layers[0], self.root, work):
            path.mkdir()
        lower = ":".join([*map(str, self.layers[1:]), "/"])
        options = f"lowerdir={lower},upperdir={self.layers[0]},workdir={work}"
        _run("mount", "-t", "overlay", "overlay", "-o", options, str(self.root))
        _run("mount", "--rbind", "/dev", f"{self.root}/dev")
        if parent is None:
            _run("chroot", str(self.root), "python3", "-m", "venv", "/venv")
            (self.root / "root").chmod(0o755)  # where this machine's Python may lie
            for name in ("passwd", "group"):  # a base image has no user 1000
                file = self.root / "etc" / name
                lines = file.read_text().splitlines(keepends=True)
                file.write_text("".join(line for line in lines if ":1000:" not in line))

    def environment(self) -> list[str]:
        pip = {name: value for name, value in os.environ.items() if name.startswith("PIP_")}
        variables = {"PATH": PATH, **pip, **self.variables}
        return [f"{name}={value}" for name, value in variables.items()]

    def run(self, command: str) -> None:
        enter = ["chroot", str(self.root), "env", "-i", f"--chdir={self.cwd}"]
        _run(*enter, *self.environment(), "sh", "-ec", command)

    def copy(self, words: list[str], stages: dict[str, Stage]) -> None:
        source = ROOT
        if words[0].startswith("--from="):
            source = stages[words.pop(0).removeprefix("--from=")].root
        *names, target = words
        folder = self.root / f"{self.cwd}/{target}".replace("//", "/").lstrip("/")
        if target.startswith("/"):
            folder = self.root / target.lstrip("/")
        is_folder = target.endswith("/") or target == "./"
        (folder if is_folder else folder.parent).mkdir(parents=True, exist_ok=True)
        for name in names:
            _run("cp", "-r", f"{source}/{name.lstrip('/')}", str(folder))


def build(folder: Path) -> Stage:
    stages: dict[str, Stage] = {}
    stage = None
    for keyword, rest in instructions((ROOT / "Dockerfile").read_text()):
        if keyword == "FROM":
            parent, _, name = rest.split()
            if name not in ("base", "wheel", TARGET):
                break  # of another target
            stage = stages[name] = Stage(folder, name, stages.get(parent))
            continue
        assert stage is not None
        print(f"{keyword} {rest}", file=sys.stderr, flush=True)
        if keyword == "ENV":
            stage.variables |= dict(word.split("=", 1) for word in shlex.split(rest))
        elif keyword == "ARG":
            name, _, value = rest.partition("=")
            stage.variables[name] = ARGUMENTS.get(name, value)
        elif keyword == "WORKDIR":
            stage.cwd = rest
            (stage.root / rest.lstrip("/")).mkdir(parents=True, exist_ok=True)
        elif keyword == "RUN":
            stage.run(rest)
        elif keyword == "COPY":
            stage.copy(rest.split(), stages)
        else:
            assert keyword in ("USER", "CMD"), keyword
    return stages[TARGET]


def _run(*command: str) -> None:
    done = subprocess.run(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, check=False)
    assert done.returncode == 0, f"{command}\n{done.stdout.decode(errors='replace')}"


class Pod:
    """A container of a manifest, in an image."""

    def __init__(self, stage: Stage, folder: Path, container: dict[str, object]) -> None:
        self.stage = stage
        self.container = container
        self.volumes = folder / "volumes"
        for name in ("runs", "tmp", "dev/shm"):
            volume = self.volumes / name
            volume.mkdir(parents=True, exist_ok=True)
            volume.chmod(0o777)
            (stage.root / name).mkdir(exist_ok=True)

    def start(self, log: Path) -> subprocess.Popen[bytes]:
        script = CONTAINER.format(root=self.stage.root, volumes=self.volumes)
        entries = self.container["env"]
        assert isinstance(entries, list)
        values = {entry["name"]: entry.get("value", "127.0.0.1") for entry in entries}
        variables = [f"PATH={PATH}", *(f"{name}={value}" for name, value in values.items())]
        words = [*self.container["command"], *self.container["args"]]  # type: ignore[misc]
        unshare = ["unshare", "--mount", "--pid", "--fork", "--kill-child=KILL"]
        with log.open("wb") as output:
            return subprocess.Popen(
                [*unshare, "sh", "-c", script, "sh", *variables, "OMP_NUM_THREADS=1", *words],
                stdout=output,
                stderr=subprocess.STDOUT,
            )

    def probe(self, pid: int) -> int:
        """The readiness probe, in the container of this process."""
        probe = self.container["readinessProbe"]["exec"]["command"]  # type: ignore[index]
        enter = ["nsenter", f"--target={pid}", "--mount", "--pid", "--root"]
        setpriv = ["setpriv", "--reuid", "1000", "--regid", "1000", "--clear-groups"]
        done = subprocess.run(
            [*enter, *setpriv, "env", "-i", f"PATH={PATH}", *probe],
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
            check=False,
        )
        return done.returncode


def first_process(entry: subprocess.Popen[bytes]) -> int:
    """The container's process 1, by its number out here."""
    children = Path(f"/proc/{entry.pid}/task/{entry.pid}/children").read_text().split()
    return int(children[0]) if children else entry.pid


def main(folder: Path, manifest: Path) -> None:
    _run("mount", "--make-rprivate", "/")
    _run("mount", "-t", "tmpfs", "-o", "size=6g", "tmpfs", str(folder))
    documents = list(yaml.safe_load_all(manifest.read_text()))
    container = documents[1]["spec"]["template"]["spec"]["containers"][0]
    pod = Pod(build(folder), folder, container)
    starts = [pod_until_ready(pod, folder / f"log-{number}") for number in (1, 2)]
    print(json.dumps(starts))


def pod_until_ready(pod: Pod, log: Path) -> dict[str, object]:
    """Start it; once it is ready, drain it."""
    entry = pod.start(log)
    readiness = None
    deadline = time.monotonic() + 120
    while entry.poll() is None and readiness != 0 and time.monotonic() < deadline:
        time.sleep(1)
        readiness = pod.probe(first_process(entry))
    if entry.poll() is None:
        os.kill(first_process(entry), signal.SIGTERM)
    return {"ready": readiness, "code": entry.wait(100), "text": log.read_text()}


if __name__ == "__main__":
    main(Path(sys.argv[1]), Path(sys.argv[2]))
