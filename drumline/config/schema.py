"""What a run is: every setting, its type, bounds, default, scope and doc; defined here and nowhere
else.

The docstring under a field becomes its `--help`. `None` means "not set": another field or the task
decides. A field with a plain default is part of the experiment: all ranks need the same value, and
another value gives another result. `setting(...)` declares what is different.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Annotated, Any, Literal


@dataclass(frozen=True, kw_only=True)
class SettingScope:
    """What a setting belongs to. Ranks that compare their settings, a resumed run, a finished run
    that is started again, and the model card of an export read it."""

    per_machine: bool = False
    """It names a place or a capacity of the machine, and is no part of the experiment."""
    changes_result: bool = True
    """Another value may change the bits of later steps: a resumed run reports the change and
    records it."""
    changes_finished_run: bool = True
    """With another value the result of a finished run could have been different: the run refuses
    it."""
    may_differ_across_ranks: bool = False
    """The ranks of a job may have different values."""
    of_built_ins: bool = False
    """Built-in models and datasets read it. Drumline itself does not, so for a task with its own
    ones it means something only if the task reads it."""


EXPERIMENT = SettingScope()
"""The scope of a field with a plain default."""
BUILT_IN = SettingScope(of_built_ins=True)
SAME_RESULT = SettingScope(changes_result=False, changes_finished_run=False)
LATER_STEPS = SettingScope(changes_finished_run=False)
MACHINE = SettingScope(
    per_machine=True, changes_result=False, changes_finished_run=False, may_differ_across_ranks=True
)
SECTION_SCOPES = {"checkpoint": SAME_RESULT, "watch": SAME_RESULT, "log": SAME_RESULT}
"""The scope of a field with a plain default in these sections."""


def setting(
    default: Any, scope: SettingScope | None = None, *, other_names: tuple[str, ...] = ()
) -> Any:
    """A field with this default, and with a scope of its own. `other_names`: those of other tools,
    if they are spelt too differently to be recognized."""
    return field(default=default, metadata={"scope": scope, "other_names": other_names})


@dataclass(frozen=True)
class Bounds:
    """The values a number may take; an `above` bound is exclusive."""

    low: float | None = None
    high: float | None = None
    above: float | None = None


Count = Annotated[int, Bounds(low=1)]
CountOrZero = Annotated[int, Bounds(low=0)]
Seed = Annotated[int, Bounds(low=0, high=2**63 - 1)]
Port = Annotated[int, Bounds(low=1, high=65535)]
Positive = Annotated[float, Bounds(above=0)]
NotNegative = Annotated[float, Bounds(low=0)]
Fraction = Annotated[float, Bounds(low=0, high=1)]
Scalar = str | int | float | bool


@dataclass(frozen=True)
class OrClass:
    """One of these names, or a class of the user's choice: `package.module.Class`,
    `file.py:Class`."""

    choices: tuple[str, ...]
    """The names, and how a class is written."""


@dataclass(frozen=True)
class SwitchOr:
    """True, false, or a text of this form."""

    form: str
    """As it is shown."""
    pattern: str
    switches: Mapping[str, bool] = field(default_factory=dict)
    """Further words for true and false."""


EVERY = SwitchOr("none | full | every:N", r"every:[1-9]\d{0,8}", {"full": True, "none": False})


@dataclass(frozen=True, kw_only=True)
class ModelConfig:
    """Which network is trained."""

    name: str = setting("mini_resnet", BUILT_IN, other_names=("model",))
    """A registered model (`mini_resnet`, `gpt`), or your own: `path/to/file.py:ClassName`."""
    widths: tuple[Count, ...] = setting((16, 32, 64), BUILT_IN)
    """mini_resnet: channels of each stage; each stage after the first halves the image."""
    blocks: Count = setting(1, BUILT_IN)
    """mini_resnet: residual blocks in each stage."""
    layers: Count = setting(4, BUILT_IN)
    """gpt: transformer layers."""
    heads: Count = setting(4, BUILT_IN)
    """gpt: attention heads; must divide the width."""
    width: Count = setting(128, BUILT_IN)
    """gpt: embedding width."""
    context: Count = setting(128, BUILT_IN)
    """gpt: tokens in one sample."""
    dropout: Fraction = setting(0.0, BUILT_IN)
    """Fraction of activations dropped in training."""
    activation_checkpointing: Annotated[bool | str, EVERY] = False
    """Compute activations again in the backward pass: less memory, more time. `full`: those of
    every block, `every:N`: of every N-th one. `dist.wrap` names the blocks of a model of your
    own."""
    options: Mapping[str, Scalar] = field(default_factory=dict)
    """Keyword arguments for a model of your own: `--model.options.hidden 64`."""
    # Both act when a run begins; a resumed run refuses another value (check_init).
    init: str | None = setting(None, SAME_RESULT)
    """Weights that a new run begins with: a .safetensors file, a Hugging Face folder, or a run (its
    best checkpoint). A resumed run has its own."""
    init_strict: bool = setting(True, SAME_RESULT)
    """Stop when the names or shapes of these weights and of the model differ; without it, what fits
    is loaded and the rest is listed."""


@dataclass(frozen=True, kw_only=True)
class DataConfig:
    """The training data, and how batches reach the device."""

    name: str = setting("digits", BUILT_IN, other_names=("dataset",))
    """`digits`, `cifar10`, `image_folder`, `tokens`, `synthetic_images`, `synthetic_tokens`, or
    your own dataset: `path/to/file.py:ClassName`."""
    dir: str | None = setting(None, MACHINE, other_names=("data_dir", "dataset_dir"))
    """Folder (or file) that holds the data, such as a shared volume. Also read from DATASET_DIR. A
    folder in an object store (`s3://bucket/folder`) is copied to each machine once."""
    cache: str | None = setting(None, MACHINE)
    """Where such copies are kept on each machine [~/.cache/drumline/data]."""
    augment: bool = setting(False, BUILT_IN)
    """Random crop and flip of training images, seeded by (seed, epoch, sample index)."""
    image_size: Count = setting(32, BUILT_IN)
    """image_folder and synthetic_images: height and width of an image."""
    samples: Count = setting(4096, BUILT_IN)
    """synthetic data: number of training samples."""
    classes: Count = setting(10, BUILT_IN)
    """synthetic_images: number of classes."""
    token_type: Literal["uint8", "uint16", "uint32"] = setting("uint16", BUILT_IN)
    """tokens: integer type of a raw `.bin` file (`.npy` files contain theirs)."""
    workers: CountOrZero = setting(0, MACHINE, other_names=("num_workers",))
    """DataLoader processes per rank; 0 loads in the training process."""
    pin_memory: bool = setting(True, MACHINE)
    """Page-locked batches, so that copies to a GPU overlap with compute (no effect on CPU)."""
    persistent_workers: bool = setting(True, MACHINE)
    """Keep DataLoader processes alive between epochs (no effect with 0 workers)."""
    prefetch_factor: Count = setting(2, MACHINE)
    """Batches each DataLoader process prepares ahead (no effect with 0 workers)."""
    resident: bool = setting(False, MACHINE)
    """Hold the whole training set in the device's memory, for data in arrays (digits, cifar10,
    tokens) that fits."""
    balance: Literal["off", "auto"] = "off"
    """How a global batch is split over ranks. `off`: equally. `auto`: by the measured speed of each
    rank, for different GPUs in one job; the global batch stays the same."""


@dataclass(frozen=True, kw_only=True)
class OptimConfig:
    """The optimizer and its learning rate."""

    name: Annotated[str, OrClass(("sgd", "adamw", "muon", "package.Class"))] = setting(
        "sgd", other_names=("optimizer", "optim")
    )
    """The optimizer. `muon`: torch's Muon for matrices, AdamW for embeddings and the rest. Any
    other by its class: `torch.optim.NAdam`, with torch's defaults. The fused version is used where
    the device has one."""
    lr: Positive = setting(0.1, other_names=("learning_rate",))
    """Peak learning rate."""
    scale_lr: Literal["none", "linear", "sqrt"] = "none"
    """With `train.batch_size_per_rank`: multiply the rate by the world size (`linear`) or its
    square root (`sqrt`)."""
    momentum: Fraction = 0.9
    """sgd: momentum."""
    nesterov: bool = True
    """sgd: Nesterov's form of momentum."""
    betas: tuple[Fraction, Fraction] = (0.9, 0.95)
    """adamw, muon: decay of the two running averages."""
    eps: Positive = 1e-8
    """adamw, muon: the term that keeps the division finite."""
    weight_decay: NotNegative = setting(5e-4, other_names=("wd",))
    """Decay of weights; biases and normalization parameters are not decayed."""
    clip_norm: Positive | None = setting(
        None, other_names=("grad_clip", "max_grad_norm", "gradient_clip_val")
    )
    """Clip the gradient of the whole global batch to this norm."""
    schedule: Literal["constant", "linear", "cosine", "step"] = setting(
        "cosine", other_names=("scheduler", "lr_scheduler")
    )
    """How the rate falls after warm-up, over optimizer steps."""
    warmup_steps: CountOrZero = setting(0, other_names=("warmup",))
    """Optimizer steps over which the rate rises to its peak."""
    final_lr_ratio: Fraction = 0.0
    """linear, cosine: the rate at the end of the run, as a fraction of its peak."""
    step_every: Count = 1000
    """step: optimizer steps between drops."""
    step_factor: Fraction = 0.1
    """step: what the rate is multiplied by at each drop."""
    options: Mapping[str, Scalar] = field(default_factory=dict)
    """Keyword arguments of the optimizer's class: `--optim.options.momentum_decay 0.004`."""
    # A resumed run records it by itself (resets_optimizer).
    reset: bool = setting(False, SAME_RESULT)
    """On resume, keep the weights and start a new optimizer, for example to change it. It acts
    once: a checkpoint that was saved under it is resumed as it is, so a restart of the same command
    does not reset again."""


