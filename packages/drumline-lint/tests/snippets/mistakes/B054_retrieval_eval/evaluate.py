"""Recall of a trained image encoder. torchrun --nproc_per_node 8 evaluate.py ckpt.pt data/shop"""
import sys

import torch
import torch.nn.functional as F
from torch.utils.data import DataLoader, Subset
from torchvision import models, transforms
from torchvision.datasets import ImageFolder

from env import launch
from gather import gather_embeddings, recall_at_k


def load_encoder(path, device):
    net = models.resnet50(weights=None, num_classes=256)
    net.load_state_dict(torch.load(path, map_location="cpu", weights_only=True))
    return net.to(device).eval()


@torch.no_grad()
def embed(net, folder, env):
    tf = transforms.Compose([transforms.Resize(256), transforms.CenterCrop(224), transforms.ToTensor()])
    data = ImageFolder(folder, tf)
    shard = Subset(data, range(env.rank, len(data), env.world_size))
    embs, ids = [], []
    for x, y in DataLoader(shard, 128, num_workers=6, pin_memory=True):
        embs.append(F.normalize(net(x.to(env.device, non_blocking=True)), dim=1))
        ids.append(y.to(env.device))
    return gather_embeddings(torch.cat(embs), torch.cat(ids))


def evaluate(env, ckpt, root):
    net = load_encoder(ckpt, env.device)
    g_emb, g_ids = embed(net, f"{root}/gallery", env)
    q_emb, q_ids = embed(net, f"{root}/query", env)
    if env.is_main:
        for k in (1, 5, 10):
            print(f"R@{k}: {recall_at_k(q_emb, g_emb, q_ids, g_ids, k):.4f}")


if __name__ == "__main__":
    launch(evaluate, sys.argv[1], sys.argv[2])
