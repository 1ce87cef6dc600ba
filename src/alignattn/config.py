"""What can be set about an alignment, the methods, and the presets: sets of option values, nothing more."""

import math
from collections.abc import Mapping
from dataclasses import asdict, dataclass, fields
from typing import Any, ClassVar

from alignattn.errors import ConfigError, unknown
from alignattn.matching.adversarial import AdversarialConfig, AdversarialMatcher
from alignattn.matching.conditional import ConditionalConfig, ConditionalMatcher
from alignattn.matching.discrepancy import DiscrepancyConfig, DiscrepancyMatcher
from alignattn.matching.matcher import Matcher, MatcherConfig
from alignattn.matching.transport import TransportConfig, TransportMatcher
from alignattn.weights import Auto, Schedule, check_weight, read_weight

METHODS: Mapping[str, tuple[type[Matcher], type[MatcherConfig]]] = {
    "gan": (AdversarialMatcher, AdversarialConfig),
    "ot": (TransportMatcher, TransportConfig),
    "ct": (ConditionalMatcher, ConditionalConfig),
    "mmd": (DiscrepancyMatcher, DiscrepancyConfig),
}
DEFAULT_METHOD = "ot"

# `all` is meant for every method. The defaults of the config classes are the paper's reading.
PRESETS: Mapping[str, Mapping[str, Mapping[str, Any]]] = {
    "paper": {"all": {"weight": 0.01, "reduction": "sum"}},
    "released": {
        "all": {"weight": 0.01, "reduction": "mean", "mask_padding": False},
        "gan": {"detach_query": True, "shared_gate": True},
        "ot": {"cost": "half_sqeuclidean", "epsilon": 0.0025, "debiased": True},  # geomloss: blur 0.05, p = 2
        "ct": {
            "transported": "heads",
            "critic_cost": "euclidean",
            "navigator_ascends": True,
            "normalise_navigator": True,
        },
    },
    "stable": {
        "all": {"reduction": "mean", "recentre": True, "standardise": True, "until_met": True},
        "gan": {"weight": Auto(), "first_weight": 0.1, "matched": "features", "hidden_width": 64},
        "ot": {
            "cost": "sqeuclidean",
            "debiased": True,
            "epsilon": 1.0,
            "tolerance": 0.05,
            "max_iterations": 3,
            "weight": Auto(),
            "first_weight": 0.3,
        },
        "ct": {"weight": Auto(), "first_weight": 0.15, "adversary_rate": 1e-2},
        "mmd": {"weight": Auto(), "first_weight": 0.3, "without_own": True, "bandwidth": "mean"},
    },
}


