"""Weights from elsewhere are found, compared with the model by name, shape and type, and never
unpickled."""

from __future__ import annotations

import json
import os
import shlex
import sys
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor, nn

from drumline.base.errors import UsageError
from drumline.training.job.initial_weights import fit_weights, read_weights


class Tied(nn.Module):
    """The head's weight is the embedding's."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(5, 3)
        self.norm = nn.BatchNorm1d(3)
        self.head = nn.Linear(3, 5, bias=False)
        self.head.weight = self.embedding.weight


def state() -> dict[str, Tensor]:
    return {name: tensor.clone() for name, tensor in Tied().state_dict().items()}


def without(*names: str) -> dict[str, Tensor]:
    return {name: tensor for name, tensor in state().items() if name not in names}


@pytest.mark.parametrize("left_out", ["embedding.weight", "head.weight", "no name"])
def test_one_name_of_a_tied_weight_is_enough(left_out: str) -> None:
    tensors = without(left_out)
    fitting, problems = fit_weights(tensors, Tied())
    assert problems == []
    expected = tensors.get("embedding.weight", tensors.get("head.weight"))
    assert expected is not None
    assert torch.equal(fitting["embedding.weight"], expected)
    assert "head.weight" not in fitting


def test_two_values_of_a_tied_weight_are_reported() -> None:
    _, problems = fit_weights({**state(), "head.weight": torch.zeros(5, 3)}, Tied())
    assert problems == [
        "head.weight and another name of the same tensor in the model have different values"
    ]


def test_what_is_missing_unexpected_or_different_is_listed_by_name() -> None:
    tensors = {
        **without("norm.weight", "norm.running_var"),
        "norm.bias": torch.zeros(4),
        "norm.num_batches_tracked": torch.tensor(1.0),
        "pooler.weight": torch.zeros(2),
        "norm.running_mean": torch.ones(3, dtype=torch.float16),
    }
    fitting, problems = fit_weights(tensors, Tied())
    assert problems == [
        "missing: norm.weight and norm.running_var",
        "not in the model: pooler.weight",
        "norm.bias is [4], and [3] in the model",
        "norm.num_batches_tracked is torch.float32, and torch.int64 in the model",
    ]
    assert fitting.keys() == {"embedding.weight", "norm.running_mean"}


def test_long_lists_are_cut() -> None:
    tensors = {f"old.{number}": torch.zeros(1) for number in range(30)}
    _, (_, unexpected) = fit_weights(tensors, Tied())
    assert unexpected.startswith("not in the model: old.0, old.1, ")
    assert unexpected.endswith(" and 10 more")


def test_names_of_a_ddp_model_fit() -> None:
    tensors = {f"module.{name}": tensor for name, tensor in state().items()}
    assert fit_weights(tensors, Tied())[1] == []


def test_a_file_a_link_to_it_and_folders_are_read(tmp_path: Path) -> None:
    """Hugging Face's cache has links to files with other names."""
    saved = {
        name: tensor.clone()
        for name, tensor in Tied().state_dict().items()
        if name != "head.weight"
    }
    file = tmp_path / "blob"
    save_file(saved, file)
    folder = tmp_path / "snapshot"
    folder.mkdir()
    (folder / "model.safetensors").symlink_to(file)
    for path in (file, folder / "model.safetensors", folder):
        tensors = read_weights(path)[1]
        assert tensors.keys() == saved.keys()
        assert all(torch.equal(tensor, saved[name]) for name, tensor in tensors.items())


def save_in_shards(folder: Path, tensors: dict[str, Tensor], files: list[str]) -> None:
    weight_map = {name: files[number % len(files)] for number, name in enumerate(tensors)}
    for file in files:
        save_file(
            {name: tensors[name] for name in tensors if weight_map[name] == file},
            folder / Path(file).name,
        )
    index = {"metadata": {"total_size": 0}, "weight_map": weight_map}
    (folder / "model.safetensors.index.json").write_text(json.dumps(index))


