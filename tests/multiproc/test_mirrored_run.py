"""Runs with `--checkpoint.mirror`: they continue on another host with the same bits, and are read
from the store."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor, nn

from drumline.base.errors import UsageError
from drumline.checkpoint import store
from drumline.cli import export_command, report_command, verify_command
from drumline.config.schema import CheckpointConfig, Config, DistConfig
from drumline.report.verify.run_check import verify_run
from drumline.runs import catalog
from drumline.runs.events import read_events
from drumline.storage.backends import StoreError
from drumline.training.tasks.base import Loss
from tests.jobs import Classify, assert_same_bits, make_config, newest, train_each_on, train_here
from tests.store_server import Bucket, use_endpoint


class Breaks(Classify):
    """Fails in the sixth step."""

    calls = 0

    def loss(self, model: nn.Module, batch: tuple[Tensor, Tensor]) -> Loss:
        type(self).calls += model.training  # the first is the count of FLOPs
        if self.calls == 7:
            raise ZeroDivisionError("the sixth step")
        return super().loss(model, batch)


def mirrored(url: str, **train: Any) -> Config:
    saves = CheckpointConfig(
        every_steps=2, every_epochs=0, keep_last=1, keep_best=1, mirror=url, mirror_wait_s=60.0
    )
    return make_config(steps=8, dropout=0.2, checkpoint=saves, eval_every_steps=2, **train)


def without_url(run: Path) -> store.Snapshot:
    checkpoint = newest(run)
    del checkpoint.documents["progress"]["facts"]["config"]["checkpoint.mirror"]
    return checkpoint


def messages(run: Path, kind: str) -> list[str]:
    return [
        event["message"]
        for event in read_events(run / "events" / "rank-00000.jsonl")
        if event["kind"] == kind
    ]


def test_a_run_continues_on_another_host_and_is_read_from_the_store(
    bucket: Bucket,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    whole, first, second = (tmp_path / name for name in ("whole", "first", "second"))
    train_here(mirrored(f"{bucket.root}/runs/whole"), Classify, whole)
    with pytest.raises(ZeroDivisionError):
        train_here(mirrored(bucket.url), Breaks, first)
    assert catalog.list_steps(first / "checkpoints")[-1] == 4
    train_here(mirrored(bucket.url), Classify, second)
    # the restored ones of the first host, then its own
    notes = messages(second, "note")
    assert notes[0].startswith("mirrored step ")
    assert any(message.startswith(f"restored step 4 from {bucket.url} in ") for message in notes)
    assert_same_bits(without_url(second), without_url(whole))
    assert verify_run(second, lambda text: None).problems == []
    assert any(name.endswith("step-00000008/manifest.json") for name in bucket.sizes())

    # From the store: the checkpoints, samples, events and settings of both hosts.
    assert verify_command.run([bucket.url]) == 0
    text = capsys.readouterr().out
    assert text.startswith(f"{bucket.url}\n  checkpoints  ")
    assert text.endswith("no problems found\n")
    monkeypatch.chdir(tmp_path)
    assert report_command.run([bucket.url]) == 0
    assert "report: report.html" in capsys.readouterr().out
    assert "done" in (tmp_path / "report.html").read_text()
    assert export_command.run([bucket.url, "--which", "last", "--to", "weights.safetensors"]) == 0
    exported = load_file(tmp_path / "weights.safetensors")
    saved = newest(second).tensors["model"]
    assert all(exported[name].equal(saved[name]) for name in saved)
    assert export_command.run([bucket.url, "--to", "best.safetensors"]) == 0
    assert export_command.run([bucket.url, "--which", "8", "--to", "eight.safetensors"]) == 0
    with pytest.raises(
        UsageError,
        match=rf"{bucket.url} has no checkpoint 3\n  try: choose last, or one of its steps: .*8",
    ):
        export_command.run([bucket.url, "--which", "3", "--to", "other.safetensors"])

    # A damaged object, and no run.
    key = next(name for name in bucket.sizes() if name.endswith("step-00000008/model.safetensors"))
    bucket.put(key, b"damaged")
    capsys.readouterr()
    assert verify_command.run([bucket.url]) == 1
    problem = (
        f"problem: checkpoints/step-00000008: corrupt or incomplete: {bucket.root}/{key} is "
        "corrupt: it has 7 bytes"
    )
    assert problem in capsys.readouterr().out
    for command in (verify_command, report_command):
        with pytest.raises(
            UsageError, match=f"there is no run in {bucket.url}x\n  try: give the address that"
        ):
            command.run([f"{bucket.url}x"])
    with pytest.raises(UsageError, match="--live serves one run folder"):
        report_command.run(["--live", bucket.url])


@pytest.mark.soak
def test_a_mirror_never_stops_a_run_but_a_start_that_might_lose_one(
    bucket: Bucket, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    config = mirrored(bucket.url)
    train_here(config, Classify, tmp_path / "run")
    with pytest.raises(UsageError) as caught:
        train_here(config, Classify, tmp_path / "run", fresh=True)
    assert str(caught.value) == (
        f"--fresh starts a new run, and the mirror {bucket.url} holds an earlier one\n"
        "  try: give --checkpoint.mirror another prefix, or delete what is there"
    )
    # it was not moved aside
    assert catalog.list_steps(tmp_path / "run" / "checkpoints")
    use_endpoint(monkeypatch, "http://127.0.0.1:9")
    longer = replace(config, train=replace(config.train, steps=10))
    longer = replace(longer, checkpoint=replace(config.checkpoint, mirror_wait_s=3.0))
    assert train_here(longer, Classify, tmp_path / "run").step == 10
    warnings = messages(tmp_path / "run", "warning")
    assert [text for text in warnings if text.startswith("the mirror failed: ")]
    assert [
        text
        for text in warnings
        if text.startswith(f"the checkpoint of step 10 is not in the mirror {bucket.url}: ")
    ]
    with pytest.raises(
        StoreError, match="the mirror may have a checkpoint to resume from, but cannot be read: "
    ):
        train_here(config, Classify, tmp_path / "elsewhere")


@pytest.mark.soak  # the mirror copies what a manifest names, whoever wrote it
@pytest.mark.world_size(2)
def test_the_shards_of_all_ranks_are_mirrored_and_restored(tmp_path: Path) -> None:
    whole, config = (
        replace(mirrored(f"file://{tmp_path}/{name}"), dist=DistConfig(mode="fsdp"))
        for name in ("other", "store")
    )
    half = replace(config, train=replace(config.train, steps=4))
    train_each_on(
        2,
        (whole, Classify, tmp_path / "whole"),
        (half, Classify, tmp_path / "first"),
        (config, Classify, tmp_path / "second"),
    )
    files = {path.name for path in (tmp_path / "store/checkpoints/step-00000008").iterdir()}
    assert {
        "model-part-00000.safetensors",
        "model-part-00001.safetensors",
        "manifest.json",
    } <= files
    assert any(
        message.startswith("restored step 4 from file://")
        for message in messages(tmp_path / "second", "note")
    )
    left = newest(tmp_path / "whole").tensors
    right = newest(tmp_path / "second").tensors
    for file, group in left.items():
        assert all(torch.equal(tensor, right[file][name]) for name, tensor in group.items()), file
