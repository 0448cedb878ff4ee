"""Methods that are wrapped behave as before."""

from __future__ import annotations

import inspect
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

from drumline.parallel.scripts.torch_hooks import wrap_method


class Model:
    """Stands for one of torch's classes."""

    def forward(self, x: int, *, times: int = 1) -> float:
        """What forward does."""
        return 1 / x * times


def test_a_wrapped_method() -> None:
    observed: list[Any] = []

    def wrapper(call: Any, *args: Any, **kwargs: Any) -> Any:
        observed.append((args[1:], kwargs))
        return call(*args, **kwargs)

    before = Model.forward
    wrap_method(Model, "forward", wrapper)
    try:
        assert Model().forward(2, times=4) == 2
        assert observed == [((2,), {"times": 4})]
        assert inspect.signature(Model.forward) == inspect.signature(before)
        assert Model.forward.__code__.co_filename == before.__code__.co_filename, (
            "torch.compile goes by that"
        )
    finally:
        Model.forward = before  # type: ignore[method-assign]


def test_a_torch_that_cannot_be_observed_is_reported_and_trained_with(tmp_path: Path) -> None:
    """One that lacks what is wrapped: here, a package of that name with nothing in it."""
    (tmp_path / "torch").mkdir()
    (tmp_path / "torch" / "__init__.py").touch()
    program = (
        "from drumline.watch.heartbeat import HeartbeatWriter; from drumline.parallel.scripts import torch_hooks; "
        "torch_hooks.observe_torch(HeartbeatWriter(), None); import torch; print(torch.__file__)"
    )
    path = os.pathsep.join([str(tmp_path), *sys.path])
    done = subprocess.run(
        [sys.executable, "-c", program],
        env={**os.environ, "PYTHONPATH": path},
        capture_output=True,
        text=True,
    )
    assert done.stdout == f"{tmp_path}/torch/__init__.py\n"
    assert done.stderr == (
        "drumline: ranks are not compared: this version of torch cannot be observed: ModuleNotFoundError: No module "
        "named 'torch.distributed'\n"
    )
