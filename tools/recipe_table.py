"""Writes docs/recipes.md from the settings classes and the shipped recipes.

python tools/recipe_table.py
"""

from dataclasses import fields
from pathlib import Path

from alignattn.experiments.recipe import REPORT, load, shipped
from alignattn.experiments.settings import AlignSettings, TrainSettings
from alignattn.experiments.tasks import TASKS
from option_table import plain, table

MODELS = {"digits": "vision transformer", "graph": "GAT", "blocks": "GAT"}  # of tasks that train one of our own
PAGE = Path(__file__).parent.parent / "docs" / "recipes.md"


def settings(cls: type) -> list[str]:
    """A table of all settings of a class."""
    return table(cls, plain([f.name for f in fields(cls)], cls))


def page() -> str:
    """The whole page."""
    tasks = ", ".join(f"`{task}`" for task in TASKS)
    lines = [
        "# Recipes",
        "",
        "How to run and write them: [experiments.md](experiments.md). `make docs` writes this page from the code.",
        "",
        "| recipe | | runs | steps | model |",
        "|---|---|---:|---:|---|",
    ]
    for name, description in shipped().items():
        recipe = load(name)
        steps = recipe.train.steps or f"{recipe.train.epochs:g} epochs"
        model = MODELS.get(recipe.task) or recipe.model.name
        lines.append(f"| `{name}` | {description} | {len(recipe.runs())} | {steps} | {model} |")
    lines += [
        "",
        "## Settings",
        "",
        f"Beside these tables: `description`, `task` ({tasks}), `seeds` (5), `report` (the metrics",
        f"that tables show: {', '.join(REPORT)}), `extends`, and `[paper]` with the `table`, `column`",
        "and, where it has several, `model` of the paper's values. What has no default must be set.",
        "",
        "### `[train]`",
        "",
        *settings(TrainSettings),
        "### `[align]`",
        "",
        *settings(AlignSettings),
    ]
    for name, task in TASKS.items():
        lines += [f'### `[data]` of task `"{name}"`', "", *settings(task.data_settings)]
        lines += [f'### `[model]` of task `"{name}"`', "", *settings(task.model_settings)]
        if task.train_settings is not TrainSettings:
            lines += [f'### `[train]` of task `"{name}"`', "", *settings(task.train_settings)]
    return "\n".join(lines).rstrip() + "\n"


if __name__ == "__main__":
    PAGE.write_text(page())
