"""Which modules of drumline one batch passes: those whose functions are called from the command up
to the first `optimizer.step`: `make modules`.

Class bodies, and what a module calls while it is imported, do not count.
"""

from __future__ import annotations

import contextlib
import inspect
import io
import sys
import tempfile
from dataclasses import dataclass, field
from pathlib import Path
from types import CodeType, FrameType

import torch
from torch.optim.optimizer import register_optimizer_step_pre_hook

import drumline
from drumline.cli import main as run_command

PACKAGE = Path(drumline.__file__).parent
COMMAND = ["train", "digits", "--train.epochs", "none", "--train.steps", "1", "--fresh"]


@dataclass
class Trace:
    """The modules whose functions were called, in order of the first call."""

    modules: list[Path] = field(default_factory=list)
    has_ended: bool = False

    def profile(self, frame: FrameType, event: str, argument: object) -> None:
        code = frame.f_code
        if event == "call" and is_function_of_package(code) and not is_importing(frame):
            module = Path(code.co_filename).relative_to(PACKAGE)
            if module not in self.modules:
                self.modules.append(module)

    def end(self, optimizer: torch.optim.Optimizer, *arguments: object) -> None:
        sys.setprofile(None)
        self.has_ended = True


def is_function_of_package(code: CodeType) -> bool:
    is_function = bool(code.co_flags & inspect.CO_OPTIMIZED)
    return is_function and code.co_filename.startswith(f"{PACKAGE}/")


def is_importing(frame: FrameType | None) -> bool:
    """Whether a module of the package is being imported, and calls the frame."""
    while frame is not None:
        code = frame.f_code
        if code.co_name == "<module>" and code.co_filename.startswith(f"{PACKAGE}/"):
            return True
        frame = frame.f_back
    return False


def modules_on_the_way() -> list[Path]:
    """Of a run of one step in this process."""
    trace = Trace()
    register_optimizer_step_pre_hook(trace.end)
    with tempfile.TemporaryDirectory() as folder:
        sys.argv = ["drumline", *COMMAND, "--run", folder]
        sys.setprofile(trace.profile)
        try:
            with contextlib.redirect_stdout(io.StringIO()):
                run_command()
        finally:
            sys.setprofile(None)
    if not trace.has_ended:
        raise RuntimeError(f"`drumline {' '.join(COMMAND)}` took no step")
    return trace.modules


def main() -> None:
    modules = modules_on_the_way()
    print(f"modules from the command to the first optimizer.step: {len(modules)}")
    for module in modules:
        print(f"  {module}")


if __name__ == "__main__":
    main()
