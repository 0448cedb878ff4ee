"""A loss per token, with padding and accumulated micro-batches: Hugging Face Trainer."""

from common import FOLDER, RANKS, Words, pad, sentences, show
from torch.nn.functional import cross_entropy
from transformers import Trainer, TrainingArguments, set_seed


class Language(Words):
    def forward(self, tokens, labels=None):
        return {"logits": super().forward(tokens)}


def loss(outputs, labels, num_items_in_batch):
    return cross_entropy(outputs["logits"].transpose(1, 2), labels, reduction="sum") / num_items_in_batch


def metrics(prediction):
    return {"tokens": (prediction.label_ids != -100).sum()}


set_seed(0)
arguments = TrainingArguments(
    output_dir=FOLDER,
    num_train_epochs=3,
    per_device_train_batch_size=16 // RANKS,
    per_device_eval_batch_size=32 // RANKS,
    gradient_accumulation_steps=2,
    train_sampling_strategy="sequential",
    learning_rate=0.01,
)
trainer = Trainer(
    Language(),
    arguments,
    data_collator=pad,
    train_dataset=sentences(330, seed=1),
    eval_dataset=sentences(333, seed=2),
    compute_loss_func=loss,
    compute_metrics=metrics,
)
trainer.train()
found = trainer.evaluate()
show(trainer.model, loss=found["eval_loss"], counted=found["eval_tokens"])
