"""The DDP modules of a script: hashes of their parameters at construction and every so many updates.

No collective and no wait for a device: hashes are made where the parameters are, copied beside the steps, and compared
by the sidecars. An update is seen by torch's own count of changes in place of a parameter, so that a rank with more
backward passes than others is not taken to be further.
"""

from __future__ import annotations

import sys
import weakref
from collections import Counter, deque
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

from drumline.watch.scripts.notes import Held, ModuleNote

EVERY, FIRST = 100, (1, 10)
MOST_MODULES = 8
"""A module beyond them takes the place of one that is no more, or is not compared."""
MOST_HELD, MOST_HASHES = 32, 2000
"""How many comparisons of a module are kept, and hashes of all modules: ranks note at different moments."""
MOST_TENSORS = 512
UNSEEN_AFTER = 20
"""Passes without a visible update: the optimizer changes memory behind torch's back, and passes are counted instead."""
# Hooks of torch's own after which replicas may differ for a while.
APART = ("localsgd", "zero")


@dataclass
class _Pending:
    """Hashes that a device may still be working on."""

    step: int
    kinds: dict[str, str]
    hashes: Any
    is_ready: Callable[[], bool]
    settings: dict[str, Any]


@dataclass
class _Module:
    name: str
    ranks: tuple[int, ...]
    lead: weakref.ref[Any]
    """A parameter that is trained."""
    version: int | None = None
    was_alone: bool = False
    """Whether the last pass was in no_sync."""
    num_passes: int = 0
    num_updates: int = 0
    compared: int = 0
    is_apart: bool = False
    pending: deque[_Pending] = field(default_factory=deque)
    held: dict[int, Held] = field(default_factory=dict)

    def next_step(self, version: int, *, is_alone: bool) -> int | None:
        """The step to compare at, if this backward pass is the first after it."""
        if self.version is not None and version != self.version:
            self.num_updates += 1
            # Each rank trains by itself for a while, and they average their weights now and then.
            self.is_apart |= self.was_alone
        self.version, self.was_alone = version, is_alone
        self.num_passes += 1
        step = self.num_updates
        if not step and self.num_passes > UNSEEN_AFTER:
            step = self.num_passes
        if step <= self.compared or self.is_apart or not (step in FIRST or step % EVERY == 0):
            return None
        self.compared = step
        return step


