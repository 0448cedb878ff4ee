"""Advice about what a step computes in vain: padding, the same again, numbers of a type that this
device is slow in, gradients that nothing uses. No torch.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from drumline.base.text import one_line
from drumline.report.profile.bottleneck import (
    MIN_UNCERTAIN,
    Advice,
    Savings,
    at_sampled,
    by_setting,
    is_gpu,
    is_script,
    of_step,
)
from drumline.runs.profile_result import ProfileResult

MATRIX_KERNELS = re.compile(r"gemm|conv|cutlass|winograd|wgrad|dgrad|fprop|mma", re.IGNORECASE)
# already in bf16 or fp16
HALF_KERNELS = re.compile(r"fp?16|float16|half|_h\d*gemm", re.IGNORECASE)
BF16_SPEEDS = (3.0, 8.0, 1.2)
"""Of such kernels in bf16, as times of fp32: likely, at most and at least."""


MOST_OF_IT = Savings(0.8, 1.0, 0.4)


@dataclass(frozen=True, kw_only=True)
class Waste:
    """A kind of work that is done in vain."""

    text: str
    """With the part of the forward passes, and the module that computes it."""
    remedy: str
    phases: Sequence[str] = ("forward", "backward")
    """Which take longer for it."""
    saved: Savings = MOST_OF_IT
    """As parts of that."""
    changes_training: bool = False


WASTE: dict[str, Waste] = {
    "padding": Waste(
        text="{part:.0%} of a batch is padding",
        remedy="pad a batch to its longest sample, and put samples of about the same length into it",
    ),
    "repeated_work": Waste(
        text="{module} computes the same input again, or the same samples",
        remedy="call it once, with each sample once, and use its output again (expand, repeat_interleave)",
    ),
    "single_samples": Waste(
        text="{module} computes samples one by one, or a few at a time",
        remedy="call it once, with all samples in one tensor (torch.stack, or pad_sequence), or in larger "
        "micro-batches",
        saved=Savings(0.6, 0.95, 0.1),
    ),
    "recomputation": Waste(
        text="the backward pass computes activations again (activation checkpointing, {module})",
        remedy="where memory suffices leave torch.utils.checkpoint out, or use it for fewer layers",
        phases=("forward",),
    ),
    "unused_output": Waste(
        text="the loss does not use the output of {module}",
        remedy="leave it out; where something else reads it, compute it less often, in torch.no_grad()",
        phases=("forward",),
    ),
    "zero_gradients": Waste(
        text="the gradient of the output of {module} is zero in most rows, or in all (a term of the loss with weight "
        "0, positions that the loss ignores)",
        remedy="compute only what the loss uses: select its rows before, and leave out terms of weight 0",
    ),
    "zeros": Waste(
        text="{module} multiplies a matrix that is nearly all zeros, as one-hot rows and the matrix of a graph are",
        remedy="use nn.Embedding or nn.EmbeddingBag, which look rows up, or a sparse matrix (to_sparse_csr())",
    ),
    "denormals": Waste(
        text="{module} computes with denormal numbers (below 1e-38), which take a CPU many times as long",
        remedy="call torch.set_flush_denormal(True) at the start, or find what makes the numbers so small",
        saved=Savings(0.6, 0.95, 0.2),
        changes_training=True,
    ),
    "float64": Waste(
        text="{module} computes in float64",
        remedy="call .float() on the model, on its data and on what is computed of them (autocast and "
        "--train.precision leave float64 as it is)",
        saved=Savings(0.5, 0.75, 0.25),
        changes_training=True,
    ),
    "half_precision": Waste(
        text="{module} computes in half precision (autocast, bfloat16), for which this CPU has no instructions",
        remedy="compute in float32 on this CPU",
        saved=Savings(0.4, 0.8, 0.0),
        changes_training=True,
    ),
    "sparse_gradients": Waste(
        text="{part:.0%} of all gradients are zeros, of rows of the embedding {module} that a batch does not use",
        remedy="pass sparse=True to nn.Embedding, with SGD, Adagrad or SparseAdam (DDP reduces sparse gradients with "
        "gloo), or share rows between rare entries",
        phases=("optimizer", "exposed communication"),
    ),
}


def _wasted(result: ProfileResult) -> Iterator[Advice]:
    """The kinds that an inspected step had, each with the module that wastes most."""
    times_s = {
        **result.phases_s,
        "exposed communication": result.parts_s["exposed_communication"],
    }
    for kind, waste in WASTE.items():
        works = [work for work in result.wasted if work.kind == kind]
        part = sum(work.part for work in works)
        cost_s = part * sum(times_s.get(phase, 0.0) for phase in waste.phases)
        if not works or cost_s < MIN_UNCERTAIN * result.step_s:
            continue

        most = max(works, key=lambda work: work.part)
        text = waste.text.format(part=part, module=one_line(most.module))
        line = most.line
        if line is not None and line.file:
            text += f", at {at_sampled(line)}"
        remedy = waste.remedy
        if most.kind == "single_samples" and not is_script(result):
            remedy += " (fewer --train.accumulate or --train.shards)"
        yield Advice(
            bottleneck=most.kind,
            text=f"{text}: {of_step(result, cost_s)}",
            remedy=remedy,
            changes_training=waste.changes_training,
            cost_s=cost_s,
            saved_s=Savings(*(part * cost_s for part in waste.saved)),
            derivation="the step without it, as one step before the profiled ones showed it",
        )


def _fp32(result: ProfileResult) -> Iterator[Advice]:
    """No bottleneck, so it is last."""
    is_float64 = any(work.kind == "float64" for work in result.wasted)
    if not is_gpu(result) or result.precision not in (None, "fp32") or is_float64:
        return

    products = [kernel for kernel in result.kernels if MATRIX_KERNELS.search(kernel.name)]
    seconds = sum(kernel.seconds for kernel in products if not HALF_KERNELS.search(kernel.name))
    yield Advice(
        bottleneck="fp32",
        text=f"matrix products and convolutions compute {of_step(result, seconds)}",
        **by_setting(
            result,
            {"train.precision": "bf16"},
            script="in fp32, use torch.autocast(dtype=torch.bfloat16)",
            task="compare the losses",
        ),
        changes_training=True,
        cost_s=0.0,
        saved_s=Savings(*(seconds * (1 - 1 / speed) for speed in BF16_SPEEDS)),
        derivation=f"they are {min(BF16_SPEEDS):g} to {max(BF16_SPEEDS):g} times as fast in bf16",
    )


def _unused_gradients(result: ProfileResult) -> Iterator[Advice]:
    """Of frozen weights."""
    if result.optimizer is None:
        return

    part = result.optimizer.unused_gradients
    cost_s = part * (result.phases_s.get("backward", 0.0) + result.parts_s["exposed_communication"])
    yield Advice(
        bottleneck="unused_gradients",
        text=f"{part:.0%} of the gradients are computed and reduced for weights that no optimizer has, or whose rate "
        f"is 0: {of_step(result, cost_s)}",
        remedy="freeze them with requires_grad_(False) before DistributedDataParallel wraps the model",
        cost_s=cost_s,
        saved_s=Savings(0.75 * cost_s, cost_s, 0.5 * cost_s),
        derivation="gradients of weights are half of a backward pass; before the first layer that is trained those "
        "of outputs are not needed either",
    )


ARITHMETIC_RULES = (_wasted, _unused_gradients, _fp32)
"""The types of numbers come last."""
