"""A store whose values are accepted only if a process of this job wrote them.

PyTorch's store accepts keys and values from anyone who reaches its port. Here each value carries a
keyed hash over its key and itself, under the secret of the job. A value without a valid hash counts
as absent, and is reported once.
"""

from __future__ import annotations

import hashlib
import hmac
import socket
import time
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from datetime import timedelta
from typing import TypeVar

import torch.distributed as dist

from drumline.base.errors import PreflightError
from drumline.base.job_secret import SECRET_ENV, derived
from drumline.base.text import print_message
from drumline.base.untrusted import from_json, parse_json

SEALED = b"sealed "
HASH_LETTERS = 64
POLL_S = 0.05

# A process that writes faster than that can block the store, but it cannot forge values.
MOST_TRIES = 100
FOREIGN_WAIT = timedelta(seconds=5)
MAX_BYTES = 1 << 24
ABSENT = "nothing is here"
T = TypeVar("T")


@dataclass(eq=False)
class SealedStore:
    """The used part of `dist.Store`'s interface. Without a secret, values are not sealed."""

    base: dist.Store
    secret: str | None = field(repr=False)
    prefix: str = "drumline"
    foreign: set[str] = field(default_factory=set)
    """Keys with a value that this job has not written; all parts of a store share this set."""

    def __post_init__(self) -> None:
        self.raw: dist.Store = dist.PrefixStore(self.prefix, self.base)
        """The same part of the store without seals, for torch's process groups."""

        self._key = None
        if self.secret is not None:
            self._key = bytes.fromhex(derived(self.secret, "store"))

    def under(self, prefix: str) -> SealedStore:
        """The part of the store below this prefix."""
        return replace(self, prefix=f"{self.prefix}/{prefix}")

    def clone(self) -> SealedStore:
        """A copy with a separate connection."""
        return replace(self, base=self.base.clone())  # type: ignore[attr-defined]  # torch has it, its types do not

    def resealed(self, secret: str) -> SealedStore:
        """The same part of the store, under another secret."""
        return replace(self, secret=secret)

    @property
    def timeout(self) -> timedelta:
        limit: timedelta = self.raw.timeout  # type: ignore[attr-defined]  # torch has it, its types do not
        return limit

    def set_timeout(self, timeout: timedelta) -> None:
        self.raw.set_timeout(timeout)

    def set(self, key: str, value: str | bytes) -> None:
        self.raw.set(key, self._seal(key, value))  # type: ignore[arg-type]  # bytes as well

    def multi_set(self, keys: Sequence[str], values: Sequence[str | bytes]) -> None:
        """torchrun's agent calls it."""
        sealed = [self._seal(key, value) for key, value in zip(keys, values, strict=True)]
        self.raw.multi_set(list(keys), sealed)  # type: ignore[attr-defined]  # torch has it, its types do not

    def get(self, key: str) -> bytes:
        """As `multi_get`, of one."""
        return self.multi_get([key])[0]

    def multi_get(self, keys: Sequence[str]) -> list[bytes]:
        """Waits until all exist, up to the store's timeout; less long for a foreign value."""
        return self._read(keys, min(self.timeout, FOREIGN_WAIT)) if keys else []

    def wait(self, keys: Sequence[str], timeout: timedelta | None = None) -> None:
        """Block until this job has written all of these."""
        limit = timeout or self.timeout
        deadline = time.monotonic() + limit.total_seconds()
        self.raw.wait(list(keys), limit)

        remaining_s = max(0.0, deadline - time.monotonic())
        self._read(keys, timedelta(seconds=remaining_s))

    def check(self, keys: Sequence[str]) -> bool:
        """Whether this job has written all of these."""
        return self.peek_all(keys) is not None

    def peek(self, key: str) -> bytes | None:
        """The current value; None: this job has not written one. Never blocks: another client may
        delete a value that `check` has just seen, and `get` would wait for it."""
        stored = self._stored(key)
        return None if stored is None else self._open(key, stored)

    def peek_all(self, keys: Sequence[str]) -> list[bytes] | None:
        """All current values; None if one is missing."""
        # one question while some are missing
        if len(keys) > 1 and not self.raw.check(list(keys)):
            return None

        values = self.there(keys)
        return list(values.values()) if len(values) == len(keys) else None

    def compare_set(self, key: str, expected: str | bytes, desired: str | bytes) -> bytes:
        """As torch's: returns the value afterwards. A foreign value is replaced."""
        sealed = self._seal(key, desired)
        sealed_expected = self._seal(key, expected) if expected else b""

        stored = self.raw.compare_set(key, sealed_expected, sealed)  # type: ignore[arg-type]
        for _ in range(MOST_TRIES):
            if (opened := self._open(key, stored)) is not None:
                return opened
            stored = self.raw.compare_set(key, stored, sealed)  # type: ignore[arg-type]

        raise dist.DistStoreError(
            f"a process outside this job keeps writing to {self.prefix}/{key}"
        )

    def add(self, key: str, amount: int) -> int:
        """A counter that is not sealed: anyone who reaches the store can change it."""
        return self.raw.add(key, amount)

    def append(self, key: str, text: str) -> None:
        """A text that is not sealed either."""
        self.raw.append(key, text)  # type: ignore[attr-defined]  # torch has it, its types do not

    def hint(self, key: str) -> bytes:
        """What was appended, not authenticated; empty if nothing was."""
        return self._stored(key) or b""

    def delete_key(self, key: str) -> bool:
        return self.raw.delete_key(key)

    def there(self, keys: Sequence[str]) -> dict[str, bytes]:
        """The values of those keys that exist."""
        return {key: value for key in keys if (value := self.peek(key)) is not None}

    def _stored(self, key: str) -> bytes | None:
        """What is there, sealed or not; None: nothing."""
        # The answer for a key that does not exist is what it was asked to set.
        stored: bytes = self.raw.compare_set(key, ABSENT, ABSENT)
        return None if stored == ABSENT.encode() else stored

    def _read(self, keys: Sequence[str], patience: timedelta) -> list[bytes]:
        """Wait until all have values of this job."""
        deadline = time.monotonic() + patience.total_seconds()
        while True:
            stored = [self.raw.get(keys[0])] if len(keys) == 1 else self.raw.multi_get(list(keys))
            values = [self._open(key, value) for key, value in zip(keys, stored, strict=True)]

            opened = [value for value in values if value is not None]
            if len(opened) == len(keys):
                return opened

            if time.monotonic() > deadline:
                foreign = keys[values.index(None)]
                raise dist.DistStoreError(f"no value of this job is at {self.prefix}/{foreign}")

            time.sleep(POLL_S)

    def _hash(self, key: str, value: bytes) -> bytes:
        """Of the key as well: a value that was copied to another key does not count."""
        assert self._key is not None
        message = f"{self.prefix}/{key}\0".encode() + value
        return hmac.digest(self._key, message, hashlib.sha256).hex().encode()

    def _seal(self, key: str, value: str | bytes) -> bytes:
        """What is stored: the mark, the hash and the value."""
        plain = value.encode() if isinstance(value, str) else value
        if self._key is None:
            return plain
        return SEALED + self._hash(key, plain) + plain

    def _open(self, key: str, stored: bytes) -> bytes | None:
        """None for a foreign value."""
        is_sealed = stored.startswith(SEALED)
        if self._key is None and not is_sealed:
            return stored

        if self._key is not None and is_sealed:
            end = len(SEALED) + HASH_LETTERS
            value = stored[end:]
            if hmac.compare_digest(stored[len(SEALED) : end], self._hash(key, value)):
                return value

        self._report(key)
        return None

    def _report(self, key: str) -> None:
        """Print the first value that this job has not written, and remember all."""
        if not self.foreign:
            print_message(
                f"warning: {self.prefix}/{key} in the store was not written by this job, and is ignored. Try: set the "
                f"same {SECRET_ENV} on all nodes; if it is set, find out who else reaches that port"
            )
        self.foreign.add(f"{self.prefix}/{key}")


def check_secret(store: SealedStore, who: str) -> None:
    """Raise if `who` writes sealed values and this process has no secret to check them with."""
    if store.secret is None and store.foreign:
        raise PreflightError(
            f"{SECRET_ENV} is set for {who}, and not on {socket.gethostname()}",
            next_step="set it to one value on all nodes, or on none",
        )


def decoded(kind: type[T], text: bytes | None) -> T | None:
    """What another process wrote, as JSON (`from_json`); None for anything else."""
    if text is None or len(text) > MAX_BYTES:
        return None

    try:
        return from_json(kind, parse_json(text))
    except ValueError:
        return None
