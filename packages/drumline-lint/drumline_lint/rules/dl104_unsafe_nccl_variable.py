"""DL104: a variable that is for finding a fault, left in the script of a real run."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from drumline_lint.findings import Finding, rule
from drumline_lint.reading.launchers import PYTHON, launches
from drumline_lint.reading.shell import Assignment, Script

RULE = rule("DL104")
# NCCL and CUDA read numbers, and torch's handling of errors is one; its switches are words too.
ONE, ZERO = frozenset({"1"}), frozenset({"0"})
ON = ONE | {"true", "y", "yes", "t"}
OFF = ZERO | {"false", "n", "no", "f"}


@dataclass(frozen=True)
class Unsafe:
    """One variable: when it is, and what it costs."""

    costs: str
    values: frozenset[str] = frozenset()
    """In small letters; none means any value."""
    instead: str = ""


UNSAFE = {
    "NCCL_P2P_DISABLE": Unsafe("GPUs of a host no longer copy to each other over NVLink or PCI", ONE),
    "NCCL_SHM_DISABLE": Unsafe(
        "GPUs without a direct link talk over the network, even on one host, instead of shared memory", ONE
    ),
    "NCCL_IB_DISABLE": Unsafe("InfiniBand and RoCE are not used, and NCCL falls back to IP sockets", ONE),
    "NCCL_ALGO": Unsafe("the algorithm is pinned, whatever the size of a message or of the world"),
    "NCCL_PROTO": Unsafe("the protocol is pinned, whatever the size of a message"),
    "NCCL_DEBUG": Unsafe("every call is written to the log of every rank", frozenset({"trace"}), "set NCCL_DEBUG=WARN"),
    "NCCL_CHECK_POINTERS": Unsafe("every pointer is checked at every collective", ONE),
    "TORCH_NCCL_ASYNC_ERROR_HANDLING": Unsafe(
        "when a collective fails or times out, nobody ends the ranks that wait for it: they hang", ZERO
    ),
    "TORCH_NCCL_BLOCKING_WAIT": Unsafe(
        "wait() holds up the host until a collective is done, so that little overlaps", ON
    ),
    "TORCH_NCCL_ENABLE_MONITORING": Unsafe("a rank whose watchdog hangs is never ended", OFF),
    "TORCH_NCCL_DESYNC_DEBUG": Unsafe("ranks write to the store at every collective", ON),
    "TORCH_DISTRIBUTED_DEBUG": Unsafe(
        "every collective is first compared between all ranks", frozenset({"detail"}), "set it to INFO, or remove it"
    ),
    "CUDA_LAUNCH_BLOCKING": Unsafe("Python waits for every kernel, so that nothing overlaps", ONE),
}
OLD_NAMES = {
    "NCCL_ASYNC_ERROR_HANDLING": "TORCH_NCCL_ASYNC_ERROR_HANDLING",
    "NCCL_BLOCKING_WAIT": "TORCH_NCCL_BLOCKING_WAIT",
    "NCCL_DESYNC_DEBUG": "TORCH_NCCL_DESYNC_DEBUG",
}
CORRUPTS = "LL128 is forced, which can corrupt data on machines that do not support it"
# Some networks need them for good.
OFTEN_NEEDED = {"NCCL_IB_DISABLE", "NCCL_PROTO"}
PINNING = {"NCCL_ALGO", "NCCL_PROTO"}
# A protocol or an algorithm may be left out on purpose, where a fault of NCCL is known.
LEFT_OUT = "^"


def check_shell(script: Script) -> Iterator[Finding]:
    """What is exported, or set for one start; not in a script whose name says that it is for debugging."""
    if "debug" in script.path.stem.lower():
        return
    starts = {launch.command.start for launch in launches(script) if _is_of_ranks(launch.kind, launch.srun)}
    for assignment in script.assignments:
        unsafe = UNSAFE.get(OLD_NAMES.get(assignment.name, assignment.name))
        if unsafe is None or not _is_given(script, assignment, starts):
            continue
        if assignment.name in PINNING and "determin" in script.text.lower():
            continue  # A run that must give the same bits again needs them.
        value = script.constant(assignment.value)
        if value and _is_unsafe(unsafe, value):
            corrupts = "LL128" in value
            yield RULE.at(
                script,
                assignment,
                f"{assignment.name}={value} is not for real runs: {CORRUPTS if corrupts else unsafe.costs}",
                fix=unsafe.instead or f"remove {assignment.name}, or set it only while you look for the fault",
                is_note=assignment.name in OFTEN_NEEDED and not corrupts,
            )


def _is_of_ranks(kind: str, srun: object) -> bool:
    return kind != PYTHON or srun is not None


def _is_given(script: Script, assignment: Assignment, starts: set[int]) -> bool:
    if assignment.is_for_command:
        return assignment.command.start in starts
    if assignment.command.is_conditional or not (assignment.is_exported or assignment.name in script.exported):
        return False
    # One process alone may well wait for its kernels; what is NCCL's is for several.
    return assignment.name != "CUDA_LAUNCH_BLOCKING" or bool(starts)


def _is_unsafe(unsafe: Unsafe, value: str) -> bool:
    if unsafe.values:
        return value.lower() in unsafe.values
    return not value.startswith(LEFT_OUT) and ":^" not in value
