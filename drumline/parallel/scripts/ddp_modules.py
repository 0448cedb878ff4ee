"""The DDP modules of a script: hashes of their parameters at construction and every so many
updates, without a collective and without a wait for the device."""

from __future__ import annotations

import sys
import weakref
from collections import Counter, deque
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

from drumline.watch.cluster_state import ModuleHashes, ModuleReport

EVERY = 100
FIRST = (1, 10)
MAX_MODULES = 8  # those beyond are not compared
MAX_STEPS = 32
MAX_HASHES = 2000
"""How many steps of a module are kept, and hashes of all modules: ranks write at different
moments."""
MAX_TENSORS = 512
# Hooks of torch's own after which replicas may differ for a while.
DIVERGING_HOOKS = ("localsgd", "zero")


@dataclass
class _PendingHashes:
    """Hashes that a device may still be working on."""

    step: int
    kinds: dict[str, str]
    hashes: Any
    is_ready: Callable[[], bool]
    settings: dict[str, Any]


@dataclass
class _ObservedModule:
    key: str  # the same on every rank
    name: str
    ranks: tuple[int, ...]
    trained: weakref.ref[Any]  # one of its parameters that requires gradients
    version: int | None = None
    was_no_sync: bool = False
    num_updates: int = 0
    compared: int = 0
    diverges: bool = False  # whether replicas may differ, or it cannot be observed
    pending: deque[_PendingHashes] = field(default_factory=deque)
    hashes: dict[int, ModuleHashes] = field(default_factory=dict)

    def next_step(self, version: int, *, is_no_sync: bool) -> int | None:
        """The step to compare at, if this backward pass is the first after it."""
        if self.version is not None and version != self.version:
            self.num_updates += 1
            # Local SGD: each rank trains alone for a while, and weights are averaged at intervals.
            self.diverges |= self.was_no_sync
        self.version = version
        self.was_no_sync = is_no_sync
        step = self.num_updates
        if step <= self.compared or self.diverges or not (step in FIRST or step % EVERY == 0):
            return None
        self.compared = step
        return step


