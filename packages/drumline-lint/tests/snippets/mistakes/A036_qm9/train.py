import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch.nn.parallel import DistributedDataParallel as DDP

from helpers import all_sum, init, is_main
from graphs import loaders
from mpnn import MPNN

BEST = "best.pt"


def epoch_pass(model, loader, device, optimizer=None):
    model.train(optimizer is not None)
    total = torch.zeros(2, device=device)
    with torch.set_grad_enabled(optimizer is not None):
        for nodes, adj, y in loader:
            pred = model(nodes.to(device), adj.to(device))
            loss = F.l1_loss(pred, y.to(device))
            if optimizer is not None:
                optimizer.zero_grad()
                loss.backward()
                optimizer.step()
            total[0] += loss.detach() * y.numel()
            total[1] += y.numel()
    all_sum(total)
    return (total[0] / total[1]).item()


def main():
    device = init()
    train_loader, val_loader, test_loader, sampler = loaders("qm9.pt", 64)
    model = DDP(MPNN().to(device), device_ids=[device.index])
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-3)
    best = float("inf")
    for epoch in range(150):
        sampler.set_epoch(epoch)
        epoch_pass(model, train_loader, device, optimizer)
        val = epoch_pass(model, val_loader, device)
        if val < best:
            best = val
            if is_main():
                torch.save(model.module.state_dict(), BEST)

    model.module.load_state_dict(torch.load(BEST, map_location=device, weights_only=True))
    test = epoch_pass(model, test_loader, device)
    if is_main():
        print(f"test MAE {test:.4f}")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
