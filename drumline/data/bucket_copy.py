"""Data from an object store, copied once to this machine's disk: what is there already is not fetched again, what
changed is, and an incomplete copy is never used."""

from __future__ import annotations

import fcntl
import json
import os
import re
import shutil
import time
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import FIRST_COMPLETED, ThreadPoolExecutor, wait
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from blake3 import blake3

from drumline.errors import DataError
from drumline.storage.backend import StoreError
from drumline.storage.object_store import ObjectStore, open_store
from drumline.text import file_size, plural
from drumline.untrusted import make_own_folder, parse_json, read_regular, replace_text

# Small objects wait for the network most of the time.
NUM_THREADS = 8
POLL_S, RECORD_EVERY_S = 1.0, 10.0
MOST_RECORD_BYTES = 1 << 30
Record = dict[str, list[object]]
"""Of each object that was fetched: its size, the store's tag, the blake3 checksum, and when the file was written."""


@dataclass(frozen=True, kw_only=True)
class BucketCopy:
    """The copy of one URL below a folder for such copies. `alive` is called while data arrives."""

    url: str
    cache: Path
    report: Callable[[str], None] = lambda text: None
    alive: Callable[[], None] = lambda: None

    @property
    def folder(self) -> Path:
        """Where the data is once `update` has returned."""
        return self._place / "files"

    @property
    def _place(self) -> Path:
        words = re.sub(r"[^A-Za-z0-9]+", "-", self.url.partition("://")[2])[-60:].strip("-")
        return self.cache / f"{words}-{blake3(self.url.encode()).hexdigest(8)}"

    def update(self) -> None:
        """Make it equal to what the store has now. One process of a machine does so at a time."""
        try:
            make_own_folder(self._place, follow_links=True)
            with self._locked():
                self._update(open_store(self.url))
        except StoreError as error:
            if error.may_pass:  # a restart may help
                raise
            raise DataError(f"data.dir: {error.what}", next_step=error.next_step) from error
        except OSError as error:
            what = f"data.dir: {self.url} cannot be copied to {self._place}: {error.strerror}"
            raise DataError(what, next_step="check that folder, or give another with --data.cache") from error

    def _update(self, store: ObjectStore) -> None:
        wanted = store.tags()
        if not wanted:
            what = f"data.dir: there are no objects below {self.url}/"
            raise DataError(what, next_step="name the folder that holds the data, as in s3://bucket/folder")
        record = self._record()
        record = {name: record[name] for name in wanted if name in record and self._is_here(name, record, wanted)}
        self._remove_others(wanted)
        missing = {name: size for name, (size, _) in wanted.items() if name not in record}
        if not missing:
            return
        total, free = sum(missing.values()), shutil.disk_usage(self._place).free
        amount = f"{file_size(total)} ({plural(len(missing), 'object')})"
        if total > free:
            raise DataError(
                f"data.dir: {amount} of {self.url} do not fit into {self._place}: {file_size(free)} are free there",
                next_step="free some space, or give a folder on a larger disk with --data.cache",
            )
        self.report(f"copying {amount} from {self.url} to {self.folder}")
        try:
            self._fetch(store, missing, wanted, record)
        finally:
            self._write(record)  # also after a failure: the next start continues from here

    def _fetch(
        self, store: ObjectStore, missing: Mapping[str, int], wanted: Mapping[str, tuple[int, str]], record: Record
    ) -> None:
        pieces, seen, recorded_at = [0], 0, time.monotonic()

        def fetch(name: str) -> str:
            to = self.folder / name
            to.parent.mkdir(parents=True, exist_ok=True)

            def count() -> None:
                pieces[0] += 1

            return store.fetch(name, to, size=missing[name], on_piece=count)

        pool = ThreadPoolExecutor(NUM_THREADS)
        try:
            pending = {pool.submit(fetch, name): name for name in missing}
            while pending:
                done, _ = wait(pending, timeout=POLL_S, return_when=FIRST_COMPLETED)
                for future in done:
                    name = pending.pop(future)
                    written_at = (self.folder / name).stat().st_mtime_ns if future.exception() is None else 0
                    record[name] = [*wanted[name], future.result(), written_at]
                if pieces[0] != seen:
                    seen = pieces[0]
                    self.alive()
                if time.monotonic() - recorded_at > RECORD_EVERY_S:
                    self._write(record)
                    recorded_at = time.monotonic()
        finally:
            pool.shutdown(cancel_futures=True)

    def _is_here(self, name: str, record: Record, wanted: Mapping[str, tuple[int, str]]) -> bool:
        """Whether the file is the one that was fetched, and the object has not changed since."""
        size, tag, checksum, written_at = record[name]
        path = self.folder / name
        if (size, tag) != wanted[name] or not path.is_file() or path.stat().st_size != size:
            return False
        if path.stat().st_mtime_ns == written_at:
            return True
        record[name] = [size, tag, checksum, path.stat().st_mtime_ns]
        return blake3(max_threads=blake3.AUTO).update_mmap(path).hexdigest() == checksum

    def _remove_others(self, wanted: Mapping[str, object]) -> None:
        """What the store no longer has: a dataset may read every file of its folder."""
        for folder, _, names in os.walk(self.folder, topdown=False):
            for path in (Path(folder, name) for name in names):
                if str(path.relative_to(self.folder)) not in wanted:
                    path.unlink()
            if not any(Path(folder).iterdir()):
                Path(folder).rmdir()

    def _record(self) -> Record:
        """Empty if there is none that can be read: then everything is fetched."""
        try:
            found = parse_json(read_regular(self._place / "record.json", most=MOST_RECORD_BYTES).decode())
        except (OSError, ValueError):
            return {}
        entries = found.items() if isinstance(found, dict) else ()
        return {name: entry for name, entry in entries if isinstance(entry, list) and len(entry) == 4}

    def _write(self, record: Record) -> None:
        replace_text(self._place / "record.json", json.dumps(record))

    @contextmanager
    def _locked(self) -> Iterator[None]:
        """Another job on this machine may be copying the same data."""
        with (self._place / "lock").open("wb") as file:
            has_waited = False
            while True:
                try:
                    fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
                    break
                except BlockingIOError:
                    if not has_waited:
                        self.report(f"waiting for another process that copies {self.url} on this machine")
                    has_waited = True
                    self.alive()
                    time.sleep(POLL_S)
            yield
