"""Rows of a file as batches for a model, and the model that is given them: as `finetune` reads and loads them.

The bare model is loaded, without a head for any task: so the attention modules of a checkpoint go by the same names
before and after it was fine-tuned.
"""

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from alignattn.datasets.reading import sha256
from alignattn.diagnosis.draws import mixed, start
from alignattn.errors import ConfigError
from alignattn.finetune import columns, labels, tables
from alignattn.finetune.model import encode, length_limit
from alignattn.finetune.model import load_tokenizer as tokenizer_of
from alignattn.models import pretrained

Batch = dict[str, Tensor]


@dataclass(frozen=True)
class Rows:
    """What was read: rows of token numbers, and what there is to know about them."""

    encoded: list[dict[str, Any]]
    tokenizer: Any
    task: str  # "tokens" where the rows are lists of words
    texts: list[Any]
    length: int
    told: dict[str, Any]  # for the diagnosis: columns, rows, SHA-256

    def batches(self, size: int) -> list[Batch]:
        """Padded, in the order of the file."""
        parts = [self.encoded[i : i + size] for i in range(0, len(self.encoded), size)]
        return [dict(self.tokenizer.pad(part, return_tensors="pt")) for part in parts]


def read_rows(
    model: str, data: Path, *, text: tuple[str, ...] | None, rows: int, max_length: int | None, seed: int
) -> Rows:
    """At most so many rows of a file, drawn at random, as token numbers of a model."""
    table = tables.read(data)
    names = columns.find_texts(table, text)
    task = "tokens" if all(isinstance(cell, list) for cell in table.column(names[0])) else "classification"
    if task == "tokens" and len(names) > 1:
        raise ConfigError("Rows of tokens are taken from one column, not two.")
    texts = labels.texts_of(table, columns.Columns(names, ""), task)
    chosen = _some(len(texts), rows, seed)
    drawn = [texts[i] for i in chosen]
    with pretrained.quiet():
        tokenizer = tokenizer_of(model, task)
        length = length_limit(model, tokenizer, max_length)
        encoded = _encoded(tokenizer, task, drawn, length)
    told = {
        "data": data.name,
        "text": list(names),
        "rows": len(drawn),
        "rows_in_file": len(texts),
        "max_length": length,
        "inputs": {"data": sha256(data)},
    }
    return Rows(encoded, tokenizer, task, drawn, length, told)


def check_same_tokens(rows: Rows, other: str) -> None:
    """An error where another model would be given other token numbers for the same rows."""
    with pretrained.quiet():
        tokenizer = tokenizer_of(other, rows.task)
        if _encoded(tokenizer, rows.task, rows.texts, rows.length) != rows.encoded:
            raise ConfigError(
                f"The tokenizer of {other} makes other tokens of the same rows: the two models cannot be measured on "
                "the same batches. Diagnose each by itself."
            )


def load(name: str, device: torch.device) -> nn.Module:
    """The bare model, in float32."""
    with pretrained.named(name), pretrained.quiet():
        model: nn.Module = pretrained.library().AutoModel.from_pretrained(name, dtype=torch.float32)
    return model.to(device).eval()


def feed_rows(model: nn.Module, batch: Batch) -> object:
    """A batch on the model's device; a decoder behind an encoder reads the same rows, as sequence classifiers do."""
    device = next(model.parameters()).device
    given = {name: tensor.to(device) for name, tensor in batch.items()}
    if getattr(getattr(model, "config", None), "is_encoder_decoder", False):
        given |= {"decoder_input_ids": given["input_ids"], "decoder_attention_mask": given["attention_mask"]}
    return model(**given)


def _some(count: int, wanted: int, seed: int) -> list[int]:
    """In their order."""
    numbers = mixed(*start(seed, torch.arange(count), torch.device("cpu")))
    return sorted(numbers.argsort()[:wanted].tolist())


def _encoded(tokenizer: Any, task: str, texts: list[Any], length: int) -> list[dict[str, Any]]:
    nothing = [[0] * len(text) for text in texts] if task == "tokens" else [0] * len(texts)
    encoded, _ = encode(tokenizer, task, texts, nothing, length)
    return [{name: value for name, value in row.items() if name != "labels"} for row in encoded]
