"""Saves and loads an optimizer's state by parameter *name*, with the settings of its groups.

torch numbers parameters by position, so a reordered model would get another tensor's momentum. Here
a name that does not match is an error. Loading uses the optimizer's own `load_state_dict`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from drumline.base.errors import CheckpointError, OptimizerMismatchError, as_list
from drumline.base.untrusted import MAX_BITS
from drumline.checkpoint.tensor_file import Tensors
from drumline.parallel.wrap import unwrap_model

Models = nn.Module | Mapping[str, nn.Module]
"""The model of an optimizer, or several by name: their parameters are then called
`NAME.parameter`."""

# Not state: the optimizer keeps its own values.
_NOT_SAVED = ("params", "param_names", "fused", "foreach", "capturable", "differentiable")


def optimizer_state(
    model: Models, optimizer: Optimizer
) -> tuple[dict[str, Tensor], dict[str, Any]]:
    """The tensors as `NAME/KEY`, sharing memory with the optimizer, and a document with everything
    else."""
    content = optimizer.state_dict()
    groups = _groups(model, optimizer)
    names = _names_by_number(content, groups)
    tensors: dict[str, Tensor] = {}

    saved_groups = []
    for index, group in enumerate(groups):
        saved = content["param_groups"][index]
        settings = {key: saved[key] for key in saved if key not in _NOT_SAVED}
        encoded = encode_state(settings, f"groups/{index}", tensors)
        saved_groups.append({"params": list(group), "settings": encoded})

    state = {}
    unnamed = {}
    for number, entry in content["state"].items():
        if number in names:
            name = names[number]
            state[name] = encode_state(entry, name, tensors)
        else:
            unnamed[number] = entry

    parameters = {
        name: {"type": str(parameter.dtype), "shape": list(parameter.shape)}
        for group in groups
        for name, parameter in group.items()
    }

    # A user's optimizer may have more: additional entries, and state that belongs to no parameter.
    additional = {key: content[key] for key in content if key not in ("state", "param_groups")}
    rest = encode_state({"content": additional, "state": unnamed}, "rest", tensors)

    document = {
        "class": type(optimizer).__name__,
        "groups": saved_groups,
        "parameters": parameters,
        "state": state,
        "rest": rest,
    }
    return tensors, document


def load_optimizer_state(
    model: Models,
    optimizer: Optimizer,
    tensors: Tensors,
    document: Mapping[str, Any],
) -> None:
    """Load a saved state into an optimizer, on any device; its groups must have the same parameters
    by name."""
    groups = _groups(model, optimizer)
    if problems := list(_differences(document, optimizer, groups)):
        raise OptimizerMismatchError(
            as_list("the checkpoint is of another optimizer:", problems),
            next_step="set up the model and the optimizer as for the checkpoint (see config.toml in the run folder)",
        )

    current = optimizer.state_dict()
    parameters = {name: parameter for group in groups for name, parameter in group.items()}

    state = {}
    for number, name in _names_by_number(current, groups).items():
        if name in document["state"]:
            copies = _copies(tensors, parameters[name].device)
            state[number] = decode_state(document["state"][name], copies)

    rest = decode_state(document["rest"], _copies(tensors, torch.device("cpu")))
    state.update(rest["state"])

    loaded_groups = []
    for group, saved in zip(current["param_groups"], document["groups"], strict=True):
        settings = decode_state(saved["settings"], tensors.__getitem__)
        loaded_groups.append({**group, **_in_form_of(group, settings)})

    content = {**rest["content"], "state": state, "param_groups": loaded_groups}
    optimizer.load_state_dict(content)
    _keep_as_saved(optimizer, parameters, tensors, document)


def _groups(model: Models, optimizer: Optimizer) -> list[dict[str, nn.Parameter]]:
    """The parameters of each group by name; an error if the model does not have one."""
    names = {id(parameter): name for name, parameter in _named_parameters(model)}
    for index, group in enumerate(optimizer.param_groups):
        for parameter in group["params"]:
            if id(parameter) not in names:
                raise CheckpointError(
                    f"group {index} of the optimizer holds a parameter of shape {list(parameter.shape)} that "
                    "the model does not have",
                    next_step="build the optimizer from model.parameters(), after the last change to the model",
                )

    return [
        {names[id(parameter)]: parameter for parameter in group["params"]}
        for group in optimizer.param_groups
    ]


def _named_parameters(model: Models) -> Iterator[tuple[str, nn.Parameter]]:
    """The parameters of one model, or of several under their names."""
    if isinstance(model, nn.Module):
        yield from unwrap_model(model).named_parameters()
        return

    for prefix, part in model.items():
        for name, parameter in unwrap_model(part).named_parameters():
            yield f"{prefix}.{name}", parameter


def _names_by_number(
    content: Mapping[str, Any], groups: Iterable[Mapping[str, nn.Parameter]]
) -> dict[int, str]:
    """Of the numbers that the optimizer's state dict gives its parameters."""
    names: dict[int, str] = {}
    for saved, group in zip(content["param_groups"], groups, strict=True):
        names |= zip(saved["params"], group, strict=True)
    return names


