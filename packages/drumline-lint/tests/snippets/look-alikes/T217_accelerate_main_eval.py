import argparse

import torch
from accelerate import Accelerator
from accelerate.utils import set_seed
from datasets import load_dataset
from torch.utils.data import DataLoader
from transformers import AutoModelForSeq2SeqLM, AutoTokenizer, DataCollatorForSeq2Seq


def main():
    ap = argparse.ArgumentParser(description="accelerate launch --num_processes 4 Q017_accelerate_main_eval.py")
    ap.add_argument("--model", default="google/flan-t5-base")
    ap.add_argument("--epochs", type=int, default=4)
    args = ap.parse_args()

    acc = Accelerator(mixed_precision="bf16", gradient_accumulation_steps=2)
    set_seed(21)
    tok = AutoTokenizer.from_pretrained(args.model)
    raw = load_dataset("json", data_files={"train": "data/train.json", "samples": "data/samples.json"})

    def enc(ex):
        out = tok(ex["src"], truncation=True, max_length=256)
        out["labels"] = tok(text_target=ex["tgt"], truncation=True, max_length=128)["input_ids"]
        return out

    with acc.main_process_first():
        data = raw.map(enc, batched=True, remove_columns=["src", "tgt"])
    model = AutoModelForSeq2SeqLM.from_pretrained(args.model)
    collate = DataCollatorForSeq2Seq(tok, model=model)
    train = DataLoader(data["train"], 16, shuffle=True, collate_fn=collate)
    samples = DataLoader(data["samples"], 8, collate_fn=collate)
    opt = torch.optim.AdamW(model.parameters(), lr=1e-4)
    model, opt, train = acc.prepare(model, opt, train)

    for epoch in range(args.epochs):
        model.train()
        for batch in train:
            with acc.accumulate(model):
                loss = model(**batch).loss
                acc.backward(loss)
                if acc.sync_gradients:
                    acc.clip_grad_norm_(model.parameters(), 1.0)
                opt.step()
                opt.zero_grad()

        acc.wait_for_everyone()
        if acc.is_main_process:
            plain = acc.unwrap_model(model)
            plain.eval()
            with torch.no_grad(), open(f"samples_{epoch}.txt", "w") as f:
                for batch in samples:
                    out = plain.generate(input_ids=batch["input_ids"].to(acc.device),
                                         attention_mask=batch["attention_mask"].to(acc.device), max_new_tokens=64)
                    f.write("\n".join(tok.batch_decode(out, skip_special_tokens=True)) + "\n")
            plain.save_pretrained(f"out/epoch{epoch}")
        acc.wait_for_everyone()


if __name__ == "__main__":
    main()
