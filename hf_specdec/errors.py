"""All exceptions of the package.

SpecDecError
|-- ArgumentError            (ValueError)           a wrong argument; names it and the cure
|-- UnsupportedError         (NotImplementedError)  a feature of generate() that is not honoured here
|   `-- UnsupportedModelError                       a model whose forward cannot verify drafts exactly
|-- DraftModelError          (ValueError)           a draft model that cannot serve this target
|-- DrafterError             (RuntimeError)         a drafter returned something that is not a draft tree
`-- NonFiniteLogitsError     (RuntimeError)         NaN or infinite logits where a token had to be chosen
"""

from __future__ import annotations


class SpecDecError(Exception):
    """Base class: catch this to catch everything that hf_specdec raises on purpose."""


class ArgumentError(SpecDecError, ValueError):
    """An argument has a wrong type or value."""


class UnsupportedError(SpecDecError, NotImplementedError):
    """`generate` offers this, speculation does not honour it; refused before any forward."""


class UnsupportedModelError(UnsupportedError):
    """The model's forward cannot verify drafts exactly."""


class DraftModelError(SpecDecError, ValueError):
    """The draft model does not fit the target."""


class DrafterError(SpecDecError, RuntimeError):
    """A drafter broke its contract."""


class NonFiniteLogitsError(SpecDecError, RuntimeError):
    """The model returned logits from which no token may be chosen."""
