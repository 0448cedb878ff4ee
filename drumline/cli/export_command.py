"""`drumline export RUN --to FILE`: a checkpoint's weights as a plain safetensors file, with a model
card."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import nullcontext
from pathlib import Path

from drumline.base.errors import ExitCode, UsageError
from drumline.base.startup import interruptible, loading
from drumline.base.text import show_lines
from drumline.cli.command_line import HELP_FLAG, check_new, check_run_is_named, read_command
from drumline.cli.evaluate_command import CHECKPOINT_FLAG
from drumline.config import FlagTable, switch
from drumline.runs.run_folder import find_run
from drumline.storage.object_store import is_store_url

ENDING = ".safetensors"
OWN_FLAGS: FlagTable = {
    "to": (str, "FILE", f"The file to write; its name ends in {ENDING}."),
    **CHECKPOINT_FLAG,
    "ema": switch("The average of the weights that the task's EMA hook kept."),
    "force": switch("Replace FILE and its model card if they exist."),
    **HELP_FLAG,
}
HELP = """\
usage: drumline export RUN [--which best|last|STEP] [--ema] --to FILE [--force]

Writes the weights of a checkpoint to one safetensors file, which torch's load_state_dict and transformers read: by the
names of the model's state_dict, a tied weight under each of its names. A model card of the task, the metrics and the
settings is written beside it, with the ending .md. It does not import the task's code. RUN may be in an object store:
s3://bucket/prefix.
"""


def run(argv: Sequence[str]) -> int:
    """Check all names before torch is imported, then write the file and its model card."""
    flags = read_command("export", argv, {"": OWN_FLAGS}, HELP)
    check_run_is_named("export", flags)
    name = flags.positional[0]
    is_stored = is_store_url(name)
    if not is_stored:
        find_run(Path(name))
    if "to" not in flags.values:
        raise UsageError(
            "no --to FILE was given",
            next_step="write it as in: drumline export runs/digits --to digits.safetensors",
        )

    which = flags.values.get("which", "best")
    to = Path(flags.values.to)
    card = to.with_suffix(".md")
    if to.suffix != ENDING:
        raise UsageError(
            f"{to} does not end in {ENDING}, the format of the file",
            next_step=f"give --to {to}{ENDING}",
        )

    check_new(flags, to, card)
    with interruptible("interrupted"), loading():
        from drumline.training.saved.exported_weights import export_weights
        from drumline.training.saved.saved_run import fetched_run, find_checkpoint

    with fetched_run(name, which) if is_stored else nullcontext(Path(name)) as folder:
        checkpoint = find_checkpoint(folder, which)
        summary = export_weights(checkpoint, to, card, averaged=bool(flags.values.ema))

    show_lines([summary, f"  {to}", f"  {card}"])
    return ExitCode.SUCCESS
