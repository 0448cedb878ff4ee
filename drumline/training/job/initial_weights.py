"""The weights that a new run begins with (`--model.init`): from a safetensors file, a Hugging Face
folder, or a run.

Rank 0 reads them, compares them with the model and sends them to the other ranks, so that only rank
0 needs the files.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path
from shlex import quote

import torch
from torch import Tensor, nn

from drumline.base.errors import CheckpointError, UsageError, as_list
from drumline.base.text import join_names, plural
from drumline.base.untrusted import open_regular, parse_json, read_regular
from drumline.checkpoint import store, tensor_file
from drumline.checkpoint.state import model_state
from drumline.config.schema import ModelConfig
from drumline.rank.collectives import broadcast_tensors
from drumline.runs import catalog, manifest
from drumline.runs.manifest import CorruptCheckpointError
from drumline.runs.run_folder import RunFolder
from drumline.training.manager import RunManager
from drumline.training.saved.saved_run import find_checkpoint

SINGLE_FILE = "model.safetensors"
INDEX_FILE = "model.safetensors.index.json"
PICKLE_ENDINGS = (".pt", ".pth", ".bin", ".ckpt", ".pkl", ".pickle")
DDP_PREFIX = "module."
_ZIP = b"PK\x03\x04"  # how a file of torch.save begins
_MOST_NAMES = 20
_GIVE = "give a .safetensors file, a folder with model.safetensors, or a run folder"


def load_initial_weights(
    settings: ModelConfig,
    model: nn.Module,
    ddp: RunManager,
    report: Callable[..., None],
) -> None:
    """Collective: put the weights that `model.init` names into a new model, and report what they
    are. An error on rank 0, before anything is changed, if they do not fit."""
    fitting = None
    if ddp.is_main_process():
        path, tensors = read_weights(Path(str(settings.init)))
        fitting, problems = fit_weights(tensors, model)
        advice = (
            "set the model up as for these weights, or load what fits, and list the rest, with "
            "--no-model.init_strict"
        )

        if not fitting:
            advice = "give weights of this model: no tensor of these fits"

        if not fitting or (problems and settings.init_strict):
            raise UsageError(
                as_list(f"the weights in {path} do not fit {type(model).__name__}:", problems),
                next_step=advice,
            )

        report("note", message=f"begins with {plural(len(fitting), 'tensor')} from {path}")
        if problems:
            report(
                "warning",
                message=f"the model keeps its own values where they do not fit: {'; '.join(problems)}",
            )

    model.load_state_dict(broadcast_tensors(fitting), strict=False)


def fit_weights(
    read_tensors: Mapping[str, Tensor], model: nn.Module
) -> tuple[dict[str, Tensor], list[str]]:
    """Those that fit the model by name, shape and type, and sentences about what does not. One of
    the names of a tied weight is enough; a DDP model's names, which all begin with `module.`, count
    without that. A tensor that has several names in the model is returned once."""
    tensors, aliases = model_state(model)
    stored = {**{name: name for name in tensors}, **aliases}

    is_of_ddp = all(name.startswith(DDP_PREFIX) for name in read_tensors)
    if is_of_ddp and stored.keys().isdisjoint(read_tensors):
        read_tensors = {
            name.removeprefix(DDP_PREFIX): tensor for name, tensor in read_tensors.items()
        }

    shared_names = [name for name in stored if name in read_tensors]
    fitting: dict[str, Tensor] = {}
    different = []

    for name in shared_names:
        tensor_read = read_tensors[name]
        stored_name = stored[name]

        difference = _difference(tensor_read, tensors[stored_name])
        if difference is not None:
            different.append(f"{name} is {difference}")
            continue

        first = fitting.setdefault(stored_name, tensor_read)
        if first is not tensor_read and not torch.equal(first, tensor_read):
            different.append(
                f"{name} and another name of the same tensor in the model have different values"
            )

    stored_names_read = {stored[name] for name in shared_names}
    missing = [name for name in tensors if name not in stored_names_read]
    unexpected = [name for name in read_tensors if name not in stored]
    problems = []
    if missing:
        problems.append(f"missing: {join_names(missing, most=_MOST_NAMES)}")
    if unexpected:
        problems.append(f"not in the model: {join_names(unexpected, most=_MOST_NAMES)}")

    return fitting, problems + sorted(different)[:_MOST_NAMES]


def _difference(read: Tensor, expected: Tensor) -> str | None:
    """Its shape or type, if the model has another; any floating point type is converted."""
    if read.shape != expected.shape:
        return f"{list(read.shape)}, and {list(expected.shape)} in the model"

    is_converted = read.is_floating_point() and expected.is_floating_point()
    if read.dtype != expected.dtype and not is_converted:
        return f"{read.dtype}, and {expected.dtype} in the model"
    return None


def read_weights(path: Path) -> tuple[Path, Mapping[str, Tensor]]:
    """The tensors of a safetensors file, of a folder with one or with an index of several (as
    Hugging Face saves a model), of a checkpoint, or of the best checkpoint of a run; with the path
    of the file or of the checkpoint. Mapped from the files: copy those that you keep."""
    if path.is_file():
        return path, _read_file(path)

    if not path.is_dir():
        raise UsageError(
            f"there is no file or folder {path} (looked in {Path.cwd()})", next_step=_GIVE
        )

    if (path / manifest.FILE_NAME).is_file():
        return path, _read_checkpoint(path)
    if RunFolder(path).checkpoints.is_dir():
        return read_weights(_best_checkpoint(path))

    index = path / INDEX_FILE
    if index.is_file():
        return index, _read_shards(index)

    single = path / SINGLE_FILE
    if single.is_file():
        return single, _read_file(single)

    unnamed_files = sorted(path.glob("*.safetensors"))
    if not unnamed_files:
        for file in sorted(path.iterdir()):
            if file.suffix in PICKLE_ENDINGS:
                _refuse_pickle(file)

    raise UsageError(
        f"{path} has no {SINGLE_FILE}, no {INDEX_FILE} and no checkpoints",
        next_step=f"name the file: {unnamed_files[0]}" if unnamed_files else _GIVE,
    )


def _best_checkpoint(run: Path) -> Path:
    """That of a run folder."""
    try:
        return find_checkpoint(run, "best")
    except UsageError as error:  # none was evaluated
        error.next_step = f"name a checkpoint: {find_checkpoint(run, 'last', prints=False)}"
        raise


def _read_checkpoint(path: Path) -> Mapping[str, Tensor]:
    """The model's tensors of a checkpoint, when every byte of it is checked."""
    catalog.verify(path)
    tensors = store.read(path).tensors
    if "model" not in tensors:
        raise CheckpointError(
            f"the checkpoint {path} holds no model, but {join_names(sorted(tensors))}",
            next_step="give another one",
        )

    return tensors["model"]


