"""Batches in two parts: gathered and finished apart they are the same batches, from the host or
from a held copy."""

from __future__ import annotations

import logging
from contextlib import closing
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image
from torch import Tensor

from drumline.base.errors import DataError, UsageError
from drumline.data import delivery
from drumline.data.dataset import (
    BatchMaker,
    BatchRequest,
    PartialBatch,
    TwoPartDataset,
    gather_rows,
    is_in_two_parts,
)
from drumline.data.delivery import BatchProducer, LoadingOptions, ResidentDataset, make_resident
from drumline.data.images import ImageFolder, digits
from drumline.data.sharding import Draws
from drumline.data.synthetic import SyntheticImages, SyntheticTokens
from drumline.data.tokens import tokens

# the latter is only named
CPU = torch.device("cpu")
GPU = torch.device("cuda", 0)
REQUESTS = [
    BatchRequest(2, 3, 20, shuffled=True),
    BatchRequest(0, 0, 16, shuffled=False),
    BatchRequest(1, 5, 6, shuffled=True),
]


def token_file(folder: Path, kind: str, highest: int) -> str:
    values = np.random.default_rng(0).integers(0, highest + 1, size=300).astype(kind)
    values[7] = highest
    np.save(folder / "tokens.npy", values)
    return str(folder / "tokens.npy")


def images(**options: Any) -> SyntheticImages:
    settings = {
        "split": "train",
        "augment": True,
        "image_size": 8,
        "samples": 40,
        "classes": 3,
        "seed": 1,
    }
    return SyntheticImages(**{**settings, **options})


def built_ins(folder: Path) -> list[TwoPartDataset]:
    return [
        digits(split="train", augment=True),
        images(),
        SyntheticTokens(split="train", samples=40, context=9, seed=1),
        tokens(
            split="train", dir=token_file(folder, "uint16", 50_256), token_type="uint16", context=7
        ),
    ]


