import torch
import torch.distributed as dist


def gather_embeddings(emb, ids):
    world = dist.get_world_size()
    embs = [torch.empty_like(emb) for _ in range(world)]
    idss = [torch.empty_like(ids) for _ in range(world)]
    dist.all_gather(embs, emb)
    dist.all_gather(idss, ids)
    return torch.cat(embs), torch.cat(idss)


def recall_at_k(queries, gallery, q_ids, g_ids, k=10):
    hits = 0
    for q, qid in zip(queries.split(1024), q_ids.split(1024)):
        top = (q @ gallery.T).topk(k, dim=1).indices
        hits += (g_ids[top] == qid[:, None]).any(1).sum().item()
    return hits / len(queries)
