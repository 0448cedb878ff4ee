"""One backward pass before the first step, so that every step of every run reduces gradients in the same layout.

After its first backward pass DDP lays its buckets out anew, in the order in which gradients came. On three or more
ranks the layout decides in which order the ranks' parts of a gradient are added, and with it the last bit. Without this
pass the first step after a resume would run in the layout that an uninterrupted run had in its very first step only.
"""

from __future__ import annotations

from torch.nn.parallel import DistributedDataParallel

from drumline.checkpoint.rng import capture_rng, restore_rng
from drumline.distributed.buffers import LiveBuffers
from drumline.engine.job import Job
from drumline.engine.steps.eager import loss_function
from drumline.watch.beats.phase import Phase

# The sum of two numbers does not depend on their order.
FIRST_WORLD_WITH_AN_ORDER = 3


def warm_up(job: Job, *, static_graph: bool) -> None:
    """Collective: a forward and a backward pass on the next batch, after which everything is put back as it was."""
    # With a static graph DDP learns the graph in its first backward pass, which must not be one under no_sync.
    if not isinstance(job.applied, DistributedDataParallel):
        return
    if job.ddp.world_size < FIRST_WORLD_WITH_AN_ORDER and not static_graph:
        return
    rng, buffers = capture_rng(job.ddp.device), LiveBuffers(job.model)
    before, compute_loss = buffers.keep(), loss_function(job.task)
    # With a static graph the layout is settled by the second pass only.
    for _ in range(2 if static_graph else 1):
        job.ddp.beat.mark(Phase.START)
        with job.autocast:
            loss = job.applied(compute_loss, job.loader.preview())
        (loss.total * 0.0).backward()
        job.optimizer.zero_grad(set_to_none=True)
    buffers.put_back(before)
    restore_rng(rng, job.ddp.device)
