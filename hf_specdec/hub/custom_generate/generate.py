"""Runs hf_specdec inside `model.generate(custom_generate=<this repo>, trust_remote_code=True, strategy=...)`."""

import hf_specdec


def generate(model, strategy="prompt_lookup", **kwargs):  # type: ignore[no-untyped-def]
    """Called by transformers with everything that `generate` was given."""
    given = {name: value for name, value in kwargs.items() if value is not None}
    return hf_specdec.generate(model, strategy=strategy, **given)