@dataclass(frozen=True, kw_only=True)
class AlignmentConfig:
    """Everything about an alignment. `matcher` holds the options of the method."""

    method: str
    preset: str
    weight: float | Schedule | Auto  # of the alignment loss beside the task's, under `reduction`
    matcher: MatcherConfig
    first_weight: float = 0.0  # of "auto" until it has seen gradients, and in compiled code, where it sees none
    reduction: str = "mean"  # over heads and layers, or "sum"; always the mean over samples
    generator: str = "model"  # how far the gradient goes: the whole model, or its query and key "projections"
    recentre: bool = False  # shift keys to the queries by their projection's bias, which softmax does not feel
    until_met: bool = False  # leave a head alone while its queries and keys cannot be told apart
    cross: bool = False  # cross-attention too
    max_tokens: int | None = None  # of a sample, drawn at random each time; None: all
    every: int = 1  # one layer in so many is matched in an update, drawn at random; 1: all
    stream: str | None = None  # "layer": match each by itself, and keep nothing of it; less memory, more time
    add_to_outputs: bool = True  # to the loss that a transformers model returns in training mode
    adversary_optimizer: str | None = "adam"  # None: put alignment.parameters() into an optimizer of your own
    adversary_rate: float = 1e-3  # of Adam; at a fine-tuning rate the networks never keep up
    adversary_betas: tuple[float, float] = (0.5, 0.99)  # a short memory, for a target that moves
    seed: int = 0  # of the networks' first weights

    choices: ClassVar[Mapping[str, tuple[Any, ...]]] = {
        "reduction": ("mean", "sum"),
        "generator": ("model", "projections"),
        "adversary_optimizer": ("adam", None),
        "stream": (None, "layer"),
    }

    def __post_init__(self) -> None:
        for name, allowed in self.choices.items():
            if getattr(self, name) not in allowed:
                raise unknown(name, getattr(self, name), map(str, allowed))
        if not callable(self.weight) and not isinstance(self.weight, Auto):
            check_weight(self.weight)
        check_weight(self.first_weight)
        for name in ("recentre", "until_met", "cross", "add_to_outputs"):
            if not isinstance(getattr(self, name), bool):
                raise ConfigError(f"{name} must be True or False, got {getattr(self, name)!r}.")
        for name, least in (("max_tokens", 2), ("every", 1)):
            value = getattr(self, name)
            whole = isinstance(value, int) and not isinstance(value, bool) and value >= least
            if not whole and not (name == "max_tokens" and value is None):
                raise ConfigError(f"{name} must be a whole number, {least} or more, got {value!r}.")
        if self.stream is not None and self.every > 1:
            raise ConfigError(
                "every draws among all layers of a forward pass, and with stream='layer' each is matched before the "
                "next is known. Use max_tokens to match less, or leave one of the two out."
            )
        self._check_neighbourhoods()
        if isinstance(self.weight, Auto) and self.adversary_optimizer is None:
            raise ConfigError("weight='auto' needs adversary_optimizer='adam'. Give a number to an optimizer of yours.")
        if not (self.adversary_rate > 0 and math.isfinite(self.adversary_rate)):
            raise ConfigError(f"adversary_rate must be > 0 and finite, got {self.adversary_rate}. The default is 1e-3.")
        if len(self.adversary_betas) != 2 or not all(0 <= beta < 1 for beta in self.adversary_betas):
            raise ConfigError(f"adversary_betas must be two numbers in [0, 1), got {self.adversary_betas}.")

    def _check_neighbourhoods(self) -> None:
        """Options that would cut a graph to pieces."""
        if getattr(self.matcher, "matched_over", "all") != "neighbourhoods":
            return
        for name, what in (("max_tokens", "draws tokens"), ("stream", "matches samples apart")):
            if getattr(self, name) is not None:
                raise ConfigError(
                    f"{name} {what}, and matched_over='neighbourhoods' needs all nodes that edges join; its memory is "
                    "linear in their number already. Leave one of the two out."
                )

    @property
    def told_weight(self) -> float | str:
        """The weight as a result file has it: a number, or a text where it changes while training."""
        return float(self.weight) if isinstance(self.weight, int | float) else str(self.weight)

    def acting(self) -> dict[str, Any]:
        """All options as a result file has them, without those that do nothing as they are set.

        They are younger than many a file, and those are still to be found again and compared.
        """
        idle = {
            "first_weight": not isinstance(self.weight, Auto),
            "until_met": not self.until_met,
            "max_tokens": self.max_tokens is None,
            "every": self.every == 1,
            "stream": self.stream is None,
        }
        options = {name: value for name, value in asdict(self).items() if not idle.get(name)}
        if options["matcher"].get("matched_over") == "all":
            del options["matcher"]["matched_over"]
        return options

    def weight_at(self, step: int) -> float:
        """The weight in the step-th update of the model; zero where it is chosen while training."""
        if isinstance(self.weight, Auto):
            return 0.0
        return check_weight(self.weight(step)) if callable(self.weight) else float(self.weight)


def resolve(
    method: str | Matcher, weight: float | Schedule | Auto | str | None, preset: str, options: Mapping[str, Any]
) -> AlignmentConfig:
    """The whole configuration: defaults, then what the preset sets, then what the caller sets."""
    if preset not in PRESETS:
        raise unknown("preset", preset, PRESETS)
    if isinstance(method, Matcher):
        name, matcher_options = type(method).__name__, set[str]()
    elif method in METHODS:
        name, matcher_options = method, {f.name for f in fields(METHODS[method][1])}
    else:
        raise unknown("method", method, METHODS)
    own = {f.name for f in fields(AlignmentConfig)} - {"method", "preset", "matcher"}
    for option in options:
        if option == "matched_over" and option not in matcher_options:
            raise ConfigError(
                f"matched_over is an option of method 'ct': conditional distributions can follow the edges of a graph, "
                f"and {name!r} matches the distributions of all its nodes."
            )
        if option not in own | matcher_options:
            raise unknown(f"option for method {name!r}:", option, sorted(own | matcher_options))
    values = dict(PRESETS[preset]["all"]) | dict(PRESETS[preset].get(name, {})) | dict(options)
    if weight is not None:
        values["weight"] = weight
    if isinstance(values.get("weight"), str):
        values["weight"] = read_weight(values["weight"])
    chosen = weight is None and "weight" not in options and isinstance(values.get("weight"), Auto)
    if chosen and values.get("adversary_optimizer", "adam") is None:  # nobody sees its gradients apart
        values["weight"] = values["first_weight"]
    if isinstance(method, Matcher):
        matcher = method.config
        values.setdefault("weight", 1.0)
    else:
        matcher = METHODS[method][1](**{k: v for k, v in values.items() if k in matcher_options})
    return AlignmentConfig(method=name, preset=preset, matcher=matcher, **{k: v for k, v in values.items() if k in own})
