"""GraphSAGE link prediction with precomputed text features."""
import os

import numpy as np
import torch
import torch.distributed as dist
import torch.nn.functional as F
from sentence_transformers import SentenceTransformer
from torch.nn.parallel import DistributedDataParallel as DDP
from torch_geometric.data import Data
from torch_geometric.loader import LinkNeighborLoader
from torch_geometric.nn import GraphSAGE

ROOT = "data/arxiv"
FEATURES = os.path.join(ROOT, "minilm.npy")


def encode_titles():
    with open(os.path.join(ROOT, "titles.txt"), encoding="utf-8") as f:
        titles = [line.strip() for line in f]
    encoder = SentenceTransformer("all-MiniLM-L6-v2", device="cuda")
    feats = encoder.encode(titles, batch_size=512, show_progress_bar=True)
    np.save(FEATURES, feats.astype(np.float32))


def load_graph():
    x = torch.from_numpy(np.load(FEATURES))
    edge_index = torch.from_numpy(np.load(os.path.join(ROOT, "edges.npy"))).long()
    return Data(x=x, edge_index=edge_index)


def main():
    dist.init_process_group("nccl")
    rank, world = dist.get_rank(), dist.get_world_size()
    local_rank = int(os.environ["LOCAL_RANK"])
    torch.cuda.set_device(local_rank)
    device = torch.device("cuda", local_rank)

    if rank == 0 and not os.path.exists(FEATURES):
        encode_titles()
    data = load_graph()

    # every rank trains on its own share of the edges, the same number on each
    perm = torch.randperm(data.num_edges, generator=torch.Generator().manual_seed(0))
    per_rank = data.num_edges // world
    mine = data.edge_index[:, perm[rank * per_rank:(rank + 1) * per_rank]]
    loader = LinkNeighborLoader(
        data, num_neighbors=[15, 10], batch_size=2048, edge_label_index=mine,
        neg_sampling_ratio=1.0, shuffle=True, num_workers=4,
    )

    model = GraphSAGE(data.num_features, 256, num_layers=2).to(device)
    model = DDP(model, device_ids=[local_rank])
    optimizer = torch.optim.Adam(model.parameters(), lr=3e-3)

    for epoch in range(1, 21):
        model.train()
        running = torch.zeros(1, device=device)
        for batch in loader:
            batch = batch.to(device)
            h = model(batch.x, batch.edge_index)
            src, dst = batch.edge_label_index
            score = (h[src] * h[dst]).sum(-1)
            loss = F.binary_cross_entropy_with_logits(score, batch.edge_label.float())
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            running += loss.detach() / len(loader)
        dist.all_reduce(running)
        if rank == 0:
            print(f"epoch {epoch:02d} loss {running.item() / world:.4f}", flush=True)
            torch.save(model.module.state_dict(), "sage.pt")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