@dataclass(frozen=True, kw_only=True)
class TrainConfig:
    """How long, in what batches, in what precision."""

    seed: Seed = 0
    """One seed for initial weights, sample order, augmentation and randomness inside the model."""
    epochs: Count | None = None
    """Passes over the training data. Give this or `train.steps`."""
    steps: Count | None = None
    """Optimizer steps. Give this or `train.epochs`."""
    batch_size: Count | None = setting(None, other_names=("bs", "batch"))
    """The global batch: samples of one optimizer step over all ranks. The run is the same on any
    number of ranks."""
    batch_size_per_rank: Count | None = None
    """Use it instead of `train.batch_size`: samples of one optimizer step on each rank. The global
    batch then follows from the number of ranks that the run begins with; a resume on a different
    number of ranks does not change it."""
    accumulate: Count = setting(1, other_names=("grad_accum", "gradient_accumulation_steps"))
    """Micro-batches into which each rank splits its part of the batch; gradients are synchronized
    once per step."""
    micro_batch_size: Count | None = None
    """Use it instead of `train.accumulate`: the most samples in a micro-batch. Their number follows
    from it."""
    exact: Literal["world", "elastic"] = "world"
    """When a resumed run has the same bits as an uninterrupted one. `world`: on the same number of
    ranks. `elastic`: on any number of ranks."""
    shards: Count = 8
    """elastic: shards of the global batch, the same on any number of ranks; fastest with one shard
    per rank."""
    step: Literal["eager", "compile", "graph", "compiled_graph", "auto"] | None = None
    """How a step runs. `eager`: operation by operation. `compile`: compiled by torch. `graph`:
    captured once as a CUDA graph, then replayed. `compiled_graph`: both. `auto`: whichever is
    fastest in the first steps of the run. By default: as the run began; a new run takes `auto` on a
    GPU where that is safe, otherwise `eager`."""
    memory_format: Literal["auto", "contiguous", "channels_last"] = "auto"
    """Layout of images and convolutions; `auto`: channels_last for convolutional models on CUDA."""
    tf32: Literal["auto", "on", "off"] = "auto"
    """CUDA: whether fp32 matrix products and convolutions may round their inputs to 10 bits of
    mantissa, which is much faster; `auto`: torch's default, which is convolutions only."""
    cudnn_benchmark: bool = False
    """CUDA: let cuDNN try its kernels for each new shape and keep the fastest; bits may then differ
    between runs."""
    deterministic: bool = False
    """CUDA: only kernels that give the same bits each time (on the CPU all do). `train.exact
    elastic` turns it on."""
    precision: Literal["fp32", "bf16", "fp16"] = setting(
        "fp32", other_names=("amp", "dtype", "mixed_precision")
    )
    """Type of autocast arithmetic; fp16 uses loss scaling. Weights stay fp32."""
    # It acts on steps that are still to come.
    on_nan: Literal["stop", "skip", "warn"] = setting("stop", LATER_STEPS)
    """When a loss is NaN or infinite. `stop`: stop the run and name the step, the rank and the
    module. `skip`: skip the update on all ranks, also when a gradient is not finite, and report how
    many were. `warn`: only report it."""
    eval_every_epochs: CountOrZero = 1
    """Evaluate after this many epochs; 0 evaluates at the end only."""
    eval_every_steps: CountOrZero = 0
    """Evaluate after this many optimizer steps too; 0 turns it off."""
    eval_batch_size: Count = 256
    """Samples of one evaluation batch on one rank."""


