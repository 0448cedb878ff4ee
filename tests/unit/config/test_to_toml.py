"""A config written to a file and given back is the same config, whatever the task's defaults
are."""

from __future__ import annotations

import keyword
import math
import string
import tomllib
from operator import attrgetter
from pathlib import Path
from types import NoneType
from typing import Annotated, Any, ClassVar, Literal, get_args, get_origin

from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from drumline.config import PRESETS, read_flags, read_layers, resolve
from drumline.config.config_file import to_toml
from drumline.config.fields import FIELDS, SECTIONS, UNIONS
from drumline.config.rules import EXCLUSIVE_PAIRS, RULES
from drumline.config.schema import Bounds, Config, ModelConfig, OrClass, SwitchOr, TrainConfig
from drumline.training.tasks.base import Task
from drumline.training.tasks.built_in import BUILT_IN, ImageClassification, unused_settings

TEXT = st.text(st.characters(exclude_categories=["Cs"]))
NUMBERS = st.floats(allow_nan=False, allow_infinity=False)
IDENTIFIERS = st.sampled_from(["hidden", "größe", "_x", *keyword.kwlist])
OPTIONS = st.dictionaries(
    IDENTIFIERS, st.one_of(TEXT, st.integers(), NUMBERS, st.booleans()), max_size=3
)


def within(kind: Any, bounds: Bounds) -> st.SearchStrategy[Any]:
    if kind is int:
        return st.integers(min_value=int(bounds.low or 0), max_value=10**12)
    low = bounds.low if bounds.above is None else math.nextafter(bounds.above, math.inf)
    return st.floats(min_value=low, max_value=bounds.high, allow_nan=False, allow_infinity=False)


def values_for(annotation: Any) -> st.SearchStrategy[Any]:
    kind = get_origin(annotation) or annotation
    arguments = get_args(annotation)
    if kind is Annotated and isinstance(arguments[1], OrClass):
        return st.sampled_from(["torch.optim.NAdam", "größe.py:Ä", *arguments[1].choices])
    if kind is Annotated and isinstance(arguments[1], SwitchOr):
        return st.sampled_from([True, False, "every:3"])
    if kind is Annotated:
        return within(arguments[0], arguments[1])
    if kind in UNIONS:
        return st.one_of(st.none() if each is NoneType else values_for(each) for each in arguments)
    if kind is Literal:
        return st.sampled_from(arguments)
    if kind is tuple and arguments[1] is Ellipsis:
        return st.lists(values_for(arguments[0]), min_size=1, max_size=5).map(tuple)
    if kind is tuple:
        return st.tuples(*(values_for(argument) for argument in arguments))
    if kind is bool:
        return st.booleans()
    if kind is str:  # "none" is how a text that may be missing says that it is
        return TEXT.filter(lambda text: text and text.lower() != "none")
    return OPTIONS


PAIRED = {path for pair in EXCLUSIVE_PAIRS for path in pair}
DRAWS = st.fixed_dictionaries(
    {path: values_for(field.annotation) for path, field in FIELDS.items()}
)


@st.composite
def configs(draw: st.DrawFn) -> Config:
    values = draw(DRAWS)
    for pair in EXCLUSIVE_PAIRS:
        path, excluded = draw(st.permutations(pair))
        values[path] = draw(st.integers(1, 10**6))
        values[excluded] = None
    # A default may break a rule that held before.
    while broken := [
        rule for rule in RULES if rule.is_broken(*(values[path] for path in rule.fields))
    ]:
        values |= {path: FIELDS[path].default for path in broken[0].fields if path not in PAIRED}
    return Config(
        **{
            section: cls(**{name: values[f"{section}.{name}"] for name in cls.__dataclass_fields__})
            for section, cls in SECTIONS.items()
        }
    )


def read_back(text: str, file: Path, *, task: str) -> Config:
    file.write_text(text, encoding="utf-8")
    layers = read_layers(read_flags([]), config_file=file, environment={"DATASET_DIR": "elsewhere"})
    return resolve(layers, PRESETS[task].defaults)


