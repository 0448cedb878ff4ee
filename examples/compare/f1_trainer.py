"""Macro F1 and a confusion matrix of an evaluation set: Hugging Face Trainer."""

from common import FOLDER, RANKS, Net, show, spirals
from sklearn.metrics import confusion_matrix, f1_score
from torch.nn.functional import cross_entropy
from transformers import Trainer, TrainingArguments, set_seed


class Classifier(Net):
    def forward(self, points, labels):
        scores = super().forward(points)
        return {"loss": cross_entropy(scores, labels), "logits": scores}


def metrics(prediction):
    labels, chosen = prediction.label_ids, prediction.predictions.argmax(1)
    return {"f1": f1_score(labels, chosen, average="macro"), "confusion": confusion_matrix(labels, chosen).tolist()}


set_seed(0)
arguments = TrainingArguments(
    output_dir=FOLDER,
    num_train_epochs=30,
    per_device_train_batch_size=64 // RANKS,
    per_device_eval_batch_size=64 // RANKS,
    learning_rate=0.01,
)
trainer = Trainer(
    Classifier(),
    arguments,
    train_dataset=spirals(1000, seed=1),
    eval_dataset=spirals(501, seed=2),
    compute_metrics=metrics,
)
trainer.train()
results = trainer.evaluate()
show(trainer.model, f1=results["eval_f1"], counted=sum(map(sum, results["eval_confusion"])))