@dataclass(frozen=True, kw_only=True)
class DistConfig:
    """How ranks communicate."""

    # What the device and the number of threads do to bits is compared by itself (platform_facts).
    device: Literal["auto", "cpu", "cuda"] = setting(
        "auto", replace(MACHINE, may_differ_across_ranks=False)
    )
    """Where ranks compute; `auto` takes a GPU if there is one."""
    backend: Literal["auto", "nccl", "gloo"] = "auto"
    """The library for collectives; `auto`: NCCL on CUDA, gloo on the CPU."""
    start_timeout_s: Positive = setting(180.0, SAME_RESULT)
    """How long ranks wait for each other at the start."""
    train_timeout_s: Positive = setting(600.0, SAME_RESULT, other_names=("timeout",))
    """How long one collective may take once training runs. With the watchdog at least 90 s more
    than `watch.hang_s`, so that the watchdog, which names the rank, acts first."""
    same_code: bool = setting(True, SAME_RESULT)
    """Stop at the start when code differs across ranks; turn it off if nodes import different
    modules on purpose."""
    sync_batchnorm: bool = False
    """BatchNorm with statistics over all ranks (CUDA only: torch has no CPU version)."""
    find_unused_parameters: bool = False
    """For models that use some parameters only in some steps; costs time in every step."""
    threads: Count | None = setting(None, MACHINE)
    """CPU threads of a rank; by default torch's choice, and 1 in the elastic mode, whose bits must
    not depend on how many ranks share a machine."""
    broadcast_buffers: bool = True
    """Send rank 0's buffers (BatchNorm statistics) to all ranks at each step."""
    bucket_cap_mb: Positive = 25.0
    """Size of the buckets in which gradients are reduced."""
    static_graph: bool = False
    """Declare that every step uses the same parameters in the same order (DDP's option)."""
    mode: Literal["ddp", "zero1", "fsdp", "hsdp", "auto"] = "ddp"
    """How ranks share the model. `ddp`: each has all of it. `zero1`: optimizer state and reduced
    gradients are sharded. `fsdp`: parameters too. `hsdp`: as fsdp inside groups of ranks, which are
    replicas of each other. `auto`: the first of ddp, zero1, hsdp and fsdp that fits on the GPUs, as
    `drumline plan` predicts it; on the CPU ddp."""
    shard_ranks: Annotated[int, Bounds(low=2)] | None = None
    """hsdp: how many ranks hold one copy of the model together; by default the ranks of a node."""
    wrap: tuple[str, ...] | None = None
    """zero1, fsdp, hsdp: the classes of modules that are sharded one by one, or a number of
    parameters from which on a module is. By default the classes that repeat in the model's lists of
    modules and hold most parameters, which the run logs; single layers only where there is nothing
    larger."""
    shard_dtype: Literal["fp32", "bf16"] = "fp32"
    """zero1, fsdp, hsdp: the type in which parameters are gathered and gradients are reduced."""
    offload_optimizer: bool = False
    """zero1, fsdp, hsdp on GPUs: keep shards and optimizer state in the host's memory, where the
    optimizer runs."""
    meta_init: bool = False
    """Build the model without memory, then initialize it block by block, so that no rank ever holds
    all of it. Modules need reset_parameters() or init_weights(). The weights are the same in every
    mode, but not those without this."""
    comm: Literal["none", "bf16", "fp16", "powersgd"] = "none"
    """How gradients are sent. `none`: as they are. `bf16`, `fp16`: rounded, which halves the bytes.
    `powersgd`: each matrix as two thin ones, a few percent of the bytes; what they leave out is
    added to the next step's gradient."""
    powersgd_rank: Count = 2
    """powersgd: columns of a factor; more are more exact, and more bytes."""
    powersgd_start: Annotated[int, Bounds(low=2)] = 1000
    """powersgd: the first steps of the run, which are not compressed."""
    sync: str = "step"
    """When replicas of the model synchronize. `step`: they reduce their gradients in every step.
    `local:H`: each rank trains alone, and after every H steps all take the mean of their weights.
    `diloco:H`: the same, but an outer optimizer with Nesterov momentum takes a step along the mean
    of what each has changed."""
    sync_within: Literal["none", "node"] = "none"
    """dist.sync: `node` reduces gradients inside each node in every step, so that each node trains
    a replica."""
    sync_parts: Count = 1
    """dist.sync: the model is sent in this many parts, each at a different step of the H."""
    sync_overlap: CountOrZero = 0
    """dist.sync: for how many steps training continues while a part is sent; at most H /
    dist.sync_parts."""
    outer_lr: Positive = 0.9
    """diloco: the rate of the outer optimizer."""
    outer_momentum: Annotated[float, Bounds(low=0, high=1)] = 0.5
    """diloco: the momentum of the outer optimizer."""
    outer_dtype: Literal["fp32", "bf16", "int8"] = "fp32"
    """dist.sync: how what has changed is sent. `bf16`, `int8`: rounded, 2 bytes or 1 for each
    parameter in place of 4; what rounding leaves out is added the next time."""
    on_lost_node: Literal["restart", "continue"] = setting("restart", SAME_RESULT)
    """When a node is lost. `restart`: all ranks resume from the newest checkpoint. `continue`: with
    dist.sync, or with hsdp, the others continue without it, and it joins again from their
    memory."""


