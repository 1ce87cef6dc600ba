"""Pretrained models of transformers: from a folder, or from the hub by name."""

import hashlib
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from torch import nn

from alignattn.errors import AlignmentError, ConfigError, DataError

# What model families call their dropout rates; a family has some of them.
DROPOUTS = (
    "hidden_dropout_prob",
    "attention_probs_dropout_prob",
    "dropout",
    "attention_dropout",
    "hidden_dropout",
    "mlp_dropout",
    "embedding_dropout",
    "resid_pdrop",
    "embd_pdrop",
    "attn_pdrop",
)
CLASSIFIER_DROPOUTS = ("classifier_dropout", "classifier_dropout_prob", "seq_classif_dropout", "summary_first_dropout")


def load_model(
    name: str, *, outputs: int, dropout: float | None, classifier_dropout: float | None, padding: int
) -> nn.Module:
    """A classifier in float32 with a fresh head; the rates given take the place of the model's own."""
    transformers = _transformers()
    with _named(name):
        config = transformers.AutoConfig.from_pretrained(name, num_labels=outputs)
    for what, rate, names in (
        ("dropout", dropout, DROPOUTS),
        ("classifier_dropout", classifier_dropout, CLASSIFIER_DROPOUTS),
    ):
        if rate is None:
            continue
        found = [setting for setting in names if hasattr(config, setting)]
        if not found:
            raise ConfigError(f"model.{what} cannot be set: {type(config).__name__} has none of {', '.join(names)}.")
        for setting in found:
            setattr(config, setting, rate)
    config.pad_token_id = padding
    with _named(name), _quiet(transformers):
        model: nn.Module = transformers.AutoModelForSequenceClassification.from_pretrained(
            name, config=config, dtype=torch.float32
        )
    return model


def load_tokenizer(name: str) -> Any:
    """The model's tokenizer; one without padding pads with its end of text."""
    with _named(name):
        tokenizer = _transformers().AutoTokenizer.from_pretrained(name)
    if tokenizer.pad_token is None:
        tokenizer.pad_token = tokenizer.eos_token
    if tokenizer.pad_token_id is None:
        raise ConfigError(f"The tokenizer of {name} has neither a padding nor an end-of-text token.")
    return tokenizer


def fingerprints(name: str) -> Mapping[str, str]:
    """SHA-256 of each file of a model's folder that decides what it computes; of a model on the hub, its commit."""
    folder = Path(name)
    if folder.is_dir():
        files = [f for f in sorted(folder.iterdir()) if f.suffix in {".json", ".safetensors", ".bin", ".txt", ".model"}]
        if not (folder / "config.json").is_file():
            raise DataError(f"{folder} holds no model: there is no config.json in it.")
        return {f"model/{file.name}": _sha256(file) for file in files}
    _transformers()
    from transformers.utils.hub import cached_file, extract_commit_hash

    with _named(name):
        found = cached_file(name, "config.json")
    return {f"model/{name}": extract_commit_hash(str(found), None) or "unknown commit"}


@contextmanager
def _named(name: str) -> Iterator[None]:
    """Errors of the hub, in one sentence that says what was looked for."""
    try:
        yield
    except (OSError, ValueError) as error:
        first = next(iter(str(error).strip().splitlines()), type(error).__name__)
        raise DataError(
            f"The model {name!r} cannot be loaded: {first} Name a folder that holds one: --model FOLDER."
        ) from error


@contextmanager
def _quiet(transformers: Any) -> Iterator[None]:
    """A fresh head is what we want: transformers need not warn of it."""
    logging = transformers.utils.logging
    level, bars = logging.get_verbosity(), logging.is_progress_bar_enabled()
    logging.set_verbosity_error()
    logging.disable_progress_bar()
    try:
        yield
    finally:
        logging.set_verbosity(level)
        if bars:
            logging.enable_progress_bar()


def _transformers() -> Any:
    try:
        import transformers
    except ImportError as error:
        raise AlignmentError("This needs transformers: pip install 'alignattn[hf]'") from error
    return transformers


def _sha256(file: Path) -> str:
    with file.open("rb") as opened:
        return hashlib.file_digest(opened, "sha256").hexdigest()
