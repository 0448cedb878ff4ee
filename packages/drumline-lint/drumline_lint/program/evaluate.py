"""What an expression, a name, or an attribute may be.

Of a name: from the bindings that may be the last before a use, in its file or in one that it
imports.
"""

from __future__ import annotations

import ast
from collections.abc import Sequence

from drumline_lint.program import names, ranks
from drumline_lint.program.files import package_of
from drumline_lint.program.functions import (
    ancestry,
    called_as,
    name_of_owner,
    of_parameter,
    returned,
)
from drumline_lint.program.names import SYNC_BATCH_NORM
from drumline_lint.program.queries import ProgramView, any_of, cached_query, each, unpacked
from drumline_lint.program.tree import (
    LOOPS,
    Binding,
    FunctionNode,
    ancestors,
    block_of,
    branches_of,
    called_name,
    dotted,
    enclosing_class,
    is_after,
    last_name,
    parent_of,
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
    Items,
    Library,
    LoopItem,
    Method,
    Module,
    Rank,
    RankTest,
    Value,
    Values,
    from_library,
    of_constant,
    union,
)
from drumline_lint.reading.source import Source

# They return their argument, or an equivalent.
PASSED_THROUGH = {
    SYNC_BATCH_NORM,
    *"int list tuple bool iter copy.copy copy.deepcopy torch.compile torch.jit.script typing.cast".split(),
}
PASSING_METHODS = set(
    "bfloat16 compile cpu cuda double eval float half requires_grad_ share_memory to train".split()
)


def of_call(program: ProgramView, node: ast.Call) -> Values:
    callees = program.values(node.func)
    values = union(_called(program, callee, node) for callee in callees)
    if not values and called_name(node):
        named = frozenset(callee for callee in callees if isinstance(callee, (Rank, RankTest)))
        return named or ranks.by_name(called_name(node))
    return values


def _called(program: ProgramView, callee: Value, node: ast.Call) -> Values:
    if isinstance(callee, Library):
        return _called_library(program, callee.name, node)
    if isinstance(callee, Method):
        if callee.name in PASSING_METHODS:
            return frozenset({callee.of})
        return frozenset({CallResult(f"{name_of_owner(program, callee.of)}.{callee.name}", node)})
    if isinstance(callee, Function):
        return returned(program, callee.node)
    if isinstance(callee, Class):
        return frozenset({Instance(callee.node)})
    if isinstance(callee, Instance):
        return frozenset({CallResult(f"{callee.of.name}.{called_as(program, callee.of)}", node)})
    if isinstance(callee, CallResult):
        return frozenset({CallResult(f"{callee.name}()", node)})
    return frozenset({callee}) if isinstance(callee, (RankTest, Rank)) else NOTHING


def _called_library(program: ProgramView, name: str, node: ast.Call) -> Values:
    if name in ranks.OF_FUNCTION:
        return frozenset({Rank("group" if node.args or node.keywords else ranks.OF_FUNCTION[name])})
    if name in ("os.getenv", "os.environ.get"):
        keys = program.values(node.args[0]) if node.args else NOTHING
        return frozenset().union(
            *(ranks.by_variable(key.value) for key in keys if isinstance(key, ConstantValue))
        )
    if name in PASSED_THROUGH and node.args:
        passed = program.values(node.args[-1] if name == "typing.cast" else node.args[0])
        return passed or frozenset({CallResult(name, node)})
    return frozenset({CallResult(name, node)})


def evaluate(program: ProgramView, expression: ast.expr) -> Values:
    values: Values = NOTHING
    match expression:
        case ast.Name():
            values = of_name(program, expression)
        case ast.Attribute():
            values = of_attribute(program, expression)
        case ast.Call():
            values = of_call(program, expression)
        case ast.Constant():
            values = of_constant(expression.value)
        case ast.Subscript():
            values = _of_subscript(program, expression)
        case ast.Compare():
            values = _of_comparison(program, expression)
        # a sum of a thousand terms is a thousand levels deep; ranks occur in short ones
        case ast.BinOp():
            values = _of_operation(program, expression)
        case ast.BoolOp():
            values = ranks.combined(
                expression, [program.values(operand) for operand in expression.values]
            )
        case ast.UnaryOp():
            values = _of_unary(program, expression)
        case ast.Tuple() | ast.List() | ast.Set():
            values = frozenset({Items(tuple(expression.elts))})
        case ast.IfExp():
            values = program.values(expression.body) | program.values(expression.orelse)
        case ast.NamedExpr() | ast.Await():
            values = program.values(expression.value)
        case ast.Lambda():
            values = frozenset({Function(expression)})
    return values


