"""Short names for exactly this model and exactly these texts, to tell what files on disk were made from."""

from __future__ import annotations

import hashlib
from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor
from transformers import PreTrainedModel

from hf_specdec.training.texts import Example

_VALUES_OF_A_WEIGHT = 1024


def model_fingerprint(model: PreTrainedModel) -> str:
    """A name that changes with the configuration, the number format, and any training of the weights.

    Of each weight evenly spaced values are read, not all, so large models take no minutes. Where the model lies and
    where it was loaded from plays no part.
    """
    config = {name: value for name, value in model.config.to_dict().items() if name not in _NOT_THE_MODEL}
    digest = hashlib.sha256(repr(sorted((name, repr(value)) for name, value in config.items())).encode())
    for name, weight in sorted(model.state_dict().items()):
        if isinstance(weight, Tensor):
            digest.update(f"{name} {tuple(weight.shape)} {weight.dtype}".encode())
            digest.update(_sample(weight))
    return digest.hexdigest()[:16]


def examples_fingerprint(examples: Sequence[Example]) -> str:
    """A name for these texts in this order."""
    digest = hashlib.sha256()
    for one in examples:
        digest.update(np.array([one.num_prompt, len(one.input_ids), *one.input_ids], dtype=np.int64).tobytes())
    return digest.hexdigest()[:16]


_NOT_THE_MODEL = frozenset({"_name_or_path", "architectures", "transformers_version", "use_cache"})


def _sample(weight: Tensor) -> bytes:
    flat = weight.detach().reshape(-1)
    spaced = flat[:: max(len(flat) // _VALUES_OF_A_WEIGHT, 1)].cpu().contiguous()
    return spaced.view(torch.uint8).numpy().tobytes()
