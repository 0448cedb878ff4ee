import argparse
import os

import torch
import torch.distributed as dist
from torch.distributed.optim import ZeroRedundancyOptimizer
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset
from transformers import BertConfig, BertForMaskedLM


class Trainer:
    def __init__(self, args, device):
        self.args, self.device, self.rank = args, device, dist.get_rank()
        self.model = DDP(BertForMaskedLM(BertConfig()).to(device), device_ids=[device.index])
        self.opt = ZeroRedundancyOptimizer(self.model.parameters(), torch.optim.AdamW, lr=args.lr)
        blob = torch.load(args.data, map_location="cpu", weights_only=True)
        self.data = TensorDataset(blob["ids"], blob["labels"])
        self.sampler = DistributedSampler(self.data)
        self.loader = DataLoader(self.data, args.batch, sampler=self.sampler, drop_last=True)

    def save(self, epoch):
        self.opt.consolidate_state_dict(to=0)
        if self.rank != 0:
            return
        state = {"model": self.model.module.state_dict(), "opt": self.opt.state_dict(), "epoch": epoch}
        torch.save(state, self.args.out)

    def fit(self):
        for epoch in range(self.args.epochs):
            self.sampler.set_epoch(epoch)
            self.model.train()
            stat = torch.zeros(2, device=self.device)
            for ids, labels in self.loader:
                loss = self.model(input_ids=ids.to(self.device), labels=labels.to(self.device)).loss
                self.opt.zero_grad(set_to_none=True)
                loss.backward()
                self.opt.step()
                stat += torch.stack([loss.detach(), torch.ones_like(loss)])
            dist.all_reduce(stat)
            if self.rank == 0:
                print(f"epoch {epoch} loss {(stat[0] / stat[1]).item():.4f}")
            self.save(epoch)


def main():
    ap = argparse.ArgumentParser()
    ap.add_argument("--data", default="data/mlm.pt")
    ap.add_argument("--out", default="bert.pt")
    ap.add_argument("--batch", type=int, default=32)
    ap.add_argument("--epochs", type=int, default=5)
    ap.add_argument("--lr", type=float, default=1e-4)
    args = ap.parse_args()
    device = torch.device("cuda", int(os.environ["LOCAL_RANK"]))
    torch.cuda.set_device(device)
    dist.init_process_group("nccl", device_id=device)
    torch.manual_seed(dist.get_rank())
    Trainer(args, device).fit()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
