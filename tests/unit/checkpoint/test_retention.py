from __future__ import annotations

import math
from pathlib import Path

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from drumline.checkpoint import store
from drumline.checkpoint.retention import Retention, best, is_best, prune
from drumline.runs import catalog, manifest
from drumline.runs.manifest import Manifest


def make(root: Path, step: int, **metrics: float) -> Path:
    return store.write(
        root,
        step,
        tensors={"model": {"w": torch.ones(2)}},
        documents={"progress": {}},
        metrics=metrics,
    )


def make_quick(root: Path, step: int, metrics: dict[str, float]) -> Path:
    """A whole checkpoint without files, made without waiting for the device."""
    path = root / catalog.folder_name(step)
    path.mkdir(parents=True)
    (path / "manifest.json").write_bytes(manifest.render(Manifest(step, "", metrics, {})))
    return path


def by_loss(root: Path, *, last: int = 1, best: int = 0) -> list[Path]:
    newest = catalog.newest_valid(root).path
    assert newest is not None
    return prune(root, Retention(last, best, "loss", higher_is_better=False), newest=newest)


def test_the_last_ones_stay(tmp_path: Path) -> None:
    paths = [make(tmp_path, step) for step in (1, 2, 3, 4)]
    assert by_loss(tmp_path, last=2) == paths[:2]
    assert catalog.list_steps(tmp_path) == [3, 4]
    assert sorted(path.name for path in tmp_path.iterdir()) == ["step-00000003", "step-00000004"]
    assert by_loss(tmp_path, last=2) == []


@pytest.mark.parametrize(("higher_is_better", "kept_steps"), [(True, [2, 4]), (False, [1, 4])])
def test_the_best_stays_besides(
    tmp_path: Path, higher_is_better: bool, kept_steps: list[int]
) -> None:
    for step, score in ((1, 0.1), (2, 0.9), (3, 0.5), (4, 0.4)):
        path = make(tmp_path, step, accuracy=score)
    prune(tmp_path, Retention(1, 1, "accuracy", higher_is_better=higher_is_better), newest=path)
    assert catalog.list_steps(tmp_path) == kept_steps


def test_of_equals_the_newer_is_the_best(tmp_path: Path) -> None:
    for step in (1, 2, 3):
        make(tmp_path, step, loss=0.0)
    make(tmp_path, 4, loss=1.0)
    by_loss(tmp_path, best=1)
    assert catalog.list_steps(tmp_path) == [3, 4]


def test_one_that_is_not_finite_is_never_the_best_and_deletes_no_finite_one(tmp_path: Path) -> None:
    for step, is_finite in enumerate([True, True, True, False, False], start=1):
        store.write(
            tmp_path,
            step,
            tensors={},
            documents={},
            metrics={"loss": 1.0 / step},
            non_finite=None if is_finite else "model/w",
        )
        prune(
            tmp_path,
            Retention(2, 1, "loss", higher_is_better=False),
            newest=tmp_path / catalog.folder_name(step),
        )
    assert catalog.list_steps(tmp_path) == [2, 3, 5], "the last two finite ones, and the newest"
    assert best(tmp_path, metric="loss", higher_is_better=False) == 3
    newest = catalog.newest_valid(tmp_path)
    assert newest == (
        tmp_path / "step-00000003",
        [(tmp_path / "step-00000005", "model/w is not finite")],
    )


def test_where_none_is_finite_the_newest_is_found(tmp_path: Path) -> None:
    for step in (1, 2):
        store.write(tmp_path, step, tensors={}, documents={}, metrics={}, non_finite="model/w")
    assert catalog.newest_valid(tmp_path) == (tmp_path / "step-00000002", [])


def test_a_save_that_would_be_the_best_is_known_before(tmp_path: Path) -> None:
    def is_it(*, higher: bool, **metrics: float) -> bool:
        return is_best(tmp_path, metrics, metric="score", higher_is_better=higher)

    assert is_it(higher=True, score=0.1)  # there is none yet
    make_quick(tmp_path, 1, {"score": 0.5})
    make_quick(tmp_path, 2, {"other": 9.0})
    are_best = [
        is_it(higher=higher, score=score) for higher in (True, False) for score in (0.4, 0.5, 0.6)
    ]
    assert are_best == [False, True, True, True, True, False]
    assert not is_it(higher=True, other=1.0)
    assert not is_it(higher=True, score=math.nan)


