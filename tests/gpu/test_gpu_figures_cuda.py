"""What NVML reports of a GPU, as /metrics shows it."""

from __future__ import annotations

import pytest
import torch

from drumline.watch.sidecar.prometheus_metrics import OF_GPUS, gpu_samples

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")


def test_figures_of_every_gpu() -> None:
    held = torch.zeros(1 << 28, device="cuda")
    samples = {(name, labels): value for name, labels, value in gpu_samples()}
    assert {name for name, _ in samples} <= set(OF_GPUS)
    assert all(len(labels) == len(OF_GPUS[name].labels) for name, labels in samples)
    assert samples["gpu_memory_bytes", ("0",)] > samples["gpu_memory_used_bytes", ("0",)]
    assert (
        sum(samples[name, gpu] for name, gpu in samples if name == "gpu_memory_used_bytes")
        >= held.nbytes
    )
    assert 0 <= samples["gpu_utilization_ratio", ("0",)] <= 1
    assert 0 < samples["gpu_temperature_celsius", ("0",)] < 120
    assert samples["gpu_throttled", ("0", "thermal")] in (0, 1)
