"""DL007: all ranks of a host use the same GPU.

Either its number is written out, or the first GPU is used because nothing chooses one. A process
that sees one GPU only is right to use number 0, and frameworks choose for their users.
"""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator

from drumline_lint.findings import Finding, Severity, rule
from drumline_lint.flow.conditions import conditions
from drumline_lint.flow.distributed import framework, is_of_ranks
from drumline_lint.program.calls import argument
from drumline_lint.program.imports import any_text_near, calls_near
from drumline_lint.program.names import DDP, INIT
from drumline_lint.program.origins import parts, written_values
from drumline_lint.program.program import Program
from drumline_lint.program.tree import calls_beside, enclosing, is_after
from drumline_lint.program.value import ConstantValue
from drumline_lint.reading.source import Source
from drumline_lint.training.models import is_on_default_gpu, wrapped
from drumline_lint.training.steps import is_method

RULE = rule("DL007", in_tests=False)
_CHOOSING = ("set_device", "device_id=", "cuda.device(", "set_default_", "VISIBLE_DEVICES")
_OBJECTS = tuple(
    f"torch.distributed.{name}"
    for name in ("all_gather_object", "gather_object", "broadcast_object_list")
)
_SEES_ONE = re.compile(r"CUDA_VISIBLE_DEVICES|gpus-per-task|gpu-bind|gres=gpu:1\b")


def check(program: Program, source: Source) -> Iterator[Finding]:
    """GPUs that are the same on all ranks.

    Examples: `DDP(model, device_ids=[0])`, `torch.cuda.set_device(0)`, and `model.cuda()` in a
    program that never sets a device.
    """
    if framework(program, source) or _sees_one_gpu(program, source):
        return

    yield from _in_wrapping(program, source)
    for init in program.calls(source, INIT):
        yield from _beside_start(program, source, init)

    if is_of_ranks(program, source) and not _is_chosen(program, source):
        yield from _models_by_default(program, source)
        yield from _objects_by_default(program, source)


def _sees_one_gpu(program: Program, source: Source) -> bool:
    """Whether each process may see one GPU only, whose number is 0.

    Examples: `os.environ["CUDA_VISIBLE_DEVICES"] = local_rank` in the program, `--gpus-per-task=1`
    in the script that starts it.
    """
    if any_text_near(program, source, "CUDA_VISIBLE_DEVICES"):
        return True

    return any(_SEES_ONE.search(launch.script.text) for launch in program.launches_of(source))


def _is_chosen(program: Program, source: Source) -> bool:
    """Whether anything may choose the GPU of a process, or NCCL is not used for certain.

    With gloo, tensors are on the CPU, and no GPU has to be chosen.
    """
    inits = calls_near(program, source, INIT)
    backends = [program.values(argument(init, 0, "backend")) for init in inits]
    is_nccl = bool(backends) and all(values == {ConstantValue("nccl")} for values in backends)

    return not is_nccl or any_text_near(program, source, *_CHOOSING)


# GPUs whose number is written out.


def _in_wrapping(program: Program, source: Source) -> Iterator[Finding]:
    """Numbers that DDP is given: `DDP(model, device_ids=[0])`."""
    for wrapping in program.calls(source, DDP):
        if any(conditions(program, wrapping)):
            continue

        for listed in written_values(program, argument(wrapping, 1, "device_ids")):
            if isinstance(listed, ast.List) and len(listed.elts) == 1:
                yield from _fixed(source, listed.elts[0])


def _fixed(source: Source, node: ast.expr) -> Iterator[Finding]:
    """The finding, if the number of a GPU is written out: `0`, not `local_rank`."""
    if isinstance(node, ast.Constant) and type(node.value) is int:
        yield RULE.at(source, node, f"{source.code(node)} is the same GPU for all ranks of a host")


def _beside_start(program: Program, source: Source, init: ast.Call) -> Iterator[Finding]:
    """What the function that joins the group does before it knows its GPU.

    dist.init_process_group("nccl")
    model = Net().cuda()
    torch.cuda.set_device(0)
    """
    if any(conditions(program, init)):
        return

    calls = [call for call in calls_beside(init) if _is_always_made(program, call)]
    for choice in calls:
        if program.name_of(choice.func) != "torch.cuda.set_device":
            continue

        if choice.args:
            yield from _fixed(source, choice.args[0])

        for call in calls:
            is_move = is_method(call, "cuda") and not call.args
            if is_move and is_after(choice, call):
                message = (
                    f"{source.code(call)} comes before set_device: "
                    "it is the first GPU for all ranks of a host"
                )
                yield RULE.at(source, call, message, fix="call torch.cuda.set_device first")


def _is_always_made(program: Program, call: ast.Call) -> bool:
    """Whether no option decides about a call, and no `try` is prepared for its failure."""
    return enclosing(call, ast.Try) is None and not any(conditions(program, call))


# The first GPU, where nothing chooses one.


def _models_by_default(program: Program, source: Source) -> Iterator[Finding]:
    """Models that go to the current GPU, which is the first: `DDP(model.cuda())`."""
    for wrapping in program.calls(source, DDP):
        for part in parts(program, wrapped(wrapping)):
            if not is_on_default_gpu(program, part):
                continue

            where = program.source_of(part)
            message = f"{where.code(part)} is the first GPU for all ranks of a host"
            yield _by_default(where, part, message)
            break


def _objects_by_default(program: Program, source: Source) -> Iterator[Finding]:
    """Exchanges of objects, whose bytes go through the current GPU.

    results = [None] * world_size
    dist.all_gather_object(results, result)
    """
    for call in program.calls(source, *_OBJECTS):
        if argument(call, None, "device") is not None or argument(call, None, "group") is not None:
            continue

        message = f"{source.code(call.func)} uses the first GPU on all ranks of a host"
        yield _by_default(source, call, message)


def _by_default(source: Source, node: ast.expr, message: str) -> Finding:
    """The finding at what uses the current GPU; a warning, since a launcher may choose it."""
    message = f"{message}: nothing sets the device"
    fix = "call torch.cuda.set_device(local_rank) first"
    return RULE.at(source, node, message, fix=fix, severity=Severity.WARNING)
