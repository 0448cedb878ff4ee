"""LoRA instruction tuning.

torchrun --nproc_per_node=4 trainer_lora.py --base mistralai/Mistral-7B-v0.3 --data alpaca.json
"""
import argparse

import torch
from datasets import load_dataset
from peft import LoraConfig, get_peft_model
from transformers import (AutoModelForCausalLM, AutoTokenizer, DataCollatorForSeq2Seq, Trainer,
                          TrainingArguments)

PROMPT = "### Instruction:\n{instruction}\n\n### Input:\n{input}\n\n### Response:\n"


def tokenize(row, tok, max_len):
    head = tok(PROMPT.format(**row)).input_ids
    tail = tok(row["output"], add_special_tokens=False).input_ids + [tok.eos_token_id]
    ids = (head + tail)[:max_len]
    labels = ([-100] * len(head) + tail)[:max_len]
    return {"input_ids": ids, "labels": labels, "attention_mask": [1] * len(ids)}


def main():
    ap = argparse.ArgumentParser()
    ap.add_argument("--base", required=True)
    ap.add_argument("--data", required=True)
    ap.add_argument("--out", default="lora-out")
    ap.add_argument("--max-len", type=int, default=1024)
    args = ap.parse_args()

    targs = TrainingArguments(
        output_dir=args.out,
        per_device_train_batch_size=4,
        gradient_accumulation_steps=4,
        num_train_epochs=3,
        learning_rate=2e-4,
        lr_scheduler_type="cosine",
        warmup_ratio=0.03,
        bf16=True,
        logging_steps=10,
        save_strategy="epoch",
        ddp_find_unused_parameters=False,
        report_to="none",
    )
    tok = AutoTokenizer.from_pretrained(args.base)
    tok.pad_token = tok.eos_token
    with targs.main_process_first(desc="tokenise"):
        ds = load_dataset("json", data_files=args.data, split="train")
        ds = ds.map(lambda r: tokenize(r, tok, args.max_len), remove_columns=ds.column_names)

    model = AutoModelForCausalLM.from_pretrained(
        args.base,
        torch_dtype=torch.bfloat16,
        device_map="auto",
    )
    model = get_peft_model(model, LoraConfig(
        r=16, lora_alpha=32, lora_dropout=0.05, task_type="CAUSAL_LM",
        target_modules=["q_proj", "k_proj", "v_proj", "o_proj"]))

    trainer = Trainer(model=model, args=targs, train_dataset=ds,
                      data_collator=DataCollatorForSeq2Seq(tok, padding=True))
    trainer.train()
    trainer.save_model(args.out)


if __name__ == "__main__":
    main()