def test_without_the_metric_or_with_nan_it_is_never_the_best(tmp_path: Path) -> None:
    make(tmp_path, 1, loss=7.0)
    make(tmp_path, 2, loss=math.nan)
    make(tmp_path, 3, accuracy=1.0)
    make(tmp_path, 4)
    by_loss(tmp_path, best=3)
    assert catalog.list_steps(tmp_path) == [1, 4]


def test_the_newest_valid_one_stays_though_a_newer_looks_complete(tmp_path: Path) -> None:
    for step in (1, 2, 3):
        make(tmp_path, step)
    file = tmp_path / "step-00000003" / "model.safetensors"
    raw = bytearray(file.read_bytes())
    raw[-1] ^= 1
    file.write_bytes(raw)
    assert by_loss(tmp_path) == [tmp_path / "step-00000001"]
    assert catalog.newest_valid(tmp_path).path == tmp_path / "step-00000002"


def test_what_was_just_written_is_not_read_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    paths = [make(tmp_path, step) for step in (1, 2, 3)]
    monkeypatch.setattr(catalog, "verify", None)
    removed = prune(tmp_path, Retention(1, 0, "loss", higher_is_better=False), newest=paths[-1])
    assert removed == paths[:2]


def test_the_newest_valid_one_stays_even_if_none_is_to_be_kept(tmp_path: Path) -> None:
    for step in (1, 2):
        make(tmp_path, step)
    by_loss(tmp_path, last=0)
    assert catalog.list_steps(tmp_path) == [2]


def test_corrupt_ones_do_not_count_as_kept_and_go_when_a_valid_one_is_newer(tmp_path: Path) -> None:
    for step in (1, 2, 3, 4):
        make(tmp_path, step)
    (tmp_path / "step-00000003" / "manifest.json").unlink()
    assert by_loss(tmp_path, last=2) == [tmp_path / "step-00000001", tmp_path / "step-00000003"]
    assert catalog.list_steps(tmp_path) == [2, 4]


def test_a_link_is_removed_and_not_what_it_points_at(tmp_path: Path) -> None:
    original = make(tmp_path / "elsewhere", 1)
    root = tmp_path / "root"
    make(root, 2)
    (root / "step-00000001").symlink_to(original)
    assert by_loss(root) == [root / "step-00000001"]
    catalog.verify(original)
    assert [path.name for path in root.iterdir()] == ["step-00000002"]


scores = st.none() | st.floats(allow_nan=True)


@given(
    entries=st.lists(st.tuples(scores, st.booleans()), min_size=1, max_size=7),
    last=st.integers(1, 3),
    best=st.integers(0, 3),
    higher=st.booleans(),
)
def test_the_rules_hold_for_any_history(
    tmp_path_factory: pytest.TempPathFactory,
    entries: list[tuple[float | None, bool]],
    last: int,
    best: int,
    higher: bool,
) -> None:
    root = tmp_path_factory.mktemp("prune")
    for step, (score, is_corrupt) in enumerate(entries, start=1):
        path = make_quick(root, step, {} if score is None else {"m": score})
        if is_corrupt:
            (path / "manifest.json").write_bytes(b"corrupt")
    whole = [step for step, (_, is_corrupt) in enumerate(entries, start=1) if not is_corrupt]
    scored = [
        step
        for step in whole
        if (score := entries[step - 1][0]) is not None and math.isfinite(score)
    ]
    if newest := catalog.newest_valid(root).path:
        prune(root, Retention(last, best, "m", higher_is_better=higher), newest=newest)
    left = set(catalog.list_steps(root))
    complete_left = left & set(whole)
    assert set(whole[-last:]) <= complete_left
    assert len(complete_left) <= last + best
    assert len(complete_left & set(scored)) >= min(best, len(scored))
    removed = set(scored) - complete_left
    sign = 1 if higher else -1
    worst_kept_best = sorted(
        (sign * (entries[step - 1][0] or 0.0) for step in scored), reverse=True
    )[:best]
    assert all(
        sign * (entries[step - 1][0] or 0.0) <= min(worst_kept_best, default=math.inf)
        for step in removed
    )
    assert left - complete_left == {
        step for step in range(1, len(entries) + 1) if entries[step - 1][1]
    } - set(range(1, max(whole, default=0)))


def test_a_quick_checkpoint_is_a_real_one(tmp_path: Path) -> None:
    assert catalog.verify(make_quick(tmp_path, 3, {"m": 1.0})).files == {}
