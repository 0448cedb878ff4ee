"""torchrun --nproc_per_node 8 dpo.py --model ./sft --pairs pairs.jsonl"""
import argparse

import torch
from accelerate import PartialState
from datasets import load_dataset
from peft import LoraConfig
from transformers import AutoModelForCausalLM, AutoTokenizer, BitsAndBytesConfig
from trl import DPOConfig, DPOTrainer


def load(path):
    return AutoModelForCausalLM.from_pretrained(
        path,
        quantization_config=BitsAndBytesConfig(load_in_4bit=True, bnb_4bit_compute_dtype=torch.bfloat16),
        torch_dtype=torch.bfloat16,
        device_map={"": PartialState().local_process_index},
    )


def as_pairs(tok):
    def fn(row):
        prompt = tok.apply_chat_template([{"role": "user", "content": row["question"]}], tokenize=False,
                                         add_generation_prompt=True)
        return {"prompt": prompt, "chosen": row["better"] + tok.eos_token, "rejected": row["worse"] + tok.eos_token}
    return fn


def main():
    ap = argparse.ArgumentParser()
    ap.add_argument("--model", required=True)
    ap.add_argument("--pairs", required=True)
    ap.add_argument("--beta", type=float, default=0.1)
    ap.add_argument("--lr", type=float, default=5e-6)
    ap.add_argument("--out", default="dpo-out")
    args = ap.parse_args()

    state = PartialState()
    tok = AutoTokenizer.from_pretrained(args.model)
    if tok.pad_token is None:
        tok.pad_token = tok.eos_token

    with state.main_process_first():
        raw = load_dataset("json", data_files=args.pairs, split="train")
        data = raw.map(as_pairs(tok), remove_columns=raw.column_names)
    split = data.train_test_split(0.02, seed=0)

    cfg = DPOConfig(
        output_dir=args.out,
        beta=args.beta,
        per_device_train_batch_size=2,
        gradient_accumulation_steps=8,
        gradient_checkpointing=True,
        gradient_checkpointing_kwargs={"use_reentrant": False},
        learning_rate=args.lr,
        lr_scheduler_type="cosine",
        num_train_epochs=1,
        bf16=True,
        eval_strategy="steps",
        eval_steps=200,
        logging_steps=10,
        report_to="none",
        ddp_find_unused_parameters=False,
    )
    trainer = DPOTrainer(
        model=load(args.model),
        args=cfg,
        train_dataset=split["train"],
        eval_dataset=split["test"],
        processing_class=tok,
        peft_config=LoraConfig(r=32, lora_alpha=64, target_modules="all-linear", task_type="CAUSAL_LM"),
    )
    trainer.train()
    metrics = trainer.evaluate()
    trainer.save_model(args.out)
    if state.is_main_process:
        print({k: round(v, 4) for k, v in metrics.items() if isinstance(v, float)})


if __name__ == "__main__":
    main()
