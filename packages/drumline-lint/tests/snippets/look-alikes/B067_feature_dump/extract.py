"""Extract backbone features with all GPUs. torchrun --nproc_per_node 8 extract.py"""
import torch
from torch.utils.data import DataLoader, Subset
from torchvision.datasets import ImageFolder
from torchvision.models import ResNet50_Weights, resnet50

from env import launch
from shards import ShardWriter


@torch.inference_mode()
def extract(env, root, out):
    weights = ResNet50_Weights.IMAGENET1K_V2
    net = resnet50(weights=None)
    net.load_state_dict(torch.load("weights/resnet50.pt", map_location="cpu", weights_only=True))
    net.fc = torch.nn.Identity()
    net = net.to(env.device).eval()
    data = ImageFolder(root, weights.transforms())
    index = range(env.rank, len(data), env.world_size)
    feats = []
    for x, _ in DataLoader(Subset(data, index), batch_size=256, num_workers=8, pin_memory=True):
        feats.append(net(x.to(env.device, non_blocking=True)).half().cpu())
    writer = ShardWriter(out, env)
    writer.write(torch.cat(feats), torch.tensor(list(index)))
    writer.merge()


if __name__ == "__main__":
    launch(extract, "data/inat/train", "features/inat")