def _of_operation(program: ProgramView, node: ast.BinOp) -> Values:
    """A number that is computed of ranks, or a path: `Path(folder) / name`."""
    left = program.values(node.left)
    computed = ranks.computed(node.op, left, program.values(node.right))
    if computed or not isinstance(node.op, ast.Div):
        return computed
    return frozenset(
        value for value in left if isinstance(value, CallResult) and value.name == "pathlib.Path"
    )


def _of_unary(program: ProgramView, node: ast.UnaryOp) -> Values:
    inner = program.values(node.operand)
    if isinstance(node.op, ast.Not):
        return ranks.negated(inner)
    if isinstance(node.op, ast.USub):
        return frozenset(
            ConstantValue(-v.value)
            for v in inner
            if isinstance(v, ConstantValue) and isinstance(v.value, int)
        )
    return NOTHING


def _of_comparison(program: ProgramView, node: ast.Compare) -> Values:
    if len(node.ops) != 1:
        return NOTHING
    right = node.comparators[0]
    if ranks.is_world_size(right) or ranks.is_world_size(node.left):
        return NOTHING
    if last_name(node.left).endswith("size"):  # one helper may read RANK and WORLD_SIZE
        return NOTHING
    right_values = program.values(right)
    for value in list(right_values):
        if isinstance(value, Items):
            right_values = any_of(program, value.items)
    return ranks.compared(node.ops[0], program.values(node.left), right_values)


def _of_subscript(program: ProgramView, node: ast.Subscript) -> Values:
    keys = [value.value for value in program.values(node.slice) if isinstance(value, ConstantValue)]
    values: set[Value] = set()
    for value in program.values(node.value):
        if value == Library("os.environ"):
            values.update(*map(ranks.by_variable, keys))
        elif isinstance(value, Items):
            for key in keys:
                if isinstance(key, int) and -len(value.items) <= key < len(value.items):
                    values |= program.values(value.items[key])
        elif isinstance(value, LoopItem):
            values.add(value)
    if not values and keys and isinstance(keys[0], str):
        return ranks.by_name(keys[0])
    return frozenset(values)


# Names

_LEAVING = (ast.Return, ast.Raise, ast.Continue, ast.Break)


def reaching_bindings(bindings: list[Binding], use: ast.Name) -> list[Binding]:
    """Of the bindings of this name in its scope: those that may have been the last before the
    use."""
    around = [use, *ancestors(use)]
    plain = []
    for binding in bindings:
        if not isinstance(binding.node, ast.comprehension):
            plain.append(binding)
        elif parent_of(binding.node) in around and binding.value not in around:
            return [binding]
    if len(plain) < 2:
        return plain or bindings
    before = [binding for binding in plain if _is_before(binding, use, around)]
    certain = [number for number, binding in enumerate(before) if _is_certain(binding, around)]
    reaching = [
        binding
        for binding in before[certain[-1] if certain else 0 :]
        if not _is_in_other_branch(binding, around)
    ]
    loops = [node for node in around if isinstance(node, LOOPS)]
    is_fresh = bool(certain) and bool(loops) and loops[-1] in ancestors(before[certain[-1]].node)
    if loops and not is_fresh:
        reaching += [
            binding
            for binding in plain
            if binding not in before and loops[-1] in ancestors(binding.node)
        ]
    return reaching or plain


def _is_before(binding: Binding, use: ast.Name, around: Sequence[ast.AST]) -> bool:
    node = binding.node
    if node in around:
        is_block = isinstance(node, (*LOOPS, ast.With, ast.AsyncWith))
        return is_block and any(part in around for part in getattr(node, "body", ()))
    is_of_scope = isinstance(node, ast.arg) or scope_of(node) is not scope_of(use)
    return is_of_scope or is_after(use, node)


def _is_certain(binding: Binding, around: Sequence[ast.AST]) -> bool:
    """Whether everything that comes to the use has come past it."""
    node = binding.node
    if isinstance(node, ast.arg) or node in around:
        return True
    return any(statement in around for statement in block_of(node))


def _is_in_other_branch(binding: Binding, around: Sequence[ast.AST]) -> bool:
    """Of a condition around the use, or of one whose branch is left."""
    inner = binding.node
    for outer in ancestors(inner):
        if isinstance(outer, ast.If) and inner is not outer.test:
            taken, not_taken = branches_of(outer, inner)
            if outer in around:
                return any(statement in around for statement in not_taken)
            if isinstance(taken[-1], _LEAVING):
                return True
        if outer in around:
            return False
        inner = outer
    return False


def of_name(program: ProgramView, node: ast.Name) -> Values:
    bindings = bindings_of(program, node)
    if bindings is None:
        return _of_unbound(program, node)
    return union(bound(program, binding) for binding in bindings) or ranks.by_name(node.id)


