"""What a folder says about the distilled draft in it."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import Any, Self

from transformers import PreTrainedModel

from hf_specdec.errors import ArgumentError, DraftModelError

MODEL_TYPE = "hf_specdec_draft"


@dataclass(frozen=True)
class DraftRecord:
    """Of which model a draft was made, and of which part of it.

    Args:
        architecture: class of the target.
        hidden_size: that of the target.
        vocab_size: that of the target.
        num_hidden_layers: that of the target.
        layers: the target's layers that it was made of.
        draft_vocab_size: D, or None for all tokens.
        own_output: whether the output matrix was trained too, and is stored.
        base_model: name of the target.
    """

    architecture: str
    hidden_size: int
    vocab_size: int
    num_hidden_layers: int
    layers: tuple[int, ...]
    draft_vocab_size: int | None
    own_output: bool
    base_model: str | None

    @classmethod
    def of(cls, draft: PreTrainedModel) -> Self:
        """The record that `make_draft` and `load_draft` leave in a draft's config.

        Raises:
            ArgumentError: another model.
        """
        record = getattr(draft.config, MODEL_TYPE, None)
        if record is None:
            raise ArgumentError(f"this {type(draft).__name__} is no distilled draft; make one with make_draft")
        return cls.from_dict(record)

    @classmethod
    def from_dict(cls, record: dict[str, Any]) -> Self:
        """From the fields of config.json.

        Raises:
            ArgumentError: fields are missing.
        """
        names = cls.__dataclass_fields__
        missing = names.keys() - record.keys()
        if record.get("model_type", MODEL_TYPE) != MODEL_TYPE or missing:
            raise ArgumentError(
                f"this config is of model type {record.get('model_type')!r}, not {MODEL_TYPE!r}, so load it with "
                "AutoModelForCausalLM"
                if record.get("model_type") != MODEL_TYPE
                else f"the draft's config.json lacks {', '.join(sorted(missing))}; write it anew with save_draft"
            )
        return cls(**{name: record[name] for name in names} | {"layers": tuple(record["layers"])})

    def to_dict(self) -> dict[str, Any]:
        """The fields of config.json."""
        return {"model_type": MODEL_TYPE, **asdict(self)}

    def check(self, target: PreTrainedModel) -> None:
        """Is this the model that the draft was made of?

        Raises:
            DraftModelError: it is another.
        """
        config = target.config.get_text_config(decoder=True)
        pairs = {
            "hidden size": (self.hidden_size, config.hidden_size),
            "vocabulary": (self.vocab_size, config.vocab_size),
            "number of layers": (self.num_hidden_layers, config.num_hidden_layers),
            "class": (self.architecture, type(target).__name__),
        }
        for name, (ours, theirs) in pairs.items():
            if ours != theirs:
                raise DraftModelError(
                    f"the draft was made for {self.base_model or 'a model'} with {name} {ours}; the {name} of this "
                    f"target is {theirs}: load it for the model that it was made for"
                )
