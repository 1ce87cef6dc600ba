"""An alignment in a folder: networks and their optimizer as safetensors, the configuration beside it as JSON.

Nothing is pickled and nothing unpickled. The JSON names the SHA-256 of the tensors: halves of two checkpoints are no
checkpoint.
"""

import hashlib
import json
from collections.abc import Mapping
from dataclasses import asdict, fields
from pathlib import Path
from typing import Any

from safetensors import SafetensorError
from safetensors.torch import load as load_tensors
from safetensors.torch import save as save_tensors
from torch import Tensor

from alignattn import balance
from alignattn.config import METHODS, AlignmentConfig
from alignattn.errors import ConfigError, DataError
from alignattn.files import write_whole
from alignattn.state import FORMAT as STATE_FORMAT
from alignattn.weights import Auto, Ramp

FORMAT = 1  # of the folder
TENSORS, SETTINGS = "alignment.safetensors", "alignment.json"


def write(folder: Path, config: AlignmentConfig, layers: list[str], state: Mapping[str, Any]) -> None:
    """Write both files, each whole or not at all."""
    tensors = {f"networks.{name}": value for name, value in state["networks"].items()}
    adversary = state["adversary"]
    for index, values in adversary.get("moments", {}).items():
        tensors |= {f"optimizer.{index}.{name}": value for name, value in values.items()}
    tensors |= {f"distances.{name}": value for name, value in state.get("distances", {}).items()}
    for index, gradient in enumerate(adversary.get("gradients", [])):
        if gradient is not None:
            tensors[f"gradients.{index}"] = gradient
    packed = save_tensors({name: value.detach().cpu().contiguous() for name, value in tensors.items()})
    settings = {
        "format": FORMAT,
        "config": _as_plain(config),
        "layers": layers,
        "steps": state["steps"],
        **{name: state[name] for name in balance.STATE if name in state},
        "rows": state["rows"],
        "tensors": hashlib.sha256(packed).hexdigest(),
    }
    write_whole(folder / TENSORS, packed)
    write_whole(folder / SETTINGS, json.dumps(settings, indent=1) + "\n")


def read(folder: Path) -> tuple[dict[str, Any], list[str], dict[str, Any]]:
    """Arguments of Alignment(), the layers it was attached to, and a state for load_state_dict()."""
    settings_file, tensors_file = folder / SETTINGS, folder / TENSORS
    missing = [file.name for file in (settings_file, tensors_file) if not file.is_file()]
    if missing:
        raise DataError(f"{folder} holds no alignment: there is no {' and no '.join(missing)} in it.")
    try:
        settings = json.loads(settings_file.read_text(encoding="utf-8"))
        version = settings["format"]
    except (ValueError, KeyError, TypeError, RecursionError) as error:
        raise DataError(f"{settings_file} cannot be read as the settings of an alignment.") from error
    if version != FORMAT:
        raise DataError(f"{settings_file} has format {version!r}, and this version of alignattn reads {FORMAT}.")
    packed = tensors_file.read_bytes()
    try:
        if hashlib.sha256(packed).hexdigest() != settings["tensors"]:
            raise DataError(
                f"{tensors_file} is not the file that {SETTINGS} was written with: one of them was replaced."
            )
        state = _state(load_tensors(packed), settings)
        return _arguments(settings["config"]), [str(name) for name in settings["layers"]], state
    except (SafetensorError, KeyError, TypeError, ValueError) as error:
        if isinstance(error, ConfigError | DataError):
            raise
        raise DataError(f"{folder} holds an alignment that is damaged: {error!r}.") from error


def _state(tensors: Mapping[str, Tensor], settings: Mapping[str, Any]) -> dict[str, Any]:
    networks: dict[str, Tensor] = {}
    optimizer: dict[int, dict[str, Tensor]] = {}
    gradients: dict[int, Tensor] = {}
    distances: dict[str, Tensor] = {}
    for name, value in tensors.items():
        kind, _, rest = name.partition(".")
        if kind == "networks":
            networks[rest] = value
        elif kind == "optimizer":
            index, _, key = rest.partition(".")
            optimizer.setdefault(int(index), {})[key] = value
        elif kind == "distances":
            distances[rest] = value
        else:
            gradients[int(rest)] = value
    last = max(gradients, default=-1)
    adversary = {"moments": optimizer, "gradients": [gradients.get(i) for i in range(last + 1)]}
    return {
        "format": STATE_FORMAT,
        "method": settings["config"]["method"],
        "steps": int(settings["steps"]),
        "rows": [(str(name), int(width), int(bank), int(row)) for name, width, bank, row in settings["rows"]],
        "networks": networks,
        "adversary": adversary if optimizer or gradients else {},
        "distances": distances,
        **{name: float(settings[name]) for name in balance.STATE if name in settings},
    }


def _as_plain(config: AlignmentConfig) -> dict[str, Any]:
    if config.method not in METHODS:
        raise ConfigError(
            f"{config.method} is a matcher of your own, which files cannot hold. Keep alignment.state_dict() yourself."
        )
    weight: Any = config.weight
    if isinstance(weight, Ramp | Auto):
        weight = asdict(weight)
    elif callable(weight):
        raise ConfigError(
            "The weight is a function of your own, which files cannot hold. Use a number or alignattn.Ramp, or keep "
            "alignment.state_dict() yourself."
        )
    own = {f.name: getattr(config, f.name) for f in fields(config) if f.name not in ("matcher", "weight")}
    return {**own, "weight": weight, "matcher": asdict(config.matcher)}


def _arguments(config: Mapping[str, Any]) -> dict[str, Any]:
    values = {"until_met": False, **config}  # written before there was such a thing, whatever the preset says today
    weight = values.pop("weight")
    if isinstance(weight, dict):
        weight = Auto(**weight) if "share" in weight else Ramp(**weight)
    matcher = values.pop("matcher")
    if "adversary_betas" in values:
        values["adversary_betas"] = tuple(values["adversary_betas"])
    return {**values, **matcher, "weight": weight}