@dataclass(frozen=True, kw_only=True)
class CheckpointConfig:
    """When the run is saved, and what is kept."""

    every_epochs: CountOrZero = 1
    """Save after this many epochs; 0 turns it off. The end of the run is always saved."""
    every_steps: CountOrZero = 0
    """Save after this many optimizer steps too; 0 turns it off."""
    keep_last: Count = 2
    """How many of the newest checkpoints are kept."""
    keep_best: CountOrZero = 1
    """How many of the best checkpoints are kept besides these, by the evaluation metric that the
    task names."""
    background: bool = True
    """Write checkpoints while training continues: it pauses only while the state is copied."""
    when_busy: Literal["wait", "skip"] = "wait"
    """When a save is due while the one before is still being written: `wait` for that one, or
    `skip` the new one. The last save of a run always waits."""
    writers: Literal["one", "nodes", "ranks"] = "one"
    """Who writes a checkpoint. `one`: rank 0. `nodes`, `ranks`: the first rank of each node, or
    every rank, writes a part; the run folder must then be on a volume that all nodes share."""
    mirror: str | None = None
    """An object store that gets a copy of each checkpoint, in the background: `s3://bucket/prefix`,
    or another address that fsspec knows. A run whose folder has no checkpoint resumes from there.
    Credentials are those that the store's own tools find."""
    mirror_wait_s: Positive = 300.0
    """How long a run that has ended waits for the last copy."""