class DdpModules:
    """Those of one rank."""

    def __init__(self, rank: int) -> None:
        self._rank = rank
        self._modules: weakref.WeakKeyDictionary[Any, _Module] = weakref.WeakKeyDictionary()
        self._by_key: dict[str, _Module] = {}
        self._num_built: Counter[tuple[int, ...]] = Counter()
        self.num_changes = 0
        """Of what `notes` returns."""
        self._optimizers: weakref.WeakSet[Any] = weakref.WeakSet()

    def add(self, module: Any) -> None:
        """One that was just built."""
        import torch.distributed as dist

        ranks = tuple(dist.get_process_group_ranks(module.process_group))
        lead = next((one for one in module.parameters() if one.requires_grad), None)
        if lead is None or len(ranks) < 2 or self._rank not in ranks:
            return
        # Counted on every rank, also where it is not compared: the number is its name across ranks.
        key = f"{self._num_built[ranks]} of {','.join(map(str, ranks))}"
        self._num_built[ranks] += 1
        if len(self._by_key) >= MOST_MODULES and not self._forget_one():
            return
        watched = _Module(type(module.module).__name__, ranks, weakref.ref(lead))
        self._by_key[key] = self._modules[module] = watched
        self.num_changes += 1
        self._look_quietly(module, watched, 0)

    def _forget_one(self) -> bool:
        """The oldest module that the script has dropped."""
        living = set(map(id, self._modules.values()))
        dead = next((key for key, watched in self._by_key.items() if id(watched) not in living), None)
        if dead is None:
            return False
        del self._by_key[dead]
        return True

    def saw(self, optimizer: Any) -> None:
        """One that is about to step."""
        self._optimizers.add(optimizer)

    def look(self) -> None:
        """At the beginning of a backward pass. The hot path."""
        for module, watched in self._modules.items():
            self._look_quietly(module, watched)

    def _look_quietly(self, module: Any, watched: _Module, step: int | None = None) -> None:
        """What goes wrong with a module ends its observation, not the script."""
        try:
            if step is None and (lead := watched.lead()) is not None:
                step = watched.next_step(lead._version, is_alone=not module.require_backward_grad_sync)
            if step is not None:
                self._hash(module, watched, step)
        except Exception:
            watched.is_apart = True

    def is_joining(self) -> bool:
        """Whether the script has said that inputs are uneven: `with Join([module])`."""
        return any(module._join_config.enable for module in list(self._modules))

    def gather(self) -> None:
        """Take in hashes that are done; from the thread that writes."""
        modules = list(self._by_key.values())
        for watched in modules:
            while watched.pending and watched.pending[0].is_ready():
                _hold(watched, watched.pending.popleft(), MOST_HASHES // len(modules))
                self.num_changes += 1

    def notes(self) -> dict[str, ModuleNote]:
        """What was gathered."""
        return {
            key: ModuleNote(name=watched.name, ranks=watched.ranks, held=dict(watched.held))
            for key, watched in list(self._by_key.items())
        }

    def _hash(self, module: Any, watched: _Module, step: int) -> None:
        if _is_apart(module) or _is_captured():
            return
        from drumline.distributed.tensor_hash import hash_tensors

        ignored = getattr(module, "parameters_to_ignore", ())
        tensors = {
            name: one
            for name, one in module.module.named_parameters()
            if name not in ignored and _is_plain(one)
        }
        lead = watched.lead()
        if not tensors or lead is None:
            return
        hashes = hash_tensors(list(tensors.values()), lead.device)
        hashes, is_ready = _on_its_way(hashes)
        kinds = {name: f"{one.dtype} {list(one.shape)}" for name, one in tensors.items()}
        watched.pending.append(_Pending(step, kinds, hashes, is_ready, self._settings(lead)))

    def _settings(self, lead: Any) -> dict[str, Any]:
        """Of the optimizer of this parameter: numbers by name."""
        for optimizer in list(self._optimizers):
            for group in optimizer.param_groups:
                if any(one is lead for one in group["params"]):
                    name = type(optimizer).__name__
                    return {f"{name}'s {key}": value for key, value in group.items() if _is_setting(value)}
        return {}


def _hold(watched: _Module, done: _Pending, most_hashes: int) -> None:
    from drumline.distributed.tensor_hash import text_hash

    values = done.hashes.tolist()
    tensors = {
        name: (kind, value)
        for (name, kind), value in zip(done.kinds.items(), values[:MOST_TENSORS], strict=False)
    }
    if len(values) > MOST_TENSORS:
        further = ",".join(map(str, values[MOST_TENSORS:]))
        tensors[f"{len(values) - MOST_TENSORS} further parameters"] = ("", text_hash(further))
    watched.held[done.step] = Held(tensors=tensors, settings=done.settings)
    while len(watched.held) > max(1, min(MOST_HELD, most_hashes // len(tensors))):
        del watched.held[min(watched.held)]


def _on_its_way(hashes: Any) -> tuple[Any, Callable[[], bool]]:
    """The hashes in memory that the CPU reads, once they are there."""
    if hashes.device.type != "cuda":
        return hashes, lambda: True
    torch = sys.modules["torch"]
    copy = torch.empty(hashes.shape, dtype=hashes.dtype, pin_memory=True)
    copy.copy_(hashes, non_blocking=True)
    event = torch.cuda.Event()
    event.record()
    return copy, event.query


def _is_apart(module: Any) -> bool:
    hooks = [getattr(hook, "__qualname__", "") for hook, _ in getattr(module, "_comm_hooks", ())]
    return any(word in name.lower() for name in hooks for word in APART)


def _is_captured() -> bool:
    """Whether what is called now is recorded: as a CUDA graph, or by a mode that sees each operation."""
    torch = sys.modules["torch"]
    from torch.utils._python_dispatch import _get_current_dispatch_mode

    captured = torch.cuda.is_available() and torch.cuda.is_current_stream_capturing()
    return bool(captured) or _get_current_dispatch_mode() is not None


def _is_plain(tensor: Any) -> bool:
    """Not one whose parts are on other ranks, nor one without data."""
    torch = sys.modules["torch"]
    return (
        type(tensor) in (torch.nn.Parameter, torch.Tensor)
        and tensor.layout is torch.strided
        and tensor.device.type in ("cpu", "cuda")
    )


def _is_setting(value: Any) -> bool:
    return isinstance(value, int | float) or (
        isinstance(value, tuple | list) and all(isinstance(one, int | float) for one in value)
    )
