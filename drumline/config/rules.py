"""The rules between settings that are valid one by one, but not together: Python functions, each
with its message and what to do. And the forms of texts that some settings take."""

from __future__ import annotations

import inspect
import ipaddress
import math
import re
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import NamedTuple

from drumline.base.text import CREDENTIALS
from drumline.config.flags import Layer, Setting, evidence

FIRST_PROFILED = 2
MOST_PROFILED = 1000
METRICS_FORM = (
    "PORT or ADDRESS:PORT, with an IP address of this host: 9464, 10.0.0.5:9464, [::1]:9464"
)


@dataclass(frozen=True)
class Rule:
    is_broken: Callable[..., bool]
    """Its parameters are the settings that it is about: `train_steps` is train.steps."""
    message: str
    fix: str | Callable[..., str]
    """Flags that keep the rule, with ` or ` between alternatives; a function if they depend on the
    values, which it takes as `is_broken` does."""

    @property
    def fields(self) -> list[str]:
        return [name.replace("_", ".", 1) for name in inspect.signature(self.is_broken).parameters]


class BrokenRule(NamedTuple):
    """A rule that the settings break: the problem with the values, and flags that solve it."""

    problem: str
    fix: str


def profiled_steps(text: str) -> range | None:
    """The steps of `log.profile`; None: the text is not `FIRST:LAST`, or the first steps, which
    warm up, are in it."""
    first, colon, last = text.partition(":")
    is_number = all(part.isascii() and part.isdigit() and len(part) < 10 for part in (first, last))
    steps = range(int(first), int(last)) if colon and is_number else range(0)
    return steps if steps.start >= FIRST_PROFILED and 0 < len(steps) <= MOST_PROFILED else None


def metrics_endpoint(text: str) -> tuple[str, int] | None:
    """The address and port of `log.prometheus`; None: the text is neither `PORT` nor
    `ADDRESS:PORT`."""
    address, _, port = text.rpartition(":")
    address = address.removeprefix("[").removesuffix("]") or "127.0.0.1"
    try:
        ipaddress.ip_address(address)
    except ValueError:
        return None
    is_port = port.isascii() and port.isdigit() and len(port) <= 5 and int(port) < 1 << 16
    return (address, int(port)) if is_port else None


def sync_interval(text: str) -> int | None:
    """The steps between two rounds of `dist.sync`; 0: it is `step`; None: it has none of its
    forms."""
    kind, _, steps = text.partition(":")
    is_number = steps.isascii() and steps.isdigit() and len(steps) < 10 and int(steps) > 0
    if kind in ("local", "diloco") and is_number:
        return int(steps)
    return 0 if text == "step" else None


def has_rounds(sync: str) -> bool:
    """Whether replicas synchronize after some steps: dist.sync is `local:H` or `diloco:H`."""
    kind, colon, _ = sync.partition(":")
    return bool(colon) and kind in ("local", "diloco")


