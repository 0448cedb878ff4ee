import argparse
import math
import os
from pathlib import Path

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset


class Seq2Seq(torch.nn.Module):
    def __init__(self, vocab, d_model=512):
        super().__init__()
        self.emb = torch.nn.Embedding(vocab, d_model)
        self.tr = torch.nn.Transformer(d_model, 8, 6, 6, batch_first=True)
        self.out = torch.nn.Linear(d_model, vocab)

    def forward(self, src, tgt):
        mask = self.tr.generate_square_subsequent_mask(tgt.size(1), device=tgt.device)
        return self.out(self.tr(self.emb(src), self.emb(tgt), tgt_mask=mask))


class Trainer:
    def __init__(self, model, dataset, args):
        self.args = args
        self.gpu = int(os.environ["LOCAL_RANK"])
        self.rank = int(os.environ["RANK"])
        self.model = DDP(model.to(self.gpu), device_ids=[self.gpu])
        self.sampler = DistributedSampler(dataset, shuffle=True)
        self.data = DataLoader(dataset, batch_size=args.batch_size, sampler=self.sampler, pin_memory=True)
        self.optimizer = torch.optim.Adam(self.model.parameters(), lr=args.lr, betas=(0.9, 0.98))
        self.start_epoch = 0
        self.snapshot = Path(args.save_dir) / "snapshot.pt"
        if self.snapshot.exists():
            self._load_snapshot()

    def _load_snapshot(self):
        snap = torch.load(self.snapshot, map_location=f"cuda:{self.gpu}")
        self.model.module.load_state_dict(snap["model"])
        self.optimizer.load_state_dict(snap["optimizer"])
        self.start_epoch = snap["epoch"] + 1

    def _save_snapshot(self, epoch):
        state = {
            "model": self.model.module.state_dict(),
            "optimizer": self.optimizer.state_dict(),
            "epoch": epoch,
        }
        torch.save(state, self.snapshot)
        if self.rank == 0:
            print(f"epoch {epoch}: snapshot written to {self.snapshot}")

    def _run_batch(self, src, tgt):
        logits = self.model(src, tgt[:, :-1])
        loss = F.cross_entropy(logits.flatten(0, 1), tgt[:, 1:].flatten(), ignore_index=0)
        self.optimizer.zero_grad()
        loss.backward()
        torch.nn.utils.clip_grad_norm_(self.model.parameters(), 1.0)
        self.optimizer.step()
        return loss.detach()

    def train(self):
        for epoch in range(self.start_epoch, self.args.epochs):
            self.sampler.set_epoch(epoch)
            total = torch.zeros((), device=self.gpu)
            for src, tgt in self.data:
                total += self._run_batch(src.to(self.gpu), tgt.to(self.gpu))
            total /= len(self.data)
            dist.all_reduce(total, op=dist.ReduceOp.AVG)
            if self.rank == 0:
                print(f"epoch {epoch}: ppl {math.exp(min(total.item(), 20)):.2f}")
            if epoch % self.args.save_every == 0:
                self._save_snapshot(epoch)


def load_pairs(path):
    blob = torch.load(path, map_location="cpu")
    return TensorDataset(blob["src"], blob["tgt"]), blob["vocab"]


def main():
    p = argparse.ArgumentParser()
    p.add_argument("--pairs", default="data/de-en.pt")
    p.add_argument("--save_dir", default="snapshots")
    p.add_argument("--save_every", type=int, default=2)
    p.add_argument("--epochs", type=int, default=40)
    p.add_argument("--batch_size", type=int, default=48)
    p.add_argument("--lr", type=float, default=1e-4)
    args = p.parse_args()

    torch.cuda.set_device(int(os.environ["LOCAL_RANK"]))
    dist.init_process_group(backend="nccl")
    os.makedirs(args.save_dir, exist_ok=True)
    dataset, vocab = load_pairs(args.pairs)
    Trainer(Seq2Seq(vocab), dataset, args).train()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
