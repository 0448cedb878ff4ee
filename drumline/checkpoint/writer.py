"""Writes checkpoints into a folder beside the steps. A save has three layers:

    capture    the state is gathered by the caller, and copied here, while training pauses
    write      a thread writes the copy into a hidden folder (`store`)
    publish    the complete folder gets its name; the caller removes old ones, or uploads to a mirror

Rank 0 writes, or several ranks do, each a part (`shard_files`). Only rank 0 reports and fails. The
`Saver` of a run and the `Checkpoint` of a user's own loop capture and publish; both write with this.

Each writer of a part writes its own files into the folder that rank 0 made, and publishes their
sizes and checksums in the store; rank 0 checks that they exist, and only then writes the manifest.
Messages are JSON under keys of that save. The store is polled: a thread that blocks in it blocks
the other threads of its process.

The tensors that the next step changes are copied. Where the copy goes depends on the free memory:

- `device`: on the GPU. The copy is queued like other work of the step, without a wait;
- `pinned`: in pinned host memory, which the GPU writes to; it is allocated once, and reused by
  later saves;
- `host`: in pageable host memory, as always for a model on the CPU;
- `none`: no copy. The live tensors are written at once, and the step waits for that.
"""

from __future__ import annotations

import contextlib
import json
import threading
import time
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import suppress
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import Any, Literal

import msgspec
import torch
from torch import Tensor

from drumline.base.errors import CheckpointError, log
from drumline.base.untrusted import flush_folder, from_json
from drumline.checkpoint import store, tensor_file
from drumline.checkpoint.shard_files import (
    SHARDS_FILE,
    Files,
    PartFiles,
    assign,
    assign_shards,
    shapes_of,
)
from drumline.checkpoint.store import WritingRank
from drumline.checkpoint.tensor_file import Staging, make_event
from drumline.rank.collectives import gather_json
from drumline.rank.sealed_store import SealedStore
from drumline.rank.torch_internals import copy_to_each
from drumline.runs import catalog
from drumline.runs.manifest import FileRecord

Kind = Literal["device", "pinned", "host", "none"]
_ALIGNMENT = 512
# Tensors are copied as integers of their size: so every type has a kernel, and there are few
# groups. float32, the most common type, needs no view.
_INTEGERS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}
_COPIED_AS = (torch.float32, *_INTEGERS.values())
_DEVICE_MARGIN = 1 << 29
_HOST_MARGIN = 1 << 28
_UNKNOWN = 1 << 62
_GROUPS = Path("/sys/fs/cgroup")
# When a run fails, the remaining ranks finish the save in progress; how long they wait for a rank
# that has exited.
LAST_PARTS_S = 10.0
POLL_S = 0.02
# Another host's files may appear late on a network file system.
SEEN_S = 10.0
SHARE_THE_FOLDER = "give a --run on a volume that all nodes share, or --checkpoint.writers one"

Parts = Mapping[int, Mapping[str, Any]]
"""By rank: the files that it writes, each with its tensors; of another rank there may be only their
names."""


# The copy

# The next step must never run out of memory because of a copy. So the free memory of a GPU is what
# is left at the run's own peak, and on the host what the system and the limit of a container or a
# Slurm job leave.


def device_room(device: torch.device) -> int:
    """Bytes that a copy may take on a GPU. Cached memory of the allocator does not count: the next
    step may need it."""
    free, _ = torch.cuda.mem_get_info(device)
    held = torch.cuda.memory_stats(device)
    peak = held.get("allocated_bytes.all.peak", 0)
    reserved = held.get("reserved_bytes.all.current", 0)
    needed_at_peak = peak - reserved
    return int(free - needed_at_peak - _DEVICE_MARGIN)


