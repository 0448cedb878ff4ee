import os

import torch
import torch.distributed as dist
import torch.nn as nn
import torch.nn.functional as F
from omegaconf import OmegaConf
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.utils.data import DataLoader
from torch.utils.data.distributed import DistributedSampler

from radiology.backbone import densenet121_features
from radiology.data import MultiSourceXray


class MultiHead(nn.Module):
    def __init__(self, sources):
        super().__init__()
        self.features = densenet121_features(norm="group")
        self.heads = nn.ModuleDict({name: nn.Linear(1024, n) for name, n in sources.items()})

    def forward(self, x):
        f = self.features(x)
        return {name: head(f) for name, head in self.heads.items()}


def masked_loss(outputs, labels, source):
    """A batch mixes sources; each head is trained on the rows of its own source only."""
    total = 0.0
    for name, logits in outputs.items():
        rows = source == labels[name]["id"]
        if rows.any():
            total = total + F.binary_cross_entropy_with_logits(logits[rows], labels[name]["y"][rows])
        else:
            total = total + 0.0 * logits.sum()
    return total


def main():
    cfg = OmegaConf.merge(OmegaConf.load("xray.yaml"), OmegaConf.from_cli())
    dist.init_process_group("nccl")
    local_rank = int(os.environ["LOCAL_RANK"])
    torch.cuda.set_device(local_rank)
    device = torch.device("cuda", local_rank)

    ds = MultiSourceXray(cfg.sources, cfg.root)
    sampler = DistributedSampler(ds, shuffle=True)
    loader = DataLoader(ds, cfg.batch, sampler=sampler, num_workers=8, pin_memory=True, drop_last=True)
    model = DDP(MultiHead(ds.num_labels).to(device), device_ids=[local_rank])
    opt = torch.optim.AdamW(model.parameters(), lr=cfg.lr)

    for epoch in range(cfg.epochs):
        sampler.set_epoch(epoch)
        meter = torch.zeros((), device=device)
        for x, source, labels in loader:
            labels = {k: {"id": ds.source_id[k], "y": v.to(device, non_blocking=True)} for k, v in labels.items()}
            outputs = model(x.to(device, non_blocking=True))
            loss = masked_loss(outputs, labels, source.to(device, non_blocking=True))
            opt.zero_grad(set_to_none=True)
            loss.backward()
            opt.step()
            meter += loss.detach()
        dist.all_reduce(meter, op=dist.ReduceOp.AVG)
        if dist.get_rank() == 0:
            print(f"epoch {epoch} loss {meter.item() / len(loader):.4f}", flush=True)
            torch.save(model.module.state_dict(), cfg.out)
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
