"""Can this draft model serve this target? Asked before any forward of either."""

from __future__ import annotations

from itertools import islice

from transformers import PreTrainedModel, PreTrainedTokenizerBase

from hf_specdec.errors import ArgumentError, DraftModelError, UnsupportedError
from hf_specdec.runner import check_attention, check_runnable

# Padding a vocabulary for the hardware adds at most this many ids; more means another tokenizer.
_MAX_PADDING = 1024
_SHOWN_IDS = 5


def check_draft_model(
    target: PreTrainedModel,
    draft: object,
    tokenizer: PreTrainedTokenizerBase | None,
    assistant_tokenizer: PreTrainedTokenizerBase | None,
    chains_only: bool,
    single_row: bool,
) -> PreTrainedModel:
    """The draft model, checked.

    Raises:
        ArgumentError: not a model.
        DraftModelError: another tokenizer, or a model that cannot be driven.
    """
    if not isinstance(draft, PreTrainedModel):
        raise ArgumentError(
            f"assistant_model must be a loaded transformers model, not {type(draft).__name__}; "
            "load it with AutoModelForCausalLM.from_pretrained (and unwrap PEFT with merge_and_unload)"
        )
    try:
        check_runnable(draft)
        check_attention(draft, chains_only, single_row)
    except UnsupportedError as error:
        raise DraftModelError(f"assistant_model cannot draft: {error}") from error
    sizes = [model.config.get_text_config(decoder=True).vocab_size for model in (target, draft)]
    if tokenizer is not None and assistant_tokenizer is not None:
        _check_same_tokenizer(tokenizer, assistant_tokenizer)
    elif abs(sizes[0] - sizes[1]) > _MAX_PADDING:
        raise DraftModelError(
            f"the target knows {sizes[0]} tokens and assistant_model {sizes[1]}: they seem to have different "
            "tokenizers; take a draft model of the same family, or pass tokenizer= and assistant_tokenizer= if they "
            "are the same"
        )
    return draft


def _check_same_tokenizer(tokenizer: PreTrainedTokenizerBase, assistant_tokenizer: PreTrainedTokenizerBase) -> None:
    if tokenizer is assistant_tokenizer:
        return
    ours, theirs = ({i: token for token, i in one.get_vocab().items()} for one in (tokenizer, assistant_tokenizer))
    different = (i for i in sorted(ours.keys() & theirs.keys()) if ours[i] != theirs[i])
    first = list(islice(different, _SHOWN_IDS))
    if first:
        shown = ", ".join(f"{i}: {ours[i]!r} / {theirs[i]!r}" for i in first)
        raise DraftModelError(f"target and assistant_model have different tokenizers; first differing ids: {shown}")
    size_gap = abs(len(ours) - len(theirs))
    if size_gap > _MAX_PADDING:
        raise DraftModelError(
            f"target and assistant_model have different tokenizers: {len(ours)} and {len(theirs)} tokens"
        )
