# torchrun --nproc_per_node 8 finetune_lora.py --base meta-llama/Llama-2-7b-hf --data data/qa.jsonl
import argparse

import torch
from datasets import load_dataset
from peft import LoraConfig, get_peft_model
from transformers import (
    AutoModelForCausalLM,
    AutoTokenizer,
    DataCollatorForSeq2Seq,
    Trainer,
    TrainingArguments,
    set_seed,
)

from prompts import make_encode


def build_model(base):
    model = AutoModelForCausalLM.from_pretrained(
        base,
        torch_dtype=torch.bfloat16,
        device_map="auto",
    )
    lora = LoraConfig(r=16, lora_alpha=32, lora_dropout=0.05, target_modules=["q_proj", "v_proj"], task_type="CAUSAL_LM")
    model = get_peft_model(model, lora)
    model.config.use_cache = False
    return model


def main():
    ap = argparse.ArgumentParser()
    ap.add_argument("--base", required=True)
    ap.add_argument("--data", required=True)
    ap.add_argument("--out", default="lora-out")
    ap.add_argument("--max-length", type=int, default=1024)
    args = ap.parse_args()

    targs = TrainingArguments(
        output_dir=args.out,
        per_device_train_batch_size=4,
        gradient_accumulation_steps=4,
        num_train_epochs=3,
        learning_rate=2e-4,
        bf16=True,
        logging_steps=10,
        save_strategy="epoch",
        ddp_find_unused_parameters=False,
        report_to=[],
        seed=8,
    )
    set_seed(targs.seed)
    tok = AutoTokenizer.from_pretrained(args.base)
    tok.pad_token = tok.eos_token
    raw = load_dataset("json", data_files=args.data, split="train")
    with targs.main_process_first(desc="tokenize"):
        data = raw.map(make_encode(tok, args.max_length), remove_columns=raw.column_names)
    model = build_model(args.base)
    trainer = Trainer(model=model, args=targs, train_dataset=data,
                      data_collator=DataCollatorForSeq2Seq(tok, label_pad_token_id=-100))
    trainer.train()
    trainer.save_model(args.out)


if __name__ == "__main__":
    main()
