"""How a model is looked at from outside: batches given to it in eval mode, and everything as it was behind."""

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any

from torch import nn


def feed(model: nn.Module, batch: Any) -> object:
    """A batch where nobody says how: mappings by name, tuples and lists one by one, anything else as it is."""
    if isinstance(batch, Mapping):
        return model(**batch)
    return model(*batch) if isinstance(batch, tuple | list) else model(batch)


@contextmanager
def in_eval_mode(model: nn.Module) -> Iterator[None]:
    """Every module of the model has its own mode again afterwards."""
    training = [module for module in model.modules() if module.training]
    model.eval()
    try:
        yield
    finally:
        for module in training:
            module.training = True
