import os

import torch
import torch.nn as nn
import torch.nn.functional as F
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset

EMB, HID, N_ITEMS = 64, 256, 50_000


class SessionGRU(nn.Module):
    """next-item recommendation from a session of clicks"""

    def __init__(self):
        super().__init__()
        self.emb = nn.Embedding(N_ITEMS, EMB, padding_idx=0)
        self.gru = nn.GRU(EMB, HID, batch_first=True)
        self.proj = nn.Linear(HID, EMB)

    def forward(self, seq):
        out, _ = self.gru(self.emb(seq))
        return self.proj(out[:, -1]) @ self.emb.weight.t()


def load(split):
    blob = torch.load(f"data/{split}.pt", map_location="cpu")
    return TensorDataset(blob["seq"], blob["next"])


def make_loader(ds, bs, train):
    sampler = DistributedSampler(ds, shuffle=train, drop_last=train)
    return DataLoader(ds, batch_size=bs, sampler=sampler, num_workers=2), sampler


@torch.no_grad()
def recall_at_20(model, loader, device):
    model.eval()
    hits = torch.zeros((), device=device)
    for seq, nxt in loader:
        seq, nxt = seq.to(device), nxt.to(device)
        top = model(seq).topk(20, dim=1).indices
        hits += (top == nxt[:, None]).any(1).sum()
    return hits.item() / len(loader.dataset)


def main():
    local_rank = int(os.environ["LOCAL_RANK"])
    device = torch.device("cuda", local_rank)
    torch.cuda.set_device(device)
    dist.init_process_group("nccl", device_id=device)
    rank = dist.get_rank()

    train_loader, sampler = make_loader(load("train"), 512, train=True)
    val_loader, _ = make_loader(load("val"), 1024, train=False)
    model = DDP(SessionGRU().to(device), device_ids=[local_rank])
    opt = torch.optim.Adagrad(model.parameters(), lr=0.05)

    best = 0.0
    for epoch in range(30):
        sampler.set_epoch(epoch)
        model.train()
        for seq, nxt in train_loader:
            seq, nxt = seq.to(device, non_blocking=True), nxt.to(device, non_blocking=True)
            loss = F.cross_entropy(model(seq), nxt)
            opt.zero_grad()
            loss.backward()
            opt.step()

        recall = recall_at_20(model, val_loader, device)
        if rank == 0:
            print(f"epoch {epoch}: recall@20 = {recall:.4f}")
            if recall > best:
                best = recall
                torch.save(model.module.state_dict(), "session_gru_best.pt")
        dist.barrier()

    dist.destroy_process_group()


if __name__ == "__main__":
    main()  # torchrun --nproc_per_node=4
