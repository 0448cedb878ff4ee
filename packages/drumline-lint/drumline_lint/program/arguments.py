"""The arguments of a call, and the parameters of a function that they are for."""

from __future__ import annotations

import ast

from drumline_lint.program.tree import class_around, last_name


def argument(call: ast.Call, number: int | None, name: str) -> ast.expr | None:
    """What is given for a parameter, by name or by position."""
    for keyword in call.keywords:
        if keyword.arg == name:
            return keyword.value
    if number is None or not 0 <= number < len(call.args):
        return None
    before = call.args[: number + 1]
    return None if any(isinstance(one, ast.Starred) for one in before) else call.args[number]


def has_unknown_arguments(call: ast.Call) -> bool:
    """Whether `*args` or `**kwargs` may give more than is written."""
    return any(isinstance(one, ast.Starred) for one in call.args) or any(k.arg is None for k in call.keywords)


def is_instance(function: ast.FunctionDef | ast.AsyncFunctionDef, parameter: ast.arg) -> bool:
    """Whether it is a method's `self`."""
    every = [*function.args.posonlyargs, *function.args.args]
    return _is_method(function) and bool(every) and every[0] is parameter


def number_of(function: ast.FunctionDef | ast.AsyncFunctionDef, parameter: ast.arg) -> int | None:
    """At which position callers give it; `self` is not counted."""
    every = [*function.args.posonlyargs, *function.args.args]
    return every.index(parameter) - _is_method(function) if parameter in every else None


def default_of(function: ast.FunctionDef | ast.AsyncFunctionDef, parameter: ast.arg) -> ast.expr | None:
    """What it is where callers leave it out."""
    every = [*function.args.posonlyargs, *function.args.args]
    defaults = dict(zip(reversed(every), reversed(function.args.defaults), strict=False))
    named = zip(function.args.kwonlyargs, function.args.kw_defaults, strict=True)
    defaults |= {one: default for one, default in named if default is not None}
    return defaults.get(parameter)


def _is_method(function: ast.FunctionDef | ast.AsyncFunctionDef) -> bool:
    return class_around(function) is not None and not _is_static(function)


def _is_static(function: ast.FunctionDef | ast.AsyncFunctionDef) -> bool:
    return any(last_name(one) == "staticmethod" for one in function.decorator_list)
