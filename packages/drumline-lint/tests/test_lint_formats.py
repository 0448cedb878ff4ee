"""Reports for machines: JSON, SARIF and GitHub's workflow commands."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

from drumline_lint.output.formats import as_github, as_json, as_sarif
from made_up_rules import DOCS, USUAL, report_of

NOTEBOOK = json.dumps({"cells": [{"cell_type": "code", "source": "x = 1\nbad()"}]}).encode()
HERE = Path("/work/here")
LEVELS = {"none", "note", "warning", "error"}


def test_json_has_everything_in_stable_names() -> None:
    report = report_of(
        {"a.py": "'é', bad()\nodd()\n", "n.ipynb": NOTEBOOK, "x.py": "("}, settings=USUAL
    )
    document = json.loads(as_json(report))
    assert list(document) == ["version", "files", "findings", "problems", "summary"]
    assert (document["version"], document["files"]) == (1, 2)
    first, second = document["findings"]
    assert first == {
        "rule": "DL101",
        "name": "bad-call",
        "severity": "error",
        "path": "a.py",
        "cell": None,
        "line": 1,
        "column": 6,
        "end_line": 1,
        "end_column": 11,
        "message": "bad() is called",
        "fix": "call good() instead",
        "edits": [{"line": 1, "column": 6, "end_line": 1, "end_column": 9, "text": "good"}],
    }
    assert (second["cell"], second["line"], second["edits"]) == (1, 2, [])
    (said,) = document["problems"]
    assert (said["rule"], said["path"]) == ("DL000", "x.py")
    assert document["summary"] == {
        "shown": {"error": 2, "warning": 0, "note": 0},
        "not_shown": {"error": 0, "warning": 0, "note": 1},
        "by_rule": {"DL101": 2, "DL000": 1},
        "fixed": 0,
        "fixable": 1,
        "in_baseline": 0,
        "on_unchanged_lines": 0,
    }


# SARIF


def sarif(files: dict[str, str | bytes]) -> dict[str, Any]:
    document: dict[str, Any] = json.loads(
        as_sarif(report_of(files), DOCS, version="0.1.0", folder=HERE)
    )
    check_sarif(document)
    return document


def anchor(rule: dict[str, Any]) -> str:
    """`bad-call` of `BadCall`."""
    return re.sub(r"(?<!^)(?=[A-Z])", "-", rule["name"]).lower()


def check_sarif(document: dict[str, Any]) -> None:
    """What the schema of SARIF 2.1.0 requires of the parts that are used, and GitHub of those that
    it shows."""
    assert document["version"] == "2.1.0"
    assert document["$schema"].endswith("sarif-2.1.0.json")
    for run in document["runs"]:
        driver = run["tool"]["driver"]
        assert driver["name"]
        assert run["columnKind"] in ("utf16CodeUnits", "unicodeCodePoints")
        assert all(isinstance(one["executionSuccessful"], bool) for one in run["invocations"])
        assert all(base["uri"].endswith("/") for base in run["originalUriBaseIds"].values())
        for rule in driver["rules"]:
            assert rule["id"]
            assert all(
                rule[name]["text"] for name in ("shortDescription", "fullDescription", "help")
            )
            assert rule["help"]["markdown"]
            assert rule["helpUri"].endswith(f"/rules.md#{rule['id'].lower()}-{anchor(rule)}")
            assert rule["defaultConfiguration"]["level"] in LEVELS
            assert rule["properties"]["problem.severity"] in ("error", "warning", "recommendation")
        assert len({rule["id"] for rule in driver["rules"]}) == len(driver["rules"])
        for result in run["results"]:
            check_result(result, driver["rules"], run["originalUriBaseIds"])


def check_result(
    result: dict[str, Any], rules: list[dict[str, Any]], bases: dict[str, Any]
) -> None:
    assert result["message"]["text"]
    assert result["level"] in LEVELS
    assert rules[result["ruleIndex"]]["id"] == result["ruleId"]
    for location in result["locations"]:
        physical = location["physicalLocation"]
        check_region(physical["region"])
        check_uri(physical["artifactLocation"], bases)
    for fix in result.get("fixes", []):
        assert fix["artifactChanges"]
        for change in fix["artifactChanges"]:
            check_uri(change["artifactLocation"], bases)
            assert change["replacements"]
            for replacement in change["replacements"]:
                check_region(replacement["deletedRegion"])
                assert isinstance(replacement["insertedContent"]["text"], str)


def check_region(region: dict[str, int]) -> None:
    assert all(isinstance(number, int) and number >= 1 for number in region.values())
    end = (
        region.get("endLine", region["startLine"]),
        region.get("endColumn", region.get("startColumn", 1)),
    )
    assert (region["startLine"], region.get("startColumn", 1)) <= end


def check_uri(location: dict[str, str], bases: dict[str, Any]) -> None:
    assert " " not in location["uri"]
    assert location["uri"].isascii()
    assert location.get("uriBaseId", "%SRCROOT%") in bases
    assert ("uriBaseId" in location) != location["uri"].startswith("file:///")


def test_sarif_is_valid_and_has_place_rule_and_fix() -> None:
    document = sarif({"src/my é.py": "x = 1\nbad(\n)\n", "b.py": "odd()\n"})
    (run,) = document["runs"]
    assert [rule["id"] for rule in run["tool"]["driver"]["rules"]] == list(DOCS)
    assert run["invocations"] == [{"executionSuccessful": True}]
    assert run["originalUriBaseIds"] == {"%SRCROOT%": {"uri": "file:///work/here/"}}
    note, error = run["results"]
    assert (note["ruleId"], note["level"]) == ("DL201", "note")
    assert error["message"]["text"] == "bad() is called\nFix: call good() instead"
    place = error["locations"][0]["physicalLocation"]
    assert place["artifactLocation"] == {"uri": "src/my%20%C3%A9.py", "uriBaseId": "%SRCROOT%"}
    assert place["region"] == {"startLine": 2, "startColumn": 1, "endLine": 3, "endColumn": 2}
    assert error["fixes"][0]["artifactChanges"][0]["replacements"] == [
        {
            "deletedRegion": {"startLine": 2, "startColumn": 1, "endLine": 2, "endColumn": 4},
            "insertedContent": {"text": "good"},
        }
    ]
    help_text = run["tool"]["driver"]["rules"][2]["help"]["markdown"]
    assert "Bad:\n\n```python\nbad_call()\n```" in help_text


def test_a_line_of_a_cell_is_a_line_of_the_file() -> None:
    cell = {"cell_type": "code", "source": ["x = 1\n", "bad()\n", "y = 2"]}
    notebook = json.dumps({"cells": [{"cell_type": "markdown"}, cell]}, indent=1).encode()
    expected = notebook.decode().split("\n").index('    "bad()\\n",') + 1
    (result,) = sarif({"n.ipynb": notebook})["runs"][0]["results"]
    assert result["locations"][0]["physicalLocation"]["region"] == {"startLine": expected}
    command = as_github(report_of({"n.ipynb": notebook})).splitlines()[0]
    assert command.startswith(f"::error file=n.ipynb,line={expected},title=")


def test_sarif_of_a_notebook_tells_the_cell() -> None:
    (result,) = sarif({"n.ipynb": NOTEBOOK})["runs"][0]["results"]
    assert result["message"]["text"].startswith("cell 1, line 2: bad() is called")
    assert result["locations"][0]["physicalLocation"]["region"] == {"startLine": 1}
    assert "fixes" not in result


def test_sarif_tells_what_could_not_be_read() -> None:
    (run,) = sarif({"/elsewhere/x.py": "(", "../y.py": "bad()", "/work/here/z.py": "bad()"})["runs"]
    assert run["invocations"] == [{"executionSuccessful": False}]
    found = {
        (result["ruleId"], result["locations"][0]["physicalLocation"]["artifactLocation"]["uri"])
        for result in run["results"]
    }
    assert found == {
        ("DL101", "file:///work/y.py"),
        ("DL000", "file:///elsewhere/x.py"),
        ("DL101", "z.py"),
    }


def test_sarif_of_nothing() -> None:
    assert sarif({})["runs"][0]["results"] == []


# GitHub


def test_github_makes_annotations() -> None:
    report = report_of({"a,b:%.py": "x = 1\npoor()\nbad(\n)\nodd()\n", "n.ipynb": NOTEBOOK})
    assert as_github(report).splitlines() == [
        "::warning file=a%2Cb%3A%25.py,line=2,col=1,endLine=2,endColumn=7,title=DL102 poor-call"
        "::poor() is called%0Afix: call good() instead",
        "::error file=a%2Cb%3A%25.py,line=3,col=1,endLine=4,title=DL101 bad-call"
        "::bad() is called%0Afix: call good() instead",
        "::notice file=a%2Cb%3A%25.py,line=5,col=1,endLine=5,endColumn=6,title=DL201 odd-call"
        "::odd() is called%0Afix: call good() instead",
        "::error file=n.ipynb,line=1,title=DL101 bad-call::cell 1, line 2: bad() is called%0Afix: call good() instead",
        "2 errors, 1 warning, 1 note in 2 of 2 files; 1 can be fixed (--fix)",
    ]


def test_github_commands_stay_on_one_line() -> None:
    text = as_github(report_of({"a\r\nb.py": "("}))
    assert text.count("\n") == 2
    assert "file=a%0D%0Ab.py," in text
