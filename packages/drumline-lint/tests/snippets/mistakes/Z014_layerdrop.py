import os
import random

import torch
import torch.distributed as dist
import torch.nn as nn
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.utils.data import DataLoader, DistributedSampler

from asr_data import Utterances, pad


class Encoder(nn.Module):
    def __init__(self, dim=512, layers=16, vocab=80, layerdrop=0.1):
        super().__init__()
        self.front = nn.Linear(80, dim)
        self.layers = nn.ModuleList(
            nn.TransformerEncoderLayer(dim, 8, 4 * dim, batch_first=True) for _ in range(layers))
        self.layerdrop = layerdrop
        self.out = nn.Linear(dim, vocab)

    def forward(self, feats):
        x = self.front(feats)
        for layer in self.layers:
            if self.training and random.random() < self.layerdrop:
                continue
            x = layer(x)
        return self.out(x).log_softmax(-1)


def main():
    local_rank = int(os.environ["LOCAL_RANK"])
    torch.cuda.set_device(local_rank)
    dist.init_process_group("nccl")
    torch.manual_seed(dist.get_rank())

    data = Utterances("/data/asr/train.tsv")
    sampler = DistributedSampler(data)
    loader = DataLoader(data, batch_size=16, sampler=sampler, collate_fn=pad, num_workers=6)

    model = DDP(Encoder().cuda(), device_ids=[local_rank])
    ctc = nn.CTCLoss(zero_infinity=True)
    optimizer = torch.optim.AdamW(model.parameters(), lr=5e-4)

    for epoch in range(60):
        sampler.set_epoch(epoch)
        model.train()
        for feats, feat_len, text, text_len in loader:
            log_probs = model(feats.cuda(non_blocking=True)).transpose(0, 1)
            loss = ctc(log_probs, text.cuda(), feat_len.cuda(), text_len.cuda())
            optimizer.zero_grad(set_to_none=True)
            loss.backward()
            nn.utils.clip_grad_norm_(model.parameters(), 5.0)
            optimizer.step()
        if dist.get_rank() == 0:
            torch.save(model.module.state_dict(), "/checkpoints/asr/encoder.pt")

    dist.destroy_process_group()


if __name__ == "__main__":
    main()
