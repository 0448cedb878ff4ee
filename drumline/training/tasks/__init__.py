"""What is trained: the `Task` that a user writes, and the built-in ones."""

from __future__ import annotations

from drumline.training.tasks.base import Loss, Task
from drumline.training.tasks.built_in import ImageClassification, LanguageModel, load_task

__all__ = ["ImageClassification", "LanguageModel", "Loss", "Task", "load_task"]
