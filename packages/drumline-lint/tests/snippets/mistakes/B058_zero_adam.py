import argparse
import os

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch.distributed.optim import ZeroRedundancyOptimizer
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset
from transformers import BartConfig, BartForConditionalGeneration


class Seq2SeqTrainer:
    def __init__(self, args, local_rank):
        self.args = args
        self.device = torch.device("cuda", local_rank)
        self.rank = dist.get_rank()
        model = BartForConditionalGeneration(BartConfig(vocab_size=args.vocab)).to(self.device)
        self.model = DDP(model, device_ids=[local_rank])
        self.optim = ZeroRedundancyOptimizer(
            self.model.parameters(), optimizer_class=torch.optim.AdamW, lr=args.lr, weight_decay=0.01
        )
        blob = torch.load(args.data, map_location="cpu", weights_only=True)
        self.data = TensorDataset(blob["src"], blob["tgt"])
        self.sampler = DistributedSampler(self.data)
        self.loader = DataLoader(self.data, args.batch, sampler=self.sampler, num_workers=2, drop_last=True)

    def save(self, epoch):
        if self.rank != 0:
            return
        torch.save(
            {
                "model": self.model.module.state_dict(),
                "optim": self.optim.state_dict(),
                "epoch": epoch,
            },
            self.args.out,
        )

    def fit(self):
        for epoch in range(self.args.epochs):
            self.sampler.set_epoch(epoch)
            self.model.train()
            tally = torch.zeros(2, device=self.device)
            for src, tgt in self.loader:
                src, tgt = src.to(self.device), tgt.to(self.device)
                out = self.model(input_ids=src, attention_mask=src.ne(1).long(), labels=tgt)
                self.optim.zero_grad(set_to_none=True)
                out.loss.backward()
                self.optim.step()
                tally += torch.stack([out.loss.detach(), torch.ones_like(out.loss)])
            dist.all_reduce(tally)
            if self.rank == 0:
                print(f"epoch {epoch} loss {(tally[0] / tally[1]).item():.4f}")
            self.save(epoch)


if __name__ == "__main__":
    ap = argparse.ArgumentParser()
    ap.add_argument("--data", default="data/para.pt")
    ap.add_argument("--out", default="bart.pt")
    ap.add_argument("--vocab", type=int, default=50265)
    ap.add_argument("--batch", type=int, default=16)
    ap.add_argument("--epochs", type=int, default=10)
    ap.add_argument("--lr", type=float, default=1e-4)
    args = ap.parse_args()
    local_rank = int(os.environ["LOCAL_RANK"])
    torch.cuda.set_device(local_rank)
    dist.init_process_group("nccl")
    torch.manual_seed(0)
    Seq2SeqTrainer(args, local_rank).fit()
    dist.destroy_process_group()
