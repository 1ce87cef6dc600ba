"""Small models that many tests attach to."""

import weakref
from collections.abc import Iterator
from typing import Any

import pytest
import torch


def pytest_configure(config: pytest.Config) -> None:
    # Warnings of ours that are attributed to the caller's line. pyproject.toml says why this stands here.
    config.addinivalue_line("filterwarnings", "error::alignattn.errors.AlignmentWarning")
    torch.set_num_threads(1)  # the models are tiny, and threads of several workers only wait for each other


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Each worker begins with a share of all tests, in their order: what takes minutes stands first in a share."""
    long = [item for item in items if item.nodeid.split("::")[-1].startswith("test_in_the_interpreter")]
    chosen = set(long)
    others = [item for item in items if item not in chosen]
    workers = getattr(config, "workerinput", {}).get("workercount", 1)
    for number, item in enumerate(long):
        others.insert(number % workers * len(others) // workers, item)
    items[:] = others


@pytest.fixture(autouse=True)
def _seeded() -> None:
    torch.manual_seed(0)


@pytest.fixture(autouse=True)
def _detached_at_the_end(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Models that a test leaves attached would be seen in the modeling files by the next, until they are collected."""
    from alignattn.alignment import Alignment

    attached: list[weakref.ref[Alignment]] = []
    attach = Alignment.attach

    def remember(self: Alignment, *args: Any, **kwargs: Any) -> Alignment:
        attached.append(weakref.ref(self))
        return attach(self, *args, **kwargs)

    monkeypatch.setattr(Alignment, "attach", remember)
    yield
    for reference in attached:
        alignment = reference()
        if alignment is not None:
            alignment.detach()


@pytest.fixture
def bert():
    from transformers import BertConfig, BertForSequenceClassification

    config = BertConfig(vocab_size=50, hidden_size=32, num_hidden_layers=3, num_attention_heads=4, intermediate_size=64)
    return BertForSequenceClassification(config).train()


@pytest.fixture
def batch() -> dict[str, torch.Tensor]:
    """Three sentences of seven tokens, the first two padded, with labels."""
    generator = torch.Generator().manual_seed(0)
    mask = torch.ones(3, 7, dtype=torch.long)
    mask[0, 4:] = 0
    mask[1, 6:] = 0
    return {
        "input_ids": torch.randint(5, 50, (3, 7), generator=generator),
        "attention_mask": mask,
        "labels": torch.tensor([0, 1, 1]),
    }


@pytest.fixture
def encoder() -> torch.nn.TransformerEncoder:
    layer = torch.nn.TransformerEncoderLayer(16, 4, 32, dropout=0.0, batch_first=True)
    return torch.nn.TransformerEncoder(layer, 2, enable_nested_tensor=False)
