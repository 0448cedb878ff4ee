"""The given files as one program: what names mean in them, through assignments, functions, classes and imports.

It never runs anything. What it says of an expression is all that it may be, as far as the text tells; where it says
nothing, it does not know, and rules keep silent.
"""

from __future__ import annotations

import ast
import re
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Sequence
from functools import cached_property
from pathlib import Path
from typing import Any, TypeVar

from drumline.lint.program import names, ranks
from drumline.lint.program.reaching import reaching
from drumline.lint.program.tree import (
    Binding,
    FunctionNode,
    Index,
    class_around,
    dotted,
    inside,
    last_name,
    make_index,
    scope_node,
    source_of,
    up,
)
from drumline.lint.program.value import (
    NOTHING,
    Class,
    Element,
    Function,
    Instance,
    Known,
    Library,
    Made,
    Method,
    Module,
    Rank,
    RankTest,
    Several,
    Value,
    Values,
)
from drumline.lint.reading.source import Source

# They give back what they were given, or something that stands for it.
PASSED_THROUGH = {
    "int",
    "list",
    "tuple",
    "bool",
    "iter",
    "copy.copy",
    "copy.deepcopy",
    "torch.compile",
    "torch.jit.script",
    "torch.nn.SyncBatchNorm.convert_sync_batchnorm",
    "typing.cast",
}
PASSING_METHODS = {
    "bfloat16",
    "compile",
    "cpu",
    "cuda",
    "double",
    "eval",
    "float",
    "half",
    "requires_grad_",
    "share_memory",
    "to",
    "train",
}
# They start a function in other processes or threads.
STARTING = ("spawn", "start_processes", "Process", "Thread")
_CALLED = re.compile(r"(\w+)\s*\(")
DEEPEST = 60
FAR = 200
FARTHEST = 2_000
NOT_CUT = 1_000_000
Found = TypeVar("Found")


