"""What is said of compilations: ranks whose results differ, a function compiled again."""

from __future__ import annotations

from typing import Any

from drumline.training.steps.compilation import describe_recompilations, find_difference


def made(host: str = "node-a", **changes: Any) -> dict[str, Any]:
    usual = {"graphs": 1, "breaks": 0, "guards": 41, "host": host}
    return {**usual, **changes}


def test_a_rank_whose_compiled_loss_differs_is_named() -> None:
    assert find_difference([made(), made(), made("node-b")]) is None
    assert find_difference([made(), made(), made("node-b", graphs=2, breaks=1, guards=50)]) == (
        "ranks 0, 1 (node-a): 1 graph, 0 graph breaks, 41 guards; rank 2 (node-b): 2 graphs, 1 graph break, 50 guards"
    )
    failed = made("node-b", graphs=0, guards=0)
    assert find_difference([made(), failed]) == (
        "rank 0 (node-a): 1 graph, 0 graph breaks, 41 guards; rank 1 (node-b): 0 graphs, 0 graph breaks, 0 guards"
    )


def test_a_function_that_is_compiled_again_is_reported_once_with_where_why_and_what_to_do() -> None:
    shape = "tensor 'batch[0]' size mismatch at index 1. expected 128, actual 96"
    number = "self.scale == 1.0"
    everyone = [
        [{"function": "", "step": 40, "reason": shape}],
        [
            {"function": "", "step": 31, "reason": shape},
            {"function": "encode (model.py:31)", "step": 30, "reason": number},
        ],
    ]
    assert dict(describe_recompilations(everyone, "Translate")) == {
        "": f"torch compiled Translate.loss() again at step 31 on ranks 0, 1: {shape}. All ranks wait while it "
        "compiles, and after several times torch runs it uncompiled. Try: pad batches to a few fixed lengths, in the "
        "task's collate for example; TORCH_LOGS=recompiles shows every one",
        "encode (model.py:31)": f"torch compiled encode (model.py:31) again at step 30 on rank 1: {number}. All ranks "
        "wait while it compiles, and after several times torch runs it uncompiled. Try: keep what changes from step "
        "to step in a tensor, not in a number or an attribute; TORCH_LOGS=recompiles shows every one",
    }
    assert list(describe_recompilations([[], []], "Translate")) == []
