"""Weak and strong scaling from profiles of several sizes; the runs themselves are `drumline train`
(tests/cli)."""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from pathlib import Path
from xml.etree import ElementTree

import pytest

from drumline.report.scaling_plot import (
    BOTTOM,
    HEIGHT,
    TOP,
    EfficiencyPoint,
    efficiency_lines,
    efficiency_svg,
)
from drumline.runs.profile_result import ProfileResult
from drumline.tools.prove.killed_run import Leg
from drumline.tools.scale.measure import MeasureOptions, SizedRuns, measure
from drumline.tools.scale.scaling_words import measurement_lines
from tests.unit.tools.scale.jobs_to_scale import make_profile


@dataclass(frozen=True, kw_only=True)
class KnownRuns(SizedRuns):
    """Instead of runs: a rank takes 1 s for 64 samples, and all-reduces are exposed for 0.25 s."""

    requests: list[tuple[str, int, int | None]] = field(default_factory=list)
    device: str = "cpu"

    def profiled(self, name: str, ranks: int, batch: int | None) -> tuple[ProfileResult, Path]:
        self.requests.append((name, ranks, batch))
        size = batch or 64
        compute_s = size / 64 / ranks
        exposed_s = 0.25 if ranks > 1 else 0.0
        # With the profiler all takes twice as long, which is not the job's.
        parts = {"compute": 2 * compute_s, "exposed_communication": 2 * exposed_s}
        step_s = compute_s + exposed_s
        profile = make_profile(
            compute_s=(compute_s,),
            parts_s=parts,
            world_size=ranks,
            batch_size=size,
            step_s=2 * step_s,
            device=self.device,
        )
        return ProfileResult(**{**vars(profile), "unprofiled_step_s": step_s}), Path(
            f"{name}-{ranks}"
        )


def known_runs(tmp_path: Path, *worlds: int) -> KnownRuns:
    options = MeasureOptions(worlds=worlds)
    return KnownRuns(
        arguments=lambda changes: [], options=options, folder=tmp_path, note=lambda text: None
    )


def test_speed_up_and_efficiency_of_weak_and_strong_scaling(tmp_path: Path) -> None:
    runs = known_runs(tmp_path, 4, 1, 2)
    measurement = measure(runs, cores=2, gpus=8)
    assert runs.requests == [
        ("base", 1, None),
        ("weak", 2, 128),
        ("weak", 4, 256),
        ("strong", 2, 64),
        ("strong", 4, 64),
    ]
    rows = [
        (size.scaling, size.ranks, size.step_s, size.speedup, size.efficiency)
        for size in measurement.sizes
    ]
    assert rows == [
        ("weak", 1, 1.0, 1.0, 1.0),
        ("weak", 2, 1.25, pytest.approx(1.6), pytest.approx(0.8)),
        ("weak", 4, 1.25, pytest.approx(3.2), pytest.approx(0.8)),
        ("strong", 1, 1.0, 1.0, 1.0),
        ("strong", 2, 0.75, pytest.approx(4 / 3), pytest.approx(2 / 3)),
        ("strong", 4, 0.5, pytest.approx(2.0), pytest.approx(0.5)),
    ]
    lines = list(measurement_lines(measurement))
    assert (
        lines[1]
        == "there are fewer cores or GPUs than ranks: ranks share them, so more ranks cannot be faster here"
    )
    assert (
        "4 ranks: 80% is below the usual 85%; the largest loss is exposed communication: 250 ms of a step (20%)"
        in lines
    )
    assert not measure(known_runs(tmp_path, 1, 2), cores=2, gpus=0).shares_cores
    plot = ElementTree.fromstring(efficiency_svg("<digits>", efficiency_lines(measurement)))
    names = [text.text for text in plot.iter("{http://www.w3.org/2000/svg}text")]
    assert {"<digits>", "measured, weak scaling", "measured, strong scaling", "100%"} <= {*names}


def test_steps_that_vary_too_much_are_reported(tmp_path: Path) -> None:
    measurement = measure(known_runs(tmp_path, 1, 2), cores=2, gpus=8)
    assert "steps vary" not in "\n".join(measurement_lines(measurement))
    first, *others = measurement.sizes
    noisy = replace(measurement, sizes=(replace(first, step_s=0.145, spread_s=0.14), *others))
    text = "1 rank: steps vary by 140 ms around 145 ms, so efficiencies with them are not reliable: measure again"
    assert text in "\n".join(measurement_lines(noisy))


def test_an_efficiency_above_one_is_in_the_plot() -> None:
    line = [EfficiencyPoint(1, 1.0, 1.0, 1.0), EfficiencyPoint(2, 2.2, 2.4, 2.6)]
    plot = ElementTree.fromstring(efficiency_svg("digits", {"weak": line}))
    names = [text.text for text in plot.iter("{http://www.w3.org/2000/svg}text")]
    assert {"0%", "80%", "240%"} <= {*names}
    (path,) = plot.iter("{http://www.w3.org/2000/svg}polyline")
    heights = [float(place.split(",")[1]) for place in path.attrib["points"].split()]
    parts = [(HEIGHT - BOTTOM - y) / (HEIGHT - BOTTOM - TOP) for y in heights]
    assert parts == pytest.approx([1 / 2.4, 1.0], abs=1e-3)


def test_ranks_on_the_cpu_share_its_cores_however_many_gpus_there_are(
    tmp_path: Path,
) -> None:
    for device, gpus, shares in (
        ("cpu", 8, True),
        ("NVIDIA H200", 8, False),
        ("NVIDIA H200", 1, True),
    ):
        runs = replace(known_runs(tmp_path, 1, 4), device=device)
        assert measure(runs, cores=2, gpus=gpus).shares_cores == shares, (device, gpus)


def test_hosts_get_even_parts() -> None:
    options = MeasureOptions(worlds=(1, 2, 4), hosts=("a", "b"))
    assert [options.hosts_of(ranks) for ranks in options.worlds] == [
        [("a", 1)],
        [("a", 1), ("b", 1)],
        [("a", 2), ("b", 2)],
    ]
    leg = Leg(
        "run", ("digits", "--train.steps=4"), Path("runs/x"), Path("x.log"), 4, (("a", 2), ("b", 2))
    )
    words = [
        "--no-standby",
        "--hosts",
        "a:2,b:2",
        "--max-restarts",
        "0",
        "digits",
        "--train.steps=4",
        "--run",
        "runs/x",
    ]
    assert leg.command[2:] == ["drumline", "launch", *words]
