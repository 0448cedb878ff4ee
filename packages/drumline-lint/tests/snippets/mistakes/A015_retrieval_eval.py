import json
import os

import torch
import torch.distributed as dist
from torch import nn
from torch.utils.data import DataLoader, Dataset


class Passages(Dataset):
    def __init__(self, path, rank, world_size):
        with open(path) as fh:
            self.items = [json.loads(line) for i, line in enumerate(fh) if i % world_size == rank]

    def __len__(self):
        return len(self.items)

    def __getitem__(self, i):
        item = self.items[i]
        return item["id"], torch.tensor(item["tokens"][:128] + [0] * max(0, 128 - len(item["tokens"])))


class Tower(nn.Module):
    def __init__(self, vocab=50000, dim=256):
        super().__init__()
        self.emb = nn.EmbeddingBag(vocab, dim, padding_idx=0)

    def forward(self, ids):
        return nn.functional.normalize(self.emb(ids), dim=-1)


@torch.inference_mode()
def score_shard(model, loader, query, device, k=10):
    best = []
    for ids, tokens in loader:
        sims = model(tokens.to(device)) @ query
        best.extend(zip(sims.tolist(), ids))
        best = sorted(best, reverse=True)[:k]
    return best


def main():
    local_rank = int(os.environ["LOCAL_RANK"])
    device = torch.device(f"cuda:{local_rank}")
    dist.init_process_group("nccl")
    rank, world_size = dist.get_rank(), dist.get_world_size()

    model = Tower()
    model.load_state_dict(torch.load("tower.pt", map_location="cpu", weights_only=True))
    model.to(device).eval()
    query = torch.load("query.pt", map_location=device, weights_only=True)

    shard = Passages("passages.jsonl", rank, world_size)
    top = score_shard(model, DataLoader(shard, batch_size=512), query, device)
    gathered = [None] * world_size
    dist.all_gather_object(gathered, top)

    if rank == 0:
        merged = sorted((hit for part in gathered for hit in part), reverse=True)[:10]
        with open("top10.json", "w") as fh:
            json.dump(merged, fh, indent=2)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
