import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch.nn.parallel import DistributedDataParallel as DDP

from depth import DepthNet, depth_loader
from logs import MetricLogger
from setup_dist import setup


def main():
    device = setup(seed=70)
    loader, sampler = depth_loader("nyu.pt", 16)
    model = DDP(DepthNet().to(device), device_ids=[device.index])
    optimizer = torch.optim.AdamW(model.parameters(), lr=2e-4)
    logger = MetricLogger("depth.jsonl", device)
    for epoch in range(40):
        sampler.set_epoch(epoch)
        for rgb, depth in loader:
            pred = model(rgb.to(device))
            depth = depth.to(device)
            loss = F.l1_loss(pred, depth)
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            logger.update(l1=loss.item(), rmse=F.mse_loss(pred.detach(), depth).sqrt().item())
        logger.flush(epoch)
        if dist.get_rank() == 0:
            torch.save(model.module.state_dict(), "depth.pt")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
