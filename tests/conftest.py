"""Guards around every test: no process, no thread and no environment variable is left behind. For
tests that ask for them: commands that start with torch loaded, and small disks."""

from __future__ import annotations

import contextlib
import ctypes
import gc
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator, Set
from itertools import islice
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest
from hypothesis import settings

from tests import fork_server
from tests.warm import warm_python

if TYPE_CHECKING:
    from tests.store_server import Bucket

# pytest sets the first; torch or its libraries set the others when they are first loaded.
OWN_VARIABLES = {
    "PYTEST_CURRENT_TEST",
    "KMP_INIT_AT_FORK",
    "KMP_DUPLICATE_LIB_OK",
    "TORCHINDUCTOR_CACHE_DIR",
    "TRITON_CACHE_DIR",
}
HELPERS = (
    "multiprocessing.forkserver",
    "multiprocessing.resource_tracker",
    "tests.fork_server",
    "execnet",
)
HAS_LISTS = Path("/proc/thread-self/children").exists()


# A sidecar stays for some seconds after ranks that failed, for what is still to be said of them.
PATIENCE_S = 10.0
COLLECT_S = 60.0
STARTS_PROCESSES = {"cli", "multinode", "multiproc"}  # folders


def child_processes() -> set[int]:
    """Children of this process that still run, the multiprocessing helpers apart."""
    children = set()
    for pid in _children_of_any_state():
        with contextlib.suppress(FileNotFoundError, ProcessLookupError):
            entry = Path("/proc") / pid
            command = (entry / "cmdline").read_bytes().decode(errors="replace")
            if _state_and_parent(entry)[0] != "Z" and not any(
                helper in command for helper in HELPERS
            ):
                children.add(int(pid))
    return children


def _new_children(before: set[str]) -> set[int]:
    """Those that run. Most tests have started none, and that is found out quickly."""
    return (
        child_processes() - {int(pid) for pid in before}
        if _children_of_any_state() - before
        else set()
    )


def children_that_stay(before: Set[int] = frozenset()) -> Set[int]:
    """Those that were not there before. What was killed just now has a moment to go."""
    deadline = time.monotonic() + PATIENCE_S
    while (left := child_processes() - before) and time.monotonic() < deadline:
        time.sleep(0.02)
    return left


def _children_of_any_state() -> set[str]:
    """By the kernel's own lists: to look at every process of the machine would take longer than
    most tests do."""
    numbers = set()
    parents = [Path("/proc", str(parent), "task") for parent in ("self", *fork_server.attached())]
    for thread in (thread for parent in parents for thread in parent.glob("*")):
        with contextlib.suppress(FileNotFoundError, ProcessLookupError):
            numbers.update((thread / "children").read_text().split())
    return numbers if HAS_LISTS else _children_by_looking()


def _children_by_looking() -> set[str]:
    numbers = set()
    for entry in Path("/proc").glob("[0-9]*"):
        with contextlib.suppress(FileNotFoundError, ProcessLookupError):
            if _state_and_parent(entry)[1] == str(os.getpid()):
                numbers.add(entry.name)
    return numbers


def _state_and_parent(entry: Path) -> list[str]:
    return (entry / "stat").read_text().rpartition(")")[2].split()[:2]


# A suite that was started in the background ignores Ctrl-C, and so would all that tests send one
# to.
if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
    signal.signal(signal.SIGINT, signal.default_int_handler)

# Six processes of this suite share two cores: threads of torch would mostly wait for each other,
# and do so busily.
os.environ.setdefault("OMP_NUM_THREADS", "1")

# A property is tried with a few examples each time; `make soak-properties` tries many.
settings.register_profile("suite", max_examples=15, deadline=None)
settings.register_profile("soak", max_examples=1000, deadline=None)
settings.load_profile("suite")

# What is loaded for the tests stays to the end: the garbage collector need not look at it, now or
# later.
gc.disable()

# Orphans of a test become children of this process rather than of init, where nobody would see
# them.
ctypes.CDLL(None).prctl(fork_server.PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0)

SHARED = pytest.StashKey[tuple[Path, subprocess.Popen[bytes], int]]()


@pytest.hookimpl(optionalhook=True)
def pytest_configure_node(node: Any) -> None:
    """Of pytest-xdist, in the process that starts a worker: all workers have one process to fork
    servers from."""
    if SHARED not in node.config.stash:
        address = Path(tempfile.mkdtemp(prefix="drumline-tests-")) / "fork-server"
        node.config.stash[SHARED] = (address, *fork_server.start(address))
    node.workerinput["fork_server"] = str(node.config.stash[SHARED][0])


def pytest_configure(config: pytest.Config) -> None:
    if address := getattr(config, "workerinput", {}).get("fork_server"):
        fork_server.attach(address)


@pytest.hookimpl(tryfirst=True)
def pytest_collection(session: pytest.Session) -> None:
    """In a new checkout the first worker makes the bytecode of all tests; the others would make it
    again, each."""
    if (collected := _collected(session.config)) and session.config.workerinput[
        "workerid"
    ] != "gw0":  # type: ignore[attr-defined]
        deadline = time.monotonic() + COLLECT_S
        while not collected.exists() and time.monotonic() < deadline:
            time.sleep(0.05)


