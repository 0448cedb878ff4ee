"""The rules between settings that are valid one by one, but not together: Python functions, each
with its message and what to do."""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import NamedTuple

from drumline.base.text import CREDENTIALS
from drumline.config.flags import (
    Layer,
    Setting,
    evidence,
)
from drumline.config.schema import (
    FIRST_PROFILED,
    METRICS_FORM,
    MOST_PROFILED,
    metrics_endpoint,
    profiled_steps,
    sync_interval,
)


@dataclass(frozen=True)
class Rule:
    """`is_broken` takes the values of `fields`, in that order."""

    fields: tuple[str, ...]
    is_broken: Callable[..., bool]
    message: str
    fix: str | Callable[..., str]
    """Flags that keep the rule, with ` or ` between alternatives; a function if they depend on the
    values, which it takes as `is_broken` does."""


class BrokenRule(NamedTuple):
    """A rule that the settings break: the problem with the values, and flags that solve it."""

    problem: str
    fix: str


def has_rounds(sync: str) -> bool:
    """Whether replicas synchronize after some steps: dist.sync is `local:H` or `diloco:H`."""
    kind, colon, _ = sync.partition(":")
    return bool(colon) and kind in ("local", "diloco")


EXCLUSIVE_PAIRS = (
    ("train.batch_size", "train.batch_size_per_rank"),
    ("train.epochs", "train.steps"),
)
"""Two settings for one thing. The one from the layer with the higher precedence replaces the
other."""
EXCLUDED_BY = {**dict(EXCLUSIVE_PAIRS), **{second: first for first, second in EXCLUSIVE_PAIRS}}
"""By each setting of a pair: the one that it replaces."""
WEB_ADDRESS = re.compile(r"https?://(\[[^]]+\]|[^][/:@?#]+)(:\d+)?([/?#]|$)")
RULES = (
    Rule(
        ("train.epochs", "train.steps"),
        lambda epochs, steps: epochs is None and steps is None,
        "the length of the run is not set; give --train.epochs or --train.steps",
        "--train.epochs 10 or --train.steps 1000",
    ),
    Rule(
        ("train.batch_size", "train.batch_size_per_rank"),
        lambda batch_size, batch_size_per_rank: batch_size is None and batch_size_per_rank is None,
        "the batch size is not set; give --train.batch_size or --train.batch_size_per_rank",
        "--train.batch_size 32 or --train.batch_size_per_rank 32",
    ),
    Rule(
        ("train.exact", "dist.sync_batchnorm"),
        lambda exact, sync_batchnorm: exact == "elastic" and sync_batchnorm,
        "in the elastic mode batch statistics belong to the shard, not to the ranks",
        "--no-dist.sync_batchnorm or --train.exact world",
    ),
    Rule(
        ("train.exact", "dist.broadcast_buffers"),
        lambda exact, broadcast_buffers: exact == "elastic" and not broadcast_buffers,
        "in the elastic mode every rank needs the same buffers",
        "--dist.broadcast_buffers or --train.exact world",
    ),
    Rule(
        ("dist.comm", "train.exact"),
        lambda comm, exact: comm != "none" and exact == "elastic",
        "the elastic mode adds up shards in a fixed order, without DDP: it needs --dist.comm none",
        "--dist.comm none or --train.exact world",
    ),
    Rule(
        ("dist.comm", "train.precision"),
        lambda comm, precision: comm == "powersgd" and precision == "fp16",
        "powersgd adds what one step leaves out to the next, and fp16's loss scale may change in between; use bf16",
        "--train.precision bf16 or --dist.comm bf16",
    ),
    Rule(
        ("dist.comm", "train.on_nan"),
        lambda comm, on_nan: comm == "powersgd" and on_nan == "skip",
        "powersgd carries a gradient that is not finite on into all later steps, so skipping one does not help; "
        "give --train.on_nan stop",
        "--train.on_nan stop or --dist.comm bf16",
    ),
    Rule(
        ("dist.sync", "train.exact"),
        lambda sync, exact: has_rounds(sync) and exact == "elastic",
        "the elastic mode adds up the gradients of every step: it needs --dist.sync step",
        "--dist.sync step or --train.exact world",
    ),
    Rule(
        ("dist.sync", "dist.comm"),
        lambda sync, comm: has_rounds(sync) and comm != "none",
        "dist.comm compresses gradients, which are not sent between rounds; give --dist.outer_dtype in its place",
        "--dist.comm none or --dist.sync step",
    ),
    Rule(
        ("dist.sync", "dist.sync_within", "dist.sync_batchnorm"),
        lambda sync, sync_within, sync_batchnorm: (
            has_rounds(sync) and sync_within == "none" and sync_batchnorm
        ),
        "synchronized BatchNorm needs all ranks in every step; inside nodes it works with --dist.sync_within node",
        "--dist.sync_within node or --no-dist.sync_batchnorm",
    ),
    Rule(
        ("dist.sync", "data.balance"),
        lambda sync, balance: has_rounds(sync) and balance == "auto",
        "in a round every replica counts the same, however many samples it has had: it needs --data.balance off",
        "--data.balance off or --dist.sync step",
    ),
    Rule(
        ("dist.sync", "checkpoint.writers"),
        lambda sync, writers: has_rounds(sync) and writers != "one",
        "every replica has an optimizer state of its own, and rank 0 writes all of them: it needs "
        "--checkpoint.writers one",
        "--checkpoint.writers one or --dist.sync step",
    ),
    Rule(
        ("dist.on_lost_node", "dist.sync", "dist.mode"),
        lambda on_lost_node, sync, mode: (
            on_lost_node == "continue" and sync == "step" and mode != "hsdp"
        ),
        "the others can continue without a node only if each node has a whole replica: it needs --dist.sync local:H"
        " or diloco:H, or --dist.mode hsdp",
        "--dist.on_lost_node restart or --dist.sync diloco:100 or --dist.mode hsdp",
    ),
    Rule(
        ("dist.mode", "train.exact"),
        lambda mode, exact: mode != "ddp" and exact == "elastic",
        "the elastic mode adds up shards of the batch in a fixed order, with all gradients on each rank: it needs "
        "--dist.mode ddp",
        "--dist.mode ddp or --train.exact world",
    ),
    Rule(
        ("dist.mode", "dist.comm"),
        lambda mode, comm: mode != "ddp" and comm != "none",
        "dist.comm changes DDP's all-reduce, which a sharded model does not have; give --dist.shard_dtype bf16",
        "--dist.comm none or --dist.mode ddp",
    ),
    Rule(
        ("dist.mode", "dist.sync"),
        lambda mode, sync: mode != "ddp" and has_rounds(sync),
        "between rounds every replica has a whole model of its own: dist.sync needs --dist.mode ddp",
        "--dist.mode ddp or --dist.sync step",
    ),
    Rule(
        ("dist.mode", "data.balance"),
        lambda mode, balance: mode != "ddp" and balance == "auto",
        "a sharded model waits for other ranks in every block, so their own time is unknown: it needs "
        "--data.balance off",
        "--data.balance off or --dist.mode ddp",
    ),
    Rule(
        ("dist.mode", "dist.static_graph"),
        lambda mode, static_graph: mode != "ddp" and static_graph,
        "a static graph is an option of DDP, which a sharded model does not use",
        "--no-dist.static_graph or --dist.mode ddp",
    ),
    Rule(
        ("dist.mode", "train.step"),
        lambda mode, step: mode != "ddp" and step not in (None, "eager", "compile"),
        "a sharded model gathers its parameters between operations: it needs --train.step eager or compile",
        "--train.step eager or --dist.mode ddp",
    ),
    Rule(
        ("dist.mode", "train.memory_format"),
        lambda mode, memory_format: mode != "ddp" and memory_format == "channels_last",
        "parameters are sharded by rows of contiguous memory; give --train.memory_format contiguous",
        "--train.memory_format contiguous or --dist.mode ddp",
    ),
    Rule(
        ("dist.mode", "optim.name"),
        lambda mode, optimizer: mode != "ddp" and optimizer == "muon",
        "muon needs whole matrices, and a rank of a sharded model has some rows; give --optim.name adamw",
        "--optim.name adamw or --dist.mode ddp",
    ),
    Rule(
        ("dist.shard_ranks", "dist.mode"),
        lambda shard_ranks, mode: shard_ranks is not None and mode != "hsdp",
        "dist.shard_ranks sets the groups of --dist.mode hsdp",
        "--dist.mode hsdp or --dist.shard_ranks none",
    ),
    Rule(
        ("dist.shard_dtype", "train.precision"),
        lambda shard_dtype, precision: shard_dtype == "bf16" and precision != "bf16",
        "parameters that are gathered in bf16 need --train.precision bf16",
        "--train.precision bf16 or --dist.shard_dtype fp32",
    ),
    Rule(
        ("dist.shard_dtype", "dist.mode"),
        lambda shard_dtype, mode: shard_dtype == "bf16" and mode == "ddp",
        "ddp gathers no parameters; give --dist.comm bf16 to send its gradients in bf16",
        "--dist.shard_dtype fp32 or --dist.mode fsdp",
    ),
    Rule(
        ("dist.offload_optimizer", "dist.mode"),
        lambda offload_optimizer, mode: offload_optimizer and mode == "ddp",
        "ddp keeps its optimizer beside the model; give --dist.mode zero1, fsdp or hsdp",
        "--dist.mode fsdp or --no-dist.offload_optimizer",
    ),
    Rule(
        ("dist.offload_optimizer", "dist.device"),
        lambda offload_optimizer, device: offload_optimizer and device == "cpu",
        "on the CPU the optimizer is in the host's memory already",
        "--no-dist.offload_optimizer or --dist.device cuda",
    ),
    Rule(
        ("dist.offload_optimizer", "train.precision"),
        lambda offload_optimizer, precision: offload_optimizer and precision == "fp16",
        "fp16's loss scaling checks gradients on the GPU, and these are in the host's memory; use bf16",
        "--train.precision bf16 or --no-dist.offload_optimizer",
    ),
    Rule(
        ("dist.meta_init", "model.init"),
        lambda meta_init, init: meta_init and init is not None,
        "weights that are loaded need a model that has memory; leave --dist.meta_init off",
        "--no-dist.meta_init or --model.init none",
    ),
    Rule(
        ("train.step", "train.exact"),
        lambda step, exact: step not in (None, "eager") and exact == "elastic",
        "the elastic mode computes shard by shard, operation by operation: it needs --train.step eager",
        "--train.step eager or --train.exact world",
    ),
    Rule(
        ("train.step", "train.deterministic"),
        lambda step, deterministic: step == "auto" and deterministic,
        "auto chooses by measured time, so its choice may differ between runs; with --train.deterministic name one",
        "--train.step eager or --no-train.deterministic",
    ),
    Rule(
        ("train.step", "dist.device"),
        lambda step, device: step in ("graph", "compiled_graph") and device == "cpu",
        "CUDA graphs need a GPU; give --train.step eager or compile for the CPU",
        "--train.step eager or --dist.device cuda",
    ),
    Rule(
        ("data.balance", "train.exact"),
        lambda balance, exact: balance == "auto" and exact == "elastic",
        "the elastic mode has shards of fixed sizes; it needs --data.balance off",
        "--data.balance off or --train.exact world",
    ),
    Rule(
        ("data.balance", "train.step"),
        lambda balance, step: balance == "auto" and step not in (None, "eager", "compile"),
        "shards by speed change their sizes, and a captured step has fixed shapes; give --train.step eager or compile",
        "--train.step eager or --data.balance off",
    ),
    Rule(
        ("data.balance", "dist.sync_batchnorm"),
        lambda balance, sync_batchnorm: balance == "auto" and sync_batchnorm,
        "synchronized BatchNorm waits for the other ranks in every forward pass, so a rank has no measurable speed",
        "--data.balance off or --no-dist.sync_batchnorm",
    ),
    Rule(
        ("data.balance", "train.deterministic"),
        lambda balance, deterministic: balance == "auto" and deterministic,
        "shards by speed follow measured times, so their sizes may differ between runs",
        "--data.balance off or --no-train.deterministic",
    ),
    Rule(
        ("data.balance", "log.trace"),
        lambda balance, trace: balance == "auto" and trace,
        "shards by speed differ between runs, so two traces cannot be compared bit by bit",
        "--data.balance off or --no-log.trace",
    ),
    Rule(
        ("train.cudnn_benchmark", "train.deterministic"),
        lambda cudnn_benchmark, deterministic: cudnn_benchmark and deterministic,
        "cuDNN's search uses measured times, so it may choose a different kernel in each run",
        "--no-train.cudnn_benchmark or --no-train.deterministic",
    ),
    Rule(
        ("optim.scale_lr", "train.batch_size_per_rank"),
        lambda scale_lr, batch_size_per_rank: scale_lr != "none" and batch_size_per_rank is None,
        "the rate is scaled only if the batch grows with the world size: optim.scale_lr needs "
        "train.batch_size_per_rank",
        "--optim.scale_lr none or --train.batch_size_per_rank 32",
    ),
    Rule(
        ("optim.nesterov", "optim.momentum", "optim.name"),
        lambda nesterov, momentum, optimizer: nesterov and momentum == 0 and optimizer == "sgd",
        "Nesterov's form needs momentum; give --no-optim.nesterov or a momentum above 0",
        "--no-optim.nesterov or --optim.momentum 0.9",
    ),
    Rule(
        ("dist.backend", "dist.device"),
        lambda backend, device: backend == "nccl" and device == "cpu",
        "NCCL works between GPUs only; give --dist.backend gloo (or auto) for the CPU",
        "--dist.backend gloo or --dist.device cuda",
    ),
    Rule(
        ("dist.sync_batchnorm", "dist.device"),
        lambda sync_batchnorm, device: sync_batchnorm and device == "cpu",
        "torch has no synchronized BatchNorm for the CPU",
        "--no-dist.sync_batchnorm or --dist.device cuda",
    ),
    Rule(
        ("dist.static_graph", "dist.find_unused_parameters"),
        lambda static_graph, find_unused_parameters: static_graph and find_unused_parameters,
        "a static graph uses the same parameters in every step, so there are no unused ones to find",
        "--no-dist.static_graph or --no-dist.find_unused_parameters",
    ),
    Rule(
        ("checkpoint.mirror",),
        lambda url: url is not None and "://" not in url,
        "the mirror is an address such as s3://bucket/prefix; that of a folder is file:///path",
        "--checkpoint.mirror s3://bucket/prefix or --checkpoint.mirror none",
    ),
    *(
        Rule(
            (field,),
            lambda url: bool(CREDENTIALS.search(url or "")),
            f"{field} takes no user, password or options, which would be written to logs and files: the variables, "
            "profile or role of the store itself are used",
            f"--{field} s3://bucket/prefix",
        )
        for field in ("checkpoint.mirror", "data.dir")
    ),
    Rule(
        ("train.accumulate", "train.batch_size"),
        lambda accumulate, batch: batch is not None and accumulate > batch,
        "a batch cannot be cut into more micro-batches than it has samples",
        lambda _, batch: f"--train.accumulate {batch}",
    ),
    Rule(
        ("train.accumulate", "train.batch_size_per_rank"),
        lambda accumulate, batch: batch is not None and accumulate > batch,
        "a rank's batch cannot be cut into more micro-batches than it has samples",
        lambda _, batch: f"--train.accumulate {batch}",
    ),
    Rule(
        ("train.accumulate", "train.micro_batch_size"),
        lambda accumulate, size: accumulate > 1 and size is not None,
        "train.accumulate sets the number of micro-batches, train.micro_batch_size their size: give one of them",
        "--train.accumulate 1 or --train.micro_batch_size none",
    ),
    Rule(
        ("train.shards", "train.batch_size", "train.exact"),
        lambda shards, batch, exact: exact == "elastic" and batch is not None and shards > batch,
        "a batch cannot be cut into more shards than it has samples",
        lambda _, batch, exact: f"--train.shards {batch}",
    ),
    Rule(
        ("dist.sync",),
        lambda sync: sync_interval(sync) is None,
        "dist.sync is step, local:H or diloco:H with a number of steps, as in diloco:100",
        "--dist.sync step or --dist.sync diloco:100",
    ),
    Rule(
        ("dist.sync", "dist.sync_parts"),
        lambda sync, parts: (sync_interval(sync) or parts) < parts,
        "each part needs a step of its own between two rounds: more parts than steps",
        lambda sync, _: f"--dist.sync_parts {sync_interval(sync)}",
    ),
    Rule(
        ("dist.sync", "dist.sync_parts", "dist.sync_overlap"),
        lambda sync, parts, overlap: 0 < (sync_interval(sync) or 0) < overlap * parts,
        "a part must have arrived before the next one is sent: dist.sync_overlap is at most H / dist.sync_parts",
        lambda sync, parts, _: f"--dist.sync_overlap {(sync_interval(sync) or 0) // parts}",
    ),
    Rule(
        ("optim.warmup_steps", "train.steps"),
        lambda warmup, steps: steps is not None and warmup > steps,
        "the warm-up is longer than the run",
        "--optim.warmup_steps 0",
    ),
    Rule(
        ("optim.betas", "optim.name"),
        lambda betas, name: name == "adamw" and 1.0 in betas,
        "adamw needs betas below 1",
        "--optim.betas 0.9,0.95",
    ),
    Rule(
        ("model.heads", "model.width", "model.name"),
        lambda heads, width, name: name == "gpt" and width % heads != 0,
        "the heads must divide the width",
        lambda heads, width, _: (
            f"--model.heads {math.gcd(heads, width)} or --model.width {heads * -(-width // heads)}"
        ),
    ),
    Rule(
        ("watch.notice",),
        lambda notice: notice is not None and "://" in notice and not WEB_ADDRESS.match(notice),
        "watch.notice is a file, http://HOST/PATH or https://HOST/PATH (without a name or password), or "
        "path/to/file.py:function",
        "--watch.notice http://HOST/PATH or --watch.notice none",
    ),
    Rule(
        ("watch.notice",),
        lambda notice: notice is not None and bool(re.search(r"\.py(?!:[^\W\d]\w*$)(:|$)", notice)),
        "the function is missing: write path/to/file.py:function",
        lambda notice: f"--watch.notice {notice.partition('.py')[0]}.py:function",
    ),
    Rule(
        ("log.profile",),
        lambda steps: steps is not None and profiled_steps(steps) is None,
        f"log.profile is FIRST:LAST, as in 10:20, with FIRST at least {FIRST_PROFILED} and at most {MOST_PROFILED:,} "
        "steps",
        "--log.profile 10:20",
    ),
    Rule(
        ("log.prometheus",),
        lambda endpoint: endpoint is not None and metrics_endpoint(endpoint) is None,
        f"log.prometheus is {METRICS_FORM}",
        "--log.prometheus 9464",
    ),
    Rule(
        ("log.prometheus", "watch.sidecar"),
        lambda endpoint, sidecar: endpoint is not None and sidecar == "off",
        "the sidecar serves the metrics, so that they are there when a rank hangs",
        "--watch.sidecar auto or --log.prometheus none",
    ),
)