@cached_query
def bindings_of(program: ProgramView, node: ast.Name) -> list[Binding] | None:
    """The bindings that may have been the last before this use; None if the name is not bound at
    all."""
    scopes = program.files.index(source_of(node)).scopes
    scope = scopes.get(scope_of(node))
    is_own = True
    while scope is not None:
        is_class_seen_from_method = isinstance(scope.node, ast.ClassDef) and not is_own
        if node.id in scope.names and not is_class_seen_from_method:
            every = scope.names[node.id]
            return reaching_bindings(every, node) if is_own else every
        scope = scope.outer
        is_own = False
    return None


def assigned(program: ProgramView, name: ast.Name) -> list[ast.expr]:
    """The expressions that may have been assigned to a name, without loops and functions."""
    bindings = bindings_of(program, name) or []
    return [
        binding.value
        for binding in bindings
        if binding.value is not None and binding.kind in ("assign", "entered")
    ]


def _of_unbound(program: ProgramView, node: ast.Name) -> Values:
    source = source_of(node)
    for binding in program.files.index(source).scopes[source.tree].names.get("*", ()):
        module = program.files.module(binding.imported, source)
        if module is not None and (values := exported(program, module, node.id)):
            return values
        if module is None and binding.imported.startswith("torch"):
            return from_library(names.canonical(f"{binding.imported}.{node.id}"))
    return ranks.by_name(node.id) or from_library(node.id)


def exported(program: ProgramView, source: Source, name: str) -> Values:
    return program.meanings.once((source, name), lambda: _export(program, source, name), NOTHING)


def _export(program: ProgramView, source: Source, name: str) -> Values:
    every = program.files.index(source).scopes[source.tree].names
    values = union(bound(program, binding) for binding in every.get(name, ()))
    for star in every.get("*", ()):
        module = program.files.module(star.imported, source)
        if not values and module is not None:
            values = exported(program, module, name)
    return values


def bound(program: ProgramView, binding: Binding) -> Values:
    return program.meanings.memo(binding, lambda: _bind(program, binding))


def _bind(program: ProgramView, binding: Binding) -> Values:
    if binding.kind == "import":
        return _imported(program, binding.imported, source_of(binding.node))
    if binding.kind == "function":
        assert isinstance(binding.node, (ast.FunctionDef, ast.AsyncFunctionDef))
        return frozenset({Function(binding.node)})
    if binding.kind == "class":
        assert isinstance(binding.node, ast.ClassDef)
        return frozenset({Class(binding.node)})
    if binding.kind == "parameter":
        assert isinstance(binding.node, ast.arg)
        return of_parameter(program, binding.node)
    if binding.kind == "each":
        return each(program, binding)
    if binding.value is None:
        return NOTHING
    return unpacked(program, program.values(binding.value), binding.path)


def _imported(program: ProgramView, name: str, source: Source) -> Values:
    whole = program.files.module(name, source)
    if whole is not None:
        return frozenset({Module(whole)})
    package = package_of(name)
    last = name.rpartition(".")[2]
    if package:
        home = program.files.module(package, source)
        if home is not None and home is not source:
            return exported(program, home, last) or ranks.by_name(last)
    if name.startswith("."):
        return ranks.by_name(last)
    return ranks.of_library(name) or from_library(names.canonical(name))


# Attributes


def of_attribute(program: ProgramView, node: ast.Attribute) -> Values:
    owners = program.values(node.value)
    values = union(_member(program, owner, node.attr) for owner in owners)
    if not any(isinstance(owner, (Instance, Module, Class)) for owner in owners):
        values = union((values, _assigned_nearby(program, node)))
    makers = {owner.name for owner in owners if isinstance(owner, CallResult)}
    named = ranks.of_member(makers, last_name(node.value), node.attr)
    says_less = all(isinstance(value, (Method, ConstantValue)) for value in values)
    return named if named and says_less and not ranks.is_other_number(values) else values


def _member(program: ProgramView, owner: Value, name: str) -> Values:
    if isinstance(owner, Library):
        full = names.canonical(f"{owner.name}.{name}")
        return ranks.of_library(full) or from_library(full)
    if isinstance(owner, Module):
        inner = program.files.submodule(owner.source, name)
        as_module: Values = NOTHING if inner is None else frozenset({Module(inner)})
        return exported(program, owner.source, name) or as_module
    if isinstance(owner, CallResult):
        if name == "module" and owner.call.args:  # the wrapped model of DDP and DataParallel
            return program.values(owner.call.args[0])
        return frozenset({Method(owner, name)})
    if isinstance(owner, (Instance, Class)):
        return program.meanings.memo((owner, name), lambda: _find_member(program, owner, name))
    return frozenset({owner}) if isinstance(owner, LoopItem) else NOTHING


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
    """`args.gpu` is what the same file assigns to it."""
    written = dotted(node.value)
    targets = program.files.index(source_of(node)).attributes.get(node.attr, ()) if written else ()
    return union(
        bound(program, binding) for target, binding in targets if dotted(target.value) == written
    )
