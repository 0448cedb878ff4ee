import functools
import os

import torch
import torch.distributed as dist
import torch.nn as nn
from torch.distributed.fsdp import (
    FullStateDictConfig,
    FullyShardedDataParallel as FSDP,
    StateDictType,
)
from torch.distributed.fsdp.wrap import size_based_auto_wrap_policy
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset


class Summariser(nn.Module):
    def __init__(self, vocab=32128, d=1024):
        super().__init__()
        self.emb = nn.Embedding(vocab, d)
        self.t = nn.Transformer(d, 16, 12, 12, 4 * d, batch_first=True)
        self.lm = nn.Linear(d, vocab)

    def forward(self, src, tgt):
        m = nn.Transformer.generate_square_subsequent_mask(tgt.size(1), device=tgt.device)
        return self.lm(self.t(self.emb(src), self.emb(tgt), tgt_mask=m))


def save_model(model, rank, path):
    if rank == 0:
        cfg = FullStateDictConfig(offload_to_cpu=True, rank0_only=True)
        with FSDP.state_dict_type(model, StateDictType.FULL_STATE_DICT, cfg):
            state = model.state_dict()
        torch.save(state, path)


def main():
    local_rank = int(os.environ["LOCAL_RANK"])
    torch.cuda.set_device(local_rank)
    dist.init_process_group("nccl")
    rank = dist.get_rank()
    torch.manual_seed(2 + rank)
    wrap = functools.partial(size_based_auto_wrap_policy, min_num_params=1_000_000)
    model = FSDP(Summariser(), auto_wrap_policy=wrap, device_id=local_rank, sync_module_states=True)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4)

    d = torch.load("cnn_dm.pt", map_location="cpu", weights_only=True)
    ds = TensorDataset(d["article"], d["summary"])
    sampler = DistributedSampler(ds, drop_last=True)
    loader = DataLoader(ds, 4, sampler=sampler, drop_last=True)
    for epoch in range(3):
        sampler.set_epoch(epoch)
        model.train()
        for src, tgt in loader:
            src, tgt = src.to(local_rank), tgt.to(local_rank)
            out = model(src, tgt[:, :-1])
            loss = nn.functional.cross_entropy(out.transpose(1, 2), tgt[:, 1:], ignore_index=0)
            loss.backward()
            optimizer.step()
            optimizer.zero_grad(set_to_none=True)
        save_model(model, rank, f"sum_{epoch}.pt")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
