"""What can be trained: one file a task. A new one is a class in a file, and a line here."""

from collections.abc import Mapping

from alignattn.experiments.tasks.digits import Digits
from alignattn.experiments.tasks.graph import BlockClassification, NodeClassification
from alignattn.experiments.tasks.task import SeedsAtOnce, Task
from alignattn.experiments.tasks.text import TextClassification

TASKS: Mapping[str, type[Task]] = {
    "blocks": BlockClassification,
    "digits": Digits,
    "graph": NodeClassification,
    "text": TextClassification,
}

__all__ = ["TASKS", "SeedsAtOnce", "Task"]
