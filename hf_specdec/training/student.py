"""A draft model as the Trainer wants its model: what is trained of it, and nothing of the target."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from torch import Tensor, nn
from transformers import PreTrainedModel

from hf_specdec.drafts import own_tensors


class Student(nn.Module):
    """A distilled draft while it is trained. Its state holds what the draft does not share with the target.

    Args:
        draft: from `make_draft`.
    """

    def __init__(self, draft: PreTrainedModel) -> None:
        super().__init__()
        self.draft = draft
        self._own = {f"draft.{name}" for name in own_tensors(draft)}
        self.register_state_dict_post_hook(_drop_shared)  # type: ignore[no-untyped-call]

    def forward(self, input_ids: Tensor, positions: Tensor) -> Tensor:
        """What the draft's head reads, `[N, H]`, at N places in the flattened `input_ids`, int64 `[B, T]`.

        Texts must be padded on the right: then nothing in a text sees the padding, and no mask is needed.
        """
        states: Tensor = self.draft.base_model(input_ids=input_ids, use_cache=False).last_hidden_state
        return states.flatten(0, 1)[positions]

    def load_state_dict(self, state_dict: Mapping[str, Any], strict: bool = True, assign: bool = False) -> Any:
        """Load it; what is shared is not missed."""
        result = super().load_state_dict(state_dict, strict=False, assign=assign)
        missing = [name for name in result.missing_keys if name in self._own]
        if strict and (missing or result.unexpected_keys):
            raise RuntimeError(f"missing: {missing}, unexpected: {result.unexpected_keys}")
        return type(result)(missing, result.unexpected_keys)


def _drop_shared(module: nn.Module, state: dict[str, Any], prefix: str, metadata: Any) -> None:
    assert isinstance(module, Student)
    for name in [name for name in state if name.startswith(prefix) and name.removeprefix(prefix) not in module._own]:
        del state[name]
