"""Predictions: goodput, what to change, where more nodes stop paying, intervals; the documents; and
the check."""

from __future__ import annotations

import json
import re
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from benchmarks.scale_grid import line, predicted_again, summary
from drumline.base.errors import UsageError
from drumline.cli.scale_command import PREDICT_FLAGS
from drumline.runs.profile_result import ProfileResult, read_profile, write_profile
from drumline.runs.scaling_result import (
    MeasuredSize,
    Measurement,
    Prediction,
    ScaleOptions,
    read_scaling,
    usual_efficiency,
    write_scaling,
)
from drumline.tools.scale.network_model import NETWORKS
from drumline.tools.scale.prediction_check import check_predictions
from drumline.tools.scale.scale_prediction import MODEL_ERROR, NCCL_ERROR, goodput, predict
from drumline.tools.scale.scaling_words import check_lines, prediction_lines, why_below_usual
from tests.unit.tools.scale.jobs_to_scale import MIB, make_network, make_profile


def options(*nodes: int, **values: Any) -> ScaleOptions:
    return ScaleOptions(nodes=nodes, **{"gpus_per_node": 1, **values})


def predicted(*nodes: int, rate: float = MIB, **values: Any) -> Prediction:
    return predict(make_profile(), make_network(rate), options(*nodes, **values), source="runs/a")


def test_a_job_of_two_buckets_is_predicted_with_its_parts() -> None:
    prediction = predicted(1, 2, price=10.0, mtbf_hours=1e12)
    alone, pair = prediction.sizes
    assert (alone.step_s[1], alone.efficiency[1], alone.communication_s) == pytest.approx(
        (1.0, 1.0, 0.0)
    )
    assert (pair.step_s[1], pair.efficiency[1]) == pytest.approx((2.6, 1 / 2.6))
    assert (pair.communication_s, pair.waiting_s) == pytest.approx((1.6, 0.0))
    # All compute times are alike: the interval is the model's error alone.
    assert pair.step_s == pytest.approx((2.6 * (1 - MODEL_ERROR), 2.6, 2.6 * (1 + MODEL_ERROR)))
    # 64 samples on the two ranks of the profile
    assert pair.samples_per_day == pytest.approx(86400 / 2.6 * 32 * 2)
    assert pair.cost_per_day == pytest.approx(10 * 2 * 24)


def test_waiting_for_the_slowest_rank_is_not_communication() -> None:
    profile = make_profile(compute_s=(0.9, 1.1))
    size = predict(profile, make_network(1e15), options(16), source="").sizes[0]
    assert (size.waiting_s, size.communication_s) == (
        pytest.approx(0.1, rel=0.01),
        pytest.approx(0.0, abs=1e-6),
    )
    # Resampled compute times widen the interval beyond the model's error.
    assert size.step_s[2] - size.step_s[0] > 2.1 * MODEL_ERROR * size.step_s[1]


def test_a_model_that_was_compared_with_nothing_has_a_wider_interval() -> None:
    over_nccl = predict(
        make_profile(), replace(make_network(MIB), backend="nccl"), options(2), source=""
    )
    low, mean, high = over_nccl.sizes[0].step_s
    assert (over_nccl.model_error, low / mean, high / mean) == pytest.approx(
        (0.15, 1 - NCCL_ERROR, 1 + NCCL_ERROR)
    )
    lines = list(prediction_lines(over_nccl))
    assert lines[-1].endswith(
        "the intervals add 15% on both sides: NCCL's model was not compared with a cluster"
    )
    assert "(90%)" not in next(line for line in lines if "goodput" in line)
    assert list(prediction_lines(predicted(2)))[-1].endswith(
        "the intervals have the model's worst error, 7.4%"
    )


def test_the_documented_assumptions_are_flags() -> None:
    documentation = (Path(__file__).parents[4] / "docs" / "scaling.md").read_text(encoding="utf-8")
    (row,) = re.findall(r"^\| failures, restarts.*", documentation, re.MULTILINE)
    assert set(re.findall(r"--([a-z-]+)", row)) <= set(PREDICT_FLAGS)


