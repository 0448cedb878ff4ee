"""A script under `drumline launch --watch` behaves as under Python itself: environment, output and
exit code."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from drumline.base.rank_environment import WATCH_FOLDER
from drumline.watch.heartbeat import Phase, read_heartbeat

ROOT = Path(__file__).parents[2]
RUNNER = ["-m", "drumline.parallel.scripts.script_runner"]
SCRIPTS = {
    "sees": '''"""What I am."""
from __future__ import annotations
import __main__, sys, sibling
print(__main__.__dict__ is globals(), sorted(globals()), __doc__, __file__, __package__, __cached__)
print(__spec__ and __spec__.name)
print(sys.argv, sys.path[0], sys.flags, type(__loader__), sibling.NAME, sys.stdin.read(), sys.stdout.line_buffering)
print([name for name in ("torch", "numpy") if name in sys.modules], hasattr(sys, "last_value"))
''',
    "raises": """
import atexit, sys, threading, time
atexit.register(lambda: print("at the end", sys.modules["__main__"].__dict__ is globals()))
threading.Thread(target=lambda: (time.sleep(0.1), print("a thread"))).start()
def inner():
    try:
        1 / 0
    except ZeroDivisionError as error:
        raise ValueError("two\\nlines") from error
inner()
""",
    "wrong": "x = 1\nif x\n",
    "hooked": "import sys\nsys.excepthook = lambda kind, value, trace: print('my', value, trace.tb_lineno)\n{}['a']\n",
    "leaves": "import sys\nsys.exit(3)\n",
    "leaves_with_words": "import sys\nprint('x', end='')\nsys.exit('words')\n",
    "breaks_off": "import os\nprint('lost')\nos._exit(4)\n",
    "is_killed": "import os\nos.kill(os.getpid(), 9)\n",
    "is_interrupted": "raise KeyboardInterrupt\n",
    "starts_others": """
import multiprocessing, os, sys
def double(x):
    return x * 2, __name__, sys.argv
print("loaded as", __name__, flush=True)
if __name__ == "__main__":
    for way in ("spawn", "fork"):
        with multiprocessing.get_context(way).Pool(1) as pool:
            print(pool.map(double, [1, 2]), flush=True)
    if os.fork() == 0:
        sys.exit(5)
    print(os.waitstatus_to_exitcode(os.wait()[1]))
""",
}


def run(*words: str, cwd: Path, watch: Path) -> tuple[int, str, str]:
    # Not the first of its node, which would start a sidecar.
    topology = {
        "RANK": "1",
        "WORLD_SIZE": "2",
        "LOCAL_RANK": "1",
        "MASTER_ADDR": "a",
        "MASTER_PORT": "1",
    }
    # Python 3.12 warns of a fork beside other threads, and a watched process has one.
    quiet = {"PYTHONWARNINGS": "ignore:This process"}
    done = subprocess.run(
        [sys.executable, *words],
        cwd=cwd,
        env={**os.environ, **topology, **quiet, "PYTHONPATH": str(ROOT), WATCH_FOLDER: str(watch)},
        input="typed",
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )
    return done.returncode, done.stdout, done.stderr


@pytest.mark.parametrize(
    ("words", "code", "last"),
    [
        (["scripts/sees.py", "-m", "--x"], 0, Phase.LEFT),
        (["link.py"], 0, Phase.LEFT),
        (["scripts/raises.py"], 1, Phase.FAILED),
        (["scripts/wrong.py"], 1, Phase.FAILED),
        (["scripts/hooked.py"], 1, Phase.FAILED),
        (["scripts/leaves.py"], 3, Phase.LEFT),
        (["scripts/leaves_with_words.py"], 1, Phase.LEFT),
        (["scripts/breaks_off.py"], 4, Phase.START),
        (["scripts/is_killed.py"], -9, Phase.START),
        (["scripts/is_interrupted.py"], -2, Phase.LEFT),
        (["scripts/starts_others.py", "a"], 0, Phase.LEFT),
        (["scripts/gone.py"], 2, Phase.LEFT),
        (["-m", "package.inside", "a"], 1, Phase.FAILED),
        (["-m", "package.gone"], 1, Phase.LEFT),
    ],
    ids=lambda value: value[-1] if isinstance(value, list) else "",
)
def test_as_under_python_itself(tmp_path: Path, words: list[str], code: int, last: Phase) -> None:
    (tmp_path / "scripts").mkdir()
    (tmp_path / "package").mkdir()
    for name, text in SCRIPTS.items():
        (tmp_path / "scripts" / f"{name}.py").write_text(text)
    (tmp_path / "scripts" / "sibling.py").write_text("NAME = __name__\n")
    (tmp_path / "link.py").symlink_to("scripts/sees.py")
    (tmp_path / "package" / "__init__.py").touch()
    inside = SCRIPTS["sees"].replace("sibling", "package.other as sibling", 1)
    (tmp_path / "package" / "inside.py").write_text(f"{inside}from . import other\nother.no_such\n")
    (tmp_path / "package" / "other.py").write_text("NAME = __name__\n")
    plain = run(*words, cwd=tmp_path, watch=tmp_path)
    watched = run(*RUNNER, *words, cwd=tmp_path, watch=tmp_path)
    assert watched == plain
    assert watched[0] == code
    heartbeat = read_heartbeat(tmp_path / "rank-00001.heartbeat")
    assert heartbeat is not None
    assert heartbeat.phase is last
    if words[-1] == "scripts/raises.py":
        assert heartbeat.failure == "ValueError: two"
