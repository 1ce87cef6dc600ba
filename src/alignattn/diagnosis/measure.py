"""`diagnose`: batches through a model in eval mode, and everything about the keys and queries of each head.

One pass, layer by layer as attention is called. Kept of a layer are sums, and for the classifier `max_tokens` queries
and as many keys, drawn at random: memory does not grow with the batches. All heads of a layer are measured at once.
"""

from collections.abc import Callable, Iterable
from contextlib import AbstractContextManager
from typing import Any

import torch
from torch import Tensor, nn

from alignattn.capture import QueryKey, Tap
from alignattn.capture.feed import feed, in_eval_mode
from alignattn.capture.search import Layers
from alignattn.diagnosis.entropy import entropies
from alignattn.diagnosis.mmd import layer_of, of_samples
from alignattn.diagnosis.moments import Moments, distances
from alignattn.diagnosis.permutation import permuted
from alignattn.diagnosis.result import ROUNDING, Diagnosis, HeadDiagnosis
from alignattn.diagnosis.separation import Sampled, separation
from alignattn.diagnosis.words import words_of
from alignattn.errors import ConfigError, NonFiniteError, NothingCapturedError
from alignattn.finite import finite_layers
from alignattn.provenance import commit, versions

FEWEST_PERMUTATIONS = 40  # fewer have no 2.5 %
FEWEST_TOKENS = 20


def diagnose(
    model: nn.Module,
    batches: Iterable[Any],
    *,
    call: Callable[[nn.Module, Any], object] = feed,
    layers: Layers = None,
    cross: bool = False,
    seed: int = 0,
    permutations: int = 200,
    max_tokens: int = 2000,
    name: str = "",
    settings: dict[str, Any] | None = None,
    command: str = "",
) -> Diagnosis:
    """How keys and queries differ in every head of a model that can be tapped, measured and in plain words.

    `batches` are fed by `call`: mappings by name, tuples one by one. `layers` names attention modules as `align` does;
    `cross` takes in cross-attention. `max_tokens` are kept of each side for the classifier; all else is over every
    token. `settings` and `command` are noted in the diagnosis. The model, its mode, gradients and hooks, and the state
    of random numbers are afterwards what they were.
    """
    _check(seed, permutations, max_tokens)
    found: dict[str, _Layer] = {}

    def measure(record: QueryKey) -> None:
        layer = layer_of(record)
        if layer not in found:
            found[layer] = _Layer(layer, record.query, seed, permutations, max_tokens)
        with torch.autocast(record.query.device.type, enabled=False):  # the model may run under it
            found[layer].add(record)

    tap = Tap(model, watch=measure, always=True, layers=layers, cross=cross, attending=True)
    try:
        with torch.no_grad(), in_eval_mode(model), _random_state_kept(model):
            for batch in batches:
                call(model, batch)
            heads = [head for layer in found.values() for head in layer.heads()]
    finally:
        tap.remove()
    if not heads:
        raise NothingCapturedError(
            "No attention ran: there were no batches, or none of them reached it. Cross-attention needs cross=True."
        )
    return Diagnosis(
        name=name or type(model).__name__,
        heads=heads,
        words=words_of(heads),
        settings={"seed": seed, "permutations": permutations, "max_tokens": max_tokens, "cross": cross}
        | (settings or {}),
        versions=versions(),
        commit=commit(),
        command=command,
    )


