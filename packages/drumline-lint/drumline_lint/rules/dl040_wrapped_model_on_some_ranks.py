"""DL040: some ranks run a wrapped model, and its collectives find nobody on the others."""

from __future__ import annotations

import ast
from collections.abc import Iterator

from drumline_lint.finding import Finding, Severity
from drumline_lint.program.arguments import argument
from drumline_lint.program.names import DDP
from drumline_lint.program.program import Program
from drumline_lint.program.value import Known, Made
from drumline_lint.reading.source import Source
from drumline_lint.rule import Rule
from drumline_lint.running.collectives import has_group
from drumline_lint.running.counterparts import Find, has_counterpart, who_comes
from drumline_lint.running.distributed import framework
from drumline_lint.running.guards import guards
from drumline_lint.running.loops import has_gradients_off
from drumline_lint.running.some_ranks import Kept, calls_for_some, has_backward, is_within, kept_away
from drumline_lint.training.buffers import may_have_buffers
from drumline_lint.training.forwards import Chain, forwards_by, forwards_in, run_by, wrappings_by
from drumline_lint.training.models import wraps_any
from drumline_lint.training.moving import wrapped

RULE = Rule(
    id="DL040",
    name="wrapped-model-on-some-ranks",
    severity=Severity.WARNING,
    summary="a wrapped model is run by some ranks only",
    why=(
        "A model in DistributedDataParallel is more than the model: its forward sends the buffers of rank 0, such as "
        "the running means of BatchNorm, to all ranks, in eval mode too, and its backward averages gradients over "
        "all. FullyShardedDataParallel gathers the weights in every forward. Where the other ranks do not run it, the "
        "job hangs, or these meet what the others do next. Without gradients only the first forward after a training "
        "step sends: that goes well by luck if the next thing the others do is a training step, and not before a "
        "barrier, a reduction or the end of the job."
    ),
    fix="run what it wraps, its `.module`, where only some ranks come, or let every rank come",
    bad="""\
import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel as DDP

model = DDP(torch.nn.BatchNorm1d(8))
if dist.get_rank() == 0:
    model.eval()
    with torch.no_grad():
        outputs = [model(inputs) for inputs in loader]
""",
    good="""\
import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel as DDP

model = DDP(torch.nn.BatchNorm1d(8))
if dist.get_rank() == 0:
    model.eval()
    with torch.no_grad():
        outputs = [model.module(inputs) for inputs in loader]
""",
)
_FORWARD = "forward"


def check(program: Program, source: Source) -> Iterator[Finding]:
    """Calls under a condition on ranks that come to the forward of a wrapped model."""
    if not wraps_any(program) or framework(program, source):
        return
    for call in calls_for_some(program, source):
        kept = None
        for chain in forwards_by(program, call):
            kept = kept or kept_away(program, call)
            if kept is None:
                break
            waits = _waits(program, chain, kept) if _is_open(program, chain) else ""
            if waits and not has_counterpart(program, call, _FORWARD, kept.tests, _find(program)):
                yield RULE.at(source, call, _said(source, kept, chain, waits), fix=_fix(source, chain, waits))
                break


def _find(program: Program) -> Find:
    return lambda node: ((_FORWARD, chain) for chain in forwards_in(program, node))


def _is_open(program: Program, chain: Chain) -> bool:
    """Whether all on the way go on to the model; what is kept from ranks further down is told of there."""
    if any(is_within(call, "join") for call in chain):
        return False
    return all(kept_away(program, call) is None for call in chain[1:])


def _waits(program: Program, chain: Chain, kept: Kept) -> str:
    """What the model would do together with the ranks that do not come; nothing if it may do nothing."""
    found = wrappings_by(program, chain)
    if any(has_group(program, one.call) for one in found):
        return ""
    if all(_is_wrapped_there(program, one, kept) for one in found):
        return ""
    if any(one.name != DDP for one in found):
        return "its forward gathers the weights from all ranks"
    can_go_back = not any(has_gradients_off(program, call) for call in chain)
    if can_go_back and has_backward(program, kept.region):
        # Of whoever leaves before a backward another rule tells.
        return "" if kept.by_exit else "its backward averages gradients over all ranks"
    if all(_sends_buffers(program, one) for one in found):
        return "its forward sends the buffers of rank 0 to all ranks"
    return ""


def _is_wrapped_there(program: Program, wrapping: Made, kept: Kept) -> bool:
    """Whether the same ranks alone wrap it: then the others have nothing to run."""
    return bool(
        {test.is_main for test in guards(program, wrapping.call)} & {test.is_main for test in kept.tests}
    )


def _sends_buffers(program: Program, wrapping: Made) -> bool:
    """Whether the forward of DDP does; it has none to send if the model is known to have none."""
    call = wrapping.call
    given = [argument(call, 4, "broadcast_buffers"), argument(call, None, "forward_sync_buffers")]
    is_on = all(one is None or program.values(one) == {Known(True)} for one in given)
    return is_on and may_have_buffers(program, wrapped(call))


def _said(source: Source, kept: Kept, chain: Chain, waits: str) -> str:
    who, first = who_comes(kept.tests[0]), source.code(chain[0].func)
    if len(chain) == 1:
        return f"{who} to {first}, a wrapped model: {waits}, and the others are not there"
    model = ast.unparse(run_by(chain[-1]))
    through = " and ".join(ast.unparse(call.func) for call in chain[1:-1])
    by = f" through {through}" if through else ""
    return f"{who} to {first}, which runs the wrapped {model}{by}: {waits}, and the others are not there"


def _fix(source: Source, chain: Chain, waits: str) -> str:
    """FSDP's inner model has no weights of its own to run with."""
    if "weights" in waits:
        return "let every rank run it, and keep only what is for one rank inside"
    model = run_by(chain[0])
    if len(chain) == 1 and isinstance(model, ast.Name | ast.Attribute):
        return f"run `{source.code(model)}.module` here, or let every rank come"
    return RULE.fix
