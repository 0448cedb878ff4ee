"""DL040: only some ranks run a wrapped model, so its collectives block."""

from __future__ import annotations

import ast
import builtins
import sys
from collections.abc import Iterator

from drumline_lint.findings import Finding, Severity, rule
from drumline_lint.flow.collectives import has_counterpart, has_group, who_calls
from drumline_lint.flow.distributed import framework
from drumline_lint.flow.guards import guards
from drumline_lint.flow.loops import has_gradients_off
from drumline_lint.flow.some_ranks import (
    RankFilter,
    calls_under_rank_tests,
    has_backward,
    is_within,
    rank_filter,
)
from drumline_lint.program.bindings import bound
from drumline_lint.program.calls import argument, has_unknown_arguments, number_of
from drumline_lint.program.functions import function_with
from drumline_lint.program.names import DDP
from drumline_lint.program.origins import LARGEST, origins, parts
from drumline_lint.program.program import Program
from drumline_lint.program.queries import recursive_query
from drumline_lint.program.tree import (
    Binding,
    FunctionNode,
    enclosing_function,
    is_called,
    last_name,
    nodes_in,
    parent_of,
    position,
    scope_of,
)
from drumline_lint.program.value import (
    CallResult,
    Class,
    ConstantValue,
    Function,
    Instance,
    Library,
    Method,
    Value,
)
from drumline_lint.reading.source import Source
from drumline_lint.training.models import WRAPPERS, built_of, wrapped, wraps_any

RULE = rule("DL040")
_FORWARD = "forward"
_EFFECTS = {
    "gather": "its forward gathers the weights from all ranks",
    "average": "its backward averages gradients over all ranks",
    "broadcast": "its forward broadcasts the buffers of rank 0",
}


def check(program: Program, source: Source) -> Iterator[Finding]:
    """Calls under a condition on ranks that come to the forward of a wrapped model."""
    if not wraps_any(program) or framework(program, source):
        return

    def find(node: ast.AST) -> Iterator[tuple[str, Chain]]:
        return ((_FORWARD, chain) for chain in forwards_in(program, node))

    reported = set()
    for call in calls_under_rank_tests(program, source):
        ranks = None
        for chain in forwards_by(program, call):
            ranks = ranks or rank_filter(program, call)
            if ranks is None:
                break
            effect = _effect(program, chain, ranks) if _is_open(program, chain) else ""
            if effect and not has_counterpart(program, call, _FORWARD, ranks.tests, find):
                is_sure = effect != "broadcast" or _has_buffers(program, chain)
                place = (ranks.region[0], ast.unparse(chain[-1].func))
                if place in reported:
                    break  # the first is enough
                reported.add(place)
                yield RULE.at(
                    source,
                    call,
                    _message(source, ranks, chain, effect),
                    fix=_fix(source, chain, effect),
                    severity=None if is_sure else Severity.NOTE,
                )
                break


def _has_buffers(program: Program, chain: Chain) -> bool:
    """Whether some are seen in the models that it runs."""
    return any(
        _is_buffer(program, node)
        for ddp_call in wrappings_by(program, chain)
        for node in built_of(program, wrapped(ddp_call.call))
    )


def _is_buffer(program: Program, node: ast.AST) -> bool:
    """A BatchNorm, a registered buffer, or a model of a library of images, which has BatchNorms."""
    name = program.name_of(node) if isinstance(node, ast.Name | ast.Attribute) else ""
    is_registered = isinstance(node, ast.Attribute) and node.attr == "register_buffer"
    return is_registered or "BatchNorm" in name or name.startswith(("torchvision.models.", "timm."))


def _is_open(program: Program, chain: Chain) -> bool:
    """Whether every call of the chain leads to the model; conditions further down are reported
    there."""
    if any(is_within(call, "join") for call in chain):
        return False
    return all(rank_filter(program, call) is None for call in chain[1:])


