import argparse
import csv
from pathlib import Path

import lightning as L
import torch
from lightning.pytorch.callbacks import BasePredictionWriter
from lightning.pytorch.utilities import rank_zero_only
from torch.utils.data import DataLoader, Dataset
from transformers import AutoModelForSequenceClassification, AutoTokenizer


class Lines(Dataset):
    def __init__(self, path):
        self.rows = list(enumerate(Path(path).read_text().splitlines()))

    def __len__(self):
        return len(self.rows)

    def __getitem__(self, i):
        return self.rows[i]


class ShardWriter(BasePredictionWriter):
    def __init__(self, folder):
        super().__init__("epoch")
        self.folder = Path(folder)

    def write_on_epoch_end(self, trainer, module, predictions, batch_indices):
        self.folder.mkdir(parents=True, exist_ok=True)
        torch.save(predictions, self.folder / f"part{trainer.global_rank}.pt")
        trainer.strategy.barrier()
        self.merge(trainer.world_size)

    @rank_zero_only
    def merge(self, world):
        seen = {}
        for r in range(world):
            for ids, scores in torch.load(self.folder / f"part{r}.pt"):
                seen.update(zip(ids.tolist(), scores.tolist()))
        with open(self.folder / "scores.csv", "w", newline="") as f:
            csv.writer(f).writerows(sorted(seen.items()))


class Scorer(L.LightningModule):
    def __init__(self, name):
        super().__init__()
        self.tok = AutoTokenizer.from_pretrained(name)
        self.net = AutoModelForSequenceClassification.from_pretrained(name, num_labels=1)

    def predict_step(self, batch, _):
        ids, texts = batch
        enc = self.tok(list(texts), padding=True, truncation=True, return_tensors="pt").to(self.device)
        return ids.cpu(), self.net(**enc).logits.squeeze(-1).float().cpu()


if __name__ == "__main__":
    p = argparse.ArgumentParser()
    p.add_argument("--input", default="/shared/corpus.txt")
    p.add_argument("--out", default="/shared/scores")
    a = p.parse_args()
    trainer = L.Trainer(accelerator="gpu", devices=8, num_nodes=2, strategy="ddp", logger=False,
                        callbacks=[ShardWriter(a.out)])
    trainer.predict(Scorer("cross-encoder/ms-marco-MiniLM-L-6-v2"), DataLoader(Lines(a.input), 128, num_workers=2),
                    return_predictions=False)