def test_failures_and_checkpoints_cost_goodput() -> None:
    never = options(1, mtbf_hours=1e12, checkpoint_every=100, checkpoint_pause_s=5.0)
    assert goodput(1.0, 1, never) == pytest.approx(100 / 105)
    # 24 failures a day, each 60 s and half of 100 s.
    hourly = options(1, mtbf_hours=10.0, restart_s=60.0, checkpoint_every=100)
    assert goodput(1.0, 10, hourly) == pytest.approx(1 - 24 * 110 / 86400)
    # A failure every second leaves nothing.
    assert goodput(1.0, 36_000, hourly) == 0.0


@given(
    nodes=st.integers(1, 4096),
    step=st.floats(0.001, 100),
    hours=st.floats(0.1, 1e5),
    every=st.integers(1, 10_000),
)
def test_more_nodes_never_raise_the_goodput(
    nodes: int, step: float, hours: float, every: int
) -> None:
    given_options = options(1, mtbf_hours=hours, checkpoint_every=every)
    single, double = (goodput(step, count, given_options) for count in (nodes, 2 * nodes))
    assert 0 <= double <= single <= 1


def test_where_more_nodes_stop_paying_is_found() -> None:
    # The step alone takes 1 s; with two nodes 2.6 s: they are slower than one.
    assert predicted(8).stops_paying == 1
    # On a fast network every node pays, until failures take what is left.
    assert predicted(64, rate=1e12).stops_paying is None
    failing = predicted(4096, rate=1e12, mtbf_hours=100.0, restart_s=600.0, checkpoint_every=10)
    assert failing.stops_paying == 128
    assert "more nodes stop paying after 128" in "\n".join(prediction_lines(failing))


def test_better_buckets_and_accumulation_are_found() -> None:
    # One bucket, ready at the end: nothing overlaps. Smaller ones do.
    tensors = [(MIB, 0.4 + 0.5 * number / 40) for number in range(1, 41)]
    profile = make_profile(buckets=((40 * MIB, 0.9),), tensors=tensors)
    prediction = predict(profile, make_network(80 * MIB), options(2, mtbf_hours=1e12), source="")
    size = prediction.sizes[0]
    assert size.step_s[1] == pytest.approx(0.9 + 0.5 + 0.1)
    assert size.best_bucket_cap_mb < 25
    assert size.best_bucket_step_s < 1.1
    # 0.5 s of 0.9 k + 0.6 s is below a tenth from k = 5 on
    assert (prediction.accumulate, size.best_accumulate) == (1, 8)
    lines = "\n".join(prediction_lines(prediction))
    assert (
        f"2 nodes: --dist.bucket_cap_mb {size.best_bucket_cap_mb:g} would shorten the step by "
        in lines
    )
    assert (
        "2 nodes: --train.accumulate 8 would raise the efficiency to 94%, with a global batch 8 times"
        in lines
    )
    chosen = options(2, bucket_cap_mb=size.best_bucket_cap_mb, accumulate=8)
    again = predict(profile, make_network(80 * MIB), chosen, source="")
    assert again.sizes[0].efficiency[1] > size.best_accumulate_efficiency
    assert again.batch_per_rank == 32 * 8


def test_powersgd_keeps_the_buckets_that_were_profiled() -> None:
    profile = make_profile(settings={"dist.comm": "powersgd"}, bucket_cap_mb=5.0)
    (size,) = predict(profile, make_network(), options(2), source="").sizes
    assert (size.best_bucket_cap_mb, size.best_bucket_step_s) == (
        5.0,
        pytest.approx(size.step_s[1]),
    )
    with pytest.raises(
        UsageError, match="what PowerSGD sends with another bucket size is not known"
    ):
        predict(profile, make_network(), options(2, bucket_cap_mb=1.0), source="")


def test_a_profile_of_a_crowded_machine_says_so_and_has_wider_intervals() -> None:
    def predicted_with(wait_s: float | None) -> Prediction:
        profile = make_profile(cpu_wait_s=wait_s)
        return predict(profile, make_network(), options(2), source="runs/a")

    quiet = predicted_with(0.01)
    assert "crowded" not in "\n".join(prediction_lines(quiet))
    crowded = predicted_with(0.12)
    assert [line for line in prediction_lines(crowded) if "crowded" in line] == [
        "the profile was taken on a crowded machine: a rank waited for a CPU in 12% of its steps, so the intervals "
        "are wider by as much on both sides; profile it again when nothing else runs"
    ]
    assert crowded.cpu_wait_part == pytest.approx(0.12)
    low, mean, high = crowded.sizes[0].step_s
    assert (low / mean, high / mean) == pytest.approx(
        (1 - MODEL_ERROR - 0.12, 1 + MODEL_ERROR + 0.12)
    )
    assert mean == quiet.sizes[0].step_s[1]
    unknown = predicted_with(None)
    assert (unknown.cpu_wait_part, unknown.sizes[0].step_s[1]) == (None, mean)


