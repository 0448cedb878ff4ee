"""DL011: every rank changes its samples in the same way."""

from __future__ import annotations

import ast
from collections.abc import Iterator

from drumline_lint.findings import Finding, rule
from drumline_lint.flow.distributed import framework
from drumline_lint.flow.loops import calls_in, calls_made_in
from drumline_lint.flow.run_order import Run, Step, found_in_runs, process_of
from drumline_lint.program.calls import argument
from drumline_lint.program.names import LOADER
from drumline_lint.program.program import Program
from drumline_lint.program.queries import cached_query
from drumline_lint.program.tree import nodes_in
from drumline_lint.program.value import Class, ConstantValue, Function
from drumline_lint.reading.source import Source
from drumline_lint.training.seeds import kind_of_seed, may_differ_by_rank, seeds_torch, where_given
from drumline_lint.training.steps import training_loops

RULE = rule("DL011")


def check(program: Program, source: Source) -> Iterator[Finding]:
    """The last seed of a run for the generator that the augmentation draws from."""
    if framework(program, source) or not any("seed" in file.text for file in program.sources):
        return
    for place, drawn in found_in_runs(program, source, _same_in).items():
        yield RULE.at(
            source,
            place,
            f"{source.code(place)} is the same on every rank, and so is all that {drawn} draws",
        )


def _same_in(program: Program, run: Run) -> Iterator[tuple[ast.AST, str]]:
    yield from _same_noise(program, run)
    drawn = augmentations(program, run)
    loading = [step for step in run if program.name_of(step.call.func) == LOADER]
    loaders = [step.call for step in loading]
    if not drawn or not loaders or any(argument(loader, 12, "generator") for loader in loaders):
        return
    in_workers, are_all_known = _seeds_of_workers(program, loaders)
    if not are_all_known:
        return
    for call, worker in in_workers:
        kind = kind_of_seed(program, call)
        if kind in drawn and _is_same_in_worker(program, call.args[0], worker):
            yield call, drawn[kind]
    seeded = {kind_of_seed(program, call) for call, _ in in_workers}
    has_workers = any(_has_workers(program, loader) for loader in loaders)
    for kind, what in drawn.items():
        if kind not in seeded:
            seeding = _in_same_process(program, run, loading)
            place = _same_seed(program, seeding, "torch" if has_workers else kind)
            if place is not None:
                yield place, what


def _same_noise(program: Program, run: Run) -> Iterator[tuple[ast.AST, str]]:
    """What a training loop itself draws, such as the noise of a diffusion model."""
    calls = {step.call for step in run}
    noise = [
        program.name_of(call.func)
        for loop in training_loops(program)
        for call in calls_in(loop)
        if call in calls and program.name_of(call.func) in _NOISE
    ]
    place = _same_seed(program, run, "torch") if noise else None
    if place is not None:
        yield place, f"{noise[0]} in the training loop"


def _in_same_process(program: Program, run: Run, loading: Run) -> Run:
    """What is done where the loaders are made: a process that is spawned has no seed from its
    parent.

    Where some are made in spawned processes and some in their parent, the ranks are the former.
    """
    spawned = {process_of(program, step) for step in loading} - {()}
    return [step for step in run if process_of(program, step) in (spawned or {()})]


def _same_seed(program: Program, run: Run, kind: str) -> ast.AST | None:
    """The last seed of a generator in a run, if none has the rank in it."""
    seeds: list[tuple[Step, ast.expr]] = []
    for step in run:
        is_of_kind = kind_of_seed(program, step.call) == kind
        if not is_of_kind and not (kind == "torch" and seeds_torch(program, step.call)):
            continue
        seed = step.call.args[0] if step.call.args else argument(step.call, None, "seed")
        if not is_of_kind and not program.name_of(step.call.func).startswith("torch."):
            return None  # what a helper that was not given does with it is not known
        if seed is None or may_differ_by_rank(program, seed):
            return None
        if is_of_kind:
            seeds.append((step, seed))
    return where_given(program, *seeds[-1]) if seeds else None


