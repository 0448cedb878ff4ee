"""The GPUs of this host as its driver reports them (NVML); nothing where there are none."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import pynvml

ECC_KINDS = {
    "corrected": pynvml.NVML_MEMORY_ERROR_TYPE_CORRECTED,
    "uncorrected": pynvml.NVML_MEMORY_ERROR_TYPE_UNCORRECTED,
}
THROTTLED_BY = {
    "thermal": pynvml.nvmlClocksThrottleReasonSwThermalSlowdown
    | pynvml.nvmlClocksThrottleReasonHwThermalSlowdown,
    "power": pynvml.nvmlClocksThrottleReasonSwPowerCap
    | pynvml.nvmlClocksThrottleReasonHwPowerBrakeSlowdown,
}


class GpuReader:
    """Its calls may block for ever when a GPU has failed."""

    def __init__(self) -> None:
        self._handles: list[Any] | None = None

    def read(self) -> list[tuple[str, tuple[str, ...], float]]:
        """Samples of `prometheus_metrics.OF_GPUS`; what a GPU does not report is left out."""
        if self._handles is None:
            self._handles = _open_gpus()
        return [
            (f"gpu_{name}", (str(index), *labels), value)
            for index, handle in enumerate(self._handles)
            for name, labels, value in _figures(handle)
        ]


def _open_gpus() -> list[Any]:
    try:
        pynvml.nvmlInit()
        return [pynvml.nvmlDeviceGetHandleByIndex(i) for i in range(pynvml.nvmlDeviceGetCount())]
    except pynvml.NVMLError:
        return []


def _figures(gpu: Any) -> Iterator[tuple[str, tuple[str, ...], float]]:
    if (rates := _ask(pynvml.nvmlDeviceGetUtilizationRates, gpu)) is not None:
        yield "utilization_ratio", (), rates.gpu / 100
    if (memory := _ask(pynvml.nvmlDeviceGetMemoryInfo, gpu)) is not None:
        yield "memory_used_bytes", (), memory.used
        yield "memory_bytes", (), memory.total
    temperature = _ask(pynvml.nvmlDeviceGetTemperature, gpu, pynvml.NVML_TEMPERATURE_GPU)
    if temperature is not None:
        yield "temperature_celsius", (), temperature
    for kind, number in ECC_KINDS.items():
        errors = _ask(pynvml.nvmlDeviceGetTotalEccErrors, gpu, number, pynvml.NVML_VOLATILE_ECC)
        if errors is not None:
            yield "ecc_errors_total", (kind,), errors
    reasons = _ask(pynvml.nvmlDeviceGetCurrentClocksThrottleReasons, gpu)
    if reasons is not None:
        for reason, bits in THROTTLED_BY.items():
            yield "throttled", (reason,), bool(reasons & bits)


def _ask(call: Callable[..., Any], *arguments: Any) -> Any:
    """None: the GPU does not have it, or is lost."""
    try:
        return call(*arguments)
    except pynvml.NVMLError:
        return None
