"""Killed and started again, with dropout and a new order every epoch: Hugging Face Trainer."""

from common import FOLDER, RANKS, Net, show, spirals
from torch.nn.functional import cross_entropy
from transformers import Trainer, TrainingArguments, set_seed
from transformers.trainer_utils import get_last_checkpoint


class Classifier(Net):
    def forward(self, points, labels):
        scores = super().forward(points)
        return {"loss": cross_entropy(scores, labels), "logits": scores}


set_seed(0)
arguments = TrainingArguments(
    output_dir=FOLDER,
    num_train_epochs=4,
    per_device_train_batch_size=64 // RANKS,
    learning_rate=0.01,
    save_strategy="steps",
    save_steps=20,
)
trainer = Trainer(Classifier(dropout=0.1), arguments, train_dataset=spirals(1000, seed=1))
trainer.train(resume_from_checkpoint=get_last_checkpoint(FOLDER))
show(trainer.model)
