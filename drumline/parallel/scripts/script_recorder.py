"""Records a script's arguments and versions, its loaders and its DDP modules in a file that the
sidecar reads. Nothing here may fail the script: what cannot be read is not recorded.

    facts    once, when the process group exists: arguments, variables, versions, hashes of the code
    loaders  at the first iteration over each: its place in the script, and how many batches it has
    modules  from time to time, as a backward pass begins: hashes of the parameters
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import platform
import re
import sys
import weakref
from collections import Counter, defaultdict, deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from itertools import chain
from pathlib import Path
from types import FrameType
from typing import Any, NamedTuple

from drumline.base.rank_environment import Topology, own_variables
from drumline.base.untrusted import replace_text
from drumline.watch.cluster_state import LoaderReport, ModuleHashes, ModuleReport, ScriptReport
from drumline.watch.fact_differences import Facts

INSTALLED = re.compile("/(site|dist)-packages/")
MAX_LOADERS = 64
IS_OPTION = re.compile(r"--?[A-Za-z]")
ASSIGNMENT = re.compile(r"(--?[A-Za-z][^=]*|[A-Za-z_][\w.]*)=(.*)", re.DOTALL)
SECRET_NAMES = re.compile(r"keys?$|token$|secret|passw|passphrase|credential")
# The parameters of DDP modules are hashed at construction and every so many updates, without a
# collective and without a wait for the device.
EVERY = 100
FIRST = (1, 10)
MAX_MODULES = 8  # those beyond are not compared
MAX_STEPS = 32
MAX_HASHES = 2000
"""How many steps of a module are kept, and hashes of all modules: ranks write at different
moments."""

# Hooks of torch's own after which replicas may differ for a while.
DIVERGING_HOOKS = ("localsgd", "zero")


class ScriptRecorder:
    """The main thread records, another one writes. Both may be at it at once: the writer reads what
    is there, and writes the rest a second later."""

    def __init__(self, file: Path, topology: Topology, arguments: Sequence[str] = ()) -> None:
        self._file = file
        self._host = topology.host
        self._arguments = arguments_by_name(arguments)

        self._facts: Facts = {}
        self._loaders: dict[str, LoaderReport] = {}
        self._places: weakref.WeakKeyDictionary[Any, str] = weakref.WeakKeyDictionary()
        self.modules = DdpModules(topology.rank)

        self._num_changes = 1
        """Of what is recorded here; the modules count their own."""

        self._num_written = 0
        """How many changes were written."""

    def record_facts(self) -> None:
        """Once, when the process group exists: by then the script has loaded its modules."""
        if not self._facts:
            with contextlib.suppress(Exception):
                self._facts = script_facts(self._arguments)
                self._num_changes += 1

    def record_loader(self, loader: Any, caller: FrameType | None) -> None:
        """The script iterates over this loader: record its lengths the first time, under its place
        (`train.py:41`)."""
        with contextlib.suppress(Exception):
            if loader in self._places or len(self._loaders) >= MAX_LOADERS:
                return

            place = self._place(caller)
            self._places[loader] = place
            self._loaders[place] = _loader_report(loader, is_uneven=self.modules.is_joining())
            self._num_changes += 1

    def write(self) -> None:
        """Write what is new. Called once a second, and at the end."""
        distributed = sys.modules.get("torch.distributed")
        with contextlib.suppress(Exception):
            if distributed is not None and distributed.is_initialized():
                self.record_facts()

            self.modules.collect()

            # Before they are read: later changes are written the next time.
            num_changes = self._num_changes + self.modules.num_changes
            if num_changes == self._num_written:
                return

            report = ScriptReport(
                host=self._host,
                facts=self._facts,
                loaders=dict(self._loaders),
                modules=self.modules.reports(),
            )

            replace_text(self._file, json.dumps(asdict(report)))
            self._num_written = num_changes

    def _place(self, frame: FrameType | None) -> str:
        """The user's line that iterates; a second loader there has a number."""
        while frame is not None and INSTALLED.search(frame.f_code.co_filename):
            frame = frame.f_back

        if frame is None:
            return "unknown"

        place = f"{Path(frame.f_code.co_filename).name}:{frame.f_lineno}"
        number = sum(recorded.partition(" ")[0] == place for recorded in self._loaders) + 1
        return place if number == 1 else f"{place} (number {number})"


def arguments_by_name(words: Sequence[str]) -> dict[str, str]:
    """`--lr 0.1 --amp data x=1` as `{"--lr": "0.1", "--amp": "given", "argument 1": "data", "x":
    "1"}`."""
    values_by_name: dict[str, list[str]] = defaultdict(list)
    rest = deque(words)
    num_places = 0

    while rest:
        word = rest.popleft()
        if assigned := ASSIGNMENT.fullmatch(word):
            name, value = assigned.groups()
        elif IS_OPTION.match(word):
            name = word
            takes_next = bool(rest) and not IS_OPTION.match(rest[0])
            value = rest.popleft() if takes_next else "given"
        else:
            num_places += 1
            name = f"argument {num_places}"
            value = word

        values_by_name[name].append(value)

    return {name: " ".join(values) for name, values in values_by_name.items()}


