"""Records a script's arguments and versions, its loaders and its DDP modules in a file that the
sidecar reads. Nothing here may fail the script: what cannot be read is not recorded."""

from __future__ import annotations

import contextlib
import hashlib
import json
import platform
import re
import sys
import weakref
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from types import FrameType
from typing import Any

from drumline.base.topology import Topology, own_variables
from drumline.parallel.scripts.ddp_modules import DdpModules
from drumline.watch.cluster_state import LoaderReport, ScriptReport

INSTALLED = ("/site-packages/", "/dist-packages/")
MAX_LOADERS = 64
IS_OPTION = re.compile(r"--?[A-Za-z]")
ASSIGNMENT = re.compile(r"([A-Za-z_][\w.]*)=(.*)", re.DOTALL)
SECRET_NAMES = re.compile(r"keys?$|token$|secret|passw|passphrase|credential")


class ScriptRecorder:
    """The main thread records, another one writes."""

    def __init__(
        self, file: Path, topology: Topology, *, node_rank: int, arguments: Sequence[str] = ()
    ) -> None:
        self._file = file
        self._owner = {
            "host": topology.host,
            "rank": topology.rank,
            "local_rank": topology.local_rank,
            "node_rank": node_rank,
        }
        self._arguments = arguments_by_name(arguments)
        self._facts: dict[str, dict[str, Any]] = {}
        self._loaders: dict[str, LoaderReport] = {}
        self._places: weakref.WeakKeyDictionary[Any, str] = weakref.WeakKeyDictionary()
        self.modules = DdpModules(topology.rank)
        self._num_changes = 1
        self._num_written = 0

    def record_facts(self) -> None:
        """Once, when the process group exists: by then the script has loaded its modules."""
        if not self._facts:
            with contextlib.suppress(Exception):
                self._facts = script_facts(self._arguments)
                self._num_changes += 1

    def record_loader(self, loader: Any, caller: FrameType | None) -> None:
        with contextlib.suppress(Exception):
            if loader in self._places or len(self._loaders) >= MAX_LOADERS:
                return
            self._places[loader] = place = self._place(caller)
            self._loaders[place] = _loader_report(loader, is_uneven=self.modules.is_joining())
            self._num_changes += 1

    def write(self) -> None:
        """Write what is new. Called once a second, and at the end."""
        distributed = sys.modules.get("torch.distributed")
        with contextlib.suppress(Exception):
            if not self._facts and distributed is not None and distributed.is_initialized():
                self.record_facts()
            self.modules.collect()
            # Before they are read: later changes are written the next time.
            num_changes = self._num_changes + self.modules.num_changes
            if num_changes == self._num_written:
                return
            report = ScriptReport(
                owner=self._owner,
                facts=self._facts,
                loaders=dict(self._loaders),
                modules=self.modules.reports(),
            )
            self._file.with_suffix(".new").write_text(json.dumps(asdict(report)), encoding="utf-8")
            self._file.with_suffix(".new").replace(self._file)
            self._num_written = num_changes

    def _place(self, frame: FrameType | None) -> str:
        """The user's line that iterates; a second loader there has a number."""
        while (
            frame is not None
            and frame.f_back
            and any(folder in frame.f_code.co_filename for folder in INSTALLED)
        ):
            frame = frame.f_back
        place = (
            "unknown"
            if frame is None
            else f"{Path(frame.f_code.co_filename).name}:{frame.f_lineno}"
        )
        number = sum(recorded.partition(" ")[0] == place for recorded in self._loaders) + 1
        return place if number == 1 else f"{place} (number {number})"


def arguments_by_name(words: Sequence[str]) -> dict[str, str]:
    """`--lr 0.1 --amp data x=1` as `{"--lr": "0.1", "--amp": "given", "argument 1": "data", "x":
    "1"}`."""
    values_by_name: dict[str, list[str]] = {}
    rest = list(words)
    num_places = 0
    while rest:
        word = rest.pop(0)
        if IS_OPTION.match(word):
            name, is_assigned, value = word.partition("=")
            if not is_assigned:
                takes_next = bool(rest) and not IS_OPTION.match(rest[0])
                value = rest.pop(0) if takes_next else "given"
        elif assigned := ASSIGNMENT.fullmatch(word):
            name, value = assigned.groups()
        else:
            num_places += 1
            name = f"argument {num_places}"
            value = word
        values_by_name.setdefault(name, []).append(value)
    return {name: " ".join(values) for name, values in values_by_name.items()}


def script_facts(arguments: Mapping[str, str]) -> dict[str, dict[str, Any]]:
    """By group and name. The values of secrets, such as `--api-key`, are hashed."""
    from drumline.rank.rendezvous.rank_facts import ANY_BACKEND, DEFAULTS, OF_BACKEND, code_hashes

    environment = own_variables()
    variables = sorted((*ANY_BACKEND, *(name for names in OF_BACKEND.values() for name in names)))
    # Not getattr: some modules are loaded by the first attribute access.
    modules = [
        (name, getattr(module, "__dict__", {})) for name, module in list(sys.modules.items())
    ]
    versions = {
        name: content["__version__"]
        for name, content in modules
        if "." not in name and "__version__" in content
    }
    return {
        "arguments": {
            name: {"hash": hashlib.blake2b(value.encode(), digest_size=4).hexdigest()}
            if SECRET_NAMES.search(name.lower())
            else value
            for name, value in arguments.items()
        },
        "variables": {
            name: environment.get(name) or DEFAULTS.get(name, "not set") for name in variables
        },
        "packages": {
            "Python": ".".join(platform.python_version_tuple()[:2]),
            **{
                name: str(version) for name, version in versions.items() if isinstance(version, str)
            },
        },
        "script": code_hashes(),
    }


def _loader_report(loader: Any, *, is_uneven: bool) -> LoaderReport:
    samplers = (
        loader.sampler,
        loader.batch_sampler,
        getattr(loader.batch_sampler, "sampler", None),
    )
    is_split = any(getattr(sampler, "num_replicas", 1) > 1 for sampler in samplers)
    may_differ = is_uneven or not sys.modules["torch"].is_grad_enabled()
    return LoaderReport(
        batches=None if may_differ else _length(loader),
        samples=_length(loader.dataset) if is_split else None,
    )


def _length(sized: Any) -> int | None:
    try:
        return len(sized)
    except Exception:
        return None
