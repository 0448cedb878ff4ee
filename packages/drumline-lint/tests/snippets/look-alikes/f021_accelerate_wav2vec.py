"""Emotion recognition from speech: accelerate launch --num_processes 4 f021_accelerate_wav2vec.py"""
import torch
from accelerate import Accelerator
from accelerate.utils import set_seed
from datasets import Audio, load_from_disk
from torch.utils.data import DataLoader
from transformers import (AutoFeatureExtractor, AutoModelForAudioClassification,
                          get_cosine_schedule_with_warmup)

NAME = "facebook/wav2vec2-base"
EPOCHS = 15
LABELS = ["neutral", "happy", "sad", "angry", "fear", "disgust"]


class Collate:
    def __init__(self):
        self.extractor = AutoFeatureExtractor.from_pretrained(NAME)

    def __call__(self, rows):
        batch = self.extractor([r["audio"]["array"] for r in rows], sampling_rate=16000, padding=True,
                               max_length=16000 * 6, truncation=True, return_tensors="pt")
        batch["labels"] = torch.tensor([LABELS.index(r["emotion"]) for r in rows])
        return batch


def main():
    accelerator = Accelerator(mixed_precision="fp16", log_with="tensorboard", project_dir="runs/emotion")
    set_seed(7)
    accelerator.init_trackers("crema_d")

    data = load_from_disk("data/crema_d").cast_column("audio", Audio(sampling_rate=16000))
    collate = Collate()
    train_loader = DataLoader(data["train"], batch_size=16, shuffle=True, collate_fn=collate, num_workers=4)
    test_loader = DataLoader(data["test"], batch_size=32, collate_fn=collate, num_workers=4)

    model = AutoModelForAudioClassification.from_pretrained(NAME, num_labels=len(LABELS),
                                                            mask_time_prob=0.0, layerdrop=0.0)
    model.freeze_feature_encoder()
    optimizer = torch.optim.AdamW((p for p in model.parameters() if p.requires_grad), lr=3e-5)
    model, optimizer, train_loader, test_loader = accelerator.prepare(model, optimizer, train_loader, test_loader)
    steps = EPOCHS * len(train_loader)
    scheduler = get_cosine_schedule_with_warmup(optimizer, steps // 10, steps)

    best = 0.0
    for epoch in range(EPOCHS):
        model.train()
        for batch in train_loader:
            loss = model(**batch).loss
            accelerator.backward(loss)
            accelerator.clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()
            scheduler.step()
            optimizer.zero_grad()

        model.eval()
        hit = total = 0
        for batch in test_loader:
            with torch.no_grad():
                pred = model(batch["input_values"]).logits.argmax(-1)
            pred, ref = accelerator.gather_for_metrics((pred, batch["labels"]))
            hit += (pred == ref).sum().item()
            total += ref.numel()
        acc = hit / total
        accelerator.log({"acc": acc, "loss": loss.item()}, step=epoch)
        accelerator.print(f"epoch {epoch} acc {acc:.4f}")
        if acc > best:
            best = acc
            accelerator.save_state("runs/emotion/best")
    accelerator.end_training()


if __name__ == "__main__":
    main()
