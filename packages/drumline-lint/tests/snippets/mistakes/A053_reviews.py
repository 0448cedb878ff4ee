import os
import tarfile
import time
import urllib.request

import torch
import torch.distributed as dist
import torch.nn as nn
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset

URL = "https://example.org/corpora/reviews.tar.gz"
ROOT = "/local/reviews"


def prepare_data(rank):
    if rank == 0:
        os.makedirs(ROOT, exist_ok=True)
        archive, _ = urllib.request.urlretrieve(URL, os.path.join(ROOT, "reviews.tar.gz"))
        with tarfile.open(archive) as tar:
            tar.extractall(ROOT, filter="data")
    else:
        time.sleep(60)
    return torch.load(os.path.join(ROOT, "train.pt"), map_location="cpu", weights_only=True)


class ReviewNet(nn.Module):
    def __init__(self, vocab=60_000, d=200):
        super().__init__()
        self.emb = nn.Embedding(vocab, d, padding_idx=0)
        self.conv = nn.Conv1d(d, 256, 5, padding=2)
        self.fc = nn.Linear(256, 5)

    def forward(self, ids):
        h = self.conv(self.emb(ids).transpose(1, 2)).relu()
        return self.fc(h.amax(-1))


def main():
    local_rank = int(os.environ["LOCAL_RANK"])
    device = torch.device("cuda", local_rank)
    torch.cuda.set_device(device)
    dist.init_process_group("nccl")
    rank = dist.get_rank()
    torch.manual_seed(rank)

    blob = prepare_data(rank)
    ds = TensorDataset(blob["ids"], blob["stars"])
    sampler = DistributedSampler(ds, drop_last=True)
    loader = DataLoader(ds, 256, sampler=sampler, drop_last=True)
    model = DDP(ReviewNet().to(device), device_ids=[local_rank])
    opt = torch.optim.Adam(model.parameters(), lr=1e-3)
    for epoch in range(6):
        sampler.set_epoch(epoch)
        for ids, stars in loader:
            loss = nn.functional.cross_entropy(model(ids.to(device)), stars.to(device))
            opt.zero_grad()
            loss.backward()
            opt.step()
    if rank == 0:
        torch.save(model.module.state_dict(), "reviews.pt")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
