import argparse

import torch
import torch.nn.functional as F
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset

from reward import RewardModel, TinyGPT
from utils.dist import all_reduce_sum, cleanup, init_distributed, is_main_process, save_on_master, seed_everything


def main():
    ap = argparse.ArgumentParser()
    ap.add_argument("--pairs", default="data/pairs.pt")
    ap.add_argument("--sft", default="ckpt/sft.pt")
    ap.add_argument("--out", default="ckpt/rm.pt")
    ap.add_argument("--vocab", type=int, default=50304)
    ap.add_argument("--lr", type=float, default=1e-5)
    args = ap.parse_args()

    device = init_distributed()
    seed_everything(0)
    backbone = TinyGPT(args.vocab)
    backbone.load_state_dict(torch.load(args.sft, map_location="cpu", weights_only=True))
    model = RewardModel(backbone).to(device)
    ddp = DDP(model, device_ids=[device.index])
    blob = torch.load(args.pairs, map_location="cpu", weights_only=True)
    data = TensorDataset(blob["good"], blob["good_last"], blob["bad"], blob["bad_last"])
    sampler = DistributedSampler(data)
    loader = DataLoader(data, 8, sampler=sampler, drop_last=True)
    opt = torch.optim.AdamW(ddp.parameters(), lr=args.lr)
    sampler.set_epoch(0)
    hit = n = 0
    for step, batch in enumerate(loader):
        good, gl, bad, bl = (t.to(device) for t in batch)
        r = ddp(torch.cat([good, bad]), torch.cat([gl, bl]))
        rg, rb = r.chunk(2)
        loss = -F.logsigmoid(rg - rb).mean()
        opt.zero_grad(set_to_none=True)
        loss.backward()
        opt.step()
        hit += (rg > rb).sum().item()
        n += len(rg)
        if step % 100 == 99:
            h, m = all_reduce_sum([hit, n], device)
            if is_main_process():
                print(step + 1, f"acc {h / m:.3f}")
            hit = n = 0
    save_on_master(model.state_dict(), args.out)
    cleanup()


if __name__ == "__main__":
    main()
