"""Takes checks away, one at a time, in a copy of the tree: the tests of this folder must notice
each (`make soak-mutants`). It fails if one survives, or if the code that it changes is no longer
there."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import tempfile
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).parents[2]
COPIED = ("drumline", "tests", "pyproject.toml", "packages")


@dataclass(frozen=True, kw_only=True)
class Mutant:
    what: str
    file: str
    code: str
    instead: str
    tests: str
    """Those that must notice."""


DOORS = "tests/attacks/test_doors.py"
MIRROR = "tests/attacks/test_hostile_mirror.py"
PODS = "tests/attacks/test_pod_templates.py"
MUTANTS = [
    Mutant(
        what="a process of another user may pass for a keeper",
        file="drumline/base/processes.py",
        code='return is_own and _read(f"/proc/{pid}/cmdline")',
        instead='return _read(f"/proc/{pid}/cmdline")',
        tests="tests/attacks/test_detached_jobs.py",
    ),
    Mutant(
        what="a pod template may have aliases",
        file="drumline/launch/pod_template.py",
        code='if kind == "AliasEvent" or getattr(event, "anchor", None):',
        instead="if False:",
        tests=PODS,
    ),
    Mutant(
        what="a number in a pod template may have any length",
        file="drumline/launch/pod_template.py",
        code="if len(node.value) > MAX_SCALAR:",
        instead="if False:",
        tests=PODS,
    ),
    Mutant(
        what="line separators of Unicode are written as they are",
        file="drumline/launch/templates.py",
        code='return re.sub(r"[^ -~]", _escaped, text)',
        instead="return text",
        tests=PODS,
    ),
    Mutant(
        what="a pod template may set the variables of the launch",
        file="drumline/launch/pod_template.py",
        code="if is_reserved and variables.get(name) != variables_after.get(name):",
        instead="if False:",
        tests=PODS,
    ),
    Mutant(
        what="a flag may set what the launch sets in a pod",
        file="drumline/cli/kubernetes_file.py",
        code="if RESERVED.fullmatch(name):",
        instead="if False:",
        tests=PODS,
    ),
    Mutant(
        what="any handshake proof is accepted",
        file="drumline/net/handshake.py",
        code='return hmac.compare_digest(proof.encode(errors="replace"), expected.encode())',
        instead="return True",
        tests=DOORS,
    ),
    Mutant(
        what="the number of a line is not in its seal",
        file="drumline/net/frames.py",
        code='number.to_bytes(8, "big") + text',
        instead="text",
        tests=DOORS,
    ),
    Mutant(
        what="the live report answers any Host",
        file="drumline/report/live_server.py",
        code='is_own = self.headers.get("Host") in (f"{LOOPBACK}:{port}", f"localhost:{port}")',
        instead="is_own = True or port",
        tests=DOORS,
    ),
    Mutant(
        what="the live report answers any path",
        file="drumline/report/live_server.py",
        code="not hmac.compare_digest(requested_path, self.server.hidden_path.encode())",
        instead="False",
        tests=DOORS,
    ),
    Mutant(
        what="objects may have names with ..",
        file="drumline/storage/object_store.py",
        code='not {"", ".", ".."} & set(name.split("/"))',
        instead='not {"", "."} & set(name.split("/"))',
        tests=DOORS,
    ),
    Mutant(
        what="the report does not escape",
        file="drumline/report/page.py",
        code="autoescape=True",
        instead="autoescape=False",
        tests=DOORS,
    ),
    Mutant(
        what="a host may have any name",
        file="drumline/launch/hosts.py",
        code=r'NAME = re.compile(r"(?:[A-Za-z0-9_][A-Za-z0-9_.-]*@)?[A-Za-z0-9_][A-Za-z0-9_.-]*")',
        instead=r'NAME = re.compile(r"[\s\S]+")',
        tests=DOORS,
    ),
    Mutant(
        what="the id of a mirror is any text",
        file="drumline/checkpoint/mirrored_run.py",
        code='pattern=r"^[0-9a-f]{16}\\Z"',
        instead='pattern=r"[\\s\\S]+"',
        tests=MIRROR,
    ),
    Mutant(
        what="a link before-* is followed",
        file="drumline/checkpoint/mirrored_run.py",
        code="        make_own_folder(aside)",
        instead="        aside.mkdir(exist_ok=True)",
        tests=MIRROR,
    ),
    Mutant(
        what="an object is fetched beyond its size",
        file="drumline/storage/object_store.py",
        code="if most is not None and count > most:",
        instead="if False:",
        tests=MIRROR,
    ),
    Mutant(
        what="a compile cache may belong to anyone",
        file="drumline/base/startup.py",
        code="        check_own_folder(folder, follow_links=True)\n",
        instead="",
        tests="tests/attacks/test_compile_cache.py",
    ),
    Mutant(
        what="others may write to a compile cache",
        file="drumline/base/startup.py",
        code="entry.st_mode & (stat.S_IWGRP | stat.S_IWOTH)",
        instead="entry.st_mode & 0",
        tests="tests/attacks/test_compile_cache.py",
    ),
    Mutant(
        what="a small trace may unpack to anything",
        file="drumline/tools/profile/trace_file.py",
        code="most = min(most, DOCUMENT_BYTES + MAX_RATIO * packed_size)",
        instead="pass",
        tests="tests/attacks/test_hostile_traces.py",
    ),
    Mutant(
        what="held connections keep others out of the live report",
        file="drumline/report/live_server.py",
        code="oldest = next(iter(self._idle), None)",
        instead="oldest = None",
        tests=DOORS,
    ),
]


def main() -> int:
    survivors = []
    with tempfile.TemporaryDirectory(prefix="drumline-mutants-") as temporary:
        copy = Path(temporary)
        for name in COPIED:
            source = ROOT / name
            if source.is_dir():
                shutil.copytree(
                    source, copy / name, ignore=shutil.ignore_patterns("__pycache__", ".venv")
                )
            else:
                shutil.copy(source, copy / name)
        for tests in dict.fromkeys(mutant.tests for mutant in MUTANTS):
            assert passes(copy, tests), f"{tests} fails without a mutant"
        for mutant in MUTANTS:
            if survives(copy, mutant):
                survivors.append(mutant.what)
            print(
                f"{'SURVIVED' if mutant.what in survivors else 'noticed '}  {mutant.what}",
                flush=True,
            )
    print(f"{len(MUTANTS) - len(survivors)} of {len(MUTANTS)} mutants were noticed")
    return 1 if survivors else 0


def survives(copy: Path, mutant: Mutant) -> bool:
    path = copy / mutant.file
    text = path.read_text(encoding="utf-8")
    assert text.count(mutant.code) == 1, (
        f"{mutant.what}: {mutant.file} has changed, and so must the mutant"
    )
    path.write_text(text.replace(mutant.code, mutant.instead), encoding="utf-8")
    try:
        return passes(copy, mutant.tests)
    finally:
        path.write_text(text, encoding="utf-8")


def passes(copy: Path, tests: str) -> bool:
    words = ["-m", "pytest", "-q", "-x", "-p", "no:cacheprovider", tests]
    # The copy is used, not the tree that is installed.
    path = os.pathsep.join([str(copy), str(copy / "packages" / "drumline-lint")])
    done = subprocess.run(
        [sys.executable, *words],
        cwd=copy,
        env={**os.environ, "PYTHONPATH": path},
        capture_output=True,
        check=False,
    )
    assert done.returncode in (0, 1), done.stdout.decode() + done.stderr.decode()
    return done.returncode == 0


if __name__ == "__main__":
    sys.exit(main())
