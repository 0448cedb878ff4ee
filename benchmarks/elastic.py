"""The step of `--train.exact elastic` against the ordinary one, with a shard for every rank.

make bench-exact        (or: python benchmarks/elastic.py --ranks 2,4 --rounds 15)
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

from side_by_side import compare, engine_steps

from drumline.config.schema import Config
from drumline.manager import DDPManager


def elastic_steps(ddp: DDPManager, config: Config) -> Iterator[None]:
    train = replace(config.train, exact="elastic", shards=ddp.world_size)
    return engine_steps(ddp, replace(config, train=train))


if __name__ == "__main__":
    compare(__doc__, first=("ordinary", engine_steps), second=("elastic", elastic_steps), ranks="2,4")
