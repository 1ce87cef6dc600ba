"""Imports go one way: the design's arrows, read off the source."""

import ast
from pathlib import Path

import alignattn

PACKAGE = Path(alignattn.__file__).parent

# What each part may import of the package; a part is a module or folder directly under alignattn.
ANYONE = {"arguments", "devices", "errors", "files", "processes", "weights"}
CORE = {
    "capture",
    "matching",
    "config",
    "finite",
    "objective",
    "delivery",
    "consumed",
    "precision",
    "adversary",
    "passes",
    "apart",
    "ahead",
    "stream",
    "recentre",
    "coordinates",
    "thinning",
    "balance",
    "distances",
    "health",
    "strength",
    "share",
    "updates",
    "meter",
    "state",
    "checkpoint",
    "advice",
    "traced",
    "terms",
    "alignment",
    "functional",
}
ALLOWED = {
    "arguments": set(),
    "devices": set(),
    "errors": set(),
    "files": set(),
    "processes": set(),
    "weights": set(),
    "capture": set(),
    "matching": set(),
    "metrics": set(),
    "results": set(),
    "functional": {"matching", "metrics"},
    "config": {"matching"},
    "finite": set(),
    "adversary": {"updates"},
    "apart": set(),
    "ahead": {"apart", "capture"},
    "objective": {
        "ahead",
        "balance",
        "capture",
        "config",
        "counted",
        "delivery",
        "distances",
        "finite",
        "matching",
        "replay",
        "stacks",
        "thinning",
    },
    "delivery": {"balance", "capture", "consumed", "precision", "replay"},
    "consumed": set(),
    "precision": {"matching"},
    "counted": set(),
    "replay": {"counted", "finite", "matching", "precision"},
    "stacks": {"capture", "counted", "matching"},
    "recentre": {"capture"},
    "coordinates": {"capture"},
    "thinning": {"capture"},
    "balance": {"capture"},
    "strength": {"balance", "config", "distances", "health"},
    "distances": {"matching"},
    "health": {"distances"},
    "passes": {"capture"},
    "stream": {"apart", "balance", "capture", "delivery", "matching", "objective", "passes", "precision", "thinning"},
    "traced": {"balance", "capture", "delivery", "objective", "precision"},
    "meter": set(),
    "state": {"adversary", "matching"},
    "checkpoint": {"balance", "config", "state"},
    "share": set(),
    "updates": set(),
    "advice": {"capture", "config", "matching"},
    "terms": {
        "adversary",
        "apart",
        "balance",
        "capture",
        "config",
        "delivery",
        "finite",
        "matching",
        "objective",
        "passes",
        "recentre",
        "stream",
        "strength",
        "traced",
    },
    # Alignment.callback() makes one of the integrations, imported when it is asked for.
    "alignment": {
        "adversary",
        "checkpoint",
        "integrations",
        "meter",
        "state",
        "advice",
        "capture",
        "config",
        "matching",
        "objective",
        "recentre",
        "balance",
        "strength",
        "terms",
        "passes",
        "stream",
        "share",
        "updates",
    },
    "bayesian": {"capture", "config", "matching"},
    "integrations": CORE,
    "models": CORE | {"bayesian"},
    "datasets": set(),
    "attacks": {"datasets", "metrics", "models"},
    "plots": {"results"},
    "provenance": {"__version__", "config", "results"},
}
# May import everything below them.
ON_TOP = {"__init__", "__main__", "bench", "cli", "demo", "diagnosis", "experiments", "finetune", "report"}
# What a report reads, and who makes one: it stands above the comparison, and never runs or measures anything itself.
REPORTED = {"diagnosis", "experiments", "plots", "results"}
COMPARED = {"compare", "frontier", "paper", "settings", "statistics", "tables"}  # of the experiments
REPORTING = {"cli", "demo"}


def part_of(file: Path) -> str:
    return file.relative_to(PACKAGE).parts[0].removesuffix(".py")


def imported_names(file: Path) -> set[str]:
    """The names of the package that a file imports, wherever in it, at run time or for types alone."""
    package = ["alignattn", *file.relative_to(PACKAGE).parent.parts]
    names: set[str] = set()
    for node in ast.walk(ast.parse(file.read_text())):
        if isinstance(node, ast.Import):
            names.update(alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            base = package[: len(package) - node.level + 1] if node.level else []
            module = ".".join([*base, *([node.module] if node.module else [])])
            names.update(f"{module}.{alias.name}" for alias in node.names)
    return {name for name in names if name.startswith("alignattn.")}


def imported_parts(file: Path) -> set[str]:
    """The parts of the package that a file imports."""
    return {name.split(".")[1] for name in imported_names(file)}


FILES = sorted(PACKAGE.rglob("*.py"))


def test_the_source_is_read():
    assert {"capture", "matching", "alignment", "errors"} <= {part_of(file) for file in FILES}
    assert imported_parts(PACKAGE / "objective.py") >= {"capture", "matching"}


def test_every_part_is_placed():
    strangers = {part_of(file) for file in FILES} - set(ALLOWED) - ON_TOP
    assert not strangers, f"Say in ALLOWED what {sorted(strangers)} may import."


def test_imports_go_one_way():
    wrong = [
        f"{file.relative_to(PACKAGE)} imports {other}"
        for file in FILES
        if part_of(file) not in ON_TOP
        for other in imported_parts(file) - ALLOWED.get(part_of(file), set()) - ANYONE - {part_of(file)}
    ]
    assert not wrong, "\n".join(wrong)


def test_capture_matching_metrics_and_results_know_nothing_of_each_other():
    for part in ("capture", "matching", "metrics", "results"):
        assert ALLOWED[part] == set()


def test_nobody_below_imports_what_stands_on_top():
    for file in FILES:
        if part_of(file) not in ON_TOP:
            assert not imported_parts(file) & ON_TOP, file


def test_only_the_command_of_a_diagnosis_reads_files_and_loads_models():
    for file in (PACKAGE / "diagnosis").glob("*.py"):
        if file.stem not in ("batches", "command"):
            assert not imported_parts(file) & {"bench", "cli", "datasets", "experiments", "finetune", "models"}, file


def test_no_part_on_top_imports_a_diagnosis_but_to_show_it():
    """What measures a distance is one figure of it, and needs nothing of the others."""
    for part in ("experiments", "finetune", "bench"):
        for file in (PACKAGE / part).rglob("*.py"):
            names = {tuple(name.split(".")[1:3]) for name in imported_names(file)}
            assert {name for name in names if name[0] == "diagnosis"} <= {("diagnosis", "mmd")}, file
    assert imported_parts(PACKAGE / "diagnosis" / "mmd.py") <= CORE | ANYONE


def test_a_report_reads_results_only():
    for file in FILES:
        if part_of(file) == "report":
            parts = imported_parts(file) - {"__version__", "report"} - ANYONE
            assert parts <= REPORTED, f"{file.name} imports {sorted(parts - REPORTED)}"
            names = (name.split(".") for name in imported_names(file))
            experiments = {name[2] for name in names if name[1] == "experiments"}
            assert experiments <= COMPARED, f"{file.name} imports {sorted(experiments - COMPARED)}"


def test_nobody_makes_reports_but_the_command_and_the_demo():
    makers = {part_of(file) for file in FILES if "report" in imported_parts(file)} - {"report"}
    assert makers <= REPORTING
