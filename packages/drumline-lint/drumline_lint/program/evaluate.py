"""What an expression, a name, or an attribute may be.

Of a name: from the bindings that may be the last before a use, in its file or in one that it
imports.
"""

from __future__ import annotations

import ast
from collections.abc import Sequence

from drumline_lint.program import names, ranks
from drumline_lint.program.calls import positional_parameters
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
    NAMED_FUNCTIONS,
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
    constants_in,
    from_library,
    of_constant,
    only,
    union,
)
from drumline_lint.reading.source import Source

# They return their argument, or an equivalent: `copy.deepcopy(model)`.
PASSED_THROUGH = {
    SYNC_BATCH_NORM,
    *"int list tuple bool iter copy.copy copy.deepcopy torch.compile torch.jit.script typing.cast".split(),
}
# Methods that return their owner: `model.to(device)`.
PASSING_METHODS = set(
    "bfloat16 compile cpu cuda double eval float half requires_grad_ share_memory to train".split()
)


def evaluate(program: ProgramView, expression: ast.expr) -> Values:
    """All that an expression may be; nothing for one that the rules do not need."""
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
            operands = [program.values(operand) for operand in expression.values]
            values = ranks.combined(expression, operands)
        case ast.UnaryOp():
            values = _of_unary(program, expression)
        case ast.Tuple() | ast.List() | ast.Set():
            values = only(Items(tuple(expression.elts)))
        case ast.IfExp():
            values = program.values(expression.body) | program.values(expression.orelse)
        case ast.NamedExpr() | ast.Await():
            values = program.values(expression.value)
        case ast.Lambda():
            values = only(Function(expression))

    return values


# Calls


def of_call(program: ProgramView, node: ast.Call) -> Values:
    """What a call returns; of an unknown function, what its name means: `get_rank()`."""
    callees = program.values(node.func)
    values = union(_called(program, callee, node) for callee in callees)
    return values or ranks.by_name(called_name(node))


def _called(program: ProgramView, callee: Value, node: ast.Call) -> Values:
    """What a call returns if it calls this."""
    if isinstance(callee, Library):
        return _called_library(program, callee.name, node)

    if isinstance(callee, Method):
        if callee.name in PASSING_METHODS:
            return only(callee.of)
        owner = name_of_owner(program, callee.of)
        return only(CallResult(f"{owner}.{callee.name}", node))

    if isinstance(callee, Function):
        return returned(program, callee.node)

    if isinstance(callee, Class):
        return only(Instance(callee.node))

    if isinstance(callee, Instance):
        method = called_as(program, callee.of)
        return only(CallResult(f"{callee.of.name}.{method}", node))

    if isinstance(callee, CallResult):
        return only(CallResult(f"{callee.name}()", node))

    if isinstance(callee, (RankTest, Rank)):
        return only(callee)

    return NOTHING


def _called_library(program: ProgramView, name: str, node: ast.Call) -> Values:
    """What a library's function returns: a rank, the value of a variable, or its argument."""
    if name in ranks.OF_FUNCTION:
        is_in_group = bool(node.args or node.keywords)  # `dist.get_rank(group)`

        return only(Rank("group" if is_in_group else ranks.OF_FUNCTION[name]))

    if name in ("os.getenv", "os.environ.get"):
        keys = program.values(node.args[0]) if node.args else NOTHING
        return union(map(ranks.by_variable, constants_in(keys)))

    passed: Values = NOTHING
    if name in PASSED_THROUGH and node.args:
        passed = program.values(node.args[-1 if name == "typing.cast" else 0])

    return passed or only(CallResult(name, node))


# Operators


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
    """`not is_main`, `-1`."""
    inner = program.values(node.operand)
    if isinstance(node.op, ast.Not):
        return ranks.negated(inner)
    if not isinstance(node.op, ast.USub):
        return NOTHING

    numbers = [number for number in constants_in(inner) if isinstance(number, int)]
    return frozenset(ConstantValue(-number) for number in numbers)


def _of_comparison(program: ProgramView, node: ast.Compare) -> Values:
    """The ranks that a comparison selects: `rank == 0`, `rank in (0, 1)`."""
    if len(node.ops) != 1:
        return NOTHING

    left = node.left
    right = node.comparators[0]
    if ranks.is_world_size(right) or ranks.is_world_size(left):
        return NOTHING
    if last_name(left).endswith("size"):  # one helper may read RANK and WORLD_SIZE
        return NOTHING

    right_values = program.values(right)
    for value in list(right_values):
        if isinstance(value, Items):
            right_values = any_of(program, value.items)

    return ranks.compared(node.ops[0], program.values(left), right_values)


def _of_subscript(program: ProgramView, node: ast.Subscript) -> Values:
    """The item of something by its key.

    - `os.environ["RANK"]` is a rank
    - `(0, 1)[0]` is what is written there
    - `batch["label"]` is a part of the batch, if that is an item of a loader
    - `settings["rank"]` is what the key means, where the settings are unknown
    """
    keys = constants_in(program.values(node.slice))
    values: set[Value] = set()

    for value in program.values(node.value):
        if value == Library("os.environ"):
            values.update(*map(ranks.by_variable, keys))
        elif isinstance(value, LoopItem):
            values.add(value)
        elif isinstance(value, Items):
            values.update(*(_item(program, value, key) for key in keys))

    if not values and keys and isinstance(keys[0], str):
        return ranks.by_name(keys[0])

    return frozenset(values)


