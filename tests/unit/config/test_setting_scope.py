"""What every setting belongs to (a machine or the experiment), and that ranks, resume, rerun and
export follow it."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from drumline.base.errors import PreflightError, UsageError
from drumline.config.fields import FIELDS, scope_of
from drumline.config.schema import Config, SettingScope
from drumline.rank.rendezvous.rank_facts import rank_facts
from drumline.training.job.job import compared_settings, flat
from drumline.training.resume import changed_settings, check_not_finished
from drumline.training.run_context import RunRequest
from drumline.training.saved.exported_weights import settings_in_card
from drumline.watch.fact_differences import check_differences

EXPERIMENT = SettingScope(
    per_machine=False, changes_result=True, changes_finished_run=True, may_differ_across_ranks=False
)
"""Compared across ranks, reported when a run resumes, refused for a finished run, in the model
card."""
LATER_STEPS = replace(EXPERIMENT, changes_finished_run=False)
"""The same, but a finished run, which takes no more steps, accepts it."""
NO_EFFECT = replace(EXPERIMENT, changes_result=False, changes_finished_run=False)
"""Compared across ranks, free to change afterwards."""
MACHINE = replace(NO_EFFECT, per_machine=True, may_differ_across_ranks=True)
"""Free to differ, too."""
MACHINE_OF_ALL = replace(NO_EFFECT, per_machine=True)
"""It follows from the machines, but all ranks need the same."""

EXPECTED = {
    "model.name": EXPERIMENT,
    "model.widths": EXPERIMENT,
    "model.blocks": EXPERIMENT,
    "model.layers": EXPERIMENT,
    "model.heads": EXPERIMENT,
    "model.width": EXPERIMENT,
    "model.context": EXPERIMENT,
    "model.dropout": EXPERIMENT,
    "model.activation_checkpointing": EXPERIMENT,
    "model.options": EXPERIMENT,
    "model.init": NO_EFFECT,
    "model.init_strict": NO_EFFECT,
    "data.name": EXPERIMENT,
    "data.dir": MACHINE,
    "data.cache": MACHINE,
    "data.augment": EXPERIMENT,
    "data.image_size": EXPERIMENT,
    "data.samples": EXPERIMENT,
    "data.classes": EXPERIMENT,
    "data.token_type": EXPERIMENT,
    "data.workers": MACHINE,
    "data.pin_memory": MACHINE,
    "data.persistent_workers": MACHINE,
    "data.prefetch_factor": MACHINE,
    "data.resident": MACHINE,
    "data.balance": EXPERIMENT,
    "optim.name": EXPERIMENT,
    "optim.lr": EXPERIMENT,
    "optim.scale_lr": EXPERIMENT,
    "optim.momentum": EXPERIMENT,
    "optim.nesterov": EXPERIMENT,
    "optim.betas": EXPERIMENT,
    "optim.eps": EXPERIMENT,
    "optim.weight_decay": EXPERIMENT,
    "optim.clip_norm": EXPERIMENT,
    "optim.schedule": EXPERIMENT,
    "optim.warmup_steps": EXPERIMENT,
    "optim.final_lr_ratio": EXPERIMENT,
    "optim.step_every": EXPERIMENT,
    "optim.step_factor": EXPERIMENT,
    "optim.options": EXPERIMENT,
    "optim.reset": NO_EFFECT,
    "train.seed": EXPERIMENT,
    "train.epochs": EXPERIMENT,
    "train.steps": EXPERIMENT,
    "train.batch_size": EXPERIMENT,
    "train.batch_size_per_rank": EXPERIMENT,
    "train.accumulate": EXPERIMENT,
    "train.micro_batch_size": EXPERIMENT,
    "train.exact": EXPERIMENT,
    "train.shards": EXPERIMENT,
    "train.step": EXPERIMENT,
    "train.memory_format": EXPERIMENT,
    "train.tf32": EXPERIMENT,
    "train.cudnn_benchmark": EXPERIMENT,
    "train.deterministic": EXPERIMENT,
    "train.precision": EXPERIMENT,
    "train.on_nan": LATER_STEPS,
    "train.eval_every_epochs": EXPERIMENT,
    "train.eval_every_steps": EXPERIMENT,
    "train.eval_batch_size": EXPERIMENT,
    "dist.device": MACHINE_OF_ALL,
    "dist.backend": EXPERIMENT,
    "dist.start_timeout_s": NO_EFFECT,
    "dist.train_timeout_s": NO_EFFECT,
    "dist.same_code": NO_EFFECT,
    "dist.sync_batchnorm": EXPERIMENT,
    "dist.find_unused_parameters": EXPERIMENT,
    "dist.threads": MACHINE,
    "dist.broadcast_buffers": EXPERIMENT,
    "dist.bucket_cap_mb": EXPERIMENT,
    "dist.static_graph": EXPERIMENT,
    "dist.mode": EXPERIMENT,
    "dist.shard_ranks": EXPERIMENT,
    "dist.wrap": EXPERIMENT,
    "dist.shard_dtype": EXPERIMENT,
    "dist.offload_optimizer": EXPERIMENT,
    "dist.meta_init": EXPERIMENT,
    "dist.comm": EXPERIMENT,
    "dist.powersgd_rank": EXPERIMENT,
    "dist.powersgd_start": EXPERIMENT,
    "dist.sync": EXPERIMENT,
    "dist.sync_within": EXPERIMENT,
    "dist.sync_parts": EXPERIMENT,
    "dist.sync_overlap": EXPERIMENT,
    "dist.outer_lr": EXPERIMENT,
    "dist.outer_momentum": EXPERIMENT,
    "dist.outer_dtype": EXPERIMENT,
    "dist.on_lost_node": NO_EFFECT,
    "checkpoint.every_epochs": NO_EFFECT,
    "checkpoint.every_steps": NO_EFFECT,
    "checkpoint.keep_last": NO_EFFECT,
    "checkpoint.keep_best": NO_EFFECT,
    "checkpoint.background": NO_EFFECT,
    "checkpoint.when_busy": NO_EFFECT,
    "checkpoint.writers": NO_EFFECT,
    "checkpoint.mirror": NO_EFFECT,
    "checkpoint.mirror_wait_s": NO_EFFECT,
    "watch.replicas_every": NO_EFFECT,
    "watch.on_difference": NO_EFFECT,
    "watch.sidecar": NO_EFFECT,
    "watch.on_hang": NO_EFFECT,
    "watch.hang_s": NO_EFFECT,
    "watch.lost_s": NO_EFFECT,
    "watch.slow_factor": NO_EFFECT,
    "watch.notice": MACHINE,
    "log.every_steps": NO_EFFECT,
    "log.display": NO_EFFECT,
    "log.format": NO_EFFECT,
    "log.trackers": NO_EFFECT,
    "log.trace": NO_EFFECT,
    "log.profile": NO_EFFECT,
    "log.prometheus": MACHINE,
}
CHANGED = "changed"
"""A value that no setting has. None of what is tested here reads the value itself."""


def with_changed(path: str) -> Config:
    section, _, name = path.partition(".")
    config = Config(task={"width": 8})
    if section == "task":
        return replace(config, task={**config.task, name: CHANGED})
    return replace(config, **{section: replace(getattr(config, section), **{name: CHANGED})})


def test_every_setting_says_what_it_belongs_to() -> None:
    """A new setting fails here until somebody has decided."""
    scopes = {path: replace(field.scope, of_built_ins=False) for path, field in FIELDS.items()}
    assert scopes == EXPECTED
    of_built_ins = {path for path, field in FIELDS.items() if field.scope.of_built_ins}
    assert of_built_ins == {
        *(
            "model.name",
            "model.widths",
            "model.blocks",
            "model.layers",
            "model.heads",
            "model.width",
            "model.context",
        ),
        *(
            "model.dropout",
            "data.name",
            "data.augment",
            "data.image_size",
            "data.samples",
            "data.classes",
        ),
        "data.token_type",
    }


def test_settings_of_a_task_and_options_of_a_model_are_of_the_experiment() -> None:
    for path in ("task.width", "model.options.hidden", "optim.options.momentum_decay"):
        assert scope_of(path) == EXPERIMENT


def facts_with(config: Config) -> dict[str, dict[str, Any]]:
    settings = compared_settings(config, "path/to/task.py:Mine")
    return rank_facts(
        {},
        backend="gloo",
        device=torch.device("cpu"),
        options={},
        settings=settings,
        same_code=False,
    )


def scopes() -> Iterator[tuple[str, SettingScope]]:
    yield from EXPECTED.items()
    yield "task.width", EXPERIMENT


def test_ranks_may_differ_in_settings_of_a_machine_only() -> None:
    for path, scope in scopes():
        ranks = [facts_with(Config(task={"width": 8})), facts_with(with_changed(path))]
        if scope.may_differ_across_ranks:
            check_differences(ranks, ["a", "b"])
            continue
        pattern = rf"^ranks differ in the setting {path}: rank 0 \(a\): .*; rank 1 \(b\): "
        with pytest.raises(PreflightError, match=pattern):
            check_differences(ranks, ["a", "b"])


def saved_facts() -> dict[str, Any]:
    return {"task": "mine", "config": flat(Config(task={"width": 8}))}


def test_a_resumed_run_reports_changes_of_the_experiment_only() -> None:
    reported = set[str]()
    for path, _ in scopes():
        request = RunRequest("mine", with_changed(path), Path("run"), False, ())
        reported |= changed_settings(saved_facts(), request).keys()
    assert reported == {path for path, scope in scopes() if scope.changes_result}


def test_a_finished_run_refuses_changes_of_its_result_only() -> None:
    for path, scope in scopes():
        request = RunRequest("mine", with_changed(path), Path("run"), False, ())
        if not scope.changes_finished_run:
            check_not_finished(saved_facts(), request, step=5, total_steps=5)
            continue
        with pytest.raises(
            UsageError, match=f"and was trained with other settings: {path} .* -> {CHANGED}\n"
        ):
            check_not_finished(saved_facts(), request, step=5, total_steps=5)


def test_the_model_card_has_the_settings_of_the_experiment_only() -> None:
    for path, scope in scopes():
        expected = [f'{path} = "{CHANGED}"'] if scope.changes_result else []
        assert list(settings_in_card({**flat(Config()), path: CHANGED})) == expected