def host_room() -> int:
    """Bytes that a copy may take in the host's memory."""
    left = [_UNKNOWN]
    with suppress(OSError, ValueError, LookupError):
        left.append(_numbers(Path("/proc/meminfo"))["MemAvailable:"] << 10)

    with suppress(OSError, ValueError, LookupError):  # without a limit it is `max`, not a number
        name = Path("/proc/self/cgroup").read_text(encoding="utf-8").rpartition("::/")[2].strip()
        group = _GROUPS / name
        if not (group / "memory.max").is_file():
            group = _GROUPS
        limit = int((group / "memory.max").read_text(encoding="utf-8"))
        used = int((group / "memory.current").read_text(encoding="utf-8"))
        # The group's file cache can be reclaimed.
        left.append(limit - used + _numbers(group / "memory.stat")["inactive_file"])

    return min(left) - _HOST_MARGIN


def _numbers(path: Path) -> dict[str, int]:
    """By name, from lines like `MemAvailable: 1234 kB`."""
    rows = (line.split() for line in path.read_text(encoding="utf-8").splitlines())
    return {row[0]: int(row[1]) for row in rows}


@dataclass(frozen=True)
class Copy:
    """The tensors to write, and where they are."""

    tensors: PartFiles
    kind: Kind
    staging: Staging | None = None
    events: tuple[torch.cuda.Event, torch.cuda.Event] | None = None

    def wait(self) -> float:
        """Wait until the copy is complete, without holding the GIL; returns its seconds on the
        GPU."""
        if self.events is None:
            return 0.0
        began, ready = self.events
        ready.synchronize()

        return float(began.elapsed_time(ready)) / 1000

    def stream(self, tensors: Mapping[str, Tensor]) -> Iterator[bytes | memoryview]:
        """The bytes of one file; its memory is freed as soon as they are written."""
        yield from tensor_file.stream(tensors, self.staging)
        if self.kind != "none" and isinstance(tensors, dict):
            tensors.clear()


class Copier:
    def __init__(
        self,
        device: torch.device,
        *,
        device_room: Callable[[torch.device], int] = device_room,
        host_room: Callable[[], int] = host_room,
    ) -> None:
        self._device = device
        self._device_room = device_room
        self._host_room = host_room
        self._staging = Staging(device) if device.type == "cuda" else None
        self._pinned: Tensor | None = None

    def rehearse(self) -> None:
        """Copy a few bytes before the first step, so that the first save does not have to load
        kernels and pin buffers."""
        if self._staging is None:
            return
        small = {
            str(dtype): torch.zeros(1, dtype=dtype, device=self._device) for dtype in _COPIED_AS
        }
        [copied] = _beside({"rehearsal": small}, self._device).values()
        torch.cuda.current_stream(self._device).synchronize()
        for _ in self._staging.drain(copied.values()):
            pass

    @torch.no_grad()
    def take(self, live: Files) -> Copy:
        """Copy these tensors. On a GPU the copy may still be running: `wait` for it before it is
        read."""
        if self._device.type != "cuda":
            return Copy(*self._on_host(live))
        began, ready = (make_event(is_timed=True) for _ in range(2))
        stream = torch.cuda.current_stream(self._device)
        began.record(stream)
        tensors, kind = self._from_gpu(live)
        ready.record(stream)

        return Copy(tensors, kind, self._staging, (began, ready))

    def as_they_are(self, live: Files) -> Copy:
        """No copy: the live tensors, which must be written at once."""
        if self._device.type == "cuda":
            torch.cuda.current_stream(self._device).synchronize()
        return Copy(_each(live, lambda tensor: tensor), "none", self._staging)

    def _on_host(self, live: Files) -> tuple[PartFiles, Kind]:
        """A copy in pageable memory, or none if there is no room."""
        if self._host_room() < _num_bytes(live):
            return _each(live, lambda tensor: tensor), "none"
        return _each(live, lambda tensor: tensor.detach().to("cpu", copy=True)), "host"

    def _from_gpu(self, live: Files) -> tuple[PartFiles, Kind]:
        """A copy on the GPU, in pinned memory, or on the host: the first that has room."""
        if self._device_room(self._device) >= _num_bytes(live):
            try:
                return _beside(live, self._device), "device"
            except torch.OutOfMemoryError:
                pass  # free memory may be fragmented, or in the pool of a graph

        if (buffer := self._pinned_memory(live)) is not None:
            return _into(buffer, live), "pinned"
        return self._on_host(live)

    def _pinned_memory(self, live: Files) -> Tensor | None:
        """The buffer of earlier saves, or a larger one; None: there is no room."""
        size = _room_for(tensor for group in live.values() for tensor in group.values())
        if self._pinned is None or self._pinned.numel() < size:
            self._pinned = None  # before the larger one is allocated
            rounded = 1 << size.bit_length()  # as torch does for pinned memory
            if self._host_room() < rounded:
                return None
            try:
                self._pinned = torch.empty(size, dtype=torch.uint8, pin_memory=True)
            except RuntimeError:  # the system limits pinned memory
                return None

        return self._pinned