def has_credentials(address: str | None) -> bool:
    return bool(CREDENTIALS.search(address or ""))


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
        lambda train_epochs, train_steps: train_epochs is None and train_steps is None,
        "the length of the run is not set; give --train.epochs or --train.steps",
        "--train.epochs 10 or --train.steps 1000",
    ),
    Rule(
        lambda train_batch_size, train_batch_size_per_rank: (
            train_batch_size is None and train_batch_size_per_rank is None
        ),
        "the batch size is not set; give --train.batch_size or --train.batch_size_per_rank",
        "--train.batch_size 32 or --train.batch_size_per_rank 32",
    ),
    Rule(
        lambda train_exact, dist_sync_batchnorm: train_exact == "elastic" and dist_sync_batchnorm,
        "in the elastic mode batch statistics belong to the shard, not to the ranks",
        "--no-dist.sync_batchnorm or --train.exact world",
    ),
    Rule(
        lambda train_exact, dist_broadcast_buffers: (
            train_exact == "elastic" and not dist_broadcast_buffers
        ),
        "in the elastic mode every rank needs the same buffers",
        "--dist.broadcast_buffers or --train.exact world",
    ),
    Rule(
        lambda dist_comm, train_exact: dist_comm != "none" and train_exact == "elastic",
        "the elastic mode adds up shards in a fixed order, without DDP: it needs --dist.comm none",
        "--dist.comm none or --train.exact world",
    ),
    Rule(
        lambda dist_comm, train_precision: dist_comm == "powersgd" and train_precision == "fp16",
        "powersgd adds what one step leaves out to the next, and fp16's loss scale may change in between; use bf16",
        "--train.precision bf16 or --dist.comm bf16",
    ),
    Rule(
        lambda dist_comm, train_on_nan: dist_comm == "powersgd" and train_on_nan == "skip",
        "powersgd carries a gradient that is not finite on into all later steps, so skipping one does not help; "
        "give --train.on_nan stop",
        "--train.on_nan stop or --dist.comm bf16",
    ),
    Rule(
        lambda dist_sync, train_exact: has_rounds(dist_sync) and train_exact == "elastic",
        "the elastic mode adds up the gradients of every step: it needs --dist.sync step",
        "--dist.sync step or --train.exact world",
    ),
    Rule(
        lambda dist_sync, dist_comm: has_rounds(dist_sync) and dist_comm != "none",
        "dist.comm compresses gradients, which are not sent between rounds; give --dist.outer_dtype in its place",
        "--dist.comm none or --dist.sync step",
    ),
    Rule(
        lambda dist_sync, dist_sync_within, dist_sync_batchnorm: (
            has_rounds(dist_sync) and dist_sync_within == "none" and dist_sync_batchnorm
        ),
        "synchronized BatchNorm needs all ranks in every step; inside nodes it works with --dist.sync_within node",
        "--dist.sync_within node or --no-dist.sync_batchnorm",
    ),
    Rule(
        lambda dist_sync, data_balance: has_rounds(dist_sync) and data_balance == "auto",
        "in a round every replica counts the same, however many samples it has had: it needs --data.balance off",
        "--data.balance off or --dist.sync step",
    ),
    Rule(
        lambda dist_sync, checkpoint_writers: has_rounds(dist_sync) and checkpoint_writers != "one",
        "every replica has an optimizer state of its own, and rank 0 writes all of them: it needs "
        "--checkpoint.writers one",
        "--checkpoint.writers one or --dist.sync step",
    ),
    Rule(
        lambda dist_on_lost_node, dist_sync, dist_mode: (
            dist_on_lost_node == "continue" and dist_sync == "step" and dist_mode != "hsdp"
        ),
        "the others can continue without a node only if each node has a whole replica: it needs --dist.sync local:H"
        " or diloco:H, or --dist.mode hsdp",
        "--dist.on_lost_node restart or --dist.sync diloco:100 or --dist.mode hsdp",
    ),
    Rule(
        lambda dist_mode, train_exact: dist_mode != "ddp" and train_exact == "elastic",
        "the elastic mode adds up shards of the batch in a fixed order, with all gradients on each rank: it needs "
        "--dist.mode ddp",
        "--dist.mode ddp or --train.exact world",
    ),
    Rule(
        lambda dist_mode, dist_comm: dist_mode != "ddp" and dist_comm != "none",
        "dist.comm changes DDP's all-reduce, which a sharded model does not have; give --dist.shard_dtype bf16",
        "--dist.comm none or --dist.mode ddp",
    ),
    Rule(
        lambda dist_mode, dist_sync: dist_mode != "ddp" and has_rounds(dist_sync),
        "between rounds every replica has a whole model of its own: dist.sync needs --dist.mode ddp",
        "--dist.mode ddp or --dist.sync step",
    ),
    Rule(
        lambda dist_mode, data_balance: dist_mode != "ddp" and data_balance == "auto",
        "a sharded model waits for other ranks in every block, so their own time is unknown: it needs "
        "--data.balance off",
        "--data.balance off or --dist.mode ddp",
    ),
    Rule(
        lambda dist_mode, dist_static_graph: dist_mode != "ddp" and dist_static_graph,
        "a static graph is an option of DDP, which a sharded model does not use",
        "--no-dist.static_graph or --dist.mode ddp",
    ),
    Rule(
        lambda dist_mode, train_step: (
            dist_mode != "ddp" and train_step not in (None, "eager", "compile")
        ),
        "a sharded model gathers its parameters between operations: it needs --train.step eager or compile",
        "--train.step eager or --dist.mode ddp",
    ),
    Rule(
        lambda dist_mode, train_memory_format: (
            dist_mode != "ddp" and train_memory_format == "channels_last"
        ),
        "parameters are sharded by rows of contiguous memory; give --train.memory_format contiguous",
        "--train.memory_format contiguous or --dist.mode ddp",
    ),
    Rule(
        lambda dist_mode, optim_name: dist_mode != "ddp" and optim_name == "muon",
        "muon needs whole matrices, and a rank of a sharded model has some rows; give --optim.name adamw",
        "--optim.name adamw or --dist.mode ddp",
    ),
    Rule(
        lambda dist_shard_ranks, dist_mode: dist_shard_ranks is not None and dist_mode != "hsdp",
        "dist.shard_ranks sets the groups of --dist.mode hsdp",
        "--dist.mode hsdp or --dist.shard_ranks none",
    ),
    Rule(
        lambda dist_shard_dtype, train_precision: (
            dist_shard_dtype == "bf16" and train_precision != "bf16"
        ),
        "parameters that are gathered in bf16 need --train.precision bf16",
        "--train.precision bf16 or --dist.shard_dtype fp32",
    ),
    Rule(
        lambda dist_shard_dtype, dist_mode: dist_shard_dtype == "bf16" and dist_mode == "ddp",
        "ddp gathers no parameters; give --dist.comm bf16 to send its gradients in bf16",
        "--dist.shard_dtype fp32 or --dist.mode fsdp",
    ),
    Rule(
        lambda dist_offload_optimizer, dist_mode: dist_offload_optimizer and dist_mode == "ddp",
        "ddp keeps its optimizer beside the model; give --dist.mode zero1, fsdp or hsdp",
        "--dist.mode fsdp or --no-dist.offload_optimizer",
    ),
    Rule(
        lambda dist_offload_optimizer, dist_device: dist_offload_optimizer and dist_device == "cpu",
        "on the CPU the optimizer is in the host's memory already",
        "--no-dist.offload_optimizer or --dist.device cuda",
    ),
    Rule(
        lambda dist_offload_optimizer, train_precision: (
            dist_offload_optimizer and train_precision == "fp16"
        ),
        "fp16's loss scaling checks gradients on the GPU, and these are in the host's memory; use bf16",
        "--train.precision bf16 or --no-dist.offload_optimizer",
    ),
    Rule(
        lambda dist_meta_init, model_init: dist_meta_init and model_init is not None,
        "weights that are loaded need a model that has memory; leave --dist.meta_init off",
        "--no-dist.meta_init or --model.init none",
    ),
    Rule(
        lambda train_step, train_exact: (
            train_step not in (None, "eager") and train_exact == "elastic"
        ),
        "the elastic mode computes shard by shard, operation by operation: it needs --train.step eager",
        "--train.step eager or --train.exact world",
    ),
    Rule(
        lambda train_step, train_deterministic: train_step == "auto" and train_deterministic,
        "auto chooses by measured time, so its choice may differ between runs; with --train.deterministic name one",
        "--train.step eager or --no-train.deterministic",
    ),
    Rule(
        lambda train_step, dist_device: (
            train_step in ("graph", "compiled_graph") and dist_device == "cpu"
        ),
        "CUDA graphs need a GPU; give --train.step eager or compile for the CPU",
        "--train.step eager or --dist.device cuda",
    ),
    Rule(
        lambda data_balance, train_exact: data_balance == "auto" and train_exact == "elastic",
        "the elastic mode has shards of fixed sizes; it needs --data.balance off",
        "--data.balance off or --train.exact world",
    ),
    Rule(
        lambda data_balance, train_step: (
            data_balance == "auto" and train_step not in (None, "eager", "compile")
        ),
        "shards by speed change their sizes, and a captured step has fixed shapes; give --train.step eager or compile",
        "--train.step eager or --data.balance off",
    ),
    Rule(
        lambda data_balance, dist_sync_batchnorm: data_balance == "auto" and dist_sync_batchnorm,
        "synchronized BatchNorm waits for the other ranks in every forward pass, so a rank has no measurable speed",
        "--data.balance off or --no-dist.sync_batchnorm",
    ),
    Rule(
        lambda data_balance, train_deterministic: data_balance == "auto" and train_deterministic,
        "shards by speed follow measured times, so their sizes may differ between runs",
        "--data.balance off or --no-train.deterministic",
    ),
    Rule(
        lambda data_balance, log_trace: data_balance == "auto" and log_trace,
        "shards by speed differ between runs, so two traces cannot be compared bit by bit",
        "--data.balance off or --no-log.trace",
    ),
    Rule(
        lambda train_cudnn_benchmark, train_deterministic: (
            train_cudnn_benchmark and train_deterministic
        ),
        "cuDNN's search uses measured times, so it may choose a different kernel in each run",
        "--no-train.cudnn_benchmark or --no-train.deterministic",
    ),
    Rule(
        lambda optim_scale_lr, train_batch_size_per_rank: (
            optim_scale_lr != "none" and train_batch_size_per_rank is None
        ),
        "the rate is scaled only if the batch grows with the world size: optim.scale_lr needs "
        "train.batch_size_per_rank",
        "--optim.scale_lr none or --train.batch_size_per_rank 32",
    ),
    Rule(
        lambda optim_nesterov, optim_momentum, optim_name: (
            optim_nesterov and optim_momentum == 0 and optim_name == "sgd"
        ),
        "Nesterov's form needs momentum; give --no-optim.nesterov or a momentum above 0",
        "--no-optim.nesterov or --optim.momentum 0.9",
    ),
    Rule(
        lambda dist_backend, dist_device: dist_backend == "nccl" and dist_device == "cpu",
        "NCCL works between GPUs only; give --dist.backend gloo (or auto) for the CPU",
        "--dist.backend gloo or --dist.device cuda",
    ),
    Rule(
        lambda dist_sync_batchnorm, dist_device: dist_sync_batchnorm and dist_device == "cpu",
        "torch has no synchronized BatchNorm for the CPU",
        "--no-dist.sync_batchnorm or --dist.device cuda",
    ),
    Rule(
        lambda dist_static_graph, dist_find_unused_parameters: (
            dist_static_graph and dist_find_unused_parameters
        ),
        "a static graph uses the same parameters in every step, so there are no unused ones to find",
        "--no-dist.static_graph or --no-dist.find_unused_parameters",
    ),
    Rule(
        lambda checkpoint_mirror: checkpoint_mirror is not None and "://" not in checkpoint_mirror,
        "the mirror is an address such as s3://bucket/prefix; that of a folder is file:///path",
        "--checkpoint.mirror s3://bucket/prefix or --checkpoint.mirror none",
    ),
    *(
        Rule(
            is_broken,
            f"{field} takes no user, password or options, which would be written to logs and files: the variables, "
            "profile or role of the store itself are used",
            f"--{field} s3://bucket/prefix",
        )
        for field, is_broken in (
            ("checkpoint.mirror", lambda checkpoint_mirror: has_credentials(checkpoint_mirror)),
            ("data.dir", lambda data_dir: has_credentials(data_dir)),
        )
    ),
    Rule(
        lambda train_accumulate, train_batch_size: (
            train_batch_size is not None and train_accumulate > train_batch_size
        ),
        "a batch cannot be cut into more micro-batches than it has samples",
        lambda _, batch: f"--train.accumulate {batch}",
    ),
    Rule(
        lambda train_accumulate, train_batch_size_per_rank: (
            train_batch_size_per_rank is not None and train_accumulate > train_batch_size_per_rank
        ),
        "a rank's batch cannot be cut into more micro-batches than it has samples",
        lambda _, batch: f"--train.accumulate {batch}",
    ),
    Rule(
        lambda train_accumulate, train_micro_batch_size: (
            train_accumulate > 1 and train_micro_batch_size is not None
        ),
        "train.accumulate sets the number of micro-batches, train.micro_batch_size their size: give one of them",
        "--train.accumulate 1 or --train.micro_batch_size none",
    ),
    Rule(
        lambda train_shards, train_batch_size, train_exact: (
            train_exact == "elastic"
            and train_batch_size is not None
            and train_shards > train_batch_size
        ),
        "a batch cannot be cut into more shards than it has samples",
        lambda _, batch, exact: f"--train.shards {batch}",
    ),
    Rule(
        lambda dist_sync: sync_interval(dist_sync) is None,
        "dist.sync is step, local:H or diloco:H with a number of steps, as in diloco:100",
        "--dist.sync step or --dist.sync diloco:100",
    ),
    Rule(
        lambda dist_sync, dist_sync_parts: (
            (sync_interval(dist_sync) or dist_sync_parts) < dist_sync_parts
        ),
        "each part needs a step of its own between two rounds: more parts than steps",
        lambda sync, _: f"--dist.sync_parts {sync_interval(sync)}",
    ),
    Rule(
        lambda dist_sync, dist_sync_parts, dist_sync_overlap: (
            0 < (sync_interval(dist_sync) or 0) < dist_sync_overlap * dist_sync_parts
        ),
        "a part must have arrived before the next one is sent: dist.sync_overlap is at most H / dist.sync_parts",
        lambda sync, parts, _: f"--dist.sync_overlap {(sync_interval(sync) or 0) // parts}",
    ),
    Rule(
        lambda optim_warmup_steps, train_steps: (
            train_steps is not None and optim_warmup_steps > train_steps
        ),
        "the warm-up is longer than the run",
        "--optim.warmup_steps 0",
    ),
    Rule(
        lambda optim_betas, optim_name: optim_name == "adamw" and 1.0 in optim_betas,
        "adamw needs betas below 1",
        "--optim.betas 0.9,0.95",
    ),
    Rule(
        lambda model_heads, model_width, model_name: (
            model_name == "gpt" and model_width % model_heads != 0
        ),
        "the heads must divide the width",
        lambda heads, width, _: (
            f"--model.heads {math.gcd(heads, width)} or --model.width {heads * -(-width // heads)}"
        ),
    ),
    Rule(
        lambda watch_notice: (
            watch_notice is not None
            and "://" in watch_notice
            and not WEB_ADDRESS.match(watch_notice)
        ),
        "watch.notice is a file, http://HOST/PATH or https://HOST/PATH (without a name or password), or "
        "path/to/file.py:function",
        "--watch.notice http://HOST/PATH or --watch.notice none",
    ),
    Rule(
        lambda watch_notice: (
            watch_notice is not None and bool(re.search(r"\.py(?!:[^\W\d]\w*$)(:|$)", watch_notice))
        ),
        "the function is missing: write path/to/file.py:function",
        lambda notice: f"--watch.notice {notice.partition('.py')[0]}.py:function",
    ),
    Rule(
        lambda log_profile: log_profile is not None and profiled_steps(log_profile) is None,
        f"log.profile is FIRST:LAST, as in 10:20, with FIRST at least {FIRST_PROFILED} and at most {MOST_PROFILED:,} "
        "steps",
        "--log.profile 10:20",
    ),
    Rule(
        lambda log_prometheus: (
            log_prometheus is not None and metrics_endpoint(log_prometheus) is None
        ),
        f"log.prometheus is {METRICS_FORM}",
        "--log.prometheus 9464",
    ),
    Rule(
        lambda log_prometheus, watch_sidecar: log_prometheus is not None and watch_sidecar == "off",
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
        fields = rule.fields
        if not all(path in settled and path not in besides for path in fields):
            continue
        involved = [settled[path] for path in fields]
        arguments = [setting.value for setting in involved]
        if rule.is_broken(*arguments):
            # A password in an address is not shown.
            values = re.sub(r"(?<=://).*[@?].*(?=['\"] \()", "***", evidence(involved))
            problem = f"{rule.message}: {values}" if values else rule.message
            fix = rule.fix if isinstance(rule.fix, str) else rule.fix(*arguments)
            yield BrokenRule(problem, fix)
