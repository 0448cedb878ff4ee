"""LoRA fine-tuning with the HF Trainer.

torchrun --nproc_per_node 4 lora_trainer.py --base Qwen/Qwen2.5-7B --data data/support.jsonl
"""
import argparse
import os

import torch
from datasets import load_dataset
from peft import LoraConfig, get_peft_model, prepare_model_for_kbit_training
from transformers import (
    AutoModelForCausalLM,
    AutoTokenizer,
    BitsAndBytesConfig,
    DataCollatorForLanguageModeling,
    Trainer,
    TrainingArguments,
)


def parse_args():
    ap = argparse.ArgumentParser()
    ap.add_argument("--base", required=True)
    ap.add_argument("--data", required=True)
    ap.add_argument("--out", default="lora-out")
    ap.add_argument("--max-len", type=int, default=1024)
    ap.add_argument("--rank", type=int, default=16)
    ap.add_argument("--epochs", type=float, default=2)
    return ap.parse_args()


def load_model(args):
    quant = BitsAndBytesConfig(load_in_4bit=True, bnb_4bit_quant_type="nf4",
                               bnb_4bit_compute_dtype=torch.bfloat16, bnb_4bit_use_double_quant=True)
    model = AutoModelForCausalLM.from_pretrained(
        args.base,
        quantization_config=quant,
        torch_dtype=torch.bfloat16,
        device_map="auto",
    )
    model.config.use_cache = False
    model = prepare_model_for_kbit_training(model, gradient_checkpointing_kwargs={"use_reentrant": False})
    cfg = LoraConfig(r=args.rank, lora_alpha=2 * args.rank, lora_dropout=0.05, task_type="CAUSAL_LM",
                     target_modules=["q_proj", "k_proj", "v_proj", "o_proj"])
    return get_peft_model(model, cfg)


def main():
    args = parse_args()
    training_args = TrainingArguments(
        output_dir=args.out,
        per_device_train_batch_size=4,
        gradient_accumulation_steps=4,
        gradient_checkpointing=True,
        gradient_checkpointing_kwargs={"use_reentrant": False},
        num_train_epochs=args.epochs,
        learning_rate=2e-4,
        lr_scheduler_type="cosine",
        warmup_ratio=0.03,
        bf16=True,
        logging_steps=10,
        save_strategy="epoch",
        save_total_limit=2,
        ddp_find_unused_parameters=False,
        report_to="none",
    )

    tok = AutoTokenizer.from_pretrained(args.base)
    if tok.pad_token is None:
        tok.pad_token = tok.eos_token

    def encode(batch):
        text = [f"Question: {q}\nAnswer: {a}{tok.eos_token}" for q, a in zip(batch["question"], batch["answer"])]
        return tok(text, truncation=True, max_length=args.max_len)

    with training_args.main_process_first(desc="tokenize"):
        raw = load_dataset("json", data_files=args.data, split="train")
        ds = raw.map(encode, batched=True, remove_columns=raw.column_names)

    model = load_model(args)
    if int(os.environ.get("RANK", "0")) == 0:
        model.print_trainable_parameters()

    trainer = Trainer(model=model, args=training_args, train_dataset=ds,
                      data_collator=DataCollatorForLanguageModeling(tok, mlm=False))
    trainer.train()
    trainer.save_model(args.out)


if __name__ == "__main__":
    main()
