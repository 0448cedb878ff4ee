"""Accelerate: prepare() moves, wraps and splits; the script stays that of one process."""

import argparse

import torch
import torch.nn.functional as F
from accelerate import Accelerator
from accelerate.utils import set_seed
from torch import nn
from torch.utils.data import DataLoader, Dataset


class Sentences(Dataset):
    def __init__(self, count, length=24, vocabulary=500):
        draw = torch.Generator().manual_seed(count)
        self.tokens = torch.randint(vocabulary, (count, length), generator=draw)
        self.labels = (self.tokens.sum(1) % 2).long()

    def __len__(self):
        return len(self.labels)

    def __getitem__(self, index):
        return {"tokens": self.tokens[index], "labels": self.labels[index]}


class Classifier(nn.Module):
    def __init__(self, vocabulary=500, width=64):
        super().__init__()
        self.embed = nn.EmbeddingBag(vocabulary, width)
        self.head = nn.Sequential(nn.Linear(width, width), nn.ReLU(), nn.Linear(width, 2))

    def forward(self, tokens):
        return self.head(self.embed(tokens))


def evaluate(accelerator, model, loader):
    model.eval()
    right = total = 0
    for batch in loader:
        with torch.no_grad():
            guesses = model(batch["tokens"]).argmax(dim=1)
        guesses, labels = accelerator.gather_for_metrics((guesses, batch["labels"]))
        right += (guesses == labels).sum().item()
        total += labels.numel()
    return right / total


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("--epochs", type=int, default=3)
    parser.add_argument("--batch-size", type=int, default=32)
    parser.add_argument("--accumulate", type=int, default=4)
    parser.add_argument("--output", default="out")
    args = parser.parse_args()

    accelerator = Accelerator(gradient_accumulation_steps=args.accumulate, mixed_precision="fp16")
    set_seed(7, device_specific=False)
    model = Classifier()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    scheduler = torch.optim.lr_scheduler.LinearLR(optimizer, 1.0, 0.1, total_iters=300)
    train_loader = DataLoader(Sentences(5000), args.batch_size, shuffle=True, pin_memory=True)
    val_loader = DataLoader(Sentences(703), args.batch_size)
    model, optimizer, train_loader, val_loader, scheduler = accelerator.prepare(
        model, optimizer, train_loader, val_loader, scheduler
    )
    accelerator.register_for_checkpointing(scheduler)

    for epoch in range(args.epochs):
        model.train()
        for step, batch in enumerate(train_loader):
            with accelerator.accumulate(model):
                loss = F.cross_entropy(model(batch["tokens"]), batch["labels"])
                accelerator.backward(loss)
                if accelerator.sync_gradients:
                    accelerator.clip_grad_norm_(model.parameters(), 1.0)
                optimizer.step()
                scheduler.step()
                optimizer.zero_grad()
            if step % 50 == 0:
                accelerator.print(f"epoch {epoch} step {step}: {loss.item():.4f}")
        accuracy = evaluate(accelerator, model, val_loader)
        accelerator.print(f"epoch {epoch}: {accuracy:.3f}")
        accelerator.save_state(f"{args.output}/epoch-{epoch}")
    accelerator.wait_for_everyone()
    if accelerator.is_main_process:
        accelerator.save(accelerator.unwrap_model(model).state_dict(), f"{args.output}/model.pt")
    accelerator.end_training()


if __name__ == "__main__":
    main()