def _effect(program: Program, chain: Chain, ranks: RankFilter) -> str:
    """What the model would do together with the ranks that do not come; nothing if it may do
    nothing."""
    ddp_calls = wrappings_by(program, chain)
    if any(has_group(program, ddp_call.call) for ddp_call in ddp_calls):
        return ""
    if all(_is_wrapped_there(program, ddp_call, ranks) for ddp_call in ddp_calls):
        return ""
    if any(ddp_call.name != DDP for ddp_call in ddp_calls):
        return "gather"
    can_go_back = not any(has_gradients_off(program, call) for call in chain)
    if can_go_back and has_backward(program, ranks.region):
        # Exits before a backward pass are reported by another rule.
        return "" if ranks.by_exit else "average"
    is_sent = all(_sends_buffers(program, ddp_call) for ddp_call in ddp_calls)
    if is_sent and not _is_evaluated_before(program, chain[0]):
        return "broadcast"
    return ""


def _is_evaluated_before(program: Program, call: ast.Call) -> bool:
    """Whether the last that runs the model before, on all ranks, does so without gradients: DDP sends
    no buffers after that until it trains again."""
    earlier = [
        chain
        for chain in forwards_in(program, scope_of(call))
        if position(chain[0]) < position(call) and rank_filter(program, chain[0]) is None
    ]
    last = max(earlier, key=lambda chain: [position(inner) for inner in chain], default=())
    return any(has_gradients_off(program, inner) for inner in last)


def _is_wrapped_there(program: Program, wrapping: CallResult, ranks: RankFilter) -> bool:
    """Whether the same ranks alone wrap it: then the others have nothing to run."""
    return bool(
        {test.is_main for test in guards(program, wrapping.call)}
        & {test.is_main for test in ranks.tests}
    )


def _sends_buffers(program: Program, wrapping: CallResult) -> bool:
    """Whether the forward of DDP does; it has none to send if the model is known to have none."""
    call = wrapping.call
    options = [argument(call, 4, "broadcast_buffers"), argument(call, None, "forward_sync_buffers")]
    is_on = all(
        option is None or program.values(option) == {ConstantValue(True)} for option in options
    )
    return is_on and may_have_buffers(program, wrapped(call))


def _message(source: Source, ranks: RankFilter, chain: Chain, effect: str) -> str:
    who = who_calls(ranks.tests[0])
    first = source.code(chain[0].func)
    if len(chain) == 1:
        return f"{who} {first}, a wrapped model: {_EFFECTS[effect]}, and the other ranks do not call it"
    model = ast.unparse(run_by(chain[-1]))
    through = " and ".join(ast.unparse(call.func) for call in chain[1:-1])
    by = f" through {through}" if through else ""
    return f"{who} {first}, which runs the wrapped {model}{by}: {_EFFECTS[effect]}, and the other ranks do not"


def _fix(source: Source, chain: Chain, effect: str) -> str:
    """FSDP's inner model has no weights of its own to run with."""
    if effect == "gather":
        return "let every rank run it, and keep only what is for one rank inside"
    model = run_by(chain[0])
    if len(chain) == 1 and isinstance(model, ast.Name | ast.Attribute):
        return f"run `{source.code(model)}.module` here, or let every rank run it"
    return RULE.fix


DEEPEST = 5
MOST_CALLS = 20
MOST = 8
LONGEST = 20
Chain = tuple[ast.Call, ...]
"""Calls that lead to one; the last is the call of the model itself."""


def forwards_in(program: Program, node: ast.AST) -> Iterator[Chain]:
    """All calls in it of something that may be a wrapped model, with those that lead there."""
    for call in nodes_in(node, ast.Call):
        yield from forwards_by(program, call)


def forwards_by(program: Program, call: ast.Call) -> Iterator[Chain]:
    """If a call may run a wrapped model, how."""
    if program.made(run_by(call), *WRAPPERS):
        yield (call,)
        return
    function = program.function_of(call)
    if function is not None:
        for chain in _forwards_of(program, function):
            yield (call, *chain)


