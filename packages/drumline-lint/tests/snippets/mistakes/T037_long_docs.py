import os

import torch
import torch.distributed as dist
import torch.nn as nn
import torch.nn.functional as F
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.utils.data import DataLoader, Dataset, DistributedSampler


class Tagged(Dataset):
    """variable-length token / label sequences, up to 16k tokens"""

    def __init__(self, path):
        self.items = torch.load(path, map_location="cpu")

    def __len__(self):
        return len(self.items)

    def __getitem__(self, i):
        return self.items[i]["tokens"], self.items[i]["labels"]


def collate(batch):
    tok, lab = zip(*batch)
    return (nn.utils.rnn.pad_sequence(tok, batch_first=True),
            nn.utils.rnn.pad_sequence(lab, batch_first=True, padding_value=-100))


class Tagger(nn.Module):
    def __init__(self, vocab=32000, d=512, layers=8, tags=17):
        super().__init__()
        self.emb = nn.Embedding(vocab, d, padding_idx=0)
        layer = nn.TransformerEncoderLayer(d, 8, 4 * d, batch_first=True, norm_first=True)
        self.enc = nn.TransformerEncoder(layer, layers)
        self.out = nn.Linear(d, tags)

    def forward(self, tok):
        return self.out(self.enc(self.emb(tok), src_key_padding_mask=tok == 0))


class Trainer:
    def __init__(self, cfg):
        self.cfg = cfg
        self.local_rank = int(os.environ["LOCAL_RANK"])
        torch.cuda.set_device(self.local_rank)
        dist.init_process_group("nccl")
        self.rank = dist.get_rank()
        ds = Tagged(cfg["data"])
        self.sampler = DistributedSampler(ds, seed=cfg["seed"])
        self.loader = DataLoader(ds, cfg["batch"], sampler=self.sampler, collate_fn=collate, num_workers=2)
        self.model = DDP(Tagger().cuda(), device_ids=[self.local_rank])
        self.opt = torch.optim.AdamW(self.model.parameters(), lr=cfg["lr"])

    def step(self, tok, lab):
        logits = self.model(tok.cuda(non_blocking=True))
        loss = F.cross_entropy(logits.flatten(0, 1), lab.cuda(non_blocking=True).flatten(), ignore_index=-100)
        self.opt.zero_grad(set_to_none=True)
        loss.backward()
        nn.utils.clip_grad_norm_(self.model.parameters(), 1.0)
        self.opt.step()
        return loss.item()

    def train_epoch(self, epoch):
        self.sampler.set_epoch(epoch)
        self.model.train()
        losses, skipped = [], 0
        for tok, lab in self.loader:
            try:
                losses.append(self.step(tok, lab))
            except torch.cuda.OutOfMemoryError:
                torch.cuda.empty_cache()
                skipped += 1
                continue
        if self.rank == 0:
            print(f"epoch {epoch}: loss {sum(losses) / len(losses):.4f}, skipped {skipped}")

    def run(self):
        for epoch in range(self.cfg["epochs"]):
            self.train_epoch(epoch)
            if self.rank == 0:
                torch.save(self.model.module.state_dict(), self.cfg["out"])
            dist.barrier()
        dist.destroy_process_group()


if __name__ == "__main__":
    # torchrun --nnodes=1 --nproc_per_node=8
    Trainer({"data": "data/legal.pt", "batch": 2, "lr": 1e-4, "epochs": 10, "seed": 3, "out": "tagger.pt"}).run()
