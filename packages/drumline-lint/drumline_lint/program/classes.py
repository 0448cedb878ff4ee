"""Classes of the given files: what they come from, and their methods."""

from __future__ import annotations

import ast

from drumline_lint.program.tree import FunctionNode, source_of
from drumline_lint.program.value import Class, Instance, Library, Made, Method, Value
from drumline_lint.program.whole import Whole


def ancestry(program: Whole, node: ast.ClassDef) -> list[ast.ClassDef | str]:
    """The class and all that it comes from, nearest first; those of libraries by their name."""
    found: list[ast.ClassDef | str] = [node]
    for place in found:
        for base in [] if isinstance(place, str) else place.bases:
            for value in program.values(base):
                if isinstance(value, Class) and value.node not in found:
                    found.append(value.node)
                elif isinstance(value, Library) and value.name not in found:
                    found.append(value.name)
    return found


def is_module(program: Whole, node: ast.ClassDef) -> bool:
    """Whether it is a model, or a part of one."""
    return any(isinstance(place, str) and place.endswith("nn.Module") for place in ancestry(program, node))


def method(program: Whole, node: ast.ClassDef, name: str) -> FunctionNode | None:
    """Of a class or of those that it comes from."""
    for place in ancestry(program, node):
        if not isinstance(place, str):
            for binding in program.files.index(source_of(place)).scopes[place].names.get(name, ()):
                if isinstance(binding.node, ast.FunctionDef | ast.AsyncFunctionDef):
                    return binding.node
    return None


def called_as(program: Whole, node: ast.ClassDef) -> str:
    """The method that a call of an instance runs."""
    return "forward" if is_module(program, node) else "__call__"


def name_of_owner(program: Whole, owner: Value) -> str:
    """By which a method's full name begins: of a class of the given files, the library's class it comes from."""
    if isinstance(owner, Made | Library):
        return owner.name
    if isinstance(owner, Instance | Class):
        node = owner.of if isinstance(owner, Instance) else owner.node
        return next((place for place in ancestry(program, node) if isinstance(place, str)), node.name)
    return f"{name_of_owner(program, owner.of)}.{owner.name}" if isinstance(owner, Method) else ""
