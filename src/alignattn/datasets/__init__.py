"""Sentence and sentence-pair tasks, read from a folder in the official file formats; the standard library suffices.

>>> from alignattn.datasets import load
>>> data = load("mrpc", "dev", "glue_data")  # doctest: +SKIP
>>> data.texts[0], data.classes[data.labels[0]], data.sha256  # doctest: +SKIP

`DATASETS` says what there is. What was left out is counted in `left_out` (the format says so) and `malformed`.
"""

from alignattn.datasets.loading import Malformed, TextDataset, load
from alignattn.datasets.registry import DATASETS, DatasetSpec

__all__ = ["DATASETS", "DatasetSpec", "Malformed", "TextDataset", "load"]
