"""A run in an object store: which checkpoints are complete there, how they and the run's small files
are fetched, and which run folder uploads to it.

The names are those of the run folder: `checkpoints/step-NNNNNNNN/FILE`, `events/rank-NNNNN.jsonl`.
A checkpoint is complete when its manifest is there, which is uploaded last. `mirror` uploads; this
needs no torch.

Its owner is the run folder whose id is in `mirror.json` of both, so that no run replaces or deletes
checkpoints of another. In the mirror are the ids of the folders before, too, from which the run was
restored.
"""

from __future__ import annotations

import json
import re
import secrets
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import asdict, dataclass
from itertools import count, takewhile
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Annotated, NamedTuple

import msgspec

from drumline.base.errors import CheckpointError, UsageError, as_list
from drumline.base.untrusted import (
    DOCUMENT_BYTES,
    from_json,
    make_own_folder,
    parse_json,
    read_record,
    replace_text,
)
from drumline.runs import catalog, manifest
from drumline.runs.manifest import CorruptCheckpointError, Manifest
from drumline.storage.backends import StoreError
from drumline.storage.object_store import ObjectStore, open_store

CHECKPOINTS = "checkpoints"
MARKER = "mirror.json"
"""In the run folder and in its mirror: the ids of its owners."""

RUN_FILES = ("config.toml", "environment.json", "ledger.jsonl", "settings-history.jsonl")
RUN_FOLDERS = {"events": ".jsonl", "diagnoses": ".json"}
"""Folders of a run whose files with this ending are mirrored."""

_Id = Annotated[str, msgspec.Meta(pattern=r"^[0-9a-f]{16}\Z")]
_OBJECT = re.compile(f"{CHECKPOINTS}/{catalog.STEP_NAME.pattern}/({manifest.NAME.pattern})")


@dataclass(frozen=True)
class Marker:
    """What shows in a run folder that its run is mirrored."""

    url: str
    """Of the mirror."""

    id: _Id
    """Of the run in this folder; a folder gets its name from it."""

    after: _Id | None = None
    """The id of the run folder that uploaded before it: the run was restored from there."""


class MirroredCheckpoints(NamedTuple):
    """What a listing shows."""

    complete: dict[int, Manifest]
    """By step."""

    corrupt: dict[int, str]
    """The manifest is there, but cannot be read: the reason."""


