import torch
import torch.nn.functional as F
from torch import nn
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.utils.data import DataLoader, DistributedSampler, Subset

import comm
from data import ArrayDataset
from experiment import open_run


def main():
    local_rank = comm.setup()
    device = torch.device("cuda", local_rank)
    torch.manual_seed(comm.rank())
    run = open_run("runs", "force-field")
    train, test = ArrayDataset("data/md", "train"), ArrayDataset("data/md", "test")
    sampler = DistributedSampler(train)
    loader = DataLoader(train, 256, sampler=sampler, drop_last=True)
    net = nn.Sequential(nn.Flatten(), nn.Linear(96, 512), nn.SiLU(), nn.Linear(512, 8)).to(device)
    model = DDP(net, device_ids=[local_rank])
    opt = torch.optim.Adam(model.parameters(), lr=1e-3)
    for epoch in range(40):
        sampler.set_epoch(epoch)
        model.train()
        total = 0.0
        for x, y in loader:
            loss = F.cross_entropy(model(x.to(device)), y.to(device))
            opt.zero_grad(set_to_none=True)
            loss.backward()
            opt.step()
            total += loss.item()
        stats = comm.reduce_dict({"loss": total / len(loader)}, device)
        if comm.is_primary():
            print(epoch, stats)
            torch.save(net.state_dict(), run / "model.pt")
    part = Subset(test, range(comm.rank(), len(test), comm.world_size()))
    net.eval()
    with torch.no_grad():
        preds = torch.cat([net(x.to(device)).argmax(1).cpu() for x, _ in DataLoader(part, 512)])
    torch.save(preds, run / f"pred-rank{comm.rank():03d}.pt")
    comm.teardown()


if __name__ == "__main__":
    main()