def test_a_profile_of_a_very_crowded_machine_is_refused() -> None:
    with pytest.raises(UsageError, match="rank 0 on a waited for a CPU in 38% of its") as error:
        predict(make_profile(cpu_wait_s=0.38), make_network(), options(2), source="")
    assert str(error.value.next_step).startswith("profile the job again when nothing else runs")


def test_another_bucket_size_needs_the_sizes_of_tensors(tmp_path: Path) -> None:
    """A profile of an older version does not have them."""
    path = write_profile(tmp_path, make_profile(bucket_cap_mb=5.0))
    document = json.loads(path.read_text())
    for rank in document["ranks"]:
        del rank["host_s"]
    for bucket in document["buckets"]:
        del bucket["host_s"]
    del document["tensors"]
    path.write_text(json.dumps(document))
    old = read_profile(tmp_path)
    (size,) = predict(old, make_network(), options(2), source="").sizes
    assert (size.best_bucket_cap_mb, size.best_bucket_step_s) == (
        5.0,
        pytest.approx(size.step_s[1]),
    )
    with pytest.raises(UsageError, match="does not have the sizes of the tensors, which DDP"):
        predict(old, make_network(), options(2, bucket_cap_mb=1.0), source="")


def test_documents_are_read_again_and_anything_else_is_refused(tmp_path: Path) -> None:
    prediction = predicted(2)
    path = write_scaling(tmp_path, prediction)
    assert read_scaling(tmp_path, Prediction) == [prediction]
    assert read_scaling(tmp_path, Measurement) == []
    path.write_text(path.read_text().replace('"step_s"', '"steps"', 1))
    with pytest.raises(UsageError, match="is not a prediction"):
        read_scaling(tmp_path, Prediction)


def measured_size(ranks: int, step_s: float, **values: Any) -> MeasuredSize:
    fields: dict[str, Any] = {
        "scaling": "weak",
        "nodes": ranks,
        "ranks": ranks,
        "batch_size": 32 * ranks,
        "step_s": step_s,
        "spread_s": 0.0,
        "speedup": 1.0,
        "efficiency": 1.0,
        "parts_s": {"compute": 1.0, "exposed_communication": step_s - 1.0},
        "hidden_communication_s": 0.0,
        "run": f"weak-{ranks}",
    }
    return MeasuredSize(**{**fields, **values})


def measurement(*sizes: MeasuredSize, made_at: float) -> Measurement:
    return Measurement(
        made_at=made_at, task="digits", device="cpu", shares_cores=False, sizes=sizes
    )


def test_predictions_are_checked_against_what_was_measured_since(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="there is no prediction in"):
        check_predictions([tmp_path])
    prediction = predicted(2, 4, 8)
    write_scaling(tmp_path, prediction)
    earlier = measurement(measured_size(2, 99.0), made_at=prediction.made_at - 1)
    write_scaling(tmp_path, earlier)
    (line,) = check_lines(check_predictions([tmp_path]))
    assert (
        line
        == "none of 3 predicted sizes was measured since with the same task, device, batch, nodes and ranks"
    )
    other_batch = measured_size(8, 1.0, batch_size=7)  # another batch: not the same job
    strong = measured_size(8, 1.0, scaling="strong")
    sizes = (measured_size(2, 2.5), measured_size(4, 10.0), other_batch, strong)
    write_scaling(tmp_path, measurement(*sizes, made_at=prediction.made_at + 1))
    check = check_predictions([tmp_path])
    assert [(size.ranks, size.measured_s, size.is_within) for size in check.sizes] == [
        (2, 2.5, True),
        (4, 10.0, False),
    ]
    assert [size.error for size in check.sizes] == pytest.approx(
        [0.04, prediction.sizes[1].step_s[1] / 10 - 1]
    )
    assert list(check_lines(check))[-1].endswith("1 outside of the interval; 1 not measured yet")


def profile_on(nodes: int, made_at: float, step_s: float) -> ProfileResult:
    return make_profile(
        world_size=nodes, num_nodes=nodes, batch_size=32 * nodes, step_s=step_s, made_at=made_at
    )


