import os

import torch
import torch.distributed as dist
import torch.nn as nn
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset


class BagOfWords(nn.Module):
    def __init__(self, vocab=80_000, dim=128, classes=20):
        super().__init__()
        self.bag = nn.EmbeddingBag(vocab, dim, padding_idx=0)
        self.out = nn.Linear(dim, classes)

    def forward(self, ids):
        return self.out(self.bag(ids))


def load_split(name):
    blob = torch.load(f"news20_{name}.pt", map_location="cpu", weights_only=True)
    return TensorDataset(blob["ids"], blob["labels"])


@torch.no_grad()
def test(model, loader, device):
    model.eval()
    hits, seen = 0, 0
    for ids, labels in loader:
        pred = model(ids.to(device)).argmax(-1).cpu()
        hits += int((pred == labels).sum())
        seen += len(labels)
    counts = torch.tensor([hits, seen])
    dist.all_reduce(counts)
    return counts[0].item() / counts[1].item()


def main():
    local_rank = int(os.environ["LOCAL_RANK"])
    device = torch.device("cuda", local_rank)
    torch.cuda.set_device(device)
    dist.init_process_group("nccl")
    torch.manual_seed(dist.get_rank())

    train, held_out = load_split("train"), load_split("test")
    sampler = DistributedSampler(train, drop_last=True)
    loader = DataLoader(train, 512, sampler=sampler, drop_last=True)
    test_loader = DataLoader(held_out, 512, sampler=DistributedSampler(held_out, shuffle=False))
    model = DDP(BagOfWords().to(device), device_ids=[local_rank])
    opt = torch.optim.Adam(model.parameters(), lr=2e-3)

    for epoch in range(8):
        sampler.set_epoch(epoch)
        model.train()
        for ids, labels in loader:
            opt.zero_grad()
            nn.functional.cross_entropy(model(ids.to(device)), labels.to(device)).backward()
            opt.step()
        acc = test(model, test_loader, device)
        if dist.get_rank() == 0:
            print(epoch, f"{acc:.4f}")
    if dist.get_rank() == 0:
        torch.save(model.module.state_dict(), "bow.pt")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
