from __future__ import annotations

import json
import math
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from drumline.base.errors import CheckpointError
from drumline.checkpoint.optimizer_state import decode_state, encode_state


def there_and_back(value: Any) -> Any:
    tensors: dict[str, Tensor] = {}
    text = json.dumps(encode_state(value, "x", tensors))
    return decode_state(json.loads(text), tensors.__getitem__)


values = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False) | st.text(),
    lambda inner: (
        st.lists(inner, max_size=3)
        | st.tuples(inner, inner)
        | st.dictionaries(st.text() | st.integers(), inner, max_size=3)
    ),
    max_leaves=12,
)


@pytest.mark.slow
@settings(deadline=None)
@given(value=values)
def test_anything_is_restored_as_it_was(value: Any) -> None:
    assert there_and_back(value) == value


def test_tensors_get_names_that_say_where_they_were() -> None:
    tensors: dict[str, Tensor] = {}
    encode_state(
        {"exp_avg": torch.ones(2), "old": [torch.zeros(1), (3, torch.zeros(2))]},
        "layer.weight",
        tensors,
    )
    assert list(tensors) == ["layer.weight/exp_avg", "layer.weight/old/0", "layer.weight/old/1/1"]


def test_numbers_that_json_does_not_know() -> None:
    back = there_and_back(
        [math.inf, -math.inf, math.nan, np.float32(0.5), np.int64(3), np.float64(0.1)]
    )
    assert back[:2] == [math.inf, -math.inf]
    assert math.isnan(back[2])
    assert back[3:] == [0.5, 3, 0.1]


@pytest.mark.parametrize(
    "value", [object(), {1.5: 2}, {3, 4}, b"x"], ids=["object", "key", "set", "bytes"]
)
def test_what_only_pickle_could_keep_is_refused(value: Any) -> None:
    kind = type(value).__name__
    with pytest.raises(
        CheckpointError, match=f"x/key cannot be saved: it is a {kind}\n  try: .*holds no pickles"
    ):
        encode_state({"key": value}, "x", {})
