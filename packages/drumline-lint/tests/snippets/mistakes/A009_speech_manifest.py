import csv
import os

import torch
import torch.distributed as dist
import torch.nn as nn
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.utils.data import DataLoader, Dataset


class Utterances(Dataset):
    def __init__(self, rows):
        self.rows = rows

    def __len__(self):
        return len(self.rows)

    def __getitem__(self, i):
        row = self.rows[i]
        feats = torch.load(row["feats"], map_location="cpu", weights_only=True)
        return feats[:400], int(row["speaker"])


def collate(batch):
    feats, spk = zip(*batch)
    return nn.utils.rnn.pad_sequence(feats, batch_first=True), torch.tensor(spk)


def read_manifest(path, rank, world_size):
    with open(path, newline="") as fh:
        rows = list(csv.DictReader(fh))
    return rows[rank::world_size]


class SpeakerNet(nn.Module):
    def __init__(self, speakers=1211):
        super().__init__()
        self.rnn = nn.GRU(80, 256, num_layers=3, batch_first=True)
        self.fc = nn.Linear(256, speakers)

    def forward(self, x):
        return self.fc(self.rnn(x)[0].mean(1))


def main():
    local_rank = int(os.environ["LOCAL_RANK"])
    torch.cuda.set_device(local_rank)
    dist.init_process_group("nccl")
    rank, world = dist.get_rank(), dist.get_world_size()
    torch.manual_seed(rank)
    device = torch.device("cuda", local_rank)

    rows = read_manifest("voxceleb_train.csv", rank, world)
    loader = DataLoader(Utterances(rows), batch_size=64, shuffle=True, collate_fn=collate,
                        num_workers=6)
    model = DDP(SpeakerNet().to(device), device_ids=[local_rank])
    opt = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)
    for epoch in range(50):
        model.train()
        for feats, spk in loader:
            loss = nn.functional.cross_entropy(model(feats.to(device)), spk.to(device))
            opt.zero_grad()
            loss.backward()
            opt.step()
        if rank == 0:
            torch.save(model.module.state_dict(), f"spk_{epoch:02d}.pt")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