def _item(program: ProgramView, items: Items, key: object) -> Values:
    """What is written in this place of a tuple or list."""
    if isinstance(key, int) and -len(items.items) <= key < len(items.items):
        return program.values(items.items[key])
    return NOTHING


# Names

_LEAVING = (ast.Return, ast.Raise, ast.Continue, ast.Break)


def reaching_bindings(bindings: list[Binding], use: ast.Name) -> list[Binding]:
    """Of the bindings of this name in its scope: those that may have been the last before the use.

    - `a = 1`, `a = 2`, `print(a)`: the second
    - `a = 1`, `if test: a = 2`, `print(a)`: both
    - `a = 1`, `while test: print(a); a = 2`: both, since the second comes before the next pass
    - `print(a)`, `a = 1`: this one, although it comes too late
    """
    around = [use, *ancestors(use)]

    plain = []
    for binding in bindings:
        if not isinstance(binding.node, ast.comprehension):
            plain.append(binding)
        elif parent_of(binding.node) in around and binding.value not in around:
            return [binding]

    if len(plain) < 2:
        return plain or bindings

    # What is before the last certain binding cannot reach the use.
    before = [binding for binding in plain if _is_before(binding, use, around)]
    last_certain: Binding | None = None
    candidates = before
    for number, binding in enumerate(before):
        if _is_certain(binding, around):
            last_certain = binding
            candidates = before[number:]

    reaching = [binding for binding in candidates if not _is_in_other_branch(binding, around)]

    loops = [node for node in around if isinstance(node, LOOPS)]
    if loops and (last_certain is None or loops[-1] not in ancestors(last_certain.node)):
        # What is bound after the use, the next pass of the loop sees.
        reaching += [
            binding
            for binding in plain
            if binding not in before and loops[-1] in ancestors(binding.node)
        ]

    return reaching or plain


def _is_before(binding: Binding, use: ast.Name, around: Sequence[ast.AST]) -> bool:
    """Whether it is written before the use; of a loop or a `with`, whether the use is in its
    body."""
    node = binding.node
    if node in around:
        is_block = isinstance(node, (*LOOPS, ast.With, ast.AsyncWith))
        return is_block and any(part in around for part in getattr(node, "body", ()))

    is_of_scope = isinstance(node, ast.arg) or scope_of(node) is not scope_of(use)
    return is_of_scope or is_after(use, node)


def _is_certain(binding: Binding, around: Sequence[ast.AST]) -> bool:
    """Whether everything that comes to the use has come past it: a parameter, or a statement of a
    block that the use is in."""
    node = binding.node
    if isinstance(node, ast.arg) or node in around:
        return True

    return any(statement in around for statement in block_of(node))


def _is_in_other_branch(binding: Binding, around: Sequence[ast.AST]) -> bool:
    """Whether it is in another branch of a condition around the use, or in one that ends with
    `return` or the like."""
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
    """What the bindings of a name give it, otherwise what the name itself means: `local_rank`."""
    bindings = bindings_of(program, node)
    if bindings is None:
        return _of_unbound(program, node)

    return union(bound(program, binding) for binding in bindings) or ranks.by_name(node.id)


@cached_query
def bindings_of(program: ProgramView, node: ast.Name) -> list[Binding] | None:
    """The bindings that may have been the last before this use; None if the name is not bound at
    all."""
    scopes = program.files.index(source_of(node)).scopes
    innermost = scopes.get(scope_of(node))
    if innermost is None:
        return None
    if node.id in innermost.names:
        return reaching_bindings(innermost.names[node.id], node)

    scope = innermost.outer
    while scope is not None:
        # Methods do not see the names of their class.
        if node.id in scope.names and not isinstance(scope.node, ast.ClassDef):
            return scope.names[node.id]
        scope = scope.outer

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
    """A name that the file does not bind: one from `from module import *`, or a builtin."""
    source = source_of(node)
    top = program.files.index(source).scopes[source.tree]

    for star in top.names.get("*", ()):
        module = program.files.module(star.imported, source)
        if module is not None and (values := exported(program, module, node.id)):
            return values
        if module is None and star.imported.startswith("torch"):
            return from_library(names.canonical(f"{star.imported}.{node.id}"))

    return ranks.by_name(node.id) or from_library(node.id)


def exported(program: ProgramView, source: Source, name: str) -> Values:
    """What importers of a file get by a name."""
    return program.meanings.once((source, name), lambda: _export(program, source, name), NOTHING)


def _export(program: ProgramView, source: Source, name: str) -> Values:
    """What a file binds to a name itself, otherwise what it gets by `from module import *`."""
    top = program.files.index(source).scopes[source.tree]
    values = union(bound(program, binding) for binding in top.names.get(name, ()))

    for star in top.names.get("*", ()):
        module = program.files.module(star.imported, source)
        if not values and module is not None:
            values = exported(program, module, name)

    return values


