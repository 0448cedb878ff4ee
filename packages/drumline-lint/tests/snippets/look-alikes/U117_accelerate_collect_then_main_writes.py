import json
from pathlib import Path

import torch
from accelerate import Accelerator
from accelerate.utils import set_seed
from torch.utils.data import DataLoader
from torchmetrics.functional.classification import binary_auroc
from transformers import AutoModelForSequenceClassification, AutoTokenizer

from toxic.data import Comments, collate_with

OUT = Path("runs/toxic")


def evaluate(accelerator, model, loader):
    model.eval()
    scores, labels = [], []
    for batch in loader:
        with torch.no_grad():
            logits = model(**batch).logits[:, 1]
        s, y = accelerator.gather_for_metrics((logits.float(), batch["labels"]))
        scores.append(s.cpu())
        labels.append(y.cpu())
    return binary_auroc(torch.cat(scores), torch.cat(labels)).item()


def main():
    accelerator = Accelerator(mixed_precision="bf16", gradient_accumulation_steps=2)
    set_seed(5)
    tok = AutoTokenizer.from_pretrained("microsoft/deberta-v3-large")
    model = AutoModelForSequenceClassification.from_pretrained("microsoft/deberta-v3-large", num_labels=2)
    train_dl = DataLoader(Comments("train"), 8, shuffle=True, collate_fn=collate_with(tok), num_workers=2)
    val_dl = DataLoader(Comments("val"), 32, collate_fn=collate_with(tok), num_workers=2)
    optim = torch.optim.AdamW(model.parameters(), lr=8e-6)
    model, optim, train_dl, val_dl = accelerator.prepare(model, optim, train_dl, val_dl)

    history, best = [], 0.0
    for epoch in range(4):
        model.train()
        for batch in train_dl:
            with accelerator.accumulate(model):
                loss = model(**batch).loss
                accelerator.backward(loss)
                if accelerator.sync_gradients:
                    accelerator.clip_grad_norm_(model.parameters(), 1.0)
                optim.step()
                optim.zero_grad()

        auc = evaluate(accelerator, model, val_dl)
        history.append(auc)
        if auc > best:
            best = auc
            weights = accelerator.get_state_dict(model)
            if accelerator.is_main_process:
                accelerator.unwrap_model(model).save_pretrained(OUT / "best", state_dict=weights)
        if accelerator.is_main_process:
            OUT.mkdir(parents=True, exist_ok=True)
            (OUT / "history.json").write_text(json.dumps(history))
            print(f"epoch {epoch} auc {auc:.4f}")

    accelerator.end_training()


if __name__ == "__main__":
    main()
