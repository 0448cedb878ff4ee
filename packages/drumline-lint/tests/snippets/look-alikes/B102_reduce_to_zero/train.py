import torch
import torch.nn.functional as F
from torch import nn
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.utils.data import DataLoader, DistributedSampler

import comm
from data import ArrayDataset
from stats import epoch_mean


def main(epochs=60):
    local_rank = comm.setup()
    device = torch.device("cuda", local_rank)
    torch.manual_seed(90 + comm.rank())
    data = ArrayDataset("data/seismic", "train")
    sampler = DistributedSampler(data)
    loader = DataLoader(data, 128, sampler=sampler, num_workers=2, drop_last=True)
    net = nn.Sequential(
        nn.Conv1d(3, 32, 11, 4), nn.ReLU(), nn.Conv1d(32, 64, 9, 4), nn.ReLU(),
        nn.AdaptiveAvgPool1d(1), nn.Flatten(), nn.Linear(64, 4),
    ).to(device)
    model = DDP(net, device_ids=[local_rank])
    opt = torch.optim.AdamW(model.parameters(), lr=1e-3)
    sched = torch.optim.lr_scheduler.CosineAnnealingLR(opt, epochs)
    for epoch in range(epochs):
        sampler.set_epoch(epoch)
        model.train()
        total = 0.0
        for x, y in loader:
            loss = F.cross_entropy(model(x.to(device)), y.to(device))
            opt.zero_grad(set_to_none=True)
            loss.backward()
            opt.step()
            total += loss.item()
        sched.step()
        mean = epoch_mean(total, len(loader), device)
        if comm.is_primary():
            print(f"epoch {epoch} loss {mean:.4f}")
            torch.save({"net": net.state_dict(), "loss": mean}, "seismic.pt")
    comm.teardown()


if __name__ == "__main__":
    main()
