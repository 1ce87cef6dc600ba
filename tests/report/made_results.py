"""Result files and diagnoses, made here: every number is known."""

import json
import random
from pathlib import Path
from typing import Any

from alignattn.results import Result, write


def result(method: str = "soft", seed: int = 0, **changes: Any) -> Result:
    """A finished run, with everything in it that a page can draw."""
    noise = random.Random(f"{method} {seed}")
    aligned = method != "soft"
    bins = {
        "count": [0, 40, 60, 100],
        "confidence": ["NaN", 0.4, 0.6, 0.9],
        "accuracy": ["NaN", 0.5, 0.55, 0.8 + 0.02 * noise.random()],
        "edges": [0.0, 0.25, 0.5, 0.75, 1.0],
    }
    heads = {f"layer.{i}.attention": [(0.1 if aligned else 1.0) * noise.random() for _ in range(4)] for i in range(3)}
    curve = [[10 * k, 1 / (k + 1) + 0.1 * noise.random(), 0.5 / (k + 1) if aligned else 0.0] for k in range(6)]
    values: dict[str, Any] = {
        "name": "tiny",
        "recipe": {
            "name": "tiny",
            "description": "a tiny recipe",
            "task": "text",
            "data": {"name": "made"},
            "model": {"name": "none"},
            "train": {"steps": 60},
            "report": ["accuracy", "ece", "mmd"],
        },
        "method": method,
        "preset": "stable" if aligned else None,
        "weight": 1.0 if aligned else None,
        "reduction": "mean" if aligned else None,
        "alignment": {"method": method, "weight": 1.0} if aligned else None,
        "seed": seed,
        "metrics": {
            "accuracy": 80 + 5 * noise.random(),
            "ece": 4 + noise.random(),
            "mmd": (1 if aligned else 9) + noise.random(),
        },
        "details": {"reliability": bins, "mmd": heads, "curve": curve},
        "times": {"train": 12.5, "step": 0.01},
        "versions": {"python": "3.11.2", "torch": "2.9.0"},
        "commit": "0123456789abcdef",
        "machine": {"system": "Linux", "processor": "a processor", "device": "cpu"},
        "command": "alignattn run tiny --seeds 3",
        "finished": f"2026-01-02T03:04:0{seed}+00:00",
    }
    return Result(**values | changes)


def diagnosis(name: str = "before", **changes: Any) -> dict[str, Any]:
    noise = random.Random(name)
    heads = [
        {
            "layer": f"layer.{layer}.attention",
            "head": head,
            "samples": 64,
            "tokens": 900,
            "mmd": round(noise.random(), 4),
            "noise": [-0.002, 0.003],
            "mmd_p": 0.01,
            "mean_distance": 0.5,
            "covariance_distance": 0.25,
            "query_norm": 3.0,
            "key_norm": 4.0,
            "entropy": 1.5,
            "auc": 0.9,
            "auc_interval": [0.85, 0.95],
            "mmd_error": 0.01,
        }
        for layer in range(3)
        for head in range(4)
    ]
    return {
        "kind": "diagnosis",
        "schema": 1,
        "name": name,
        "heads": heads,
        "words": ["All heads are apart."],
        "settings": {"samples": 64},
        "versions": {"torch": "2.9.0"},
        "commit": "fedcba",
        "command": "alignattn diagnose MODEL",
    } | changes


def fill(folder: Path) -> Path:
    """Three seeds of soft attention and two methods, one failed run, and two diagnoses."""
    for method in ("soft", "ot", "mmd"):
        for seed in range(3):
            write(result(method, seed), folder / f"{method}-{seed}.json")
    write(result("ct", 0, metrics={}, details={}, error="OutOfMemory: no room"), folder / "ct-0.json")
    for name in ("before", "after"):
        (folder / f"diagnosis-{name}.json").write_text(json.dumps(diagnosis(name)))
    return folder
