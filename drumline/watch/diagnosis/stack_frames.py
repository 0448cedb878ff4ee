"""What a stack says: whose code a process is in, and whether it is after data or in a collective.

Frames read `path/file.py:12 in name`, the innermost call first. A user wants to see the line of their own file, not the
one of torch's or Python's that it ended in.
"""

from __future__ import annotations

import re
import sys
from collections.abc import Sequence
from itertools import takewhile

# Where libraries are installed, or, of a path that was shortened, what it begins with; and what is not a file at all.
_INSTALLED = re.compile(r"(^|/)(site-packages|dist-packages)/|(^|/)(lib/)?python3[.\d]*/|^<")
_PACKAGES = sys.stdlib_module_names | {
    *(
        "accelerate",
        "datasets",
        "huggingface_hub",
        "lightning",
        "pytorch_lightning",
        "safetensors",
        "transformers",
    ),
    *("torch", "torchaudio", "torchdata", "torchvision", "triton", "streaming", "webdataset"),
    *(
        "av",
        "cv2",
        "h5py",
        "lmdb",
        "numpy",
        "pandas",
        "PIL",
        "pyarrow",
        "scipy",
        "skimage",
        "sklearn",
        "zarr",
    ),
    *("aiohttp", "boto3", "botocore", "fsspec", "requests", "s3fs", "urllib3"),
}
_OUR_ROOMS = (
    "cli|config|data|distributed|engine|launch|metrics|models|prove|tasks|verify|watch|checkpoint|doctor"
)
_OURS = re.compile(rf"(^|/)drumline/(({_OUR_ROOMS})/|(manager|__main__|user_code)\.py:)")
_LOADING = re.compile(r"(^|/)torch/utils/data/|(^|/)drumline/data/")
# Not the launcher's wrapper around a whole script, `torch/distributed/elastic/...`.
_MEETING = re.compile(
    r"(^|/)torch/distributed/(?!elastic|run\.|launcher)|(^|/)drumline/distributed/(collectives|shard_sum)\.py:"
)
_COLLECTIVE = re.compile(r"(?:^|/)torch/distributed/distributed_c10d\.py:\S+ in ([a-z]\w*)$")
_BACKWARD = re.compile(r" in _engine_run_backward$")
_DEBUGGER = re.compile(r"(^|/)(pdb|bdb)\.py:|(^|/)(_?pydevd|debugpy)[/_]")
_IDLE_WORKER = re.compile(r" in _worker_loop$")


def users_frame(stack: Sequence[str]) -> str:
    """The innermost call that is neither a library's nor ours, its path shortened; empty when there is none."""
    return _short(next(filter(_is_users, stack), ""))


def innermost(stack: Sequence[str]) -> str:
    """The user's frame, or else the very innermost one."""
    return users_frame(stack) or (_short(stack[0]) if stack else "")


def is_loading(stack: Sequence[str]) -> bool:
    """Whether it fetches a batch: in a DataLoader, or in a dataset that one called."""
    return any(_LOADING.search(frame) for frame in stack)


def is_meeting(stack: Sequence[str]) -> bool:
    """Whether it is in a collective that the user or we called, or in a backward pass, where DDP has its own."""
    inner = takewhile(lambda frame: not _is_users(frame), stack)
    return any(_MEETING.search(frame) or _BACKWARD.search(frame) for frame in inner)


def is_at_prompt(stack: Sequence[str]) -> bool:
    """Whether a debugger of Python's own has stopped it in the user's code, at a breakpoint."""
    return any(_DEBUGGER.search(frame) for frame in takewhile(lambda frame: not _is_users(frame), stack))


def operation(stack: Sequence[str]) -> str:
    """The collective that it has called, by its name in torch; in a backward pass, that of DDP. Empty: none is seen."""
    for frame in takewhile(lambda frame: not _is_users(frame), stack):
        if called := _COLLECTIVE.search(frame):
            return called[1]
        if _BACKWARD.search(frame):
            return "all_reduce of gradients"
    return ""


def is_idle_worker(stack: Sequence[str]) -> bool:
    """Whether a DataLoader worker waits for work: below its loop there is nothing but the queue."""
    return not users_frame(stack[: _depth(stack)]) and not any(" in fetch" in frame for frame in stack)


def _is_users(frame: str) -> bool:
    if _INSTALLED.search(frame) or _OURS.search(frame):
        return False
    first, slash, _ = frame.partition("/")
    return not (slash and first in _PACKAGES)


def _depth(stack: Sequence[str]) -> int:
    return next((depth for depth, frame in enumerate(stack) if _IDLE_WORKER.search(frame)), len(stack))


def _short(frame: str) -> str:
    """`/home/me/job/data/images.py:31 in load` -> `data/images.py:31 in load`."""
    path, name, rest = frame.partition(" in ")
    return "/".join(path.split("/")[-2:]) + name + rest