@dataclass(frozen=True)
class MirroredRun:
    """The run under a URL."""

    store: ObjectStore
    """That of its URL."""

    def has_any(self) -> bool:
        """Whether there is anything of a run."""
        return any(
            name in RUN_FILES or name.startswith((CHECKPOINTS, *RUN_FOLDERS))
            for name in self.store.sizes()
        )

    def checkpoints(self) -> MirroredCheckpoints:
        """Lists, and reads the manifests."""
        names: dict[int, list[str]] = {}
        for name in self.store.sizes(CHECKPOINTS):
            if named := _OBJECT.fullmatch(name):
                names.setdefault(int(named[1]), []).append(named[2])

        checkpoints = MirroredCheckpoints({}, {})
        for step, files in sorted(names.items()):
            if manifest.FILE_NAME not in files:
                continue

            try:
                checkpoints.complete[step] = self._read_manifest(step)
            except ValueError as error:
                checkpoints.corrupt[step] = f"{manifest.FILE_NAME}: {error}"
            except StoreError as error:
                if not error.is_bad_copy:
                    raise
                if not error.is_missing:  # or a running job has removed it since
                    checkpoints.corrupt[step] = error.what

        return checkpoints

    def _read_manifest(self, step: int) -> Manifest:
        """ValueError: it is no manifest, or of another step."""
        checkpoint = manifest.parse(self.store.read(object_name(step, manifest.FILE_NAME)))
        if checkpoint.step != step:
            raise ValueError(f"it belongs to step {checkpoint.step}")
        return checkpoint

    def restore_newest(self, mirrored: MirroredCheckpoints, root: Path) -> tuple[int, list[str]]:
        """Fetch the newest complete checkpoint into a folder of checkpoints, every byte compared
        with the manifest: a corrupt one is skipped for the one before it, and one that is not
        finite for one that is. Returns its step, and why others were skipped."""
        skipped = [
            f"step {step} of {self.store} was skipped: {reason}"
            for step, reason in sorted(mirrored.corrupt.items(), reverse=True)
        ]

        def preference(step: int) -> tuple[bool, int]:
            return mirrored.complete[step].non_finite is None, step

        for step in sorted(mirrored.complete, key=preference, reverse=True):
            try:
                self.fetch_checkpoint(step, mirrored.complete[step], root)
                return step, skipped
            except StoreError as error:
                if not error.is_bad_copy:
                    raise
                skipped.append(f"step {step} of {self.store} was skipped: {error.what}")

        raise CheckpointError(
            as_list(f"no checkpoint in {self.store} can be restored", skipped),
            next_step="restore one from a backup, or start a new run with another --checkpoint.mirror",
        )

    def fetch_checkpoint(self, step: int, checkpoint: Manifest, root: Path) -> Path:
        """Fetch a checkpoint; nothing is left of one that fails."""
        from drumline.checkpoint import store  # it loads torch

        final = root / catalog.folder_name(step)
        try:
            with store.new_folder(final) as partial:
                for name, record in checkpoint.files.items():
                    self.store.fetch(
                        object_name(step, name),
                        partial / name,
                        size=record.size,
                        checksum=record.blake3,
                    )

                store.write_file(partial / manifest.FILE_NAME, [manifest.render(checkpoint)])
        except (OSError, StoreError) as error:
            cause = error.__cause__ if isinstance(error, StoreError) else error
            if not isinstance(cause, OSError):
                raise

            needed = sum(record.size for record in checkpoint.files.values())
            reason, next_step = catalog.explain_os_error(cause, folder=root, needed=needed)
            what = f"step {step} of {self.store} could not be restored to {root}: {reason}"
            raise CheckpointError(what, next_step=next_step) from error

        return final

    def verify(self, path: Path) -> Manifest:
        """Like `catalog.verify`, for a checkpoint whose manifest alone is in this folder: its
        objects are read from the store."""
        checkpoint = manifest.read(path)
        for name, record in checkpoint.files.items():
            try:
                self.store.check(
                    object_name(checkpoint.step, name),
                    size=record.size,
                    checksum=record.blake3,
                    reads_all=True,
                )
            except StoreError as error:
                if not error.is_bad_copy:
                    raise
                raise CorruptCheckpointError(path, error.what) from error

        return checkpoint

    def fetch_outline(self, folder: Path) -> None:
        """Fetch of each checkpoint its manifest and position, and the run's small files."""
        root = folder / CHECKPOINTS
        mirrored = self.checkpoints()
        for step in {*mirrored.complete, *mirrored.corrupt}:
            name = manifest.FILE_NAME
            path = root / catalog.folder_name(step)
            path.mkdir(parents=True)

            if step in mirrored.complete:
                (path / name).write_bytes(manifest.render(mirrored.complete[step]))
                name = f"progress{catalog.DOCUMENT}"

            try:
                self.store.fetch(object_name(step, name), path / name, most=DOCUMENT_BYTES)
            except StoreError as error:
                if not error.is_bad_copy:
                    raise

        # Last: a running job uploads the ledger before a checkpoint.
        for _ in self.fetch_files(folder):
            pass

    def fetch_files(self, folder: Path) -> Iterator[Path]:
        """Fetch the run's small files that the folder does not have, one after the other."""
        names = self.store.sizes()
        for name in names:
            if not _is_run_file(name) or (folder / name).exists():
                continue

            make_own_folder((folder / name).parent)
            possible = (piece_name(name, number) for number in count(1))
            pieces = list(takewhile(names.__contains__, possible))
            grows = name.endswith(".jsonl")
            self.store.fetch(
                name,
                folder / name,
                pieces=pieces,
                most=None if grows else DOCUMENT_BYTES,
            )
            yield folder / name

    # Whose it is

    def claim(self, folder: Path, *, is_empty: bool, uploads: bool = False) -> str:
        """The id of the run in this folder, which the mirror gets, too, if this process `uploads`: call
        `check_owner` then, since another one may have been faster. Refuses the mirror of another run,
        and one that a run has been restored from since."""
        marker = self._read_marker(folder)
        owners = self._read_owners()
        owner = owners[-1] if owners else None

        if is_empty:
            marker = marker or self.write_marker(folder)
        elif marker is None or owner not in (None, marker.id, marker.after):
            raise UsageError(
                f"{self.store} has checkpoints, and they are not of the run in {folder}",
                next_step="give --checkpoint.mirror a prefix of its own, or resume from there in an empty --run DIR",
            )

        if uploads and owner != marker.id:
            owners_before = owners if owner == marker.after else []
            self._put_owners([*owners_before, marker.id])

        return marker.id

    def set_aside(self, folder: Path, *, newest: int, mirrored: int) -> Path | None:
        """If the run in this folder was restored elsewhere, and has continued there: move its files to
        a folder in it, where nothing is lost. Refuses if they hold a later step than the mirror.
        `newest` is here, `mirrored` there."""
        marker = self._read_marker(folder)
        if marker is None or marker.id not in self._read_owners()[:-1]:
            return None

        if newest > mirrored:
            raise UsageError(
                f"the run in {folder} has continued elsewhere, up to step {mirrored} in {self.store}; "
                f"step {newest} here is not there",
                next_step="move this folder away to resume from there, or continue from here with another "
                "--checkpoint.mirror",
            )

        aside = folder / f"before-{marker.id}"
        try:
            make_own_folder(aside)  # again after a move that was killed
        except OSError as error:  # a link that came with the run folder is not followed
            raise CheckpointError(
                f"{aside} cannot be used: {error.strerror}",
                next_step="move it away, or resume in another --run DIR",
            ) from error

        with _writing(aside):
            # The marker last: without it, this folder is no part of the run.
            for name in (*RUN_FILES, *RUN_FOLDERS, CHECKPOINTS, MARKER):
                with suppress(FileNotFoundError):
                    (folder / name).rename(aside / name)

        return aside

    def check_owner(self, run_id: str) -> None:
        """Raise if another run folder has claimed the mirror since."""
        owners = self._read_owners()
        if not owners:  # someone has emptied it
            self._put_owners([run_id])
        elif owners[-1] != run_id:
            raise UsageError(
                f"{self.store} has become the mirror of another run folder",
                next_step="stop one of the two runs, or give one of them another --checkpoint.mirror",
            )

    def write_marker(self, folder: Path, *, continues: bool = False) -> Marker:
        """A new id for the run in this folder. `continues`: it is restored from the mirror."""
        owners = self._read_owners() if continues else []
        after = owners[-1] if owners else None
        marker = Marker(self.store.url, secrets.token_hex(8), after=after)
        with _writing(folder / MARKER):
            make_own_folder(folder, follow_links=True)
            replace_text(folder / MARKER, json.dumps(asdict(marker)) + "\n")

        return marker

    def _read_marker(self, folder: Path) -> Marker | None:
        """None: the run in this folder has no mirror at this address. Someone else may have written it."""
        with suppress(OSError, ValueError):
            marker = read_record(Marker, folder / MARKER)
            if marker.url == self.store.url:
                return marker

        return None

    def _read_owners(self) -> list[str]:
        """The ids of the run folders that have uploaded there, each restored from the one before; the
        last does so now. Empty if there are none, or what a killed upload left."""
        try:
            content = self.store.read(MARKER)
        except StoreError as error:
            if not error.is_bad_copy:
                raise
            return []

        with suppress(ValueError, LookupError):
            return from_json(dict[str, list[_Id]], parse_json(content))["ids"]

        return []

    def _put_owners(self, ids: list[str]) -> None:
        """The last one uploads from here on."""
        self.store.put(MARKER, json.dumps({"ids": ids}).encode())


