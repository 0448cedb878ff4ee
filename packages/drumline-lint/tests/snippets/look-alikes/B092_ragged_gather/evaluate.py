"""torchrun --nproc_per_node 4 evaluate.py encoder.pt data/shop"""
import sys

import torch
import torch.nn.functional as F
from torch.utils.data import DataLoader, Subset
from torchvision import models, transforms
from torchvision.datasets import ImageFolder

from env import launch
from gather import all_gather_ragged


@torch.inference_mode()
def embed(net, folder, env):
    tf = transforms.Compose([transforms.Resize(256), transforms.CenterCrop(224), transforms.ToTensor()])
    data = ImageFolder(folder, tf)
    shard = Subset(data, range(env.rank, len(data), env.world_size))
    embs, ids = [], []
    for x, y in DataLoader(shard, 128, num_workers=4):
        embs.append(F.normalize(net(x.to(env.device)), dim=1))
        ids.append(y.to(env.device))
    return all_gather_ragged(torch.cat(embs)), all_gather_ragged(torch.cat(ids))


def evaluate(env, ckpt, root):
    net = models.resnet50(weights=None, num_classes=256)
    net.load_state_dict(torch.load(ckpt, map_location="cpu", weights_only=True))
    net = net.to(env.device).eval()
    gallery, g_ids = embed(net, f"{root}/gallery", env)
    query, q_ids = embed(net, f"{root}/query", env)
    if env.is_main:
        top = (query @ gallery.T).topk(10, dim=1).indices
        hit = g_ids[top] == q_ids[:, None]
        for k in (1, 5, 10):
            print(f"R@{k}: {hit[:, :k].any(1).float().mean().item():.4f}")


if __name__ == "__main__":
    launch(evaluate, sys.argv[1], sys.argv[2])
