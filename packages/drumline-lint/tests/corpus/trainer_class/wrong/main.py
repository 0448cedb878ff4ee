"""Trains a tiny character model: torchrun --standalone --nproc-per-node 2 main.py --steps-log 20"""

import argparse
import os
from datetime import timedelta

import torch
from torch.distributed import init_process_group

from data import CharDataset, sample_text, split
from model import CharModel, ModelConfig
from trainer import Trainer, TrainerConfig


def setup_distributed():
    if torch.cuda.is_available():
        torch.cuda.set_device(int(os.environ["LOCAL_RANK"]))
    backend = "nccl" if torch.cuda.is_available() else "gloo"
    init_process_group(backend=backend, timeout=timedelta(minutes=15))  # <- group-not-destroyed


def get_training_objects(model_config, lr):
    model = CharModel(model_config)
    decay = [p for p in model.parameters() if p.dim() >= 2]
    rest = [p for p in model.parameters() if p.dim() < 2]
    groups = [{"params": decay, "weight_decay": 0.1}, {"params": rest, "weight_decay": 0.0}]
    return model, torch.optim.AdamW(groups, lr=lr)


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("--epochs", type=int, default=1)
    parser.add_argument("--batch-size", type=int, default=16)
    parser.add_argument("--block-size", type=int, default=32)
    parser.add_argument("--lr", type=float, default=3e-4)
    parser.add_argument("--steps-log", type=int, default=50)
    parser.add_argument("--snapshot", default="snapshot.pt")
    parser.add_argument("--seed", type=int, default=1337)
    args = parser.parse_args()

    setup_distributed()
    dataset = CharDataset(sample_text(4000), args.block_size)
    train_set, test_set = split(dataset, 0.9)
    torch.manual_seed(args.seed)
    model_config = ModelConfig(vocab_size=dataset.vocab_size, block_size=args.block_size)
    model, optimizer = get_training_objects(model_config, args.lr)
    config = TrainerConfig(
        max_epochs=args.epochs,
        batch_size=args.batch_size,
        log_every=args.steps_log,
        snapshot_path=args.snapshot,
        seed=args.seed,
    )
    trainer = Trainer(config, model, optimizer, train_set, test_set)
    trainer.train()


if __name__ == "__main__":
    main()
