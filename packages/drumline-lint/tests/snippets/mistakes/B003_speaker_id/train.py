import argparse
import os

from torch import nn
from torch.utils.data import DataLoader, DistributedSampler, Subset

from data import ArrayDataset
from trainer import SpeakerTrainer
from utils import dist as du


def build_model(n_spk):
    return nn.Sequential(
        nn.Conv1d(80, 512, 5), nn.ReLU(), nn.Conv1d(512, 512, 3, dilation=2), nn.ReLU(),
        nn.AdaptiveAvgPool1d(1), nn.Flatten(), nn.Linear(512, n_spk),
    )


def main():
    ap = argparse.ArgumentParser()
    ap.add_argument("--data", default="data/vox")
    ap.add_argument("--exp-dir", default="exp/xvec")
    ap.add_argument("--epochs", type=int, default=40)
    ap.add_argument("--lr", type=float, default=1e-3)
    ap.add_argument("--speakers", type=int, default=1211)
    args = ap.parse_args()

    device = du.init_distributed()
    du.seed_everything(7)
    os.makedirs(args.exp_dir, exist_ok=True)
    train, dev = ArrayDataset(args.data, "train"), ArrayDataset(args.data, "dev")
    mine = Subset(dev, range(du.get_rank(), len(dev), du.get_world_size()))
    loaders = (
        DataLoader(train, 64, sampler=DistributedSampler(train), num_workers=4, drop_last=True),
        DataLoader(mine, 64, num_workers=4),
    )
    SpeakerTrainer(build_model(args.speakers), loaders, args, device).run()
    du.cleanup()


if __name__ == "__main__":
    main()
