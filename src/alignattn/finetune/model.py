"""The pretrained model with a fresh head for the task, its tokenizer, and rows as it takes them."""

from typing import Any

import torch
from torch import nn

from alignattn.errors import ConfigError
from alignattn.finetune.labels import Labels, id2label
from alignattn.finetune.scores import LABEL_OF_NONE
from alignattn.models import pretrained

PROBLEMS = {
    "classification": "single_label_classification",
    "multilabel": "multi_label_classification",
    "regression": "regression",
}
WANT_PREFIX_SPACE = {"bloom", "gpt2", "roberta", "deberta", "bart", "longformer"}  # to be given words one by one
USUAL_LENGTH = 512
CHUNK = 1000  # rows that a tokenizer is given at once


def load_tokenizer(name: str, task: str) -> Any:
    """The model's tokenizer; for tokens one that tells which word a piece is of."""
    with pretrained.named(name):
        kind = pretrained.library().AutoConfig.from_pretrained(name).model_type
    tokens = task == "tokens"
    options = {"add_prefix_space": True} if tokens and kind in WANT_PREFIX_SPACE else {}
    tokenizer = pretrained.load_tokenizer(name, **options)
    if tokens and not tokenizer.is_fast:
        raise ConfigError(f"The tokenizer of {name} does not tell which word a piece is of: take another model.")
    return tokenizer


def load_model(name: str, labels: Labels, padding: int) -> nn.Module:
    """The model in float32. Its head is drawn from torch's generator: seed that first."""
    library = pretrained.library()
    naming: dict[str, Any] = {"num_labels": 1}
    if labels.names:
        names = id2label(labels)
        naming = {"id2label": names, "label2id": {label: i for i, label in names.items()}}
    kind = library.AutoModelForTokenClassification
    if labels.task in PROBLEMS:
        kind = library.AutoModelForSequenceClassification
        naming["problem_type"] = PROBLEMS[labels.task]
    with pretrained.named(name):
        model: nn.Module = kind.from_pretrained(
            name, **naming, pad_token_id=padding, dtype=torch.float32, ignore_mismatched_sizes=True
        )
    return model


def length_limit(name: str, tokenizer: Any, wanted: int | None) -> int:
    """Tokens of a row: what is wanted, or what the model takes, 512 at most."""
    with pretrained.named(name):
        config = pretrained.library().AutoConfig.from_pretrained(name)
    takes = [tokenizer.model_max_length, getattr(config, "max_position_embeddings", None) or USUAL_LENGTH]
    limit = min(takes) if takes[0] < 1_000_000 else takes[1]  # a tokenizer that knows no limit says 1e30
    if wanted is None:
        return int(min(limit, USUAL_LENGTH))
    if wanted > limit:
        raise ConfigError(f"--max-length is {wanted}, and {name} takes {limit} tokens at most.")
    return wanted


def encode(tokenizer: Any, task: str, texts: list[Any], labels: list[Any], length: int) -> tuple[list[Any], int]:
    """Rows for the Trainer, and how many of them were cut off at `length` tokens."""
    rows, cut = [], 0
    for start in range(0, len(texts), CHUNK):
        parts = texts[start : start + CHUNK]
        if task == "tokens":
            found = tokenizer(parts, is_split_into_words=True, truncation=True, max_length=length)
            words = [found.word_ids(i) for i in range(len(parts))]
            targets = [_first_pieces(w, y) for w, y in zip(words, labels[start : start + CHUNK], strict=True)]
            cut += sum(len({*w} - {None}) < len(p) for w, p in zip(words, parts, strict=True))
        else:
            found = tokenizer(*map(list, zip(*parts, strict=True)), truncation=True, max_length=length)
            targets = labels[start : start + CHUNK]
            full = [p for p, ids in zip(parts, found["input_ids"], strict=True) if len(ids) == length]
            cut += sum(len(tokenizer(*p, verbose=False)["input_ids"]) > length for p in full)
        rows += [{**{k: found[k][i] for k in found}, "labels": y} for i, y in enumerate(targets)]
    return rows, cut


def _first_pieces(words: list[int | None], tags: list[int]) -> list[int]:
    """A word's label for its first piece, none for the others."""
    before = [None, *words[:-1]]
    return [LABEL_OF_NONE if w is None or w == b else tags[w] for w, b in zip(words, before, strict=True)]