def _seeds_of_workers(
    program: Program, loaders: list[ast.Call]
) -> tuple[list[tuple[ast.Call, str]], bool]:
    """The seeds that `worker_init_fn` sets, with the name of its worker; and whether all such are
    known."""
    seeds = []
    for loader in loaders:
        initializer = argument(loader, 10, "worker_init_fn")
        values = program.values(initializer)
        functions = [value.node for value in values if isinstance(value, Function)]
        if initializer is not None and not functions and values != frozenset({ConstantValue(None)}):
            return [], False
        for function in functions:
            worker = function.args.args[0].arg if function.args.args else ""
            calls = [call for call in nodes_in(function, ast.Call) if kind_of_seed(program, call)]
            seeds += [(call, worker) for call in calls if call.args]
    return seeds, True


def _is_same_in_worker(program: Program, seed: ast.expr, worker: str) -> bool:
    """The number of a worker is the same on every rank."""
    if isinstance(seed, ast.Name) and seed.id == worker:
        return True
    if isinstance(seed, ast.BinOp):
        return all(_is_same_in_worker(program, part, worker) for part in (seed.left, seed.right))
    return not may_differ_by_rank(program, seed)


def _has_workers(program: Program, loader: ast.Call) -> bool:
    number = argument(loader, 5, "num_workers")
    return number is not None and ConstantValue(0) not in program.values(number)


TRANSFORMS = ("torchvision.transforms.", "torchvision.transforms.v2.")
_RANDOM_TRANSFORMS = (
    "Random",
    "ColorJitter",
    "AutoAugment",
    "RandAugment",
    "TrivialAugment",
    "AugMix",
)
_ALBUMENTATIONS = tuple(
    "Random HorizontalFlip VerticalFlip Rotate ShiftScaleRotate Flip ColorJitter".split()
)
_TORCH_DRAWS = (
    "rand",
    "randn",
    "randint",
    "randperm",
    "bernoulli",
    "normal",
    "multinomial",
    "rand_like",
)
_NOISE = tuple(f"torch.{name}" for name in ("randn", "randn_like", "randint", "rand", "rand_like"))
_OWN_GENERATORS = (
    "numpy.random.default_rng",
    "numpy.random.RandomState",
    "numpy.random.Generator",
    "random.Random",
)


def augmentations(program: Program, run: Run) -> dict[str, str]:
    """In a run: by which generator something is drawn for the data, and what is."""
    drawn: dict[str, str] = {}
    for step in run:
        for kind, what in _drawn_by(program, step.call).items():
            drawn.setdefault(kind, what)
    return drawn


@cached_query  # the runs of several scripts have the same calls
def _drawn_by(program: Program, call: ast.Call) -> dict[str, str]:
    """By a transform that a call makes, or by the dataset that it makes."""
    name = program.name_of(call.func)
    last = name.rpartition(".")[2]
    if name.startswith(TRANSFORMS) and last.startswith(_RANDOM_TRANSFORMS):
        return {"torch": last}
    if name.startswith("albumentations.") and last.startswith(_ALBUMENTATIONS):
        return {"random": last}
    drawn: dict[str, str] = {}
    for value in program.values(call.func):
        if isinstance(value, Class):
            drawn |= _drawn_in_dataset(program, value.node)
    return drawn


@cached_query
def _drawn_in_dataset(program: Program, node: ast.ClassDef) -> dict[str, str]:
    """What is drawn in `__getitem__`, or in what that calls; unless the item's number is its
    seed."""
    read = program.method(node, "__getitem__")
    drawn: dict[str, str] = {}
    for call in calls_made_in(program, read) if read is not None else ():
        name = program.name_of(call.func)
        if name.endswith(("seed", "set_rng_state")):
            return {}
        if kind := _generator_of(name, call):
            drawn.setdefault(kind, f"{name} in {node.name}.__getitem__")
    return drawn


def _generator_of(name: str, call: ast.Call) -> str:
    if name.startswith(_OWN_GENERATORS) or argument(call, None, "generator") is not None:
        return ""
    if name.startswith("numpy.random."):
        return "numpy"
    if name.startswith("random."):
        return "random"
    return (
        "torch" if name.startswith("torch.") and name.removeprefix("torch.") in _TORCH_DRAWS else ""
    )
