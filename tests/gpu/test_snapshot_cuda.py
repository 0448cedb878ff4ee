"""On a GPU: a save pauses for a copy, which has exactly the bits of its step, while later steps
run."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.optim import AdamW, Optimizer

from drumline.base.background import in_background
from drumline.checkpoint import copying, store, tensor_file
from drumline.checkpoint.copying import Copier, Copy
from drumline.checkpoint.state import capture
from drumline.checkpoint.tensor_file import Staging
from drumline.config.schema import CheckpointConfig, Config, DistConfig
from drumline.runs.events import read_events
from drumline.training.between_steps.saver import Saver
from drumline.training.loop import Loop
from drumline.training.tasks.built_in import MiniResNet
from tests.gpu.test_hot_path_cuda import waiting_is_an_error
from tests.jobs import Normalised, assert_same_bits, make_config, train_here
from tests.ranks import run_ranks

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA GPU")
GPU = torch.device("cuda", 0)


def make(**options: Any) -> tuple[nn.Module, Optimizer]:
    torch.manual_seed(0)
    model = MiniResNet(in_channels=3, num_classes=10, widths=(16, 32)).to(GPU)
    model = model.to(memory_format=torch.channels_last)
    return model, AdamW(model.parameters(), lr=0.01, **options)


def train(model: nn.Module, optimizer: Optimizer, steps: int) -> None:
    images = torch.randn(8, 3, 16, 16, device=GPU)
    for _ in range(steps):
        optimizer.zero_grad()
        model(images).square().mean().backward()
        optimizer.step()


def no_room(*where: torch.device) -> int:
    return 0


def bits(tensor: Tensor) -> bytes:
    return tensor.detach().cpu().contiguous().reshape(-1).view(torch.uint8).numpy().tobytes()


def write(root: Path, copied: Copy) -> Path:
    copied.wait()
    return store.write(
        root, 1, tensors=copied.tensors, documents={}, metrics={}, stream=copied.stream
    )


@pytest.mark.parametrize("options", [{}, {"fused": True}, {"capturable": True}], ids=str)
@pytest.mark.parametrize("kind", ["device", "pinned", "host"])
def test_a_copy_holds_the_bits_of_its_step_while_steps_continue(
    tmp_path: Path, kind: str, options: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    model, optimizer = make(**options)
    train(model, optimizer, 3)
    copier = {
        "device": Copier(GPU),
        "pinned": Copier(GPU, device_room=no_room),
        "host": Copier(GPU, device_room=no_room),
    }[kind]
    if kind == "host":  # as where the system does not let a process pin memory
        monkeypatch.setattr(copier, "_pinned_memory", lambda live: None)
    live = capture(model, optimizer, progress={}).tensors
    torch.save(live, tmp_path / "state.pt")
    copied = copier.take(live)
    writing = in_background(lambda: write(tmp_path, copied))
    train(model, optimizer, 20)  # at once, on the stream that the copy was queued on
    path = writing.result()
    assert copied.kind == kind
    # its memory was given back
    assert all(not group for group in copied.tensors.values())
    expected = torch.load(tmp_path / "state.pt", map_location="cpu", weights_only=True)
    read = store.read(path).tensors
    changed = 0
    for file, group in expected.items():
        assert read[file].keys() == group.keys()
        for name, tensor in group.items():
            assert bits(read[file][name]) == bits(tensor), (file, name)
            changed += bits(live[file][name]) != bits(tensor)
    assert changed > 20  # the steps after the save did change the model


@pytest.mark.parametrize("device_room", [copying.device_room, no_room], ids=["device", "pinned"])
def test_the_copy_waits_for_nothing(device_room: Any) -> None:
    model, optimizer = make(fused=True)
    train(model, optimizer, 2)
    live = {"model": capture(model, progress={}).tensors["model"]}
    copier = Copier(GPU, device_room=device_room)
    copier.take(live).wait()  # the first one allocates
    with waiting_is_an_error():
        copied = copier.take(live)
    assert copied.kind == ("pinned" if device_room is no_room else "device")
    assert copied.wait() > 0


def test_a_copy_keeps_types_shapes_and_layouts() -> None:
    tensors = {
        "a": torch.randn(4, 3, 5, 5, device=GPU).to(memory_format=torch.channels_last),
        "b": torch.randn(6, 7, device=GPU, dtype=torch.bfloat16).t(),
        "c": torch.randn(5, device=GPU, dtype=torch.complex64).conj(),
        "d": torch.tensor(True, device=GPU),
        "e": torch.empty(0, 3, device=GPU),
        "f": torch.arange(9, device=GPU)[::2],
        "g": torch.ones(1, device=GPU).expand(4),
        "h": torch.full((), 2.0),
        "i": torch.full((3,), torch.nan, device=GPU).to(torch.float8_e4m3fn),
    }
    for copier in (Copier(GPU), Copier(GPU, device_room=no_room)):
        copied = copier.take({"x": tensors})
        copied.wait()
        assert list(copied.tensors["x"]) == list(tensors)
        for name, tensor in tensors.items():
            copy = copied.tensors["x"][name]
            assert (copy.dtype, copy.shape) == (tensor.dtype, tensor.shape), name
            assert bits(copy) == bits(tensor.resolve_conj()), name


def test_pinned_memory_is_used_again() -> None:
    live = {"model": {"a": torch.randn(1000, device=GPU), "b": torch.randn(3, 5, device=GPU).t()}}
    copier = Copier(GPU, device_room=no_room)
    first = copier.take(live)
    assert first.wait() > 0
    place = first.tensors["model"]["a"].data_ptr()
    assert first.tensors["model"]["a"].is_pinned()
    assert bits(first.tensors["model"]["b"]) == bits(live["model"]["b"])
    live["model"]["a"].zero_()
    second = copier.take(live)
    second.wait()
    assert second.tensors["model"]["a"].data_ptr() == place
    assert not second.tensors["model"]["a"].any()


def test_without_any_room_the_live_tensors_are_written(tmp_path: Path) -> None:
    model, optimizer = make()
    train(model, optimizer, 1)
    live = capture(model, optimizer, progress={}).tensors
    for number, copied in enumerate(
        [
            Copier(GPU, device_room=no_room, host_room=no_room).take(live),
            Copier(GPU).as_they_are(live),
        ]
    ):
        assert copied.kind == "none"
        read = store.read(write(tmp_path / str(number), copied)).tensors
        for file, group in live.items():
            assert all(bits(read[file][name]) == bits(tensor) for name, tensor in group.items())


def test_more_bytes_than_the_buffers_hold_come_out_in_order() -> None:
    """Large tensors over several buffers, small ones that share one, and some on the CPU in
    between."""
    tensors = [
        torch.randn(1000, device=GPU),
        torch.arange(7, dtype=torch.uint8, device=GPU),
        torch.ones(()),
        torch.randn(40, 50, device=GPU).t(),
        torch.empty(0, device=GPU),
        torch.tensor([True, False], device=GPU),
        torch.randn(3, device=GPU, dtype=torch.bfloat16),
    ]
    torch.cuda.synchronize()
    small = Staging(GPU, size=1 << 10)
    for _ in range(2):
        assert b"".join(map(bytes, small.drain(tensors))) == b"".join(map(bits, tensors))
    named = {str(number): tensor for number, tensor in enumerate(tensors)}
    assert b"".join(map(bytes, tensor_file.stream(named, small))) == b"".join(
        tensor_file.stream(named)
    )


def test_the_room_on_the_gpu_leaves_what_the_run_needs_at_its_peak() -> None:
    torch.cuda.empty_cache()
    torch.cuda.reset_peak_memory_stats(GPU)
    before = copying.device_room(GPU)
    activations = torch.empty(1 << 28, dtype=torch.uint8, device=GPU)
    during = copying.device_room(GPU)
    del activations  # held by the allocator, and needed again in the next step
    after = copying.device_room(GPU)
    torch.cuda.empty_cache()
    torch.cuda.reset_peak_memory_stats(GPU)
    assert before - during >= 1 << 28
    assert abs(after - during) < 1 << 26


def train_with_saves_that_must_not_wait(config: Config, run: Path) -> int:
    """Up to the copy; the writer's thread then waits as it likes. Returns how many saves there
    were."""
    gather = Saver._capture
    saves = []

    def gather_without_waiting(*args: Any, **options: Any) -> Any:
        saves.append(1)
        with waiting_is_an_error():
            return gather(*args, **options)

    Saver._capture = gather_without_waiting  # type: ignore[method-assign]
    train_here(config, Normalised, run)
    return len(saves)


def test_one_rank_gathers_its_state_without_waiting_for_the_gpu(tmp_path: Path) -> None:
    every = CheckpointConfig(every_steps=3, every_epochs=0, keep_last=50, keep_best=0)
    config = replace(make_config(checkpoint=every), dist=DistConfig(device="cuda"))
    assert run_ranks(1, train_with_saves_that_must_not_wait, config, tmp_path) == [4]
    read = store.read(tmp_path / "checkpoints" / "step-00000003").documents["progress"]["measured"]
    assert read["sums"][1] > 0  # they came to the host in time


def train_and_tell_what_was_ready(config: Config, run: Path) -> tuple[list[int], set[torch.dtype]]:
    """How many steps were taken before each of the buffers that a save goes through was made, and
    which types were copied before the first."""
    take_step = Loop.take_step
    make_buffer = tensor_file._buffer
    foreach_copy = torch._foreach_copy_
    taken: list[int] = []
    made: list[int] = []
    copied: set[torch.dtype] = set()

    def take_and_count(self: Loop, *args: Any) -> None:
        take_step(self, *args)
        taken.append(1)

    def make_and_tell(size: int) -> Tensor:
        made.append(len(taken))
        return make_buffer(size)

    def copy_and_tell(targets: list[Tensor], sources: list[Tensor]) -> None:
        if not taken:
            copied.update(source.dtype for source in sources)
        foreach_copy(targets, sources)

    Loop.take_step = take_and_count
    tensor_file._buffer = make_and_tell
    torch._foreach_copy_ = copy_and_tell
    train_here(config, Normalised, run)
    return made, copied


def test_what_saves_need_is_there_before_the_first_step(tmp_path: Path) -> None:
    config = replace(make_config(), dist=DistConfig(device="cuda"))
    [(made, copied)] = run_ranks(1, train_and_tell_what_was_ready, config, tmp_path)
    assert made == [0, 0]
    assert copied >= {torch.float32, torch.uint8, torch.int16, torch.int32, torch.int64}


def test_a_run_saves_beside_its_steps_what_it_would_have_saved_in_them(tmp_path: Path) -> None:
    every = CheckpointConfig(every_steps=2, every_epochs=0, keep_last=50, keep_best=0)
    config = replace(
        make_config(checkpoint=every, deterministic=True), dist=DistConfig(device="cuda")
    )
    run_ranks(1, train_here, config, Normalised, tmp_path / "beside")
    waits = replace(config, checkpoint=replace(every, background=False))
    run_ranks(1, train_here, waits, Normalised, tmp_path / "waits")
    for step in (2, 4, 6, 8, 10):
        name = Path("checkpoints") / f"step-{step:08d}"
        content = store.read(tmp_path / "beside" / name)
        two = store.read(tmp_path / "waits" / name)
        content.documents["progress"].pop("facts"), two.documents["progress"].pop("facts")
        assert_same_bits(content, two)
    for run, kind in (("beside", "device"), ("waits", "none")):
        events = list(read_events(tmp_path / run / "events" / "rank-00000.jsonl"))
        assert {event["copy"] for event in events if event["kind"] == "checkpoint"} == {kind}
