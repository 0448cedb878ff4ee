import os
import time

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
import torch.nn as nn
import torch.nn.functional as F
from torch.distributed.checkpoint.state_dict import get_state_dict
from torch.distributed.fsdp import fully_shard
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset

SAVE_MINUTES = 20


class CodeModel(nn.Module):
    def __init__(self, vocab=49152, d=2048, n=24):
        super().__init__()
        self.emb = nn.Embedding(vocab, d)
        self.layers = nn.ModuleList(
            nn.TransformerEncoderLayer(d, 16, 4 * d, batch_first=True, norm_first=True, dropout=0.0)
            for _ in range(n))
        self.head = nn.Linear(d, vocab, bias=False)

    def forward(self, ids):
        mask = nn.Transformer.generate_square_subsequent_mask(ids.size(1), device=ids.device)
        h = self.emb(ids)
        for layer in self.layers:
            h = layer(h, src_mask=mask)
        return self.head(h)


def save(model, optimizer, step):
    model_sd, optim_sd = get_state_dict(model, optimizer)
    dcp.save({"model": model_sd, "optim": optim_sd}, checkpoint_id=f"/shared/code/step_{step:07d}")


def main():
    local_rank = int(os.environ["LOCAL_RANK"])
    device = torch.device("cuda", local_rank)
    torch.cuda.set_device(device)
    dist.init_process_group("cpu:gloo,cuda:nccl", device_id=device)
    torch.manual_seed(44)
    model = CodeModel().to(device)
    for layer in model.layers:
        fully_shard(layer)
    fully_shard(model)
    optimizer = torch.optim.AdamW(model.parameters(), lr=2e-4)

    ds = TensorDataset(torch.load("code_blocks.pt", map_location="cpu", weights_only=True))
    sampler = DistributedSampler(ds, drop_last=True)
    loader = DataLoader(ds, 2, sampler=sampler, drop_last=True)
    last_save, step = time.time(), 0
    for epoch in range(2):
        sampler.set_epoch(epoch)
        for (ids,) in loader:
            step += 1
            ids = ids.to(device)
            loss = F.cross_entropy(model(ids[:, :-1]).flatten(0, 1), ids[:, 1:].flatten())
            loss.backward()
            nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()
            optimizer.zero_grad(set_to_none=True)
            if time.time() - last_save > SAVE_MINUTES * 60:
                save(model, optimizer, step)
                last_save = time.time()
    save(model, optimizer, step)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
