import os
import sys

import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.utils.data import DataLoader, DistributedSampler

from asr.conformer import Conformer
from asr.corpus import LibriSpeech, pad_batch
from asr.loss import rnnt_loss


class Engine:
    def __init__(self, model, optimizer, device):
        self.model, self.optimizer, self.device = model, optimizer, device
        self.skipped = 0

    def epoch(self, loader, epoch):
        self.model.train()
        for it, batch in enumerate(loader):
            feats, tokens = batch["feats"].to(self.device), batch["tokens"].to(self.device)
            loss = rnnt_loss(self.model(feats, tokens), tokens, batch["lens"])

            if torch.isnan(loss) or torch.isinf(loss):
                self.skipped += 1
                print(f"bad loss at iter {it}, skipping", file=sys.stderr)
                continue

            self.optimizer.zero_grad()
            loss.backward()
            torch.nn.utils.clip_grad_norm_(self.model.parameters(), 1.0)
            self.optimizer.step()
            if dist.get_rank() == 0 and it % 100 == 0:
                print(f"[{epoch}:{it}] {loss.item():.3f}")


def main():
    dist.init_process_group("nccl")
    local_rank = int(os.environ["LOCAL_RANK"])
    torch.cuda.set_device(local_rank)
    device = torch.device("cuda", local_rank)
    ds = LibriSpeech("/data/LibriSpeech", "train-960")
    sampler = DistributedSampler(ds, shuffle=True)
    loader = DataLoader(ds, 12, sampler=sampler, collate_fn=pad_batch, num_workers=6, drop_last=True)
    model = DDP(Conformer(vocab=1024).to(device), device_ids=[local_rank])
    engine = Engine(model, torch.optim.AdamW(model.parameters(), lr=5e-4), device)
    for ep in range(50):
        sampler.set_epoch(ep)
        engine.epoch(loader, ep)
        if dist.get_rank() == 0:
            torch.save(model.module.state_dict(), f"conformer_{ep}.pt")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
