"""A host without GPUs, or without a driver, has no such figures."""

from __future__ import annotations

import pytest
import torch

from drumline.watch.sidecar.prometheus_metrics import gpu_samples


def test_no_gpus_no_figures() -> None:
    if torch.cuda.is_available():
        pytest.skip("this host has GPUs: tests/gpu/test_gpu_figures_cuda.py")
    assert gpu_samples() == gpu_samples() == []