def test_shards_are_read_by_their_index(tmp_path: Path) -> None:
    saved = without("head.weight")
    save_in_shards(
        tmp_path, saved, ["model-00001-of-00002.safetensors", "model-00002-of-00002.safetensors"]
    )
    tensors = read_weights(tmp_path)[1]
    assert tensors.keys() == saved.keys()
    assert all(torch.equal(tensor, saved[name]) for name, tensor in tensors.items())
    (tmp_path / "model-00002-of-00002.safetensors").unlink()
    with pytest.raises(
        UsageError, match=r"model-00002-of-00002\.safetensors cannot be read: No such file"
    ):
        read_weights(tmp_path)


@pytest.mark.parametrize(
    "index",
    [
        b"[]",
        b'{"weight_map": 3}',
        b"{",
        b'{"weight_map": {"a": "../a.safetensors"}}',
        b'{"weight_map": {"a": 1}}',
    ],
)
def test_an_index_that_is_none_or_leads_out_of_its_folder_is_refused(
    tmp_path: Path, index: bytes
) -> None:
    save_file(without("head.weight"), tmp_path / "a.safetensors")
    folder = tmp_path / "inner"
    folder.mkdir()
    (folder / "model.safetensors.index.json").write_bytes(index)
    with pytest.raises(
        UsageError,
        match=r"is not an index of safetensors files: .*\n  try: give a \.safetensors file",
    ):
        read_weights(folder)


def test_a_damaged_file_is_refused(tmp_path: Path) -> None:
    file = tmp_path / "cut.safetensors"
    save_file(without("head.weight"), file)
    file.write_bytes(file.read_bytes()[:-4])
    with pytest.raises(UsageError, match=r"cut\.safetensors is not a complete safetensors file: "):
        read_weights(file)


def test_what_is_not_there(tmp_path: Path) -> None:
    with pytest.raises(
        UsageError, match=r"there is no file or folder .*nowhere \(looked in .*\)\n  try: give a"
    ):
        read_weights(tmp_path / "nowhere")
    with pytest.raises(
        UsageError,
        match=r"has no model\.safetensors, no model\.safetensors\.index\.json and no check",
    ):
        read_weights(tmp_path)
    os.mkfifo(tmp_path / "pipe.safetensors")
    # and it does not wait for a writer
    with pytest.raises(UsageError, match="there is no file or folder"):
        read_weights(tmp_path / "pipe.safetensors")


@pytest.mark.parametrize(
    "name", ["my $(weights).pt", "pytorch_model.bin", "disguised.safetensors", "legacy.pth"]
)
def test_a_pickle_is_refused_and_the_command_in_the_message_converts_it(
    tmp_path: Path, name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    torch.save(Tied().state_dict(), name, _use_new_zipfile_serialization=name != "legacy.pth")
    with pytest.raises(UsageError) as refused:
        read_weights(Path(name))
    assert refused.value.what.startswith(
        f"{name} is a pickle, which may run code when it is loaded"
    )
    assert refused.value.next_step is not None
    if name == "pytorch_model.bin":  # also in a folder that has nothing else
        with pytest.raises(UsageError, match=r"pytorch_model\.bin is a pickle"):
            read_weights(tmp_path)
    if name == "my $(weights).pt":  # a shell runs nothing of the name
        program, _, *arguments = shlex.split(refused.value.next_step.partition(": ")[2])
        assert program == "python"
        monkeypatch.setattr(sys, "argv", arguments)
        exec(arguments[0])
        assert refused.value.next_step.endswith(" 'my $(weights).pt' 'my $(weights).safetensors'")
        assert load_file("my $(weights).safetensors").keys() == Tied().state_dict().keys()
        with pytest.raises(
            UsageError, match=r"try: name the file: .*my \$\(weights\)\.safetensors"
        ):
            read_weights(tmp_path)
