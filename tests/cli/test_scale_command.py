"""`drumline scale` as a user types it."""

from __future__ import annotations

import json
import time
from pathlib import Path
from typing import Any

import pytest

from drumline.cli import main
from drumline.runs.profile_result import write_profile
from drumline.runs.scaling_result import Prediction, read_scaling
from tests.unit.tools.scale.jobs_to_scale import MIB, make_profile

DOCTOR = {
    "world_size": 2,
    "all_reduce_bytes": MIB,
    "all_reduce_gb_per_s": 0.001,
    "all_reduce_latency_us": 1000.0,
}


def test_a_prediction_is_printed_kept_and_checked(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    run = tmp_path / "run"
    write_profile(run, make_profile())
    assert (
        main(
            [
                "scale",
                "predict",
                str(run),
                "--nodes",
                "1,2,8",
                "--network",
                "10gbit",
                "--price",
                "3",
            ]
        )
        == 0
    )
    lines = capsys.readouterr().out.splitlines()
    assert lines[0].startswith(
        "digits on cpu over 10gbit (nominal 10 Gbit/s a node, 94% of it with TCP"
    )
    heading = next(line for line in lines if line.lstrip().startswith("nodes"))
    assert heading.split()[:4] == ["nodes", "ranks", "step", "(90%)"]
    rows = lines[lines.index(heading) + 1 :][:3]
    assert [row.split()[:2] for row in rows] == [["1", "2"], ["2", "4"], ["8", "16"]]
    assert "up to 8 nodes, each added node brings at least 50% of one" in lines
    (found,) = read_scaling(run, Prediction)
    assert found.network_source.startswith("nominal")
    (plot,) = (run / "scale").glob("*.svg")
    assert plot.read_text().startswith("<svg")
    # What was measured since: a profile of the same job on two nodes.
    job: dict[str, Any] = {
        "world_size": 4,
        "num_nodes": 2,
        "batch_size": 128,
        "made_at": time.time() + 1,
    }
    write_profile(tmp_path / "later", make_profile(step_s=found.sizes[1].step_s[1] * 1.02, **job))
    check = ["scale", "check", str(run), str(tmp_path / "later"), "--network", "10gbit"]
    assert main(check) == 0
    assert (
        "1 size: mean error 2.0%, worst 2.0%; 0 outside of the interval; 2 not measured yet"
        in capsys.readouterr().out
    )
    write_profile(tmp_path / "later", make_profile(step_s=99.0, **job))
    assert main([*check, "--json"]) == 1
    (size,) = json.loads(capsys.readouterr().out)["sizes"]
    assert (size["ranks"], size["measured_s"], size["is_within"]) == (4, 99.0, False)


def test_the_doctors_measurement_is_a_network(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    profile = tmp_path / "profile.json"
    file = tmp_path / "lab.json"
    write_profile(tmp_path, make_profile()).rename(profile)
    file.write_text(json.dumps({"collectives": DOCTOR}))
    arguments = [
        "scale",
        "predict",
        str(profile),
        "--nodes",
        "2",
        "--gpus-per-node",
        "1",
        "--network",
        str(file),
    ]
    assert main([*arguments, "--json"]) == 0
    document = json.loads(capsys.readouterr().out)
    assert (document["network"], document["network_source"]) == (
        "lab.json",
        "measured with gloo on 2 ranks",
    )
    # 2 MiB at 1 MB/s from 0.5 s on, then the optimizer.
    assert document["sizes"][0]["step_s"][1] == pytest.approx(0.5 + 2 * MIB / 1e6 + 0.1, rel=0.01)
    assert Path(document["file"]).parent == tmp_path / "scale"
    assert Path(document["plot"]).is_file()
    # The all-reduces of the profile are one, if it is of several nodes: 2 x 1 MiB in 0.1 s on two
    # ranks.
    write_profile(tmp_path / "pair", make_profile(num_nodes=2))
    assert main(["scale", "predict", str(tmp_path / "pair"), "--nodes", "2", "--json"]) == 0
    document = json.loads(capsys.readouterr().out)
    assert (document["network"], document["network_source"]) == (
        "measured",
        "measured with gloo on 2 ranks",
    )
    assert document["sizes"][0]["step_s"][1] == pytest.approx(0.9 + 0.1 + 0.1, rel=0.01)


def test_a_rate_and_a_latency_are_a_network(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    write_profile(tmp_path / "run", make_profile())
    predict = ["scale", "predict", str(tmp_path / "run"), "--nodes", "2", "--gpus-per-node", "1"]
    assert main([*predict, "--network", "60mbit,0.2ms"]) == 0
    assert capsys.readouterr().out.startswith(
        "digits on cpu over 60mbit,0.2ms (nominal 60 Mbit/s a node"
    )
    # It is a name: nothing says that a measured run used this network.
    later = make_profile(num_nodes=2, made_at=time.time() + 1)
    write_profile(tmp_path / "later", later)
    check = ["scale", "check", str(tmp_path / "run"), str(tmp_path / "later")]
    assert main(check) == 0
    assert "not compared: predictions for 60mbit,0.2ms" in capsys.readouterr().out
    main([*check, "--network", "60mbit,0.2ms"])
    assert "1 size: mean error" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (
            ["scale", "predict", "run", "--network", "60mb,1ms"],
            "a rate and a latency as in 60mbit,0.2ms",
        ),
        (["scale", "forecast"], "there is no `drumline scale forecast`"),
        (["scale", "predict"], "no RUN or PROFILE was given"),
        (["scale", "predict", "missing"], "missing has no profile"),
        (
            ["scale", "predict", "run"],
            "the profile has no all-reduce between nodes, so its network is not known",
        ),
        (["scale", "predict", "run", "--nodes", "0"], "--nodes"),
        (["scale", "predict", "run", "--nodes", "two"], "--nodes"),
        (
            ["scale", "predict", "run", "--network", "1tbit"],
            "--network: there is no network '1tbit'",
        ),
        (
            ["scale", "predict", "run", "--network", "bad.json"],
            "--network: bad.json has no measured all_reduce",
        ),
        (
            ["scale", "predict", "run", "--inside", "nvlink9"],
            "the profile has no all-reduce between nodes",
        ),
        (
            ["scale", "predict", "run", "--network", "10gbit", "--inside", "nvlnk4"],
            "did you mean 'nvlink4'?",
        ),
        (["scale", "predict", "run", "--mtbf-hours", "0"], "--mtbf-hours"),
        (["scale", "predict", "run", "--pays-above", "2"], "--pays-above"),
        (
            ["scale", "predict", "run", "--optim.lr", "1"],
            "is a setting of a run; scale predict takes none",
        ),
        (["scale", "check"], "no RUN was given"),
        (["scale", "check", "missing"], "there is no folder missing"),
        (["scale", "check", "run"], "there is no prediction in run"),
        (["scale", "measure"], "no TASK was given"),
        (
            ["scale", "measure", "digits", "--world", "2"],
            "--world: give two numbers of ranks or more, as in 1,2,4",
        ),
        (
            ["scale", "measure", "digits", "--world", "1,3", "--hosts", "a,b"],
            "3 ranks cannot be split evenly over 2 hosts",
        ),
        (
            ["scale", "measure", "digits", "--train.steps", "5"],
            "--train.steps: use --steps instead",
        ),
        (["scale", "measure", "digits", "--scaling", "odd"], "--scaling"),
        (["scale", "measure", "digits", "--optim.lr", "-1"], "optim.lr"),
    ],
)
def test_wrong_values_are_explained(
    arguments: list[str],
    message: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.chdir(tmp_path)
    write_profile(Path("run"), make_profile())
    Path("bad.json").write_text('{"collectives": []}')
    assert main(arguments) == 2
    assert message in capsys.readouterr().err
    assert not Path("run/scale").exists()


@pytest.mark.parametrize("verb", [[], ["predict"], ["measure"], ["check"]])
def test_the_help_shows_how(verb: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["scale", *verb, "--help"]) == 0
    assert capsys.readouterr().out.startswith(
        f"usage: drumline scale {verb[0] if verb else 'predict'}"
    )
