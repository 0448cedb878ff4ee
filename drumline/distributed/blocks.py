"""The blocks of a model: the modules that are sharded, and whose activations are computed again, one by one."""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Sequence

from torch import nn

from drumline.errors import UsageError, did_you_mean

LISTS = (nn.ModuleList, nn.Sequential)
CONTAINERS = (nn.ModuleList, nn.ModuleDict, nn.ParameterList, nn.ParameterDict)
"""They have no forward pass of their own."""


def find_blocks(model: nn.Module, wrap: Sequence[str] = ()) -> dict[str, nn.Module]:
    """By name, an inner block before the one that holds it. `wrap`: classes by name, or a number of parameters from
    which on a module is a block; by default the class that is most frequent in the model's lists of modules."""
    if len(wrap) == 1 and wrap[0].isdecimal():
        chosen = _by_size(model, int(wrap[0]))
    else:
        chosen = _by_class(model, set(wrap) or _repeated_class(model))
        if wrap and (unknown := set(wrap) - {type(module).__name__ for module in chosen.values()}):
            known = {type(module).__name__ for module in model.modules() if next(module.parameters(), None) is not None}
            name = min(unknown)
            raise UsageError(
                f"--dist.wrap: {type(model).__name__} has no module of class {name!r}: "
                f"{did_you_mean(name, sorted(known))}",
                next_step="name classes of the model's modules, or give a number of parameters",
            )
    # A parameter that a module outside the block has, too, is sharded with the rest of the model (tied weights).
    everywhere = _uses(model)
    return {
        name: block for name, block in chosen.items() if all(everywhere[one] == n for one, n in _uses(block).items())
    }


def _repeated_class(model: nn.Module) -> set[str]:
    """The class that occurs most often in lists of modules, and more than once; in a tie the one with the most
    parameters."""
    members = (one for group in model.modules() if isinstance(group, LISTS) for one in group.children())
    sizes: dict[str, list[int]] = defaultdict(list)
    for one in members:
        if not isinstance(one, (*LISTS, *CONTAINERS)) and (size := _size(one)):
            sizes[type(one).__name__].append(size)
    repeated = {name: (len(found), sum(found)) for name, found in sizes.items() if len(found) > 1}
    return {max(repeated, key=lambda name: repeated[name])} if repeated else set()


def _by_class(model: nn.Module, names: set[str]) -> dict[str, nn.Module]:
    found = {
        name: module
        for name, module in model.named_modules()
        if module is not model and type(module).__name__ in names and _size(module)
    }
    return dict(reversed(found.items()))


def _by_size(model: nn.Module, least: int) -> dict[str, nn.Module]:
    """From the inside out: modules whose parameters that are in no smaller block reach this number. An embedding is
    left to its model, which may use its weight elsewhere, as an output layer for example."""
    found: dict[str, nn.Module] = {}
    taken: set[int] = set()
    for name, module in reversed(list(model.named_modules())):
        if module is model or isinstance(module, (*CONTAINERS, nn.Embedding)):
            continue
        own = {id(one): one.numel() for one in module.parameters() if id(one) not in taken}
        if sum(own.values()) >= least:
            found[name] = module
            taken |= own.keys()
    return found


def _size(module: nn.Module) -> int:
    return sum(one.numel() for one in module.parameters())


def _uses(root: nn.Module) -> Counter[int]:
    """How many modules have each parameter."""
    return Counter(id(one) for module in root.modules() for one in module._parameters.values() if one is not None)
