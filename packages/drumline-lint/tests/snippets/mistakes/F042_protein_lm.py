import argparse
import os

import torch
import torch.distributed as dist
import torch.nn as nn
import torch.nn.functional as F
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.utils.data import DataLoader, Dataset
from torch.utils.data.distributed import DistributedSampler


class MaskedSequences(Dataset):
    """Protein sequences as uint8 tokens, padded to one length."""

    def __init__(self, path, mask_id=24, p=0.15):
        self.tokens = torch.load(path, map_location="cpu")
        self.mask_id, self.p = mask_id, p

    def __len__(self):
        return len(self.tokens)

    def __getitem__(self, i):
        target = self.tokens[i].long()
        mask = torch.rand(target.shape) < self.p
        return target.masked_fill(mask, self.mask_id), target.masked_fill(~mask, -100)


class ProteinLM(nn.Module):
    def __init__(self, vocab=25, dim=640, depth=12, length=512):
        super().__init__()
        self.emb = nn.Embedding(vocab, dim)
        self.pos = nn.Parameter(torch.zeros(1, length, dim))
        layer = nn.TransformerEncoderLayer(dim, 10, 4 * dim, batch_first=True, norm_first=True)
        self.encoder = nn.TransformerEncoder(layer, depth, enable_nested_tensor=False)
        self.out = nn.Linear(dim, vocab)

    def forward(self, x):
        return self.out(self.encoder(self.emb(x) + self.pos[:, :x.size(1)]))


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("--data", default="data/uniref50.pt")
    parser.add_argument("--ckpt", default="protein_lm.pt")
    parser.add_argument("--epochs", type=int, default=10)
    args = parser.parse_args()

    dist.init_process_group("nccl")
    rank, local_rank = dist.get_rank(), int(os.environ["LOCAL_RANK"])
    torch.cuda.set_device(local_rank)
    device = torch.device("cuda", local_rank)

    data = MaskedSequences(args.data)
    sampler = DistributedSampler(data, shuffle=True)
    loader = DataLoader(data, 32, sampler=sampler, num_workers=4, pin_memory=True)

    model = DDP(ProteinLM().to(device), device_ids=[local_rank])
    optimizer = torch.optim.AdamW(model.parameters(), lr=2e-4)

    start = torch.zeros(1, dtype=torch.long, device=device)
    if rank == 0 and os.path.exists(args.ckpt):
        state = torch.load(args.ckpt, map_location=device)
        model.module.load_state_dict(state["model"])
        optimizer.load_state_dict(state["optimizer"])
        start.fill_(state["epoch"] + 1)
        print(f"resumed from epoch {state['epoch']}")
    dist.broadcast(start, src=0)

    for epoch in range(int(start.item()), args.epochs):
        sampler.set_epoch(epoch)
        model.train()
        for x, target in loader:
            x, target = x.to(device, non_blocking=True), target.to(device, non_blocking=True)
            with torch.autocast("cuda", dtype=torch.bfloat16):
                loss = F.cross_entropy(model(x).flatten(0, 1), target.flatten(), ignore_index=-100)
            optimizer.zero_grad(set_to_none=True)
            loss.backward()
            optimizer.step()
        if rank == 0:
            print(f"epoch {epoch} loss {loss.item():.4f}", flush=True)
            torch.save({"model": model.module.state_dict(), "optimizer": optimizer.state_dict(),
                        "epoch": epoch}, args.ckpt)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