def run_by(call: ast.Call) -> ast.expr:
    """The model that a call runs, if it runs one: `model(x)`, `model.generate(x)`."""
    called = call.func
    is_method = isinstance(called, ast.Attribute) and called.attr in ("forward", "generate")
    return called.value if isinstance(called, ast.Attribute) and is_method else called


@recursive_query((), MOST_CALLS)
def _forwards_of(program: Program, function: FunctionNode) -> tuple[Chain, ...]:
    chains: dict[ast.Call, Chain] = {}
    for chain in forwards_in(program, function):
        chains.setdefault(chain[-1], chain)
        if len(chains) == MOST:
            break
    return tuple(chains.values())


def wrappings_by(program: Program, chain: Chain) -> list[CallResult]:
    """What wraps the model that a chain of calls runs; nothing where it may well be another model.

    A function may get the wrapped model from one caller and the inner one from another: what counts
    is what the calls of this chain give it.
    """
    model: ast.expr | None = run_by(chain[-1])
    callers = list(chain[:-1])
    for _ in range(LONGEST):
        behind = _only_binding(program, model) if callers and isinstance(model, ast.Name) else None
        function = function_with(behind) if isinstance(behind, ast.arg) else None
        if isinstance(behind, ast.Name):
            model = behind
        elif (
            isinstance(behind, ast.arg)
            and function
            and function is program.function_of(callers[-1])
        ):
            model = argument(callers.pop(), number_of(function, behind), behind.arg)
        else:
            break
    return [] if model is None else wrappings(program, model)


def _only_binding(program: Program, name: ast.Name) -> ast.AST | None:
    """The parameter or the other name that it stands for, if that is all it may be."""
    bindings = program.bindings(name)
    if len(bindings) != 1:
        return None
    return bindings[0].node if bindings[0].kind == "parameter" else bindings[0].value


def wrappings(program: Program, model: ast.expr, depth: int = 0) -> list[CallResult]:
    """What wraps a model; nothing if it may have been taken out again.

    That it is bare in a run with one process does not matter: there are no other ranks in that.
    """
    made = program.made(model, *WRAPPERS)
    if (
        not made
        or depth > DEEPEST
        or any(_is_other(program, part) for part in parts(program, model))
    ):
        return []
    return made if _is_given_wrapped(program, model, depth) else []


def _is_given_wrapped(program: Program, model: ast.expr, depth: int) -> bool:
    """Whether all callers give a wrapped one for a parameter; of what is assigned, one that is
    wrapped will do."""
    if isinstance(model, ast.Name):
        bindings = program.bindings(model)
        assigned = [binding for binding in bindings if binding.kind != "parameter"]
        return any(_binds_wrapped(program, binding, depth) for binding in assigned or bindings)
    if isinstance(model, ast.Attribute):
        behind = origins(program, model)
        earlier = [origin for origin in behind if not _is_later(origin, model)]
        return any(_is_wrapped(program, origin, depth) for origin in earlier) or not behind
    return True


def _binds_wrapped(program: Program, binding: Binding, depth: int) -> bool:
    if binding.kind == "parameter" or (binding.kind == "assign" and not binding.path):
        return all(_is_wrapped(program, value, depth) for value in program.expressions_of(binding))
    return any(
        isinstance(value, CallResult) and value.name in WRAPPERS
        for value in bound(program, binding)
    )


def _is_wrapped(program: Program, model: ast.expr | None, depth: int) -> bool:
    return model is not None and bool(wrappings(program, model, depth + 1))


def _is_later(value: ast.expr, use: ast.expr) -> bool:
    """Of `self.model = DDP(self.model)`: after a use in the same function."""
    return enclosing_function(value) is enclosing_function(use) and position(use) < position(value)