def _differences(
    document: Mapping[str, Any],
    optimizer: Optimizer,
    groups: list[dict[str, nn.Parameter]],
) -> Iterator[str]:
    """How the saved optimizer differs from this one: class, groups, names and shapes."""
    saved_class = document.get("class")
    here = type(optimizer).__name__

    # a checkpoint of an earlier version has no class
    if saved_class not in (None, here):
        yield f"the optimizer is {saved_class} in the checkpoint and {here} here"

    saved_groups = [group["params"] for group in document["groups"]]
    if len(saved_groups) != len(groups):
        yield f"it has {len(saved_groups)} parameter groups in the checkpoint and {len(groups)} here"
        return

    for index, (saved, current) in enumerate(zip(saved_groups, groups, strict=True)):
        yield from (
            f"{name} is not in group {index} of the checkpoint"
            for name in current
            if name not in saved
        )
        yield from (f"{name} is not in group {index} here" for name in saved if name not in current)

        for name, parameter in current.items():
            shape = list(parameter.shape)
            saved_shape = document["parameters"].get(name, {}).get("shape")
            if name in saved and saved_shape != shape:
                yield f"{name} is {saved_shape} in the checkpoint and {shape} here"


def _copies(tensors: Tensors, device: torch.device) -> Callable[[str], Tensor]:
    """Looks up a saved tensor, copied to where the optimizer has it."""

    def copy_of(name: str) -> Tensor:
        # A copy, because torch keeps these tensors, which may be mapped from a file. torch counts
        # steps on the CPU, and moves the count for fused and capturable optimizers.
        target = torch.device("cpu") if name.endswith("/step") else device
        return tensors[name].to(target, copy=True)

    return copy_of


def _in_form_of(current: Mapping[str, Any], saved: Mapping[str, Any]) -> dict[str, Any]:
    """Saved settings, as tensors or numbers like the optimizer's own: in a CUDA graph the rate is a
    tensor."""
    settings: dict[str, Any] = {}
    for key, value in saved.items():
        form = current.get(key)
        if isinstance(form, Tensor):
            settings[key] = torch.as_tensor(value).to(form, copy=True)
        elif isinstance(value, Tensor):
            settings[key] = value.item() if isinstance(form, int | float) else value.clone()
        else:
            settings[key] = value

    return settings


def _keep_as_saved(
    optimizer: Optimizer,
    parameters: Mapping[str, nn.Parameter],
    tensors: Tensors,
    document: Mapping[str, Any],
) -> None:
    """Undo what torch's loading changes: text, and state whose type differs from its parameter's.
    And give state the strides of its parameter: fused optimizers use memory order, not indices."""
    for name, entry in document["state"].items():
        parameter = parameters[name]
        parameter_type = document["parameters"][name]["type"]
        state = optimizer.state[parameter]

        for key, saved in decode_state(entry, tensors.__getitem__).items():
            value = saved if isinstance(saved, str) else state[key]
            if isinstance(value, Tensor):
                if key != "step" and _has_own_type(saved, parameter_type):
                    value = saved.to(value.device, copy=True)
                value = _in_order_of(parameter, value)
            state[key] = value


def _has_own_type(saved: Any, parameter_type: str) -> bool:
    """Whether a part of a state has another type than its parameter."""
    return isinstance(saved, Tensor) and str(saved.dtype) != parameter_type


def _in_order_of(parameter: nn.Parameter, value: Tensor) -> Tensor:
    """With the strides of the parameter, if it has its shape."""
    if value.shape != parameter.shape or value.stride() == parameter.stride():
        return value

    ordered = torch.empty_like(parameter, dtype=value.dtype, device=value.device)
    return ordered.copy_(value)


def encode_state(value: Any, name: str, tensors: dict[str, Tensor]) -> Any:
    """The JSON of a value called `name`; the tensors in it are put into `tensors` under names below
    it."""
    if isinstance(value, Tensor):
        tensors[name] = value
        return {"tensor": name}

    if isinstance(value, np.generic):
        return value.item()
    if isinstance(value, int) and value.bit_length() > MAX_BITS:
        raise CheckpointError(
            f"{name} cannot be saved: it is an integer of {value.bit_length():,} bits",
            next_step=f"keep it in a tensor, or in integers of up to {MAX_BITS} bits",
        )

    if value is None or isinstance(value, bool | int | float | str):
        return value
    if isinstance(value, list):
        return [encode_state(item, f"{name}/{index}", tensors) for index, item in enumerate(value)]
    if isinstance(value, tuple):
        return {"tuple": encode_state(list(value), name, tensors)}

    if isinstance(value, Mapping) and all(isinstance(key, str | int) for key in value):
        items = []
        for key, item in value.items():
            items.append([key, encode_state(item, f"{name}/{key}", tensors)])
        return {"dict": items}

    raise CheckpointError(
        f"{name} cannot be saved: it is a {type(value).__name__}",
        next_step="keep tensors, numbers, text, lists, tuples and dicts in it; a checkpoint holds no pickles",
    )


def decode_state(value: Any, tensor_of: Callable[[str], Tensor]) -> Any:
    """The reverse of `encode_state`; `tensor_of` returns a tensor by its name."""
    if isinstance(value, list):
        return [decode_state(item, tensor_of) for item in value]
    if not isinstance(value, dict):
        return value

    ((kind, content),) = value.items()
    if kind == "tensor":
        return tensor_of(content)
    if kind == "tuple":
        return tuple(decode_state(content, tensor_of))

    return {key: decode_state(item, tensor_of) for key, item in content}