def pairs_given_together(strongest_first: Iterable[Layer]) -> dict[tuple[str, str], BrokenRule]:
    """The exclusive pairs of which one layer sets both, unless a layer before it has decided about
    one of them."""
    decided: set[str] = set()
    broken = {}
    for layer in strongest_first:
        for pair in EXCLUSIVE_PAIRS:
            if not decided.isdisjoint(pair) or not layer.settings.keys() >= set(pair):
                continue
            settings = [layer.settings[path] for path in pair]
            if all(setting.value is not None for setting in settings):
                names = " and ".join(pair)
                problem = f"{names} exclude each other, give one of them: {evidence(settings)}"
                broken[pair] = BrokenRule(problem, " or ".join(f"--{path} none" for path in pair))
        decided |= layer.settings.keys()

    return broken


def broken_rules(
    settled: Mapping[str, Setting], *, besides: Collection[str]
) -> Iterator[BrokenRule]:
    """Each broken rule. Rules with a field that has no value, or is in `besides`, are not
    checked."""
    for rule in RULES:
        if not all(path in settled and path not in besides for path in rule.fields):
            continue
        involved = [settled[path] for path in rule.fields]
        arguments = [setting.value for setting in involved]
        if rule.is_broken(*arguments):
            # A password in an address is not shown.
            values = re.sub(r"(?<=://).*[@?].*(?=['\"] \()", "***", evidence(involved))
            problem = f"{rule.message}: {values}" if values else rule.message
            fix = rule.fix if isinstance(rule.fix, str) else rule.fix(*arguments)
            yield BrokenRule(problem, fix)
