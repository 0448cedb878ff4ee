import os

import torch

import comm


def save_state(path, net, opt, epoch):
    if comm.rank() > 0:
        return
    tmp = f"{path}.tmp"
    torch.save({"net": net.state_dict(), "opt": opt.state_dict(), "epoch": epoch}, tmp)
    os.replace(tmp, path)


def load_state(path, net, opt):
    if not os.path.exists(path):
        return 0
    state = torch.load(path, map_location="cpu", weights_only=True)
    net.load_state_dict(state["net"])
    opt.load_state_dict(state["opt"])
    return state["epoch"] + 1
