"""What puts something on a GPU, and on which: the current one, a fixed one, or that of the rank."""

from __future__ import annotations

import ast

from drumline_lint.program.arguments import argument, has_unknown_arguments
from drumline_lint.program.program import Program
from drumline_lint.program.value import Known, Made

# They choose the GPU of a process, or hide the others from it.
CHOOSES = (
    "torch.cuda.set_device",
    "torch.cuda.device",
    "torch.accelerator.set_device_index",
    "torch.accelerator.set_device_idx",
    "torch.set_default_device",
)
# They need a context on the current GPU.
WORKS = ("torch.cuda.synchronize", "torch.cuda.mem_get_info", "torch.cuda.Stream", "torch.cuda.Event")
_DEVICES: dict[object, str] = {"cuda": "gpu", "cuda:0": "gpu", 0: "gpu", "cpu": "cpu"}
CHOOSING_VARIABLES = ("CUDA_VISIBLE_DEVICES", "HIP_VISIBLE_DEVICES", "ROCR_VISIBLE_DEVICES")


def works_on_first_gpu(program: Program, call: ast.Call) -> bool:
    """Whether it is done on the current GPU or on the first, on every rank; unknown devices are not counted."""
    name = program.name_of(call.func)
    if name in WORKS:
        return not call.args and not call.keywords
    method = call.func.attr if isinstance(call.func, ast.Attribute) else ""
    if method == "cuda" and not name.startswith("torch.cuda"):
        device = argument(call, 0, "device")
        return is_first_gpu(program, device) if device is not None else not has_unknown_arguments(call)
    if method == "to":
        return is_first_gpu(program, argument(call, 0, "device"))
    makes_tensor = name.startswith("torch.") and name.count(".") == 1 and name != "torch.device"
    return makes_tensor and name != "torch.load" and is_first_gpu(program, argument(call, None, "device"))


def is_first_gpu(program: Program, device: ast.expr | None) -> bool:
    """`"cuda"`, `"cuda:0"`, 0, `torch.device("cuda")`, where nothing else is possible but a CPU."""
    values = program.values(device)
    meant = [_meant(program, value) for value in values]
    return "gpu" in meant and all(one in ("gpu", "cpu") for one in meant)


def _meant(program: Program, value: object) -> str:
    if isinstance(value, Made) and value.name == "torch.device":
        if argument(value.call, 1, "index") is not None:
            return ""
        inner = {_meant(program, one) for one in program.values(argument(value.call, 0, "type"))}
        return "gpu" if "gpu" in inner and inner <= {"gpu", "cpu"} else "cpu" if inner == {"cpu"} else ""
    if not isinstance(value, Known) or isinstance(value.value, bool):
        return ""
    return _DEVICES.get(value.value, "")
