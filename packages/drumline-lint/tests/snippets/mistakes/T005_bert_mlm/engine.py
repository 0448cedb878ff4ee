import logging

import torch
import torch.distributed as dist

from utils.dist import is_main, world_size

log = logging.getLogger("mlm")


def train_epoch(model, loader, opt, sched, device, epoch, log_every):
    model.train()
    window = torch.zeros((), device=device)
    for step, batch in enumerate(loader):
        batch = {k: v.to(device, non_blocking=True) for k, v in batch.items()}
        with torch.autocast("cuda", dtype=torch.bfloat16):
            loss = model(**batch).loss
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        opt.step()
        sched.step()
        opt.zero_grad(set_to_none=True)

        window += loss.detach()
        if (step + 1) % log_every == 0 and is_main():
            mean = window / log_every
            dist.all_reduce(mean)
            mean /= world_size()
            log.info("epoch %d step %d loss %.4f lr %.2e", epoch, step + 1, mean.item(), sched.get_last_lr()[0])
        if (step + 1) % log_every == 0:
            window.zero_()
