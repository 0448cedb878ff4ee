"""How a verb runs on ranks: it starts them on this machine, or is the rank that this process is."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import Any

from drumline.base.errors import ExitCode
from drumline.base.startup import INTERRUPTED_EARLY, default_procs, interruptible, loading
from drumline.base.topology import topology_from
from drumline.config.flags import Layer
from drumline.launch.node_plan import TASK_RESTARTS, NodePlan, Program, Supervision
from drumline.rank.compile_cache import use_private_cache


def run_on_ranks(
    program: Program,
    verb_flags: Mapping[str, Any],
    layers: Iterable[Layer],
    run_rank: Callable[[], int],
) -> int:
    """Returns the exit code. `layers`: the settings, flags first. `run_rank`: the work of one rank,
    with torch."""
    topology = topology_from(os.environ)
    # Among several ranks the launcher reports an interrupt.
    with interruptible(INTERRUPTED_EARLY if topology is None else ""):
        if topology is None:
            num_procs = verb_flags.get("procs") or _usual_procs(layers)
            max_restarts = verb_flags.get("max-restarts")
            if num_procs > 1 or max_restarts:
                if max_restarts is None:
                    max_restarts = TASK_RESTARTS if program.can_resume else 0
                return _start(NodePlan(num_procs=num_procs, max_restarts=max_restarts), program)
        use_private_cache()
        with loading():
            import drumline.cli.train_rank  # noqa: F401  # torch, and all that trains
            from drumline.rank.torch_internals import load_compiler

            load_compiler()  # torch does so with the first optimizer, when the collector is on
    return run_rank()


def _usual_procs(layers: Iterable[Layer]) -> int:
    for layer in layers:
        if "dist.device" in layer.settings:
            if layer.settings["dist.device"].value == "cpu":
                return 1
            break
    return default_procs()


def _start(node: NodePlan, program: Program) -> int:
    """Start the ranks, and wait for them."""
    from drumline.launch.node.local import run_node

    code = run_node(node, program, Supervision())
    is_failed = code in (ExitCode.TRAINING_FAILED, ExitCode.HANG)
    if is_failed and program.run is not None:  # else rank 0 has done it
        from drumline.cli.report_command import report_at_end

        report_at_end(Path(program.run))
    return code
