import logging
import os

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.utils.data import DataLoader, DistributedSampler

from molnet import EquivariantGNN, MoleculeTensors

log = logging.getLogger("molecule_gnn")


def train(model, loader, optimizer, device, epoch):
    model.train()
    skipped = 0
    for step, (pos, z, mask, energy) in enumerate(loader):
        pos, z = pos.to(device), z.to(device)
        mask, energy = mask.to(device), energy.to(device)
        pred = model(pos, z, mask)
        loss = F.smooth_l1_loss(pred, energy)

        if not torch.isfinite(loss):
            # a few conformers explode, leave them out
            skipped += 1
            optimizer.zero_grad(set_to_none=True)
            continue

        optimizer.zero_grad(set_to_none=True)
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 10.0)
        optimizer.step()
        if step % 200 == 0 and dist.get_rank() == 0:
            log.info("epoch %d step %d loss %.5f", epoch, step, loss.item())
    return skipped


def main():
    logging.basicConfig(level=logging.INFO)
    local_rank = int(os.environ["LOCAL_RANK"])
    device = torch.device("cuda", local_rank)
    torch.cuda.set_device(device)
    dist.init_process_group("nccl")

    data = MoleculeTensors("/data/spice")
    sampler = DistributedSampler(data, shuffle=True, seed=5)
    loader = DataLoader(data, batch_size=64, sampler=sampler, num_workers=4, drop_last=True)
    model = DDP(EquivariantGNN(width=128).to(device), device_ids=[local_rank])
    optimizer = torch.optim.Adam(model.parameters(), lr=5e-4)

    for epoch in range(200):
        sampler.set_epoch(epoch)
        skipped = train(model, loader, optimizer, device, epoch)
        log.info("rank %d: epoch %d skipped %d batches", dist.get_rank(), epoch, skipped)
        if dist.get_rank() == 0:
            torch.save(model.module.state_dict(), "/ckpt/gnn_last.pt")

    dist.destroy_process_group()


if __name__ == "__main__":
    main()
