import glob
import os

import torch


def save_checkpoint(out_dir, step, model, ema, optimizer, keep=3):
    """Write step_XXXXXXX.pt and last.pt, keep the newest `keep` numbered files."""
    state = {
        "step": step,
        "model": model.state_dict(),
        "ema": ema.state_dict(),
        "optimizer": optimizer.state_dict(),
    }
    torch.save(state, os.path.join(out_dir, f"step_{step:07d}.pt"))
    torch.save(state, os.path.join(out_dir, "last.pt"))
    for old in sorted(glob.glob(os.path.join(out_dir, "step_*.pt")))[:-keep]:
        os.remove(old)


def load_checkpoint(out_dir, model, ema, optimizer):
    path = os.path.join(out_dir, "last.pt")
    if not os.path.exists(path):
        return 0
    state = torch.load(path, map_location="cpu")
    model.load_state_dict(state["model"])
    ema.load_state_dict(state["ema"])
    optimizer.load_state_dict(state["optimizer"])
    return state["step"]
