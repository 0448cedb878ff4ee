"""The README and the docs do what they say: commands run and print what is shown, links lead
somewhere, flags exist.

Blocks of a page are run in their order, in one folder. Fences say how: `console` lines that start
with `$ ` are typed into bash, and the lines below them must be in its output, in that order
(numbers apart, `...` for what is left out); `python` is run; a `python`, `toml` or `yaml` block that opens
with `# name.ending` is also kept as that file. What no test can run is fenced `text` (or `python
no-run`) and says why in the paragraph above. `py` and `sh` are snippets of the linter's rules,
which are tests of their own.
"""

from __future__ import annotations

import os
import re
import runpy
import shlex
import socket
import subprocess
import sys
import tomllib
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

import markdown
import pytest
import yaml

import drumline
from drumline.cli import doctor_command, launch_flags
from drumline.cli.train_command import OWN_FLAGS
from drumline.config import read_flags
from drumline.config.fields import FIELDS, SECTIONS, annotation_of
from tests.ranks import free_port

ROOT = Path(__file__).parents[2]
README = ROOT / "README.md"
PAGES = [README, *sorted((ROOT / "docs").glob("*.md"))]
OTHER_PAGES = [ROOT / name for name in ("CONTRIBUTING.md", "CHANGELOG.md", "SECURITY.md")]
FEWEST_PAGES = 10
LONG_PAGES = ("recipes", "task-parts", "find-settings", "object-storage", "weights", "plan")
FEWEST_COMMANDS = 20
FEWEST_PYTHON = 6
FENCE = re.compile(r"^```(\S*) ?(.*)\n((?:.*\n)*?)```$", re.MULTILINE)
FILE_NAME = re.compile(r"# ([\w-]+\.(?:py|toml|yaml))\n")
LINK = re.compile(r"\]\(([^)\s]+)\)")
FLAG = re.compile(r"(?<![\w-])--(?:no-)?([a-z_]+(?:\.[\w]+)*)")
LAUNCHED = re.compile(r"drumline (launch|doctor) (-[^`|#\n]*)")
FLAG_OF_VERB = re.compile(r"(?:^| )--(?:no-)?([\w-]+)")
FLAGS_OF_VERBS = {"launch": launch_flags.OWN_FLAGS, "doctor": doctor_command.OWN_FLAGS}
SETTING = re.compile(rf"`((?:{'|'.join(SECTIONS)})\.[a-z_]+)`")
NUMBER = re.compile(r"(?<![A-Za-z\d])\d[\d.,:]*(?:e[+-]\d+)?")
UNIT = re.compile(r"# (?:ms|s|min|B|kB|MB)\b")
REASON = "*Not run by the tests"
SHORT = ["--train.epochs", "1", "--model.widths", "8"]
# The first would change what is trained on, the second makes every start of torch slow, with the
# third a line and its end are written one after the other: those of two ranks get mixed.
UNWANTED = ("DATASET_DIR", "PYTHONDONTWRITEBYTECODE", "PYTHONUNBUFFERED")


class Block(NamedTuple):
    """What stands in one fence."""

    kind: str
    note: str
    text: str
    paragraph_above: str


class Command(NamedTuple):
    """A line to type, and the lines that are shown below it."""

    typed: str
    shown: list[str]


def blocks(page: Path) -> list[Block]:
    text = page.read_text()
    return [
        Block(match[1], match[2], match[3], text[: match.start()].rstrip().rpartition("\n\n")[2])
        for match in FENCE.finditer(text)
    ]


def commands(block: Block) -> list[Command]:
    results: list[Command] = []
    lines = iter(block.text.splitlines())
    for line in lines:
        if line.startswith("$ "):
            typed = line.removeprefix("$ ")
            while typed.endswith("\\"):
                typed = typed.removesuffix("\\") + next(lines).strip()
            results.append(Command(typed, []))
        elif results and line.strip() not in ("", "..."):
            results[-1].shown.append(line)
    return results


def of_kind(kind: str) -> Iterator[tuple[Path, Block]]:
    return ((page, block) for page in PAGES for block in blocks(page) if block.kind == kind)


@pytest.fixture(name="environment")
def make_environment(tmp_path: Path, warm: None) -> dict[str, str]:
    """An environment in which the commands are those of this checkout and this Python."""
    programs = tmp_path / "bin"
    programs.mkdir()
    for name, module in {
        "python": "",
        "drumline": "-m drumline",
        "torchrun": "-m torch.distributed.run",
    }.items():
        program = programs / name
        program.write_text(f'#!/bin/sh\nexec {shlex.quote(sys.executable)} {module} "$@"\n')
        program.chmod(0o755)
    return {
        **{name: value for name, value in os.environ.items() if name not in UNWANTED},
        "PATH": f"{programs}{os.pathsep}{os.environ['PATH']}",
        "PYTHONPATH": str(ROOT),
        "COLUMNS": "80",
        "OMP_NUM_THREADS": "1",
        "GLOO_SOCKET_IFNAME": "lo",
        "SMALL_DIGITS": "1",
        "PET_MASTER_PORT": str(
            free_port()
        ),  # torchrun's own default is the same for every job on a machine
    }


