"""The copy that a save makes holds what was there when it was made, whatever happens to the model
afterwards."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from torch import Tensor, nn

from drumline.base import processes
from drumline.checkpoint import copying, store
from drumline.checkpoint.copying import Copier, Copy
from drumline.checkpoint.state import capture
from drumline.checkpoint.tensor_file import as_bytes

CPU = torch.device("cpu")


def trained() -> tuple[nn.Module, torch.optim.Optimizer]:
    model = nn.Sequential(nn.Conv2d(3, 8, 3), nn.BatchNorm2d(8)).to(
        memory_format=torch.channels_last
    )
    model[0].weight.data[0, 0, 0, 0] = torch.nan
    optimizer = torch.optim.AdamW(model.parameters())
    change(model, optimizer)
    return model, optimizer


def change(model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
    model(torch.randn(2, 3, 5, 5)).square().sum().backward()
    optimizer.step()


def bits(tensor: Tensor) -> bytes:
    return bytes(as_bytes(tensor).numpy().data)


def write(root: Path, copied: Copy) -> dict[str, dict[str, bytes]]:
    copied.wait()
    path = store.write(
        root, 1, tensors=copied.tensors, documents={}, metrics={}, stream=copied.stream
    )
    read = store.read(path).tensors
    return {
        file: {name: bits(tensor) for name, tensor in group.items()} for file, group in read.items()
    }


def test_what_is_written_later_is_what_there_was_at_the_save(tmp_path: Path) -> None:
    model, optimizer = trained()
    live = capture(model, optimizer, progress={}).tensors
    copier = Copier(CPU)
    at_once = write(tmp_path / "now", copier.as_they_are(live))
    copied = copier.take(live)
    change(model, optimizer)
    assert copied.kind == "host"
    assert write(tmp_path / "later", copied) == at_once
    assert write(tmp_path / "changed", copier.as_they_are(live)) != at_once


def test_copies_in_one_piece_of_memory_keep_types_shapes_and_layouts() -> None:
    """As they are made on a GPU, and into pinned memory; the calls are the same here."""
    tensors = {
        "a": torch.randn(4, 3, 5, 5).to(memory_format=torch.channels_last),
        "b": torch.randn(6, 7, dtype=torch.bfloat16).t(),
        "c": torch.randn(5, dtype=torch.complex64).conj(),
        "d": torch.tensor(True),
        "e": torch.empty(0, 3),
        "f": torch.arange(9)[::2],
        "g": torch.ones(1).expand(4),
        "h": torch.full((3,), torch.nan).to(torch.float8_e4m3fn),
    }
    memory = torch.empty(copying._room_for(tensors.values()), dtype=torch.uint8)
    for copied in (
        copying._beside({"x": tensors}, CPU)["x"],
        copying._into(memory, {"x": tensors})["x"],
    ):
        assert list(copied) == list(tensors)
        for name, tensor in tensors.items():
            assert (copied[name].dtype, copied[name].shape) == (tensor.dtype, tensor.shape)
            assert bits(copied[name]) == bits(tensor), name
            assert copied[name].data_ptr() != tensor.data_ptr() or not tensor.numel()
        assert copied["a"].stride() == tensors["a"].stride()


def test_without_room_for_a_copy_there_is_none(tmp_path: Path) -> None:
    live = capture(*trained(), progress={}).tensors
    needed = sum(tensor.nbytes for group in live.values() for tensor in group.values())
    assert Copier(CPU, host_room=lambda: needed).take(live).kind == "host"
    copied = Copier(CPU, host_room=lambda: needed - 1).take(live)
    assert copied.kind == "none"
    assert copied.tensors["model"]["0.weight"].data_ptr() == live["model"]["0.weight"].data_ptr()
    write(tmp_path, copied)
    assert copied.tensors["model"].keys() == live["model"].keys()


def test_memory_is_given_back_file_by_file() -> None:
    copied = Copier(CPU).take(capture(*trained(), progress={}).tensors)
    for _ in copied.stream(copied.tensors["model"]):
        assert copied.tensors["model"]
    assert copied.tensors["model"] == {}
    assert copied.tensors["optimizer"]


def test_the_room_on_the_host_is_some_of_its_memory() -> None:
    first_line = Path("/proc/meminfo").read_text().splitlines()[0]
    assert copying.host_room() < int(first_line.split()[1]) << 10


def test_the_limit_of_a_container_counts(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "memory.max").write_text("3000000000\n")
    (tmp_path / "memory.current").write_text("2900000000\n")
    (tmp_path / "memory.stat").write_text("anon 5\ninactive_file 400000000\n")
    monkeypatch.setattr(processes, "CGROUPS", str(tmp_path))
    assert copying.host_room() <= 500_000_000 - (1 << 28)
    (tmp_path / "memory.max").write_text("max\n")
    assert copying.host_room() > 0
