import sys

import numpy as np
from datasets import load_dataset
from transformers import (
    AutoModelForTokenClassification,
    AutoTokenizer,
    DataCollatorForTokenClassification,
    HfArgumentParser,
    Trainer,
    TrainerCallback,
    TrainingArguments,
)

MODEL = "xlm-roberta-large"


class EpochReport(TrainerCallback):
    def __init__(self):
        self.trainer = None
        self.rows = []

    def on_epoch_end(self, args, state, control, **kwargs):
        if state.is_world_process_zero:
            metrics = self.trainer.evaluate(metric_key_prefix="report")
            self.rows.append((state.epoch, metrics["report_accuracy"]))
            with open(f"{args.output_dir}/report.csv", "w") as fh:
                fh.writelines(f"{e},{a}\n" for e, a in self.rows)


def accuracy(pred):
    guess = pred.predictions.argmax(-1)
    keep = pred.label_ids != -100
    return {"accuracy": float(np.mean(guess[keep] == pred.label_ids[keep]))}


def main():
    parser = HfArgumentParser(TrainingArguments)
    (args,) = parser.parse_args_into_dataclasses(sys.argv[1:])
    tok = AutoTokenizer.from_pretrained(MODEL)

    def encode(ex):
        out = tok(ex["tokens"], truncation=True, is_split_into_words=True)
        labels = []
        for i, tags in enumerate(ex["ner_tags"]):
            words = out.word_ids(i)
            labels.append([-100 if w is None else tags[w] for w in words])
        out["labels"] = labels
        return out

    with args.main_process_first(desc="tokenize"):
        ds = load_dataset("conll2003").map(encode, batched=True)
    model = AutoModelForTokenClassification.from_pretrained(MODEL, num_labels=9)
    report = EpochReport()
    trainer = Trainer(
        model=model, args=args,
        train_dataset=ds["train"], eval_dataset=ds["validation"],
        data_collator=DataCollatorForTokenClassification(tok),
        compute_metrics=accuracy, callbacks=[report],
    )
    report.trainer = trainer
    trainer.train()
    trainer.save_model()


if __name__ == "__main__":
    main()
