from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor

from drumline.base.errors import CheckpointError
from drumline.checkpoint import tensor_file

ALL_TYPES = tuple(tensor_file._TYPE_CODES)


def example(dtype: torch.dtype, shape: tuple[int, ...]) -> Tensor:
    """Random bits, so that NaNs with payloads and denormals are in it too."""
    if dtype is torch.bool:
        return torch.rand(shape) < 0.5
    num_items = torch.Size(shape).numel()
    bits = torch.randint(0, 256, (num_items * dtype.itemsize,), dtype=torch.uint8)
    return bits.view(dtype).reshape(shape)


def bits(tensor: Tensor) -> bytes:
    return tensor.contiguous().reshape(-1).view(torch.uint8).numpy().tobytes()


def save(path: Path, tensors: dict[str, Tensor]) -> None:
    path.write_bytes(b"".join(tensor_file.stream(tensors)))


def test_every_type_and_shape_is_restored_bit_for_bit(tmp_path: Path) -> None:
    shapes = [(), (1,), (7,), (3, 5), (0,), (4, 0, 2)]
    tensors = {f"{dtype}-{shape}": example(dtype, shape) for dtype in ALL_TYPES for shape in shapes}
    save(tmp_path / "x.safetensors", tensors)
    back = tensor_file.read(tmp_path / "x.safetensors")
    assert back.keys() == tensors.keys()
    for name, tensor in tensors.items():
        assert back[name].dtype == tensor.dtype
        assert back[name].shape == tensor.shape
        assert bits(back[name]) == bits(tensor)


def test_the_safetensors_package_reads_it(tmp_path: Path) -> None:
    tensors = {
        "a": torch.arange(6.0).reshape(2, 3),
        "b.c/d": torch.tensor(7),
        "unicodé": torch.ones(1),
    }
    save(tmp_path / "x.safetensors", tensors)
    loaded = load_file(tmp_path / "x.safetensors")
    assert all(torch.equal(loaded[name], tensor) for name, tensor in tensors.items())


def test_views_are_written_as_they_look(tmp_path: Path) -> None:
    base = torch.arange(24.0).reshape(4, 6)
    complex_base = torch.tensor([1 + 2j, 3 - 4j])
    tensors = {
        "transposed": base.t(),
        "strided": base[::2, 1::3],
        "expanded": base[:1].expand(3, 6),
        "channels_last": torch.randn(2, 3, 4, 4).to(memory_format=torch.channels_last),
        "conjugate": complex_base.conj(),
        "parameter": torch.nn.Parameter(base),
    }
    save(tmp_path / "x.safetensors", tensors)
    back = tensor_file.read(tmp_path / "x.safetensors")
    for name, tensor in tensors.items():
        assert torch.equal(back[name], tensor.detach()), name


def test_no_tensors_at_all(tmp_path: Path) -> None:
    save(tmp_path / "x.safetensors", {})
    assert tensor_file.read(tmp_path / "x.safetensors") == {}


def test_the_size_is_known_ahead() -> None:
    tensors = {
        "a": torch.zeros(3, 4),
        "b": torch.zeros(5, dtype=torch.bool),
        "none": torch.zeros(0),
    }
    _, *content = tensor_file.stream(tensors)
    assert tensor_file.num_bytes(tensors) == len(b"".join(content)) == 53


def test_every_tensor_starts_at_a_multiple_of_its_item_size(tmp_path: Path) -> None:
    tensors = {f"{index}": example(dtype, (3,)) for index, dtype in enumerate(reversed(ALL_TYPES))}
    save(tmp_path / "x.safetensors", tensors)
    raw = (tmp_path / "x.safetensors").read_bytes()
    length = int.from_bytes(raw[:8], "little")
    header = json.loads(raw[8 : 8 + length])
    for name, tensor in tensors.items():
        assert (8 + length + header[name]["data_offsets"][0]) % tensor.element_size() == 0


def test_a_dense_tensor_is_not_copied() -> None:
    tensor = torch.zeros(4, dtype=torch.uint8)
    *_, chunk = tensor_file.stream({"a": tensor})
    tensor.fill_(9)
    assert bytes(chunk) == b"\x09" * 4


@pytest.mark.parametrize(
    "tensor",
    [
        torch.zeros(2, dtype=torch.complex128),
        torch.eye(2).to_sparse(),
        torch.zeros(2, device="meta"),
    ],
    ids=["type", "sparse", "meta"],
)
def test_what_cannot_be_saved_is_named(tensor: Tensor) -> None:
    with pytest.raises(
        CheckpointError,
        match=r"the tensor layer\.x cannot be saved: torch\.\w+, torch\.\w+, on \w+",
    ):
        tensor_file.num_bytes({"layer.x": tensor})


def test_a_file_that_is_no_safetensors_is_named(tmp_path: Path) -> None:
    (tmp_path / "x.safetensors").write_bytes(b"nonsense")
    with pytest.raises(CheckpointError, match=r"x\.safetensors cannot be read"):
        tensor_file.read(tmp_path / "x.safetensors")
    with pytest.raises(CheckpointError, match=r"y\.safetensors cannot be read"):
        tensor_file.read(tmp_path / "y.safetensors")
