"""DL047: the order of the data differs across ranks."""

from __future__ import annotations

import ast
from collections.abc import Iterator

from drumline_lint.findings import Finding, Severity, rule
from drumline_lint.flow.hosts import NODES, meets_on_one_host
from drumline_lint.program.imports import connected
from drumline_lint.program.names import DISTRIBUTED_SAMPLER
from drumline_lint.program.origins import depends_on_rank, parts
from drumline_lint.program.program import Program
from drumline_lint.program.queries import cached_query
from drumline_lint.program.tree import (
    ancestors,
    dotted,
    enclosing_class,
    enclosing_function,
    last_name,
    nodes_in,
    parent_of,
    position,
    scope_of,
)
from drumline_lint.program.value import Instance
from drumline_lint.reading.rendezvous import most_nodes
from drumline_lint.reading.source import Source
from drumline_lint.training.seeds import kind_of_seed

RULE = rule("DL047", only_distributed=False, in_tests=False)
DEEPEST = 2
_LISTINGS = {"listdir", "scandir", "glob", "iglob", "rglob", "iterdir", "walk"}
# What they give does not depend on the order.
_ORDERLESS = {
    "sorted",
    "natsorted",
    "len",
    "any",
    "all",
    "max",
    "min",
    "sum",
    "set",
    "sort",
    "next",
}
_WORDS = ("rank", "DistributedSampler", "Dataset")
_SHUFFLES = ("random.shuffle", "numpy.random.shuffle")


def check(program: Program, source: Source) -> Iterator[Finding]:
    """Lists in an arbitrary order that are divided among ranks, by a sampler or by hand."""
    if not any(word in source.text for word in _WORDS):
        return
    functions = set()
    for node in sorted(_unordered(program, source), key=position):
        function = _function_around(node)
        is_new = function not in functions and not _is_sorted(node) and not _is_put_by_key(node)
        is_new = is_new and not _is_only_asked(node)
        if is_new and _is_divided(program, node):
            functions.add(function)
            # a folder has one order for all processes of a host
            message = (
                f"the order of {source.code(node)} differs across hosts and processes, "
                "and ranks take their samples from it by position"
            )
            is_listing = isinstance(node, ast.Call) and last_name(node.func) in _LISTINGS
            is_same = is_listing and (
                not _has_nodes(program, source) or _is_on_one_host(program, source)
            )
            yield RULE.at(source, node, message, severity=Severity.NOTE if is_same else None)
    for call in program.index(source).calls.get("hash", ()):
        if _chooses_rank(program, call):
            message = (
                f"{source.code(call)} of text differs in every process: "
                "some samples go to several ranks, others to none"
            )
            yield RULE.at(source, call, message, fix="use zlib.crc32 of the encoded text")
    for call in program.calls(source, *_SHUFFLES):
        if call.args and not _is_seeded(program) and _is_cut_by_rank(program, call, call.args[0]):
            message = (
                f"{source.code(call)} has no seed, so each rank takes its part of another order"
            )
            yield RULE.at(source, call, message)


def _has_nodes(program: Program, source: Source) -> bool:
    launches = program.launches_of(source)
    return bool(NODES.search(source.text)) or any(
        (most_nodes(launch) or 1) > 1 for launch in launches
    )


def _is_on_one_host(program: Program, source: Source) -> bool:
    """Whether a group of its program has an address of this host."""
    near = connected(program, source)
    return any(meets_on_one_host(program, file) for file in near)


def _chooses_rank(program: Program, call: ast.Call) -> bool:
    """`hash(key) % world_size == rank`"""
    remainder = parent_of(call)
    if not isinstance(remainder, ast.BinOp) or not isinstance(remainder.op, ast.Mod):
        return False
    return depends_on_rank(program, remainder.right)


def _unordered(program: Program, source: Source) -> Iterator[ast.expr]:
    index = program.index(source)
    for name in _LISTINGS:
        yield from index.calls.get(name, ())
    for call in index.calls.get("set", ()):
        if call.args and _is_of_text(call.args[0]):
            yield call
    yield from (items for items in index.every(ast.SetComp) if _is_of_text(items))


def _is_of_text(items: ast.expr) -> bool:
    """Only the hashes of text differ between processes; items of rows are taken for text."""
    kinds = (ast.GeneratorExp, ast.ListComp, ast.SetComp)
    item = items.elt if isinstance(items, kinds) else items
    key = item.slice if isinstance(item, ast.Subscript) else None
    is_column = isinstance(key, ast.Constant) and isinstance(key.value, str)
    return is_column or (item is not items and isinstance(item, ast.Subscript | ast.Attribute))


def _is_divided(program: Program, node: ast.expr, depth: int = 0) -> bool:
    """Whether a sampler divides it, by its dataset or by itself, or it is cut by the rank; also
    where a function returns it."""
    function = enclosing_function(node)
    owner = None if function is None else enclosing_class(function)
    is_kept = function is not None and function.name == "__init__"
    if is_kept and owner in _sampled_classes(program):
        return True
    if node in _sampled_parts(program) or _is_cut_by_rank(program, node, None):
        return True
    callers = [] if function is None or is_kept or depth > DEEPEST else program.callers(function)
    return any(_is_divided(program, call, depth + 1) and not _is_sorted(call) for call in callers)


