from dataclasses import dataclass, field

import torch
from peft import LoraConfig, get_peft_model
from transformers import (AutoModelForCausalLM, AutoTokenizer, DataCollatorForLanguageModeling,
                          HfArgumentParser, Trainer, TrainingArguments, set_seed)

from sft_data import load_sft


@dataclass
class ScriptArgs:
    model: str = field(default="mistralai/Mistral-7B-v0.1")
    data: str = field(default="data/sft.jsonl")
    max_len: int = field(default=2048)
    lora_r: int = field(default=16)


def main():
    script, targs = HfArgumentParser((ScriptArgs, TrainingArguments)).parse_args_into_dataclasses()
    set_seed(targs.seed)

    tok = AutoTokenizer.from_pretrained(script.model)
    tok.pad_token = tok.eos_token
    with targs.main_process_first(desc="tokenize"):
        train = load_sft(script.data, tok, script.max_len)

    model = AutoModelForCausalLM.from_pretrained(
        script.model,
        torch_dtype=torch.bfloat16,
        device_map="auto",
    )
    model.config.use_cache = False
    model.enable_input_require_grads()
    model = get_peft_model(model, LoraConfig(
        r=script.lora_r, lora_alpha=32, lora_dropout=0.05, task_type="CAUSAL_LM",
        target_modules=["q_proj", "k_proj", "v_proj", "o_proj"]))

    trainer = Trainer(model=model, args=targs, train_dataset=train,
                      data_collator=DataCollatorForLanguageModeling(tok, mlm=False))
    trainer.train()
    trainer.save_model()
    trainer.save_state()


if __name__ == "__main__":
    main()
