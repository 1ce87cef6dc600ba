"""Pretrained models of transformers: from a folder, or from the hub by name."""

import hashlib
import importlib
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
    with named(name):
        config = library().AutoConfig.from_pretrained(name, num_labels=outputs)
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
    with named(name), quiet():
        model: nn.Module = library().AutoModelForSequenceClassification.from_pretrained(
            name, config=config, dtype=torch.float32
        )
    return model


def load_tokenizer(name: str, **options: Any) -> Any:
    """The model's tokenizer; one without padding pads with its end of text."""
    with named(name):
        tokenizer = library().AutoTokenizer.from_pretrained(name, **options)
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
    library()  # says what to install
    from transformers.utils.hub import cached_file, extract_commit_hash

    with named(name):
        found = cached_file(name, "config.json")
    return {f"model/{name}": extract_commit_hash(str(found), None) or "unknown commit"}


def library(*beside: str) -> Any:
    """transformers, and what else must be there with it; or a sentence that says how to have them."""
    for name in ("transformers", *beside):
        try:
            importlib.import_module(name)
        except ImportError as error:
            raise AlignmentError(f"This needs {name}: pip install 'alignattn[hf]'") from error
    return importlib.import_module("transformers")


@contextmanager
def named(name: str) -> Iterator[None]:
    """Errors of transformers and the hub, in one sentence that says what was looked for."""
    try:
        yield
    except (OSError, ValueError, ImportError) as error:
        first = next(iter(str(error).strip().splitlines()), type(error).__name__)
        raise DataError(
            f"The model {name!r} cannot be loaded: {first} Name a folder that holds one, or a name on the hub: "
            "--model MODEL."
        ) from error


@contextmanager
def quiet() -> Iterator[None]:
    """A fresh head is what we want: transformers need not warn of it, nor tell of its own steps."""
    logging = library().utils.logging
    level, bars = logging.get_verbosity(), logging.is_progress_bar_enabled()
    logging.set_verbosity_error()
    logging.disable_progress_bar()
    try:
        yield
    finally:
        logging.set_verbosity(level)
        if bars:
            logging.enable_progress_bar()


def _sha256(file: Path) -> str:
    with file.open("rb") as opened:
        return hashlib.file_digest(opened, "sha256").hexdigest()
