from __future__ import annotations

from typing import Any

import pytest
import torch

from hf_specdec.errors import ArgumentError
from hf_specdec.training.texts import Example
from hf_specdec.training.vocabulary import coverage, frequent_tokens

# Answers hold 5 three times, 7 twice, 2 once; prompts 9 twice, 8 and 5 once.
EXAMPLES = [Example([9, 9, 5, 7, 5], 2), Example([8, 5, 5, 7, 2], 2)]


@pytest.mark.parametrize(
    ("size", "options", "expected"),
    [
        (2, {}, [5, 7]),
        (3, {}, [5, 7, 2]),
        (6, {}, [5, 7, 2, 9, 8, 0]),
        (9, {"vocab_size": 20}, [5, 7, 2, 9, 8, 0, 1, 3, 4]),
        (3, {"always": [2, 1]}, [5, 2, 1]),
        (3, {"vocab_size": 20, "always": [15]}, [5, 7, 15]),
        (2, {"always": [5]}, [5, 7]),
    ],
)
def test_the_most_frequent_tokens_of_answers(size: int, options: dict[str, Any], expected: list[int]) -> None:
    found = frequent_tokens(EXAMPLES, size, **options)
    assert found.dtype == torch.int64
    assert found.tolist() == expected


def test_texts_without_prompts() -> None:
    assert frequent_tokens([Example([3, 1, 3], 0)], 2).tolist() == [3, 1]


def test_coverage() -> None:
    assert coverage(EXAMPLES, torch.tensor([5, 7])) == pytest.approx(5 / 6)
    assert coverage(EXAMPLES, torch.tensor([9, 15])) == 0
    assert coverage(EXAMPLES, frequent_tokens(EXAMPLES, 3)) == 1


@pytest.mark.parametrize(
    ("size", "options", "message"),
    [
        (0, {}, "size=0 .* at least 1 and at most the target's 10"),
        (11, {}, "size=11 .* at most the target's 10"),
        (1, {"always": [1, 2]}, "size=1 .* at least 2"),
        (2, {"vocab_size": 9}, "beyond the target's vocabulary of 9"),
        (2, {"vocab_size": 12, "always": [12]}, "beyond the target's vocabulary of 12"),
    ],
)
def test_refusals(size: int, options: dict[str, Any], message: str) -> None:
    with pytest.raises(ArgumentError, match=message):
        frequent_tokens(EXAMPLES, size, **options)