def _beside(live: Files, device: torch.device) -> PartFiles:
    """A copy on the same device: one allocation for each file, and a few calls for all its
    tensors."""
    copied = {}
    for file, group in live.items():
        sources = {name: _resolved(tensor) for name, tensor in group.items()}
        here = {name: source for name, source in sources.items() if source.device == device}
        memory = torch.empty(_room_for(here.values()), dtype=torch.uint8, device=device)
        targets = dict(zip(here, _carve(memory, here.values()), strict=True))
        by_type = defaultdict(list)
        for name, source in here.items():
            bits = _as_bits(source)
            by_type[bits.dtype].append((_as_bits(targets[name]), bits))

        for pairs in by_type.values():
            copy_to, copy_from = zip(*pairs, strict=True)
            copy_to_each(list(copy_to), list(copy_from))
        # An optimizer counts its steps on the CPU.
        copied[file] = {
            name: targets[name] if name in here else sources[name].clone() for name in group
        }

    return copied


def _into(buffer: Tensor, live: Files) -> PartFiles:
    """A copy in one buffer of pinned memory, made by the GPU without a wait."""
    sources = [_resolved(tensor) for group in live.values() for tensor in group.values()]
    pairs = zip(_carve(buffer, sources), sources, strict=True)
    copies = iter([target.copy_(source, non_blocking=True) for target, source in pairs])

    return _each(live, lambda tensor: next(copies))


