"""What an attribute may be: of a module, a class, an instance, or an object that a library made."""

from __future__ import annotations

import ast
from collections import defaultdict
from collections.abc import Iterator
from dataclasses import replace

from drumline_lint.program import names, ranks
from drumline_lint.program.bindings import bound, exported
from drumline_lint.program.calls import argument
from drumline_lint.program.functions import ancestry, returned
from drumline_lint.program.queries import ProgramView, cached_query
from drumline_lint.program.tree import (
    Binding,
    FunctionNode,
    dotted,
    enclosing_class,
    last_name,
    scope_of,
    source_of,
)
from drumline_lint.program.value import (
    NOTHING,
    CallResult,
    Class,
    ConstantValue,
    Function,
    Instance,
    Library,
    LoopItem,
    Method,
    Module,
    Rank,
    RankTest,
    Value,
    Values,
    from_library,
    union,
)
from drumline_lint.reading.source import Source

_LOCAL: Values = frozenset({Rank("local")})
# Local or global: unknown.
_EITHER: Values = frozenset({Rank("spawned")})


def checked_local_rank(
    program: ProgramView, node: ast.Attribute, owners: Values, named: Values
) -> Values:
    """The meaning of the name, unless one of the given files assigns something else, or something
    unknown."""
    if named != _LOCAL:
        return named
    made = [owner for owner in owners if isinstance(owner, CallResult)]
    # Command-line arguments: another script's own arguments do not matter.
    parsed = [
        source_of(result.call)
        for result in made
        if result.name.rpartition(".")[2].startswith("parse_")
    ]
    files = dict.fromkeys([source_of(node), *parsed]) if parsed else program.files.sources
    every = [binding for source in files for binding in _assigned(program, source, node)]
    is_known = all(_may_be_local(bound(program, binding)) for binding in every)
    return named if is_known else _EITHER


def _assigned(program: ProgramView, source: Source, node: ast.Attribute) -> Iterator[Binding]:
    """What a file assigns to the same expression; `args.rank = int(args.rank)` is ignored."""
    if node.attr not in source.text:
        return
    for target, binding in program.files.index(source).attributes.get(node.attr, ()):
        is_same = dotted(target.value).rpartition(".")[2] == dotted(node.value).rpartition(".")[2]
        within = () if binding.value is None else ast.walk(binding.value)
        if is_same and not any(
            isinstance(part, ast.Attribute) and part.attr == node.attr for part in within
        ):
            yield binding


def _may_be_local(values: Values) -> bool:
    """A constant is for one process; with several it is replaced later."""
    kinds = {value.kind for value in values if isinstance(value, (Rank, RankTest))}
    return "local" in kinds or (
        bool(values) and all(isinstance(value, ConstantValue) for value in values)
    )


_FIELD = "dataclasses.field"


def of_attribute(program: ProgramView, node: ast.Attribute) -> Values:
    owners = program.values(node.value)
    values = union(_member(program, owner, node.attr) for owner in owners)
    if not any(isinstance(owner, (Instance, Module, Class)) for owner in owners):
        values = union((values, _assigned_nearby(program, node)))
    makers = {owner.name for owner in owners if isinstance(owner, CallResult)}
    named = ranks.of_member(makers, last_name(node.value), node.attr)
    if named and node.attr in _other_names_of_local_rank(program):
        named = _LOCAL
    if named and all(_tells_less_than_its_name(value) for value in values):
        return (
            values
            if ranks.is_other_number(values)
            else checked_local_rank(program, node, owners, named)
        )
    return values


@cached_query
def _other_names_of_local_rank(program: ProgramView) -> set[str]:
    """`rank` of `add_argument("--rank", "--local_rank")`: the launcher gives the local one."""
    options = [
        [option.value for option in call.args if isinstance(option, ast.Constant)]
        for source in program.files.sources
        if "add_argument" in source.text and "local" in source.text
        for call in program.files.index(source).calls.get("add_argument", ())
    ]
    return {
        str(flags[0]).lstrip("-").replace("-", "_")
        for flags in options
        if not {"--local_rank", "--local-rank"}.isdisjoint(flags[1:])
    }


def _tells_less_than_its_name(value: Value) -> bool:
    """For an attribute `rank`: a method of an unknown object, or a dataclass's default."""
    return isinstance(value, (Method, ConstantValue)) or (
        isinstance(value, CallResult) and value.name == _FIELD
    )


def _member(program: ProgramView, owner: Value, name: str) -> Values:
    if isinstance(owner, Library):
        full = names.canonical(f"{owner.name}.{name}")
        return ranks.of_library(full) or from_library(full)
    if isinstance(owner, Module):
        inner = program.files.submodule(owner.source, name)
        return exported(program, owner.source, name) or (
            NOTHING if inner is None else frozenset({Module(inner)})
        )
    if isinstance(owner, CallResult):
        if name == "module" and owner.call.args:  # the wrapped model of DDP and DataParallel
            return program.values(owner.call.args[0])
        return _of_field(program, owner, name) or frozenset({Method(owner, name)})
    if isinstance(owner, (Instance, Class)):
        return _member_of_class(program, owner, name)
    return frozenset({owner}) if isinstance(owner, LoopItem) else NOTHING