def script_facts(arguments: Mapping[str, str]) -> Facts:
    """What must be the same on all ranks, by group and name. The values of secrets, such as
    `--api-key`, are hashed.

        {
            "arguments": {"--lr": "0.1", "--api-key": {"hash": "5d41402a"}},
            "variables": {"NCCL_DEBUG": "not set", ...},
            "packages": {"Python": "3.12", "torch": "2.13.0", ...},
            "script": {...},
        }
    """
    from drumline.rank.rendezvous.rank_facts import ANY_BACKEND, DEFAULTS, OF_BACKEND, code_hashes

    environment = own_variables()
    variables = sorted(chain(ANY_BACKEND, *OF_BACKEND.values()))
    packages = {"Python": ".".join(platform.python_version_tuple()[:2])}

    for name, module in list(sys.modules.items()):
        # Not getattr: some modules are loaded by the first attribute access.
        version = getattr(module, "__dict__", {}).get("__version__")
        if "." not in name and isinstance(version, str):
            packages[name] = str(version)

    return {
        "arguments": {
            name: _hashed(value) if SECRET_NAMES.search(name.lower()) else value
            for name, value in arguments.items()
        },
        "variables": {
            name: environment.get(name) or DEFAULTS.get(name, "not set") for name in variables
        },
        "packages": packages,
        "script": code_hashes(),
    }


def _hashed(secret: str) -> dict[str, str]:
    """In place of a secret: ranks can compare it, and nobody reads it."""
    return {"hash": hashlib.blake2b(secret.encode(), digest_size=4).hexdigest()}


def _loader_report(loader: Any, *, is_uneven: bool) -> LoaderReport:
    """Lengths that must be the same on all ranks. Batches may differ where the script has declared
    uneven inputs, and outside training."""
    samplers = (loader.sampler, loader.batch_sampler)
    is_split = any(getattr(sampler, "num_replicas", 1) > 1 for sampler in samplers)
    may_differ = is_uneven or not sys.modules["torch"].is_grad_enabled()

    return LoaderReport(
        batches=None if may_differ else _length(loader),
        samples=_length(loader.dataset) if is_split else None,
    )


def _length(sized: Any) -> int | None:
    """Its length, if it has one."""
    try:
        return len(sized)
    except Exception:
        return None


class _PendingHashes(NamedTuple):
    """Hashes that a device may still be working on."""

    step: int
    is_ready: Callable[[], bool]
    """Whether the device is done."""

    finish: Callable[[], ModuleHashes]
    """Their value, once they are ready."""


