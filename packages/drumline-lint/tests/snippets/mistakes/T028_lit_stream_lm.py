import glob
import gzip
import json

import lightning as L
import torch
import torch.nn.functional as F
from lightning.pytorch.callbacks import LearningRateMonitor, ModelCheckpoint
from torch.utils.data import DataLoader, IterableDataset, get_worker_info
from transformers import AutoTokenizer, GPT2Config, GPT2LMHeadModel


class C4Stream(IterableDataset):
    def __init__(self, pattern, tokenizer_name, seq_len=1024):
        self.files = sorted(glob.glob(pattern))
        self.tokenizer_name = tokenizer_name
        self.seq_len = seq_len

    def _documents(self):
        info = get_worker_info()
        files = self.files
        if info is not None:
            files = files[info.id::info.num_workers]
        for path in files:
            with gzip.open(path, "rt") as f:
                for line in f:
                    yield json.loads(line)["text"]

    def __iter__(self):
        tok = AutoTokenizer.from_pretrained(self.tokenizer_name)
        buf = []
        while True:
            for doc in self._documents():
                buf += tok(doc)["input_ids"] + [tok.eos_token_id]
                while len(buf) >= self.seq_len:
                    yield torch.tensor(buf[:self.seq_len])
                    buf = buf[self.seq_len:]


class LM(L.LightningModule):
    def __init__(self, lr=6e-4, warmup=2000, total=100_000):
        super().__init__()
        self.save_hyperparameters()
        self.model = GPT2LMHeadModel(GPT2Config())

    def training_step(self, ids, _):
        logits = self.model(ids).logits
        loss = F.cross_entropy(logits[:, :-1].flatten(0, 1), ids[:, 1:].flatten())
        self.log("loss", loss, prog_bar=True)
        return loss

    def configure_optimizers(self):
        opt = torch.optim.AdamW(self.parameters(), lr=self.hparams.lr, betas=(0.9, 0.95), weight_decay=0.1)
        w, t = self.hparams.warmup, self.hparams.total
        sched = torch.optim.lr_scheduler.LambdaLR(opt, lambda s: min(1, (s + 1) / w) * max(0.1, 1 - s / t))
        return {"optimizer": opt, "lr_scheduler": {"scheduler": sched, "interval": "step"}}


def main():
    L.seed_everything(2024)
    ds = C4Stream("/data/c4/en/c4-train.*.json.gz", "gpt2")
    loader = DataLoader(ds, batch_size=8, num_workers=8, pin_memory=True)
    trainer = L.Trainer(
        accelerator="gpu",
        devices=8,
        num_nodes=2,
        strategy="ddp",
        precision="bf16-mixed",
        max_steps=100_000,
        gradient_clip_val=1.0,
        callbacks=[ModelCheckpoint(every_n_train_steps=5000, save_top_k=-1), LearningRateMonitor("step")],
    )
    trainer.fit(LM(), loader)


if __name__ == "__main__":
    main()