def _of_field(program: ProgramView, owner: CallResult, name: str) -> Values:
    """For `part: Part = field(default_factory=Part)`, the attribute of `Part`."""
    if owner.name != _FIELD:
        return NOTHING
    makers = program.values(argument(owner.call, None, "default_factory"))
    parts = [Instance(maker.node) for maker in makers if isinstance(maker, Class)]
    return frozenset().union(*(_member_of_class(program, part, name) for part in parts))


def _member_of_class(program: ProgramView, owner: Instance | Class, name: str) -> Values:
    return program.meanings.memo((owner, name), lambda: _find_member(program, owner, name))


def _find_member(program: ProgramView, owner: Instance | Class, name: str) -> Values:
    places = ancestry(program, owner.of if isinstance(owner, Instance) else owner.node)
    for place in places:
        if not isinstance(place, str) and (values := _own_member(program, place, name, owner)):
            return frozenset(values)
    is_of_library = any(isinstance(place, str) for place in places)
    return (
        frozenset({Method(owner, name)}) if is_of_library and not ranks.by_name(name) else NOTHING
    )


def _own_member(
    program: ProgramView, node: ast.ClassDef, name: str, owner: Instance | Class
) -> set[Value]:
    """The attribute of one class, from its body or from assignments in its methods."""
    index = program.files.index(source_of(node))
    values: set[Value] = set()
    for binding in index.scopes[node].names.get(name, ()):
        for value in bound(program, binding):
            if not isinstance(value, Function) or not isinstance(owner, Instance):
                values.add(value)
            elif _is_property(value.node):
                values |= returned(program, value.node)
            else:
                values.add(Function(value.node, owner))
    for target, binding in index.attributes.get(name, ()):
        if _is_self_of(target.value, node):
            values |= bound(program, binding)
    return values


def _is_self_of(expression: ast.expr, node: ast.ClassDef) -> bool:
    """Whether it is the first parameter of one of the class's methods."""
    function = scope_of(expression)
    if not isinstance(expression, ast.Name) or not isinstance(function, ast.FunctionDef):
        return False
    every = [*function.args.posonlyargs, *function.args.args]
    return enclosing_class(function) is node and bool(every) and every[0].arg == expression.id


def _is_property(function: FunctionNode) -> bool:
    decorators = getattr(function, "decorator_list", [])
    return any(last_name(decorator) in ("property", "cached_property") for decorator in decorators)


def _assigned_nearby(program: ProgramView, node: ast.Attribute) -> Values:
    """`args.gpu` is what the same file assigns to it, or `for args.gpu in ...` iterates over; if it
    assigns nothing, a condition on ranks that another file assigns."""
    written = dotted(node.value)
    values: Values = NOTHING
    if not written:
        return values
    for target, binding in program.files.index(source_of(node)).attributes.get(node.attr, ()):
        if dotted(target.value) == written:
            values |= bound(program, binding)
    return values or _rank_flag(program, node.attr, last_name(node.value))


def _rank_flag(program: ProgramView, name: str, owner: str) -> Values:
    """`args.saves = rank == 0`, wherever it is set. Another script may have an argument of that
    name, so it is not certain that other ranks never pass."""
    if owner in ("", "self", "cls"):
        return NOTHING
    flags = _comparisons_assigned(program).get((owner, name), ())
    values: Values = frozenset().union(*(program.values(flag) for flag in flags))
    tests = [value for value in values if isinstance(value, RankTest)]
    return frozenset(replace(test, is_needed=False) for test in tests)


@cached_query
def _comparisons_assigned(program: ProgramView) -> dict[tuple[str, str], list[ast.expr]]:
    """The comparisons that all files assign to attributes and items, by the last names of both."""
    flags: dict[tuple[str, str], list[ast.expr]] = defaultdict(list)
    for source in program.files.sources:
        # a file that says nothing of ranks need not be indexed
        statements = program.files.index(source).every(ast.Assign) if "rank" in source.text else ()
        for statement in statements:
            if isinstance(statement.value, (ast.Compare, ast.BoolOp, ast.UnaryOp)):
                for target in statement.targets:
                    flags[_owner_and_name(target)].append(statement.value)
    return flags


def _owner_and_name(target: ast.expr) -> tuple[str, str]:
    if isinstance(target, ast.Attribute):
        return last_name(target.value), target.attr
    key = target.slice if isinstance(target, ast.Subscript) else None
    if isinstance(target, ast.Subscript) and isinstance(key, ast.Constant):
        return last_name(target.value), str(key.value)
    return "", ""


def of_item(program: ProgramView, owner: ast.expr, key: object) -> Values:
    """`config["saves"]`, by what is assigned to it anywhere, or by its name."""
    name = str(key)
    return _rank_flag(program, name, last_name(owner)) or ranks.by_name(name)
