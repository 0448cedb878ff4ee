"""Mending: edits that do not touch each other, files that can still be read, and nothing else
changed in them."""

from __future__ import annotations

import codecs
import json
import os
import shutil
import subprocess
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from drumline_lint import fixing
from drumline_lint.findings import Edit, Finding, Place, Severity
from drumline_lint.fixing import Fixed, apply_spans, diff_of, fix, spans_of, write
from drumline_lint.linter import Report, all_docs, check
from drumline_lint.output.text import summary_line
from drumline_lint.reading.parse import Reading, read_bytes, read_file
from drumline_lint.rules import all_rules
from drumline_lint.settings import Settings
from made_up_rules import BAD, RULES, calling, calls_of, rule


def checker(rules: dict[str, Any] = RULES) -> Callable[[Sequence[Reading]], Report]:
    settings = Settings(chosen=frozenset(all_docs(rules)), severity=Severity.NOTE)
    return lambda readings: check(readings, rules, settings)


def fixed_text(code: str | bytes, rules: dict[str, Any] = RULES, name: str = "a.py") -> bytes:
    data = code.encode() if isinstance(code, str) else code
    path = Path(name)
    fixed = fix([read_bytes(path, data)], checker(rules))
    return fixed.after[path].data if path in fixed.after else data


def editing(*edits: Edit) -> dict[str, Any]:
    """A rule that makes these edits as long as bad() is called, each for itself."""
    made = rule("DL103", "editing", Severity.ERROR)

    def look(program: Any, source: Any) -> Iterator[Finding]:
        for node in calls_of(source.tree, "bad"):
            for number, edit in enumerate(edits):
                yield made.at(source, node, f"edit {number}", edits=[edit])

    return {"DL103": SimpleNamespace(RULE=made, check=look)}


def at(line: int, start: int, end: int, text: str) -> Edit:
    return Edit(start=(line, start), end=(line, end), text=text)


def test_edits_are_placed_by_bytes_of_utf8() -> None:
    text = "é = 'é'; bad()\nx"
    assert (
        apply_spans(text, spans_of(text, [at(1, 11, 14, "good"), at(2, 1, 1, "y")]))
        == "é = 'é'; good()\nxy"
    )
    for wrong in (at(3, 0, 0, ""), at(1, 0, 99, ""), at(1, 3, 2, ""), at(0, 0, 0, "")):
        with pytest.raises(ValueError, match=r"there is no line|ends before it begins"):
            spans_of(text, [wrong])


def test_all_that_can_be_fixed_is() -> None:
    assert (
        fixed_text("bad(bad())\nx = '漢'; bad(); poor()\n")
        == "good(good())\nx = '漢'; good(); poor()\n".encode()
    )


def test_how_many_were_fixed_is_counted() -> None:
    paths = [Path("a.py"), Path("b.py"), Path("c.py")]
    codes = [b"bad()\nbad()\n", b"poor()\n", b"bad()\n"]
    fixed = fix([read_bytes(*one) for one in zip(paths, codes, strict=True)], checker())
    assert fixed.counts == {Path("a.py"): 2, Path("c.py"): 1}
    assert (fixed.report.fixed, fixed.report.fixable, len(fixed.report.findings)) == (3, 0, 1)


@pytest.mark.parametrize(
    ("code", "left"),
    [
        (b"bad()\r\nx = 1\r\n", b"good()\r\nx = 1\r\n"),
        (b"bad()\rx = 1\r", b"good()\rx = 1\r"),
        (b"x = 1\r\nbad()", b"x = 1\r\ngood()"),
        (codecs.BOM_UTF8 + b"bad()\n", codecs.BOM_UTF8 + b"good()\n"),
        (b"# coding: latin-1\nx = '\xe9'; bad()\n", b"# coding: latin-1\nx = '\xe9'; good()\n"),
        (b"\x0cbad()\n", b"\x0cgood()\n"),
    ],
)
def test_nothing_else_in_the_file_changes(code: bytes, left: bytes) -> None:
    assert fixed_text(code) == left


