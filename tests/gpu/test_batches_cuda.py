"""Batches ahead of the step on a GPU: the bits of the CPU, whatever the device is busy with; held
there by choice."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import closing
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor
from torch.utils.data import IterableDataset

from benchmarks.photos import PhotoBytes, Photos, prepared
from drumline.base.errors import UsageError
from drumline.config.schema import Config
from drumline.data.dataset import BatchMaker, BatchRequest, TwoPartDataset, gather_rows
from drumline.data.delivery import (
    BatchProducer,
    Delivery,
    LoadingOptions,
    ResidentDataset,
    make_resident,
)
from drumline.data.images import ImageArrays, Preparation, digits, normalize
from drumline.data.loader import IndexedEvaluationLoader, IndexedLoader
from drumline.data.sharding import Cursor, Draws, Sharding
from drumline.data.stream_loader import StreamLoader
from drumline.data.synthetic import SyntheticImages, SyntheticTokens
from drumline.data.tokens import tokens
from drumline.runs.events import read_events
from tests.gpu.test_hot_path_cuda import waiting_is_an_error
from tests.gpu.test_train_cuda import digits as digits_config
from tests.gpu.test_train_cuda import train_on_gpu
from tests.jobs import assert_same_bits, newest
from tests.ranks import run_ranks

pytestmark = [
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA GPU"),
    pytest.mark.filterwarnings("ignore:.*use of fork.*:DeprecationWarning"),
    pytest.mark.filterwarnings("ignore:This DataLoader will create:UserWarning"),
]
CPU = torch.device("cpu")
GPU = torch.device("cuda", 0)
NAMES = ["digits", "tokens", "synthetic_images", "synthetic_tokens"]


def dataset_named(name: str, folder: Path) -> TwoPartDataset:
    if name == "digits":
        return digits(split="train", augment=True)
    if name == "synthetic_tokens":
        return SyntheticTokens(split="train", samples=300, context=31, seed=2)
    if name == "synthetic_images":
        return SyntheticImages(
            split="train", augment=True, image_size=16, samples=300, classes=7, seed=2
        )
    values = np.random.default_rng(0).integers(0, 50_257, size=20_000).astype(np.uint16)
    values[0] = 50_256
    values.tofile(folder / "tokens.bin")
    return tokens(split="train", dir=str(folder / "tokens.bin"), token_type="uint16", context=31)


def make(dataset: Any, device: torch.device, **more: Any) -> IndexedLoader:
    sharding = Sharding(batch_size=48, rank=0, world_size=1, accumulate=2)
    return IndexedLoader(
        dataset, sharding=sharding, device=device, seed=3, options=LoadingOptions(**more)
    )


def busy() -> None:
    """Work for the current stream, so that it is behind the host and behind the other stream."""
    square = torch.ones(2048, 2048, device=GPU)
    for _ in range(8):
        square = square @ square


def check_same(expected: Iterator[Any], found: Iterator[Any], *, count: int) -> None:
    """Batches are compared when all are through, and let go of at once: memory that came back too
    early would show."""
    kept = []
    for _ in range(count):
        batch = next(found)
        busy()
        kept.append([tensor.clone() for tensor in batch])
        del batch
    for copies in kept:
        for left, right in zip(next(expected), copies, strict=True):
            assert right.is_cuda
            assert left.dtype == right.dtype
            assert torch.equal(left, right.cpu())


def epochs(loader: IndexedLoader, count: int) -> Iterator[Any]:
    for _ in range(count):
        yield from loader


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize(
    "loading", [{}, {"pin_memory": False}, {"workers": 2}], ids=["here", "pageable", "workers"]
)
def test_batches_ahead_have_the_bits_of_the_cpu(
    tmp_path: Path, name: str, loading: dict[str, Any]
) -> None:
    dataset = dataset_named(name, tmp_path)
    with closing(make(dataset, GPU, **loading)) as loader:
        plain = make(dataset, CPU)
        check_same(epochs(plain, 2), epochs(loader, 2), count=2 * len(loader))
        assert plain.cursor == loader.cursor == Cursor(2, 0)


@pytest.mark.parametrize("name", NAMES)
def test_resident_data_has_the_bits_of_the_host(tmp_path: Path, name: str) -> None:
    dataset = dataset_named(name, tmp_path)
    held, workers = make_resident(dataset, GPU, workers=2, warns=False)
    assert isinstance(held, ResidentDataset)
    assert workers == 0
    loader = make(held, GPU)
    check_same(epochs(make(dataset, CPU), 2), epochs(loader, 2), count=2 * len(loader))


def test_a_cursor_set_again_and_a_preview_drop_what_was_made_ahead(tmp_path: Path) -> None:
    dataset = dataset_named("digits", tmp_path)
    plain = make(dataset, CPU)
    ahead = make(dataset, GPU)
    for loader in (plain, ahead):
        next(iter(loader))
        loader.cursor = Cursor(1, 480)
    assert torch.equal(ahead.preview()[0].cpu(), plain.preview()[0])
    check_same(iter(plain), iter(ahead), count=10)


def test_evaluation_batches_have_the_bits_of_the_cpu() -> None:
    both = [
        IndexedEvaluationLoader(
            digits(split="eval", augment=False),
            sharding=Sharding(batch_size=50, rank=0, world_size=1),
            device=device,
            options=LoadingOptions(),
        )
        for device in (CPU, GPU)
    ]
    check_same(iter(both[0]), iter(both[1]), count=len(both[1]))


@pytest.mark.parametrize("where", ["host", "resident"])
@pytest.mark.parametrize("name", ["digits", "tokens"])
def test_no_batch_waits_for_the_device(tmp_path: Path, name: str, where: str) -> None:
    dataset: Any = dataset_named(name, tmp_path)
    if where == "resident":
        dataset, _ = make_resident(dataset, GPU, workers=0, warns=False)
    batches = epochs(make(dataset, GPU), 2)
    # what is the same for all batches is brought to the device with the first
    for _ in range(4):
        busy()
        next(batches)
    with waiting_is_an_error():
        for _ in range(20):
            busy()
            next(batches)


@pytest.mark.parametrize(
    ("shape", "padding", "flip"),
    [((3, 32, 32), 4, True), ((1, 8, 8), 1, False), ((3, 17, 40), 9, True)],
)
def test_augmented_and_normalised_images_have_the_bits_of_the_cpu(
    shape: tuple[int, int, int], padding: int, flip: bool
) -> None:
    mean = (125.3, 123.0, 113.9)[: shape[0]]
    std = (63.0, 62.1, 66.7)[: shape[0]]
    pixels = np.random.default_rng(0).integers(0, 256, size=(256, *shape)).astype(np.uint8)
    prepare = Preparation(mean=mean, std=std, padding=padding, flip=flip)
    dataset = ImageArrays(pixels, np.arange(256), num_classes=256, prepare=prepare)
    indices = np.random.default_rng(1).permutation(256)
    request = BatchRequest(4, 0, 256, shuffled=True)
    fetch = BatchMaker(dataset, seed=0, defer_finish=True, pinned=True)
    found, labels = Delivery(GPU, fetch.finish).deliver(fetch[request])
    expected = BatchMaker(dataset, seed=0)[request]
    assert torch.equal(found.cpu(), expected[0])
    assert torch.equal(labels.cpu(), expected[1])
    # Every byte in every channel, and a batch that is not augmented.
    every = (
        torch.arange(256, dtype=torch.uint8)
        .view(-1, 1, 1, 1)
        .expand(256, shape[0], 1, 1)
        .contiguous()
    )
    assert torch.equal(normalize(every.to(GPU), mean, std).cpu(), normalize(every, mean, std))
    assert dataset.batch(indices, Draws(0, 0, indices))[0].shape == (256, *shape)


def test_rows_are_gathered_straight_into_pinned_memory_that_is_used_again() -> None:
    array = np.arange(4096, dtype=np.uint8).reshape(64, 64)
    indices = np.arange(8)
    fetch = BatchMaker(digits(split="train", augment=True), seed=0, defer_finish=True, pinned=True)
    rows, places = next(
        BatchProducer(fetch, LoadingOptions(), GPU).batches([BatchRequest(0, 0, 8, shuffled=True)])
    )
    assert rows.images.is_pinned()
    assert rows.labels.is_pinned()
    assert places.is_pinned()
    blocks = set()
    for _ in range(20):
        pinned = gather_rows(array, indices, pinned=True)
        assert pinned.is_pinned()
        blocks.add(pinned.data_ptr())
        pinned.to(GPU, non_blocking=True)
        del pinned
        torch.cuda.synchronize()
    assert len(blocks) <= 2


class FailsAt:
    """Whole batches; the one with this number is not to be had."""

    def __init__(self, number: int) -> None:
        self.number = number
        self.made = 0

    def __len__(self) -> int:
        return 480

    def batch(self, indices: np.ndarray, draws: Draws | None) -> Tensor:
        self.made += 1
        if self.made == self.number:
            raise OSError("the disk cannot be read")
        return torch.from_numpy(indices)


@pytest.mark.parametrize("number", [1, 2, 3, 7])
def test_an_error_comes_in_place_of_its_own_batch(number: int) -> None:
    batches = iter(make(FailsAt(number), GPU))
    for _ in range(number - 1):
        assert next(batches).is_cuda
    with pytest.raises(OSError, match="the disk cannot be read"):
        next(batches)


class Boxed:
    """A batch that moves itself, and has no `record_stream`."""

    def __init__(self, inside: Tensor) -> None:
        self.inside = inside

    def to(self, device: torch.device, non_blocking: bool = False) -> Boxed:
        return Boxed(self.inside.to(device, non_blocking=non_blocking))


class Boxes(FailsAt):
    def batch(self, indices: np.ndarray, draws: Draws | None) -> Any:
        return Boxed(super().batch(indices, draws))


def test_a_batch_that_moves_itself_is_moved_when_it_is_handed_out() -> None:
    expected = make(FailsAt(0), CPU)
    made = make(Boxes(0), GPU)
    for left, right in zip(expected, made, strict=True):
        assert torch.equal(left, right.inside.cpu())


@dataclass
class Hidden:
    """A batch as somebody's own kind of object, which nothing here can look into."""

    inside: Tensor


