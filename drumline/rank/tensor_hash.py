"""A fast hash of tensors, computed on their device without waiting for it, to compare two copies
bit for bit.

A tensor's bytes are read as 32-bit words in rows of 4096. Level 1: the words of a row are
multiplied by a fixed table of mixed odd 64-bit numbers and added up. Level 2: each row's sum is
mixed with its number by a bijection of 64 bits, and these are added up, modulo 2**64. Sums of
integers wrap around, so neither the order of additions nor the number of threads matters.

A flipped bit is always found: it changes one word by plus or minus `2^k` with k < 32, and so its
row's sum by `2^k` times an odd number, which is not 0 modulo `2^64`. Damage in several words of one
row is missed by chance only: once in `2^32` for two sign bits, less often otherwise, since the
table's 64 bits leave at least 32 above any bit of a word. (64-bit words would not do: two flips of
bit 63 would always cancel.) It does not protect against an attacker who builds two tensors with the
same hash.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from functools import lru_cache
from itertools import accumulate

import blake3
import torch
from torch import Tensor

COLUMNS = 4096
WORD_BYTES = 4
ROW_BYTES = COLUMNS * WORD_BYTES

# How much is processed at once. Products, and on a CPU their words too, are 64 bits wide: 32 MiB
# each.
CHUNK_BYTES = 1024 * ROW_BYTES


@torch.no_grad()
def hash_tensors(tensors: Sequence[Tensor], device: torch.device) -> Tensor:
    """One int64 for each tensor, on `device`: a hash of its bits in index order, its type and its
    shape."""
    hashes: dict[int, Tensor] = {}

    # By device, so that the few on another device (an optimizer's counters, on the CPU) are copied
    # at once.
    for source in {tensor.device for tensor in tensors}:
        chosen = [number for number, tensor in enumerate(tensors) if tensor.device == source]
        device_hashes = _hash_on_device([tensors[number] for number in chosen], source)

        # Wait for a copy to the CPU: otherwise its numbers would be read before they have arrived.
        device_hashes = device_hashes.to(device, non_blocking=device.type != "cpu")
        hashes.update(zip(chosen, device_hashes.unbind(), strict=True))

    if not hashes:
        return _on(device, [])
    return torch.stack([hashes[number] for number in range(len(tensors))])


@torch.no_grad()
def combine(hashes: Tensor, names: Sequence[str]) -> Tensor:
    """One int64 for many hashes, in any order: each is mixed with its name, then added. One changed
    hash is always found, since the mixing is a bijection."""
    name_hashes = _on(hashes.device, [text_hash(name) for name in names])
    return _mix(hashes ^ _mix(name_hashes)).sum()


def text_hash(text: str) -> int:
    """A signed 64-bit number of a text, the same on every machine."""
    return int.from_bytes(blake3.blake3(text.encode()).digest(8), "little", signed=True)


def _hash_on_device(tensors: Sequence[Tensor], device: torch.device) -> Tensor:
    """Level 1 for many tensors at once, level 2 for the rows of all of them: most tensors are
    small, and launching a kernel takes the same time for a small one."""
    raws = [as_bytes(tensor) for tensor in tensors]
    multipliers = _multipliers(device)
    sums = [(words * multipliers).sum(dim=1) for words in _blocks(raws)]
    rows = torch.cat(sums) if sums else _on(device, [])

    # The tensor that each row is of, and the row's number in it.
    lengths = [-(-raw.numel() // ROW_BYTES) for raw in raws]
    *starts, total = accumulate(lengths, initial=0)
    owners = torch.repeat_interleave(_on(device, lengths), output_size=total)
    places = torch.arange(total, device=device) - _on(device, starts)[owners]

    hashes = _on(device, [text_hash(f"{tensor.dtype} {list(tensor.shape)}") for tensor in tensors])
    return hashes.index_add_(0, owners, _mix(rows ^ _mix(places)))


def _on(device: torch.device, numbers: list[int]) -> Tensor:
    return torch.tensor(numbers, dtype=torch.int64).to(device, non_blocking=True)


def as_bytes(tensor: Tensor) -> Tensor:
    """A tensor's content in the order of its indices, as bytes, on its device; the same memory, if
    the tensor has no gaps."""
    dense = tensor.detach().resolve_conj().resolve_neg().contiguous()

    # A tensor of one element has no gaps whatever its stride, but `view` takes no other than 1.
    return dense.as_strided((dense.numel(),), (1,)).view(torch.uint8)


def _blocks(raws: Sequence[Tensor]) -> Iterator[Tensor]:
    """The rows of all tensors one after another, a limited number at a time, as 32-bit words. Each
    tensor begins a new row, and its last one is padded with zeros, which add nothing to a sum. The
    hash includes the shape, so padding and a tensor's own zeros differ."""
    waiting: list[Tensor] = []
    size = 0
    for raw in raws:
        whole = raw.numel() // CHUNK_BYTES * CHUNK_BYTES
        if waiting and (whole or size + raw.numel() > CHUNK_BYTES):
            yield _words(torch.cat(waiting))
            waiting = []
            size = 0

        for low in range(0, whole, CHUNK_BYTES):
            yield _words(raw[low : low + CHUNK_BYTES])

        if rest := raw.numel() - whole:
            missing = -rest % ROW_BYTES
            waiting += [raw[whole:], _zeros(raw.device)[:missing]]
            size += rest + missing

    if waiting:
        yield _words(torch.cat(waiting))


def _words(raw: Tensor) -> Tensor:
    """Rows of 32-bit words, sharing memory with the bytes where they are aligned."""
    if raw.storage_offset() % WORD_BYTES:
        raw = raw.clone()  # not aligned to words: a chunk is copied, not the tensor
    return raw.view(torch.int32).view(-1, COLUMNS)


@lru_cache(maxsize=16)
def _zeros(device: torch.device) -> Tensor:
    return torch.zeros(ROW_BYTES, dtype=torch.uint8, device=device)


@lru_cache(maxsize=16)
def _multipliers(device: torch.device) -> Tensor:
    return _mix(torch.arange(COLUMNS, device=device)) | 1


def _mix(numbers: Tensor) -> Tensor:
    """A bijection of 64 bits after which every bit depends on every other (the finish of
    SplitMix64)."""
    mixed = numbers + (0x9E3779B97F4A7C15 - 2**64)  # signed, as torch's numbers are
    mixed = (mixed ^ _shift(mixed, 30)) * (0xBF58476D1CE4E5B9 - 2**64)
    mixed = (mixed ^ _shift(mixed, 27)) * (0x94D049BB133111EB - 2**64)
    return mixed ^ _shift(mixed, 31)


def _shift(numbers: Tensor, bits: int) -> Tensor:
    """To the right, with zeros from the left: torch's own shift repeats the sign."""
    return (numbers >> bits) & ((1 << (64 - bits)) - 1)
