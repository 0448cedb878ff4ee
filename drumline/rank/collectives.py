"""Collectives besides the gradients' all-reduce: sums, JSON, a checkpoint's tensors, values to
compare; and how many a rank has begun. No pickle.

Every function here but `collective_counter` is collective: all ranks call it, in the same order.
With a single rank nothing is sent, and it does not wait for its device. NCCL sends from the rank's
GPU, gloo from the host.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import blake3
import torch
import torch.distributed as dist
from torch import Tensor, nn

from drumline.base.errors import PreflightError
from drumline.base.text import by_rank
from drumline.rank.tensor_hash import as_bytes, hash_tensors
from drumline.rank.torch_internals import sequence_number_of

PIECE_BYTES = 1 << 24
"""Of what `gather_on_main` sends at once from each rank."""


def all_sum(tensor: Tensor) -> Tensor:
    """Collective: the sum of `tensor` over all ranks, in place."""
    if not _is_alone():
        dist.all_reduce(tensor)
    return tensor


def gather_tensors(tensor: Tensor) -> list[Tensor]:
    """Collective: every rank's tensor, all of one shape and type, on every rank, back on the
    CPU."""
    if _is_alone():
        return [tensor.cpu()]

    own_tensor = tensor.to(_device())
    parts = [torch.empty_like(own_tensor) for _ in range(dist.get_world_size())]
    dist.all_gather(parts, own_tensor)
    return [part.cpu() for part in parts]


def gather_json(value: Any) -> list[Any]:
    """Collective: every rank's value, on every rank."""
    if _is_alone():
        return [value]

    encoded = _encode(value)
    sizes = [int(size) for size in gather_tensors(torch.tensor([encoded.numel()]))]

    padded = torch.zeros(max(sizes), dtype=torch.uint8)
    padded[: encoded.numel()] = encoded
    parts = gather_tensors(padded)
    return [_decode(part[:size]) for part, size in zip(parts, sizes, strict=True)]


def gather_on_main(content: Tensor, sizes: Sequence[int]) -> list[Tensor]:
    """Collective: the bytes of every rank, which have these sizes, on rank 0, on the CPU; nothing
    on the others. They travel in pieces, so that a device holds little of them at once."""
    if _is_alone():
        return [content]

    is_main = dist.get_rank() == 0
    nothing = [0] * len(sizes)
    device = _device()

    received = [torch.empty(size, dtype=torch.uint8) for size in sizes] if is_main else []
    for start in range(0, max(sizes), PIECE_BYTES):
        lengths = nothing
        if is_main:
            lengths = [max(0, min(size - start, PIECE_BYTES)) for size in sizes]

        own_piece = content[start : start + PIECE_BYTES].to(device)
        pieces = own_piece.new_empty(sum(lengths))

        # Each rank sends as many bytes as it has, to rank 0 only; a gather would send as many as
        # the longest.
        dist.all_to_all_single(pieces, own_piece, lengths, [len(own_piece), *nothing[1:]])

        for whole, piece in zip(received, torch.split(pieces, lengths), strict=False):
            whole[start : start + PIECE_BYTES] = piece

    return received


def broadcast_json(value: Any, *, source: int = 0) -> Any:
    """Collective: this rank's value, on every rank; the other ranks' values are ignored."""
    if _is_alone():
        return value

    is_source = dist.get_rank() == source
    encoded = _encode(value if is_source else None)

    device = _device()
    size = torch.tensor([encoded.numel()], device=device)
    dist.broadcast(size, source)

    buffer = torch.empty(int(size), dtype=torch.uint8, device=device)
    if is_source:
        buffer.copy_(encoded)
    dist.broadcast(buffer, source)
    return _decode(buffer.cpu())


def broadcast_tensors(
    tensors: Mapping[str, Tensor] | None,
    *,
    source: int = 0,
    keeps: bool = True,
) -> dict[str, Tensor]:
    """Collective: the tensors of rank `source` by name, on every rank, on the CPU; other ranks give
    None. A rank that does not `keep` them only takes part, and gets none."""
    if _is_alone():
        return dict(tensors or {})

    described = {
        name: [str(tensor.dtype).removeprefix("torch."), list(tensor.shape)]
        for name, tensor in (tensors or {}).items()
    }
    is_source = dist.get_rank() == source
    device = _device()

    received = {}
    for name, (dtype, shape) in broadcast_json(described, source=source).items():
        if tensors is not None and is_source:
            buffer = tensors[name].to(device).contiguous()
        else:
            buffer = torch.empty(shape, dtype=getattr(torch, dtype), device=device)

        # As bytes: no backend supports every type.
        dist.broadcast(as_bytes(buffer), source)
        if keeps:
            received[name] = buffer.cpu()

    return received


def check_same(values: Mapping[str, Any], *, host: str, next_step: str) -> None:
    """Collective: raise on every rank if any of these (JSON) values differs between ranks."""
    digest = blake3.blake3(json.dumps(values, sort_keys=True).encode()).hexdigest(16)
    if len(set(gather_json(digest))) == 1:
        return

    reports = gather_json({"host": host, "values": dict(values)})
    hosts = [report["host"] for report in reports]

    names = dict.fromkeys(name for report in reports for name in report["values"])
    for name in names:
        by_ranks = [report["values"].get(name) for report in reports]
        if any(value != by_ranks[0] for value in by_ranks):
            what = f"ranks differ in {name}: {by_rank(by_ranks, hosts)}"
            raise PreflightError(what, next_step=next_step)


def check_same_weights(model: nn.Module, *, host: str, device: torch.device) -> None:
    """Collective: raise on every rank if the models do not start from the same bits, naming the
    first difference."""
    if _is_alone():
        return

    tensors = {**dict(model.named_parameters()), **dict(model.named_buffers())}
    hashes = hash_tensors(list(tensors.values()), device).tolist()

    facts = {}
    for (name, tensor), number in zip(tensors.items(), hashes, strict=True):
        unsigned = number & (2**64 - 1)
        what = f"the initial weights; first difference in {name}"
        facts[what] = f"{list(tensor.shape)} {unsigned:016x}"

    next_step = "build the model after the seed is set and from the same settings on every rank"
    check_same(facts, host=host, next_step=next_step)


def collective_counter() -> Callable[[], int]:
    """A function that returns how many collectives this rank has begun in the default group;
    without a group, 0. Keep the function: finding it takes longer than calling it."""
    all_ranks = dist.group.WORLD
    return (lambda: 0) if all_ranks is None else sequence_number_of(all_ranks)


def _is_alone() -> bool:
    """Whether there is no other rank."""
    return not dist.is_initialized() or dist.get_world_size() == 1


def _device() -> torch.device:
    """Where the group takes its tensors from; NCCL's GPU was set current when it was chosen."""
    if dist.get_backend() != "nccl":
        return torch.device("cpu")
    return torch.device("cuda", torch.cuda.current_device())


def _encode(value: Any) -> Tensor:
    """As JSON, in a tensor of bytes."""
    return torch.frombuffer(bytearray(json.dumps(value).encode()), dtype=torch.uint8)


def _decode(encoded: Tensor) -> Any:
    return json.loads(encoded.numpy().tobytes())
