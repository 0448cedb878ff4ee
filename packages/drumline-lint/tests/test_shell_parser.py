"""Shell text is split as a shell splits it, every word knows its place, and no text is too broken
to be read."""

from __future__ import annotations

import time

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from drumline_lint.reading.shell_parser import read_commands
from drumline_lint.rules import all_rules
from reading_cases import CASES, findings_in, read_cases

SCRIPTS = [
    text
    for path in sorted(CASES.glob("DL1*.md"))
    for case in read_cases(path.stem, path.read_text())
    for name, text in case.files
    if name.endswith(".sh")
]
LETTERS = "$(){}[]`'\"\\\n \t#;&|<>=a1-@*!~%\r\0é"


def words_of(text: str) -> list[list[str]]:
    return [
        [text[word.start : word.end] for word in command.words] for command in read_commands(text)
    ]


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("a b\tc", [["a", "b", "c"]]),
        ("a \\\n  b", [["a", "b"]]),
        ("a \\\r\n  b", [["a", "b"]]),
        ("a; b & c && d || e | f", [["a"], ["b"], ["c"], ["d"], ["e"], ["f"]]),
        ("a 'b c' \"d $e\"f", [["a", "'b c'", '"d $e"f']]),
        ("a # b\nc d#e", [["a"], ["c", "d#e"]]),
        ("(a; b) && { c; }", [["a"], ["b"], ["c"]]),
        ("if a; then b; elif c; then d; else e; fi", [["a"], ["b"], ["c"], ["d"], ["e"]]),
        ("for x in 1 2; do a; done\nwhile b; do c; done", [["a"], ["b"], ["c"]]),
        ("case $x in\n one) a ;;\n *) b ;;\nesac\nc", [["a"], ["b"], ["c"]]),
        ("run() {\n  a\n}\nfunction more {\n  b\n}", [["a"], ["b"]]),
        ("a $(b c) `d`", [["a", "$(b c)", "`d`"]]),
        ('a "x $(b "c d") y"', [["a", '"x $(b "c d") y"']]),
        ("a b > out 2>&1 < in &> all", [["a", "b"]]),
        ("a <<END\nb $(c)\nEND\nd", [["a"], ["d"]]),
        ("a <<-'END' | b\n\tc\n\tEND\nd", [["a"], ["b"], ["d"]]),
        ("a <<< b c", [["a", "c"]]),
        ("a=$((1 << 2)) b\n((c = 1 << 2))\nd", [["a=$((1 << 2))", "b"], ["d"]]),
        ("a=(b 'c d'  # e\n f) g", [["a=(b 'c d'  # e\n f)", "g"]]),
        ("a ${b:-$(c)} ${d} ${e[@]}", [["a", "${b:-$(c)}", "${d}", "${e[@]}"]]),
        ("a <(b c) d", [["a", "<(b c)", "d"]]),
        ("! a", [["a"]]),
        ("a $'b\\'c' d", [["a", "$'b\\'c'", "d"]]),
        ("a $b/$c.d e=$f,$g.h", [["a", "$b/$c.d", "e=$f,$g.h"]]),
        ("a=1 b=2\nc d", [["a=1", "b=2"], ["c", "d"]]),
        ("a=<path of b>\nc=$d/<e>/f\ng", [["a=<path of b>"], ["c=$d/<e>/f"], ["g"]]),
        ("a 'b\nc", [["a"]]),
        ('a "b', [["a"]]),
        ("a <<END\nb", [["a"]]),
        ("a )\nb }", [["a"], ["b", "}"]]),
        ("", []),
    ],
)
def test_commands(text: str, expected: list[list[str]]) -> None:
    assert words_of(text) == expected


def test_quotes_are_removed_where_a_word_is_plain() -> None:
    (command,) = read_commands('a \'b c\'d"e f" "" "$g" \\$h')
    assert [word.plain for word in command.words] == ["a", "b cde f", "", None, "$h"]


def test_what_is_under_a_condition() -> None:
    text = "a\nif b; then c; fi\nd\ne && f\ng || (h)\nfor i in 1; do k; done\nl"
    conditional = {text[command.start] for command in read_commands(text) if command.is_conditional}
    assert conditional == {"b", "c", "f", "h", "k"}


def test_an_operator_at_the_end_of_a_line_continues() -> None:
    assert [command.is_conditional for command in read_commands("a &&\n b")] == [False, True]


@settings(deadline=None)
@given(st.text(alphabet=LETTERS + "torchrun", max_size=60))
def test_any_text_is_read_and_every_word_is_in_it(text: str) -> None:
    for command in read_commands(text):
        for word in command.words:
            assert 0 <= word.start < word.end <= len(text)


def test_an_empty_word_after_a_launcher_is_no_flag() -> None:
    assert not findings_in((("broken.sh", 'torchrun --nnodes=2 "'),))


@settings(deadline=None)
@given(st.sampled_from(SCRIPTS), st.data())
def test_no_rule_stumbles_over_broken_scripts(text: str, data: st.DataObject) -> None:
    start = data.draw(st.integers(0, len(text)))
    end = data.draw(st.integers(start, len(text)))
    put = data.draw(st.text(alphabet=LETTERS, max_size=5))
    broken = data.draw(st.sampled_from([text[:start] + put + text[end:], text[:end], text[start:]]))
    for finding in findings_in((("broken.sh", broken),)):
        assert finding.rule in all_rules()
        assert 1 <= finding.place.line <= broken.count("\n") + broken.count("\r") + 1
        assert (finding.place.line, finding.place.column) <= (
            finding.place.end_line,
            finding.place.end_column,
        )


@pytest.mark.timeout(120)
@pytest.mark.parametrize(
    "piece",
    [
        "$(",
        "${",
        '"$(',
        "`",
        "(",
        "((",
        "a=(",
        "<<E\n",
        "'",
        "$((",
        "if a; ",
        "a=$b ",
        "\\\n",
        "torchrun $x ",
        "X=$X$X\n",
        "bash -c 'torchrun x' ; ",
        'bash -c "bash -c \\"',
        "case a in b) ",
        "srun torchrun --nnodes 2 --master-port $p x\nMASTER_PORT=1\n",
    ],
)
def test_time_grows_no_faster_than_the_text(piece: str) -> None:
    def seconds(count: int) -> float:
        text = piece * count
        best = 1e9
        for _ in range(2):
            begin = time.process_time()
            findings_in((("long.sh", text),))
            best = min(best, time.process_time() - begin)
        return best

    short = seconds(200)
    long = seconds(2000)
    # Again: a machine may become slower meanwhile.
    short = max(short, seconds(200))
    assert long < 40 * short + 0.2