def _is_other(program: Program, part: ast.expr) -> bool:
    """Whether it may take the model out of its wrapper, or make another one of it."""
    if isinstance(part, ast.Attribute):
        return part.attr in ("module", "_orig_mod")
    if not isinstance(part, ast.Call):
        return False
    name = last_name(part.func).lower()
    is_copy = program.name_of(part.func) in ("getattr", "copy.deepcopy", "copy.copy")
    return is_copy or "unwrap" in name or "without_ddp" in name


_WITH_BUFFERS = ("spectral_norm", "Buffer", "register_buffer", "parametrizations")
_LOADING = ("load", "load_state_dict_from_url")
# Norms that can keep running means, and whether they do by default.
_KEEPING_MEANS = {"BatchNorm": True, "InstanceNorm": False}
# Methods of text, and those that fill a list: their arguments are checked separately.
_BRINGING_NOTHING = {*dir(str), "append", "extend", "insert"}


def may_have_buffers(program: Program, model: ast.expr | None) -> bool:
    """Not if all that the model is built of is seen, and none of it has any."""
    values = program.values(model)
    if not values or not all(_is_seen(program, value) for value in values):
        return True
    nodes = list(built_of(program, model))
    return len(nodes) >= LARGEST or any(_may_bring(program, node) for node in nodes)


def _is_seen(program: Program, value: Value) -> bool:
    """A module of the given files that comes from nothing else than torch, or one of torch.nn."""
    if isinstance(value, Instance):
        bases = [place for place in program.ancestry(value.of) if isinstance(place, str)]
        return bool(bases) and all(
            base.startswith("torch.nn.") or base == "object" for base in bases
        )
    return isinstance(value, CallResult) and value.name.startswith("torch.nn.")


def _may_bring(program: Program, node: ast.AST) -> bool:
    if isinstance(node, ast.Name | ast.Attribute):
        name = program.name_of(node)
        is_for_another = is_called(node) or isinstance(parent_of(node), ast.Attribute)
        return not is_for_another and name.startswith("torch.") and _brings_by_name(name)
    if not isinstance(node, ast.Call):
        return False
    if isinstance(node.func, ast.Attribute) and node.func.attr in _BRINGING_NOTHING:
        return False
    values = program.values(node.func)
    return not values or any(_gives_buffers(program, value, node) for value in values)


def _brings_by_name(name: str) -> bool:
    norms = [word for word, keeps in _KEEPING_MEANS.items() if keeps]
    return (
        any(word in name for word in (*_WITH_BUFFERS, *norms))
        and "convert_sync_batchnorm" not in name
    )


def _keeps_means(program: Program, call: ast.Call, unless_given: bool) -> bool:
    tracks = argument(call, 4, "track_running_stats")
    if tracks is None:
        return unless_given or has_unknown_arguments(call)
    return program.values(tracks) != {ConstantValue(False)}


def _gives_buffers(program: Program, called: Value, call: ast.Call) -> bool:
    """Of what is called: whether a module with buffers may come of it, for all that is known."""
    if isinstance(called, Function):
        return False  # its body is checked separately
    if isinstance(called, Class):
        value = Instance(called.node)
        return program.is_module(called.node) and not _is_seen(program, value)
    if isinstance(called, Library | Method):
        return _gives_by_name(program, program.name_of(call.func), call)
    return not isinstance(called, Instance | CallResult)


def _gives_by_name(program: Program, name: str, call: ast.Call) -> bool:
    root = name.partition(".")[0]
    last = name.rpartition(".")[2]
    if any(word in name for word in _WITH_BUFFERS):
        return name.startswith("torch.")
    for word, keeps in _KEEPING_MEANS.items():
        if word in last:
            return name.startswith("torch.") and _keeps_means(program, call, unless_given=keeps)
    if root == "torch":
        return last in _LOADING or (last[:1].isupper() and not name.startswith("torch.nn."))
    return not (hasattr(builtins, root) or root in sys.stdlib_module_names)
