"""`drumline scale predict | measure | check`: flags and wiring; the work is in tools/scale/."""

from __future__ import annotations

import os
import time
from collections.abc import Iterable, Sequence
from dataclasses import asdict, fields
from functools import partial
from pathlib import Path
from typing import Literal

from drumline.base.errors import ConfigError, ExitCode, UsageError
from drumline.base.text import print_message, show_lines
from drumline.base.untrusted import replace_text
from drumline.cli.command_line import (
    OUTPUT_FLAGS,
    check_command,
    check_run_is_named,
    read_command,
    read_subverb,
    show_json,
)
from drumline.cli.train_command import CONFIG_FLAG, settle_before_torch, task_words
from drumline.config import Flags, FlagTable, FlagValues
from drumline.config.schema import Count, Fraction, NotNegative, Positive
from drumline.report.scaling_plot import efficiency_lines, efficiency_svg
from drumline.runs.profile_files import PROFILE_FOLDER
from drumline.runs.profile_result import ProfileResult, read_profile
from drumline.runs.run_folder import run_name
from drumline.runs.scaling_result import Measurement, Prediction, ScaleOptions, write_scaling
from drumline.tools.scale.measure import MeasureOptions, SizedRuns, measure, wrong_worlds
from drumline.tools.scale.network_model import (
    INSIDE,
    NETWORKS,
    Link,
    Network,
    chosen_link,
    link_from_points,
    rated_link,
    usual_inside,
)
from drumline.tools.scale.prediction_check import check_predictions
from drumline.tools.scale.scale_prediction import predict
from drumline.tools.scale.scaling_words import check_lines, measurement_lines, prediction_lines