class DdpModules:
    """The modules of one rank."""

    def __init__(self, rank: int) -> None:
        self._rank = rank
        self._modules: weakref.WeakKeyDictionary[Any, _ObservedModule] = weakref.WeakKeyDictionary()
        self._num_built: Counter[tuple[int, ...]] = Counter()
        self.num_changes = 0  # in what `reports` returns
        self.optimizers: weakref.WeakSet[Any] = weakref.WeakSet()  # those that have taken a step

    def add(self, module: Any) -> None:
        import torch.distributed as dist

        ranks = tuple(dist.get_process_group_ranks(module.process_group))
        trained = next(
            (parameter for parameter in module.parameters() if parameter.requires_grad), None
        )
        if trained is None or len(ranks) < 2 or self._rank not in ranks:
            return
        # Counted on every rank, also where it is not compared: the number is its name across ranks.
        key = f"{self._num_built[ranks]} of {','.join(map(str, ranks))}"
        self._num_built[ranks] += 1
        if len(self._modules) >= MAX_MODULES:
            return
        observed = _ObservedModule(key, type(module.module).__name__, ranks, weakref.ref(trained))
        self._modules[module] = observed
        self.num_changes += 1
        self._observe(module, observed, 0)

    def begin_backward(self) -> None:
        """The hot path."""
        for module, observed in self._modules.items():
            self._observe(module, observed)

    def _observe(self, module: Any, observed: _ObservedModule, step: int | None = None) -> None:
        """What goes wrong with a module ends its observation, not the script."""
        try:
            if step is None and (trained := observed.trained()) is not None:
                step = observed.next_step(
                    trained._version, is_no_sync=not module.require_backward_grad_sync
                )
            if step is not None:
                self._hash(module, observed, step)
        except Exception:
            observed.diverges = True

    def is_joining(self) -> bool:
        """Whether the script has declared uneven inputs: `with Join([module])`."""
        return any(module._join_config.enable for module in list(self._modules))

    def collect(self) -> None:
        """Keep hashes that are done; on the thread that writes."""
        modules = list(self._modules.values())
        for observed in modules:
            while observed.pending and observed.pending[0].is_ready():
                _keep(observed, observed.pending.popleft(), MAX_HASHES // len(modules))
                self.num_changes += 1

    def reports(self) -> dict[str, ModuleReport]:
        return {
            observed.key: ModuleReport(
                name=observed.name, ranks=observed.ranks, hashes=dict(observed.hashes)
            )
            for observed in list(self._modules.values())
        }

    def _hash(self, module: Any, observed: _ObservedModule, step: int) -> None:
        import torch

        from drumline.rank.tensor_hash import hash_tensors
        from drumline.rank.torch_internals import current_dispatch_mode

        hooks = [
            getattr(hook, "__qualname__", "").lower()
            for hook, _ in getattr(module, "_comm_hooks", ())
        ]
        # Nothing is added to what is being recorded, as a CUDA graph or by a mode that sees each
        # operation.
        is_captured = torch.cuda.is_available() and torch.cuda.is_current_stream_capturing()
        is_captured |= current_dispatch_mode() is not None
        if is_captured or any(word in name for name in hooks for word in DIVERGING_HOOKS):
            return
        ignored = getattr(module, "parameters_to_ignore", ())
        tensors = {
            name: parameter
            for name, parameter in module.module.named_parameters()
            # Not one whose parts are on other ranks, nor one without data.
            if name not in ignored
            and type(parameter) in (torch.nn.Parameter, torch.Tensor)
            and parameter.layout is torch.strided
            and parameter.device.type in ("cpu", "cuda")
        }
        trained = observed.trained()
        if not tensors or trained is None:
            return
        hashes, is_ready = _copy_to_host(hash_tensors(list(tensors.values()), trained.device))
        kinds = {name: f"{tensor.dtype} {list(tensor.shape)}" for name, tensor in tensors.items()}
        observed.pending.append(
            _PendingHashes(step, kinds, hashes, is_ready, self._settings(trained))
        )

    def _settings(self, trained: Any) -> dict[str, Any]:
        """The numbers that the optimizer of this parameter has, by name."""
        groups = [
            (type(optimizer).__name__, group)
            for optimizer in list(self.optimizers)
            for group in optimizer.param_groups
        ]
        return {
            f"{name}'s {key}": value
            for name, group in groups
            if any(parameter is trained for parameter in group["params"])
            for key, value in group.items()
            if all(
                isinstance(number, int | float)
                for number in (value if isinstance(value, tuple | list) else [value])
            )
        }


def _keep(observed: _ObservedModule, done: _PendingHashes, most_hashes: int) -> None:
    from drumline.rank.tensor_hash import text_hash

    values = done.hashes.tolist()
    tensors = {
        name: (kind, value)
        for (name, kind), value in zip(done.kinds.items(), values[:MAX_TENSORS], strict=False)
    }
    if len(values) > MAX_TENSORS:
        further = ",".join(map(str, values[MAX_TENSORS:]))
        tensors[f"{len(values) - MAX_TENSORS} further parameters"] = ("", text_hash(further))
    observed.hashes[done.step] = ModuleHashes(tensors=tensors, settings=done.settings)
    while len(observed.hashes) > max(1, min(MAX_STEPS, most_hashes // len(tensors))):
        del observed.hashes[min(observed.hashes)]


def _copy_to_host(hashes: Any) -> tuple[Any, Callable[[], bool]]:
    """A copy that is filled while steps continue, and whether it is filled."""
    if hashes.device.type != "cuda":
        return hashes, lambda: True
    torch = sys.modules["torch"]
    copy = torch.empty(hashes.shape, dtype=hashes.dtype, pin_memory=True)
    copy.copy_(hashes, non_blocking=True)
    event = torch.cuda.Event()
    event.record()
    return copy, event.query
