"""A program never parses a sentence of ours: what another process or module needs travels as a
typed field.

The package is searched for string matching on message texts: comparisons, `in`, `startswith`,
`partition`, patterns and the like, with a constant that reads as words, or on a variable that holds
a message. What other programs print may be matched, where there is nothing else: those texts are
listed here, with whose they are.
"""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from pathlib import Path

import pytest

import drumline

PACKAGE = Path(drumline.__file__).parent
METHODS = {
    "startswith", "endswith", "removeprefix", "removesuffix", "partition", "rpartition", "split", "rsplit",
    "find", "rfind", "index", "count", "replace", "search", "match", "fullmatch", "findall", "finditer",
    "compile", "sub", "subn",
}  # fmt: skip
WORDS = re.compile(r"[A-Za-z']{2,}[,:;]? [a-z']{2,}|^[A-Za-z ]{3,}: ?$|^[,.;]? ?[Tt]ry: ?$")
MESSAGE = re.compile(
    r"\b(messages?|sentence|what|reason|words|said|told|failure|next_step|stderr|error)\b"
)
FOREIGN = {
    "does not have a deterministic implementation": "torch",
    "called a synchronizing CUDA operation": "torch",
    "Expected to have finished reduction in the prior iteration": "torch's DDP",
    r"indices which did not receive grad for rank \d+: ([\d ]+)": "torch's DDP",
    "mixed torch.Tensor and DTensor": "torch's DTensor",
    "dataloader worker": "torch's DataLoader",
    "out of memory": "CUDA, NCCL",
    "can't allocate memory": "torch's CPU allocator",
    "unable to find an engine to execute this computation": "cuDNN",
    "size mismatch": "torch's compiler",
    ".size()": "torch's compiler",
    "stride": "torch's compiler",
    "Last error:": "NCCL",
    "No devices": "nvidia-smi",
    "Traceback (most recent call last)": "Python",
    "Fatal Python error": "Python's faulthandler",
    "^(Current thread |Stack )": "Python's faulthandler",
    " in fetch": "a frame of a stack: torch's fetcher",
    "socket:": "the kernel",
    "gloo:": "torch's profiler",
    "rsync: (command )?not found": "the shell",
    "sufficient .*capacity|no Spot capacity|InsufficientInstanceCapacity|UnfulfillableCapacity": "EC2",
    "# Written by `drumline launch --slurm`.": "the first line of a file of ours, to know it again",
}
FOREIGN_MODULES = {
    "watch/sidecar/system_evidence.py": "the kernel's log",
    "tools/tune/nccl_log.py": "NCCL's log",
    "tools/tune/job_faults.py": "logs of programs, torch's watchdog, and Python's tracebacks",
}


def test_no_code_matches_the_words_of_a_message() -> None:
    matches = [
        (str(path.relative_to(PACKAGE)), line, text)
        for path in sorted(PACKAGE.rglob("*.py"))
        for line, text in matched_words(path.read_text(encoding="utf-8"))
    ]
    ours = [
        (path, line, text)
        for path, line, text in matches
        if text not in FOREIGN and path not in FOREIGN_MODULES
    ]
    assert ours == [], (
        "give the other side a typed field; a text of another program goes to FOREIGN"
    )
    assert sorted(FOREIGN.keys() - {text for _, _, text in matches}) == [], "no longer matched"


@pytest.mark.parametrize(
    "code",
    [
        'if " stopped, because " in line: pass',
        'WORDS = "rank failed first"\nif text.startswith(WORDS): pass',
        'SIGNS = ("connection lost", "peer gone")\nany(sign in text for sign in SIGNS)',
        'text.partition(". Try:")',
        'text.removeprefix("hang: ")',
        'if "refused" in error.reason: pass',
        'if one.what == "gone": pass',
        'PATTERN = re.compile(r"rank (\\d+) failed first")',
        'match text:\n    case "it is over": pass',
    ],
)
def test_the_search_finds(code: str) -> None:
    assert list(matched_words(code)) != []


@pytest.mark.parametrize(
    "code",
    [
        'if kind == "straggler": pass',
        'path.suffix.endswith(".py")',
        'raise ValueError(f"{name} is not text")',
        'text.split(", ")',
        'if "what" in fields: pass',
        'error = "rank failed first"',
    ],
)
def test_the_search_leaves_alone(code: str) -> None:
    assert list(matched_words(code)) == []


def matched_words(code: str) -> Iterator[tuple[int, str]]:
    """Line and text of every constant that something is matched with, and that reads as words of a
    message."""
    tree = ast.parse(code)
    constants = {
        target.id: node.value
        for node in tree.body
        if isinstance(node, ast.Assign)
        for target in node.targets
        if isinstance(target, ast.Name)
    }
    for node in ast.walk(tree):
        for subject, against in matches(node):
            for text in texts(against, constants):
                is_of_message = (
                    bool(MESSAGE.search(ast.unparse(subject)))
                    and len(re.findall("[a-z]", text)) > 3
                )
                if (WORDS.search(text) or is_of_message) and not text.startswith("--"):
                    yield against.lineno, text


def matches(node: ast.AST) -> Iterator[tuple[ast.expr, ast.expr]]:
    """What is matched, and with what."""
    if isinstance(node, ast.Compare):
        for operator, left, right in zip(
            node.ops, [node.left, *node.comparators], node.comparators, strict=False
        ):
            if isinstance(operator, ast.In | ast.NotIn):
                yield right, left
            elif isinstance(operator, ast.Eq | ast.NotEq):
                yield left, right
                yield right, left
    elif (
        isinstance(node, ast.Call)
        and isinstance(node.func, ast.Attribute)
        and node.func.attr in METHODS
    ):
        for argument in node.args[:1]:
            yield node.func.value, argument
    elif isinstance(node, ast.GeneratorExp) and isinstance(node.elt, ast.Compare):
        # any(sign in text for sign in SIGNS)
        tested = ast.unparse(node.elt.left)
        yield from (
            (node.elt, generator.iter)
            for generator in node.generators
            if ast.unparse(generator.target) == tested
        )
    elif isinstance(node, ast.MatchValue):
        yield ast.Name("_"), node.value


def texts(expression: ast.expr, constants: dict[str, ast.expr]) -> Iterator[str]:
    """The string constants of an expression, through names of the module."""
    if isinstance(expression, ast.Name) and expression.id in constants:
        expression = constants[expression.id]
    if isinstance(expression, ast.Constant) and isinstance(expression.value, str):
        yield expression.value
    elif isinstance(expression, ast.JoinedStr):
        yield "".join(
            part.value if isinstance(part, ast.Constant) else "0" for part in expression.values
        )
    elif isinstance(expression, ast.Tuple | ast.List | ast.Set):
        for element in expression.elts:
            yield from texts(element, constants)
    elif (
        isinstance(expression, ast.Call)
        and isinstance(expression.func, ast.Name)
        and expression.func.id == "frozenset"
    ):
        for argument in expression.args:
            yield from texts(argument, constants)