def _carve(memory: Tensor, sources: Iterable[Tensor]) -> Iterator[Tensor]:
    """Tensors in this memory with the strides of the sources, so that dense memory is copied in one
    piece."""
    # One call per tensor: there are hundreds, and training is paused.
    start = 0
    by_type = {torch.uint8: memory}
    for source in sources:
        if source.dtype not in by_type:
            by_type[source.dtype] = memory.view(source.dtype)
        typed = by_type[source.dtype]
        dense = source if source.is_contiguous() else torch.empty_like(source, device="meta")
        yield typed.as_strided(source.shape, dense.stride(), start // source.element_size())
        start += _aligned(source.nbytes)


def _resolved(tensor: Tensor) -> Tensor:
    """Without pending conjugations and negations, which raw memory does not have."""
    return tensor.detach().resolve_conj().resolve_neg()


def _room_for(tensors: Iterable[Tensor]) -> int:
    """Bytes for these tensors side by side."""
    return sum(_aligned(tensor.nbytes) for tensor in tensors)


def _each(files: Files, function: Callable[[Tensor], Tensor]) -> PartFiles:
    """The same files with other tensors."""
    return {
        file: {name: function(tensor) for name, tensor in group.items()}
        for file, group in files.items()
    }


def _as_bits(tensor: Tensor) -> Tensor:
    """The same memory as integers."""
    return (
        tensor if tensor.dtype is torch.float32 else tensor.view(_INTEGERS[tensor.element_size()])
    )


def _num_bytes(files: Files) -> int:
    return sum(tensor.nbytes for group in files.values() for tensor in group.values())


def _aligned(size: int) -> int:
    return -(-size // _ALIGNMENT) * _ALIGNMENT


# Writing it


@dataclass(frozen=True)
class CapturedState:
    """The content of a checkpoint."""

    step: int
    live: dict[str, Mapping[str, Tensor]]
    """Shares memory with the model and the optimizer: the next step changes it."""
    frozen: dict[str, Mapping[str, Tensor]]
    """Belongs to this save only."""
    documents: dict[str, Any]
    metrics: Mapping[str, float] = field(default_factory=dict)
    non_finite: str | None = None
    """The first tensor that is not finite, if there is one."""
    complete: Callable[[], None] = lambda: None
    """Called in the writer's thread when the copy is done, before anything is written."""


@dataclass(frozen=True, slots=True)
class WrittenCheckpoint:
    """A checkpoint that is complete, and how long it took."""

    step: int
    path: Path
    num_bytes: int
    copy: Kind
    seconds: float
    copy_s: float


Writers = Literal["one", "nodes", "ranks"]
"""Who writes a checkpoint: a value of `checkpoint.writers`."""


def is_writer(who: Writers, local_rank: int) -> bool:
    """Whether a rank writes, besides rank 0, by its number on its host."""
    is_first = local_rank == 0
    return {"one": is_first, "nodes": is_first, "ranks": True}[who]


class CheckpointWriter:
    """Writes the checkpoints of one folder in a thread, one at a time.

    After each step the training thread reads only `has_news`; there is no lock between the two. The
    result, or the error, is kept here until it is taken."""

    def __init__(
        self,
        root: Path,
        me: WritingRank,
        device: torch.device,
        *,
        publish: Callable[[Path], object],
    ) -> None:
        """`publish(newest)` is called in the thread when a checkpoint is complete; what it raises
        is only logged."""
        self.has_news = False
        """Whether there is a result that has not been taken."""
        self.step = 0
        """Of the latest save."""
        self._root = root
        self._me = me
        self._device = device
        self._publish = publish
        self._copier = Copier(device)
        self._writers = [WritingRank(0, me.host)]
        self._num_shards = 1
        self._store: SealedStore | None = None
        self._end = threading.Event()
        self._num_saves = 0
        self._thread: threading.Thread | None = None
        self._written: WrittenCheckpoint | None = None
        self._error: BaseException | None = None

    @property
    def is_writer(self) -> bool:
        """Whether this rank writes."""
        return self._me.rank in [writer.rank for writer in self._writers]

    @property
    def is_busy(self) -> bool:
        """Whether a save is running."""
        thread = self._thread
        return thread is not None and thread.is_alive()

    def choose_writers(
        self,
        who: Writers,
        store: SealedStore,
        *,
        local_rank: int,
        num_shards: int = 1,
    ) -> None:
        """Collective: let several ranks write, rank 0 first. `num_shards`: of a sharded model,
        whose first replica writes."""
        self._store = store.clone()
        self._num_shards = num_shards
        self._writers = []
        for rank, (host, number) in enumerate(gather_json([self._me.host, local_rank])):
            writes = rank == 0 or is_writer(who, number)
            if num_shards > 1:
                writes = rank < num_shards
            if writes:
                self._writers.append(WritingRank(rank, host))

    def rehearse(self) -> None:
        """Make a small copy before the first step, so that the first save need not load and pin."""
        if self.is_writer:
            self._copier.rehearse()

    def start(self, state: CapturedState, *, copies: bool) -> Kind:
        """On a writing rank: copy what is to be saved, and start to write it; returns where the
        copy is. Without one (`copies` is False, or there is no memory for it) the save is complete
        when this returns. The result of the save before must have been taken."""
        began = time.perf_counter()
        self._num_saves += 1
        self.step = state.step
        if self._num_shards > 1:
            shapes = shapes_of(state.live)
            state = replace(state, documents={**state.documents, SHARDS_FILE: shapes})

        parts = self._divide(state.live)
        part = parts[self._me.rank]
        for tensors in part.values():
            tensor_file.num_bytes(tensors)  # refuses what cannot be saved
        copied = self._copier.take(part) if copies else self._copier.as_they_are(part)
        if self._me.rank == 0:
            self._run_in_thread(partial(self._write, state, copied, parts, began))
        else:
            self._run_in_thread(partial(self._write_part, copied, state.step))

        if copied.kind == "none":
            self.wait()

        return copied.kind

    def wait(self, timeout_s: float | None = None) -> bool:
        """Wait until the save is done; False: it is still running after that time. Any thread may
        wait."""
        if (thread := self._thread) is not None:
            thread.join(timeout_s)
        return not self.is_busy

    def take(self) -> WrittenCheckpoint | None:
        """Wait for the save and return its result, or raise its error; None: there was no save, or
        this rank wrote only a part."""
        self.wait()
        written = self._written
        error = self._error
        self._thread = None
        self._written = None
        self._error = None
        self.has_news = False
        if error is not None:
            raise error

        return written

    def wait_after_failure(self) -> None:
        """Finish the checkpoint that is being written, but do not wait for ranks that have
        exited."""
        if not self.wait(None if len(self._writers) == 1 else LAST_PARTS_S):
            self._end.set()

    def _divide(self, live: Files) -> Parts:
        """The files of each writing rank. A rank that writes alone writes whole files."""
        if self._num_shards > 1:
            return assign_shards(live, self._me.rank, self._num_shards)
        if len(self._writers) > 1:
            return assign(live, [writer.rank for writer in self._writers])

        return {0: live}

    def _run_in_thread(self, work: Callable[[], WrittenCheckpoint | None]) -> None:
        """Start the thread; its result or error is kept."""
        assert self._thread is None

        def run() -> None:
            try:
                self._written = work()
            except BaseException as error:
                self._error = error

            self.has_news = True

        # Not a daemon thread: a process that exits normally first completes the checkpoint.
        self._thread = threading.Thread(target=run, name="drumline-checkpoint")
        self._thread.start()

    def _write(
        self,
        state: CapturedState,
        copied: Copy,
        parts: Parts,
        began: float,
    ) -> WrittenCheckpoint:
        """On rank 0, in the thread."""
        copy_s = copied.wait()
        state.complete()
        path = store.write(
            self._root,
            state.step,
            tensors={**copied.tensors, **state.frozen},
            documents=state.documents,
            metrics=state.metrics,
            non_finite=state.non_finite,
            stream=copied.stream,
            part_writers=self._collector(parts),
        )
        seconds = time.perf_counter() - began
        num_bytes = sum(file.stat().st_size for file in path.iterdir())
        try:
            self._publish(path)
        except CheckpointError as error:
            log.warning(error)  # the new one is safe; an old one that remains is no reason to stop

        return WrittenCheckpoint(state.step, path, num_bytes, copied.kind, seconds, copy_s)

    def _collector(self, parts: Parts) -> Collector | None:
        """What collects the parts of the other writing ranks; None: rank 0 writes alone."""
        me, *other_writers = self._writers
        if not other_writers:
            return None
        expected = {
            writer: {store.file_name(name): group for name, group in parts[writer.rank].items()}
            for writer in other_writers
        }

        return Collector(self._messages(), me, expected)

    def _write_part(self, copied: Copy, step: int) -> None:
        """On another writing rank, in the thread."""
        copied.wait()
        write_own_part(
            self._messages(),
            self._me,
            self._root,
            step,
            tensors=copied.tensors,
            stream=copied.stream,
        )

    def _messages(self) -> SaveMessages:
        assert self._store is not None
        return SaveMessages(self._store, self._num_saves, end=self._end)


class SaveMessages:
    """The messages of one save. `store`: the writing thread's own connection."""

    def __init__(self, store: SealedStore, number: int, *, end: threading.Event) -> None:
        self._store = store.under(f"checkpoint/{number}")
        self._end = end

    def send(self, key: str, value: Any) -> None:
        self._store.set(key, json.dumps(value))

    def wait_for(self, *keys: str) -> tuple[str, Any]:
        """The first of these keys that is set; TimeoutError when the run ends first."""
        while True:
            for key in keys:
                if (value := self._store.peek(key)) is not None:
                    return key, json.loads(value)

            if self._end.is_set():
                raise TimeoutError
            time.sleep(POLL_S)

    def delete(self, *keys: str) -> None:
        """Delete messages that all have read: a run may save many thousand times."""
        for key in keys:
            self._store.delete_key(key)


class Collector:
    """Rank 0's side: announces the folder, and collects what the other ranks write into it."""

    def __init__(
        self,
        messages: SaveMessages,
        me: WritingRank,
        expected: Mapping[WritingRank, Mapping[str, Iterable[str]]],
    ) -> None:
        """`expected`: the files of each of the others, and the tensors in each."""
        self._messages = messages
        self._me = me
        self._expected = expected

    def begin(self) -> None:
        """Called when the folder exists."""
        self._messages.send("open", str(self._me))

    def cancel(self) -> None:
        """Called when the save has failed."""
        with contextlib.suppress(RuntimeError):  # the store has ended, and the other ranks too
            self._messages.send("cancelled", True)

    def collect(self, partial: Path) -> dict[str, FileRecord]:
        """Wait for the files of the others; raises CheckpointError."""
        files: dict[str, FileRecord] = {}
        for writer, expected in self._expected.items():
            names = {file: sorted(tensors) for file, tensors in expected.items()}
            records = self._records_of(writer, names)
            for file, record in records.items():
                self._check_file(partial / file, record, writer)
            files |= records

        with contextlib.suppress(RuntimeError):  # all replies are here
            self._messages.delete("open", *(f"part/{writer.rank}" for writer in self._expected))

        return files

    def _records_of(
        self, writer: WritingRank, expected: dict[str, list[str]]
    ) -> dict[str, FileRecord]:
        """What a writer has written, unless it failed or holds other tensors."""
        try:
            _, reply = self._messages.wait_for(f"part/{writer.rank}")
        except (TimeoutError, RuntimeError) as error:
            raise CheckpointError(
                f"{writer} exited before its part was written",
                next_step="read the output of that rank",
            ) from error

        if "failure" in reply:
            reason, next_step = reply["failure"]
            raise CheckpointError(f"{writer}: {reason}", next_step=next_step)

        if reply["tensors"] != expected:
            raise CheckpointError(
                f"{writer} has other tensors than {self._me}: its model or optimizer differs",
                next_step="build the same model and optimizer on every rank",
            )

        return from_json(dict[str, FileRecord], reply["files"])

    def _check_file(self, path: Path, record: FileRecord, writer: WritingRank) -> None:
        if not _becomes_true(SEEN_S, lambda: path.is_file() and path.stat().st_size == record.size):
            raise CheckpointError(
                f"{path.name}, which {writer} has written, is not in {path.parent} on {self._me.host}: "
                "the nodes do not share this folder",
                next_step=SHARE_THE_FOLDER,
            )


def write_own_part(
    messages: SaveMessages,
    me: WritingRank,
    root: Path,
    step: int,
    *,
    tensors: PartFiles,
    stream: store.Stream,
) -> None:
    """The other writers' side: write into rank 0's folder, and report the files or the failure."""
    partial = store.hidden_folder(root / catalog.folder_name(step), "partial")
    try:
        key, maker = messages.wait_for("open", "cancelled")
        if key == "cancelled":
            return
        if not _becomes_true(SEEN_S, partial.is_dir):
            reason = f"{partial}, which {maker} made, is not visible here: the nodes do not share this folder"
            messages.send(f"part/{me.rank}", {"failure": [reason, SHARE_THE_FOLDER]})
            return

        # Before they are written: writing empties the groups to free their memory.
        names = {store.file_name(name): sorted(group) for name, group in tensors.items()}
        reply: dict[str, Any] = {"tensors": names}
        try:
            files = store.write_tensors(partial, tensors, stream)
            flush_folder(partial)
            reply["files"] = msgspec.to_builtins(files)
        except OSError as error:
            reply["failure"] = list(catalog.explain_os_error(error, folder=root))
        except Exception as error:
            reply["failure"] = [f"{type(error).__name__}: {error}", "read the output of that rank"]

        messages.send(f"part/{me.rank}", reply)
    except (TimeoutError, RuntimeError):  # rank 0 has exited, so there is no save
        pass


def _becomes_true(seconds: float, is_so: Callable[[], bool]) -> bool:
    """Wait for a condition; False: it was not met in this time."""
    deadline = time.monotonic() + seconds
    while not is_so():
        if time.monotonic() > deadline:
            return False
        time.sleep(POLL_S)

    return True
