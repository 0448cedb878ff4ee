"""Which variables of the controller's environment the ranks on other hosts get: few by themselves, others by `--env`.

Their values go through ssh's stdin, so that no command line has them, and no message either.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Mapping

# What sets up the libraries between ranks, which must be the same on all of them.
PREFIXES = ("NCCL_", "GLOO_", "TORCH_", "PYTORCH_", "UCX_", "FI_")
NAMES = ("OMP_NUM_THREADS", "MKL_NUM_THREADS", "CUBLAS_WORKSPACE_CONFIG", "CUDA_DEVICE_ORDER", "DATASET_DIR")
NAME = re.compile(r"[A-Za-z_][A-Za-z0-9_]*")


def wrong_variables(given: Iterable[str], environment: Mapping[str, str]) -> Iterator[str]:
    """What is wrong with the values of `--env`; the name alone is told."""
    for number, word in enumerate(given, start=1):
        name, equals, _ = word.partition("=")
        if not NAME.fullmatch(name):
            yield f"--env: number {number} is neither NAME nor NAME=VALUE"
        elif not equals and name not in environment:
            yield f"--env {name}: is not set here; set it, or give --env {name}=VALUE"


def variables_for_ranks(given: Iterable[str], environment: Mapping[str, str]) -> dict[str, str]:
    """The environment to add on every host."""
    chosen = {
        name: value for name, value in environment.items() if name.startswith(PREFIXES) or name in NAMES
    }
    for word in given:
        name, equals, value = word.partition("=")
        chosen[name] = value if equals else environment[name]
    return chosen
