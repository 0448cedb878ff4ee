"""Before the first step: does each rank read the stream it should? A look at one sample, which is not lost by it.

A plain iterable must be the same on every rank, and one with a state of its own must not. Of a dataset with a length
the ranks have compared a few samples already.
"""

from __future__ import annotations

from drumline.data.stream_loader import StreamLoader
from drumline.distributed.agree import check_same
from drumline.distributed.collectives import gather_json
from drumline.engine.job import Job
from drumline.log import log


def check_streams(job: Job) -> None:
    """Collective: compare the next sample of the training stream across ranks."""
    loader = job.loader
    if not isinstance(loader, StreamLoader) or job.ddp.world_size == 1:
        return
    digest, device = loader.peek(), job.ddp.device
    if not loader.is_resumable:
        check_same(
            {f"the next sample of the stream {loader.name}": digest},
            host=job.ddp.host,
            device=device,
            next_step="let every rank read the same samples in the same order: Drumline shares them out; shuffle "
            "with the global generators or by set_epoch(epoch), which are the same on every rank",
        )
    elif len(set(gather_json(digest, device=device))) == 1 and job.ddp.is_main_process():
        log.warning(
            f"all {job.ddp.world_size} ranks read the same next sample of the stream {loader.name}: one with a "
            "state_dict is not shared out, it must choose by rank what it yields, or all ranks train on the same"
        )
