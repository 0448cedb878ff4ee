"""Whether Accelerate shards the states that it saves and loads, by FSDP or DeepSpeed: otherwise each
rank handles them without the others."""

from __future__ import annotations

import ast
import re

from drumline_lint.flow.conditions import conditions
from drumline_lint.flow.distributed import is_always_run
from drumline_lint.program.calls import argument
from drumline_lint.program.imports import connected, with_imported
from drumline_lint.program.names import ACCELERATOR
from drumline_lint.program.origins import written_values
from drumline_lint.program.program import Program
from drumline_lint.program.queries import cached_query
from drumline_lint.program.tree import nodes_in, owner_of
from drumline_lint.reading.launchers import ACCELERATE, Launch
from drumline_lint.reading.source import Source

_PLUGINS = tuple(
    f"accelerate.{place}{name}Plugin"
    for place in ("", "utils.")
    for name in ("DeepSpeed", "FullyShardedDataParallel")
)
_SHARDING_FLAGS = {"use-fsdp", "use-deepspeed", "deepspeed-config-file", "zero-stage"}
_SHARDING_SETTING = re.compile(
    r"^\s*(?:use_(?:fsdp|deepspeed)\s*:\s*[\"']?true"
    r"|distributed_type\s*:\s*[\"']?(?:fsdp|deepspeed))\b",
    re.IGNORECASE | re.MULTILINE,
)


def has_sharded_states(program: Program, call: ast.Call) -> bool:
    """Whether the Accelerator of `accelerator.save_state()` surely has a plugin that shards, or is
    started with one, and the call is not for runs without it."""
    if any(_asks_for_type(test) for test, _ in conditions(program, call)):
        return False

    return _has_plugin(program, call) or _is_started_sharded(program, program.source_of(call))


def _asks_for_type(test: ast.expr) -> bool:
    """`accelerator.distributed_type == DistributedType.DEEPSPEED`"""
    return any(node.attr == "distributed_type" for node in nodes_in(test, ast.Attribute))


def _has_plugin(program: Program, call: ast.Call) -> bool:
    """`accelerator = Accelerator(fsdp_plugin=FullyShardedDataParallelPlugin())`"""
    for accelerator in program.made(owner_of(call), ACCELERATOR):
        for name in ("deepspeed_plugin", "deepspeed_plugins", "fsdp_plugin"):
            for plugin in written_values(program, argument(accelerator.call, None, name)):
                if _is_sharding_plugin(program, plugin):
                    return True

    return False


def _is_sharding_plugin(program: Program, plugin: ast.expr) -> bool:
    """Whether it surely is one: no condition is around the call that makes it."""
    if not isinstance(plugin, ast.Call) or program.name_of(plugin.func) not in _PLUGINS:
        return False

    return is_always_run(program, plugin)


@cached_query
def _is_started_sharded(program: Program, source: Source) -> bool:
    """Whether a script starts it, or a file that imports it, with FSDP or DeepSpeed."""
    for file in connected(program, source):
        is_sharded = any(map(_starts_sharded, program.starts_of(file)))
        if is_sharded and source in with_imported(program, [file]):
            return True

    return False


def _starts_sharded(launch: Launch) -> bool:
    """`accelerate launch --use-fsdp train.py`, or with a configuration that says so."""
    if launch.kind != ACCELERATE:
        return False
    if not _SHARDING_FLAGS.isdisjoint(launch.flags):
        return True

    return launch.config is not None and bool(_SHARDING_SETTING.search(launch.config.text))
