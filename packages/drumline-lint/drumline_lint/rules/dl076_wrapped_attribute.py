"""DL076: DDP is asked for something that only the model inside it has."""

from __future__ import annotations

import ast
from collections.abc import Iterator

from drumline_lint.findings import Finding, rule
from drumline_lint.program.names import DDP
from drumline_lint.program.program import Program
from drumline_lint.program.tree import is_called
from drumline_lint.program.value import CallResult
from drumline_lint.reading.source import Source

RULE = rule("DL076")
# The methods of DDP, and those of every module.
_METHODS = frozenset(
    "add_module apply bfloat16 buffers children compile cpu cuda double eval extra_repr float forward "
    "gather get_buffer get_extra_state get_parameter get_submodule half ipu join join_hook "
    "load_state_dict module modules mtia named_buffers named_children named_modules named_parameters no_sync "
    "parameters register_backward_hook register_buffer register_comm_hook register_forward_hook "
    "register_forward_pre_hook register_full_backward_hook register_full_backward_pre_hook "
    "register_load_state_dict_post_hook register_load_state_dict_pre_hook register_module "
    "register_parameter register_state_dict_post_hook register_state_dict_pre_hook requires_grad_ "
    "scatter set_extra_state set_submodule share_memory state_dict to to_empty to_kwargs train type "
    "will_sync_module_buffers xpu zero_grad".split()
)


def check(program: Program, source: Source) -> Iterator[Finding]:
    """`model.generate(...)` where the model is wrapped in any case."""
    if not any(True for _ in program.all_calls(DDP)):
        return
    for node in program.index(source).every(ast.Attribute):
        is_other = node.attr not in _METHODS and not node.attr.startswith("_")
        if is_other and is_called(node) and _is_wrapped(program, node.value):
            written = source.code(node.value)
            message = f"{written} is wrapped in DDP, which has no {node.attr}: this call raises"
            yield RULE.at(source, node, message, fix=f"call {written}.module.{node.attr}")


def _is_wrapped(program: Program, model: ast.expr) -> bool:
    """Whether nothing else than DDP is assigned to the name that is used."""
    bindings = program.bindings(model) if isinstance(model, ast.Name) else []
    made = [program.values(binding.value) for binding in bindings if binding.kind == "assign"]
    return (
        bool(made)
        and len(made) == len(bindings)
        and all(_is_ddp(value) for values in made for value in values)
        and all(made)
    )


def _is_ddp(value: object) -> bool:
    return isinstance(value, CallResult) and value.name == DDP