def test_new_lines_are_as_the_others() -> None:
    rules = editing(at(1, 0, 5, "good()\nfine()"))
    assert fixed_text(b"bad()\r\n", rules) == b"good()\r\nfine()\r\n"


def test_of_edits_that_touch_the_first_wins_and_the_other_comes_next() -> None:
    assert fixed_text("bad()", editing(at(1, 0, 3, "good"), at(1, 1, 2, "!"))) == b"good()"
    made = rule("DL100", "opening", Severity.ERROR)

    def look(program: Any, source: Any) -> Iterator[Finding]:
        if not source.text.startswith("x;"):
            yield made.at(source, source.tree.body[0], "no x", edits=[at(1, 0, 0, "x;")])

    both = {"DL100": SimpleNamespace(RULE=made, check=look), "DL101": BAD}
    assert fixed_text("bad()", both) == b"x;good()"


def test_rounds_come_to_an_end(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(fixing, "MOST_ROUNDS", 3)
    assert fixed_text("bad()", editing(at(1, 0, 0, "x;"))) == b"x;x;x;bad()"
    # Two rules that undo each other.
    rules = {
        "DL101": BAD,
        "DL102": calling(rule("DL102", "back", Severity.ERROR), "good", instead="bad"),
    }
    assert fixed_text("bad()", rules) == b"good()"


def test_a_fix_may_make_room_for_another() -> None:
    rules = {
        "DL101": BAD,
        "DL102": calling(rule("DL102", "next", Severity.ERROR), "good", instead="best"),
    }
    assert fixed_text("bad()", rules) == b"best()"


def test_what_would_not_parse_is_left_out() -> None:
    assert fixed_text("bad()\nx = 1\n", editing(at(1, 0, 3, "good("))) == b"bad()\nx = 1\n"
    some = editing(at(2, 4, 5, "("), at(2, 0, 1, "y"), at(9, 0, 0, "nowhere"))
    assert fixed_text("bad()\nx = 1\n", some) == b"bad()\ny = 1\n"


def test_what_the_encoding_has_not_is_left_out() -> None:
    assert (
        fixed_text(b"# coding: latin-1\nbad()\n", editing(at(2, 0, 3, "'\u6f22'")))
        == b"# coding: latin-1\nbad()\n"
    )


def test_scripts_are_fixed_whatever_their_bytes() -> None:
    made = rule("DL301", "loud", Severity.ERROR)

    def look(script: Any) -> Iterator[Finding]:
        if "echo" in script.text:
            place = Place(path=str(script.path), line=1, column=5, end_line=1, end_column=9)
            edits = [at(1, 4, 8, "true")]
            yield made.at(SimpleNamespace(place=lambda node: node), place, "loud", edits=edits)

    rules = {"DL301": SimpleNamespace(RULE=made, check_shell=look)}
    assert fixed_text(b"'\xff';echo '\xfe'\n", rules, "a.sh") == b"'\xff';true '\xfe'\n"


def test_a_real_rule_counts_as_edits_are_counted() -> None:
    code = "X='é' python -m torch.distributed.launch --use_env --nproc_per_node 2 train.py\n"
    mended = fixed_text(code, dict(all_rules()), "a.sh").decode()
    assert mended == "X='é' python -m torch.distributed.run --nproc_per_node 2 train.py\n"


def test_notebooks_are_not_written() -> None:
    data = json.dumps({"cells": [{"cell_type": "code", "source": "bad()"}]}).encode()
    fixed = fix([read_bytes(Path("n.ipynb"), data)], checker())
    assert (fixed.after, fixed.in_notebooks, fixed.report.fixable) == ({}, 1, 0)
    # Here the edit would fit, by its numbers.
    rules = {"DL101": calling(BAD.RULE, "bad", instead=" ")}
    assert fixed_text(b"     " + data, rules, "n.ipynb") == b"     " + data


# On the disk


def mend(*paths: Path) -> Fixed:
    return fix([read_file(path) for path in paths], checker())


def test_files_are_written_and_keep_mode_and_link(tmp_path: Path) -> None:
    real = tmp_path / "real.py"
    link = tmp_path / "link.py"
    real.write_text("bad()\n")
    real.chmod(0o751)
    link.symlink_to(real)
    report = write(mend(link), checker())
    assert (report.fixed, report.problems) == (1, [])
    assert link.is_symlink()
    assert real.read_text() == "good()\n"
    assert real.stat().st_mode & 0o777 == 0o751
    assert sorted(path.name for path in tmp_path.iterdir()) == ["link.py", "real.py"]


def test_what_cannot_be_written_is_reported_and_still_found(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    first = tmp_path / "a.py"
    second = tmp_path / "b.py"
    first.write_text("bad()\n")
    second.write_text("bad()\n")
    fixed = mend(first, second)
    first.write_text("other()\n")
    report = write(fixed, checker())
    assert [said.message for said in report.problems] == [
        "the file was not fixed: it was changed in the meantime"
    ]
    assert (report.fixed, [finding.place.path for finding in report.findings]) == (1, [str(first)])
    assert (first.read_text(), second.read_text()) == ("other()\n", "good()\n")
    second.write_text("bad()\n")
    monkeypatch.setattr(os, "access", lambda path, mode: False)
    (said,) = write(mend(second), checker()).problems
    assert said.message == "the file was not fixed: it is read-only"
    assert summary_line(write(mend(second), checker())).endswith(
        "; 1 file could not be written; 1 can be fixed (--fix)"
    )


def test_a_write_that_fails_leaves_the_old_file(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "a.py"
    path.write_text("bad()\n")

    def full(self: Path, target: Path) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(Path, "replace", full)
    (said,) = write(mend(path), checker()).problems
    assert said.message == "the file was not fixed: No space left on device"
    assert path.read_text() == "bad()\n"
    assert list(tmp_path.iterdir()) == [path]


def test_the_diff_is_what_patch_takes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    codes = {"a.py": "x = 1\r\nbad()\r\n", "b.py": "poor()\nbad()", "c.py": "poor()\n"}
    for name, code in codes.items():
        Path(name).write_bytes(code.encode())
    fixed = mend(*map(Path, codes))
    diff = diff_of(fixed)
    assert diff.endswith(
        "--- a/b.py\n+++ b/b.py\n@@ -1,2 +1,2 @@\n poor()\n-bad()\n\\ No newline at end of file\n+good()\n"
        "\\ No newline at end of file\n"
    )
    assert "c.py" not in diff
    assert {name: Path(name).read_bytes().decode() for name in codes} == codes, "nothing is written"
    if shutil.which("git"):
        subprocess.run(["git", "apply", "-p1", "-"], input=diff.encode(), check=True)
        assert Path("a.py").read_bytes() == b"x = 1\r\ngood()\r\n"
        assert Path("b.py").read_bytes() == b"poor()\ngood()"


@pytest.mark.parametrize(
    "code",
    [
        b"x = 1\n\x0c\ny = '\xe2\x80\xa8 \x1c'\nbad()\n\x0cz = 2\n",
        b"\xef\xbb\xbfx = 1\nbad()\n",
        b"x = 1\rbad()\ry = 2\r",
        b"x = 1\r\nbad()\ry = 2\n",
    ],
)
def test_lines_of_the_diff_are_those_of_patch(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, code: bytes
) -> None:
    """Which a form feed does not end, and a byte order mark is a part of the first."""
    monkeypatch.chdir(tmp_path)
    path = Path("a.py")
    path.write_bytes(code)
    if shutil.which("git"):
        subprocess.run(["git", "apply", "-p1", "-"], input=diff_of(mend(path)).encode(), check=True)
        assert path.read_bytes() == code.replace(b"bad", b"good")


def test_paths_in_the_diff_are_relative(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "in").mkdir()
    monkeypatch.chdir(tmp_path / "in")
    for path in (tmp_path / "in" / "a.py", tmp_path / "b.py"):
        path.write_text("bad()\n")
    inside = diff_of(mend(tmp_path / "in" / "a.py"))
    assert inside.startswith("--- a/a.py\n+++ b/a.py\n")
    assert diff_of(mend(tmp_path / "b.py")).startswith(
        f"--- a{tmp_path}/b.py\n+++ b{tmp_path}/b.py\n"
    )
