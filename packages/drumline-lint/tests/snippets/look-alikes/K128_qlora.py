"""QLoRA tuning, one full 4-bit copy per GPU. torchrun --nproc_per_node 4 K128_qlora.py"""
import os

import torch
from datasets import load_from_disk
from peft import LoraConfig, get_peft_model, prepare_model_for_kbit_training
from transformers import (AutoModelForCausalLM, AutoTokenizer, BitsAndBytesConfig,
                          DataCollatorForLanguageModeling, Trainer, TrainingArguments)

BASE = "mistralai/Mistral-7B-v0.3"


def load():
    local_rank = int(os.environ.get("LOCAL_RANK", 0))
    torch.cuda.set_device(local_rank)
    quant = BitsAndBytesConfig(load_in_4bit=True, bnb_4bit_quant_type="nf4",
                               bnb_4bit_compute_dtype=torch.bfloat16)
    model = AutoModelForCausalLM.from_pretrained(BASE, quantization_config=quant,
                                                 device_map={"": local_rank})
    model = prepare_model_for_kbit_training(
        model, gradient_checkpointing_kwargs={"use_reentrant": False})
    return get_peft_model(model, LoraConfig(r=16, lora_alpha=32, lora_dropout=0.05, task_type="CAUSAL_LM",
                                            target_modules=["q_proj", "k_proj", "v_proj", "o_proj"]))


def main():
    tok = AutoTokenizer.from_pretrained(BASE)
    tok.pad_token = tok.unk_token
    args = TrainingArguments(
        output_dir="runs/qlora", per_device_train_batch_size=4, gradient_accumulation_steps=4,
        num_train_epochs=1, learning_rate=2e-4, bf16=True, gradient_checkpointing=True,
        gradient_checkpointing_kwargs={"use_reentrant": False},
        ddp_find_unused_parameters=False, save_steps=500, logging_steps=20, report_to="none")
    trainer = Trainer(model=load(), args=args, train_dataset=load_from_disk("/data/tickets_tok"),
                      data_collator=DataCollatorForLanguageModeling(tok, mlm=False))
    trainer.train()
    trainer.save_model("runs/qlora/adapter")


if __name__ == "__main__":
    main()