@settings(suppress_health_check=list(HealthCheck))
@given(config=configs(), task=st.sampled_from(sorted(PRESETS)))
def test_any_config_is_read_back_as_it_was_written(
    config: Config, task: str, tmp_path: Path
) -> None:
    again = read_back(to_toml(config), tmp_path / "config.toml", task=task)
    assert again == config
    types = [type(value) for value in again.model.options.values()]
    assert types == [type(config.model.options[name]) for name in again.model.options]


def test_the_file_holds_every_section_and_field_in_the_order_of_the_schema() -> None:
    document = tomllib.loads(to_toml(Config()))
    written = [f"{section}.{key}" for section, table in document.items() for key in table]
    assert written == [path for path in FIELDS if not FIELDS[path].is_table]


class OwnModelAndData(Task):
    defaults: ClassVar = {"model.dropout": 0.5, "train.epochs": 1, "train.batch_size": 8}

    def model(self) -> Any: ...

    def train_data(self) -> Any: ...


def test_a_task_with_its_own_model_and_data_has_no_settings_of_built_in_ones(
    tmp_path: Path,
) -> None:
    """But for those that the user or the task has set, which the task may read."""
    layers = read_layers(
        read_flags(["--data.samples", "99", "--model.dropout", "0.0"]),
        config_file=None,
        environment={},
    )
    config = resolve(layers, OwnModelAndData.defaults)
    text = to_toml(config, left_out=unused_settings(OwnModelAndData, config))
    document = tomllib.loads(text)
    assert document["model"] == {
        "dropout": 0.0,
        "activation_checkpointing": False,
        "init": "none",
        "init_strict": True,
    }
    assert list(document["data"]) == [
        "dir",
        "cache",
        "samples",
        "workers",
        "pin_memory",
        "persistent_workers",
        "prefetch_factor",
        "resident",
        "balance",
    ]
    (tmp_path / "config.toml").write_text(text)
    again = read_layers(read_flags([]), config_file=tmp_path / "config.toml", environment={})
    assert resolve(again, OwnModelAndData.defaults) == config
    assert unused_settings(BUILT_IN["digits"], config) == frozenset()


class AnotherHead(ImageClassification):
    """Changes the model that `model.name` gives."""

    def model(self) -> Any:
        return super().model()


def test_a_task_that_builds_on_the_configured_model_has_its_settings() -> None:
    config = Config(train=TrainConfig(epochs=1, batch_size=8))
    assert unused_settings(AnotherHead, config) == frozenset()
    document = tomllib.loads(to_toml(config, left_out=unused_settings(AnotherHead, config)))
    assert document["model"]["name"] == config.model.name


def test_what_is_not_set_is_written_as_none(tmp_path: Path) -> None:
    text = to_toml(Config(train=TrainConfig(epochs=1, batch_size=8)))
    assert 'clip_norm = "none"' in text.splitlines()
    # a task that clips, and counts steps
    again = read_back(text, tmp_path / "config.toml", task="text")
    assert again.optim.clip_norm is None
    assert again.train.steps is None


def test_options_are_a_table_of_their_own() -> None:
    text = to_toml(Config(model=ModelConfig(options={"hidden": 64, "a b": "x"})))
    assert '[model.options]\nhidden = 64\n"a b" = "x"\n' in text


def test_the_header_is_a_comment(tmp_path: Path) -> None:
    config = Config(train=TrainConfig(epochs=1, batch_size=8))
    text = to_toml(config, header="written by drumline\n\ngive it back with --config")
    assert text.startswith("# written by drumline\n#\n# give it back with --config\n\n[model]\n")
    assert read_back(text, tmp_path / "config.toml", task="digits") == config


def test_every_awkward_character_survives(tmp_path: Path) -> None:
    awkward = "".join([*map(chr, range(32)), string.punctuation, "\x7f\x85\u2028é😀"])
    config = Config(model=ModelConfig(name=awkward), train=TrainConfig(epochs=1, batch_size=8))
    assert read_back(to_toml(config), tmp_path / "config.toml", task="digits") == config


def test_values_of_a_config_can_serve_as_a_tasks_defaults() -> None:
    config = Config(
        train=TrainConfig(epochs=1, batch_size=8), model=ModelConfig(options={"hidden": 1})
    )
    nothing = read_layers(read_flags([]), config_file=None, environment={})
    assert resolve(nothing, {path: attrgetter(path)(config) for path in FIELDS}) == config