class Program:
    """All files that were given, and what is known of them."""

    def __init__(self, sources: Sequence[Source]) -> None:
        self.sources = list(sources)
        self._indexes: dict[Source, Index] = {}
        self._known: dict[object, Any] = {}
        self._asked: dict[object, int] = {}
        self._for_now: dict[object, Any] = {}
        self._names: dict[ast.expr, str] = {}
        self._cut = NOT_CUT
        self._num_looked = 0
        self._evaluators: dict[type, Callable[[Any], Values]] = {}
        self._remembered: dict[object, Any] = {}

    # The files.

    def index(self, source: Source) -> Index:
        """Of one file; made when it is first asked for."""
        if source not in self._indexes:
            self._indexes[source] = make_index(source)
        return self._indexes[source]

    def tree(self, source: Source) -> ast.Module:
        """Of one file, indexed: its nodes can be asked about."""
        self.index(source)
        return source.tree

    def source_of(self, node: ast.AST) -> Source:
        """The file that it is in."""
        return source_of(node)

    @cached_property
    def _by_file_name(self) -> dict[str, list[Source]]:
        found = defaultdict(list)
        for source in self.sources:
            is_package = source.path.name == "__init__.py"
            found[source.path.parent.name if is_package else source.path.stem].append(source)
        return found

    def module(self, name: str, seen_from: Source) -> Source | None:
        """The given file that this import means; of several, the one nearest to who imports it."""
        key = ("module", name, seen_from)
        return self.remember(key, lambda: self._find_module(name, seen_from))

    def _find_module(self, name: str, seen_from: Source) -> Source | None:
        dots = len(name) - len(name.lstrip("."))
        parts = [part for part in name.lstrip(".").split(".") if part]
        folders = list(seen_from.path.parents)
        if dots:
            return self._module_in(folders[dots - 1], parts) if dots <= len(folders) else None
        candidates = self._by_file_name.get(parts[-1]) if parts else None
        if not candidates:
            return None
        for folder in folders:
            if found := self._module_in(folder, parts):
                return found
        fitting = [
            one for one in candidates if _ends_with(one.path, parts) and _is_beside(one.path, parts, folders)
        ]
        return max(fitting, key=lambda one: _shared(one.path, seen_from.path), default=None)

    def _module_in(self, folder: Path, parts: list[str]) -> Source | None:
        inner = folder.joinpath(*parts)
        by_path = self._by_path
        as_file = by_path.get(f"{inner}.py") if parts else None
        return as_file or by_path.get(str(inner / "__init__.py"))

    @cached_property
    def _by_path(self) -> dict[str, Source]:
        return {str(source.path): source for source in self.sources}

    # What expressions may be.

    def values(self, expression: ast.expr | None) -> Values:
        """All that it may be."""
        if expression is None:
            return NOTHING
        if expression in self._known:
            known: Values = self._known[expression]
            return known
        return self._once(expression, lambda: self._evaluate(expression), NOTHING)

    def _once(self, key: object, find: Callable[[], Found], nothing: Found) -> Found:
        """What was found before; whoever asks for it while it is being looked for gets nothing.

        What was found with such an answer in it is good enough for the question that is being asked, and forgotten
        after it, unless it was hard to find; the answer to the question itself is whole. A question that leads too
        far is given up.
        """
        found: Found
        if key in self._known:
            found = self._known[key]
            return found
        if key in self._for_now:
            self._cut = 0
            found = self._for_now[key]
            return found
        if key in self._asked or len(self._asked) > DEEPEST or self._num_looked > FARTHEST:
            self._cut = min(self._cut, self._asked.get(key, 0))
            return nothing
        depth = self._asked[key] = len(self._asked)
        self._num_looked += 1
        try:
            found = find()
        finally:
            del self._asked[key]
        is_whole = self._cut >= depth
        (self._known if is_whole else self._for_now)[key] = found
        if is_whole:
            self._cut = NOT_CUT
        if depth == 0:
            if self._num_looked > FAR:
                self._known.update(self._for_now)
            self._for_now.clear()
            self._num_looked = 0
        return found

    def remember(self, key: object, find: Callable[[], Found]) -> Found:
        """What was found before, for questions that others ask of all files together."""
        if key not in self._remembered:
            self._remembered[key] = find()
        found: Found = self._remembered[key]
        return found

    def made(self, expression: ast.expr | None, *wanted: str) -> list[Made]:
        """What it may be that came of calling one of these."""
        return [
            value for value in self.values(expression) if isinstance(value, Made) and value.name in wanted
        ]

    def name_of(self, expression: ast.expr) -> str:
        """The library's name for it, with methods as in `torch.optim.SGD.step`; empty where it is not known."""
        if expression in self._names:
            return self._names[expression]
        name = ""
        for value in self.values(expression):
            if isinstance(value, Library):
                name = value.name
                break
            if isinstance(value, Method):
                name = f"{self._name_of_owner(value.of)}.{value.name}"
                break
        if expression in self._known:
            self._names[expression] = name
        return name

    def calls(self, source: Source, *wanted: str) -> Iterator[ast.Call]:
        """All calls of these in a file, by the library's full name, in the order of the text."""
        by_last: dict[str, set[str]] = defaultdict(set)
        for name in wanted:
            by_last[name.rpartition(".")[2]].add(name)
        if not any(last in source.text for last in by_last):
            return iter(())
        calls = self.index(source).calls
        found = [
            call
            for last in by_last
            for call in calls.get(last, ())
            if self.name_of(call.func) in by_last[last]
        ]
        for alias in self._aliases(source, by_last, wanted) - by_last.keys():
            found += [call for call in calls.get(alias, ()) if self.name_of(call.func) in wanted]
        return iter(sorted(found, key=lambda call: (call.lineno, call.col_offset)))

    def _aliases(self, source: Source, lasts: Iterable[str], wanted: Iterable[str]) -> set[str]:
        """Other names that a file has for them: `from torch.nn.parallel import DistributedDataParallel as DDP`."""
        every = self.remember(("aliases", source), lambda: self._find_aliases(source))
        return set().union(*(every[name] for name in (*lasts, *wanted) if name in every))

    def _find_aliases(self, source: Source) -> dict[str, set[str]]:
        """By the full name of what is imported, and by the last name of what is assigned."""
        found: dict[str, set[str]] = defaultdict(set)
        for scope in self.index(source).scopes.values():
            for name, bindings in scope.names.items():
                for binding in bindings:
                    if binding.imported:
                        found[names.canonical(binding.imported)].add(name)
                    elif isinstance(binding.value, ast.Attribute | ast.Name) and binding.kind == "assign":
                        found[last_name(binding.value)].add(name)
        return found

    def all_calls(self, *wanted: str) -> Iterator[ast.Call]:
        """All calls of these in all given files that mention them."""
        return iter(self.remember(("all calls", wanted), lambda: list(self._find_calls(wanted))))

    def _find_calls(self, wanted: tuple[str, ...]) -> Iterator[ast.Call]:
        lasts = {name.rpartition(".")[2] for name in wanted}
        for source in self.sources:
            if any(last in source.text for last in lasts):
                yield from self.calls(source, *wanted)

    def _evaluate(self, expression: ast.expr) -> Values:
        kind = type(expression)
        if kind not in self._evaluators:
            self._evaluators[kind] = getattr(self, f"_of_{kind.__name__.lower()}", lambda _: NOTHING)
        return self._evaluators[kind](expression)

    def _of_constant(self, node: ast.Constant) -> Values:
        return frozenset({Known(node.value)})

    def _of_lambda(self, node: ast.Lambda) -> Values:
        return frozenset({Function(node)})

    def _of_tuple(self, node: ast.Tuple | ast.List | ast.Set) -> Values:
        return frozenset({Several(tuple(node.elts))})

    _of_list = _of_set = _of_tuple

    def _of_namedexpr(self, node: ast.NamedExpr) -> Values:
        return self.values(node.value)

    def _of_await(self, node: ast.Await) -> Values:
        return self.values(node.value)

    def _of_ifexp(self, node: ast.IfExp) -> Values:
        return self.values(node.body) | self.values(node.orelse)

    def _of_boolop(self, node: ast.BoolOp) -> Values:
        about = [ranks.is_about_being_distributed(one) for one in node.values]
        return ranks.joined(node.op, [self.values(one) for one in node.values], about)

    def _of_unaryop(self, node: ast.UnaryOp) -> Values:
        inner = self.values(node.operand)
        if isinstance(node.op, ast.Not):
            return ranks.flipped(inner)
        if isinstance(node.op, ast.USub):
            return frozenset(
                Known(-v.value) for v in inner if isinstance(v, Known) and isinstance(v.value, int)
            )
        return NOTHING

    def _of_binop(self, node: ast.BinOp) -> Values:
        # A sum of a thousand terms is a thousand deep; ranks are found in short ones.
        return ranks.computed(node.op, self.values(node.left), self.values(node.right))

    def _of_compare(self, node: ast.Compare) -> Values:
        if len(node.ops) != 1:
            return NOTHING
        right = node.comparators[0]
        if ranks.is_world_size(right) or ranks.is_world_size(node.left):
            return NOTHING
        others = self.values(right)
        for value in list(others):
            if isinstance(value, Several):
                others = self._any_of(value.items)
        return ranks.compared(node.ops[0], self.values(node.left), others)

    def _of_subscript(self, node: ast.Subscript) -> Values:
        keys = [value.value for value in self.values(node.slice) if isinstance(value, Known)]
        found: set[Value] = set()
        for value in self.values(node.value):
            if value == Library("os.environ"):
                found.update(*map(ranks.by_variable, keys))
            elif isinstance(value, Several):
                for key in keys:
                    if isinstance(key, int) and -len(value.items) <= key < len(value.items):
                        found |= self.values(value.items[key])
            elif isinstance(value, Element):
                found.add(value)
        if not found and keys and isinstance(keys[0], str):
            return ranks.by_name(keys[0])
        return frozenset(found)

    def _of_name(self, node: ast.Name) -> Values:
        bindings, is_found = self._bindings(node)
        if not is_found:
            return self._of_unbound(node)
        found: Values = frozenset().union(*(self._bound(binding, node) for binding in bindings))
        return found or ranks.by_name(node.id)

    def _of_unbound(self, node: ast.Name) -> Values:
        source = self.source_of(node)
        for binding in self.index(source).scopes[source.tree].names.get("*", ()):
            other = self.module(binding.imported, source)
            if other is not None and (found := self.exported(other, node.id)):
                return found
            if other is None and binding.imported.startswith("torch"):
                return frozenset({Library(names.canonical(f"{binding.imported}.{node.id}"))})
        return ranks.by_name(node.id) or frozenset({Library(node.id)})

    def _bindings(self, node: ast.Name) -> tuple[list[Binding], bool]:
        """Those that may have been the last before this use; and whether the name is bound at all."""
        scopes = self.index(self.source_of(node)).scopes
        scope = scopes.get(scope_node(node))
        is_own = True
        while scope is not None:
            is_class_seen_from_method = isinstance(scope.node, ast.ClassDef) and not is_own
            if node.id in scope.names and not is_class_seen_from_method:
                every = scope.names[node.id]
                return (reaching(every, node) if is_own else every), True
            scope, is_own = scope.outer, False
        return [], False

    def bindings(self, name: ast.Name) -> list[Binding]:
        """The places where a name may have got its value from."""
        return self._bindings(name)[0]

    def assigned(self, name: ast.Name) -> list[ast.expr]:
        """The expressions that a name may have got its value from; a loop's and a function's are not among them."""
        bindings = self.bindings(name)
        return [one.value for one in bindings if one.value is not None and one.kind in ("assign", "entered")]

    def exported(self, source: Source, name: str) -> Values:
        """What a file has under a name, for those who import it."""
        return self._once((source, name), lambda: self._export(source, name), NOTHING)

    def _export(self, source: Source, name: str) -> Values:
        every = self.index(source).scopes[source.tree].names
        found: Values = frozenset().union(*(self._bound(binding) for binding in every.get(name, ())))
        for star in every.get("*", ()):
            other = self.module(star.imported, source)
            if not found and other is not None:
                found = self.exported(other, name)
        return found

    def _bound(self, binding: Binding, use: ast.Name | None = None) -> Values:
        """What a name is by one of its bindings."""
        if binding.kind == "import":
            return self._imported(binding.imported, self.source_of(binding.node))
        if binding.kind == "function":
            assert isinstance(binding.node, ast.FunctionDef | ast.AsyncFunctionDef)
            return frozenset({Function(binding.node)})
        if binding.kind == "class":
            assert isinstance(binding.node, ast.ClassDef)
            return frozenset({Class(binding.node)})
        if binding.kind == "parameter":
            assert isinstance(binding.node, ast.arg)
            return self._of_parameter(binding.node)
        if binding.kind == "each":
            return self._each(binding)
        if binding.value is None:
            return NOTHING
        return self._unpacked(self.values(binding.value), binding.path)

    def _each(self, binding: Binding) -> Values:
        found: set[Value] = set()
        assert binding.value is not None
        for value in self.values(binding.value):
            if isinstance(value, Several):
                found.update(*map(self.values, value.items))
        source, path = self.iterated(binding.value), binding.path
        if not found:
            if last_name(getattr(binding.value, "func", binding.value)) == "enumerate" and path[:1] == (0,):
                return NOTHING
            found.add(Element(source))
        return frozenset(found)

    def iterated(self, expression: ast.expr) -> ast.expr:
        """What is behind `enumerate(...)`, `tqdm(...)`, `zip(...)`: their first argument, or the first loader in it."""
        while isinstance(expression, ast.Call) and expression.args:
            callee = last_name(expression.func)
            if callee not in (
                "enumerate",
                "tqdm",
                "trange",
                "zip",
                "iter",
                "islice",
                "track",
                "cycle",
                "reversed",
            ):
                break
            expression = expression.args[0]
        return expression

    def _unpacked(self, values: Values, path: tuple[int, ...]) -> Values:
        for number in path:
            inner: set[Value] = set()
            for value in values:
                if isinstance(value, Several) and number < len(value.items):
                    inner |= self.values(value.items[number])
                elif isinstance(value, Element):
                    inner.add(value)
            values = frozenset(inner)
        return values

    def _imported(self, name: str, source: Source) -> Values:
        whole = self.module(name, source)
        if whole is not None:
            return frozenset({Module(whole)})
        package, last = package_of(name), name.rpartition(".")[2]
        if package:
            home = self.module(package, source)
            if home is not None and home is not source:
                return self.exported(home, last) or ranks.by_name(last)
        if name.startswith("."):
            return ranks.by_name(last)
        return ranks.of_library(name) or frozenset({Library(names.canonical(name))})

    # Attributes.

    def _of_attribute(self, node: ast.Attribute) -> Values:
        owners = self.values(node.value)
        found: Values = frozenset().union(*(self._member(owner, node.attr) for owner in owners))
        if not any(isinstance(owner, Instance | Module | Class) for owner in owners):
            found |= self._assigned_nearby(node)
        named = ranks.of_member({owner.name for owner in owners if isinstance(owner, Made)}, node.attr)
        return named if all(isinstance(value, Method) for value in found) and named else found

    def _member(self, owner: Value, name: str) -> Values:
        if isinstance(owner, Library):
            full = names.canonical(f"{owner.name}.{name}")
            return ranks.of_library(full) or frozenset({Library(full)})
        if isinstance(owner, Module):
            return self.exported(owner.source, name) or self._submodule(owner.source, name)
        if isinstance(owner, Made):
            if name == "module" and owner.call.args:  # of DDP and DataParallel: what they wrap
                return self.values(owner.call.args[0])
            return frozenset({Method(owner, name)})
        if isinstance(owner, Instance | Class):
            return self._member_of_class(owner, name)
        return frozenset({owner}) if isinstance(owner, Element) else NOTHING

    def _submodule(self, package: Source, name: str) -> Values:
        inner = package.path.parent / f"{name}.py"
        for source in self._by_file_name.get(name, ()):
            if source.path in (inner, package.path.parent / name / "__init__.py"):
                return frozenset({Module(source)})
        return NOTHING

    def _member_of_class(self, owner: Instance | Class, name: str) -> Values:
        node = owner.of if isinstance(owner, Instance) else owner.node
        found: set[Value] = set()
        for place in self.ancestry(node):
            if isinstance(place, str):
                continue
            found |= self._own_member(place, name, owner)
            if found:
                return frozenset(found)
        if self.is_module(node) or any(isinstance(place, str) for place in self.ancestry(node)):
            return frozenset({Method(owner, name)}) if not ranks.by_name(name) else NOTHING
        return NOTHING

    def _own_member(self, node: ast.ClassDef, name: str, owner: Instance | Class) -> set[Value]:
        index = self.index(self.source_of(node))
        found: set[Value] = set()
        for binding in index.scopes[node].names.get(name, ()):
            for value in self._bound(binding):
                if isinstance(value, Function) and isinstance(owner, Instance):
                    bound = Function(value.node, owner)
                    found |= self.returned(bound.node) if _is_property(value.node) else {bound}
                else:
                    found.add(value)
        for target, binding in index.attributes.get(name, ()):
            if (
                self._is_self_of(target.value, node)
                and binding.value is not None
                and binding.kind == "assign"
            ):
                found |= self._unpacked(self.values(binding.value), binding.path)
        return found

    def _is_self_of(self, expression: ast.expr, node: ast.ClassDef) -> bool:
        """Whether it is the first parameter of one of the class's methods."""
        function = scope_node(expression)
        if not isinstance(expression, ast.Name) or not isinstance(function, ast.FunctionDef):
            return False
        every = [*function.args.posonlyargs, *function.args.args]
        return class_around(function) is node and bool(every) and every[0].arg == expression.id

    def _assigned_nearby(self, node: ast.Attribute) -> Values:
        """`args.gpu = ...` in the same file tells what `args.gpu` is."""
        source = self.source_of(node)
        written = dotted(node.value)
        found: Values = NOTHING
        if not written:
            return found
        for target, binding in self.index(source).attributes.get(node.attr, ()):
            if binding.value is not None and binding.kind == "assign" and dotted(target.value) == written:
                found |= self._unpacked(self.values(binding.value), binding.path)
        return found

    # Calls.

    def _of_call(self, node: ast.Call) -> Values:
        found: set[Value] = set()
        for callee in self.values(node.func):
            found |= self._called(callee, node)
        if not found and last_name(node.func):
            return ranks.by_name(last_name(node.func))
        return frozenset(found)

    def _called(self, callee: Value, node: ast.Call) -> Values:
        if isinstance(callee, Library):
            return self._called_library(callee.name, node)
        if isinstance(callee, Method):
            if callee.name in PASSING_METHODS:
                return frozenset({callee.of})
            return frozenset({Made(f"{self._name_of_owner(callee.of)}.{callee.name}", node)})
        if isinstance(callee, Function):
            return self.returned(callee.node)
        if isinstance(callee, Class):
            return frozenset({Instance(callee.node)})
        if isinstance(callee, Instance):
            inner = "forward" if self.is_module(callee.of) else "__call__"
            return frozenset({Made(f"{callee.of.name}.{inner}", node)})
        if isinstance(callee, Made):
            return frozenset({Made(f"{callee.name}()", node)})
        return frozenset({callee}) if isinstance(callee, RankTest | Rank) else NOTHING

    def _called_library(self, name: str, node: ast.Call) -> Values:
        if name in ranks.OF_FUNCTION:
            return frozenset({Rank("group" if node.args or node.keywords else ranks.OF_FUNCTION[name])})
        if name in ("os.getenv", "os.environ.get"):
            keys = self.values(node.args[0]) if node.args else NOTHING
            return frozenset().union(
                *(ranks.by_variable(key.value) for key in keys if isinstance(key, Known))
            )
        if name in PASSED_THROUGH and node.args:
            passed = self.values(node.args[-1] if name == "typing.cast" else node.args[0])
            return passed or frozenset({Made(name, node)})
        return frozenset({Made(name, node)})

    def _name_of_owner(self, owner: Value) -> str:
        """By which a method's full name begins: of a class of the given files, the library's class it comes from."""
        if isinstance(owner, Made | Library):
            return owner.name
        if isinstance(owner, Instance | Class):
            node = owner.of if isinstance(owner, Instance) else owner.node
            return next((place for place in self.ancestry(node) if isinstance(place, str)), node.name)
        return f"{self._name_of_owner(owner.of)}.{owner.name}" if isinstance(owner, Method) else ""

    def returned(self, function: FunctionNode) -> Values:
        """All that a function may return."""
        if isinstance(function, ast.Lambda):
            return self.values(function.body)
        given = [one.value for one in inside(function, ast.Return)]
        return self._once(("returned", function), lambda: self._any_of(given), NOTHING)

    def _any_of(self, expressions: Iterable[ast.expr | None]) -> Values:
        return frozenset().union(*map(self.values, expressions))

    # Functions and their callers.

    def function_of(self, call: ast.Call) -> FunctionNode | None:
        """The function of the given files that a call runs; of a class, its `__init__`."""
        for value in self.values(call.func):
            if isinstance(value, Function):
                return value.node
            if isinstance(value, Class):
                return self.method(value.node, "__init__")
            if isinstance(value, Instance):
                return self.method(value.of, "forward" if self.is_module(value.of) else "__call__")
        return None

    def method(self, node: ast.ClassDef, name: str) -> FunctionNode | None:
        """Of a class or of those that it comes from."""
        for place in self.ancestry(node):
            if not isinstance(place, str):
                for binding in self.index(self.source_of(place)).scopes[place].names.get(name, ()):
                    if isinstance(binding.node, ast.FunctionDef | ast.AsyncFunctionDef):
                        return binding.node
        return None

    def callers(self, function: FunctionNode) -> list[ast.Call]:
        """All calls of it in the given files that could be resolved; `mp.spawn(function)` is one."""
        nobody: list[ast.Call] = []
        return self._once(("callers", function), lambda: self._find_callers(function), nobody)

    def _find_callers(self, function: FunctionNode) -> list[ast.Call]:
        owner = class_around(function)
        if isinstance(function, ast.Lambda) or (
            owner is not None and function.name in ("forward", "__call__")
        ):
            return []  # who calls an instance is not found by a name
        by = owner.name if owner is not None and function.name == "__init__" else function.name
        found = []
        for source in self.calling.get(by, ()):
            calls = self.index(source).calls.get(by, ())
            found += [call for call in calls if self.function_of(call) is function]
        for name in STARTING:
            for source in self.calling.get(name, ()):
                if by in source.text:
                    calls = self.index(source).calls.get(name, ())
                    found += [call for call in calls if function in self.started(call)]
        return found

    @cached_property
    def calling(self) -> dict[str, list[Source]]:
        """The files that may call something of a name, without a look at their trees."""
        found = defaultdict(list)
        for source in self.sources:
            index = self._indexes.get(source)
            for name in set(_CALLED.findall(source.text)) if index is None else index.calls:
                found[name].append(source)
        return found

    def started(self, call: ast.Call) -> list[FunctionNode]:
        """What a call starts in another process or thread: `mp.spawn(main)`, `Process(target=main)`."""
        if last_name(call.func) not in STARTING:
            return []
        target = argument(call, 0, "fn") or argument(call, None, "target")
        return [value.node for value in self.values(target) if isinstance(value, Function)]

    def _of_parameter(self, parameter: ast.arg) -> Values:
        arguments = up(parameter)
        function = up(arguments) if arguments is not None else None
        if not isinstance(function, ast.FunctionDef | ast.AsyncFunctionDef):
            return NOTHING
        every = [*function.args.posonlyargs, *function.args.args]
        owner = class_around(function)
        if owner is not None and not _is_static(function) and every and every[0] is parameter:
            return frozenset({Instance(owner)})
        number = _number_of(function, parameter)
        return self._once(parameter, lambda: self._passed(function, parameter, number), NOTHING)

    def _passed(
        self, function: ast.FunctionDef | ast.AsyncFunctionDef, parameter: ast.arg, number: int | None
    ) -> Values:
        calls = self.callers(function)
        found: Values = frozenset().union(
            *(self._given(call, number, parameter.arg, function) for call in calls)
        )
        if found - {Known(None)}:
            is_left_out = any(
                argument(call, number, parameter.arg) is None
                and not has_unknown_arguments(call)
                and function not in self.started(call)
                for call in calls
            )
            return found | self._default(function, parameter) if is_left_out else found
        default = self._default(function, parameter)
        named = NOTHING if ranks.is_other_number(default) else ranks.by_name(parameter.arg)
        return named or found | default

    def _given(self, call: ast.Call, number: int | None, name: str, function: FunctionNode) -> Values:
        if function in self.started(call):
            if number == 0 and last_name(call.func) in ("spawn", "start_processes"):
                return frozenset({Rank("spawned")})
            passed = argument(call, 1, "args")
            offset = 1 if last_name(call.func) in ("spawn", "start_processes") else 0
            return self._unpacked(self.values(passed), (number - offset,)) if number is not None else NOTHING
        return self.values(argument(call, number, name))

    def given_for(self, parameter: ast.arg) -> list[ast.expr | None]:
        """The expressions that callers give for a parameter; None for each that is not known."""
        function = up(up(parameter) or parameter)
        if not isinstance(function, ast.FunctionDef | ast.AsyncFunctionDef):
            return [None]
        number, default = _number_of(function, parameter), _default_of(function, parameter)
        callers = self.callers(function)
        is_plain = [
            function not in self.started(call) and not has_unknown_arguments(call) for call in callers
        ]
        return [
            (argument(call, number, parameter.arg) or default) if plain else None
            for call, plain in zip(callers, is_plain, strict=True)
        ] or [None]

    def given_by(self, binding: Binding) -> list[ast.expr | None]:
        """The expressions that a binding gives a name: of a parameter those of all callers; None if not known."""
        if isinstance(binding.node, ast.arg):
            return self.given_for(binding.node)
        return [binding.value if binding.kind == "assign" and not binding.path else None]

    def _default(self, function: ast.FunctionDef | ast.AsyncFunctionDef, parameter: ast.arg) -> Values:
        return self.values(_default_of(function, parameter))

    # Classes.

    def ancestry(self, node: ast.ClassDef) -> list[ast.ClassDef | str]:
        """The class and all that it comes from, nearest first; those of libraries by their name."""
        found: list[ast.ClassDef | str] = [node]
        for place in found:
            for base in [] if isinstance(place, str) else place.bases:
                for value in self.values(base):
                    if isinstance(value, Class) and value.node not in found:
                        found.append(value.node)
                    elif isinstance(value, Library) and value.name not in found:
                        found.append(value.name)
        return found

    def is_module(self, node: ast.ClassDef) -> bool:
        """Whether it is a model, or a part of one."""
        return any(isinstance(place, str) and place.endswith("nn.Module") for place in self.ancestry(node))


