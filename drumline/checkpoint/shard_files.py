"""Which tensors of a checkpoint each rank writes, if several do.

All ranks hold the same replica, so any of them can write any tensor, each into its own file. Of a
sharded model every rank writes the rows that it holds, as `NAME[START:STOP]`, and a document has
the shapes of the whole tensors. A reader gets whole tensors, or any rows of them, whatever wrote
them.
"""

from __future__ import annotations

import heapq
import re
from collections.abc import Iterator, Mapping, Sequence
from typing import Annotated, Any, NamedTuple

import msgspec
import torch
from torch import Tensor

from drumline.base.errors import CheckpointError
from drumline.base.untrusted import from_json
from drumline.checkpoint.tensor_file import Tensors
from drumline.parallel.shards import Rows, is_shard, like_shard, own_part, place_of, split_rows

SHARDS_FILE = "sharded-tensors"
"""The document with the shapes, by file and name."""

_PART = re.compile(r"-part-\d{5,}$")
_PIECE = re.compile(r"(.*)\[(\d{1,18}):(\d{1,18})\]", re.DOTALL)

Files = Mapping[str, Tensors]
PartFiles = dict[str, dict[str, Tensor]]
"""What one rank writes."""

_Size = Annotated[int, msgspec.Meta(ge=0)]
Shapes = dict[str, dict[str, Annotated[list[_Size], msgspec.Meta(min_length=1)]]]
"""Of the whole tensors, by file and name."""


def part_name(file: str, rank: int) -> str:
    """Of the file with what this rank writes of a file."""
    return f"{file}-part-{rank:05d}"


def whole_name(part: str) -> str:
    """The file that this is a part of, or which it is itself."""
    return _PART.sub("", part)


def assign(tensors: Files, ranks: Sequence[int]) -> dict[int, PartFiles]:
    """Assign the tensors of every file to these ranks, about the same bytes to each; the same on
    every rank."""
    assigned: dict[int, PartFiles] = {rank: {} for rank in ranks}
    loads = [(0, position, rank) for position, rank in enumerate(ranks)]
    largest_first = sorted(
        (-tensor.nbytes, file, name)
        for file, group in tensors.items()
        for name, tensor in group.items()
    )

    for _, file, name in largest_first:
        tensor = tensors[file][name]
        load, position, rank = heapq.heappop(loads)
        assigned[rank].setdefault(part_name(file, rank), {})[name] = tensor
        heapq.heappush(loads, (load + tensor.nbytes, position, rank))

    for file, group in tensors.items():
        if not group:  # a file without tensors is part of the checkpoint too
            assigned[ranks[0]][file] = {}

    return assigned


def assign_shards(tensors: Files, rank: int, num_writers: int) -> dict[int, dict[str, Any]]:
    """The files of each writer of a sharded model: `rank` gets its own tensors, for the others
    there are their names. Rank 0 writes what is not sharded, too."""
    assigned: dict[int, dict[str, dict[str, Any]]] = {writer: {} for writer in range(num_writers)}
    for file, group in tensors.items():
        for name, tensor in group.items():
            pieces = {0: name}
            if is_in_shards(name, tensor):
                pieces = piece_names(name, tensor)

            rows_here = own_part(tensor)
            for writer, piece in pieces.items():
                part = assigned[writer].setdefault(part_name(file, writer), {})
                part[piece] = rows_here if writer == rank else None

        if not group:  # a file without tensors is part of the checkpoint too
            assigned[0][file] = {}

    return assigned


def is_in_shards(name: str, tensor: Tensor) -> bool:
    """Whether several ranks write it; otherwise rank 0 does."""
    try:
        return place_of(tensor)[1] > 1 and tensor.shape[0] > 0
    except ValueError as error:
        raise CheckpointError(
            f"{name} cannot be saved: {error}",
            next_step="use an optimizer whose state has the shapes of the parameters, or --dist.mode ddp",
        ) from error


def shapes_of(files: Files) -> Shapes:
    """The document: the shapes of what is saved in shards."""
    shapes: Shapes = {}
    for file, group in files.items():
        sharded = [name for name, tensor in group.items() if is_in_shards(name, tensor)]
        shapes[file] = {name: list(group[name].shape) for name in sharded}
    return shapes


def piece_names(name: str, tensor: Tensor) -> dict[int, str]:
    """The name of each shard in its file, by the number of the shard; an empty one is not saved."""
    _, count = place_of(tensor)
    names = {}
    for number in range(count):
        rows = split_rows(tensor.shape[0], number, count)
        if rows.stop > rows.start:
            names[number] = f"{name}[{rows.start}:{rows.stop}]"
    return names


