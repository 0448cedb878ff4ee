"""A checkpoint in parts: assigned alike on all ranks, complete when all are there; a failure names
its rank."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, nullcontext
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

from drumline.base.errors import CheckpointError
from drumline.checkpoint import store, tensor_file
from drumline.checkpoint.shard_files import PartFiles, assign
from drumline.checkpoint.store import Collector, SaveMessages, WritingRank, write_own_part
from drumline.rank.sealed_store import SealedStore
from drumline.runs import catalog

ZERO = WritingRank(0, "node-a")
ONE = WritingRank(1, "node-b")
Tensors = dict[str, dict[str, Tensor]]


def tensors(size: int = 8) -> Tensors:
    model = {f"layer.{index}": torch.randn(size * (index + 1)) for index in range(5)}
    return {"model": model, "optimizer": {"layer.0/step": torch.ones(())}, "empty": {}}


@pytest.fixture(autouse=True)
def short_wait(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(store, "SEEN_S", 0.2)


class Job:
    """Two writers of one save; `root` is where each has the run's checkpoints."""

    def __init__(self, *roots: Path) -> None:
        self.roots = roots
        self.end = threading.Event()
        self.store = SealedStore(dist.HashStore(), "a secret")

    def messages(self) -> SaveMessages:
        return SaveMessages(self.store, 1, end=self.end)

    @contextmanager
    def other(self, share: PartFiles, after: str | None = None) -> Iterator[None]:
        """The second writer; `after`: a file of the first that it waits for."""

        def stream(tensors: Mapping[str, Tensor]) -> Iterator[bytes | memoryview]:
            folder = store.hidden_folder(self.roots[0] / "step-00000001", "partial")
            deadline = time.monotonic() + 5
            while after is not None and time.monotonic() < deadline:
                if (folder / after).is_file() and (folder / after).stat().st_size:
                    break
                time.sleep(0.01)
            yield from tensor_file.stream(tensors)

        thread = threading.Thread(
            target=write_own_part,
            args=(self.messages(), ONE, self.roots[-1], 1),
            kwargs={"tensors": share, "stream": stream},
        )
        thread.start()
        yield
        thread.join()

    def write(self, shares: dict[int, PartFiles]) -> Path:
        expected = {ONE: {store.file_name(name): held for name, held in shares[1].items()}}
        return store.write(
            self.roots[0],
            1,
            tensors=shares[0],
            documents={"progress": {"step": 1}},
            metrics={},
            part_writers=Collector(self.messages(), ZERO, expected),
        )

    def failure(
        self,
        shares: dict[int, PartFiles],
        *,
        has_other: bool = True,
        written: PartFiles | None = None,
        after: str | None = None,
    ) -> str:
        """What the user reads; nothing is left of the save. `written`: by the other, if not what it
        should."""
        held = shares[1] if written is None else written
        second_writer = self.other(held, after) if has_other else nullcontext()
        with second_writer, pytest.raises(CheckpointError) as caught:
            self.write(shares)
        assert catalog.newest_valid(self.roots[0]) == (None, [])
        return str(caught.value)


def test_every_tensor_goes_to_one_rank_and_each_has_about_as_much() -> None:
    whole = tensors(1000)
    shares = assign(whole, [0, 2, 5])
    assert shares.keys() == {0, 2, 5}
    names = sorted(name for share in shares.values() for group in share.values() for name in group)
    assert names == sorted(name for group in whole.values() for name in group)
    loads = [
        sum(t.nbytes for group in share.values() for t in group.values())
        for share in shares.values()
    ]
    assert max(loads) <= 1.3 * min(loads)
    assert list(shares[2]) == ["model-part-00002"]
    assert shares[0]["empty"] == {}
    again = assign(
        {file: dict(reversed(group.items())) for file, group in whole.items()}, [0, 2, 5]
    )
    assert {rank: {f: sorted(g) for f, g in share.items()} for rank, share in again.items()} == {
        rank: {f: sorted(g) for f, g in share.items()} for rank, share in shares.items()
    }