PREDICT_FLAGS: FlagTable = {
    "nodes": (tuple[Count, ...], "N[,N...]", "For these numbers of nodes [2,4,8]."),
    "gpus-per-node": (Count, "N", "Ranks of each node [as profiled]."),
    "network": (
        str,
        "NAME | RATE[,LATENCY] | FILE",
        f"Between nodes: {', '.join(NETWORKS)}; any rate and latency, as in 60mbit,0.2ms; a file "
        "that `drumline doctor --hosts a,b --json` wrote; or `measured`, from the all-reduces in the "
        "profile [measured].",
    ),
    "inside": (
        str,
        "NAME | FILE",
        f"Within a node: {', '.join(INSIDE)}, or such a file [by the device's name].",
    ),
    "bucket-cap-mb": (Positive, "MB", "With buckets of this size [as profiled]."),
    "accumulate": (Count, "N", "With so many micro-batches a step [as profiled]."),
    "checkpoint-every": (Count, "STEPS", "Steps from one checkpoint to the next [1000]."),
    "checkpoint-pause-s": (NotNegative, "SECONDS", "How long a checkpoint pauses training [0]."),
    "mtbf-hours": (
        Positive,
        "HOURS",
        "How long a node runs until it fails, on average [6300: 419 failures of 2,048 nodes in 54 days, Llama 3].",
    ),
    "restart-s": (NotNegative, "SECONDS", "From a failure to the next step [120]."),
    "price": (NotNegative, "AMOUNT", "What a node costs an hour, in any currency."),
    "pays-above": (Fraction, "PART", "What an added node must bring, as a part of a node [0.5]."),
    **OUTPUT_FLAGS,
}
MEASURE_FLAGS: FlagTable = {
    "world": (
        tuple[Count, ...],
        "N,N[,N...]",
        "Numbers of ranks [1,2]. The efficiency is against the smallest.",
    ),
    "hosts": (
        str,
        "A,B",
        "Over ssh on these hosts, which share the folder of --run; 4 ranks are 2 on each.",
    ),
    "scaling": (
        Literal["weak", "strong", "both"],
        "weak | strong | both",
        "weak: each rank keeps its batch. strong: all ranks share one batch [both].",
    ),
    "steps": (Count, "N", "Steps that are profiled in each run [10]."),
    "run": (str, "DIR", "The folder of the runs and of the result [runs/scale-TASK]."),
    **CONFIG_FLAG,
    **OUTPUT_FLAGS,
}
CHECK_FLAGS: FlagTable = {
    "network": (
        str,
        "NAME",
        "The network of the measured runs, as it was given to predict [one that was measured].",
    ),
    **OUTPUT_FLAGS,
}
OWN_SETTINGS = {
    "train.steps": "use --steps instead",
    "train.epochs": "use --steps instead",
    "log.profile": "it is always on here",
    "train.batch_size_per_rank": "give --train.batch_size, the batch of the smallest number of ranks",
}
USAGE = """\
usage: drumline scale predict RUN|PROFILE ...   what a job would reach on more nodes
       drumline scale measure TASK ...          what it reaches on the ranks that are there
       drumline scale check RUN [RUN ...]       earlier predictions beside what was measured since

`drumline scale predict --help`, and so on, list the flags.
"""
PREDICT_USAGE = """\
usage: drumline scale predict RUN|PROFILE [--nodes 2,8,64] [--gpus-per-node 8] [--network 100gbit]

From the profile of one run (`drumline profile TASK --procs 2`, or `drumline train --log.profile 10:20`), simulates
steps on more nodes: DDP's buckets as they become ready, their all-reduces over the network, overlap with the backward
pass, the slowest rank.
Prints the step, its efficiency against a rank alone (each rank keeps its batch), goodput with failures and checkpoints,
the cost, better bucket sizes and accumulation, and where more nodes stop paying. RUN/scale/ keeps it, with a plot.
"""
MEASURE_USAGE = """\
usage: drumline scale measure TASK --world 1,2,4 [--hosts a,b] [--section.name value ...]

Trains TASK for some steps on each number of ranks, with a profile, and prints speed-up, efficiency and spread beside
what is usual, and communication beside compute. Where the efficiency is below what is usual it says why. The settings
are those of `drumline train TASK`; the smallest number of ranks has the batch that is set. RUN/scale/ keeps the result.
"""
CHECK_USAGE = """\
usage: drumline scale check RUN [RUN ...] [--network 100gbit]

Compares the predictions in these run folders with newer measurements in them (`drumline scale measure`, profiles) of
the same task, device, batch, nodes and ranks, and on several nodes the same network. exit codes: 0 all are within their
interval, 1 some are not, 2 no prediction.
"""


def run(argv: Sequence[str]) -> int:
    """Predict, measure or check."""
    verbs = {
        "predict": (_predict, PREDICT_FLAGS, PREDICT_USAGE),
        "measure": (_measure, MEASURE_FLAGS, MEASURE_USAGE),
        "check": (_check, CHECK_FLAGS, CHECK_USAGE),
    }
    verb, arguments = read_subverb("scale", argv, verbs, USAGE)
    work, verb_flags, usage = verbs[verb]
    flags = read_command(
        f"scale {verb}",
        arguments,
        {"": verb_flags},
        usage,
        max_positional=len(arguments) if verb == "check" else 1,
        takes_settings=verb == "measure",
    )
    return work(flags)


def _keep(
    folder: Path, result: Prediction | Measurement, lines: Iterable[str], *, is_json: bool
) -> int:
    """Write the document and its plot, and print it."""
    file = write_scaling(folder, result)
    plot = file.with_suffix(".svg")
    replace_text(plot, efficiency_svg(f"{result.task}: efficiency", efficiency_lines(result)))
    if is_json:
        show_json({**asdict(result), "file": file, "plot": plot})
    else:
        show_lines([*lines, f"written: {file} and {plot.name}"])
    return ExitCode.SUCCESS