def package_of(name: str) -> str:
    """Where a module is: `a` of `a.b`, `..` of `..b`; nothing of what is outermost, or has dots alone."""
    package = name.rpartition(".")[0]
    inner = name.lstrip(".")
    dots = "." * (len(name) - len(inner))
    return "" if not inner else dots if "." not in inner else package


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


def _number_of(function: ast.FunctionDef | ast.AsyncFunctionDef, parameter: ast.arg) -> int | None:
    """At which position callers give it; `self` is not counted."""
    every = [*function.args.posonlyargs, *function.args.args]
    is_method = class_around(function) is not None and not _is_static(function)
    return every.index(parameter) - is_method if parameter in every else None


def _default_of(function: ast.FunctionDef | ast.AsyncFunctionDef, parameter: ast.arg) -> ast.expr | None:
    every = [*function.args.posonlyargs, *function.args.args]
    defaults = dict(zip(reversed(every), reversed(function.args.defaults), strict=False))
    named = zip(function.args.kwonlyargs, function.args.kw_defaults, strict=True)
    defaults |= {one: default for one, default in named if default is not None}
    return defaults.get(parameter)


def _is_property(function: FunctionNode) -> bool:
    decorators = getattr(function, "decorator_list", [])
    return any(last_name(one) in ("property", "cached_property") for one in decorators)


def _is_static(function: ast.FunctionDef | ast.AsyncFunctionDef) -> bool:
    return any(last_name(one) == "staticmethod" for one in function.decorator_list)


def _ends_with(path: Path, parts: list[str]) -> bool:
    own = [*path.parts[:-1]] if path.name == "__init__.py" else [*path.parts[:-1], path.stem]
    return own[-len(parts) :] == parts


def _is_beside(path: Path, parts: list[str], folders: list[Path]) -> bool:
    """Whether the folder that a module is found in is beside one of these, as `src` is."""
    module = path.parent if path.name == "__init__.py" else path
    return module.parents[len(parts) - 1].parent in folders


def _shared(one: Path, other: Path) -> int:
    """How many folders two paths have in common."""
    count = 0
    for left, right in zip(one.parts, other.parts, strict=False):
        if left != right:
            break
        count += 1
    return count
