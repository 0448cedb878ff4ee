"""Code that is not reached as a repository is shipped: an option whose default is off is around it,
and nothing turns the option on; or it is for Ctrl-C."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator

from drumline_lint.flow.conditions import held_conditions
from drumline_lint.program.calls import argument
from drumline_lint.program.imports import connected
from drumline_lint.program.origins import previous_values
from drumline_lint.program.program import Program
from drumline_lint.program.queries import cached_query
from drumline_lint.program.tree import (
    ancestors,
    called_name,
    dotted,
    enclosing_function,
    owner_of,
    parent_of,
)
from drumline_lint.program.value import ConstantValue
from drumline_lint.reading.source import Source

_DEEPEST = 3
_HOLDER = re.compile(
    r"(^|[._])(args?|arguments|cfg|conf|config|configs|flags|hparams|hps|opts?|options|params|settings)(\.|$)",
    re.IGNORECASE,
)
_HOLDING_CLASS = re.compile(r"(Args|Arguments|Config|Configuration|Options|Params|Settings)$")
_ASKS_FOR_FILE = ("exists", "isfile", "isdir")
_WORDS_OF_YAML = {"true": True, "yes": True, "on": True, "false": False, "no": False, "off": False}
_SETTING = re.compile(r"^[ \t]*['\"]?([\w-]+)['\"]?:[ \t]*([^#\n]*)", re.MULTILINE)
_NOTHING_IN_YAML = ("null", "~", "none", "''", '""')
_UNKNOWN = object()
"""A value that may be anything."""


def is_line_left_out(program: Program, source: Source, line: int) -> bool:
    """Whether what begins on a line is not reached, unless a user asks for it."""
    around = [
        statement
        for kind, nodes in program.index(source).nodes.items()
        if issubclass(kind, ast.stmt)
        for statement in nodes
        if statement.lineno <= line <= (statement.end_lineno or line)
    ]
    innermost = max(around, key=lambda statement: statement.lineno, default=None)
    return innermost is not None and is_left_out(program, innermost)


def is_left_out(program: Program, node: ast.AST, depth: int = _DEEPEST) -> bool:
    """Whether an option that is off is around it, or around all calls that lead to it."""
    if _is_for_interrupt(node) or any(
        _is_off(program, test, holds) for test, holds in held_conditions(program, node)
    ):
        return True
    function = enclosing_function(node)
    calls = program.callers(function) if function is not None and depth > 0 else []
    return bool(calls) and all(is_left_out(program, call, depth - 1) for call in calls)


def _is_for_interrupt(node: ast.AST) -> bool:
    """`except KeyboardInterrupt:`"""
    return any(
        isinstance(outer, ast.ExceptHandler)
        and outer.type is not None
        and ast.unparse(outer.type) == "KeyboardInterrupt"
        for outer in ancestors(node)
    )


def _is_off(program: Program, test: ast.expr, holds: bool) -> bool:
    """Whether a condition on an option is another than the one that holds here."""
    answers: set[bool | None] = set()
    if isinstance(test, ast.Compare) and len(test.ops) == 1:
        constant = test.comparators[0]
        if isinstance(constant, ast.Constant):
            values = _values_of_option(program, test.left)
            answers = {_compared(test.ops[0], value, constant.value) for value in values}
    elif isinstance(test, ast.Call) and called_name(test) in _ASKS_FOR_FILE and test.args:
        # a file that is named by default may be there
        values = _values_of_option(program, test.args[0])
        answers = {None if value else False for value in values}
    else:
        answers = {bool(value) for value in _values_of_option(program, test)}
    return answers == {not holds}


def _compared(operator: ast.cmpop, left: object, right: object) -> bool | None:
    if isinstance(operator, (ast.Is, ast.Eq)):
        return left == right
    if isinstance(operator, (ast.IsNot, ast.NotEq)):
        return left != right
    if not isinstance(left, (int, float)) or not isinstance(right, (int, float)):
        return None
    if isinstance(operator, ast.Gt):
        return left > right
    return left >= right if isinstance(operator, ast.GtE) else None


def _values_of_option(
    program: Program, expression: ast.expr, depth: int = _DEEPEST
) -> list[object]:
    """The defaults of an option, also where another name or a parameter has its value; empty if one
    is unknown, or if the option is set somewhere."""
    name = _option(expression)
    if name:
        return _defaults(program, program.source_of(expression), name)
    handed_on = previous_values(program, expression) if depth > 0 else ()
    values = [
        _values_of_option(program, origin, depth - 1) if origin is not None else []
        for origin in handed_on
    ]
    return [value for part in values for value in part] if all(values) else []


def _option(expression: ast.expr) -> str:
    """`resume` of `args.resume`, `cfg["resume"]` and `cfg.get("resume")`."""
    key: ast.expr | None = None
    holder: ast.expr | None = None
    if isinstance(expression, ast.Attribute):
        return expression.attr if _HOLDER.search(dotted(expression.value)) else ""
    if isinstance(expression, ast.Subscript):
        key = expression.slice
        holder = expression.value
    elif isinstance(expression, ast.Call) and called_name(expression) == "get":
        key = expression.args[0] if len(expression.args) == 1 else None
        holder = getattr(expression.func, "value", None)
    is_held = holder is not None and _HOLDER.search(dotted(holder)) is not None
    return str(key.value) if is_held and isinstance(key, ast.Constant) else ""


@cached_query
def _defaults(program: Program, source: Source, name: str) -> list[object]:
    values = [
        *_of_parsers(program, source, name),
        *_of_classes(program, source, name),
        *_settings(program).get(name, ()),
    ]
    is_shown = bool(program.launches) or name in _settings(program)
    is_shown = is_shown or _has_fixed_arguments(program, source)
    is_known = is_shown and bool(values) and not any(value is _UNKNOWN for value in values)
    return values if is_known and not _is_set(program, source, name) else []


def _has_fixed_arguments(program: Program, source: Source) -> bool:
    """`parser.parse_args("--epochs 3".split())`: the command line is written in the file."""
    parsing = program.index(source).calls.get("parse_args", ())
    every = [words for call in parsing for words in call.args]
    wholes = [owner_of(words) if isinstance(words, ast.Call) else words for words in every]
    return any(isinstance(words, (ast.List, ast.Constant)) for words in wholes)


def _of_parsers(program: Program, source: Source, name: str) -> Iterator[object]:
    for call in _declarations(program, source, name):
        action = argument(call, None, "action")
        kind = getattr(action, "value", None)
        default = argument(call, None, "default")
        if kind in ("store_true", "store_false") and default is None:
            yield kind == "store_false"
        elif argument(call, None, "required") is not None or argument(call, None, "nargs"):
            yield _UNKNOWN
        else:
            yield _constant(program, default) if default is not None else None


def _declarations(program: Program, source: Source, name: str) -> list[ast.Call]:
    """`parser.add_argument("--name")`, in the files that are connected with this one."""
    return [
        call
        for file in connected(program, source)
        for call in program.index(file).calls.get("add_argument", ())
        if _destination(call) == name
    ]


def _destination(call: ast.Call) -> str:
    """The attribute that a parser gives the value."""
    destination = argument(call, None, "dest")
    if isinstance(destination, ast.Constant):
        return str(destination.value)
    words = [str(word.value) for word in call.args if isinstance(word, ast.Constant)]
    long = [word for word in words if word.startswith("--")]
    return long[0].lstrip("-").replace("-", "_") if long else ""


def _constant(program: Program, expression: ast.expr) -> object:
    values = program.values(expression)
    constants = [value.value for value in values if isinstance(value, ConstantValue)]
    return constants[0] if len(constants) == len(values) == 1 else _UNKNOWN


def _of_classes(program: Program, source: Source, name: str) -> Iterator[object]:
    """`name: bool = False`, in a class of settings."""
    for file in connected(program, source):
        for binding in _fields(program, file).get(name, ()):
            yield _constant(program, binding)


@cached_query
def _fields(program: Program, source: Source) -> dict[str, list[ast.expr]]:
    fields: dict[str, list[ast.expr]] = {}
    for statement in program.index(source).every(ast.AnnAssign):
        owner = parent_of(statement)
        is_setting = isinstance(owner, ast.ClassDef) and _HOLDING_CLASS.search(owner.name)
        if is_setting and isinstance(statement.target, ast.Name) and statement.value is not None:
            fields.setdefault(statement.target.id, []).append(statement.value)
    return fields


@cached_query
def _settings(program: Program) -> dict[str, list[object]]:
    """What files of YAML set: `name: false`."""
    settings: dict[str, list[object]] = {}
    for path, text in program.documents.items():
        if path.suffix in (".yaml", ".yml"):
            for name, written in _SETTING.findall(text):
                settings.setdefault(name, []).append(_of_yaml(written.strip()))
    return settings


def _of_yaml(written: str) -> object:
    lowered = written.lower()
    if lowered in _NOTHING_IN_YAML:
        return None
    if not written:  # of the lines below it
        return _UNKNOWN
    is_number = re.fullmatch(r"-?\d+", written) is not None
    return _WORDS_OF_YAML.get(lowered, int(written) if is_number else written)


def _is_set(program: Program, source: Source, name: str) -> bool:
    """Whether the code, a script or a README gives the option a value."""
    files = connected(program, source)
    if any(_assigns(program, file, name) for file in files):
        return True
    words = "[-_]".join(map(re.escape, name.split("_")))
    setting = re.compile(rf"(?<![\w.-])(--{words}(?![\w-])|\+*([\w.]+\.)?{re.escape(name)}=)")
    flag = re.compile(rf"--{words}(?![\w-])")
    scripts = _texts_of_scripts(program)
    written = sum(len(flag.findall(file.text)) for file in files)
    messages = [text for file in files for text in _told_to_users(program, file)]
    only_told = sum(len(flag.findall(text)) for text in messages)
    return written > only_told or any(map(setting.search, scripts))


@cached_query
def _told_to_users(program: Program, source: Source) -> list[str]:
    """The texts of declarations and of errors, which may name options."""
    index = program.index(source)
    every = [*index.calls.get("add_argument", ()), *index.every(ast.Raise)]
    return [source.code(node) for node in every]


def _assigns(program: Program, source: Source, name: str) -> bool:
    """`args.name = value`, `parser.set_defaults(name=value)`"""
    index = program.index(source)
    targets = [target for target, _ in index.attributes.get(name, ())]
    defaults = index.calls.get("set_defaults", ())
    return any(_HOLDER.search(dotted(target.value)) for target in targets) or any(
        argument(call, None, name) is not None for call in defaults
    )


@cached_query
def _texts_of_scripts(program: Program) -> set[str]:
    launches = [launch for starts in program.launches.values() for launch in starts]
    return {launch.script.outermost.text for launch in launches}
