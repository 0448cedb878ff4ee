"""The loader that fits a dataset: samples by index or whole batches, or a stream."""

from __future__ import annotations

from typing import Any

from drumline.data.dataset import is_stream
from drumline.data.evaluation_loader import EvaluationLoader
from drumline.data.loader import Loader
from drumline.data.streamed_evaluation import StreamEvaluationLoader
from drumline.data.streamed_loader import StreamLoader

AnyLoader = Loader | StreamLoader
AnyEvaluationLoader = EvaluationLoader | StreamEvaluationLoader


def make_loader(dataset: Any, **settings: Any) -> AnyLoader:
    """This rank's training batches, however the dataset is read."""
    return (StreamLoader if is_stream(dataset) else Loader)(dataset, **settings)


def make_evaluation_loader(dataset: Any, **settings: Any) -> AnyEvaluationLoader:
    """This rank's evaluation batches, however the dataset is read."""
    return (StreamEvaluationLoader if is_stream(dataset) else EvaluationLoader)(dataset, **settings)
