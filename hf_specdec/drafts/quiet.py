"""Models built of tensors that are in memory already: nothing that transformers says of loading is news."""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

from transformers.utils.logging import set_tqdm_hook

# Hook and filter are global in transformers; two threads that took turns would put back each other's.
_lock = threading.RLock()


@contextmanager
def quiet_loading() -> Iterator[None]:
    """Without transformers' bar "Loading weights" and its "LOAD REPORT", in this thread, inside the block.

    Levels, handlers and whether bars are on stay as the user set them; so do bars and messages of other threads.
    """
    thread = threading.get_ident()

    def without_bar(factory: Callable[..., Any], args: tuple[Any, ...], settings: dict[str, Any]) -> Any:
        if threading.get_ident() == thread:
            return factory(*args, **settings | {"disable": True})
        return factory(*args, **settings) if before is None else before(factory, args, settings)

    def without_report(record: logging.LogRecord) -> bool:
        return threading.get_ident() != thread or "LOAD REPORT" not in record.getMessage()

    logger = logging.getLogger("transformers.modeling_utils")
    with _lock:
        before: Callable[..., Any] | None = set_tqdm_hook(without_bar)
        logger.addFilter(without_report)
        try:
            yield
        finally:
            logger.removeFilter(without_report)
            set_tqdm_hook(before)
