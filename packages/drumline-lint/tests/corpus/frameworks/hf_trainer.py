"""The Trainer of transformers does all that is distributed; this script gives it a model, data and settings."""

import logging
import os
import sys
from dataclasses import dataclass, field

import numpy as np
import torch
from datasets import load_dataset
from transformers import (
    AutoModelForSequenceClassification,
    AutoTokenizer,
    DataCollatorWithPadding,
    HfArgumentParser,
    Trainer,
    TrainerCallback,
    TrainingArguments,
    set_seed,
)

logger = logging.getLogger(__name__)


@dataclass
class ModelArguments:
    model_name: str = field(default="distilbert-base-uncased")
    max_length: int = field(default=256)
    freeze_embeddings: bool = field(default=False)


@dataclass
class DataArguments:
    dataset: str = field(default="imdb")
    max_samples: int | None = field(default=None)


class Memory(TrainerCallback):
    """Says now and then how much memory is in use."""

    def on_log(self, args, state, control, logs=None, **kwargs):
        if state.is_world_process_zero and torch.cuda.is_available():
            print(f"step {state.global_step}: {torch.cuda.max_memory_allocated() / 2**30:.1f} GiB")


def accuracy(prediction):
    guesses = np.argmax(prediction.predictions, axis=1)
    return {"accuracy": float((guesses == prediction.label_ids).mean())}


def get_datasets(data_args, tokenizer, max_length):
    raw = load_dataset(data_args.dataset)

    def tokenize(batch):
        return tokenizer(batch["text"], truncation=True, max_length=max_length)

    prepared = raw.map(tokenize, batched=True, remove_columns=["text"])
    train_set, test_set = prepared["train"].shuffle(seed=1), prepared["test"]
    if data_args.max_samples is not None:
        train_set = train_set.select(range(data_args.max_samples))
        test_set = test_set.select(range(data_args.max_samples))
    return train_set, test_set


def main():
    parser = HfArgumentParser((ModelArguments, DataArguments, TrainingArguments))
    model_args, data_args, training_args = parser.parse_args_into_dataclasses()
    logging.basicConfig(
        level=logging.INFO if training_args.should_log else logging.WARNING,
        handlers=[logging.StreamHandler(sys.stdout)],
    )
    logger.warning("local rank %s, device %s", training_args.local_rank, training_args.device)
    set_seed(training_args.seed)

    tokenizer = AutoTokenizer.from_pretrained(model_args.model_name)
    model = AutoModelForSequenceClassification.from_pretrained(model_args.model_name, num_labels=2)
    if model_args.freeze_embeddings:
        model.get_input_embeddings().requires_grad_(False)
    with training_args.main_process_first(desc="tokenizing"):
        train_set, test_set = get_datasets(data_args, tokenizer, model_args.max_length)
    trainer = Trainer(
        model=model,
        args=training_args,
        train_dataset=train_set,
        eval_dataset=test_set,
        data_collator=DataCollatorWithPadding(tokenizer),
        compute_metrics=accuracy,
        callbacks=[Memory()],
    )
    last = training_args.output_dir if os.path.isdir(training_args.output_dir) else None
    result = trainer.train(resume_from_checkpoint=training_args.resume_from_checkpoint or None)
    logger.info("last checkpoint in %s", last)
    trainer.save_model()
    trainer.save_state()
    trainer.log_metrics("train", result.metrics)
    trainer.log_metrics("eval", trainer.evaluate())


if __name__ == "__main__":
    main()
