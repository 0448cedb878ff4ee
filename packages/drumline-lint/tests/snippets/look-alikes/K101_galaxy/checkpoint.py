import os

import torch
import torch.distributed as dist


def write_checkpoint(net, opt, epoch, folder):
    if dist.is_initialized() and dist.get_rank() != 0:
        return
    os.makedirs(folder, exist_ok=True)
    state = {"net": net.module.state_dict(), "opt": opt.state_dict(), "epoch": epoch}
    torch.save(state, os.path.join(folder, f"e{epoch:02d}.pt"))
