"""DL006: BatchNorm sees only one rank's part of the batch."""

from __future__ import annotations

import ast
from collections.abc import Iterator

from drumline_lint.findings import Finding, rule
from drumline_lint.flow.distributed import framework
from drumline_lint.program.calls import argument
from drumline_lint.program.names import DDP
from drumline_lint.program.program import Program
from drumline_lint.reading.source import Source
from drumline_lint.training.models import built_of, is_on_cpu_only, wrapped

RULE = rule("DL006")
_LAYERS = {f"torch.nn.{lazy}BatchNorm{number}d" for lazy in ("", "Lazy") for number in (1, 2, 3)}
_MODELS = "torchvision.models."
_MODELS_WITH_IT = tuple(
    "deeplabv3 densenet efficientnet fcn_ googlenet inception mnasnet mobilenet regnet resnet "
    "resnext shufflenet wide_resnet".split()
)
_SYNCED = ("SyncBatchNorm", "syncbn", "sync_bn", "SyncBN", "sync_batchnorm")


def check(program: Program, source: Source) -> Iterator[Finding]:
    """Models in whose making a BatchNorm is seen, in files that never speak of a synchronised
    one."""
    calls = list(program.calls(source, DDP))
    if not calls or framework(program, source) or is_on_cpu_only(program, source):
        return
    for call in calls:
        model = wrapped(call)
        nodes = list(built_of(program, model))
        layer = next((node for node in nodes if _is_layer(program, node)), None)
        files = {source, *(program.source_of(node) for node in nodes)}
        is_synced = any(word in file.text for file in files for word in _SYNCED)
        if model is not None and layer is not None and not is_synced:
            where = program.source_of(layer).code(layer)
            message = f"{source.code(model)} has BatchNorm ({where})"
            yield RULE.at(
                source, call, f"{message}, which sees only this rank's part of each batch"
            )


def _is_layer(program: Program, node: ast.AST) -> bool:
    """`nn.BatchNorm2d`, or one of torchvision's models that are known to have it."""
    if isinstance(node, ast.Name | ast.Attribute):
        return program.name_of(node) in _LAYERS
    if not isinstance(node, ast.Call):
        return False
    name = program.name_of(node.func)
    if not name.startswith(_MODELS) or argument(node, None, "norm_layer") is not None:
        return False
    last = name.rpartition(".")[2]
    return last.startswith(_MODELS_WITH_IT) or last.endswith("_bn")