@dataclass(frozen=True, kw_only=True)
class WatchConfig:
    """What is checked during the run."""

    replicas_every: CountOrZero = 100
    """Compare the replicas' weights, buffers and optimizer state across ranks after this many
    steps, and before each save; 0 turns it off."""
    on_difference: Literal["stop", "broadcast"] = "stop"
    """When replicas differ. `stop`: stop the run. `broadcast`: send the majority's tensors to all
    ranks, and warn."""
    sidecar: Literal["auto", "on", "off"] = "auto"
    """A process on each node that watches its ranks and reports which one blocks the run, and why;
    `auto`: when there is more than one rank."""
    on_hang: Literal["restart", "stop", "report"] = "restart"
    """When the run hangs. `restart`: end it and restart it from the newest checkpoint, as often as
    the launcher's --max-restarts allows. `stop`: end it. `report`: only report it."""
    hang_s: Positive = 600.0
    """How long one rank may block the others before `watch.on_hang` applies. A stall is reported
    after some seconds, and again at growing intervals. A rank that cannot recover (it is stopped)
    is handled at once; one that compiles (torch.compile) has six times as long."""
    lost_s: Positive = 20.0
    """How long a host may be unreachable before `watch.on_hang` applies; it is reported after three
    seconds. TCP survives a cut, and the run continues."""
    slow_factor: Annotated[float, Bounds(above=1)] = 2.0
    """Report a rank whose own work takes this many times as long as that of the others."""
    notice: str | None = setting(None, MACHINE)
    """Where a spot reclaim notice appears: a file, an http address (such as a cloud's metadata
    service), or your own function `path/to/file.py:function`. The run then saves and exits, as
    after a SIGTERM."""


