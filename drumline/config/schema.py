"""What a run is: every setting, its type, its bounds, its default and its doc; defined here and nowhere else.

The docstring under a field becomes its `--help`. `None` means "not set": another field or the task decides.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Annotated, Literal


@dataclass(frozen=True)
class Bounds:
    """The values a number may take; an `above` bound is exclusive."""

    low: float | None = None
    high: float | None = None
    above: float | None = None


Count = Annotated[int, Bounds(low=1)]
CountOrZero = Annotated[int, Bounds(low=0)]
Seed = Annotated[int, Bounds(low=0, high=2**63 - 1)]
Positive = Annotated[float, Bounds(above=0)]
NotNegative = Annotated[float, Bounds(low=0)]
Fraction = Annotated[float, Bounds(low=0, high=1)]
Scalar = str | int | float | bool


@dataclass(frozen=True, kw_only=True)
class ModelConfig:
    """Which network is trained."""

    name: str = "mini_resnet"
    """A registered model (`mini_resnet`, `gpt`), or your own: `path/to/file.py:ClassName`."""
    widths: tuple[Count, ...] = (16, 32, 64)
    """mini_resnet: channels of each stage; each stage after the first halves the image."""
    blocks: Count = 1
    """mini_resnet: residual blocks in each stage."""
    layers: Count = 4
    """gpt: transformer layers."""
    heads: Count = 4
    """gpt: attention heads; must divide the width."""
    width: Count = 128
    """gpt: embedding width."""
    context: Count = 128
    """gpt: tokens in one sample."""
    dropout: Fraction = 0.0
    """Share of activations dropped in training."""
    activation_checkpointing: bool = False
    """Recompute activations in the backward pass: less memory, more time."""
    options: Mapping[str, Scalar] = field(default_factory=dict)
    """Keyword arguments for a model of your own: `--model.options.hidden 64`."""


@dataclass(frozen=True, kw_only=True)
class DataConfig:
    """What it is trained on, and how batches reach the device."""

    name: str = "digits"
    """`digits`, `cifar10`, `image_folder`, `tokens`, `synthetic_images`, `synthetic_tokens`, or your own
    dataset: `path/to/file.py:ClassName`."""
    dir: str | None = None
    """Folder (or file) that holds the data, such as a shared volume. Also read from DATASET_DIR."""
    augment: bool = False
    """Random crop and flip of training images, decided by (seed, epoch, sample index)."""
    image_size: Count = 32
    """image_folder and synthetic_images: height and width of an image."""
    samples: Count = 4096
    """synthetic data: number of training samples."""
    classes: Count = 10
    """synthetic_images: number of classes."""
    token_type: Literal["uint8", "uint16", "uint32"] = "uint16"
    """tokens: integer type of a raw `.bin` file (`.npy` files know their own)."""
    workers: CountOrZero = 0
    """DataLoader processes per rank; 0 loads in the training process."""
    pin_memory: bool = True
    """Page-locked batches, so that copies to a GPU overlap with compute (no effect on CPU)."""
    persistent_workers: bool = True
    """Keep DataLoader processes alive between epochs (no effect with 0 workers)."""
    prefetch_factor: Count = 2
    """Batches each DataLoader process prepares ahead (no effect with 0 workers)."""
    resident: bool = False
    """Hold the whole training set in the device's memory, for data in arrays (digits, cifar10, tokens) that fits."""


