"""Data from an object store, copied once to this machine's disk: what is there already is not
fetched again, what changed is, and an incomplete copy is never used."""

from __future__ import annotations

import fcntl
import json
import os
import re
import shutil
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor, wait
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import count
from pathlib import Path

from blake3 import blake3

from drumline.base.background import T, in_background
from drumline.base.errors import DataError
from drumline.base.text import file_size, plural
from drumline.base.untrusted import (
    from_json,
    make_own_folder,
    parse_json,
    read_regular,
    replace_text,
)
from drumline.storage.backends import StoreError
from drumline.storage.object_store import ObjectStore, open_store

# Small objects wait for the network most of the time.
NUM_THREADS = 8

# A future takes 2 kB, and a bucket may have millions of objects.
NUM_SUBMITTED = 10_000
POLL_S = 1.0
RECORD_EVERY_S = 10.0
MOST_RECORD_BYTES = 1 << 30
Objects = Mapping[str, tuple[int, str]]
"""The size and the tag of each object that the store has."""

Record = dict[str, tuple[int, str, str, int]]
"""Of each object that was fetched: its size, the store's tag, the blake3 checksum, and when the
file was written."""


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
            raise DataError(
                what, next_step="check that folder, or give another with --data.cache"
            ) from error

    def _update(self, store: ObjectStore) -> None:
        objects = self._wait(in_background(store.tags))
        if not objects:
            raise DataError(
                f"data.dir: there are no objects below {self.url}/",
                next_step="name the folder that holds the data, as in s3://bucket/folder: a single object is not "
                "copied",
            )

        record = self._record()
        shared_names = [name for name in objects if name in record]
        record = {
            name: record[name] for name in shared_names if self._is_here(name, record, objects)
        }
        self._remove_others(objects)

        missing = [name for name in objects if name not in record]
        total = sum(objects[name][0] for name in missing)
        free = shutil.disk_usage(self._place).free
        amount = f"{file_size(total)} ({plural(len(missing), 'object')})"

        if total > free:
            raise DataError(
                f"data.dir: {amount} of {self.url} do not fit into {self._place}: {file_size(free)} are free there",
                next_step="free some space, or give a folder on a larger disk with --data.cache",
            )

        if missing:
            self.report(f"copying {amount} from {self.url} to {self.folder}")
            self._fetch(store, missing, objects, record)

    def _fetch(
        self,
        store: ObjectStore,
        names: Sequence[str],
        objects: Objects,
        record: Record,
    ) -> None:
        """Fetch these objects; `record` gets each."""

        def fetch(name: str) -> tuple[str, int]:
            to = self.folder / name
            to.parent.mkdir(parents=True, exist_ok=True)
            checksum = store.fetch(name, to, size=objects[name][0])
            return checksum, to.stat().st_mtime_ns

        pool = ThreadPoolExecutor(NUM_THREADS)
        written_at = time.monotonic()
        try:
            for start in range(0, len(names), NUM_SUBMITTED):
                part = names[start : start + NUM_SUBMITTED]
                futures = {name: pool.submit(fetch, name) for name in part}
                for name, future in futures.items():
                    record[name] = (*objects[name], *self._wait(future))
                    if time.monotonic() - written_at > RECORD_EVERY_S:
                        self._write(record)
                        written_at = time.monotonic()
        finally:
            store.stop()  # Ctrl-C need not wait for what is being fetched; what holds the lock does
            pool.shutdown(cancel_futures=True)

            # also after a failure: the next start continues from here
            self._write(record)

    def _wait(self, future: Future[T]) -> T:
        while not wait([future], timeout=POLL_S).done:
            self.alive()  # what hangs ends by its own time limits
        return future.result()

    def _is_here(self, name: str, record: Record, objects: Objects) -> bool:
        """Whether the file is the one that was fetched, and the object has not changed since."""
        size, tag, checksum, written_at = record[name]
        path = self.folder / name
        if (size, tag) != objects[name] or not path.is_file() or path.stat().st_size != size:
            return False
        if path.stat().st_mtime_ns == written_at:
            return True

        record[name] = (size, tag, checksum, path.stat().st_mtime_ns)
        return blake3(max_threads=blake3.AUTO).update_mmap(path).hexdigest() == checksum

    def _remove_others(self, objects: Objects) -> None:
        """What the store no longer has: a dataset may read every file of its folder."""
        for folder, _, names in os.walk(self.folder, topdown=False):
            for name in names:
                path = Path(folder, name)
                if str(path.relative_to(self.folder)) not in objects:
                    path.unlink()
            if not any(Path(folder).iterdir()):
                Path(folder).rmdir()

    def _record(self) -> Record:
        """Empty if there is none that can be read: then everything is fetched."""
        try:
            content = read_regular(self._place / "record.json", most=MOST_RECORD_BYTES)
            return from_json(Record, parse_json(content))
        except (OSError, ValueError):
            return {}

    def _write(self, record: Record) -> None:
        replace_text(self._place / "record.json", json.dumps(record))

    @contextmanager
    def _locked(self) -> Iterator[None]:
        """Another job on this machine may be copying the same data."""
        with (self._place / "lock").open("wb") as file:
            for attempt in count():
                try:
                    fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
                    break
                except BlockingIOError:
                    if attempt == 0:
                        self.report(
                            f"waiting for another process that copies {self.url} on this machine"
                        )

                    self.alive()
                    time.sleep(POLL_S)
            yield
