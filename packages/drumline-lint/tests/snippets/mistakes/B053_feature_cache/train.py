import argparse

import torch
import torch.nn.functional as F
from torch import nn
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.nn.utils.rnn import pad_sequence
from torch.utils.data import DataLoader, DistributedSampler

from cache import load_features
from utils.dist import cleanup, init_distributed, is_main_process, save_on_master, seed_everything


class Predictor(nn.Module):
    """Autoregressive predictive coding."""

    def __init__(self, dim=80, hidden=512):
        super().__init__()
        self.rnn = nn.GRU(dim, hidden, 3, batch_first=True)
        self.out = nn.Linear(hidden, dim)

    def forward(self, x):
        return self.out(self.rnn(x)[0])


def main():
    ap = argparse.ArgumentParser()
    ap.add_argument("--wavs", default="data/wavs")
    ap.add_argument("--cache", default="data/fbank.pt")
    ap.add_argument("--shift", type=int, default=3)
    ap.add_argument("--epochs", type=int, default=50)
    args = ap.parse_args()

    device = init_distributed()
    seed_everything(0)
    feats, _ = load_features(args.wavs, args.cache)
    sampler = DistributedSampler(feats)
    loader = DataLoader(feats, 32, sampler=sampler, collate_fn=lambda b: pad_sequence(b, True), drop_last=True)
    model = DDP(Predictor().to(device), device_ids=[device.index])
    opt = torch.optim.Adam(model.parameters(), lr=1e-3)
    for epoch in range(args.epochs):
        sampler.set_epoch(epoch)
        model.train()
        for x in loader:
            x = x.to(device)
            pred = model(x[:, : -args.shift])
            loss = F.l1_loss(pred, x[:, args.shift :])
            opt.zero_grad(set_to_none=True)
            loss.backward()
            opt.step()
        if is_main_process():
            print(epoch, loss.item())
        save_on_master(model.module.state_dict(), "apc.pt")
    cleanup()


if __name__ == "__main__":
    main()