@pytest.fixture(name="folder")
def make_folder(
    tmp_path: Path, environment: dict[str, str], monkeypatch: pytest.MonkeyPatch
) -> Path:
    """Where a page is run: with the examples, as in a checkout. After `warm`: what a fork server
    loads at its start is found from the folder that it starts in."""
    folder = tmp_path / "work"
    folder.mkdir()
    (folder / "examples").symlink_to(ROOT / "examples")
    monkeypatch.chdir(folder)
    monkeypatch.syspath_prepend(ROOT / "examples")
    monkeypatch.syspath_prepend(folder)  # a block may import the file of another
    return folder


def run_in_bash(typed: str, environment: dict[str, str]) -> list[str]:
    """Type a command; what it printed, settled. It has to succeed."""
    result = subprocess.run(
        ["bash", "-c", typed],
        env=environment,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        check=False,
        timeout=100,
    )
    assert result.returncode == 0, f"$ {typed}\n{result.stdout}"
    return [settled(line) for line in result.stdout.splitlines()]


def settled(line: str) -> str:
    """A line without what differs from run to run and from host to host."""
    if line.startswith("exit code"):
        return line
    line = line.replace(str(Path.cwd()), "/home/me").replace(f"on {socket.gethostname()}", "on vm")
    without_numbers = NUMBER.sub("#", line)
    # said only where it is much
    for waits in ("waits for data", "exposed communication"):
        without_numbers = without_numbers.replace(f" {waits} #%", "")
    without_numbers = without_numbers.replace(
        "micro-batches a step", "micro-batch a step"
    )  # one, if that is fastest
    return " ".join(UNIT.sub("# s", without_numbers).split())


def check_shown(command: Command, printed: list[str]) -> None:
    """Every line that is shown was printed, in that order."""
    rest = iter(printed)
    for line in command.shown:
        assert settled(line) in rest, (
            f"$ {command.typed}\nshown, but not printed (there): {line}\n" + "\n".join(printed)
        )


@pytest.mark.parametrize(
    "page",
    [
        pytest.param(page, marks=pytest.mark.soak if page.stem in LONG_PAGES else [])
        for page in PAGES
    ],
    ids=lambda page: page.stem,
)
def test_a_page_does_what_it_says(page: Path, folder: Path, environment: dict[str, str]) -> None:
    names: dict[str, Any] = {"__name__": page.stem}
    for block in blocks(page):
        if file := FILE_NAME.match(block.text):
            (folder / file[1]).write_text(block.text)
        if block.kind == "toml":
            tomllib.loads(block.text)
        elif block.kind == "yaml":
            assert yaml.safe_load(block.text)
        elif block.kind == "python":
            code = compile(block.text, f"{page.name}, python block", "exec")
            if block.note != "no-run":
                exec(code, names)
        elif block.kind == "console":
            for command in commands(block):
                check_shown(command, run_in_bash(command.typed, environment))


def test_make_demo_is_what_the_readme_shows(folder: Path, environment: dict[str, str]) -> None:
    recipe = re.search(
        r"^demo:.*\n\t\$\(BIN\)/(drumline train .*)$", (ROOT / "Makefile").read_text(), re.MULTILINE
    )
    assert recipe is not None
    shown = next(
        command.shown
        for _, block in of_kind("text")
        for command in commands(block)
        if command.typed == "make demo"
    )
    assert shown[0] == f".venv/bin/{recipe[1]}"
    shortened = run_in_bash(f"{recipe[1]} --train.epochs 1", environment)
    # The two words more may have broken a line that the page has whole.
    printed = (
        "\n".join(shortened).replace(" \\\n", " ").replace(" --train.epochs #", "").splitlines()
    )
    for line in shown[1:]:
        assert settled(line).replace("epochs", "epoch") in printed, f"{line}\n" + "\n".join(printed)


def test_make_test_is_there() -> None:
    typed = [command.typed for block in blocks(README) for command in commands(block)]
    assert "make test" in typed
    assert re.search(
        r"^test:.*\n(?:\t.*\n)*\t.*pytest", (ROOT / "Makefile").read_text(), re.MULTILINE
    )


def test_the_two_node_command_trains(folder: Path, environment: dict[str, str]) -> None:
    typed_commands = {
        command.typed
        for _, block in of_kind("text")
        for command in commands(block)
        if command.typed.startswith("torchrun --nnodes 2 ")
    }
    assert len(typed_commands) == 1, "the pages show different commands"
    address = f"127.0.0.1:{free_port()}"
    # One rank a node: that it is two agents that meet is what matters, and starting torch is what
    # takes time.
    words = (
        typed_commands.pop()
        .replace("FIRST_HOST:29500", address)
        .replace("--nproc-per-node 2", "--nproc-per-node 1")
    )
    assert address in words
    nodes = [
        subprocess.Popen(
            [*shlex.split(words), *SHORT],
            env=environment,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        )
        for _ in range(2)
    ]
    try:
        outputs = [node.communicate(timeout=100)[0] for node in nodes]
    finally:
        for node in nodes:
            node.kill()
            node.wait()
    assert [node.returncode for node in nodes] == [0, 0], "\n".join(outputs)
    assert sorted("on 2 ranks" in output for output in outputs) == [False, True]


