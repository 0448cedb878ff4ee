"""The nodes of a file, as the index has them: the same that `ast` finds, and each with what is
inside it."""

from __future__ import annotations

import ast
import re
from pathlib import Path

import pytest

from drumline_lint.program.files import make_index
from drumline_lint.program.tree import SCOPES, children, enclosing_function, nodes_in, scope_of
from drumline_lint.reading.source import Source

CORPUS = Path(__file__).parent / "corpus"
# With gaps, words and constants where other nodes have nodes.
ODD = """
def f(a, /, b=1, *rest, c, d=2, **more) -> int:
    global x
    return {**more, "key": a, **{}}
match point:
    case Point(x=0, y=None) | {"a": 1, **others} | [1, *_] as whole if whole:
        print(f"{whole!r:>{width}}", lambda self, y=3: self)
async def g():
    async with a as b, c:
        [i async for i in b if i async for j in i]
try:
    import a.b as c
except* (E, F) as error:
    raise error from None
"""


def told(node: ast.AST) -> list[ast.AST]:
    """What a rule could ask for."""
    silent = (ast.expr_context, ast.operator, ast.unaryop, ast.boolop, ast.cmpop)
    return [one for one in ast.iter_child_nodes(node) if not isinstance(one, silent)]


def read(text: str) -> Source:
    return Source(Path("a.py"), text, ast.parse(text))


TEXTS = {
    "odd": ODD,
    **{str(path.relative_to(CORPUS)): path.read_text() for path in CORPUS.rglob("*.py")},
}


@pytest.mark.parametrize("text", TEXTS.values(), ids=TEXTS)
def test_every_node_has_the_children_that_ast_finds(text: str) -> None:
    source = read(text)
    make_index(source)
    for node in ast.walk(source.tree):
        assert children(node) == told(node)
        assert not vars(node) or isinstance(node, SCOPES), "a dict takes most of the memory"
    assert written(source.tree) == written(without_annotations(ast.parse(text)))


def without_annotations(tree: ast.Module) -> ast.Module:
    for node in ast.walk(tree):
        for name in vars(node).keys() & {"annotation", "returns", "kind", "type_comment"}:
            delattr(node, name)
    return tree


def written(tree: ast.Module) -> str:
    return re.sub(r"\w+=None|, ", "", ast.dump(tree, include_attributes=True))


@pytest.mark.parametrize("text", TEXTS.values(), ids=TEXTS)
def test_the_index_has_all_nodes_and_knows_what_is_inside_each(text: str) -> None:
    source = read(text)
    index = make_index(source)
    everything = [node for kind in index.nodes.values() for node in kind]
    assert len(everything) == len(set(everything))
    for node in everything:
        within = [one for one in every_below(node) if isinstance(one, ast.Name | ast.Call)]
        assert nodes_in(node, ast.Name, ast.Call, into_functions=True) == within


def every_below(node: ast.AST) -> list[ast.AST]:
    return [node, *(one for child in told(node) for one in every_below(child))]


def test_what_a_definition_evaluates_is_seen_from_outside() -> None:
    source = read(
        "class C(base):\n    @mark\n    def m(self, a=given) -> kind:\n        return inner\n"
    )
    make_index(source)
    around = {
        name.id: scope_of(name) for name in ast.walk(source.tree) if isinstance(name, ast.Name)
    }
    [cls] = source.tree.body
    assert isinstance(cls, ast.ClassDef)
    [method] = cls.body
    assert around == {"base": source.tree, "mark": cls, "given": cls, "inner": method}
    assert enclosing_function(cls) is None
