"""A loss per token, with padding and accumulated micro-batches: Lightning."""

import torch
from common import RANKS, Words, pad, sentences, show
from lightning import LightningModule, Trainer, seed_everything
from torch.nn.functional import cross_entropy
from torch.utils.data import DataLoader
from torchmetrics import MeanMetric, SumMetric


class Language(LightningModule):
    def __init__(self):
        super().__init__()
        self.net = Words()
        self.eval_loss = MeanMetric()
        self.eval_tokens = SumMetric()

    def training_step(self, batch, batch_idx):
        return cross_entropy(self.net(batch["tokens"]).transpose(1, 2), batch["labels"])

    def validation_step(self, batch, batch_idx):
        tokens = (batch["labels"] != -100).sum()
        self.eval_loss.update(self.training_step(batch, batch_idx), weight=tokens)
        self.eval_tokens.update(tokens)
        self.log("loss", self.eval_loss)
        self.log("tokens", self.eval_tokens)

    def configure_optimizers(self):
        return torch.optim.AdamW(self.parameters(), lr=0.01)


seed_everything(0)
model = Language()
trainer = Trainer(max_epochs=3, accumulate_grad_batches=2, devices=RANKS)
train_loader = DataLoader(sentences(330, seed=1), batch_size=16 // RANKS, collate_fn=pad)
eval_loader = DataLoader(sentences(333, seed=2), batch_size=32 // RANKS, collate_fn=pad)
trainer.fit(model, train_loader, eval_loader)
show(model.net, loss=trainer.callback_metrics["loss"], counted=trainer.callback_metrics["tokens"])
