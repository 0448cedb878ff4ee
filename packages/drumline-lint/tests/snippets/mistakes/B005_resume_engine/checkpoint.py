from pathlib import Path

import torch


class Checkpointer:
    def __init__(self, folder, env):
        self.folder = Path(folder)
        self.env = env

    @property
    def last(self):
        return self.folder / "last.pth"

    def save(self, model, optimizer, scheduler, epoch):
        if not self.env.is_main:
            return
        self.folder.mkdir(parents=True, exist_ok=True)
        torch.save(
            {
                "model": model.state_dict(),
                "optimizer": optimizer.state_dict(),
                "scheduler": scheduler.state_dict(),
                "epoch": epoch,
            },
            self.last,
        )

    def restore(self, model, optimizer, scheduler):
        if not self.last.exists():
            return 0
        state = torch.load(self.last, weights_only=True)
        model.load_state_dict(state["model"])
        optimizer.load_state_dict(state["optimizer"])
        scheduler.load_state_dict(state["scheduler"])
        return state["epoch"] + 1