@pytest.hookimpl(trylast=True)
def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """pytest-xdist cuts the list into one part for each worker, and who is done takes from the end
    of another's part. So each part begins with its share of the tests that start processes, and no
    long one is left for the end. Each worker begins at another place of its share: some wait for a
    network while others compute."""
    if num_workers := getattr(config, "workerinput", {}).get("workercount"):
        shares = _shares(
            [item for item in items if STARTS_PROCESSES.intersection(item.path.parts)], num_workers
        )
        others = [item for item in items if not STARTS_PROCESSES.intersection(item.path.parts)]
        if max(map(len, shares)) <= len(items) // num_workers:
            sizes = [(len(items) + number) // num_workers for number in range(num_workers)]
            rest = iter(others)
            items[:] = [
                item
                for share, size in zip(shares, sizes, strict=True)
                for item in [*share, *islice(rest, size - len(share))]
            ]


def _shares(items: list[pytest.Item], num_workers: int) -> list[list[pytest.Item]]:
    """The tests, dealt out; those of a module that share a fixture stay together."""
    groups: dict[object, list[pytest.Item]] = {}
    for item in items:
        scopes = {
            fixture.scope
            for fixtures in item._fixtureinfo.name2fixturedefs.values()
            for fixture in fixtures
        }  # type: ignore[attr-defined]
        groups.setdefault(item.path if "module" in scopes else item, []).append(item)
    shares = []
    for number in range(num_workers):
        own_groups = list(groups.values())[number::num_workers]
        begin = len(own_groups) * number // num_workers
        shares.append([item for group in own_groups[begin:] + own_groups[:begin] for item in group])
    return shares


def _collected(config: pytest.Config) -> Path | None:
    """The file that says that a worker has all tests."""
    address = getattr(config, "workerinput", {}).get("fork_server")
    return Path(address).with_name("collected") if address else None


def pytest_unconfigure(config: pytest.Config) -> None:
    if SHARED in config.stash:
        address, process, alive = config.stash[SHARED]
        os.close(alive)
        process.wait()
        shutil.rmtree(address.parent)


def pytest_collection_finish(session: pytest.Session) -> None:
    if collected := _collected(session.config):
        collected.touch()
    gc.freeze()
    gc.enable()


def _gone(what: str, leftover: set[object]) -> None:
    assert not leftover, f"the test left {what} behind: {leftover}"


@pytest.fixture
def small_disk(tmp_path: Path) -> Iterator[Callable[..., Path]]:
    """`small_disk("size=1m")` mounts a tmpfs with these options; it is unmounted whatever
    happens."""
    mounted: list[Path] = []

    def mount(options: str, name: str = "") -> Path:
        folder = tmp_path / (name or f"disk-{len(mounted)}")
        folder.mkdir()
        command = ["mount", "-t", "tmpfs", "-o", options, "drumline-test", str(folder)]
        result = subprocess.run(command, capture_output=True, text=True)
        if result.returncode:
            pytest.skip(f"needs root, to mount a small disk: {result.stderr.strip()}")
        mounted.append(folder)
        return folder

    yield mount
    for folder in mounted:
        subprocess.run(["umount", "-l", str(folder)], check=True)


@pytest.fixture
def warm(
    tmp_path_factory: pytest.TempPathFactory, monkeypatch: pytest.MonkeyPatch
) -> Iterator[None]:
    """From here on, what the test starts with sys.executable has torch loaded."""
    with warm_python(tmp_path_factory.mktemp("warm") / "bin") as program:
        monkeypatch.setattr(sys, "executable", program)
        yield


@pytest.fixture(scope="session")
def aws_server() -> Iterator[str]:
    """The URL of a moto server: one for each process of the suite whose tests need it."""
    from tests.store_server import moto_server  # few tests need it

    with moto_server() as url:
        yield url


@pytest.fixture
def bucket(aws_server: str, monkeypatch: pytest.MonkeyPatch) -> Iterator[Bucket]:
    """An empty bucket in S3, which boto3 finds by its variables, and which is soon given up."""
    from drumline.storage import backends, object_store
    from tests.store_server import new_bucket, shared_loader, use_endpoint

    monkeypatch.setattr(object_store, "RETRY_AFTER_S", (0.01, 0.01))
    monkeypatch.setattr(backends, "MAX_ATTEMPTS", 1)
    use_endpoint(monkeypatch, aws_server)
    monkeypatch.setattr("botocore.session.create_loader", shared_loader)
    with new_bucket(aws_server) as made:
        yield made


@pytest.fixture(autouse=True)
def nothing_left_behind() -> Iterator[None]:
    environment = dict(os.environ)
    threads = set(threading.enumerate())
    children = _children_of_any_state()
    yield
    deadline = time.monotonic() + PATIENCE_S
    while time.monotonic() < deadline and (
        _new_children(children) or {t for t in threading.enumerate() if not t.daemon} - threads
    ):
        time.sleep(0.05)
    _gone("processes", set(_new_children(children)))
    _gone("threads", {t.name for t in set(threading.enumerate()) - threads if not t.daemon})
    changed = {
        k for k in environment.keys() | os.environ.keys() if environment.get(k) != os.environ.get(k)
    }
    _gone("environment variables", set(changed - OWN_VARIABLES))