def object_name(step: int, file: str) -> str:
    """`checkpoints/step-00000040/model.safetensors`."""
    return f"{CHECKPOINTS}/{catalog.folder_name(step)}/{file}"


def piece_name(name: str, number: int) -> str:
    """Of the pieces of a file that only grows, the first has the file's own name."""
    return f"{name}.{number:05d}" if number else name


def _is_run_file(name: str) -> bool:
    """Whether it is one of the small files of a run."""
    folder, _, file = name.rpartition("/")
    if not folder:
        return name in RUN_FILES

    has_ending = folder in RUN_FOLDERS and file.endswith(RUN_FOLDERS[folder])
    return has_ending and manifest.NAME.fullmatch(file) is not None


def is_own_name(name: str) -> bool:
    """Whether it may be an object of a checkpoint: people and other programs may keep more below
    the same address."""
    return _OBJECT.fullmatch(name) is not None


@contextmanager
def opened_run(url: str) -> Iterator[tuple[MirroredRun, Path]]:
    """The run under a URL, and a temporary folder with the last part of its name, to fetch it
    to."""
    run = MirroredRun(open_store(url))
    if not run.has_any():
        raise UsageError(
            f"there is no run in {url}", next_step="give the address that --checkpoint.mirror had"
        )

    with TemporaryDirectory(prefix="drumline-") as temporary:
        folder = Path(temporary, run.store.url.rpartition("/")[2])
        folder.mkdir()
        yield run, folder


@contextmanager
def _writing(path: Path) -> Iterator[None]:
    """Report errors of the file system as errors of the checkpoint."""
    try:
        yield
    except OSError as error:
        reason, next_step = catalog.explain_os_error(error, folder=path.parent)
        raise CheckpointError(
            f"{path} could not be written: {reason}", next_step=next_step
        ) from error
