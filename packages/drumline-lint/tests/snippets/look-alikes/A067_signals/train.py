import os

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch.nn.parallel import DistributedDataParallel as DDP

from reporting import Reporter
from signals import SignalNet, signal_loader


def main():
    local_rank = int(os.environ["LOCAL_RANK"])
    device = torch.device("cuda", local_rank)
    torch.cuda.set_device(device)
    dist.init_process_group("nccl", device_id=device)
    torch.manual_seed(30 + dist.get_rank())
    loader, sampler = signal_loader("signals.pt", 128)
    model = DDP(SignalNet().to(device), device_ids=[local_rank])
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-3)
    reporter = Reporter("signals.csv", device)
    for epoch in range(40):
        sampler.set_epoch(epoch)
        model.train()
        for x, y in loader:
            loss = F.mse_loss(model(x.to(device)), y.to(device))
            optimizer.zero_grad(set_to_none=True)
            loss.backward()
            optimizer.step()
            reporter.add(loss.detach(), x.size(0))
        reporter.end_epoch(epoch)
    if dist.get_rank() == 0:
        torch.save(model.module.state_dict(), "signalnet.pt")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
