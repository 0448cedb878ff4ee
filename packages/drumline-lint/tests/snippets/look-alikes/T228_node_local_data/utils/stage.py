import os
import tarfile
from pathlib import Path

import torch.distributed as dist

from utils.dist import local_rank


def stage_dataset(archive):
    target = Path(os.environ.get("LOCAL_SCRATCH", "/tmp")) / Path(archive).stem
    if local_rank() == 0 and not (target / ".done").exists():
        target.mkdir(parents=True, exist_ok=True)
        with tarfile.open(archive) as tar:
            tar.extractall(target, filter="data")
        (target / ".done").touch()
    dist.barrier()
    return str(target / "train")
