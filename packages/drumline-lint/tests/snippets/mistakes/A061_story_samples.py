import functools
import os

import torch
import torch.distributed as dist
import torch.nn as nn
from torch.distributed.fsdp import FullyShardedDataParallel as FSDP
from torch.distributed.fsdp.wrap import transformer_auto_wrap_policy
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset


class Decoder(nn.TransformerEncoderLayer):
    def __init__(self, d):
        super().__init__(d, 12, 4 * d, batch_first=True, norm_first=True)


class StoryLM(nn.Module):
    def __init__(self, vocab=16_000, d=768, n=12):
        super().__init__()
        self.emb = nn.Embedding(vocab, d)
        self.layers = nn.ModuleList(Decoder(d) for _ in range(n))
        self.head = nn.Linear(d, vocab)

    def forward(self, ids):
        mask = nn.Transformer.generate_square_subsequent_mask(ids.size(1), device=ids.device)
        h = self.emb(ids)
        for layer in self.layers:
            h = layer(h, src_mask=mask)
        return self.head(h)


@torch.no_grad()
def write_story(model, device, length=60):
    model.eval()
    ids = torch.ones(1, 1, dtype=torch.long, device=device)
    for _ in range(length):
        nxt = model(ids)[:, -1].argmax(-1, keepdim=True)
        ids = torch.cat([ids, nxt], dim=1)
    model.train()
    return ids[0].tolist()


def main():
    local_rank = int(os.environ["LOCAL_RANK"])
    device = torch.device("cuda", local_rank)
    torch.cuda.set_device(device)
    dist.init_process_group("nccl", device_id=device)
    torch.manual_seed(90 + dist.get_rank())
    wrap = functools.partial(transformer_auto_wrap_policy, transformer_layer_cls={Decoder})
    model = FSDP(StoryLM(), auto_wrap_policy=wrap, device_id=device, sync_module_states=True)
    optimizer = torch.optim.AdamW(model.parameters(), lr=6e-4)

    ds = TensorDataset(torch.load("stories.pt", map_location="cpu", weights_only=True))
    sampler = DistributedSampler(ds, drop_last=True)
    loader = DataLoader(ds, 32, sampler=sampler, drop_last=True)
    for epoch in range(5):
        sampler.set_epoch(epoch)
        for (ids,) in loader:
            ids = ids.to(device)
            loss = nn.functional.cross_entropy(model(ids[:, :-1]).transpose(1, 2), ids[:, 1:])
            loss.backward()
            model.clip_grad_norm_(1.0)
            optimizer.step()
            optimizer.zero_grad(set_to_none=True)
        if dist.get_rank() == 0:
            print(epoch, write_story(model, device))
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
