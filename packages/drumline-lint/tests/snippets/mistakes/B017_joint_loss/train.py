import argparse

import torch
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset

from modeling import JointTagger
from utils.dist import cleanup, init_distributed, is_main_process, save_on_master, seed_everything


def load(path):
    blob = torch.load(path, map_location="cpu", weights_only=True)
    return TensorDataset(blob["ids"], blob["tags"], blob["label"])


class Trainer:
    def __init__(self, args, device):
        self.args, self.device = args, device
        self.data = load(args.train)
        self.sampler = DistributedSampler(self.data)
        self.loader = DataLoader(self.data, args.batch_size, sampler=self.sampler, drop_last=True)
        model = JointTagger(args.vocab, args.tags, args.labels).to(device)
        self.model = DDP(model, device_ids=[device.index])
        self.opt = torch.optim.AdamW(self.model.parameters(), lr=args.lr)

    def step(self, batch):
        ids, tags, label = (t.to(self.device, non_blocking=True) for t in batch)
        loss = self.model.module.compute_loss(ids, tags, label)
        self.opt.zero_grad(set_to_none=True)
        loss.backward()
        self.opt.step()
        return loss.detach()

    def fit(self):
        for epoch in range(self.args.epochs):
            self.sampler.set_epoch(epoch)
            self.model.train()
            for i, batch in enumerate(self.loader):
                loss = self.step(batch)
                if i % 100 == 0 and is_main_process():
                    print(epoch, i, loss.item())
            save_on_master(self.model.module.state_dict(), self.args.out)


if __name__ == "__main__":
    ap = argparse.ArgumentParser()
    ap.add_argument("--train", default="data/train.pt")
    ap.add_argument("--out", default="joint.pt")
    ap.add_argument("--vocab", type=int, default=32000)
    ap.add_argument("--tags", type=int, default=19)
    ap.add_argument("--labels", type=int, default=5)
    ap.add_argument("--batch-size", type=int, default=64)
    ap.add_argument("--epochs", type=int, default=10)
    ap.add_argument("--lr", type=float, default=3e-4)
    args = ap.parse_args()
    device = init_distributed()
    seed_everything(2)
    Trainer(args, device).fit()
    cleanup()