@dataclass(frozen=True, kw_only=True)
class OptimConfig:
    """How weights change."""

    name: Literal["sgd", "adamw"] = "sgd"
    """The optimizer; the fused version is used where the device has one."""
    lr: Positive = 0.1
    """Peak learning rate."""
    scale_lr: Literal["none", "linear", "sqrt"] = "none"
    """With `train.batch_size_per_rank`: multiply the rate by the world size, or by its square root."""
    momentum: Fraction = 0.9
    """sgd: momentum."""
    nesterov: bool = True
    """sgd: Nesterov's form of momentum."""
    betas: tuple[Fraction, Fraction] = (0.9, 0.95)
    """adamw: decay of the two running averages."""
    eps: Positive = 1e-8
    """adamw: the term that keeps the division finite."""
    weight_decay: NotNegative = 5e-4
    """Decay of weights; biases and normalisation parameters are left alone."""
    clip_norm: Positive | None = None
    """Clip the gradient of the whole global batch to this norm."""
    schedule: Literal["constant", "linear", "cosine", "step"] = "cosine"
    """Shape of the rate after warm-up, over optimizer steps."""
    warmup_steps: CountOrZero = 0
    """Optimizer steps over which the rate rises to its peak."""
    final_lr_ratio: Fraction = 0.0
    """linear, cosine: where the rate ends, as a share of its peak."""
    step_every: Count = 1000
    """step: optimizer steps between drops."""
    step_factor: Fraction = 0.1
    """step: what the rate is multiplied by at each drop."""
    reset: bool = False
    """On resume, keep the weights and start the optimizer anew: to change it, say. It acts once: a checkpoint that was
    saved under it is resumed as it is, so a restart of the same command does not reset again."""


@dataclass(frozen=True, kw_only=True)
class TrainConfig:
    """How long, in what portions, in what precision."""

    seed: Seed = 0
    """One seed for initial weights, sample order, augmentation and randomness inside the model."""
    epochs: Count | None = None
    """Passes over the training data. Give this or `train.steps`."""
    steps: Count | None = None
    """Optimizer steps. Give this or `train.epochs`."""
    batch_size: Count | None = None
    """Samples of one optimizer step over all ranks: the run is the same on any number of them."""
    batch_size_per_rank: Count | None = None
    """Samples of one optimizer step on each rank, instead: the global batch follows from the number of ranks that the
    run begins with, and stays when it is resumed on another number."""
    accumulate: Count = 1
    """Micro-batches each rank cuts its share of a step into; gradients are synchronised once."""
    micro_batch_size: Count | None = None
    """Most samples that a rank holds at once, instead: as many micro-batches as that takes."""
    exact: Literal["world", "elastic"] = "world"
    """`world`: the same bits after a resume on the same number of ranks. `elastic`: on any number of them."""
    shards: Count = 8
    """elastic: pieces the global batch is cut into, whatever the number of ranks; fastest with one for each rank."""
    step: Literal["eager", "compile", "graph", "compiled_graph", "auto"] = "eager"
    """How a step runs: operation by operation; compiled by torch; captured once as a CUDA graph and replayed; both; or
    whichever of these is fastest in the first steps of the run."""
    memory_format: Literal["auto", "contiguous", "channels_last"] = "auto"
    """Layout of images and convolutions; `auto`: channels_last for convolutional models on CUDA."""
    tf32: Literal["auto", "on", "off"] = "auto"
    """CUDA: whether fp32 matrix products and convolutions may round their inputs to 10 bits of mantissa, which is much
    faster; `auto`: torch's own choice, which is convolutions only."""
    cudnn_benchmark: bool = False
    """CUDA: let cuDNN try its kernels for each new shape and keep the fastest; bits may then differ between runs."""
    deterministic: bool = False
    """Only kernels that give the same bits each time (CUDA; on the CPU they do). `elastic` turns it on."""
    precision: Literal["fp32", "bf16", "fp16"] = "fp32"
    """Type of autocast arithmetic; fp16 brings loss scaling. Weights stay fp32."""
    on_nan: Literal["stop", "skip", "warn"] = "stop"
    """When a loss is NaN or infinite: stop the run and name the step, the rank and the module; leave such an update out
    on all ranks (a gradient that is not finite counts, too), and report how many; or only report it."""
    eval_every_epochs: CountOrZero = 1
    """Evaluate after this many epochs; 0 evaluates at the end only."""
    eval_batch_size: Count = 256
    """Samples of one evaluation batch on one rank."""


