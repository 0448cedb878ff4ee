"""Fits a curve: torchrun --standalone --nproc-per-node 2 train.py --epochs 3"""

import argparse
import logging

import torch
from torch import nn
from torch.utils.data import TensorDataset

from env import Environment
from loop import Loop, LoopConfig


def curve(samples, seed):
    draw = torch.Generator().manual_seed(seed)
    where = torch.rand(samples, 2, generator=draw) * 4 - 2
    return TensorDataset(where, torch.sin(where[:, :1]) * where[:, 1:])


class Curve(nn.Module):
    def __init__(self, width=32):
        super().__init__()
        self.inner = nn.Linear(2, width)
        self.norm = nn.LayerNorm(width)
        self.outer = nn.Linear(width, 1)

    def forward(self, where):
        return self.outer(torch.tanh(self.norm(self.inner(where))))


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("--epochs", type=int, default=LoopConfig.epochs)
    parser.add_argument("--path", default=LoopConfig.path)
    args = parser.parse_args()
    logging.basicConfig(level=logging.INFO)
    config = LoopConfig(epochs=args.epochs, path=args.path)
    with Environment() as env:
        torch.manual_seed(config.seed)
        network = Curve()
        loop = Loop(env, config, network, nn.MSELoss(), curve(2000, 1), curve(301, 2))
        loop.run()


if __name__ == "__main__":
    main()
