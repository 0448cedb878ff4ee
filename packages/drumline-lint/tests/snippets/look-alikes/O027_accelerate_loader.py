import torch
from accelerate import Accelerator
from accelerate.utils import set_seed
from torch.utils.data import DataLoader

from ner.data import Conll, collate
from ner.model import Tagger


def main():
    accelerator = Accelerator(gradient_accumulation_steps=4)
    set_seed(5)
    train = DataLoader(Conll("train"), batch_size=16, shuffle=True, collate_fn=collate)
    dev = DataLoader(Conll("dev"), batch_size=64, collate_fn=collate)
    model = Tagger()
    opt = torch.optim.AdamW(model.parameters(), lr=5e-5)
    model, opt, train, dev = accelerator.prepare(model, opt, train, dev)

    for epoch in range(5):
        model.train()
        for batch in train:
            with accelerator.accumulate(model):
                loss = model(**batch)["loss"]
                accelerator.backward(loss)
                if accelerator.sync_gradients:
                    accelerator.clip_grad_norm_(model.parameters(), 1.0)
                opt.step()
                opt.zero_grad()
        model.eval()
        hit = total = 0
        for batch in dev:
            with torch.no_grad():
                pred = model(**batch)["logits"].argmax(-1)
            pred = accelerator.pad_across_processes(pred, dim=1, pad_index=-100)
            gold = accelerator.pad_across_processes(batch["labels"], dim=1, pad_index=-100)
            pred, gold = accelerator.gather_for_metrics((pred, gold))
            mask = gold != -100
            hit += (pred[mask] == gold[mask]).sum().item()
            total += mask.sum().item()
        accelerator.print(f"epoch {epoch} acc {hit / total:.4f}")
    accelerator.wait_for_everyone()
    if accelerator.is_main_process:
        torch.save(accelerator.unwrap_model(model).state_dict(), "tagger.pt")


if __name__ == "__main__":
    main()
