"""Which calls set a seed, of which generator, and whether the rank is in it."""

from __future__ import annotations

import ast
from typing import TypeAlias

from drumline_lint.program.program import Program
from drumline_lint.program.tree import Binding, last_name
from drumline_lint.program.value import Rank

TORCH_SEEDS = tuple(
    "torch.manual_seed torch.random.manual_seed torch.default_generator.manual_seed "
    "torch.cuda.manual_seed torch.cuda.manual_seed_all torch.set_rng_state torch.random.set_rng_state".split()
)
OTHER_SEEDS = {"random.seed": "random", "numpy.random.seed": "numpy"}
# They ask for a seed, or seed a generator of their own.
_NOT_SEEDS = (
    "initial_seed",
    "seed_worker",
    "get_seed",
    "default_rng",
    "Generator",
    "SeedSequence",
    "Random",
)
_SAME_AS_ARGUMENTS = ("int", "float", "str", "abs", "min", "max", "sum", "hash", "round")
_WORDS_OF_RANKS = (
    "rank",
    "gpu",
    "proc",
    "pid",
    "device",
    "node",
    "host",
    "worker",
    "time",
    "random",
)
DEEPEST = 8
Seen: TypeAlias = frozenset[str]


def seeds_torch(program: Program, call: ast.Call) -> bool:
    """Whether it seeds torch's own generator; of a function that is not given and says so, it is
    believed."""
    name = program.name_of(call.func)
    if name in TORCH_SEEDS:
        return True
    last = last_name(call.func)
    if "seed" not in last.lower() or last in _NOT_SEEDS or name in OTHER_SEEDS:
        return False
    if program.function_of(call) is not None:
        return False  # its body is followed
    is_owned = name.startswith(("torch.Generator.", "numpy.", "random."))
    return not is_owned


def kind_of_seed(program: Program, call: ast.Call) -> str:
    """torch, random or numpy; nothing for what is no seed of them by its own name."""
    name = program.name_of(call.func)
    return "torch" if name in TORCH_SEEDS[:3] else OTHER_SEEDS.get(name, "")


def may_differ_by_rank(
    program: Program, expression: ast.expr | None, visited: Seen = frozenset()
) -> bool:
    """Whether a seed has the rank in it, or something of which that is not known."""
    if expression is None or len(visited) > DEEPEST:
        return True
    if any(isinstance(value, Rank) for value in program.values(expression)):
        return True
    if isinstance(expression, ast.Constant):
        return expression.value is None
    if isinstance(expression, (ast.Name, ast.Attribute)):
        name = last_name(expression)
        bindings = [] if name in visited else _bindings(program, expression)
        says_rank = any(word in name.lower() for word in _WORDS_OF_RANKS)
        return says_rank or any(
            _binding_may_differ(program, binding, visited | {name}) for binding in bindings
        )
    return any(may_differ_by_rank(program, part, visited) for part in _parts(program, expression))


def _parts(program: Program, expression: ast.expr) -> list[ast.expr | None]:
    """What an expression is computed from; None where that is not known."""
    if isinstance(expression, ast.BinOp):
        return [expression.left, expression.right]
    if isinstance(expression, ast.UnaryOp):
        return [expression.operand]
    if isinstance(expression, ast.IfExp):
        return [expression.body, expression.orelse]
    if isinstance(expression, ast.BoolOp):
        return list(expression.values)
    if isinstance(expression, ast.Subscript) and isinstance(expression.slice, ast.Constant):
        return [ast.Constant(0)]  # `config["seed"]`; a rank by name has been asked for
    if isinstance(expression, ast.Call) and program.name_of(expression.func) in _SAME_AS_ARGUMENTS:
        return list(expression.args)
    return [None]


def _bindings(program: Program, expression: ast.Name | ast.Attribute) -> list[Binding]:
    """Of a name; of an attribute, all in all files: `args.seed += rank` may be anywhere."""
    if isinstance(expression, ast.Name):
        return program.bindings(expression)
    return [
        binding
        for source in program.sources
        for _, binding in program.index(source).attributes.get(expression.attr, ())
    ]


def _binding_may_differ(program: Program, binding: Binding, visited: Seen) -> bool:
    if isinstance(binding.node, ast.AugAssign):
        return may_differ_by_rank(program, binding.node.value, visited)
    if binding.kind == "assign" and not binding.path:
        return may_differ_by_rank(program, binding.value, visited)
    if isinstance(binding.node, ast.arg):
        return any(
            may_differ_by_rank(program, value, visited)
            for value in program.arguments_for(binding.node)
        )
    return binding.kind != "import"
