"""The rules between settings that are valid one by one, but not together: those about certain values
are in conflicts.toml, those about numbers and forms here."""

from __future__ import annotations

import math
import re
import tomllib
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from fnmatch import fnmatchcase
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

from drumline.base.text import CREDENTIALS
from drumline.config.fields import flag_text
from drumline.config.flags import Layer, Setting, evidence
from drumline.config.schema import (
    FIRST_PROFILED,
    METRICS_FORM,
    MOST_PROFILED,
    metrics_endpoint,
    profiled_steps,
    sync_interval,
)


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


EXCLUSIVE_PAIRS = (
    ("train.batch_size", "train.batch_size_per_rank"),
    ("train.epochs", "train.steps"),
)
"""Two settings for one thing. The one from the layer with the higher precedence replaces the
other."""
EXCLUDED_BY = {**dict(EXCLUSIVE_PAIRS), **{second: first for first, second in EXCLUSIVE_PAIRS}}
"""By each setting of a pair: the one that it replaces."""
WEB_ADDRESS = re.compile(r"https?://(\[[^]]+\]|[^][/:@?#]+)(:\d+)?([/?#]|$)")


def _conflicts() -> Iterator[Rule]:
    """The rules of conflicts.toml."""
    text = Path(__file__).with_name("conflicts.toml").read_text(encoding="utf-8")
    for conflict in tomllib.loads(text)["conflict"]:
        patterns = tuple(conflict["when"].values())
        yield Rule(
            tuple(conflict["when"]),
            partial(_all_fit, patterns),
            conflict["message"],
            conflict["fix"],
        )


def _all_fit(patterns: Sequence[str], *values: Any) -> bool:
    return all(map(_fits, values, patterns))


def _fits(value: Any, pattern: str) -> bool:
    """Whether the value, as a flag takes it, is one of `a|b`, or none of `not a|b`."""
    choices = pattern.removeprefix("not ").split("|")
    is_one = any(fnmatchcase(flag_text(value), choice) for choice in choices)
    return is_one != pattern.startswith("not ")


RULES = (
    *_conflicts(),
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
    Rule(
        ("log.prometheus",),
        lambda endpoint: endpoint is not None and metrics_endpoint(endpoint) is None,
        f"log.prometheus is {METRICS_FORM}",
        "--log.prometheus 9464",
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