def _predict(flags: Flags) -> int:
    """From a profile, with the options that were given."""
    if not flags.positional:
        check_command("scale predict", ["no RUN or PROFILE was given"])
    path = Path(flags.positional[0])
    verb_flags = flags.values
    profile = read_profile(path)
    values = {field.name: getattr(verb_flags, field.name) for field in fields(ScaleOptions)}
    values = {name: value for name, value in values.items() if value is not None}
    per_node = max(1, profile.world_size // max(1, profile.num_nodes))
    options = ScaleOptions(**{"nodes": (2, 4, 8), "gpus_per_node": per_node, **values})
    prediction = predict(profile, _network_of(profile, verb_flags), options, source=str(path))
    folder = path
    if not path.is_dir():
        folder = path.parent
        if folder.name == PROFILE_FOLDER:
            folder = folder.parent

    return _keep(folder, prediction, prediction_lines(prediction), is_json=bool(verb_flags.json))


def _network_of(profile: ProfileResult, verb_flags: FlagValues) -> Network:
    """The links between and within nodes, by name, from a file, or from the profile."""
    backend = "gloo" if profile.backend == "gloo" else "nccl"
    name = verb_flags.get("network", "measured")
    inside = verb_flags.inside
    if name == "measured":
        between = _measured_link(profile, backend)
    else:
        between = rated_link(name) or chosen_link("--network", name, NETWORKS, backend)
    within = usual_inside(profile.device)
    if inside is not None:
        within = chosen_link("--inside", inside, INSIDE, backend)
    return Network(backend=backend, between=between, inside=within)


def _measured_link(profile: ProfileResult, backend: str) -> Link:
    """The link between nodes, from the all-reduces of the profile."""
    points = [
        (float(bucket.num_bytes), bucket.reduce_s)
        for bucket in profile.buckets
        if bucket.reduce_s > 0
    ]
    if profile.num_nodes < 2 or not points:
        raise UsageError(
            "the profile has no all-reduce between nodes, so its network is not known",
            next_step="give --network NAME, or a file from drumline doctor --hosts a,b --json",
        )
    return link_from_points("measured", points, world_size=profile.world_size, backend=backend)


def _measure(flags: Flags) -> int:
    """Check everything before the first run, which takes minutes."""
    verb_flags = flags.values
    scaling = flags.values.get("scaling", "both")
    options = MeasureOptions(
        worlds=verb_flags.get("world", (1, 2)),
        hosts=tuple(host for host in verb_flags.get("hosts", "").split(",") if host),
        scalings=("weak", "strong") if scaling == "both" else (scaling,),
        steps=verb_flags.get("steps", 10),
    )
    problems = list(wrong_worlds(options))
    problems += [
        f"--{path}: {reason}"
        for path, reason in OWN_SETTINGS.items()
        if path in flags.layer.settings
    ]

    try:
        settle_before_torch(flags)
    except ConfigError as error:
        problems += error.problems

    check_command("scale measure", problems)
    folder = Path(verb_flags.get("run", f"runs/scale-{run_name(flags.positional[0])}"))
    measured_folder = folder / time.strftime("%Y%m%d-%H%M%S")
    runs = SizedRuns(
        arguments=partial(task_words, flags),
        options=options,
        folder=measured_folder,
        note=print_message,
    )
    gpus = len(list(Path("/proc/driver/nvidia/gpus").glob("*")))
    measurement = measure(runs, cores=len(os.sched_getaffinity(0)), gpus=gpus)
    return _keep(folder, measurement, measurement_lines(measurement), is_json=bool(verb_flags.json))


def _check(flags: Flags) -> int:
    """Compare, and report whether all measurements are within their interval."""
    check_run_is_named("scale check", flags)
    runs = [Path(name) for name in flags.positional]
    if missing := [run for run in runs if not run.is_dir()]:
        raise UsageError(f"there is no folder {missing[0]}", next_step="give run folders")

    checked = check_predictions(runs, network=flags.values.network)
    if flags.values.json:
        sizes = [
            {**asdict(size), "error": size.error, "is_within": size.is_within}
            for size in checked.sizes
        ]
        show_json({**asdict(checked), "sizes": sizes})
    else:
        show_lines(check_lines(checked))

    return (
        ExitCode.SUCCESS
        if all(size.is_within for size in checked.sizes)
        else ExitCode.SOMETHING_WRONG
    )