@cached_query
def _sampled_parts(program: Program) -> set[ast.expr]:
    return {part for dataset in _sampled(program) for part in parts(program, dataset)}


@cached_query
def _sampled_classes(program: Program) -> set[ast.ClassDef]:
    """The datasets that a DistributedSampler divides."""
    values = [value for dataset in _sampled(program) for value in program.values(dataset)]
    return {value.of for value in values if isinstance(value, Instance)}


def _sampled(program: Program) -> list[ast.expr]:
    return [call.args[0] for call in program.all_calls(DISTRIBUTED_SAMPLER) if call.args]


def _is_cut_by_rank(program: Program, node: ast.expr, shuffled: ast.expr | None) -> bool:
    """`files[rank::world_size]`, in the same function."""
    names = {dotted(shuffled)} if shuffled is not None else _names_bound_to(node)
    return any(
        isinstance(cut.slice, ast.Slice)
        and any(dotted(name) in names for name in nodes_in(cut.value, ast.Name, ast.Attribute))
        and any(depends_on_rank(program, bound) for bound in (cut.slice.lower, cut.slice.step))
        for cut in nodes_in(_function_around(node), ast.Subscript)
    )


def _names_bound_to(node: ast.expr) -> set[str]:
    statement = next((outer for outer in ancestors(node) if isinstance(outer, ast.stmt)), None)
    if isinstance(statement, ast.AugAssign | ast.AnnAssign):
        return {dotted(statement.target)}
    targets = statement.targets if isinstance(statement, ast.Assign) else []
    return {dotted(target) for target in targets}


def _function_around(node: ast.AST) -> ast.AST:
    return enclosing_function(node) or scope_of(node)


def _is_sorted(node: ast.expr) -> bool:
    """By a call around it; what its function sorts later may be this as well."""
    for outer in ancestors(node):
        if isinstance(outer, ast.Call) and last_name(outer.func) in _ORDERLESS:
            return True
        if isinstance(outer, ast.Compare | ast.stmt):
            break
    calls = nodes_in(_function_around(node), ast.Call)
    return any(last_name(call.func) in ("sorted", "natsorted", "sort") for call in calls)


def _is_only_asked(node: ast.expr) -> bool:
    """`known = set(paths)`, and then only `path in known`."""
    names = _names_bound_to(node)
    uses = [
        name
        for name in nodes_in(_function_around(node), ast.Name)
        if name.id in names and isinstance(name.ctx, ast.Load)
    ]
    return bool(uses) and all(isinstance(parent_of(use), ast.Compare) for use in uses)


def _is_put_by_key(node: ast.expr) -> bool:
    """Whether a loop over it only fills dicts that nothing iterates over: `paths[name] = path`."""
    loop = parent_of(node)
    if not isinstance(loop, ast.For) or node is not loop.iter:
        return False
    targets = [target for assign in nodes_in(loop, ast.Assign) for target in assign.targets]
    filled = {dotted(target.value) for target in targets if isinstance(target, ast.Subscript)}
    calls = nodes_in(loop, ast.Call)
    lists = [call.func for call in calls if last_name(call.func) in ("append", "extend", "insert")]
    if lists and all(_is_of_key(added, loop.target) for added in lists):
        return True
    is_listed = bool(lists)
    return bool(filled) and not is_listed and not _are_iterated(node, filled)


def _is_of_key(added: ast.expr, key: ast.expr) -> bool:
    """`by_name[name].append`: the order of the names does not matter."""
    items = added.value if isinstance(added, ast.Attribute) else None
    return isinstance(items, ast.Subscript) and dotted(items.slice) == dotted(key) != ""


def _are_iterated(node: ast.expr, names: set[str]) -> bool:
    function = _function_around(node)
    aliases = {
        dotted(target)
        for assign in nodes_in(function, ast.Assign)
        if dotted(assign.value) in names
        for target in assign.targets
    }
    around = enclosing_class(function) or function
    every = nodes_in(around, ast.For, ast.comprehension, ast.Call, into_functions=True)
    iterated = [
        part.args[0] if isinstance(part, ast.Call) else part.iter
        for part in every
        if _goes_over(part)
    ]
    mentions = [name for part in iterated for name in nodes_in(part, ast.Name, ast.Attribute)]
    return not (names | aliases).isdisjoint(map(dotted, mentions))


def _goes_over(part: ast.AST) -> bool:
    if isinstance(part, ast.Call):
        return bool(part.args) and last_name(part.func) in ("list", "tuple", "enumerate")
    return True


@cached_query
def _is_seeded(program: Program) -> bool:
    """Whether anything sets a seed that is the same on all ranks."""
    seeds = [
        call
        for source in program.sources
        for name in ("seed", "manual_seed", "seed_everything", "set_seed")
        for call in program.index(source).calls.get(name, ())
        if kind_of_seed(program, call) or program.function_of(call) is None
    ]
    return any(not depends_on_rank(program, seed.args[0]) for seed in seeds if seed.args)
