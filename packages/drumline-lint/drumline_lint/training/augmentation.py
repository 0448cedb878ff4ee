"""Which data is changed at random when it is read, and by which generator."""

from __future__ import annotations

import ast

from drumline_lint.program.arguments import argument
from drumline_lint.program.program import Program
from drumline_lint.program.value import Class
from drumline_lint.running.loops import done_in
from drumline_lint.running.order import Run

TRANSFORMS = ("torchvision.transforms.", "torchvision.transforms.v2.")
_RANDOM_TRANSFORMS = ("Random", "ColorJitter", "AutoAugment", "RandAugment", "TrivialAugment", "AugMix")
_ALBUMENTATIONS = (
    "Random",
    "HorizontalFlip",
    "VerticalFlip",
    "Rotate",
    "ShiftScaleRotate",
    "Flip",
    "ColorJitter",
)
_TORCH_DRAWS = ("rand", "randn", "randint", "randperm", "bernoulli", "normal", "multinomial", "rand_like")
_OWN_GENERATORS = (
    "numpy.random.default_rng",
    "numpy.random.RandomState",
    "numpy.random.Generator",
    "random.Random",
)


def augmentations(program: Program, run: Run) -> dict[str, str]:
    """In a run: by which generator something is drawn for the data, and what is."""
    found: dict[str, str] = {}
    for step in run:
        for kind, what in _drawn_by(program, step.call).items():
            found.setdefault(kind, what)
    return found


def _drawn_by(program: Program, call: ast.Call) -> dict[str, str]:
    """By a transform that a call makes, or by the dataset that it makes."""
    name = program.name_of(call.func)
    last = name.rpartition(".")[2]
    if name.startswith(TRANSFORMS) and last.startswith(_RANDOM_TRANSFORMS):
        return {"torch": last}
    if name.startswith("albumentations.") and last.startswith(_ALBUMENTATIONS):
        return {"random": last}
    found: dict[str, str] = {}
    for value in program.values(call.func):
        if isinstance(value, Class):
            found |= _drawn_in_dataset(program, value.node)
    return found


def _drawn_in_dataset(program: Program, node: ast.ClassDef) -> dict[str, str]:
    return program.remember(("drawn in", node), lambda: _find_drawn(program, node))


def _find_drawn(program: Program, node: ast.ClassDef) -> dict[str, str]:
    """What is drawn in `__getitem__`, or in what that calls; unless the item's number is its seed."""
    read = program.method(node, "__getitem__")
    found: dict[str, str] = {}
    for call in done_in(program, read) if read is not None else ():
        name = program.name_of(call.func)
        if name.endswith(("seed", "set_rng_state")):
            return {}
        if kind := _generator_of(name, call):
            found.setdefault(kind, f"{name} in {node.name}.__getitem__")
    return found


def _generator_of(name: str, call: ast.Call) -> str:
    if name.startswith(_OWN_GENERATORS) or argument(call, None, "generator") is not None:
        return ""
    if name.startswith("numpy.random."):
        return "numpy"
    if name.startswith("random."):
        return "random"
    return "torch" if name.startswith("torch.") and name.removeprefix("torch.") in _TORCH_DRAWS else ""
