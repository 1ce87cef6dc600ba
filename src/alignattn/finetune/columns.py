"""Which columns hold the text and which the label: given, or found by their names."""

from dataclasses import dataclass
from typing import Any

from alignattn.errors import ConfigError, DataError
from alignattn.finetune.tables import Table

LABELS = (
    *("label", "labels", "gold_label", "target", "class", "category", "ner_tags", "tags", "pos_tags"),
    *("score", "rating", "stars", "sentiment", "intent"),
)
TAGS = ("tags", "ner_tags", "pos_tags")
PAIRS = (
    *(("sentence1", "sentence2"), ("premise", "hypothesis"), ("question1", "question2"), ("text1", "text2")),
    *(("text_a", "text_b"), ("question", "context"), ("question", "sentence"), ("question", "answer")),
    *(("query", "passage"), ("query", "document")),
)
TEXTS = (
    *("text", "sentence", "review", "content", "document", "comment", "tweet", "utterance", "body", "message"),
    *("question", "query", "title"),
)
TOKENS = ("tokens", "words")
NEVER_TEXT = ("id", "idx", "index", "guid", "pairid", "promptid", "")


@dataclass(frozen=True)
class Columns:
    """One text column or two, and the label's."""

    texts: tuple[str, ...]
    label: str


def find(table: Table, texts: tuple[str, ...] | None, label: str | None) -> Columns:
    """The columns given, each checked to be there; those not given are looked for by the usual names."""
    for name in (*(texts or ()), *((label,) if label is not None else ())):
        table.require(name)
    _one_or_two(texts)
    if label is None:
        label = _named(table, [name for name in LABELS if texts is None or name not in texts], "label", "--label")
    if texts is None:
        texts = _texts(table, label)
    if label in texts:
        raise ConfigError(f"The column {label!r} cannot be both text and label.")
    return Columns(texts, label)


def find_texts(table: Table, texts: tuple[str, ...] | None) -> tuple[str, ...]:
    """The text columns alone, for whom labels are nothing to: given, or looked for beside what may be a label."""
    for name in texts or ():
        table.require(name)
    _one_or_two(texts)
    if texts is not None:
        return texts
    lower = {column.lower(): column for column in table.columns}
    return _texts(table, next((lower[name] for name in LABELS if name in lower), None))


def _one_or_two(texts: tuple[str, ...] | None) -> None:
    if texts is not None and len(texts) > 2:
        raise ConfigError(f"--text takes one column, or two for sentence pairs; got {len(texts)}: {', '.join(texts)}.")


def _named(table: Table, names: list[str], what: str, option: str) -> str:
    lower = {column.lower(): column for column in table.columns}
    for name in names:
        if name in lower:
            return lower[name]
    raise DataError(
        f"{table.path} has no column with a usual name for the {what}. It has: {', '.join(table.columns)}. "
        f"Say which one: {option} COLUMN."
    )


def _texts(table: Table, label: str | None) -> tuple[str, ...]:
    lower = {column.lower(): column for column in table.columns if column != label}
    for names in PAIRS:
        if all(name in lower for name in names):
            return tuple(lower[name] for name in names)
    for name in (*TOKENS, *TEXTS) if label is not None and label.lower() in TAGS else (*TEXTS, *TOKENS):
        if name in lower:
            return (lower[name],)
    others = [column for name, column in lower.items() if name not in NEVER_TEXT and _is_text(table, column)]
    if len(others) == 1:
        return (others[0],)
    seen = "none holds text" if not others else f"{', '.join(others)} hold text"
    raise DataError(
        f"{table.path} has no column with a usual name for the text, and of the others {seen}. It has: "
        f"{', '.join(table.columns)}. Say which one: --text COLUMN, or two for sentence pairs."
    )


def _is_text(table: Table, column: str) -> bool:
    cells = [row.get(column) for row in table.rows]
    return all(isinstance(cell, str) for cell in cells) and not all(_is_number(cell) for cell in cells)


def _is_number(cell: Any) -> bool:
    try:
        float(cell)
    except ValueError:
        return False
    return True