def bound(program: ProgramView, binding: Binding) -> Values:
    """What a binding gives its name."""
    return program.meanings.memo(binding, lambda: _bind(program, binding))


def _bind(program: ProgramView, binding: Binding) -> Values:
    """The file or the function of an import, a definition, what callers pass for a parameter, or the
    part of a value that is assigned."""
    node = binding.node
    if binding.kind == "import":
        return _imported(program, binding.imported, source_of(node))

    if isinstance(node, NAMED_FUNCTIONS):
        return only(Function(node))
    if isinstance(node, ast.ClassDef):
        return only(Class(node))

    if isinstance(node, ast.arg) and binding.kind == "parameter":
        return of_parameter(program, node)
    if binding.kind == "each":
        return each(program, binding)

    if binding.value is None:
        return NOTHING

    return unpacked(program, program.values(binding.value), binding.path)


def _imported(program: ProgramView, name: str, source: Source) -> Values:
    """What an import gives, by the full name.

    `lib.data` is one of the given files, `lib.data.make_loader` something in it, and
    `torch.nn.Module` something of a library.
    """
    whole = program.files.module(name, source)
    if whole is not None:
        return only(Module(whole))

    package = package_of(name)
    last = name.rpartition(".")[2]
    home = program.files.module(package, source) if package else None
    if home is not None and home is not source:
        return exported(program, home, last) or ranks.by_name(last)

    if name.startswith("."):
        return ranks.by_name(last)

    return ranks.of_library(name) or from_library(names.canonical(name))


# Attributes


def of_attribute(program: ProgramView, node: ast.Attribute) -> Values:
    """A member of what its owner may be, and what the same file assigns to it.

    Where that is little, it is what the name means: `args.local_rank` of an unknown `args`.
    """
    owners = program.values(node.value)
    values = union(_member(program, owner, node.attr) for owner in owners)
    if not any(isinstance(owner, (Instance, Module, Class)) for owner in owners):
        values = union((values, _assigned_nearby(program, node)))

    makers = {owner.name for owner in owners if isinstance(owner, CallResult)}
    named = ranks.of_member(makers, last_name(node.value), node.attr)
    says_less = all(isinstance(value, (Method, ConstantValue)) for value in values)
    if named and says_less and not ranks.is_other_number(values):
        return named

    return values


def _member(program: ProgramView, owner: Value, name: str) -> Values:
    """`OWNER.name`."""
    if isinstance(owner, Library):
        full = names.canonical(f"{owner.name}.{name}")
        return ranks.of_library(full) or from_library(full)

    if isinstance(owner, Module):
        if values := exported(program, owner.source, name):
            return values

        inner = program.files.submodule(owner.source, name)
        return NOTHING if inner is None else only(Module(inner))

    if isinstance(owner, CallResult):
        if name == "module" and owner.call.args:  # the wrapped model of DDP and DataParallel
            return program.values(owner.call.args[0])
        return only(Method(owner, name))

    if isinstance(owner, (Instance, Class)):
        return program.meanings.memo((owner, name), lambda: _find_member(program, owner, name))

    return only(owner) if isinstance(owner, LoopItem) else NOTHING


def _find_member(program: ProgramView, owner: Instance | Class, name: str) -> Values:
    """The attribute of the nearest class that has it; where a library's class may have it, a method
    of the library."""
    places = ancestry(program, owner.of if isinstance(owner, Instance) else owner.node)

    for place in places:
        if not isinstance(place, str) and (values := _own_member(program, place, name, owner)):
            return frozenset(values)

    is_of_library = any(isinstance(place, str) for place in places)
    if is_of_library and not ranks.by_name(name):
        return only(Method(owner, name))

    return NOTHING


def _own_member(
    program: ProgramView, node: ast.ClassDef, name: str, owner: Instance | Class
) -> set[Value]:
    """The attribute of one class, from its body or from assignments in its methods.

    `def step(self)` and `step = 0` in the body, `self.step = 0` in a method.
    """
    index = program.files.index(source_of(node))
    values: set[Value] = set()

    for binding in index.scopes[node].names.get(name, ()):
        for value in bound(program, binding):
            if not isinstance(value, Function) or not isinstance(owner, Instance):
                values.add(value)
            elif _is_property(value.node):
                values |= returned(program, value.node)
            else:  # a method of this instance
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

    names_in_order = [parameter.arg for parameter in positional_parameters(function)]
    return enclosing_class(function) is node and names_in_order[:1] == [expression.id]


def _is_property(function: FunctionNode) -> bool:
    """Whether an instance gives what it returns, not the function."""
    decorators = getattr(function, "decorator_list", [])
    return any(last_name(decorator) in ("property", "cached_property") for decorator in decorators)


def _assigned_nearby(program: ProgramView, node: ast.Attribute) -> Values:
    """What the same file assigns to `args.gpu`."""
    written = dotted(node.value)
    if not written:
        return NOTHING

    values: Values = NOTHING
    for target, binding in program.files.index(source_of(node)).attributes.get(node.attr, ()):
        if dotted(target.value) == written:
            values |= bound(program, binding)

    return values