def assemble(files: Files, shapes: Any) -> dict[str, Tensors]:
    """The files of a checkpoint with whole tensors; ValueError: a shard is missing, or has another
    shape."""
    by_file = from_json(Shapes, shapes)
    return {file: ShardedTensors(group, by_file.get(file, {})) for file, group in files.items()}


class StoredShard(NamedTuple):
    """Some rows of a tensor, as a file has them."""

    rows: Rows
    tensor: Tensor


class ShardedTensors(Tensors):
    """Tensors by name, some of them in shards, which are put together when asked for."""

    def __init__(self, stored: Tensors, shapes: Mapping[str, list[int]]) -> None:
        self._whole = dict(stored)
        """Those that are not in shards."""

        self._shapes = shapes
        """Of the whole tensors of all others."""

        self._shards: dict[str, list[StoredShard]] = {name: [] for name in shapes}
        """Of each, in the order of their rows."""

        for stored_name in stored:
            match = _PIECE.fullmatch(stored_name)
            if match is None or match[1] not in shapes:
                continue

            rows = Rows(int(match[2]), int(match[3]))
            shard = StoredShard(rows, self._whole.pop(stored_name))
            self._shards[match[1]].append(shard)

        for name, shards in self._shards.items():
            shards.sort(key=lambda shard: shard.rows)
            _check_shards(name, shards, shapes[name])

    def __getitem__(self, name: str) -> Tensor:
        """A whole tensor."""
        if name in self._whole:
            return self._whole[name]
        return self.rows(name, Rows(0, self.shape(name)[0]))

    def __iter__(self) -> Iterator[str]:
        """The names of the whole tensors."""
        return iter([*self._whole, *self._shards])

    def __len__(self) -> int:
        return len(self._whole) + len(self._shards)

    def shape(self, name: str) -> torch.Size:
        """Of the whole tensor."""
        if name in self._whole:
            return self._whole[name].shape
        return torch.Size(self._shapes[name])

    def rows(self, name: str, rows: Rows) -> Tensor:
        """These rows of a tensor; of others nothing is read."""
        if name in self._whole:
            return self._whole[name][rows.start : rows.stop]

        parts = []
        for held, tensor in self._shards[name]:
            if held.start < rows.stop and held.stop > rows.start:
                start = max(rows.start, held.start) - held.start
                parts.append(tensor[start : rows.stop - held.start])

        if not parts:
            return self._shards[name][0].tensor[:0]
        return parts[0] if len(parts) == 1 else torch.cat(parts)


def _check_shards(name: str, shards: list[StoredShard], shape: list[int]) -> None:
    """Refuse gaps and overlaps, and shards of another type or shape."""
    end = 0
    for rows, tensor in shards:
        if rows.start != end:
            raise ValueError(f"rows {end} to {rows.start} of {name} are missing or there twice")

        end = rows.stop
        has_shape = list(tensor.shape) == [end - rows.start, *shape[1:]]
        if not has_shape or tensor.dtype != shards[0].tensor.dtype:
            raise ValueError(f"rows {rows.start} to {end} of {name} have another shape or type")

    if end != shape[0] or not shards:
        raise ValueError(f"rows {end} to {shape[0]} of {name} are missing")


def own_shards(tensors: Tensors, parameters: Tensors) -> dict[str, Tensor]:
    """The saved tensors as a sharded model takes them: what belongs to a sharded parameter and has
    its shape (the weights, an optimizer's state, an average) as a shard of this rank, of which only
    its own rows are read."""
    lazy = tensors if isinstance(tensors, ShardedTensors) else ShardedTensors(tensors, {})
    return {name: _own_shard(lazy, name, parameters) for name in lazy}


def _own_shard(tensors: ShardedTensors, name: str, parameters: Tensors) -> Tensor:
    """One tensor as this rank takes it. State of a parameter is called `PARAMETER/KEY`."""
    owners = [parameters[part] for part in (name, *name.split("/")) if part in parameters]
    if not owners:
        return tensors[name]

    parameter = owners[0]
    if not is_shard(parameter) or tensors.shape(name) != parameter.shape:
        return tensors[name]

    number, count = place_of(parameter)
    rows = split_rows(parameter.shape[0], number, count)
    return like_shard(parameter, tensors.rows(name, rows))
