"""torchrun --nproc_per_node=8 train.py"""
import os

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import nn
from torch.distributed.checkpoint.state_dict import get_state_dict
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset

from parallel import shard


class Net(nn.Module):
    def __init__(self, d=2048, n=16, vocab=32000):
        super().__init__()
        self.emb = nn.Embedding(vocab, d)
        self.layers = nn.ModuleList(
            nn.TransformerEncoderLayer(d, 16, 4 * d, batch_first=True, norm_first=True) for _ in range(n))
        self.out = nn.Linear(d, vocab)

    def forward(self, x):
        mask = nn.Transformer.generate_square_subsequent_mask(x.shape[1], device=x.device, dtype=torch.bfloat16)
        h = self.emb(x)
        for layer in self.layers:
            h = layer(h, src_mask=mask, is_causal=True)
        return self.out(h)


def main():
    dist.init_process_group("nccl")
    gpu = int(os.environ["LOCAL_RANK"])
    torch.cuda.set_device(gpu)
    torch.manual_seed(0)
    model = shard(Net().cuda(), dist.get_world_size())
    opt = torch.optim.AdamW(model.parameters(), lr=3e-4)

    ds = TensorDataset(torch.load("tokens.pt", map_location="cpu", mmap=True))
    sampler = DistributedSampler(ds, drop_last=True)
    loader = DataLoader(ds, 4, sampler=sampler, drop_last=True)
    for epoch in range(3):
        sampler.set_epoch(epoch)
        for i, (ids,) in enumerate(loader):
            ids = ids.cuda()
            logits = model(ids[:, :-1])
            loss = nn.functional.cross_entropy(logits.float().flatten(0, 1), ids[:, 1:].flatten())
            loss.backward()
            nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            opt.step()
            opt.zero_grad()
        m, o = get_state_dict(model, opt)
        dcp.save({"model": m, "optim": o}, checkpoint_id=f"ckpt/epoch-{epoch}")
        if dist.get_rank() == 0:
            print(epoch, loss.item())
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
