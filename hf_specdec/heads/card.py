"""The model card of heads, from what they are and what was measured of them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING

from huggingface_hub import ModelCard, ModelCardData

from hf_specdec.heads.choices import expected_tokens

if TYPE_CHECKING:
    from hf_specdec.heads.medusa import MedusaHeads

# The first line of the body: a card without it was written by a person and is left alone.
MARK = "<!-- written by hf_specdec -->"

_TEMPLATE = """---
{{ card_data }}
---
{{ mark }}

# {{ title }}

{{ summary }}

```python
import hf_specdec
from hf_specdec import MedusaHeads
from transformers import AutoModelForCausalLM, AutoTokenizer

name = "{{ base_model or 'name-of-the-base-model' }}"
tokenizer, model = AutoTokenizer.from_pretrained(name), AutoModelForCausalLM.from_pretrained(name)
heads = MedusaHeads.from_pretrained("{{ repo }}")
hf_specdec.enable(model)
output = model.generate(**tokenizer("Once upon a time", return_tensors="pt"), strategy=heads)
```

The text is that of the base model: heads draft, and the model checks every token.

## Heads

{{ heads }}
{% if accuracy %}
## Accuracy

How often a head's guess of each rank was the token that came, on held-out text. Heads and ranks count from 0.

{{ accuracy }}
{% endif %}{% for title, text in sections %}
## {{ title }}

{{ text }}
{% endfor %}"""

_RANKS = 5


def medusa_card(heads: MedusaHeads, data: ModelCardData, sections: Mapping[str, str], repo: str) -> ModelCard:
    """Write the card.

    Args:
        heads: what it is about.
        data: the block of metadata.
        sections: title to Markdown, behind what is known from the heads.
        repo: what to load them from.
    """
    named = f" for {heads.base_model}" if heads.base_model else ""
    card: ModelCard = ModelCard.from_template(
        data,
        template_str=_TEMPLATE,
        mark=MARK,
        title=f"Medusa heads{named}",
        summary=(
            f"{heads.num_heads} Medusa heads (Cai et al. 2024, https://arxiv.org/abs/2401.10774){named}: small "
            "networks that read its last hidden state and guess the tokens after the next one, so that one forward of "
            "the model can check several tokens."
        ),
        base_model=heads.base_model,
        repo=repo,
        heads=_table(("", ""), _facts(heads)),
        accuracy=_accuracy(heads.rank_rates) if heads.rank_rates else "",
        sections=list(sections.items()),
    )
    return card


def _facts(heads: MedusaHeads) -> list[tuple[str, str]]:
    tokens = "all of the vocabulary"
    if heads.num_guessable != heads.vocab_size:
        tokens = f"the {heads.num_guessable:,} tokens of `token_map`, of {heads.vocab_size:,}"
    facts = [
        ("heads", str(heads.num_heads)),
        ("residual blocks of each", str(heads.num_layers)),
        ("hidden size", f"{heads.hidden_size:,}"),
        ("guess among", tokens),
        ("output matrix", "one for each head" if heads.own_output else "that of the base model"),
    ]
    if heads.tree is not None:
        facts.append(("tree", f"{len(heads.tree)} nodes, {max(map(len, heads.tree))} deep"))
        if heads.rank_rates is not None and all(
            node[-1] < len(heads.rank_rates[len(node) - 1]) for node in heads.tree
        ):
            tokens_per_forward = expected_tokens(heads.tree, heads.rank_rates)
            facts.append(("tokens per forward that it promises", f"{tokens_per_forward:.2f}"))
    return facts


def _accuracy(rank_rates: Sequence[Sequence[float]]) -> str:
    num_ranks = min(_RANKS, max(map(len, rank_rates)))
    header = ("head", *(f"rank {rank}" for rank in range(num_ranks)), f"first {num_ranks}")
    rows = []
    for index, rates in enumerate(rank_rates):
        first = [f"{rate:.3f}" for rate in rates[:num_ranks]]
        rows.append((str(index), *first, *[""] * (num_ranks - len(first)), f"{sum(rates[:num_ranks]):.3f}"))
    return _table(header, rows)


def _table(header: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    return "\n".join(f"| {' | '.join(row)} |" for row in (header, ["---"] * len(header), *rows))
