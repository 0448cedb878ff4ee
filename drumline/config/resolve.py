"""From all sources of settings to one Config: flags > file > environment > the task's defaults >
the schema's; and the rules between settings that are valid one by one, but not together.

Two stages, because a task of the user's own imports torch: `check_layers` finds what can be found
before that, `resolve` adds the task's defaults and finds the rest. Both raise one ConfigError that
lists every problem.
"""

from __future__ import annotations

import difflib
import math
import re
import tomllib
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from fnmatch import fnmatchcase
from functools import partial
from pathlib import Path
from types import MappingProxyType
from typing import Any, NamedTuple

from drumline.base.errors import ConfigError
from drumline.base.text import CREDENTIALS
from drumline.config.config_file import read_config_file
from drumline.config.fields import (
    FIELDS,
    SECTIONS,
    TASK_SECTION,
    Field,
    Mismatch,
    flag_text,
    is_in_task,
    name_in_task,
)
from drumline.config.flags import (
    SCHEMA_DEFAULT,
    Flags,
    Layer,
    Setting,
    cannot_be_turned_off,
    check_layer,
    evidence,
    missing_value,
)
from drumline.config.schema import (
    FIRST_PROFILED,
    MOST_PROFILED,
    Config,
    profiled_steps,
    sync_interval,
)

DATASET_DIR = "DATASET_DIR"
DEFAULTS = Layer(
    {path: Setting(path, field.default, SCHEMA_DEFAULT) for path, field in FIELDS.items()}
)
HOW_TO_DECLARE = (
    "a setting is an attribute of the class with a type and a default, such as `width: int = 64`; its type is int, "
    "float, bool, str, a Literal of texts, a tuple of one of them, or one of these | None"
)
NEXT_STEP = "`drumline train --help` lists every setting with its type, bounds and default"


# Rules between settings, and a message for each that is broken


@dataclass(frozen=True)
class Rule:
    """Settings that are valid one by one, but not together. `is_broken` takes the values of
    `fields`, in that order."""

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


def _rules_of_values() -> Iterator[Rule]:
    """Those of rules.toml."""
    text = Path(__file__).with_name("rules.toml").read_text(encoding="utf-8")
    for rule in tomllib.loads(text)["rules"]:
        conditions = tuple(rule["when"].values())
        fields = tuple(rule["when"])
        yield Rule(fields, partial(_all_hold, conditions), rule["message"], rule["fix"])


def _all_hold(conditions: Sequence[str], *values: Any) -> bool:
    return all(map(_holds, conditions, values))


def _holds(condition: str, value: Any) -> bool:
    """Whether a value is as rules.toml describes it."""
    text = flag_text(value)
    if condition.startswith("!"):
        return text != condition.removeprefix("!")
    return any(fnmatchcase(text, alternative) for alternative in condition.split(" | "))


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
    *_rules_of_values(),
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


# From all sources to one Config


class Layers(NamedTuple):
    """What the user gave, the highest precedence first."""

    flags: Layer
    file: Layer
    environment: Layer


def read_layers(
    flags: Flags, *, config_file: Path | str | None, environment: Mapping[str, str]
) -> Layers:
    """Read every source of settings but the task; never raises: `check_layers` or `resolve` reports
    all problems."""
    file = Layer({}) if config_file is None else read_config_file(Path(config_file))
    folder = environment.get(DATASET_DIR)  # an empty variable counts as not set
    variables = [Setting("data.dir", folder, where=DATASET_DIR, is_text=True)] if folder else []
    return Layers(flags.layer, file, check_layer(variables))


def check_layers(layers: Layers) -> None:
    """Stage 1, before the user's code is imported: report mistakes that do not depend on the task's
    defaults."""
    _raise_problems(layers, _settle(layers))


