import os

import hydra
import torch
import torch.distributed as dist
from hydra.utils import instantiate
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.utils.data import DataLoader
from torch.utils.data.distributed import DistributedSampler


class Patience:
    def __init__(self, patience):
        self.patience, self.best, self.count = patience, float("-inf"), 0

    def __call__(self, score):
        if score > self.best:
            self.best, self.count = score, 0
        else:
            self.count += 1
        return self.count >= self.patience


@torch.no_grad()
def accuracy(net, loader, device):
    net.eval()
    hit = n = 0
    for x, y in loader:
        hit += (net(x.to(device)).argmax(1) == y.to(device)).sum().item()
        n += y.numel()
    return hit / n


@hydra.main(config_path="conf", config_name="config", version_base="1.3")
def main(cfg):
    dist.init_process_group("nccl")
    local_rank, rank = int(os.environ["LOCAL_RANK"]), dist.get_rank()
    torch.cuda.set_device(local_rank)
    device = torch.device("cuda", local_rank)

    train, val = instantiate(cfg.data.train), instantiate(cfg.data.val)
    sampler = DistributedSampler(train, shuffle=True)
    loader = DataLoader(train, cfg.batch_size, sampler=sampler, num_workers=8, pin_memory=True, drop_last=True)
    val_loader = DataLoader(val, cfg.batch_size, num_workers=8) if rank == 0 else None
    model = DDP(instantiate(cfg.model).to(device), device_ids=[local_rank])
    opt = instantiate(cfg.optim, model.parameters())
    patience = Patience(cfg.patience)

    for epoch in range(cfg.max_epochs):
        sampler.set_epoch(epoch)
        model.train()
        for x, y in loader:
            loss = torch.nn.functional.cross_entropy(model(x.to(device)), y.to(device))
            opt.zero_grad(set_to_none=True)
            loss.backward()
            opt.step()

        stop = torch.zeros(1, dtype=torch.int32, device=device)
        if rank == 0:
            acc = accuracy(model.module, val_loader, device)
            print(f"epoch {epoch} val acc {acc:.4f}", flush=True)
            if acc > patience.best:
                torch.save(model.module.state_dict(), "best.pt")
            stop.fill_(int(patience(acc)))
        dist.broadcast(stop, src=0)
        if stop.item():
            break
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