@dataclass(frozen=True, kw_only=True)
class DistConfig:
    """How ranks talk to each other."""

    device: Literal["auto", "cpu", "cuda"] = "auto"
    """Where ranks compute; `auto` takes a GPU if there is one."""
    backend: Literal["auto", "nccl", "gloo"] = "auto"
    """`auto`: NCCL on CUDA, gloo on CPU."""
    start_timeout_s: Positive = 180.0
    """How long ranks wait for each other at the start."""
    train_timeout_s: Positive = 600.0
    """How long one collective may take once training runs. In a watched run at least 90 s more than
    `watch.hang_s`: the watchdog, which names the rank, comes first."""
    same_code: bool = True
    """Ranks whose own modules differ are refused; off, for nodes that each import a module of their own."""
    sync_batchnorm: bool = False
    """Batch statistics over all ranks (CUDA only: torch has no CPU version)."""
    find_unused_parameters: bool = False
    """For models that use some parameters only in some steps; costs time in every step."""
    threads: Count | None = None
    """CPU threads a rank computes with; by default torch's choice, and 1 in the elastic mode, whose bits must not
    depend on how many ranks share a machine."""
    broadcast_buffers: bool = True
    """Send rank 0's buffers (BatchNorm statistics) to all ranks at each step."""
    bucket_cap_mb: Positive = 25.0
    """Size of the buckets in which gradients are reduced."""
    gradient_as_bucket_view: bool = True
    """Let gradients live in the buckets: one copy less."""
    static_graph: bool = False
    """Promise that every step uses the same parameters in the same order."""


@dataclass(frozen=True, kw_only=True)
class CheckpointConfig:
    """When the run is saved, and what is kept."""

    every_epochs: CountOrZero = 1
    """Save after this many epochs; 0 turns it off. The end of the run is always saved."""
    every_steps: CountOrZero = 0
    """Save after this many optimizer steps too; 0 turns it off."""
    keep_last: Count = 2
    """How many of the newest checkpoints stay."""
    keep_best: CountOrZero = 1
    """How many of the best checkpoints stay besides, by the evaluation metric the task names."""
    background: bool = True
    """Stop the step for a copy of the state only, and write it while training goes on."""
    when_busy: Literal["wait", "skip"] = "wait"
    """When a save comes due while the one before is still being written: wait for it, or leave the new one out. The
    last save of a run always waits."""
    writers: Literal["one", "nodes", "ranks"] = "one"
    """Who writes: rank 0; or the first rank of each node, or every rank, each a share, to a run folder that all nodes
    have (a shared volume)."""


@dataclass(frozen=True, kw_only=True)
class WatchConfig:
    """What is looked after while it runs."""

    replicas_every: CountOrZero = 100
    """Compare the replicas' weights, buffers and optimizer state across ranks after this many steps, and before
    each save; 0 turns it off."""
    on_difference: Literal["stop", "broadcast"] = "stop"
    """When replicas differ: stop the run, or give all ranks the majority's tensors and warn."""
    sidecar: Literal["auto", "on", "off"] = "auto"
    """A process on each node that watches its ranks, and says which one holds up the run and why; `auto`: where there
    are several ranks."""
    on_hang: Literal["restart", "stop", "report"] = "restart"
    """What then follows: the job is ended and started again from the newest checkpoint, as often as the launcher's
    --max-restarts allows; or it is ended; or it is only told."""
    hang_s: Annotated[float, Bounds(above=0)] = 600.0
    """How long one rank may keep the others waiting before that follows. It is reported after some seconds, and again
    at growing intervals. What cannot continue by itself (a rank that was stopped, a lost host) is not waited for."""
    slow_factor: Annotated[float, Bounds(above=1)] = 2.0
    """A rank whose own work takes so many times as long as that of its peers is named."""
    notice: str | None = None
    """Where a notice of reclaim shows up: a file, an http address (of a cloud's metadata, say), or your own function
    `path/to/file.py:function`. The run then saves and leaves, as after a SIGTERM."""


@dataclass(frozen=True, kw_only=True)
class LogConfig:
    """What is written down, and shown."""

    every_steps: Count = 10
    """Log the loss every so many optimizer steps; steps in between do not wait for the device."""
    display: Literal["auto", "live", "plain", "none"] = "auto"
    """`auto`: a live display on a terminal, plain lines elsewhere."""
    tensorboard: bool = False
    """Write TensorBoard files to RUN/tensorboard (needs the `tensorboard` extra)."""
    trace: bool = False
    """Write hashes of every sample and tensor at every step to RUN/trace: to compare two runs bit by bit; slow."""


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