def resolve(
    layers: Layers,
    task_defaults: Mapping[str, Any],
    *,
    task: str = "task",
    task_fields: Mapping[str, Field] = MappingProxyType({}),
) -> Config:
    """Stage 2: the config of the run. `task` names the task in messages about its defaults;
    `task_fields`: its own settings."""
    task_layer = check_layer(
        Setting(path, value, f"{task}.defaults") for path, value in task_defaults.items()
    )
    field_defaults = Layer(
        {path: Setting(path, field.default, where=task) for path, field in task_fields.items()}
    )
    strongest_first = [
        *(
            check_layer(
                layer.settings.values(),
                problems=layer.problems,
                broken=layer.broken,
                check=partial(_checked, fields=task_fields, task=task),
            )
            for layer in (*layers, task_layer, field_defaults)
        ),
        DEFAULTS,
    ]
    settled = _settle(strongest_first)
    _raise_problems(strongest_first, settled)
    return _build(settled, {name_in_task(path): settled[path].value for path in task_fields})


def _checked(setting: Setting, *, fields: Mapping[str, Field], task: str) -> Setting:
    """A setting of the task itself with its value checked; any other as it is."""
    path = setting.path
    value = setting.value
    if not is_in_task(path):
        return setting
    if path not in fields:
        raise Mismatch(f"{setting.name}: unknown setting; {_hint(path, fields, task)}")

    annotation = fields[path].annotation
    if setting.is_text and annotation is not bool:
        if value is True:
            raise Mismatch(missing_value(setting.where, annotation))
        if setting.where == f"--no-{path}":
            raise Mismatch(cannot_be_turned_off(setting.where, path, annotation))

    if annotation is str and value == "":  # a user's own text may be empty
        return setting
    return replace(setting, is_text=setting.is_text and value is not True).coerced(annotation)


def _hint(path: str, fields: Mapping[str, Field], task: str) -> str:
    if not fields:
        return f"{task} has no settings of its own; {HOW_TO_DECLARE}"
    if near := difflib.get_close_matches(name_in_task(path), map(name_in_task, fields), n=1):
        return f"did you mean '{TASK_SECTION}.{near[0]}'?"
    return f"{task} has {', '.join(fields)}; {HOW_TO_DECLARE}"


def check_section(section: str, values: Any) -> None:
    """Check the values of a section that was made in Python."""
    where = type(values).__name__
    layer = check_layer(
        Setting(f"{section}.{name}", value, where) for name, value in vars(values).items()
    )
    _raise_problems([layer], layer.settings)


def _settle(strongest_first: Iterable[Layer]) -> dict[str, Setting]:
    settled: dict[str, Setting] = {}
    for layer in strongest_first:
        new = {path: setting for path, setting in layer.settings.items() if path not in settled}
        settled |= new
        for path, excluded in EXCLUDED_BY.items():
            if path in new and new[path].value is not None:
                settled.setdefault(excluded, Setting(excluded, None, where=f"{path} is set"))
    return settled


def _raise_problems(layers: Sequence[Layer], settled: Mapping[str, Setting]) -> None:
    pairs = pairs_given_together(layers)
    at_fault = frozenset[str]().union(*pairs, *(layer.broken for layer in layers))
    problems = [problem for layer in layers for problem in layer.problems]
    broken = [*pairs.values(), *broken_rules(settled, besides=at_fault)]
    advice = [rule.fix for rule in broken]
    if problems:
        advice.append(NEXT_STEP)
    problems += [rule.problem for rule in broken]
    if problems:
        raise ConfigError(problems, next_step="; ".join(advice))


def _build(settled: Mapping[str, Setting], task: Mapping[str, Any]) -> Config:
    values: dict[str, dict[str, Any]] = {section: {} for section in SECTIONS}
    for path, field in FIELDS.items():
        section, _, name = path.partition(".")
        values[section][name] = {} if field.is_table else settled[path].value

    for path in sorted(settled):
        section, name, *option = path.split(".", 2)
        if option and f"{section}.{name}" in FIELDS:
            values[section][name][option[0]] = settled[path].value

    sections = {section: cls(**values[section]) for section, cls in SECTIONS.items()}
    return Config(**sections, task=task)
