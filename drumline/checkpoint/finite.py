"""Whether tensors are finite: a checkpoint with a NaN or an infinity in it is marked, and steps are
checked too."""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Iterable, Mapping

import torch
from torch import Tensor

from drumline.parallel.shards import own_part
from drumline.rank.torch_internals import norm_of_each


def largest(tensors: Iterable[Tensor]) -> Tensor:
    """The largest absolute value in all these tensors, on the device; NaN if there is one."""
    by_type: dict[tuple[torch.dtype, torch.device], list[Tensor]] = defaultdict(list)
    for tensor in tensors:
        if tensor.numel():
            by_type[tensor.dtype, tensor.device].append(tensor)

    values = [torch.stack(norm_of_each(group, math.inf)).max() for group in by_type.values()]
    if not values:
        return torch.zeros(())

    device = values[0].device
    return torch.stack([value.to(device).double() for value in values]).max()


@torch.no_grad()
def first_non_finite(tensors: Mapping[str, Tensor]) -> str | None:
    """The name of the first tensor with a NaN or an infinity in what this rank holds of it. Waits
    for the device, only once if there is none."""
    numbers: dict[str, Tensor] = {}
    for name, tensor in tensors.items():
        part = own_part(tensor)
        if part.is_complex():
            part = torch.view_as_real(part)
        if part.is_floating_point() and part.numel():
            numbers[name] = part

    if not numbers or math.isfinite(float(largest(numbers.values()))):
        return None

    for name, tensor in numbers.items():
        if not bool(torch.isfinite(tensor).all()):
            return name

    return None
