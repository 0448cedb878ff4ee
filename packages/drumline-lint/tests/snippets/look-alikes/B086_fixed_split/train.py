import torch
import torch.nn.functional as F
from torch.nn.parallel import DistributedDataParallel as DDP

from data import build_loaders
from model import ConvNet
from utils import dist as ud


@torch.no_grad()
def accuracy(net, loader, device):
    net.eval()
    ok = n = 0
    for x, y in loader:
        ok += (net(x.to(device)).argmax(1).cpu() == y).sum().item()
        n += len(y)
    ok, n = ud.all_reduce_sum([ok, n], device)
    return ok / n


def main(root="data/shells", epochs=30, seed=5):
    device = ud.init_distributed()
    ud.seed_everything(seed)
    loader, val_loader = build_loaders(root, 64)
    net = ConvNet(num_classes=26).to(device)
    ddp = DDP(net, device_ids=[device.index])
    opt = torch.optim.AdamW(ddp.parameters(), lr=1e-3)
    best = 0.0
    for epoch in range(epochs):
        loader.sampler.set_epoch(epoch)
        ddp.train()
        for x, y in loader:
            loss = F.cross_entropy(ddp(x.to(device)), y.to(device))
            opt.zero_grad(set_to_none=True)
            loss.backward()
            opt.step()
        acc = accuracy(net, val_loader, device)
        if ud.is_main_process():
            print(f"epoch {epoch} acc {acc:.4f}")
        if acc > best:
            best = acc
            ud.save_on_master(net.state_dict(), "shells.pt")
    ud.cleanup()


if __name__ == "__main__":
    main()
