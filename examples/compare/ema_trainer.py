"""An average of the weights, evaluated, and early stopping: Hugging Face Trainer."""

from common import FOLDER, RANKS, Net, show, spirals
from torch.nn.functional import cross_entropy
from torch.optim.swa_utils import AveragedModel, get_ema_multi_avg_fn
from transformers import EarlyStoppingCallback, Trainer, TrainerCallback, TrainingArguments, set_seed


class Classifier(Net):
    def forward(self, points, labels):
        scores = super().forward(points)
        return {"loss": cross_entropy(scores, labels), "logits": scores}


class UpdateAverage(TrainerCallback):
    def on_step_end(self, args, state, control, model=None, **kwargs):
        average.update_parameters(model)


class AveragedTrainer(Trainer):
    def evaluate(self, *args, **kwargs):
        weights = {name: value.clone() for name, value in self.model.state_dict().items()}
        self.model.load_state_dict(average.module.state_dict())
        try:
            return super().evaluate(*args, **kwargs)
        finally:
            self.model.load_state_dict(weights)


def metrics(prediction):
    return {"accuracy": (prediction.predictions.argmax(1) == prediction.label_ids).mean()}


set_seed(0)
net = Classifier()
average = AveragedModel(net, multi_avg_fn=get_ema_multi_avg_fn(0.9), use_buffers=True)
arguments = TrainingArguments(
    output_dir=FOLDER,
    num_train_epochs=60,
    per_device_train_batch_size=64 // RANKS,
    per_device_eval_batch_size=64 // RANKS,
    learning_rate=0.01,
    eval_strategy="epoch",
    save_strategy="no",
    metric_for_best_model="accuracy",
    greater_is_better=True,
)
trainer = AveragedTrainer(
    net,
    arguments,
    train_dataset=spirals(1000, seed=1),
    eval_dataset=spirals(501, seed=2),
    compute_metrics=metrics,
    callbacks=[UpdateAverage(), EarlyStoppingCallback(early_stopping_patience=3)],
)
trainer.train()
show(average.module, accuracy=trainer.evaluate()["eval_accuracy"], epochs=trainer.state.epoch)
