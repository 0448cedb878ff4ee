"""What a rank notes of its script, in a file that the sidecar reads: what it runs with, its loaders, its DDP modules.

Nothing here may fail the script: what cannot be found out is not noted.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import platform
import sys
import weakref
from collections.abc import Mapping
from dataclasses import asdict
from pathlib import Path
from types import FrameType
from typing import Any

from drumline.launch.topology import Topology, own_variables
from drumline.watch.rank.ddp_modules import DdpModules
from drumline.watch.scripts.arguments import by_name, is_secret
from drumline.watch.scripts.notes import LoaderNote, Note

INSTALLED = ("/site-packages/", "/dist-packages/")
MOST_LOADERS = 64


class ScriptNotes:
    """Noted by the main thread, written by another one."""

    def __init__(self, file: Path, topology: Topology, *, node_rank: int) -> None:
        self._file = file
        self._owner = {
            "host": topology.host,
            "rank": topology.rank,
            "local_rank": topology.local_rank,
            "node_rank": node_rank,
        }
        self._arguments: dict[str, str] = {}
        self._facts: dict[str, dict[str, Any]] = {}
        self._loaders: dict[str, LoaderNote] = {}
        self._places: weakref.WeakKeyDictionary[Any, str] = weakref.WeakKeyDictionary()
        self.modules = DdpModules(topology.rank)
        self._num_changes, self._num_written = 1, 0

    def note_arguments(self, words: list[str]) -> None:
        """Before the script runs, which may change them."""
        self._arguments = by_name(words)

    def note_facts(self) -> None:
        """Once, when the script has loaded what it trains with: the process group is there."""
        if not self._facts:
            with contextlib.suppress(Exception):
                self._facts = _facts(self._arguments)
                self._num_changes += 1

    def note_loader(self, loader: Any, caller: FrameType | None) -> None:
        """A DataLoader that is about to be iterated over."""
        with contextlib.suppress(Exception):
            if loader in self._places or len(self._loaders) >= MOST_LOADERS:
                return
            self._places[loader] = place = self._place(caller)
            self._loaders[place] = _loader(loader, is_uneven=self.modules.is_joining())
            self._num_changes += 1

    def write(self) -> None:
        """What is new, if anything is. Called once a second, and at the end."""
        distributed = sys.modules.get("torch.distributed")
        with contextlib.suppress(Exception):
            if not self._facts and distributed is not None and distributed.is_initialized():
                self.note_facts()
            self.modules.gather()
            # Before they are read: what changes meanwhile is written the next time.
            num_changes = self._num_changes + self.modules.num_changes
            if num_changes == self._num_written:
                return
            note = Note(
                owner=self._owner,
                facts=self._facts,
                loaders=dict(self._loaders),
                modules=self.modules.notes(),
            )
            self._file.with_suffix(".new").write_text(json.dumps(asdict(note)), encoding="utf-8")
            self._file.with_suffix(".new").replace(self._file)
            self._num_written = num_changes

    def _place(self, frame: FrameType | None) -> str:
        """The user's line that iterates; a second loader there has a number."""
        while (
            frame is not None and frame.f_back and any(one in frame.f_code.co_filename for one in INSTALLED)
        ):
            frame = frame.f_back
        place = "unknown" if frame is None else f"{Path(frame.f_code.co_filename).name}:{frame.f_lineno}"
        number = sum(known.partition(" ")[0] == place for known in self._loaders) + 1
        return place if number == 1 else f"{place} (number {number})"


def _facts(arguments: Mapping[str, str]) -> dict[str, dict[str, Any]]:
    from drumline.distributed.start.loaded_code import code_hashes
    from drumline.distributed.start.rank_facts import ANY_BACKEND, DEFAULTS, OF_BACKEND

    environment = own_variables()
    names = sorted((*ANY_BACKEND, *(name for names in OF_BACKEND.values() for name in names)))
    return {
        "arguments": {
            f"the argument {name}": {"hash": _short_hash(value)} if is_secret(name) else value
            for name, value in arguments.items()
        },
        "variables": {
            f"the variable {name}": environment.get(name) or DEFAULTS.get(name, "not set") for name in names
        },
        "packages": {
            "Python's version": ".".join(platform.python_version_tuple()[:2]),
            **{f"{name}'s version": version for name, version in _versions().items()},
        },
        "script": {f"the code of {name}": digest for name, digest in code_hashes().items()},
    }


def _short_hash(value: str) -> str:
    return hashlib.blake2b(value.encode(), digest_size=4).hexdigest()


def _versions() -> dict[str, str]:
    """Of every package that is loaded and says it."""
    found = {}
    for name, module in list(sys.modules.items()):
        # Not getattr: some modules load themselves when they are asked for anything.
        version = getattr(module, "__dict__", {}).get("__version__")
        if "." not in name and isinstance(version, str):
            found[name] = str(version)
    return found


def _loader(loader: Any, *, is_uneven: bool) -> LoaderNote:
    torch = sys.modules["torch"]
    samplers = (loader.sampler, loader.batch_sampler, getattr(loader.batch_sampler, "sampler", None))
    is_split = any(getattr(sampler, "num_replicas", 1) > 1 for sampler in samplers)
    may_differ = is_uneven or not torch.is_grad_enabled()
    return LoaderNote(
        batches=None if may_differ else _length(loader), samples=_length(loader.dataset) if is_split else None
    )


def _length(sized: Any) -> int | None:
    try:
        return len(sized)
    except Exception:
        return None
