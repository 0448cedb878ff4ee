"""What a stack shows: whose code a process is in, and whether it loads data or is in a collective.
Frames have the form `path/file.py:12 in name`, the innermost call first."""

from __future__ import annotations

import re
import sys
from collections.abc import Iterator, Sequence
from itertools import takewhile

# Where libraries are installed, or the beginning of a shortened path; and names that are not files.
_INSTALLED = re.compile(r"(^|/)(site-packages|dist-packages)/|(^|/)(lib/)?python3[.\d]*/|^<")
_LIBRARY = re.compile(
    r"^(accelerate|datasets|huggingface_hub|lightning|pytorch_lightning|safetensors|transformers"
    r"|torch|torchaudio|torchdata|torchvision|triton|streaming|webdataset"
    r"|av|cv2|h5py|lmdb|numpy|pandas|PIL|pyarrow|scipy|skimage|sklearn|zarr"
    r"|aiohttp|boto3|botocore|fsspec|requests|s3fs|urllib3)/"
)
_OURS = re.compile(
    r"(^|/)drumline/((base|checkpoint|cli|config|data|launch|metrics|net|parallel|rank|report|runs|storage|tools|training"
    r"|watch)/|__main__\.py:)"
)
_LOADING = re.compile(r"(^|/)torch/utils/data/|(^|/)drumline/data/")

# Not the launcher's wrapper around a whole script, `torch/distributed/elastic/...`.
_DISTRIBUTED = re.compile(
    r"(^|/)torch/distributed/(?!elastic|run\.|launcher)|(^|/)drumline/(rank/collectives|parallel/shard_sum)\.py:"
)
_COLLECTIVE = re.compile(r"(?:^|/)torch/distributed/distributed_c10d\.py:\S+ in ([a-z]\w*)$")
_BACKWARD = re.compile(r" in _engine_run_backward$")
_DEBUGGER = re.compile(r"(^|/)(pdb|bdb)\.py:|(^|/)(_?pydevd|debugpy)[/_]")
_WORKER_LOOP = re.compile(r" in _worker_loop$")


def users_frame(stack: Sequence[str]) -> str:
    """The innermost call that is neither a library's nor ours, its path shortened; empty: there is
    none."""
    return _short(next(filter(_is_users, stack), ""))


def innermost(stack: Sequence[str]) -> str:
    """The user's innermost frame, otherwise the innermost of all."""
    return users_frame(stack) or (_short(stack[0]) if stack else "")


def is_loading(stack: Sequence[str]) -> bool:
    """Whether it fetches a batch: in a DataLoader, or in a dataset that one called."""
    return any(_LOADING.search(frame) for frame in stack)


def is_in_collective(stack: Sequence[str]) -> bool:
    """Whether the user or Drumline called a collective, or a backward pass, which contains
    DDP's."""
    return any(
        _DISTRIBUTED.search(frame) or _BACKWARD.search(frame) for frame in _called_by_user(stack)
    )


def is_at_breakpoint(stack: Sequence[str]) -> bool:
    """Whether a Python debugger has stopped it in the user's code."""
    return any(_DEBUGGER.search(frame) for frame in _called_by_user(stack))


def operation(stack: Sequence[str]) -> str:
    """The collective that it called, by its name in torch; in a backward pass, DDP's. Empty:
    none."""
    for frame in _called_by_user(stack):
        if called := _COLLECTIVE.search(frame):
            return called[1]
        if _BACKWARD.search(frame):
            return "all_reduce of gradients"

    return ""


def is_idle_worker(stack: Sequence[str]) -> bool:
    """Whether a DataLoader worker waits for work: it is in its loop, but reads no sample."""
    in_loop = list(takewhile(lambda frame: not _WORKER_LOOP.search(frame), stack))
    return not users_frame(in_loop) and not any(" in fetch" in frame for frame in stack)


def _called_by_user(stack: Sequence[str]) -> Iterator[str]:
    """The frames of libraries above the user's innermost."""
    return takewhile(lambda frame: not _is_users(frame), stack)


def _is_users(frame: str) -> bool:
    """Whether the code is neither installed, nor ours, nor of the standard library."""
    if _INSTALLED.search(frame) or _OURS.search(frame) or _LIBRARY.search(frame):
        return False

    first, slash, _ = frame.partition("/")
    return not (slash and first in sys.stdlib_module_names)


def _short(frame: str) -> str:
    """`/home/me/job/data/images.py:31 in load` -> `data/images.py:31 in load`."""
    path, name, rest = frame.partition(" in ")
    return "/".join(path.split("/")[-2:]) + name + rest
