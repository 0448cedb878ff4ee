"""DL006: BatchNorm sees only one rank's part of the batch."""

from __future__ import annotations

import ast
from collections.abc import Iterator

from drumline_lint.findings import Finding, Severity, rule
from drumline_lint.flow.distributed import framework
from drumline_lint.program.calls import argument, default_of
from drumline_lint.program.names import DDP, LOADER
from drumline_lint.program.program import Program
from drumline_lint.reading.source import Source
from drumline_lint.training.loaders import given
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
            is_small = _has_small_batch(program, source)
            yield RULE.at(
                source,
                call,
                f"{message}, which sees only this rank's part of each batch",
                severity=Severity.WARNING if is_small else None,
            )


def _has_small_batch(program: Program, source: Source) -> bool:
    """Whether a loader, or an option that is named so, has a batch of two to four; one sample is
    for an evaluation."""
    index = program.index(source)
    sizes = [given(call, "batch_size") for call in program.calls(source, LOADER)]
    for function in (*index.every(ast.FunctionDef), *index.every(ast.AsyncFunctionDef)):
        parameters = [*function.args.args, *function.args.kwonlyargs]
        named = [parameter for parameter in parameters if parameter.arg.startswith("batch")]
        sizes += [default_of(function, parameter) for parameter in named]
    for call in index.calls.get("add_argument", ()):
        names = [str(name.value) for name in call.args if isinstance(name, ast.Constant)]
        if any("batch" in name for name in names):
            sizes.append(argument(call, None, "default"))
    return any(isinstance(size, ast.Constant) and size.value in (2, 3, 4) for size in sizes)


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