def test_gathered_and_finished_apart_they_are_the_same_batches(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(delivery, "_CHUNK_BYTES", 1000)
    for dataset in built_ins(tmp_path):
        whole = BatchMaker(dataset, seed=5)
        first = BatchMaker(dataset, seed=5, defer_finish=True)
        held = BatchMaker(ResidentDataset(dataset, CPU), seed=5, defer_finish=True)
        for request in REQUESTS:
            answer = first[request]
            assert isinstance(answer, PartialBatch)
            expected = whole[request]
            assert whole.finish(expected) is expected
            for batch in (first.finish(answer), held.finish(held[request])):
                assert len(batch) == len(expected) == 2
                for expected_part, part in zip(expected, batch, strict=True):
                    assert expected_part.dtype == part.dtype
                    assert torch.equal(expected_part, part)


@pytest.mark.parametrize("augment", [False, True])
def test_images_of_one_channel_have_the_strides_of_any_other(augment: bool) -> None:
    """With others, as right for an axis of size 1, torch takes them for channels_last and rounds
    otherwise."""
    indices = np.arange(5)
    images, _ = digits(split="train", augment=augment).batch(indices, Draws(0, 0, indices))
    assert images.stride() == (64, 64, 8, 1)


def test_images_travel_as_bytes_and_tokens_as_they_are_stored(tmp_path: Path) -> None:
    dataset = digits(split="train", augment=True)
    rows, places = BatchMaker(dataset, seed=0, defer_finish=True)[REQUESTS[0]]
    assert (rows.images.dtype, rows.labels.dtype, places.shape) == (torch.uint8, torch.int64, (17,))
    assert BatchMaker(dataset, seed=0, defer_finish=True)[REQUESTS[1]].choices is None

    words = tokens(
        split="train", dir=token_file(tmp_path, "uint16", 50_256), token_type="uint16", context=7
    )
    assert words.gather(np.arange(4)).dtype == torch.int16


@pytest.mark.parametrize(
    ("kind", "highest"),
    [("uint8", 255), ("uint16", 65_535), ("int16", 300), ("uint32", 2**32 - 1), ("uint64", 2**40)],
)
def test_tokens_of_any_type_come_out_as_they_went_in(
    tmp_path: Path, kind: str, highest: int
) -> None:
    path = token_file(tmp_path, kind, highest)
    dataset = tokens(split="train", dir=path, token_type="uint16", context=7)
    inputs, targets = dataset.batch(np.arange(len(dataset)), None)
    expected = torch.from_numpy(np.load(path)[: 8 * len(dataset)].astype(np.int64).reshape(-1, 8))
    assert inputs.dtype == targets.dtype == torch.int64
    assert torch.equal(inputs, expected[:, :-1])
    assert torch.equal(targets, expected[:, 1:])
    assert inputs.is_contiguous()
    assert targets.is_contiguous()


@pytest.mark.parametrize("kind", ["uint16", "int16"])
def test_a_stray_token_is_found_before_the_data_is_on_the_device(tmp_path: Path, kind: str) -> None:
    path = token_file(tmp_path, kind, 32_000)
    (tmp_path / "meta.json").write_text('{"vocab_size": 31999}')
    dataset = tokens(split="train", dir=path, token_type="uint16", context=7)
    with pytest.raises(DataError, match="holds the token 32000, but its vocabulary has 31999"):
        ResidentDataset(dataset, CPU)


def test_a_batch_of_its_own_is_not_gone_round() -> None:
    class Own(SyntheticImages):
        def batch(self, indices: np.ndarray, draws: Draws | None) -> Tensor:
            return torch.ones(len(indices))

    settings: dict[str, Any] = {
        "split": "train",
        "image_size": 8,
        "samples": 40,
        "classes": 3,
        "seed": 1,
    }
    dataset = Own(**settings, augment=False)
    assert is_in_two_parts(images())
    assert not is_in_two_parts(dataset)
    assert torch.equal(BatchMaker(dataset, seed=0, defer_finish=True)[REQUESTS[2]], torch.ones(1))


class Noted(TwoPartDataset):
    """Another dataset, and whether its rows are in shared memory where they are gathered."""

    def __init__(self, inner: TwoPartDataset) -> None:
        self.inner = inner

    def __len__(self) -> int:
        return len(self.inner)

    def gather(self, indices: np.ndarray, *, pinned: bool = False) -> Any:
        rows = self.inner.gather(indices, pinned=pinned)
        return rows, torch.tensor([leaf.is_shared() for leaf in delivery.leaves(rows)])

    def finish(self, rows: Any, choices: None) -> Any:
        return rows


@pytest.mark.filterwarnings("ignore:.*use of fork.*:DeprecationWarning")
def test_a_worker_for_a_gpu_gathers_into_the_memory_that_it_shares(tmp_path: Path) -> None:
    for number in range(3):
        (tmp_path / "train" / str(number)).mkdir(parents=True)
        Image.new("RGB", (4, 4), (number, 0, 9)).save(tmp_path / "train" / str(number) / "0.png")
    folder = ImageFolder(split="train", dir=str(tmp_path), augment=False, image_size=4)
    path = token_file(tmp_path, "uint16", 50_256)
    bytes_ = digits(split="train", augment=True)
    windows = tokens(split="train", dir=path, token_type="uint16", context=7)
    # On the CPU a worker makes the whole batch, so what it gathers is not sent.
    for dataset, is_sent in ((bytes_, True), (folder, True), (windows, True), (folder, False)):
        maker = BatchMaker(Noted(dataset), seed=0, defer_finish=is_sent)
        request = BatchRequest(1, 0, 3, shuffled=True)
        rows, is_shared = maker.finish(maker[request])
        with closing(BatchProducer(maker, LoadingOptions(workers=1), CPU)) as producer:
            from_worker, was_shared = maker.finish(next(producer.batches([request])))
        assert not is_shared.any()
        assert was_shared.tolist() == [is_sent] * len(was_shared)
        for own_leaf, worker_leaf in zip(
            delivery.leaves(rows), delivery.leaves(from_worker), strict=True
        ):
            assert own_leaf.stride() == worker_leaf.stride()
            assert torch.equal(own_leaf, worker_leaf)


def test_rows_of_an_array_that_cannot_be_written_to() -> None:
    array = np.arange(12, dtype=np.float32).reshape(4, 3)
    array.flags.writeable = False  # as a mapped file is
    assert gather_rows(array, np.array([3, 0, 3])).tolist() == [[9, 10, 11], [0, 1, 2], [9, 10, 11]]


@pytest.mark.parametrize("wrong", [-1, 4])
def test_rows_for_pinned_memory_are_looked_for_in_the_array(wrong: int) -> None:
    with pytest.raises(IndexError, match=f"rows from {min(1, wrong)} to {max(1, wrong)} of 4"):
        gather_rows(np.zeros((4, 3)), np.array([1, wrong]), pinned=True)


def test_on_the_cpu_resident_data_stays_as_it_is() -> None:
    dataset = [1, 2, 3]
    assert make_resident(dataset, CPU, workers=2, warns=True) == (dataset, 2)


class Stream:
    def __iter__(self) -> Any:
        return iter(range(3))


@pytest.mark.parametrize(
    ("dataset", "why"),
    [(Stream(), "Stream is a stream"), ([1, 2, 3], "list is not a drumline.TwoPartDataset")],
)
def test_data_without_rows_cannot_stay_on_the_device(dataset: Any, why: str) -> None:
    with pytest.raises(UsageError, match=f"the data cannot stay on cuda:0: {why}") as caught:
        make_resident(dataset, GPU, workers=0, warns=True)
    assert "leave --data.resident out, or derive the dataset from drumline.TwoPartDataset" in str(
        caught.value
    )


def test_data_that_is_empty_is_refused_as_anywhere_else() -> None:
    class Empty(SyntheticImages):
        def __len__(self) -> int:
            return 0

        def gather(self, indices: np.ndarray, *, pinned: bool = False) -> Any:
            raise IndexError("there is no row 0")

    dataset = Empty(split="train", augment=False, image_size=8, samples=1, classes=2, seed=0)
    with pytest.raises(DataError, match="the dataset Empty is empty"):
        make_resident(dataset, GPU, workers=0, warns=True)


def test_data_that_would_leave_no_room_is_refused_with_the_sizes(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    class Large(SyntheticTokens):
        def __len__(self) -> int:
            return 9_100_000_000

        def gather(self, indices: np.ndarray, *, pinned: bool = False) -> Tensor:
            return torch.zeros(len(indices), 1, dtype=torch.uint8)

    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda device: (10**10, 10**10))
    with pytest.raises(
        UsageError,
        match=r"Large takes 9\.10 GB, but cuda:0 has 10\.00 GB free, of which the data may use 90%",
    ) as caught:
        make_resident(
            Large(split="train", samples=1, context=1, seed=0), GPU, workers=0, warns=True
        )
    assert "leave --data.resident out: batches are copied to the device ahead" in str(caught.value)


def test_workers_of_resident_data_are_not_started_and_that_is_reported(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    # The two questions to the driver are answered here, and "meta" stands for a GPU: everything
    # else is the real thing.
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda device: (10**9, 10**9))
    monkeypatch.setattr(torch.cuda, "synchronize", lambda device: None)
    with caplog.at_level(logging.WARNING, logger="drumline"):
        held, workers = make_resident(images(), torch.device("meta"), workers=3, warns=True)
    assert isinstance(held, ResidentDataset)
    assert (len(held), workers) == (40, 0)
    assert "the data stays on meta, so its 3 workers are not started" in caplog.text