@dataclass(frozen=True, kw_only=True)
class LogConfig:
    """What is logged and shown."""

    every_steps: Count = 10
    """Log the loss after this many optimizer steps; steps in between do not wait for the device."""
    display: Literal["auto", "live", "plain", "none"] = "auto"
    """How progress is shown; `auto`: a live display on a terminal, plain lines elsewhere."""
    format: Literal["text", "json"] = "text"
    """`json`: every line that is printed is a JSON object on stdout; files in the run folder stay
    as they are. DRUMLINE_LOG_FORMAT=json is the same for a whole launch, and for scripts."""
    trackers: tuple[Literal["wandb", "mlflow", "tensorboard"], ...] | None = setting(
        None, other_names=("tensorboard",)
    )
    """Trackers that show the curves, one run in each for the whole run; each needs the extra of its
    name. Their own variables set them up (WANDB_PROJECT, WANDB_MODE, MLFLOW_TRACKING_URI,
    MLFLOW_EXPERIMENT_NAME, ...). `tensorboard` writes its files to RUN/tensorboard."""
    trace: bool = False
    """Write hashes of every sample and tensor at every step to RUN/trace, to compare two runs bit
    by bit; slow."""
    profile: str | None = None
    """Profile these steps of this start on every rank, as in `10:20`: from step 10 up to, not
    including, 20. At the end the run prints where the time of a step goes; traces are in
    RUN/profile."""
    prometheus: str | None = setting(None, MACHINE)
    """Serve metrics for Prometheus on each node, at `/metrics` of this port of its loopback, or of
    `ADDRESS:PORT`; port 0: a free one, which is printed. Needs the extra of its name."""


@dataclass(frozen=True, kw_only=True)
class Config:
    """A whole run."""

    model: ModelConfig = field(default_factory=ModelConfig)
    data: DataConfig = field(default_factory=DataConfig)
    optim: OptimConfig = field(default_factory=OptimConfig)
    train: TrainConfig = field(default_factory=TrainConfig)
    dist: DistConfig = field(default_factory=DistConfig)
    checkpoint: CheckpointConfig = field(default_factory=CheckpointConfig)
    watch: WatchConfig = field(default_factory=WatchConfig)
    log: LogConfig = field(default_factory=LogConfig)
    task: Mapping[str, Any] = field(default_factory=dict)
    """The task's own settings by name (`--task.NAME`)."""


REMOVED: Mapping[str, Mapping[str, Mapping[str, Any]]] = {
    "log.tensorboard": {"true": {"log.trackers": ["tensorboard"]}, "false": {}},
    "dist.gradient_as_bucket_view": {},
}
"""Settings of earlier versions, which a config.toml may have: by value, the settings that are the
same today."""