def _read_shards(index: Path) -> dict[str, Tensor]:
    """All files of an index of Hugging Face's."""
    try:
        document = parse_json(
            read_regular(index, most=catalog.MAX_DOCUMENT_BYTES, follow_links=True)
        )

        files = sorted(set(document["weight_map"].values()))
        if not all(manifest.NAME.fullmatch(file) for file in files):
            raise ValueError("it names a file outside its folder")
    except (OSError, ValueError, LookupError, TypeError, AttributeError) as error:
        raise UsageError(
            f"{index} is not an index of safetensors files: {type(error).__name__}: {error}",
            next_step=_GIVE,
        ) from error

    tensors: dict[str, Tensor] = {}
    for file in files:
        tensors |= _read_file(index.with_name(file))

    return tensors


def _read_file(path: Path) -> dict[str, Tensor]:
    """The tensors of one safetensors file."""
    try:
        _refuse_pickle(path)
        return tensor_file.read(path, follow_links=True)
    except OSError as error:
        raise UsageError(f"{path} cannot be read: {error.strerror}", next_step=_GIVE) from error
    except CorruptCheckpointError as error:
        raise UsageError(
            f"{path} is not a complete safetensors file: {error.reason}", next_step=_GIVE
        ) from error


def _refuse_pickle(path: Path) -> None:
    """Its name and its first bytes are checked, nothing in it is loaded."""
    with open_regular(path, follow_links=True) as file:
        is_zip = file.read(len(_ZIP)) == _ZIP

    if not is_zip and path.suffix not in PICKLE_ENDINGS:
        return

    to = path.with_suffix(".safetensors")
    raise UsageError(
        f"{path} is a pickle, which may run code when it is loaded; weights are read from safetensors only",
        next_step='convert it once, if you trust it: python -c "import sys, torch; from safetensors.torch import '
        "save_file; state = torch.load(sys.argv[1], map_location='cpu', weights_only=True); save_file({name: "
        f'tensor.clone() for name, tensor in state.items()}}, sys.argv[2])" {quote(str(path))} {quote(str(to))}',
    )
