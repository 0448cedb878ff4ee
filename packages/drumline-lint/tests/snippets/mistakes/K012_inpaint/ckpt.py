import os

import torch


def save_checkpoint(net, opt, step, folder):
    os.makedirs(folder, exist_ok=True)
    tmp = os.path.join(folder, "last.pt.tmp")
    torch.save({"net": net.module.state_dict(), "opt": opt.state_dict(), "step": step}, tmp)
    os.replace(tmp, os.path.join(folder, "last.pt"))