class HidesBatches(TwoPartDataset):
    def __len__(self) -> int:
        return 480

    def gather(self, indices: np.ndarray, *, pinned: bool = False) -> Tensor:
        return torch.from_numpy(indices)

    def finish(self, rows: Tensor, choices: None) -> Any:
        return Hidden(rows.view(-1, 1).expand(-1, 20_000).contiguous())


def test_memory_that_a_batch_hides_is_not_used_again_too_early() -> None:
    copies = []
    for hidden in make(HidesBatches(), GPU):
        busy()
        copies.append(hidden.inside.sum(1))
        del hidden
    for one, total in zip(make(FailsAt(0), CPU), copies, strict=True):
        assert torch.equal(one * 20_000, total.cpu())


class Samples(IterableDataset[Tensor]):
    def __iter__(self) -> Iterator[Tensor]:
        return (torch.full((50_000,), number) for number in range(100))


@pytest.mark.parametrize("loading", [{}, {"pin_memory": False}, {"workers": 1}], ids=str)
def test_batches_of_a_stream_have_the_bits_of_the_cpu(loading: dict[str, Any]) -> None:
    sharding = Sharding(batch_size=12, rank=0, world_size=1, accumulate=4)
    plain, ahead = (
        StreamLoader(
            Samples(), sharding=sharding, device=device, seed=3, options=LoadingOptions(**loading)
        )
        for device in (CPU, GPU)
    )
    with closing(plain), closing(ahead):
        batches = ([batch] for batch in ahead)
        check_same(([batch] for batch in plain), batches, count=33)
        assert torch.equal(plain.preview(), ahead.preview().cpu())