def test_there_is_enough_to_run() -> None:
    assert len(PAGES) >= FEWEST_PAGES
    per_page = {
        page: sum(len(commands(block)) for block in blocks(page) if block.kind == "console")
        for page in PAGES
    }
    assert per_page[README] > 0
    assert sum(per_page.values()) >= FEWEST_COMMANDS
    assert sum(block.note != "no-run" for _, block in of_kind("python")) >= FEWEST_PYTHON


def test_what_is_not_run_says_why() -> None:
    for page in PAGES:
        known = {
            "console",
            "python",
            "toml",
            "text",
            "yaml",
            *(("py", "sh") if page.stem == "lint" else ()),
        }
        assert page.read_text().count("\n```") == 2 * len(blocks(page)), (
            f"{page.name}: a fence is not closed"
        )
        for block in blocks(page):
            assert block.kind in known, f"{page.name}: {block.kind}"
            if block.note == "no-run" or (block.kind == "text" and commands(block)):
                assert REASON in block.paragraph_above, f"{page.name}: {block.text}"


@pytest.mark.parametrize("page", [*PAGES, *OTHER_PAGES], ids=lambda page: page.stem)
def test_links_lead_somewhere(page: Path) -> None:
    for link in LINK.findall(page.read_text()):
        if not link.startswith(("https://", "http://")):
            file, _, anchor = link.partition("#")
            target = page.parent / file if file else page
            assert target.exists(), f"{page.name} links to {link}"
            assert not anchor or anchor in anchors(target), f"{page.name} links to {link}"


def anchors(page: Path) -> set[str]:
    """Of a page's headings, as GitHub makes them."""
    titles = re.findall(r"^#+ (.+)$", page.read_text(), re.MULTILINE)
    return {re.sub(r"[^\w -]", "", title.lower()).replace(" ", "-") for title in titles}


@pytest.mark.parametrize("page", [*PAGES, *OTHER_PAGES], ids=lambda page: page.stem)
def test_settings_and_flags_exist(page: Path) -> None:
    text = page.read_text()
    for name in SETTING.findall(text):
        assert name in FIELDS, f"{page.name} mentions {name}"
    for name in FLAG.findall(text):
        if "." in name and name != "section.name":
            assert annotation_of(name) is not None, f"{page.name} mentions --{name}"
    for verb, words in LAUNCHED.findall(text.replace("\\\n", " ")):
        own_words = shlex.split(words)
        if verb == "launch":  # what follows the name belongs to the task or script
            flags = read_flags(own_words, launch_flags.OWN_FLAGS, ends_at_name=True)
            own_words = own_words[: len(own_words) - len(flags.positional)]
        for flag in FLAG_OF_VERB.findall(" ".join(own_words)):
            assert flag in FLAGS_OF_VERBS[verb], f"{page.name} gives `drumline {verb}` --{flag}"
    for line in text.replace("\\\n", " ").splitlines():
        for flag in FLAG.findall(line.partition("drumline train ")[2].partition(" | ")[0]):
            assert "." in flag or flag in OWN_FLAGS, f"{page.name} gives `drumline train` --{flag}"


def test_the_api_page_has_every_public_name() -> None:
    listed = re.findall(r"^::: (.+)$", (ROOT / "docs" / "api.md").read_text(), re.MULTILINE)
    homes = {
        f"{home.__module__}.{home.__qualname__}"
        for home in map(drumline.__getattr__, drumline.__all__)
    }
    assert set(listed) == homes


def test_the_site_shows_every_fence_as_code() -> None:
    on_page_markdown = runpy.run_path(str(ROOT / "docs/site_pages.py"))["on_page_markdown"]
    for page in PAGES:
        text = on_page_markdown(page.read_text(), config={"repo_url": ""})
        shown = markdown.markdown(text, extensions=["tables", "pymdownx.superfences"])
        assert shown.count('<div class="highlight">') >= len(blocks(page)), page.name
        assert "```" not in shown, page.name


def test_every_page_is_in_the_site() -> None:
    site = (ROOT / "mkdocs.yml").read_text()
    assert [page.name for page in PAGES[1:] if f" {page.name}\n" not in site] == []


@pytest.mark.parametrize("page", [*PAGES, *OTHER_PAGES], ids=lambda page: page.stem)
def test_files_that_are_named_are_there(page: Path) -> None:
    tracked = subprocess.run(
        ["git", "ls-files"], cwd=ROOT, capture_output=True, text=True, check=True
    ).stdout.split()
    for name in re.findall(r"`([\w.-]+/[\w./-]+\.(?:py|sh|toml|yaml))`", page.read_text()):
        assert any(file == name or file.endswith(f"/{name}") for file in tracked), (
            f"{page.name} names {name}"
        )
