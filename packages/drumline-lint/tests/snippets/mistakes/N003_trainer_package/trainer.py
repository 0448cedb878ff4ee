import torch
import torch.distributed as dist


class Trainer:
    def __init__(self, model, optimizer, loaders, device, cfg):
        self.model = model
        self.optimizer = optimizer
        self.train_loader, self.val_loader = loaders
        self.device = device
        self.cfg = cfg
        self.step = 0

    @property
    def is_main(self):
        return dist.get_rank() == 0

    def fit(self):
        for epoch in range(self.cfg.max_epochs):
            self.model.train()
            for batch in self.train_loader:
                self.train_step(batch)
            val_loss = self.validate()
            if self.is_main:
                print(f"[{epoch}] val loss {val_loss:.4f}")
                torch.save(self.model.module.state_dict(), self.cfg.ckpt_path)

    def train_step(self, batch):
        x, y = (t.to(self.device, non_blocking=True) for t in batch)
        loss = torch.nn.functional.cross_entropy(self.model(x), y)
        self.optimizer.zero_grad()
        loss.backward()
        self.optimizer.step()
        self.step += 1

    @torch.no_grad()
    def validate(self):
        self.model.eval()
        acc = torch.zeros(2, device=self.device)
        for x, y in self.val_loader:
            x, y = x.to(self.device), y.to(self.device)
            acc[0] += torch.nn.functional.cross_entropy(self.model(x), y, reduction="sum")
            acc[1] += y.numel()
        dist.all_reduce(acc)
        return (acc[0] / acc[1]).item()
