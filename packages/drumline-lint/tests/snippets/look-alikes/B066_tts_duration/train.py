import torch
import torch.nn.functional as F
from torch import nn
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.utils.data import DataLoader, DistributedSampler

import comm
from checkpoint import load_state, save_state
from data import ArrayDataset

CKPT, EPOCHS = "duration.pt", 80


def main():
    local_rank = comm.setup()
    device = torch.device("cuda", local_rank)
    torch.manual_seed(17 + comm.rank())
    data = ArrayDataset("data/durations", "train")
    sampler = DistributedSampler(data, shuffle=True)
    loader = DataLoader(data, 64, sampler=sampler, num_workers=2, pin_memory=True, drop_last=True)
    net = nn.Sequential(nn.Linear(384, 256), nn.ReLU(), nn.LayerNorm(256), nn.Linear(256, 1)).to(device)
    opt = torch.optim.Adam(net.parameters(), lr=3e-4)
    start = load_state(CKPT, net, opt)
    comm.synchronize()
    model = DDP(net, device_ids=[local_rank])
    for epoch in range(start, EPOCHS):
        sampler.set_epoch(epoch)
        model.train()
        total = 0.0
        for x, y in loader:
            pred = model(x.to(device, non_blocking=True)).squeeze(-1)
            loss = F.mse_loss(pred, y.to(device, non_blocking=True).float().log1p())
            opt.zero_grad(set_to_none=True)
            loss.backward()
            opt.step()
            total += loss.item()
        stats = comm.reduce_dict({"loss": total / len(loader)}, device)
        if comm.is_primary():
            print(f"epoch {epoch} {stats}")
        save_state(CKPT, net, opt, epoch)
    comm.teardown()


if __name__ == "__main__":
    main()
