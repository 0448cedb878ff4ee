import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch.nn.parallel import DistributedDataParallel as DDP

from data_module import FashionData
from rt import runtime
from simple_cnn import SimpleCNN


def test(model, loader, device):
    model.eval()
    counts = torch.zeros(2, device=device)
    with torch.no_grad():
        for x, y in loader:
            counts[0] += (model(x.to(device)).argmax(1) == y.to(device)).sum()
            counts[1] += y.numel()
    dist.all_reduce(counts)
    return (counts[0] / counts[1]).item()


def main():
    rt = runtime(seed=10)
    data = FashionData("./data", batch_size=128)
    model = DDP(SimpleCNN().to(rt["device"]), device_ids=[rt["local_rank"]])
    opt = torch.optim.Adadelta(model.parameters(), lr=1.0)
    test_loader = data.test_loader()
    train_loader, sampler = data.train_loader()
    for epoch in range(14):
        sampler.set_epoch(epoch)
        model.train()
        for x, y in train_loader:
            opt.zero_grad()
            F.cross_entropy(model(x.to(rt["device"])), y.to(rt["device"])).backward()
            opt.step()
        acc = test(model, test_loader, rt["device"])
        if rt["rank"] == 0:
            print(f"epoch {epoch} accuracy {acc:.4f}")
    if rt["rank"] == 0:
        torch.save(model.module.state_dict(), "fashion.pt")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
