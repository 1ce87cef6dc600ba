"""Small data for every task."""

import json

SENTENCES = ["good film", "bad film", "the film is very good", "a dull film", "not bad", "very dull"]


def rows_of(task):
    """Twelve rows, six different ones, with the labels that the task wants."""
    labels = {
        "classification": ["pos", "neg", "pos", "neg", "pos", "neg"],
        "pairs": [0, 1, 2, 0, 1, 2],
        "multilabel": [["a", "b"], ["b"], [], ["c", "a"], ["a"], ["b", "c"]],
        "regression": [0.5, 1.25, 4.0, 3.5, 2.0, 1.0],
    }
    if task == "tokens":
        tags = {"good": "B-X", "very": "I-X", "films": "B-Y"}
        sentences = [s.replace("film", "films").split() for s in SENTENCES]
        return [{"tokens": s, "ner_tags": [tags.get(word, "O") for word in s]} for s in sentences] * 2
    texts = [{"text": s} for s in SENTENCES]
    if task == "pairs":
        texts = [{"premise": s, "hypothesis": "not good"} for s in SENTENCES]
    return [{**t, "label": y} for t, y in zip(texts, labels[task], strict=True)] * 2


def write_jsonl(path, rows):
    path.write_text("\n".join(map(json.dumps, rows)) + "\n")
    return path
