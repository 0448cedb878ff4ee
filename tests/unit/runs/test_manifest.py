from __future__ import annotations

import json
import math
from dataclasses import replace
from pathlib import Path

import pytest

from drumline.runs import manifest
from drumline.runs.manifest import CorruptCheckpointError, FileRecord, Manifest

EXAMPLE = Manifest(
    step=120,
    created="2026-01-02T03:04:05+00:00",
    metrics={"loss": 0.1 + 0.2, "accuracy": 1.0},
    files={"model.safetensors": FileRecord(10, "ab"), "progress.json": FileRecord(20, "cd")},
)


def test_is_restored_as_it_was() -> None:
    assert manifest.parse(manifest.render(EXAMPLE)) == EXAMPLE


def test_is_plain_json_with_all_fields() -> None:
    content = json.loads(manifest.render(EXAMPLE))
    assert set(content) == {"format", "step", "created", "metrics", "non_finite", "files", "digest"}
    assert content["format"] == 1
    assert content["files"]["model.safetensors"] == {"bytes": 10, "blake3": "ab"}


def test_a_tensor_that_is_not_finite_is_named_and_an_older_manifest_names_none() -> None:
    marked = replace(EXAMPLE, non_finite="model/fc.weight")
    assert manifest.parse(manifest.render(marked)) == marked
    content = json.loads(manifest.render(EXAMPLE))
    del content["digest"], content["non_finite"]
    older = manifest._to_bytes({**content, "digest": manifest._digest(content)})
    assert manifest.parse(older) == EXAMPLE


def test_a_metric_that_is_no_number_survives() -> None:
    raw = manifest.render(Manifest(1, "", {"loss": math.nan, "worst": math.inf}, {}))
    metrics = manifest.parse(raw).metrics
    assert math.isnan(metrics["loss"])
    assert metrics["worst"] == math.inf


@pytest.mark.parametrize("change", [1, 0x20, 0x80])
def test_any_flipped_bit_anywhere_is_found(change: int) -> None:
    raw = manifest.render(EXAMPLE)
    for position in range(len(raw)):
        altered = raw[:position] + bytes([raw[position] ^ change]) + raw[position + 1 :]
        with pytest.raises(ValueError, match=r"unreadable|its digest differs from its content"):
            manifest.parse(altered)


def test_any_truncation_is_found() -> None:
    raw = manifest.render(EXAMPLE)
    for length in range(len(raw)):
        with pytest.raises(ValueError, match=r"unreadable|digest differs"):
            manifest.parse(raw[:length])


def test_a_later_format_is_not_reported_as_damage() -> None:
    content = json.loads(manifest.render(EXAMPLE))
    del content["digest"]
    content["format"] = 7
    raw = manifest._to_bytes({**content, "digest": manifest._digest(content)})
    with pytest.raises(ValueError, match="its format is 7, and this version of Drumline reads 1"):
        manifest.parse(raw)


def test_json_of_another_kind_is_unreadable() -> None:
    with pytest.raises(ValueError, match="unreadable"):
        manifest.parse(b"[]\n")


def test_errors_name_the_folder_and_the_file(tmp_path: Path) -> None:
    with pytest.raises(
        CorruptCheckpointError,
        match=rf"the checkpoint {tmp_path} is corrupt or incomplete: manifest.json is missing",
    ):
        manifest.read(tmp_path)
    (tmp_path / "manifest.json").write_bytes(b"{")
    with pytest.raises(
        CorruptCheckpointError, match=r"manifest.json: unreadable\n  try: use an earlier checkpoint"
    ):
        manifest.read(tmp_path)
    (tmp_path / "manifest.json").unlink()
    (tmp_path / "manifest.json").mkdir()
    with pytest.raises(
        CorruptCheckpointError, match=r"manifest\.json cannot be read: Is a directory"
    ):
        manifest.read(tmp_path)
