"""What the user probably meant by a setting that does not exist."""

from __future__ import annotations

import difflib
from collections.abc import Collection, Mapping

from drumline.config.fields import FIELDS, SECTIONS

# What people bring from other tools, where spelling alone is too far from ours to be recognised.
OTHER_NAMES: Mapping[str, str] = {
    "learning_rate": "optim.lr",
    "optimizer": "optim.name",
    "optim": "optim.name",
    "scheduler": "optim.schedule",
    "lr_scheduler": "optim.schedule",
    "wd": "optim.weight_decay",
    "warmup": "optim.warmup_steps",
    "grad_clip": "optim.clip_norm",
    "max_grad_norm": "optim.clip_norm",
    "gradient_clip_val": "optim.clip_norm",
    "model": "model.name",
    "dataset": "data.name",
    "data_dir": "data.dir",
    "dataset_dir": "data.dir",
    "num_workers": "data.workers",
    "bs": "train.batch_size",
    "batch": "train.batch_size",
    "micro_batch_size": "train.accumulate",
    "grad_accum": "train.accumulate",
    "gradient_accumulation_steps": "train.accumulate",
    "amp": "train.precision",
    "dtype": "train.precision",
    "mixed_precision": "train.precision",
    "timeout": "dist.train_timeout_s",
}


def nearest(path: str, *, besides: Collection[str] = ()) -> tuple[str, ...]:
    """The settings (or other names, `besides`) that a misspelt path is closest to; several only when they tie."""
    path = path.replace("-", "_").lower()
    section, _, name = path.rpartition(".")
    in_section = {known.partition(".")[2]: known for known in FIELDS if known.startswith(f"{section}.")}
    anywhere = {known.partition(".")[2]: known for known in FIELDS}
    guesses = (
        _closest(path, FIELDS, cutoff=0.85),
        tuple(known for known in FIELDS if known.endswith(f".{name}")),
        (OTHER_NAMES[name],) if name in OTHER_NAMES else (),
        () if section else _closest(name, besides, cutoff=0.7),
        tuple(in_section[near] for near in _closest(name, in_section, cutoff=0.6)),
        tuple(anywhere[near] for near in _closest(name, anywhere, cutoff=0.75)),
    )
    return next((guess for guess in guesses if guess), ())


def _closest(word: str, choices: Collection[str], *, cutoff: float) -> tuple[str, ...]:
    return tuple(difflib.get_close_matches(word, choices, n=1, cutoff=cutoff))


def unknown_setting(path: str, *, besides: Collection[str] = ()) -> str:
    """The end of a sentence about a setting that does not exist."""
    if found := nearest(path, besides=besides):
        return f"unknown setting; did you mean {' or '.join(repr(name) for name in found)}?"
    section = path.partition(".")[0]
    if section in SECTIONS:
        names = [known.partition(".")[2] for known in FIELDS if known.startswith(f"{section}.")]
        return f"unknown setting; {section} has {', '.join(names)}"
    return f"unknown setting; settings are named SECTION.NAME, with a section of {', '.join(SECTIONS)}"


def unknown_section(section: str) -> str:
    """The end of a sentence about a section of a file that does not exist."""
    if near := difflib.get_close_matches(section, SECTIONS, n=1):
        return f"unknown section; did you mean {near[0]!r}?"
    return f"unknown section; the sections are {', '.join(SECTIONS)}"
