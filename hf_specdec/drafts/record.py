"""What a folder says about the distilled draft in it."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import Any, Self

from transformers import PreTrainedModel

from hf_specdec.drafts.cut import require_whole_layers
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

    def __post_init__(self) -> None:
        require_whole_layers(self.layers)
        for name in ("hidden_size", "vocab_size", "num_hidden_layers", "draft_vocab_size"):
            value = getattr(self, name)
            if not (type(value) is int and value >= 1 or value is None and name == "draft_vocab_size"):
                raise ArgumentError(f"{name} must be a whole number of at least 1, not {value!r}")
        if not isinstance(self.architecture, str):
            raise ArgumentError(f"architecture must be the name of a class, not {self.architecture!r}")
        if not isinstance(self.own_output, bool):
            raise ArgumentError(f"own_output must be true or false, not {self.own_output!r}")
        if not isinstance(self.base_model, str | None):
            raise ArgumentError(f"base_model must be the name of a model or None, not {self.base_model!r}")
        if self.own_output and self.draft_vocab_size is None:
            raise ArgumentError("own_output needs a token_map: the rows that the draft is to own")

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
            ArgumentError: fields are missing or wrong.
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
        fields = {name: record[name] for name in names}
        if isinstance(record["layers"], list):  # JSON has no tuples
            fields["layers"] = tuple(record["layers"])
        try:
            return cls(**fields)
        except ArgumentError as error:
            raise ArgumentError(f"the draft's config.json is wrong: {error}; write it anew with save_draft") from error

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
