"""LoRA fine-tuning under the HF Trainer with FSDP; start with torchrun --nproc_per_node=4."""
import argparse

import torch
from datasets import load_dataset
from peft import LoraConfig, get_peft_model
from transformers import (AutoModelForCausalLM, AutoTokenizer, DataCollatorForLanguageModeling, Trainer,
                          TrainingArguments, set_seed)


def parse_args():
    parser = argparse.ArgumentParser()
    parser.add_argument("--model", default="meta-llama/Llama-2-7b-hf")
    parser.add_argument("--data", default="data/law_qa.jsonl")
    parser.add_argument("--out", default="out/llama2-law-lora")
    parser.add_argument("--epochs", type=float, default=2)
    return parser.parse_args()


def main():
    cli = parse_args()
    args = TrainingArguments(
        output_dir=cli.out,
        num_train_epochs=cli.epochs,
        per_device_train_batch_size=2,
        gradient_accumulation_steps=8,
        learning_rate=2e-4,
        warmup_steps=50,
        lr_scheduler_type="cosine",
        bf16=True,
        logging_steps=5,
        save_strategy="epoch",
        fsdp="full_shard auto_wrap",
        fsdp_config={
            "transformer_layer_cls_to_wrap": ["LlamaDecoderLayer"],
            "use_orig_params": True,
        },
        report_to="tensorboard",
    )
    set_seed(args.seed)

    tokenizer = AutoTokenizer.from_pretrained(cli.model)
    tokenizer.pad_token = tokenizer.eos_token

    with args.main_process_first(desc="tokenizing"):
        data = load_dataset("json", data_files=cli.data, split="train")
        data = data.map(
            lambda row: tokenizer(row["question"] + "\n" + row["answer"] + tokenizer.eos_token,
                                  truncation=True, max_length=1024),
            remove_columns=data.column_names,
        )

    model = AutoModelForCausalLM.from_pretrained(cli.model, torch_dtype=torch.float32)
    model.config.use_cache = False
    lora = LoraConfig(r=16, lora_alpha=32, lora_dropout=0.05, task_type="CAUSAL_LM",
                      target_modules=["q_proj", "k_proj", "v_proj", "o_proj"])
    model = get_peft_model(model, lora)

    trainer = Trainer(
        model=model,
        args=args,
        train_dataset=data,
        data_collator=DataCollatorForLanguageModeling(tokenizer, mlm=False),
    )
    trainer.train()
    trainer.save_state()
    trainer.save_model(cli.out)
    if trainer.is_world_process_zero():
        tokenizer.save_pretrained(cli.out)


if __name__ == "__main__":
    main()