def test_the_profile_of_another_run_is_a_measurement_too(tmp_path: Path) -> None:
    prediction = replace(predicted(2, 4), made_at=1000.0)
    write_scaling(tmp_path / "a", prediction)
    write_profile(tmp_path / "b", profile_on(4, 1001.0, prediction.sizes[1].step_s[1]))
    check = check_predictions([tmp_path / "a", tmp_path / "b"])
    assert [(size.ranks, size.error, size.run) for size in check.sizes] == [
        (4, 0.0, str(tmp_path / "b"))
    ]
    # Its age is when its steps ran, not when its file was written last.
    write_profile(tmp_path / "b", profile_on(4, 999.0, 1.0))
    assert check_predictions([tmp_path / "a", tmp_path / "b"]).sizes == ()


def test_a_measurement_is_compared_with_predictions_for_its_own_network(tmp_path: Path) -> None:
    profile = make_profile()
    sizes = options(1, 2)
    for number, name in enumerate(("10gbit", "100gbit")):
        network = replace(make_network(), between=NETWORKS[name])
        write_scaling(
            tmp_path, replace(predict(profile, network, sizes, source=""), made_at=1.0 + number / 8)
        )
    write_scaling(tmp_path, measurement(measured_size(1, 1.0), measured_size(2, 1.1), made_at=2.0))
    check = check_predictions([tmp_path])
    assert [(size.network, size.nodes) for size in check.sizes] == [
        ("10gbit", 1),
        ("100gbit", 1),
    ], "no network is used"
    assert list(check_lines(check))[-1] == (
        "not compared: predictions for 100gbit and 10gbit; if the measured runs used that network, name it with "
        "--network"
    )
    check = check_predictions([tmp_path], network="10gbit")
    assert [(size.network, size.nodes) for size in check.sizes] == [
        ("10gbit", 1),
        ("10gbit", 2),
        ("100gbit", 1),
    ]
    assert check.other_networks == ("100gbit",)


def test_below_what_is_usual_the_largest_loss_is_named() -> None:
    base = measured_size(1, 1.0)
    slow = measured_size(2, 1.6, efficiency=0.625)
    assert why_below_usual(slow, base) == (
        "2 ranks: 62% is below the usual 90%; the largest loss is exposed communication: 600 ms of a step (38%)"
    )
    assert why_below_usual(measured_size(2, 1.05, efficiency=0.95), base) is None
    shared = measured_size(
        2, 1.0, scaling="strong", efficiency=0.5, parts_s={"compute": 0.9, "gaps": 0.1}
    )
    reason = why_below_usual(shared, base)
    assert reason is not None
    assert "compute, which takes longer than on the fewest ranks: 400 ms" in reason


@pytest.mark.parametrize(
    ("ranks", "usual"), [(2, 90), (3, 87), (4, 85), (6, 82), (12, 77), (16, 75), (32, 75)]
)
def test_every_number_of_ranks_has_a_usual_efficiency(ranks: int, usual: int) -> None:
    reason = why_below_usual(measured_size(ranks, 3.0, efficiency=0.3), measured_size(1, 1.0))
    assert reason is not None
    assert reason.startswith(
        f"{ranks} ranks: 30% is below the usual {usual}%; the largest loss is exposed"
    )
    assert usual_efficiency(1) is None


@pytest.mark.parametrize(
    ("name", "num_cells", "errors"),
    [
        ("scaling-grid.json", 30, "mean error 2.5%, worst 6.3%"),
        ("scaling-grid-8-hosts.json", 9, "mean error 1.6%, worst 2.9%"),
    ],
)
def test_the_recorded_grid_has_the_errors_that_are_documented(
    name: str, num_cells: int, errors: str
) -> None:
    """Its cells, predicted again from what was measured there."""
    docs = Path(__file__).parents[4] / "docs"
    rows = predicted_again(json.loads((docs / name).read_text(encoding="utf-8")))
    text = " ".join((docs / "scaling.md").read_text(encoding="utf-8").split())
    assert summary(rows) == f"{num_cells} cells: {errors}"
    assert f"{num_cells} cells, **{errors}**" in text
    assert [line(row) for row in rows if line(row) not in text] == []
    assert round(max(abs(row["error"]) for row in rows), 3) <= MODEL_ERROR
