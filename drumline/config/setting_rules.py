"""Settings that are valid one by one, but not together: the rules, and a message for each that is broken."""

from __future__ import annotations

import re
from collections.abc import Callable, Collection, Iterator, Mapping
from dataclasses import dataclass

from drumline.config.flags import Setting, evidence
from drumline.config.schema import FIRST_PROFILED, MOST_PROFILED, profiled_steps, sync_interval


@dataclass(frozen=True)
class Rule:
    """`is_broken` takes the values of `fields`, in that order."""

    fields: tuple[str, ...]
    is_broken: Callable[..., bool]
    message: str


def has_rounds(sync: str) -> bool:
    """Whether `dist.sync` is `local:H` or `diloco:H`."""
    return bool(sync_interval(sync))


WEB_ADDRESS = re.compile(r"https?://(\[[^]]+\]|[^][/:@?#]+)(:\d+)?([/?#]|$)")
RULES = (
    Rule(
        ("train.epochs", "train.steps"),
        lambda epochs, steps: epochs is None and steps is None,
        "the length of the run is not set; give --train.epochs or --train.steps",
    ),
    Rule(
        ("train.batch_size", "train.batch_size_per_rank"),
        lambda whole, per_rank: whole is None and per_rank is None,
        "the batch size is not set; give --train.batch_size or --train.batch_size_per_rank",
    ),
    Rule(
        ("checkpoint.mirror",),
        lambda url: url is not None and "://" not in url,
        "the mirror is an address such as s3://bucket/prefix; that of a folder is file:///path",
    ),
    Rule(
        ("train.accumulate", "train.batch_size"),
        lambda accumulate, batch: batch is not None and accumulate > batch,
        "a batch cannot be cut into more micro-batches than it has samples",
    ),
    Rule(
        ("train.accumulate", "train.batch_size_per_rank"),
        lambda accumulate, batch: batch is not None and accumulate > batch,
        "a rank's batch cannot be cut into more micro-batches than it has samples",
    ),
    Rule(
        ("train.accumulate", "train.micro_batch_size"),
        lambda accumulate, size: accumulate > 1 and size is not None,
        "train.accumulate sets the number of micro-batches, train.micro_batch_size their size: give one of them",
    ),
    Rule(
        ("train.shards", "train.batch_size", "train.exact"),
        lambda shards, batch, exact: exact == "elastic" and batch is not None and shards > batch,
        "a batch cannot be cut into more shards than it has samples",
    ),
    Rule(
        ("train.exact", "dist.sync_batchnorm"),
        lambda exact, sync: exact == "elastic" and sync,
        "in the elastic mode batch statistics belong to the shard, not to the ranks",
    ),
    Rule(
        ("train.exact", "dist.broadcast_buffers"),
        lambda exact, broadcast: exact == "elastic" and not broadcast,
        "in the elastic mode every rank needs the same buffers",
    ),
    Rule(
        ("dist.comm", "train.exact"),
        lambda comm, exact: exact == "elastic" and comm != "none",
        "the elastic mode adds up shards in a fixed order, without DDP: it needs --dist.comm none",
    ),
    Rule(
        ("dist.comm", "train.precision"),
        lambda comm, precision: comm == "powersgd" and precision == "fp16",
        "powersgd adds what one step leaves out to the next, and fp16's loss scale may change in between; use bf16",
    ),
    Rule(
        ("dist.comm", "train.on_nan"),
        lambda comm, on_nan: comm == "powersgd" and on_nan == "skip",
        "powersgd carries a gradient that is not finite on into all later steps, so skipping one does not help; give "
        "--train.on_nan stop",
    ),
    Rule(
        ("dist.sync",),
        lambda sync: sync_interval(sync) is None,
        "dist.sync is step, local:H or diloco:H with a number of steps, as in diloco:100",
    ),
    Rule(
        ("dist.sync", "train.exact"),
        lambda sync, exact: has_rounds(sync) and exact == "elastic",
        "the elastic mode adds up the gradients of every step: it needs --dist.sync step",
    ),
    Rule(
        ("dist.sync", "dist.comm"),
        lambda sync, comm: has_rounds(sync) and comm != "none",
        "dist.comm compresses gradients, which are not sent between rounds; give --dist.outer_dtype in its place",
    ),
    Rule(
        ("dist.sync", "dist.sync_within", "dist.sync_batchnorm"),
        lambda sync, within, batchnorm: has_rounds(sync) and within == "none" and batchnorm,
        "synchronized BatchNorm needs all ranks in every step; inside nodes it works with --dist.sync_within node",
    ),
    Rule(
        ("dist.sync", "data.balance"),
        lambda sync, balance: has_rounds(sync) and balance == "auto",
        "in a round every replica counts the same, however many samples it has had: it needs --data.balance off",
    ),
    Rule(
        ("dist.sync", "checkpoint.writers"),
        lambda sync, writers: has_rounds(sync) and writers != "one",
        "every replica has an optimizer state of its own, and rank 0 writes all of them: it needs "
        "--checkpoint.writers one",
    ),
    Rule(
        ("dist.on_lost_node", "dist.sync", "dist.mode"),
        lambda lost, sync, mode: lost == "continue" and not has_rounds(sync) and mode != "hsdp",
        "the others can continue without a node only if each node has a whole replica: it needs --dist.sync local:H or "
        "diloco:H, or --dist.mode hsdp",
    ),
    Rule(
        ("dist.sync", "dist.sync_parts"),
        lambda sync, parts: (sync_interval(sync) or parts) < parts,
        "each part needs a step of its own between two rounds: more parts than steps",
    ),
    Rule(
        ("dist.sync", "dist.sync_parts", "dist.sync_overlap"),
        lambda sync, parts, overlap: has_rounds(sync) and overlap > (sync_interval(sync) or 0) // parts,
        "a part must have arrived before the next one is sent: dist.sync_overlap is at most H / dist.sync_parts",
    ),
    Rule(
        ("dist.mode", "train.exact"),
        lambda mode, exact: mode != "ddp" and exact == "elastic",
        "the elastic mode adds up shards of the batch in a fixed order, with all gradients on each rank: it needs "
        "--dist.mode ddp",
    ),
    Rule(
        ("dist.mode", "dist.comm"),
        lambda mode, comm: mode != "ddp" and comm != "none",
        "dist.comm changes DDP's all-reduce, which a sharded model does not have; give --dist.shard_dtype bf16",
    ),
    Rule(
        ("dist.mode", "dist.sync"),
        lambda mode, sync: mode != "ddp" and has_rounds(sync),
        "between rounds every replica has a whole model of its own: dist.sync needs --dist.mode ddp",
    ),
    Rule(
        ("dist.mode", "data.balance"),
        lambda mode, balance: mode != "ddp" and balance == "auto",
        "a sharded model waits for other ranks in every block, so their own time is unknown: it needs "
        "--data.balance off",
    ),
    Rule(
        ("dist.mode", "dist.static_graph"),
        lambda mode, static: mode != "ddp" and static,
        "a static graph is an option of DDP, which a sharded model does not use",
    ),
    Rule(
        ("dist.mode", "train.step"),
        lambda mode, step: mode != "ddp" and step not in (None, "eager", "compile"),
        "a sharded model gathers its parameters between operations: it needs --train.step eager or compile",
    ),
    Rule(
        ("dist.mode", "train.memory_format"),
        lambda mode, layout: mode != "ddp" and layout == "channels_last",
        "parameters are sharded by rows of contiguous memory; give --train.memory_format contiguous",
    ),
    Rule(
        ("dist.mode", "optim.name"),
        lambda mode, name: mode != "ddp" and name == "muon",
        "muon needs whole matrices, and a rank of a sharded model has some rows; give --optim.name adamw",
    ),
    Rule(
        ("dist.shard_ranks", "dist.mode"),
        lambda ranks, mode: ranks is not None and mode != "hsdp",
        "dist.shard_ranks sets the groups of --dist.mode hsdp",
    ),
    Rule(
        ("dist.shard_dtype", "train.precision"),
        lambda dtype, precision: dtype == "bf16" and precision != "bf16",
        "parameters that are gathered in bf16 need --train.precision bf16",
    ),
    Rule(
        ("dist.shard_dtype", "dist.mode"),
        lambda dtype, mode: dtype == "bf16" and mode == "ddp",
        "ddp gathers no parameters; give --dist.comm bf16 to send its gradients in bf16",
    ),
    Rule(
        ("dist.offload_optimizer", "dist.mode"),
        lambda offloads, mode: offloads and mode == "ddp",
        "ddp keeps its optimizer beside the model; give --dist.mode zero1, fsdp or hsdp",
    ),
    Rule(
        ("dist.offload_optimizer", "dist.device"),
        lambda offloads, device: offloads and device == "cpu",
        "on the CPU the optimizer is in the host's memory already",
    ),
    Rule(
        ("dist.offload_optimizer", "train.precision"),
        lambda offloads, precision: offloads and precision == "fp16",
        "fp16's loss scaling checks gradients on the GPU, and these are in the host's memory; use bf16",
    ),
    Rule(
        ("dist.meta_init", "model.init"),
        lambda meta, init: meta and init is not None,
        "weights that are loaded need a model that has memory; leave --dist.meta_init off",
    ),
    Rule(
        ("train.step", "train.exact"),
        lambda step, exact: exact == "elastic" and step not in (None, "eager"),
        "the elastic mode computes shard by shard, operation by operation: it needs --train.step eager",
    ),
    Rule(
        ("train.step", "train.deterministic"),
        lambda step, deterministic: deterministic and step == "auto",
        "auto chooses by measured time, so its choice may differ between runs; with --train.deterministic name one",
    ),
    Rule(
        ("train.step", "dist.device"),
        lambda step, device: device == "cpu" and step in ("graph", "compiled_graph"),
        "CUDA graphs need a GPU; give --train.step eager or compile for the CPU",
    ),
    Rule(
        ("data.balance", "train.exact"),
        lambda balance, exact: balance == "auto" and exact == "elastic",
        "the elastic mode has shards of fixed sizes; it needs --data.balance off",
    ),
    Rule(
        ("data.balance", "train.step"),
        lambda balance, step: balance == "auto" and step not in (None, "eager", "compile"),
        "shards by speed change their sizes, and a captured step has fixed shapes; give --train.step eager or compile",
    ),
    Rule(
        ("data.balance", "dist.sync_batchnorm"),
        lambda balance, sync: balance == "auto" and sync,
        "synchronized BatchNorm waits for the other ranks in every forward pass, so a rank has no measurable speed",
    ),
    Rule(
        ("data.balance", "train.deterministic"),
        lambda balance, deterministic: balance == "auto" and deterministic,
        "shards by speed follow measured times, so their sizes may differ between runs",
    ),
    Rule(
        ("data.balance", "log.trace"),
        lambda balance, trace: balance == "auto" and trace,
        "shards by speed differ between runs, so two traces cannot be compared bit by bit",
    ),
    Rule(
        ("train.cudnn_benchmark", "train.deterministic"),
        lambda benchmark, deterministic: benchmark and deterministic,
        "cuDNN's search uses measured times, so it may choose a different kernel in each run",
    ),
    Rule(
        ("optim.scale_lr", "train.batch_size_per_rank"),
        lambda scale, per_rank: scale != "none" and per_rank is None,
        "the rate is scaled only if the batch grows with the world size: optim.scale_lr needs "
        "train.batch_size_per_rank",
    ),
    Rule(
        ("optim.warmup_steps", "train.steps"),
        lambda warmup, steps: steps is not None and warmup > steps,
        "the warm-up is longer than the run",
    ),
    Rule(
        ("optim.nesterov", "optim.momentum", "optim.name"),
        lambda nesterov, momentum, name: name == "sgd" and nesterov and momentum == 0,
        "Nesterov's form needs momentum; give --no-optim.nesterov or a momentum above 0",
    ),
    Rule(
        ("optim.betas", "optim.name"), lambda betas, name: name == "adamw" and 1.0 in betas, "adamw needs betas below 1"
    ),
    Rule(
        ("model.heads", "model.width", "model.name"),
        lambda heads, width, name: name == "gpt" and width % heads != 0,
        "the heads must divide the width",
    ),
    Rule(
        ("dist.backend", "dist.device"),
        lambda backend, device: backend == "nccl" and device == "cpu",
        "NCCL works between GPUs only; give --dist.backend gloo (or auto) for the CPU",
    ),
    Rule(
        ("dist.sync_batchnorm", "dist.device"),
        lambda sync, device: sync and device == "cpu",
        "torch has no synchronized BatchNorm for the CPU",
    ),
    Rule(
        ("dist.static_graph", "dist.find_unused_parameters"),
        lambda static, unused: static and unused,
        "a static graph uses the same parameters in every step, so there are no unused ones to find",
    ),
    Rule(
        ("watch.notice",),
        lambda notice: notice is not None and "://" in notice and not WEB_ADDRESS.match(notice),
        "watch.notice is a file, http://HOST/PATH or https://HOST/PATH (without a name or password), or "
        "path/to/file.py:function",
    ),
    Rule(
        ("watch.notice",),
        lambda notice: notice is not None and bool(re.search(r"\.py(?!:[^\W\d]\w*$)(:|$)", notice)),
        "the function is missing: write path/to/file.py:function",
    ),
    Rule(
        ("log.profile",),
        lambda steps: steps is not None and profiled_steps(steps) is None,
        f"log.profile is FIRST:LAST, as in 10:20, with FIRST at least {FIRST_PROFILED} and at most {MOST_PROFILED:,} "
        "steps",
    ),
)


def broken_rules(settled: Mapping[str, Setting], *, besides: Collection[str]) -> Iterator[str]:
    """A message for each broken rule. Rules with a field that has no value, or is in `besides`, are not checked."""
    for rule in RULES:
        if not all(path in settled and path not in besides for path in rule.fields):
            continue
        involved = [settled[path] for path in rule.fields]
        if rule.is_broken(*(setting.value for setting in involved)):
            values = evidence(involved)
            yield f"{rule.message}: {values}" if values else rule.message
