"""A checkpoint's weights as a plain safetensors file, with a model card beside it. The task's code
is not imported."""

from __future__ import annotations

import json
import os
import re
from collections.abc import Iterator, Mapping
from importlib.metadata import version
from pathlib import Path
from typing import Any

from torch import Tensor

from drumline.base.errors import CheckpointError, UsageError
from drumline.base.text import file_size, plural
from drumline.base.untrusted import replace_text, replacing
from drumline.checkpoint import state, store, tensor_file
from drumline.checkpoint.optimizer_state import decode_state
from drumline.config.fields import FIELDS, scope_of
from drumline.runs import catalog
from drumline.training.run_context import HOOKS_FILE


def export_weights(checkpoint: Path, to: Path, card: Path, *, averaged: bool) -> str:
    """Write the weights of a checkpoint, or the average of them that an EMA hook kept, to `to`, and
    a model card to `card`. Returns a summary."""
    snapshot = store.read(checkpoint)
    step = catalog.check_sizes(checkpoint).step
    weights = weights_in(snapshot, averaged=averaged)
    size = tensor_file.num_bytes(weights)
    contents = f"{plural(len(weights), 'tensor')}, {file_size(size)}"

    if averaged:
        contents += ", averaged (EMA)"

    has_other_average = not averaged and average_in(snapshot) is not None
    with state.translated("progress"):
        text = model_card(
            checkpoint,
            snapshot,
            contents=contents,
            file=to.name,
            has_other_average=has_other_average,
        )

    try:
        to.parent.mkdir(parents=True, exist_ok=True)
        with replacing(to) as file:
            file.writelines(tensor_file.stream(weights))
            file.flush()
            os.fsync(file.fileno())

        replace_text(card, text)
    except OSError as error:
        reason, next_step = catalog.explain_os_error(error, folder=to.parent, needed=size)
        raise CheckpointError(
            f"{to} could not be written: {reason}", next_step=next_step
        ) from error

    summary = f"step {step}: {contents}"
    if has_other_average:
        summary += ", as trained; --ema exports their average (EMA), which evaluate and predict use"

    return summary


def weights_in(snapshot: store.Snapshot, *, averaged: bool) -> dict[str, Tensor]:
    """The tensors by every name of the model's `state_dict`: one that has several names is there
    under each, so that `load_state_dict` finds them all."""
    with state.translated("model"):
        tensors = snapshot.tensors["model"]
        aliases = snapshot.documents["model"]["aliases"]

        average = average_in(snapshot) if averaged else {}
        if average is None:
            raise UsageError(
                "the checkpoint holds no average of the weights",
                next_step="leave --ema (ema=True) out, or train with drumline.EMA in the task's hooks()",
            )

        weights = dict(tensors)
        for name, tensor in average.items():
            weights[name] = tensor.to(tensors[name].dtype)

        for name, stored in aliases.items():
            weights[name] = weights[stored]

        return weights


def average_in(snapshot: store.Snapshot) -> dict[str, Tensor] | None:
    """The average of the weights that a hook such as EMA has saved; None: there is none."""
    tensors = snapshot.tensors.get(HOOKS_FILE, {})
    names = snapshot.tensors["model"].keys()

    # Of several, evaluations are of the last.
    for entry in reversed(snapshot.documents.get(HOOKS_FILE, [])):
        saved = decode_state(entry["state"], tensors.__getitem__)
        average = saved.get("average") if isinstance(saved, dict) else None
        if isinstance(average, dict) and average and average.keys() <= names:
            return average

    return None


def model_card(
    checkpoint: Path,
    snapshot: store.Snapshot,
    *,
    contents: str,
    file: str,
    has_other_average: bool,
) -> str:
    """What the weights are, in Markdown: task, checkpoint, metrics, settings, and how to load
    them."""
    from jinja2 import Environment

    facts = snapshot.documents["progress"]["facts"]
    init = facts["config"].get("model.init")
    record = catalog.check_sizes(checkpoint)
    environment = Environment(keep_trailing_newline=True)  # noqa: S701 - Markdown, made harmless by `plain`
    environment.filters["plain"] = _plain
    template = Path(__file__).with_name("model_card.md").read_text(encoding="utf-8")

    return environment.from_string(template).render(
        task=facts["task"].rpartition("/")[2],
        record=record,
        contents=contents,
        init="random weights" if init is None else f"`{_plain(Path(init).name)}`",
        batch=f"{plural(facts['batch_size'], 'sample')} on {plural(facts['world_size'], 'rank')}",
        version=version("drumline"),
        metrics=record.metrics,
        has_other_average=has_other_average,
        settings=settings_in_card(facts["config"]),
        file=file,
    )


def _plain(text: str) -> str:
    """Text of a checkpoint, without what Markdown and HTML would read as more than text: a run
    folder may come from somebody else."""
    return re.sub(r"[^\w .,:;=/@%+-]", "?", text)


def settings_in_card(config: Mapping[str, Any]) -> Iterator[str]:
    """The settings that differ from the defaults, without those that change no result, such as a
    machine's paths: `optim.lr = 0.1`, `model.options.depth = 3`."""
    for path, value in config.items():
        if value is None or not scope_of(path).changes_result:
            continue

        name = _plain(path)
        if isinstance(value, dict):
            for option, entry in value.items():
                yield f"{name}.{_plain(option)} = {_as_json(entry)}"
        elif path not in FIELDS or _as_json(FIELDS[path].default) != _as_json(value):
            yield f"{name} = {_as_json(value)}"


def _as_json(value: Any) -> str:
    """A value as the card shows it."""
    return json.dumps(value, ensure_ascii=False)
