"""The blocks of a model: the modules that are sharded, and whose activations are computed again,
one by one.

Of a GPT these are `blocks.0` to `blocks.11`: modules of one class in a list, which hold most of the
parameters. The embedding and the last norm are in no block.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Iterable, Sequence
from typing import Any

from torch import nn

from drumline.base.errors import UsageError, did_you_mean
from drumline.base.text import join_names

CONTAINERS = (nn.ModuleList, nn.ModuleDict, nn.ParameterList, nn.ParameterDict)
"""They have no forward pass of their own."""

PLAIN = (nn.Sequential, *CONTAINERS)
"""Their class does not say what is in them."""

INNER_SHARE = 0.8
"""Blocks inside larger ones (in the stages of a network) are taken if they hold this part of what
the larger ones hold."""

FURTHER_SHARE = 0.1
"""Another class (the decoder's beside the encoder's) is taken too if it holds this part of what the
first one holds."""

EXPERT = "expert"
"""In a module's name or class: an expert is called for some samples, and perhaps not on every
rank."""


def find_blocks(model: nn.Module, wrap: Sequence[str] = ()) -> dict[str, nn.Module]:
    """By name, an inner block before the one that holds it. `wrap`: classes by name, or a number of
    parameters from which on a module is a block; by default the modules that repeat in the model's
    lists and hold most parameters.

        find_blocks(model)              {"blocks.11": Block(...), ..., "blocks.0": Block(...)}
        find_blocks(model, ["Linear"])  every nn.Linear
        find_blocks(model, ["1000000"]) what holds a million parameters, the smallest such modules
    """
    if not wrap:
        chosen = _repeated(model)
    elif len(wrap) == 1 and wrap[0].isdecimal():
        chosen = _by_size(model, int(wrap[0]))
    else:
        chosen = _by_class(model, set(wrap))

    # A parameter that a module outside the block has, too, is sharded with the rest of the model
    # (tied weights).
    everywhere = _uses(model)

    return {
        name: block
        for name, block in chosen.items()
        if all(everywhere[parameter] == count for parameter, count in _uses(block).items())
    }


def describe_blocks(blocks: Iterable[nn.Module]) -> str:
    """`12 x Block`, `6 x DecoderLayer and 6 x EncoderLayer`; `none`."""
    names = (type(block).__name__ for block in blocks)

    # The class of a sharded block is called FSDPBlock.
    counts = Counter(name.removeprefix("FSDP") for name in names)
    ordered = sorted(counts.items(), key=lambda item: (-item[1], item[0]))
    return join_names(f"{count} x {name}" for name, count in ordered) or "none"


def is_sharded_block(module: nn.Module) -> bool:
    """Whether the module holds shards: `fully_shard` has changed its class."""
    return hasattr(module, "set_requires_gradient_sync")


class _Candidate:
    """Modules that may be the blocks: all of one class, or those of one list of plain
    `nn.Sequential`. The parameters of all of them count together."""

    def __init__(self, modules: dict[str, nn.Module], listed: set[int]) -> None:
        """`listed`: the `id` of each module that is in a list."""
        self.modules = modules
        self.sizes = {
            id(value): value.numel() for module in modules.values() for value in module.parameters()
        }
        """The elements of each parameter, by its id."""

        self.size = sum(self.sizes.values())
        """Of all parameters together."""

        first = next(iter(modules.values()))
        is_of_torch = type(first).__module__.startswith("torch.")
        self.is_layer = is_of_torch and next(first.children(), None) is None
        """Single layers, as torch.nn has them; a class of the user's may compute with its own
        parameters."""

        is_listed = any(id(module) in listed for module in modules.values())
        if len(modules) > 1:
            self.preference = 3 if is_listed else 2
        else:
            self.preference = 1 if is_listed and type(first) not in PLAIN else 0
        """3: they repeat in lists; 2: they repeat elsewhere; 1: there is one, in a list."""

    def holds(self, candidate: _Candidate) -> bool:
        """Whether each of its modules is inside one of these: `CausalAttention` in `Block`."""
        prefixes = tuple(f"{name}." for name in self.modules)
        return all(name.startswith(prefixes) for name in candidate.modules)

    def size_outside(self, blocks: list[_Candidate]) -> int:
        """The elements of the parameters that are in no block. A parameter that several modules
        have counts once."""
        outside = self.sizes.keys() - {key for block in blocks for key in block.sizes}
        return sum(self.sizes[key] for key in outside)


def _repeated(model: nn.Module) -> dict[str, nn.Module]:
    """The modules that repeat in lists, by class: those that hold the most parameters, and further
    classes beside them. Without lists those that repeat anywhere, otherwise one in a list. Single
    layers only where there is nothing larger: to compute a layer's activations again saves
    nothing."""
    layers = []
    larger = []
    for candidate in _candidates(model):
        if not candidate.is_layer:
            larger.append(candidate)
        elif candidate.preference == 3:
            layers.append(candidate)

    most = max((candidate.preference for candidate in larger), default=0)
    chosen = _choose([candidate for candidate in larger if candidate.preference == most > 0])

    largest = max(layers, key=lambda candidate: candidate.size, default=None)
    if largest is not None and largest.size_outside(chosen) > sum(block.size for block in chosen):
        chosen = [largest]

    names = {name for candidate in chosen for name in candidate.modules}
    return _inside_out({name: module for name, module in model.named_modules() if name in names})


def _candidates(model: nn.Module) -> list[_Candidate]:
    """The modules of each class. A plain container's class says nothing: those in one list are of
    one kind.

        Block: blocks.0, blocks.1, ...    CausalAttention: blocks.0.attention, ...    LayerNorm: ...
    """
    listed = {
        id(member)
        for parent in model.modules()
        if isinstance(parent, PLAIN)
        for member in parent.children()
    }

    kinds: dict[Any, dict[str, nn.Module]] = defaultdict(dict)
    for name, module in model.named_modules():
        if module is model or not _may_be_block(name, module):
            continue

        kind: Any = type(module)
        if kind is nn.Sequential:
            if id(module) not in listed:
                continue

            kind = name.rpartition(".")[0]  # the list that it is in

        kinds[kind][name] = module

    return [_Candidate(modules, listed) for modules in kinds.values()]


def _may_be_block(name: str, module: nn.Module) -> bool:
    """Whether it holds parameters, is called by itself, and is no expert."""
    kind = type(module)
    if kind in CONTAINERS or not _size(module):
        return False

    return EXPERT not in name.lower() and EXPERT not in kind.__name__.lower()


def _choose(candidates: list[_Candidate]) -> list[_Candidate]:
    """The largest, or what holds most of it inside, and further ones that share nothing with these:
    of a translation model `DecoderLayer`, which holds most, and `EncoderLayer` beside it."""
    by_size = sorted(candidates, key=lambda candidate: -candidate.size)
    chosen: list[_Candidate] = []
    for candidate in by_size:
        if not chosen:
            chosen.append(_innermost(candidate, by_size))

        is_apart = candidate.size_outside(chosen) == candidate.size
        if is_apart and candidate.size >= FURTHER_SHARE * chosen[0].size:
            chosen.append(candidate)

    return chosen


def _innermost(outer: _Candidate, by_size: list[_Candidate]) -> _Candidate:
    """The largest kind inside this one that holds most of it; else this one. Of `Stage`, which
    holds four `Block` each and little else, it is `Block`."""
    for candidate in by_size:
        is_large = candidate.size >= INNER_SHARE * outer.size
        if candidate is not outer and outer.holds(candidate) and is_large:
            return _innermost(candidate, by_size)

    return outer


def _by_class(model: nn.Module, names: set[str]) -> dict[str, nn.Module]:
    """All modules of the classes with these names; there must be one of each."""
    blocks = {}
    for name, module in model.named_modules():
        if module is not model and type(module).__name__ in names and _size(module):
            blocks[name] = module

    unknown = names - {type(module).__name__ for module in blocks.values()}
    if unknown:
        classes = {type(module).__name__ for module in model.modules() if _size(module)}
        name = min(unknown)
        raise UsageError(
            f"--dist.wrap: {type(model).__name__} has no module of class {name!r}: "
            f"{did_you_mean(name, sorted(classes))}",
            next_step="name classes of the model's modules, or give a number of parameters",
        )

    return _inside_out(blocks)


def _inside_out(modules: dict[str, nn.Module]) -> dict[str, nn.Module]:
    """An inner module before the one that holds it, which is the order in which `fully_shard` takes
    them."""
    return dict(reversed(modules.items()))


def _by_size(model: nn.Module, least: int) -> dict[str, nn.Module]:
    """From the inside out: modules whose parameters that are in no smaller block reach this number.
    An embedding is left to its model, which may use its weight elsewhere, as an output layer for
    example."""
    blocks: dict[str, nn.Module] = {}
    taken: set[int] = set()
    for name, module in reversed(list(model.named_modules())):
        if module is model or isinstance(module, (*CONTAINERS, nn.Embedding)):
            continue

        sizes = {
            id(value): value.numel() for value in module.parameters() if id(value) not in taken
        }

        if sum(sizes.values()) >= least:
            blocks[name] = module
            taken |= sizes.keys()

    return blocks


def _size(module: nn.Module) -> int:
    """The elements of its parameters, with those of the modules in it."""
    return sum(value.numel() for value in module.parameters())


def _uses(root: nn.Module) -> Counter[int]:
    """How many modules have each parameter, by its `id`."""
    return Counter(
        id(value)
        for module in root.modules()
        for _, value in module.named_parameters(recurse=False, remove_duplicate=False)
    )
