"""`--data.dir s3://...`: one rank of each machine copies the data to its disk before the job is
built."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import replace
from itertools import count
from pathlib import Path
from weakref import WeakKeyDictionary

from drumline.base.terminal import print_message
from drumline.config.schema import Config
from drumline.data.bucket_copy import BucketCopy
from drumline.rank.failure import wait_for_ranks
from drumline.storage.object_store import is_store_url
from drumline.training.manager import RunManager
from drumline.watch.heartbeat import Phase

CACHE = Path(".cache", "drumline", "data")
# Of each group: a rank that joins a later one has not called it as often.
_CALLS: WeakKeyDictionary[RunManager, Iterator[int]] = WeakKeyDictionary()


def with_local_data(config: Config, ddp: RunManager) -> Config:
    """Collective: the settings, with `data.dir` as the path of the copy where it is a URL."""
    url = config.data.dir
    if url is None or not is_store_url(url):
        return config
    heartbeat = ddp.connection.heartbeat
    copy = BucketCopy(
        url=url,
        cache=Path(config.data.cache or Path.home() / CACHE).absolute(),
        report=print_message if ddp.is_main_process() else lambda text: None,
        alive=lambda: heartbeat.mark(Phase.START),
    )
    if ddp.get_local_rank() == 0:
        copy.update()
    if ddp.connection.store is not None:
        # with --dist.mode auto there are two
        what = f"data-copied/{next(_CALLS.setdefault(ddp, count()))}"
        # A download has no limit here: the watchdog observes it, and one that fails ends the job.
        wait_for_ranks(ddp.connection.store, what, ddp.rank, ddp.world_size, limit_s=math.inf)
    return replace(config, data=replace(config.data, dir=str(copy.folder)))
