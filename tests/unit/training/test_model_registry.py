"""Names become models, with what they accept and nothing else."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
from torch import nn

from drumline.base.errors import UsageError
from drumline.config.schema import ModelConfig
from drumline.training.tasks import built_in
from drumline.training.tasks.built_in import GPT, MiniResNet, build_model, register_model

SETTINGS = {
    name: value for name, value in vars(ModelConfig()).items() if name not in ("name", "options")
}


@pytest.fixture(autouse=True)
def _registrations_end_with_the_test() -> Iterator[None]:
    before = dict(built_in._builders)
    yield
    built_in._builders.clear()
    built_in._builders.update(before)


def test_built_ins_take_facts_from_the_data_and_settings_from_the_config() -> None:
    resnet = build_model(
        "mini_resnet",
        facts={"in_channels": 2, "num_classes": 5},
        settings={**SETTINGS, "blocks": 2},
        options={},
    )
    gpt = build_model(
        "gpt",
        facts={"vocab_size": 17},
        settings={**SETTINGS, "layers": 3, "context": 9},
        options={},
    )

    assert isinstance(resnet, MiniResNet)
    assert (resnet.in_channels, resnet.head.out_features, len(resnet.blocks)) == (2, 5, 6)
    assert isinstance(gpt, GPT)
    assert (gpt.token_embedding.num_embeddings, len(gpt.blocks), gpt.context) == (17, 3, 9)


def test_a_registered_builder_is_found_and_gets_what_it_names() -> None:
    @register_model("one_layer")
    def one_layer(in_channels: int, hidden: int = 3) -> nn.Module:
        return nn.Linear(in_channels, hidden)

    model = build_model(
        "one_layer", facts={"in_channels": 4}, settings=SETTINGS, options={"hidden": 6}
    )

    assert isinstance(model, nn.Linear)
    assert model.weight.shape == (6, 4)


def test_options_win_over_facts_and_facts_over_settings() -> None:
    @register_model("layer")
    def layer(width: int, heads: int) -> nn.Module:
        return nn.Linear(width, heads)

    model = build_model(
        "layer", facts={"width": 2}, settings={"width": 1, "heads": 1}, options={"heads": 3}
    )

    assert isinstance(model, nn.Linear)
    assert model.weight.shape == (3, 2)


def test_a_model_of_the_users_own_file(tmp_path: Path) -> None:
    file = tmp_path / "own_registry_model.py"
    file.write_text(
        "from torch import nn\n"
        "class Net(nn.Linear):\n"
        "    def __init__(self, num_classes, hidden=2):\n"
        "        super().__init__(hidden, num_classes)\n"
    )
    model = build_model(
        f"{file}:Net", facts={"num_classes": 3}, settings=SETTINGS, options={"hidden": 5}
    )

    assert isinstance(model, nn.Linear)
    assert model.weight.shape == (3, 5)


def test_an_unknown_name_is_answered_with_the_nearest() -> None:
    with pytest.raises(
        UsageError, match="no model 'mini_resnt'; did you mean 'mini_resnet'"
    ) as caught:
        build_model("mini_resnt", facts={}, settings={}, options={})

    assert "path/to/file.py:ClassName" in str(caught.value)


def test_an_option_the_model_does_not_take_is_refused() -> None:
    with pytest.raises(UsageError, match="'gpt' takes no option 'layer'; did you mean 'layers'"):
        build_model("gpt", facts={"vocab_size": 3}, settings=SETTINGS, options={"layer": 2})


def test_a_fact_that_the_data_lacks_is_named() -> None:
    with pytest.raises(UsageError, match="model 'gpt' needs vocab_size"):
        build_model(
            "gpt", facts={"in_channels": 1, "num_classes": 10}, settings=SETTINGS, options={}
        )


def test_what_is_no_module_is_refused() -> None:
    with pytest.raises(
        UsageError, match=r"'collections:Counter' is a Counter, not a torch\.nn\.Module"
    ):
        build_model("collections:Counter", facts={}, settings={}, options={})


def test_a_name_is_given_once() -> None:
    with pytest.raises(
        UsageError,
        match=r"two models are called 'gpt': drumline\.training\.tasks\.built_in\.GPT and torch",
    ):
        register_model("gpt")(nn.Linear)
