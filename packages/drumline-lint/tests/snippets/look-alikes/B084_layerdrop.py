import os
from dataclasses import dataclass

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset


@dataclass
class Cfg:
    data: str = "data/protein.pt"
    out: str = "layerdrop.pt"
    vocab: int = 33
    dim: int = 512
    layers: int = 16
    drop: float = 0.1
    batch: int = 32
    epochs: int = 20
    lr: float = 3e-4
    seed: int = 1


class LayerDropEncoder(nn.Module):
    def __init__(self, cfg):
        super().__init__()
        self.drop = cfg.drop
        self.embed = nn.Embedding(cfg.vocab, cfg.dim)
        self.layers = nn.ModuleList(
            nn.TransformerEncoderLayer(cfg.dim, 8, 4 * cfg.dim, batch_first=True, norm_first=True)
            for _ in range(cfg.layers)
        )
        self.out = nn.Linear(cfg.dim, cfg.vocab)

    def forward(self, ids):
        h = self.embed(ids)
        for layer in self.layers:
            if self.training and torch.rand(()).item() < self.drop:
                continue
            h = layer(h)
        return self.out(h)


def mask_tokens(ids, mask_id, p=0.15):
    pick = torch.rand(ids.shape, device=ids.device) < p
    return ids.masked_fill(pick, mask_id), ids.masked_fill(~pick, -100)


def main(cfg=Cfg()):
    local_rank = int(os.environ["LOCAL_RANK"])
    device = torch.device("cuda", local_rank)
    torch.cuda.set_device(device)
    dist.init_process_group("nccl", device_id=device)
    rank = dist.get_rank()
    torch.manual_seed(cfg.seed + rank)
    data = TensorDataset(torch.load(cfg.data, map_location="cpu", weights_only=True))
    sampler = DistributedSampler(data)
    loader = DataLoader(data, cfg.batch, sampler=sampler, drop_last=True)
    model = DDP(LayerDropEncoder(cfg).to(device), device_ids=[local_rank], find_unused_parameters=True)
    opt = torch.optim.AdamW(model.parameters(), lr=cfg.lr)
    for epoch in range(cfg.epochs):
        sampler.set_epoch(epoch)
        model.train()
        stat = torch.zeros(2, device=device)
        for (ids,) in loader:
            x, y = mask_tokens(ids.to(device), cfg.vocab - 1)
            loss = F.cross_entropy(model(x).flatten(0, 1), y.flatten(), ignore_index=-100)
            opt.zero_grad(set_to_none=True)
            loss.backward()
            opt.step()
            stat += torch.stack([loss.detach(), torch.ones_like(loss)])
        dist.all_reduce(stat)
        if rank == 0:
            print(f"epoch {epoch} loss {(stat[0] / stat[1]).item():.4f}")
            torch.save(model.module.state_dict(), cfg.out)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