class _Layer:
    """What is known of one attention module so far."""

    def __init__(self, name: str, query: Tensor, seed: int, permutations: int, max_tokens: int) -> None:
        self.name, self.seed = name, seed
        heads, device = query.shape[1], query.device
        self.rows = 0  # samples that came by: their numbers say what is drawn for them
        self.samples = 0  # that MMD can be told of
        self.mmd, self.mmd_squares, self.entropy, self.entropies = (
            torch.zeros(heads, dtype=torch.float64, device=device) for _ in range(4)
        )
        self.permuted = torch.zeros(heads, permutations + 1, dtype=torch.float64, device=device)
        self.moments = Moments(query), Moments(query)
        self.kept = Sampled(max_tokens, seed), Sampled(max_tokens, seed)

    def add(self, record: QueryKey) -> None:
        """One call."""
        masks = [None if mask is None else mask[None] for mask in (record.query_mask, record.key_mask)]
        if not bool(finite_layers(record.query[None], record.key[None], *masks)):
            raise NonFiniteError(
                f"NaN or infinity in the queries or keys of {self.name}. The model itself has diverged there, or "
                "overflowed in half precision: load it in fp32 or bf16, or take an earlier checkpoint."
            )
        total, counted = entropies(record)
        self.entropy += total
        self.entropies += counted
        record = record.unpacked()
        values, enough = of_samples(record)
        self.mmd += values.sum(0)
        self.mmd_squares += values.square().sum(0)
        self.samples += int(enough.sum())
        sample = torch.arange(self.rows, self.rows + len(values), device=values.device)
        self.rows += len(values)
        sides = [_masked(record.query, record.query_mask), _masked(record.key, record.key_mask)]
        for moments, kept, (tokens, mask) in zip(self.moments, self.kept, sides, strict=True):
            moments.add(tokens, mask)
            kept.add(tokens, mask, sample)
        (query, query_mask), (key, key_mask) = sides
        count = self.permuted.shape[1] - 1
        self.permuted += permuted(query, key, query_mask, key_mask, sample=sample, seed=self.seed, permutations=count)

    def heads(self) -> list[HeadDiagnosis]:
        """What it comes to."""
        count = max(1, self.samples)
        mmd = self.mmd / count
        error = ((self.mmd_squares / count - mmd.square()).clamp_min(0) / max(1, count - 1)).sqrt()
        seen, chance = self.permuted[:, :1] / count, self.permuted[:, 1:] / count
        as_large = (chance >= seen - ROUNDING).sum(1)
        means, covariances = distances(*self.moments)
        area, interval = separation(*self.kept)
        columns = {
            "mmd": mmd,
            "noise": chance.quantile(torch.tensor([0.025, 0.975], dtype=chance.dtype, device=chance.device), 1).T,
            "mmd_p": (1.0 + as_large.double()) / (1 + chance.shape[1]),
            "mean_distance": means,
            "covariance_distance": covariances,
            "query_norm": self.moments[0].length,
            "key_norm": self.moments[1].length,
            "entropy": self.entropy / self.entropies,  # NaN where no query had a choice
            "auc": area,
            "auc_interval": interval,
            "mmd_error": error if self.samples > 1 else torch.full_like(error, torch.nan),
        }
        rows = zip(*(column.tolist() for column in columns.values()), strict=True)
        told: dict[str, Any] = {"layer": self.name, "samples": self.samples, "tokens": self.moments[0].count}
        return [
            HeadDiagnosis(**told, head=head, **{k: _plain(v) for k, v in zip(columns, row, strict=True)})
            for head, row in enumerate(rows)
        ]


def _plain(value: Any) -> Any:
    return tuple(value) if isinstance(value, list) else value


def _masked(tokens: Tensor, mask: Tensor | None) -> tuple[Tensor, Tensor]:
    everything = torch.ones(tokens.shape[0], tokens.shape[2], dtype=torch.bool, device=tokens.device)
    return tokens, everything if mask is None else mask


def _check(seed: int, permutations: int, max_tokens: int) -> None:
    if not 0 <= seed < 2**32:
        raise ConfigError(f"seed must be from 0 to 2**32 - 1, got {seed}.")
    if permutations < FEWEST_PERMUTATIONS:
        raise ConfigError(
            f"permutations must be at least {FEWEST_PERMUTATIONS}, got {permutations}: fewer have no 2.5 %."
        )
    if max_tokens < FEWEST_TOKENS:
        raise ConfigError(
            f"max_tokens must be at least {FEWEST_TOKENS}, got {max_tokens}: fewer teach a classifier nothing."
        )


def _random_state_kept(model: nn.Module) -> AbstractContextManager[None]:
    """A model may draw numbers in eval mode too."""
    devices = {p.device for p in model.parameters() if p.device.type == "cuda"}
    return torch.random.fork_rng([device.index or 0 for device in devices])