@dataclass
class _ObservedModule:
    """A DDP module of the script, and the hashes of its parameters so far.

    The optimizer's updates are counted without a hook on it: at the beginning of a backward pass
    the version of a parameter shows whether it has changed since the last one."""

    key: str
    """The same on every rank."""

    name: str
    """Of its class."""

    ranks: tuple[int, ...]
    """Those that have a replica of it."""

    trained: weakref.ref[Any]
    """One of its parameters that requires gradients."""

    version: int | None = None
    """Of `trained` at the latest backward pass: torch counts each change."""

    was_no_sync: bool = False
    """Whether that backward pass has reduced nothing."""

    num_updates: int = 0
    """Steps of its optimizer."""

    compared: int = 0
    """The latest step that it was hashed at."""

    diverges: bool = False
    """Whether replicas may differ, or it cannot be observed."""

    pending: deque[_PendingHashes] = field(default_factory=deque)
    hashes: dict[int, ModuleHashes] = field(default_factory=dict)
    """By step; the report has them."""

    def next_step(self, version: int, *, is_no_sync: bool) -> int | None:
        """The step to compare at, if this backward pass is the first after it."""
        if self.version is not None and version != self.version:
            self.num_updates += 1
            # Local SGD: each rank trains alone for a while, and weights are averaged at intervals.
            self.diverges |= self.was_no_sync

        self.version = version
        self.was_no_sync = is_no_sync

        step = self.num_updates
        is_chosen = step in FIRST or step % EVERY == 0
        if step <= self.compared or self.diverges or not is_chosen:
            return None

        self.compared = step
        return step

    def keep(self, step: int, hashes: ModuleHashes, *, most_hashes: int) -> None:
        """Add hashes to the report, without the oldest beyond the limit: all modules together keep
        so many, and each at least those of one step."""
        self.hashes[step] = hashes
        most_steps = min(MAX_STEPS, most_hashes // len(hashes.tensors))
        while len(self.hashes) > max(1, most_steps):
            del self.hashes[min(self.hashes)]


class DdpModules:
    """The DDP modules of one rank. A module is known to the other ranks by its group and its number
    in it, `0 of 0,1,2,3`, since ranks build modules in the same order."""

    def __init__(self, rank: int) -> None:
        self._rank = rank
        self._modules: weakref.WeakKeyDictionary[Any, _ObservedModule] = weakref.WeakKeyDictionary()
        self._num_built: Counter[tuple[int, ...]] = Counter()
        self.num_changes = 0
        """In what `reports` returns."""

        self.optimizers: weakref.WeakSet[Any] = weakref.WeakSet()
        """Those that have taken a step."""

    def add(self, module: Any) -> None:
        """Observe a module that the script has built."""
        import torch.distributed as dist

        ranks = tuple(dist.get_process_group_ranks(module.process_group))
        trained = [parameter for parameter in module.parameters() if parameter.requires_grad]
        if not trained or len(ranks) < 2 or self._rank not in ranks:
            return

        # Counted on every rank, also where it is not compared: the number is its name across ranks.
        key = f"{self._num_built[ranks]} of {','.join(map(str, ranks))}"
        self._num_built[ranks] += 1
        if len(self._modules) >= MAX_MODULES:
            return

        name = type(module.module).__name__
        observed = _ObservedModule(key, name, ranks, weakref.ref(trained[0]))
        self._modules[module] = observed
        self.num_changes += 1
        self._observe(module, observed, 0)

    def begin_backward(self) -> None:
        """A step begins: hash the modules whose step is to be compared. The hot path."""
        for module, observed in self._modules.items():
            self._observe(module, observed)

    def _observe(self, module: Any, observed: _ObservedModule, step: int | None = None) -> None:
        """Hash the module if this step is to be compared. What goes wrong with a module ends its
        observation, not the script."""
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
        """Keep hashes that are done; on the thread that writes. Those that a device still computes
        are for the next time."""
        modules = list(self._modules.values())
        for observed in modules:
            while observed.pending and observed.pending[0].is_ready():
                step, _, finish = observed.pending.popleft()
                observed.keep(step, finish(), most_hashes=MAX_HASHES // len(modules))
                self.num_changes += 1

    def reports(self) -> dict[str, ModuleReport]:
        """What is known of each module, by its name across ranks."""
        return {
            observed.key: ModuleReport(
                name=observed.name,
                ranks=observed.ranks,
                hashes=dict(observed.hashes),
            )
            for observed in list(self._modules.values())
        }

    def _hash(self, module: Any, observed: _ObservedModule, step: int) -> None:
        """Begin to hash the module's parameters, and keep the optimizer's numbers of this step."""
        import torch

        from drumline.rank.tensor_hash import hash_tensors
        from drumline.rank.torch_internals import current_dispatch_mode

        # Nothing is added to what is being recorded, as a CUDA graph or by a mode that sees each
        # operation.
        is_captured = torch.cuda.is_available() and torch.cuda.is_current_stream_capturing()
        is_captured |= current_dispatch_mode() is not None
        if is_captured or _may_diverge(module):
            return

        ignored = getattr(module, "parameters_to_ignore", ())
        tensors = {
            name: parameter
            for name, parameter in module.module.named_parameters()
            # Not one whose parts are on other ranks.
            if name not in ignored and type(parameter) in (torch.nn.Parameter, torch.Tensor)
        }

        trained = observed.trained()
        if not tensors or trained is None:
            return

        hashes, is_ready = _copy_to_host(hash_tensors(list(tensors.values()), trained.device))
        kinds = {name: f"{tensor.dtype} {list(tensor.shape)}" for name, tensor in tensors.items()}
        settings = self._settings(trained)

        def finish() -> ModuleHashes:
            """Once the copy on the host is filled."""
            named = {}
            for (name, kind), number in zip(kinds.items(), hashes.tolist(), strict=True):
                named[name] = (kind, number)

            return ModuleHashes(tensors=named, settings=settings)

        observed.pending.append(_PendingHashes(step, is_ready, finish))

    def _settings(self, trained: Any) -> dict[str, Any]:
        """The numbers that the optimizer of this parameter has, by name: `{"AdamW's lr": 0.001,
        "AdamW's betas": (0.9, 0.999), ...}`."""
        settings = {}
        for optimizer in list(self.optimizers):
            for group in optimizer.param_groups:
                if not any(parameter is trained for parameter in group["params"]):
                    continue

                for key, value in group.items():
                    if isinstance(value, int | float) or key == "betas":
                        settings[f"{type(optimizer).__name__}'s {key}"] = value

        return settings


def _may_diverge(module: Any) -> bool:
    """Whether the module reduces its gradients by a hook after which replicas may differ."""
    hooks = getattr(module, "_comm_hooks", ())
    names = " ".join(getattr(hook, "__qualname__", "").lower() for hook, _ in hooks)
    return any(word in names for word in DIVERGING_HOOKS)


def _copy_to_host(hashes: Any) -> tuple[Any, Callable[[], bool]]:
    """A copy of these hashes that is filled while steps continue, and a function that says whether
    it is filled."""
    if hashes.device.type != "cuda":
        return hashes, lambda: True

    torch = sys.modules["torch"]
    copy = torch.empty(hashes.shape, dtype=hashes.dtype, pin_memory=True)
    copy.copy_(hashes, non_blocking=True)

    event = torch.cuda.Event()
    event.record()

    return copy, event.query