def test_parts_of_two_ranks_are_one_checkpoint(tmp_path: Path) -> None:
    whole = tensors()
    shares = assign(whole, [0, 1])
    job = Job(tmp_path)
    with job.other(shares[1]):
        path = job.write(shares)
    assert not any(job.store.check([f"checkpoint/1/{key}"]) for key in ("open", "part/1"))
    names = set(catalog.verify(path).files)
    assert {
        "model-part-00000.safetensors",
        "model-part-00001.safetensors",
        "empty.safetensors",
    } <= names
    read = store.read(path)
    assert read.tensors.keys() == whole.keys()
    for file, group in whole.items():
        assert read.tensors[file].keys() == group.keys()
        assert all(torch.equal(read.tensors[file][name], tensor) for name, tensor in group.items())


def test_a_folder_that_the_other_host_does_not_see(tmp_path: Path) -> None:
    job = Job(tmp_path / "a", tmp_path / "b")
    text = job.failure(assign(tensors(), [0, 1]))
    missing = tmp_path / "b" / ".step-00000001.partial"
    assert (
        f"step-00000001 could not be saved: rank 1 on node-b: {missing}, which rank 0 on node-a made, "
        in text
    )
    assert "is not visible here: the nodes do not share this folder" in text
    assert (
        "; there is no earlier checkpoint\n  try: give a --run on a volume that all nodes share, "
        in text
    )
    assert "or --checkpoint.writers one, or use another run folder" in text


def test_a_part_that_does_not_arrive(tmp_path: Path) -> None:
    job = Job(tmp_path / "a", tmp_path / "b")
    (tmp_path / "b" / ".step-00000001.partial").mkdir(parents=True)
    text = job.failure(assign(tensors(), [0, 1]))
    assert "model-part-00001.safetensors, which rank 1 on node-b has written, is not in " in text
    assert "/a/.step-00000001.partial on node-a: the nodes do not share this folder" in text


@pytest.mark.parametrize(
    "change", [lambda held: held.pop("layer.3"), lambda held: held.update(more=torch.ones(2))]
)
def test_a_rank_that_holds_other_tensors_is_named_and_none_is_lost(
    tmp_path: Path, change: Callable[[dict[str, Tensor]], None]
) -> None:
    shares = assign(tensors(), [0, 1])
    changed = {file: dict(group) for file, group in shares[1].items()}
    change(changed["model-part-00001"])
    text = Job(tmp_path).failure(shares, written=changed)
    assert (
        "rank 1 on node-b has other tensors than rank 0 on node-a: its model or optimizer differs"
        in text
    )
    assert "try: build the same model and optimizer on every rank" in text


def test_a_rank_whose_disk_is_full_is_named(small_disk: Callable[[str], Path]) -> None:
    job = Job(small_disk("size=256k"))
    shares = {
        0: {"a": {"x": torch.ones(4)}},
        1: {"b-part-00001": {"y": torch.ones(200_000)}},
    }
    # else rank 0 may find the disk full as well
    text = job.failure(shares, after="progress.json")
    assert "could not be saved: rank 1 on node-b: the disk is full" in text
    assert "try: " in text


def test_a_rank_that_cannot_make_its_part_is_named(tmp_path: Path) -> None:
    shares = {0: {"a": {"x": torch.ones(4)}}, 1: {"b-part-00001": {"y": torch.ones(4).to_sparse()}}}
    text = Job(tmp_path).failure(shares)
    assert "rank 1 on node-b: CheckpointError: the tensor y cannot be saved" in text


def test_a_rank_that_is_lost_is_not_waited_for_when_the_run_ends(tmp_path: Path) -> None:
    job = Job(tmp_path)
    job.end.set()
    text = job.failure(assign(tensors(), [0, 1]), has_other=False)
    assert "could not be saved: rank 1 on node-b exited before its part was written" in text
    assert "try: read the output of that rank" in text


def test_when_rank_0_fails_the_others_do_too(tmp_path: Path) -> None:
    job = Job(tmp_path)
    (tmp_path / "step-00000001").write_text("in the way")
    shares = assign(tensors(), [0, 1])
    with (
        job.other(shares[1]),
        pytest.raises(CheckpointError, match="a file is where a folder should be"),
    ):
        job.write(shares)
    tidy = Job(tmp_path)
    Collector(tidy.messages(), ZERO, {}).cancel()
    with tidy.other(shares[1]):
        pass
    tidy = Job(tmp_path)
    tidy.end.set()
    with tidy.other(shares[1]):
        pass
