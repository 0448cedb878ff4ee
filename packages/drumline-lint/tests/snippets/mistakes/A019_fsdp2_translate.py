import os

import torch
import torch.distributed as dist
import torch.nn as nn
import torch.nn.functional as F
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset


class Seq2Seq(nn.Module):
    def __init__(self, vocab=32_000, d=768):
        super().__init__()
        self.emb = nn.Embedding(vocab, d)
        self.core = nn.Transformer(d, 12, 8, 8, 4 * d, batch_first=True)
        self.out = nn.Linear(d, vocab)

    def forward(self, src, tgt):
        mask = nn.Transformer.generate_square_subsequent_mask(tgt.size(1), device=tgt.device)
        return self.out(self.core(self.emb(src), self.emb(tgt), tgt_mask=mask))


def apply_sharding(model, mesh):
    mp = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
    for layer in list(model.core.encoder.layers) + list(model.core.decoder.layers):
        fully_shard(layer, mesh=mesh, mp_policy=mp)
    fully_shard(model, mesh=mesh, mp_policy=mp)


def main():
    local_rank = int(os.environ["LOCAL_RANK"])
    torch.cuda.set_device(local_rank)
    device = torch.device("cuda", local_rank)
    dist.init_process_group("nccl", device_id=device)
    mesh = init_device_mesh("cuda", (dist.get_world_size(),))

    torch.manual_seed(8)
    model = Seq2Seq().to(device)
    optim = torch.optim.AdamW(model.parameters(), lr=2e-4, betas=(0.9, 0.98))
    apply_sharding(model, mesh)

    blob = torch.load("wmt_pairs.pt", map_location="cpu", weights_only=True)
    data = TensorDataset(blob["src"], blob["tgt"])
    sampler = DistributedSampler(data, seed=8, drop_last=True)
    loader = DataLoader(data, batch_size=24, sampler=sampler, drop_last=True, pin_memory=True)
    torch.manual_seed(8 + dist.get_rank())
    for epoch in range(4):
        sampler.set_epoch(epoch)
        for src, tgt in loader:
            src, tgt = src.to(device), tgt.to(device)
            logits = model(src, tgt[:, :-1]).float()
            loss = F.cross_entropy(logits.transpose(1, 2), tgt[:, 1:], ignore_index=0)
            loss.backward()
            torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            optim.step()
            optim.zero_grad(set_to_none=True)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
