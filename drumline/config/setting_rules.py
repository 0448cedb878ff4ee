"""Settings that are valid one by one, but not together: the rules, and a message for each that is
broken."""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

from drumline.base.text import CREDENTIALS
from drumline.config.fields import flag_text
from drumline.config.flags import Layer, Setting, evidence
from drumline.config.schema import FIRST_PROFILED, MOST_PROFILED, profiled_steps, sync_interval


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


def _excludes(conditions: Sequence[str], message: str, fix: str) -> Rule:
    """Settings that do not go together. A condition is `PATH == VALUE` or `PATH != VALUE`, with ` | ` between several
    values; the rule is broken when all of them are true."""
    parts = [condition.split(" ", 2) for condition in conditions]

    def is_broken(*values: Any) -> bool:
        return all(
            (flag_text(value) in choices.split(" | ")) is (sign == "==")
            for value, (_, sign, choices) in zip(values, parts, strict=True)
        )

    return Rule(tuple(path for path, *_ in parts), is_broken, message, fix)


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
    _excludes(
        ("train.epochs == none", "train.steps == none"),
        "the length of the run is not set; give --train.epochs or --train.steps",
        "--train.epochs 10 or --train.steps 1000",
    ),
    _excludes(
        ("train.batch_size == none", "train.batch_size_per_rank == none"),
        "the batch size is not set; give --train.batch_size or --train.batch_size_per_rank",
        "--train.batch_size 32 or --train.batch_size_per_rank 32",
    ),
    _excludes(
        ("train.exact == elastic", "dist.sync_batchnorm == true"),
        "in the elastic mode batch statistics belong to the shard, not to the ranks",
        "--no-dist.sync_batchnorm or --train.exact world",
    ),
    _excludes(
        ("train.exact == elastic", "dist.broadcast_buffers == false"),
        "in the elastic mode every rank needs the same buffers",
        "--dist.broadcast_buffers or --train.exact world",
    ),
    _excludes(
        ("dist.comm != none", "train.exact == elastic"),
        "the elastic mode adds up shards in a fixed order, without DDP: it needs --dist.comm none",
        "--dist.comm none or --train.exact world",
    ),
    _excludes(
        ("dist.comm == powersgd", "train.precision == fp16"),
        "powersgd adds what one step leaves out to the next, and fp16's loss scale may change in between; use bf16",
        "--train.precision bf16 or --dist.comm bf16",
    ),
    _excludes(
        ("dist.comm == powersgd", "train.on_nan == skip"),
        "powersgd carries a gradient that is not finite on into all later steps, so skipping one does not help; "
        "give --train.on_nan stop",
        "--train.on_nan stop or --dist.comm bf16",
    ),
    _excludes(
        ("dist.sync != step", "train.exact == elastic"),
        "the elastic mode adds up the gradients of every step: it needs --dist.sync step",
        "--dist.sync step or --train.exact world",
    ),
    _excludes(
        ("dist.sync != step", "dist.comm != none"),
        "dist.comm compresses gradients, which are not sent between rounds; give --dist.outer_dtype in its place",
        "--dist.comm none or --dist.sync step",
    ),
    _excludes(
        ("dist.sync != step", "dist.sync_within == none", "dist.sync_batchnorm == true"),
        "synchronized BatchNorm needs all ranks in every step; inside nodes it works with --dist.sync_within node",
        "--dist.sync_within node or --no-dist.sync_batchnorm",
    ),
    _excludes(
        ("dist.sync != step", "data.balance == auto"),
        "in a round every replica counts the same, however many samples it has had: it needs --data.balance off",
        "--data.balance off or --dist.sync step",
    ),
    _excludes(
        ("dist.sync != step", "checkpoint.writers != one"),
        "every replica has an optimizer state of its own, and rank 0 writes all of them: it needs "
        "--checkpoint.writers one",
        "--checkpoint.writers one or --dist.sync step",
    ),
    _excludes(
        ("dist.on_lost_node == continue", "dist.sync == step", "dist.mode != hsdp"),
        "the others can continue without a node only if each node has a whole replica: it needs --dist.sync local:H"
        " or diloco:H, or --dist.mode hsdp",
        "--dist.on_lost_node restart or --dist.sync diloco:100 or --dist.mode hsdp",
    ),
    _excludes(
        ("dist.mode != ddp", "train.exact == elastic"),
        "the elastic mode adds up shards of the batch in a fixed order, with all gradients on each rank: it needs "
        "--dist.mode ddp",
        "--dist.mode ddp or --train.exact world",
    ),
    _excludes(
        ("dist.mode != ddp", "dist.comm != none"),
        "dist.comm changes DDP's all-reduce, which a sharded model does not have; give --dist.shard_dtype bf16",
        "--dist.comm none or --dist.mode ddp",
    ),
    _excludes(
        ("dist.mode != ddp", "dist.sync != step"),
        "between rounds every replica has a whole model of its own: dist.sync needs --dist.mode ddp",
        "--dist.mode ddp or --dist.sync step",
    ),
    _excludes(
        ("dist.mode != ddp", "data.balance == auto"),
        "a sharded model waits for other ranks in every block, so their own time is unknown: it needs "
        "--data.balance off",
        "--data.balance off or --dist.mode ddp",
    ),
    _excludes(
        ("dist.mode != ddp", "dist.static_graph == true"),
        "a static graph is an option of DDP, which a sharded model does not use",
        "--no-dist.static_graph or --dist.mode ddp",
    ),
    _excludes(
        ("dist.mode != ddp", "train.step != none | eager | compile"),
        "a sharded model gathers its parameters between operations: it needs --train.step eager or compile",
        "--train.step eager or --dist.mode ddp",
    ),
    _excludes(
        ("dist.mode != ddp", "train.memory_format == channels_last"),
        "parameters are sharded by rows of contiguous memory; give --train.memory_format contiguous",
        "--train.memory_format contiguous or --dist.mode ddp",
    ),
    _excludes(
        ("dist.mode != ddp", "optim.name == muon"),
        "muon needs whole matrices, and a rank of a sharded model has some rows; give --optim.name adamw",
        "--optim.name adamw or --dist.mode ddp",
    ),
    _excludes(
        ("dist.shard_ranks != none", "dist.mode != hsdp"),
        "dist.shard_ranks sets the groups of --dist.mode hsdp",
        "--dist.mode hsdp or --dist.shard_ranks none",
    ),
    _excludes(
        ("dist.shard_dtype == bf16", "train.precision != bf16"),
        "parameters that are gathered in bf16 need --train.precision bf16",
        "--train.precision bf16 or --dist.shard_dtype fp32",
    ),
    _excludes(
        ("dist.shard_dtype == bf16", "dist.mode == ddp"),
        "ddp gathers no parameters; give --dist.comm bf16 to send its gradients in bf16",
        "--dist.shard_dtype fp32 or --dist.mode fsdp",
    ),
    _excludes(
        ("dist.offload_optimizer == true", "dist.mode == ddp"),
        "ddp keeps its optimizer beside the model; give --dist.mode zero1, fsdp or hsdp",
        "--dist.mode fsdp or --no-dist.offload_optimizer",
    ),
    _excludes(
        ("dist.offload_optimizer == true", "dist.device == cpu"),
        "on the CPU the optimizer is in the host's memory already",
        "--no-dist.offload_optimizer or --dist.device cuda",
    ),
    _excludes(
        ("dist.offload_optimizer == true", "train.precision == fp16"),
        "fp16's loss scaling checks gradients on the GPU, and these are in the host's memory; use bf16",
        "--train.precision bf16 or --no-dist.offload_optimizer",
    ),
    _excludes(
        ("dist.meta_init == true", "model.init != none"),
        "weights that are loaded need a model that has memory; leave --dist.meta_init off",
        "--no-dist.meta_init or --model.init none",
    ),
    _excludes(
        ("train.step != none | eager", "train.exact == elastic"),
        "the elastic mode computes shard by shard, operation by operation: it needs --train.step eager",
        "--train.step eager or --train.exact world",
    ),
    _excludes(
        ("train.step == auto", "train.deterministic == true"),
        "auto chooses by measured time, so its choice may differ between runs; with --train.deterministic name one",
        "--train.step eager or --no-train.deterministic",
    ),
    _excludes(
        ("train.step == graph | compiled_graph", "dist.device == cpu"),
        "CUDA graphs need a GPU; give --train.step eager or compile for the CPU",
        "--train.step eager or --dist.device cuda",
    ),
    _excludes(
        ("data.balance == auto", "train.exact == elastic"),
        "the elastic mode has shards of fixed sizes; it needs --data.balance off",
        "--data.balance off or --train.exact world",
    ),
    _excludes(
        ("data.balance == auto", "train.step != none | eager | compile"),
        "shards by speed change their sizes, and a captured step has fixed shapes; give --train.step eager or compile",
        "--train.step eager or --data.balance off",
    ),
    _excludes(
        ("data.balance == auto", "dist.sync_batchnorm == true"),
        "synchronized BatchNorm waits for the other ranks in every forward pass, so a rank has no measurable speed",
        "--data.balance off or --no-dist.sync_batchnorm",
    ),
    _excludes(
        ("data.balance == auto", "train.deterministic == true"),
        "shards by speed follow measured times, so their sizes may differ between runs",
        "--data.balance off or --no-train.deterministic",
    ),
    _excludes(
        ("data.balance == auto", "log.trace == true"),
        "shards by speed differ between runs, so two traces cannot be compared bit by bit",
        "--data.balance off or --no-log.trace",
    ),
    _excludes(
        ("train.cudnn_benchmark == true", "train.deterministic == true"),
        "cuDNN's search uses measured times, so it may choose a different kernel in each run",
        "--no-train.cudnn_benchmark or --no-train.deterministic",
    ),
    _excludes(
        ("optim.scale_lr != none", "train.batch_size_per_rank == none"),
        "the rate is scaled only if the batch grows with the world size: optim.scale_lr needs "
        "train.batch_size_per_rank",
        "--optim.scale_lr none or --train.batch_size_per_rank 32",
    ),
    _excludes(
        ("optim.nesterov == true", "optim.momentum == 0.0", "optim.name == sgd"),
        "Nesterov's form needs momentum; give --no-optim.nesterov or a momentum above 0",
        "--no-optim.nesterov or --optim.momentum 0.9",
    ),
    _excludes(
        ("dist.backend == nccl", "dist.device == cpu"),
        "NCCL works between GPUs only; give --dist.backend gloo (or auto) for the CPU",
        "--dist.backend gloo or --dist.device cuda",
    ),
    _excludes(
        ("dist.sync_batchnorm == true", "dist.device == cpu"),
        "torch has no synchronized BatchNorm for the CPU",
        "--no-dist.sync_batchnorm or --dist.device cuda",
    ),
    _excludes(
        ("dist.static_graph == true", "dist.find_unused_parameters == true"),
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
