"""Layers merged into one Config: precedence, exclusive pairs, rules, and all problems in one go."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import pytest

from drumline.base.errors import ConfigError, ExitCode
from drumline.config import PRESETS, Layers, check_layers, read_flags, read_layers, resolve
from drumline.config.fields import FIELDS
from drumline.config.flags import Layer
from drumline.config.rules import RULES
from drumline.config.schema import Config

ENOUGH = {"train.epochs": 1, "train.batch_size": 8}

Read = Callable[..., Layers]


@pytest.fixture
def read(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Read:
    monkeypatch.chdir(tmp_path)

    def read(
        *argv: str, file: str | None = None, environment: Mapping[str, str] | None = None
    ) -> Layers:
        path = None
        if file is not None:
            path = Path("run.toml")
            path.write_text(file)
        return read_layers(read_flags(argv), config_file=path, environment=environment or {})

    return read


def problems(call: Callable[[], Any]) -> tuple[str, ...]:
    with pytest.raises(ConfigError) as raised:
        call()
    return raised.value.problems


def test_a_flag_overrides_the_file_the_environment_the_task_and_the_schema(read: Read) -> None:
    defaults = {**ENOUGH, "data.dir": "task", "optim.lr": 0.3}
    environment = {"DATASET_DIR": "variable"}
    file = "[data]\ndir = 'file'"
    flag = ("--data.dir", "flag")

    def directory(layers: Layers) -> str | None:
        return resolve(layers, defaults).data.dir

    assert directory(read(*flag, file=file, environment=environment)) == "flag"
    assert directory(read(file=file, environment=environment)) == "file"
    assert directory(read(environment=environment)) == "variable"
    assert directory(read(environment={"DATASET_DIR": ""})) == "task"
    assert directory(read()) == "task"
    assert resolve(read(), ENOUGH).data.dir is None
    assert resolve(read(), defaults).optim.lr == 0.3
    assert resolve(read(), ENOUGH).optim.lr == Config().optim.lr


def test_options_are_merged_one_by_one(read: Read) -> None:
    layers = read("--model.options.hidden", "64", file="[model.options]\nhidden = 32\ndepth = 2")
    config = resolve(layers, {**ENOUGH, "model.options": {"depth": 9, "bias": True}})
    assert config.model.options == {"hidden": 64, "depth": 2, "bias": True}


def test_a_task_may_name_one_option_by_its_path(read: Read) -> None:
    assert resolve(read(), {**ENOUGH, "model.options.depth": 9}).model.options == {"depth": 9}


def test_a_stronger_layers_member_of_a_pair_displaces_the_weaker_ones(read: Read) -> None:
    config = resolve(
        read("--train.steps", "7", file="[train]\nepochs = 3\nbatch_size_per_rank = 4"),
        {"train.epochs": 12, "train.batch_size": 64},
    )
    assert (config.train.epochs, config.train.steps) == (None, 7)
    assert (config.train.batch_size, config.train.batch_size_per_rank) == (None, 4)


def test_none_undoes_a_weaker_layers_value(read: Read) -> None:
    text = PRESETS["text"].defaults
    assert resolve(read(), text).optim.clip_norm == 1.0
    assert resolve(read("--optim.clip_norm", "none"), text).optim.clip_norm is None
    assert resolve(read(file="[optim]\nclip_norm = 'none'"), text).optim.clip_norm is None


def test_none_for_one_member_of_a_pair_leaves_the_other_alone(read: Read) -> None:
    config = resolve(read("--train.steps", "none"), ENOUGH)
    assert (config.train.epochs, config.train.steps) == (1, None)


BROKEN_RULES = [
    (
        ["--checkpoint.mirror", "/mnt/copies"],
        "the mirror is an address such as s3://bucket/prefix; that of a folder is file:///path: "
        "checkpoint.mirror = '/mnt/copies' (--checkpoint.mirror)",
    ),
    (
        ["--train.epochs", "none"],
        "the length of the run is not set; give --train.epochs or --train.steps: train.epochs = none (--train.epochs)",
    ),
    (
        ["--train.batch_size", "none"],
        "the batch size is not set; give --train.batch_size or --train.batch_size_per_rank: "
        "train.batch_size = none (--train.batch_size)",
    ),
    (
        ["--train.accumulate", "9"],
        "a batch cannot be cut into more micro-batches than it has samples: "
        "train.accumulate = 9 (--train.accumulate), "
        "train.batch_size = 8 (MyTask.defaults)",
    ),
    (
        ["--train.accumulate", "5", "--train.batch_size_per_rank", "4"],
        "a rank's batch cannot be cut into more micro-batches than it has samples: "
        "train.accumulate = 5 (--train.accumulate), "
        "train.batch_size_per_rank = 4 (--train.batch_size_per_rank)",
    ),
    (
        ["--optim.scale_lr", "linear"],
        "the rate is scaled only if the batch grows with the world size: optim.scale_lr needs "
        "train.batch_size_per_rank: "
        "optim.scale_lr = 'linear' (--optim.scale_lr), "
        "train.batch_size_per_rank = none (train.batch_size is set)",
    ),
    (
        ["--train.accumulate", "2", "--train.micro_batch_size", "4"],
        "train.accumulate sets the number of micro-batches, train.micro_batch_size their size: give one of them: "
        "train.accumulate = 2 (--train.accumulate), "
        "train.micro_batch_size = 4 (--train.micro_batch_size)",
    ),
    (
        ["--train.exact", "elastic", "--train.batch_size", "6"],
        "a batch cannot be cut into more shards than it has samples: "
        "train.shards = 8 (default), "
        "train.batch_size = 6 (--train.batch_size), "
        "train.exact = 'elastic' (--train.exact)",
    ),
    (
        ["--train.exact", "elastic", "--dist.sync_batchnorm"],
        "in the elastic mode batch statistics belong to the shard, not to the ranks: "
        "train.exact = 'elastic' (--train.exact), "
        "dist.sync_batchnorm = true (--dist.sync_batchnorm)",
    ),
    (
        ["--train.exact", "elastic", "--no-dist.broadcast_buffers"],
        "in the elastic mode every rank needs the same buffers: "
        "train.exact = 'elastic' (--train.exact), "
        "dist.broadcast_buffers = false (--no-dist.broadcast_buffers)",
    ),
    (
        ["--train.exact", "elastic", "--dist.comm", "bf16"],
        "the elastic mode adds up shards in a fixed order, without DDP: it needs --dist.comm none: "
        "dist.comm = 'bf16' (--dist.comm), "
        "train.exact = 'elastic' (--train.exact)",
    ),
    (
        ["--dist.comm", "powersgd", "--train.precision", "fp16"],
        "powersgd adds what one step leaves out to the next, and fp16's loss scale may change in between; use bf16: "
        "dist.comm = 'powersgd' (--dist.comm), "
        "train.precision = 'fp16' (--train.precision)",
    ),
    (
        ["--dist.comm", "powersgd", "--train.on_nan", "skip"],
        "powersgd carries a gradient that is not finite on into all later steps, so skipping one does not help; give "
        "--train.on_nan stop: "
        "dist.comm = 'powersgd' (--dist.comm), "
        "train.on_nan = 'skip' (--train.on_nan)",
    ),
    (
        ["--dist.sync", "diloco"],
        "dist.sync is step, local:H or diloco:H with a number of steps, as in diloco:100: "
        "dist.sync = 'diloco' (--dist.sync)",
    ),
    (
        ["--dist.sync", "local:8", "--train.exact", "elastic"],
        "the elastic mode adds up the gradients of every step: it needs --dist.sync step: "
        "dist.sync = 'local:8' (--dist.sync), "
        "train.exact = 'elastic' (--train.exact)",
    ),
    (
        ["--dist.on_lost_node", "continue"],
        "the others can continue without a node only if each node has a whole replica: it needs --dist.sync local:H or "
        "diloco:H, or --dist.mode hsdp: dist.on_lost_node = 'continue' (--dist.on_lost_node), "
        "dist.sync = 'step' (default), dist.mode = 'ddp' (default)",
    ),
    (
        ["--dist.sync", "local:8", "--dist.comm", "bf16"],
        "dist.comm compresses gradients, which are not sent between rounds; give --dist.outer_dtype in its place: "
        "dist.sync = 'local:8' (--dist.sync), "
        "dist.comm = 'bf16' (--dist.comm)",
    ),
    (
        ["--dist.sync", "local:8", "--dist.sync_batchnorm"],
        "synchronized BatchNorm needs all ranks in every step; inside nodes it works with --dist.sync_within node: "
        "dist.sync = 'local:8' (--dist.sync), "
        "dist.sync_within = 'none' (default), "
        "dist.sync_batchnorm = true (--dist.sync_batchnorm)",
    ),
    (
        ["--dist.sync", "local:8", "--data.balance", "auto"],
        "in a round every replica counts the same, however many samples it has had: it needs --data.balance off: "
        "dist.sync = 'local:8' (--dist.sync), "
        "data.balance = 'auto' (--data.balance)",
    ),
    (
        ["--dist.sync", "local:8", "--checkpoint.writers", "ranks"],
        "every replica has an optimizer state of its own, and rank 0 writes all of them: it needs "
        "--checkpoint.writers one: "
        "dist.sync = 'local:8' (--dist.sync), "
        "checkpoint.writers = 'ranks' (--checkpoint.writers)",
    ),
    (
        ["--dist.sync", "local:8", "--dist.sync_parts", "9"],
        "each part needs a step of its own between two rounds: more parts than steps: "
        "dist.sync = 'local:8' (--dist.sync), "
        "dist.sync_parts = 9 (--dist.sync_parts)",
    ),
    (
        ["--dist.sync", "local:8", "--dist.sync_parts", "2", "--dist.sync_overlap", "5"],
        "a part must have arrived before the next one is sent: dist.sync_overlap is at most H / dist.sync_parts: "
        "dist.sync = 'local:8' (--dist.sync), "
        "dist.sync_parts = 2 (--dist.sync_parts), "
        "dist.sync_overlap = 5 (--dist.sync_overlap)",
    ),
    (
        ["--dist.mode", "fsdp", "--train.exact", "elastic"],
        "the elastic mode adds up shards of the batch in a fixed order, with all gradients on each rank: it needs "
        "--dist.mode ddp: "
        "dist.mode = 'fsdp' (--dist.mode), train.exact = 'elastic' (--train.exact)",
    ),
    (
        ["--dist.mode", "fsdp", "--dist.comm", "bf16"],
        "dist.comm changes DDP's all-reduce, which a sharded model does not have; give --dist.shard_dtype bf16: "
        "dist.mode = 'fsdp' (--dist.mode), dist.comm = 'bf16' (--dist.comm)",
    ),
    (
        ["--dist.mode", "zero1", "--dist.sync", "local:8"],
        "between rounds every replica has a whole model of its own: dist.sync needs --dist.mode ddp: "
        "dist.mode = 'zero1' (--dist.mode), dist.sync = 'local:8' (--dist.sync)",
    ),
    (
        ["--dist.mode", "zero1", "--data.balance", "auto"],
        "a sharded model waits for other ranks in every block, so their own time is unknown: it needs "
        "--data.balance off: dist.mode = 'zero1' (--dist.mode), data.balance = 'auto' (--data.balance)",
    ),
    (
        ["--dist.mode", "zero1", "--dist.static_graph"],
        "a static graph is an option of DDP, which a sharded model does not use: "
        "dist.mode = 'zero1' (--dist.mode), dist.static_graph = true (--dist.static_graph)",
    ),
    (
        ["--dist.mode", "hsdp", "--train.step", "graph"],
        "a sharded model gathers its parameters between operations: it needs --train.step eager or compile: "
        "dist.mode = 'hsdp' (--dist.mode), train.step = 'graph' (--train.step)",
    ),
    (
        ["--dist.mode", "fsdp", "--train.memory_format", "channels_last"],
        "parameters are sharded by rows of contiguous memory; give --train.memory_format contiguous: "
        "dist.mode = 'fsdp' (--dist.mode), train.memory_format = 'channels_last' (--train.memory_format)",
    ),
    (
        ["--dist.mode", "fsdp", "--optim.name", "muon"],
        "muon needs whole matrices, and a rank of a sharded model has some rows; give --optim.name adamw: "
        "dist.mode = 'fsdp' (--dist.mode), optim.name = 'muon' (--optim.name)",
    ),
    (
        ["--dist.shard_ranks", "2"],
        "dist.shard_ranks sets the groups of --dist.mode hsdp: "
        "dist.shard_ranks = 2 (--dist.shard_ranks), dist.mode = 'ddp' (default)",
    ),
    (
        ["--dist.mode", "fsdp", "--dist.shard_dtype", "bf16"],
        "parameters that are gathered in bf16 need --train.precision bf16: "
        "dist.shard_dtype = 'bf16' (--dist.shard_dtype), train.precision = 'fp32' (default)",
    ),
    (
        ["--dist.shard_dtype", "bf16", "--train.precision", "bf16"],
        "ddp gathers no parameters; give --dist.comm bf16 to send its gradients in bf16: "
        "dist.shard_dtype = 'bf16' (--dist.shard_dtype), dist.mode = 'ddp' (default)",
    ),
    (
        ["--dist.offload_optimizer"],
        "ddp keeps its optimizer beside the model; give --dist.mode zero1, fsdp or hsdp: "
        "dist.offload_optimizer = true (--dist.offload_optimizer), dist.mode = 'ddp' (default)",
    ),
    (
        ["--dist.mode", "fsdp", "--dist.offload_optimizer", "--dist.device", "cpu"],
        "on the CPU the optimizer is in the host's memory already: "
        "dist.offload_optimizer = true (--dist.offload_optimizer), dist.device = 'cpu' (--dist.device)",
    ),
    (
        ["--dist.mode", "fsdp", "--dist.offload_optimizer", "--train.precision", "fp16"],
        "fp16's loss scaling checks gradients on the GPU, and these are in the host's memory; use bf16: "
        "dist.offload_optimizer = true (--dist.offload_optimizer), train.precision = 'fp16' (--train.precision)",
    ),
    (
        ["--dist.meta_init", "--model.init", "a.safetensors"],
        "weights that are loaded need a model that has memory; leave --dist.meta_init off: "
        "dist.meta_init = true (--dist.meta_init), model.init = 'a.safetensors' (--model.init)",
    ),
    (
        ["--train.exact", "elastic", "--train.step", "compile"],
        "the elastic mode computes shard by shard, operation by operation: it needs --train.step eager: "
        "train.step = 'compile' (--train.step), "
        "train.exact = 'elastic' (--train.exact)",
    ),
    (
        ["--train.deterministic", "--train.step", "auto"],
        "auto chooses by measured time, so its choice may differ between runs; with --train.deterministic name one: "
        "train.step = 'auto' (--train.step), "
        "train.deterministic = true (--train.deterministic)",
    ),
    (
        ["--dist.device", "cpu", "--train.step", "graph"],
        "CUDA graphs need a GPU; give --train.step eager or compile for the CPU: "
        "train.step = 'graph' (--train.step), "
        "dist.device = 'cpu' (--dist.device)",
    ),
    (
        ["--data.balance", "auto", "--train.exact", "elastic"],
        "the elastic mode has shards of fixed sizes; it needs --data.balance off: "
        "data.balance = 'auto' (--data.balance), "
        "train.exact = 'elastic' (--train.exact)",
    ),
    (
        ["--data.balance", "auto", "--train.step", "auto"],
        "shards by speed change their sizes, and a captured step has fixed shapes; give --train.step eager or compile: "
        "data.balance = 'auto' (--data.balance), "
        "train.step = 'auto' (--train.step)",
    ),
    (
        ["--data.balance", "auto", "--dist.sync_batchnorm"],
        "synchronized BatchNorm waits for the other ranks in every forward pass, so a rank has no measurable speed: "
        "data.balance = 'auto' (--data.balance), "
        "dist.sync_batchnorm = true (--dist.sync_batchnorm)",
    ),
    (
        ["--data.balance", "auto", "--train.deterministic"],
        "shards by speed follow measured times, so their sizes may differ between runs: "
        "data.balance = 'auto' (--data.balance), "
        "train.deterministic = true (--train.deterministic)",
    ),
    (
        ["--data.balance", "auto", "--log.trace"],
        "shards by speed differ between runs, so two traces cannot be compared bit by bit: "
        "data.balance = 'auto' (--data.balance), "
        "log.trace = true (--log.trace)",
    ),
    (
        ["--train.deterministic", "--train.cudnn_benchmark"],
        "cuDNN's search uses measured times, so it may choose a different kernel in each run: "
        "train.cudnn_benchmark = true (--train.cudnn_benchmark), "
        "train.deterministic = true (--train.deterministic)",
    ),
    (
        ["--optim.warmup_steps", "51", "--train.steps", "50"],
        "the warm-up is longer than the run: "
        "optim.warmup_steps = 51 (--optim.warmup_steps), "
        "train.steps = 50 (--train.steps)",
    ),
    (
        ["--optim.momentum", "0"],
        "Nesterov's form needs momentum; give --no-optim.nesterov or a momentum above 0: "
        "optim.nesterov = true (default), "
        "optim.momentum = 0.0 (--optim.momentum), "
        "optim.name = 'sgd' (default)",
    ),
    (
        ["--optim.name", "adamw", "--optim.betas", "0.9,1"],
        "adamw needs betas below 1: optim.betas = [0.9, 1.0] (--optim.betas), optim.name = 'adamw' (--optim.name)",
    ),
    (
        ["--model.name", "gpt", "--model.heads", "3"],
        "the heads must divide the width: "
        "model.heads = 3 (--model.heads), "
        "model.width = 128 (default), "
        "model.name = 'gpt' (--model.name)",
    ),
    (
        ["--dist.backend", "nccl", "--dist.device", "cpu"],
        "NCCL works between GPUs only; give --dist.backend gloo (or auto) for the CPU: "
        "dist.backend = 'nccl' (--dist.backend), "
        "dist.device = 'cpu' (--dist.device)",
    ),
    (
        ["--dist.sync_batchnorm", "--dist.device", "cpu"],
        "torch has no synchronized BatchNorm for the CPU: "
        "dist.sync_batchnorm = true (--dist.sync_batchnorm), "
        "dist.device = 'cpu' (--dist.device)",
    ),
    (
        ["--dist.static_graph", "--dist.find_unused_parameters"],
        "a static graph uses the same parameters in every step, so there are no unused ones to find: "
        "dist.static_graph = true (--dist.static_graph), "
        "dist.find_unused_parameters = true (--dist.find_unused_parameters)",
    ),
    (
        ["--watch.notice", "ftp://host/notice"],
        "watch.notice is a file, http://HOST/PATH or https://HOST/PATH (without a name or password), or "
        "path/to/file.py:function: watch.notice = 'ftp://host/notice' (--watch.notice)",
    ),
    *(
        (
            [f"--{field}", f"{scheme}://{secret}"],
            f"{field} takes no user, password or options, which would be written to logs and files: the variables, "
            f"profile or role of the store itself are used: {field} = {quote}{scheme}://***{quote} (--{field})",
        )
        for field, scheme, secret, quote in [
            ("checkpoint.mirror", "s3", "key:hun'ter/ 2@bucket/runs", '"'),
            ("data.dir", "gs", "bucket/a?token=x", "'"),
        ]
    ),
    (
        ["--watch.notice", "probes/mine.py"],
        "the function is missing: write path/to/file.py:function: watch.notice = 'probes/mine.py' (--watch.notice)",
    ),
    (
        ["--log.profile", "1:20"],
        "log.profile is FIRST:LAST, as in 10:20, with FIRST at least 2 and at most 1,000 steps: log.profile = '1:20' "
        "(--log.profile)",
    ),
    (
        ["--log.prometheus", "node-a:9464"],
        "log.prometheus is PORT or ADDRESS:PORT, with an IP address of this host: 9464, 10.0.0.5:9464, [::1]:9464: "
        "log.prometheus = 'node-a:9464' (--log.prometheus)",
    ),
    (
        ["--log.prometheus", "9464", "--watch.sidecar", "off"],
        "the sidecar serves the metrics, so that they are there when a rank hangs: log.prometheus = '9464' "
        "(--log.prometheus), watch.sidecar = 'off' (--watch.sidecar)",
    ),
]


@pytest.mark.parametrize(("argv", "problem"), BROKEN_RULES)
def test_each_rule_names_the_values_and_where_they_come_from(
    read: Read, argv: list[str], problem: str
) -> None:
    assert problems(lambda: resolve(read(*argv), ENOUGH, task="MyTask")) == (problem,)


BOTH_OF_A_PAIR = [
    ["--train.epochs", "1", "--train.steps", "2"],
    ["--train.batch_size", "8", "--train.batch_size_per_rank", "4"],
]


@pytest.mark.parametrize("argv", [*(argv for argv, _ in BROKEN_RULES), *BOTH_OF_A_PAIR])
def test_the_advice_of_each_rule_is_flags_that_work(read: Read, argv: list[str]) -> None:
    """Each alternative alone, in place of what was given."""
    flags = read(*argv).flags
    with pytest.raises(ConfigError) as raised:
        resolve(read(*argv), ENOUGH)
    alternatives = (raised.value.next_step or "").split(" or ")
    for alternative in alternatives:
        advised = read(*alternative.split(" ")).flags
        assert advised.settings, alternative
        resolve(Layers(advised, flags, Layer({})), ENOUGH)


def test_two_settings_for_one_thing_in_a_file_are_advised_by_flags_that_override_it(
    read: Read,
) -> None:
    file = "[train]\nepochs = 1\nsteps = 2\n"
    with pytest.raises(ConfigError) as raised:
        resolve(read(file=file), ENOUGH)
    assert str(raised.value) == (
        "1 problem in the configuration:\n"
        "  - train.epochs and train.steps exclude each other, give one of them: "
        "train.epochs = 1 (run.toml:2), train.steps = 2 (run.toml:3)\n"
        "  try: --train.epochs none or --train.steps none"
    )
    assert resolve(read("--train.epochs", "none", file=file), ENOUGH).train.steps == 2
    assert resolve(read("--train.steps", "none", file=file), ENOUGH).train.epochs == 1
    assert resolve(read("--train.steps", "5", file=file), ENOUGH).train.epochs is None


def test_a_warm_up_that_is_too_long_is_advised_by_its_own_flag(read: Read) -> None:
    with pytest.raises(ConfigError) as raised:
        resolve(read("--optim.warmup_steps", "51", "--train.steps", "50"), ENOUGH)
    assert str(raised.value) == (
        "1 problem in the configuration:\n"
        "  - the warm-up is longer than the run: optim.warmup_steps = 51 (--optim.warmup_steps), train.steps = 50 "
        "(--train.steps)\n"
        "  try: --optim.warmup_steps 0"
    )


def test_every_rule_has_a_test() -> None:
    messages = {rule.message for rule in RULES}
    assert len(messages) == len(BROKEN_RULES) == len(RULES)
    assert all(
        any(problem.startswith(sentence) for _, problem in BROKEN_RULES) for sentence in messages
    )


@pytest.mark.parametrize(
    "argv",
    [
        ["--train.accumulate", "8"],
        ["--optim.scale_lr", "sqrt", "--train.batch_size_per_rank", "4"],
        ["--optim.warmup_steps", "50", "--train.steps", "50"],
        ["--optim.momentum", "0", "--no-optim.nesterov"],
        ["--optim.momentum", "0", "--optim.name", "adamw"],
        ["--optim.betas", "0.9,1"],
        ["--model.heads", "3"],
        ["--dist.backend", "nccl"],
        ["--dist.backend", "gloo", "--dist.device", "cpu"],
        ["--dist.static_graph"],
        ["--watch.notice", "/run/reclaim:soon"],
        ["--watch.notice", "a.python/notice"],
        ["--watch.notice", "probes/mine.py:is_reclaimed"],
        ["--watch.notice", "http://169.254.169.254/latest/meta-data/spot/instance-action"],
        ["--watch.notice", "https://[fd00:ec2::254]:8080?x"],
    ],
)
def test_what_keeps_the_rules_is_accepted(read: Read, argv: list[str]) -> None:
    resolve(read(*argv), ENOUGH)


@pytest.mark.parametrize(
    "notice",
    [
        "http://",
        "http:///path",
        "https://me:secret@host/",
        "HTTP://host",
        "mine.py:",
        "mine.py:2x",
        "a.py:b:c",
    ],
)
def test_notices_that_nobody_could_look_for(read: Read, notice: str) -> None:
    (problem,) = problems(lambda: resolve(read("--watch.notice", notice), ENOUGH))
    assert f"watch.notice = '{notice.replace('me:secret@host/', '***')}'" in problem


def test_stage_one_knows_only_rules_whose_fields_are_all_given(read: Read) -> None:
    # the task may bring a width of 96
    check_layers(read("--model.name", "gpt", "--model.heads", "3"))
    check_layers(read("--optim.lr", "0.5"))  # the task may bring epochs and batch size
    check_layers(read("--optim.scale_lr", "linear"))
    (problem,) = problems(
        lambda: check_layers(
            read("--model.name", "gpt", "--model.heads", "3", file="[model]\nwidth = 128")
        )
    )
    assert problem.endswith(
        "model.heads = 3 (--model.heads), model.width = 128 (run.toml:2), model.name = 'gpt' (--model.name)"
    )


def test_stage_one_knows_that_one_member_of_a_pair_rules_out_the_other(read: Read) -> None:
    layers = read("--optim.scale_lr", "linear", "--train.batch_size", "64")
    (problem,) = problems(lambda: check_layers(layers))
    assert problem.endswith("train.batch_size_per_rank = none (train.batch_size is set)")


def test_without_defaults_the_message_names_the_flags_to_give(read: Read) -> None:
    assert problems(lambda: resolve(read(), {})) == (
        "the length of the run is not set; give --train.epochs or --train.steps",
        "the batch size is not set; give --train.batch_size or --train.batch_size_per_rank",
    )


def test_a_tasks_wrong_defaults_are_reported_as_such(read: Read) -> None:
    defaults = {
        "train.epochs": 0,
        "train.batch_size": 8,
        "optim.lrr": 1,
        "train.batch_size_per_rank": 2,
    }
    assert problems(lambda: resolve(read(), defaults, task="MyTask")) == (
        "MyTask.defaults: train.epochs = 0 must be at least 1",
        "MyTask.defaults: optim.lrr: unknown setting; did you mean 'optim.lr'?",
        "train.batch_size and train.batch_size_per_rank exclude each other, give one of them: "
        "train.batch_size = 8 (MyTask.defaults), train.batch_size_per_rank = 2 (MyTask.defaults)",
    )


SIX_FLAGS = ("stray", "--optim.learning_rate", "1", "--optim.lr", "fast", "--dist.backend", "nccl")
SIX_FILE = "[train]\nepochs = 1\nsteps = 2\n[optim]\nmomentum = 1.5\n[dist]\ndevice = 'cpu'\n"


@pytest.mark.parametrize(
    "stage", [check_layers, lambda layers: resolve(layers, PRESETS["digits"].defaults)]
)
def test_six_kinds_of_problems_are_reported_in_one_go(
    read: Read, stage: Callable[[Layers], Any]
) -> None:
    with pytest.raises(ConfigError) as raised:
        stage(read(*SIX_FLAGS, file=SIX_FILE))
    assert raised.value.problems == (
        "'stray': unexpected argument; a flag is given as --name value",
        "--optim.learning_rate: unknown setting; did you mean 'optim.lr'?",
        "--optim.lr: 'fast' is not a number",
        "run.toml:5: optim.momentum = 1.5 must be between 0 and 1",
        "train.epochs and train.steps exclude each other, give one of them: "
        "train.epochs = 1 (run.toml:2), train.steps = 2 (run.toml:3)",
        "NCCL works between GPUs only; give --dist.backend gloo (or auto) for the CPU: "
        "dist.backend = 'nccl' (--dist.backend), dist.device = 'cpu' (run.toml:7)",
    )
    assert str(raised.value).startswith("6 problems in the configuration:\n  - 'stray'")
    assert "drumline train --help" in (raised.value.next_step or "")
    assert raised.value.exit_code is ExitCode.USAGE


@pytest.mark.parametrize(
    "argv",
    [
        ("--train.epoch", "3"),  # misspelt
        ("--train.epochs", "many"),  # of the wrong type
        ("--train.epochs",),  # without its value
    ],
)
def test_a_setting_that_is_wrong_is_not_reported_as_missing_too(
    read: Read, argv: tuple[str, ...]
) -> None:
    assert len(problems(lambda: resolve(read(*argv), {"train.batch_size": 8}))) == 1


def test_a_file_that_cannot_be_read_is_the_only_problem(tmp_path: Path) -> None:
    layers = read_layers(read_flags([]), config_file=tmp_path / "absent.toml", environment={})
    assert len(problems(lambda: resolve(layers, {}))) == 1


def test_importing_config_imports_neither_torch_nor_numpy() -> None:
    code = "import sys, drumline.config, drumline.config.help; print(*sys.modules)"
    run = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    loaded = run.stdout.split()
    assert "drumline.config.resolve" in loaded
    assert {"torch", "numpy", "rich"} & set(loaded) == set()


def test_a_rule_is_about_settings_that_exist() -> None:
    fields = [path for rule in RULES for path in rule.fields]
    assert set(fields) <= FIELDS.keys()
    assert "train.batch_size_per_rank" in fields