def test_data_larger_than_the_free_memory_is_refused() -> None:
    class Vast(SyntheticImages):
        def __len__(self) -> int:
            return 10**12

    dataset = Vast(split="train", augment=False, image_size=16, samples=8, classes=2, seed=0)
    with pytest.raises(
        UsageError, match=r"Vast takes 7\d\d,\d\d\d\.\d\d GB, but cuda:0 has .* GB free"
    ):
        make_resident(dataset, GPU, workers=0, warns=False)


def test_a_run_with_resident_data_ends_with_the_same_bits(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    # deterministic kernels ask for it
    monkeypatch.setenv("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
    config = digits_config("fp32")
    resident = Config(**{**vars(config), "data": replace(config.data, resident=True)})
    run_ranks(1, train_on_gpu, config, tmp_path / "host")
    run_ranks(1, train_on_gpu, resident, tmp_path / "resident")
    host = newest(tmp_path / "host")
    held = newest(tmp_path / "resident")
    # the settings are in there
    assert_same_bits(replace(host, documents={}), replace(held, documents={}))
    events = list(read_events(tmp_path / "resident" / "events" / "rank-00000.jsonl"))
    shares = [event["data_share"] for event in events if event["kind"] in ("train", "end")]
    assert len(shares) == 4
    assert all(0 <= share <= 1 for share in shares)


@pytest.mark.parametrize("workers", [0, 2])
def test_bytes_of_a_dataset_of_ones_own_are_prepared_on_the_device(workers: int) -> None:
    settings: dict[str, int] = {"size": 40, "crop": 32, "num_images": 20}
    floats = Photos(100, **settings)
    images = PhotoBytes(100, **settings)
    images.images = floats.images
    with closing(make(images, GPU, workers=workers)) as loader:
        for (expected, labels), (raw, chances, found) in zip(
            make(floats, CPU), loader, strict=True
        ):
            busy()
            assert raw.dtype == torch.uint8
            assert torch.equal(found.cpu(), labels)
            # A GPU divides by a number through its reciprocal.
            torch.testing.assert_close(prepared(raw, chances, 32).cpu(), expected)
