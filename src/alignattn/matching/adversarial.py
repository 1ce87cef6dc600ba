"""Adversarial matching of queries and keys.

    L = E_q[ log D(q) ] + E_k[ log(1 - D(k)) ]

D ascends; queries and keys descend. Zhang et al. 2021, section 2.3.1. Or they descend the distance of their mean
features in D (`matched="features"`, features.py), while D ascends the value as before.

D answers in logits and the logarithms are log-sigmoids: log(sigmoid(x)) is -inf in fp32 from x = -104 on, with a
gradient of NaN.
"""

from dataclasses import dataclass
from typing import Any, ClassVar

import torch
import torch.nn.functional as F
from jaxtyping import Bool, Float
from torch import Tensor

from alignattn.errors import ShapeError, checked
from alignattn.matching import kernels
from alignattn.matching.beside import parted
from alignattn.matching.features import feature_distance
from alignattn.matching.game import game
from alignattn.matching.matcher import FINITE_INPUT, Matcher, NetworkConfig
from alignattn.matching.networks import Discriminator, Rows, reverse_gradient
from alignattn.matching.tokens import (
    blank_padding,
    check_pair,
    full_precision,
    masked_mean,
    samples_with_tokens,
    zero_where_empty,
)

Pair = tuple[Tensor, Tensor]  # of queries and of keys


def check_logits(
    query_logits: Tensor, key_logits: Tensor, *, query_mask: Tensor | None = None, key_mask: Tensor | None = None
) -> None:
    """Logits [b, h, n] and [b, h, m], or with an axis of one behind, as a linear layer leaves it."""
    for name, logits in (("query_logits", query_logits), ("key_logits", key_logits)):
        if logits.ndim not in (3, 4) or (logits.ndim == 4 and logits.shape[-1] != 1):
            raise ShapeError(f"{name} must be [b, h, tokens] or [b, h, tokens, 1], got shape {tuple(logits.shape)}.")
    check_pair(_column(query_logits), _column(key_logits), query_mask, key_mask)


def _column(logits: Tensor) -> Tensor:
    return logits if logits.ndim == 4 else logits[..., None]


@checked(check_logits)
@full_precision
def adversarial(
    query_logits: Float[Tensor, "b h n *one"],
    key_logits: Float[Tensor, "b h m *one"],
    *,
    query_mask: Bool[Tensor, "b n"] | None = None,
    key_mask: Bool[Tensor, "b m"] | None = None,
) -> Float[Tensor, "b h"]:
    """The value of the game for each problem, from the discriminator's logits. With D = 1/2 it is -2 log 2."""
    of_queries, of_keys = (
        masked_mean(F.logsigmoid(sign * blank_padding(_column(logits), mask).squeeze(-1)), mask)
        for sign, logits, mask in ((1, query_logits, query_mask), (-1, key_logits, key_mask))
    )
    return zero_where_empty(of_queries + of_keys, samples_with_tokens(query_mask, key_mask))


@dataclass(frozen=True, kw_only=True)
class AdversarialConfig(NetworkConfig):
    """Options of method "gan"."""

    discriminator: str = "highway"  # or "mlp": linear, ReLU, linear, which the paper's appendix also reports
    shared_gate: bool = False  # one linear layer as gate and transform of the highway, as the released code has it
    detach_query: bool = False  # only the keys move, as in the released code
    matched: str = "value"  # what queries and keys descend: the game's value, or the distance of "features" in D

    choices: ClassVar = {"discriminator": ("highway", "mlp"), "matched": ("value", "features")}


class AdversarialMatcher(Matcher):
    """One discriminator a layer, shared by its heads."""

    config: AdversarialConfig
    separable = separable_by_heads = replayable = layered = True

    def networks(self, names: list[str], width: int) -> dict[str, Discriminator]:
        config = self.config
        return {
            "discriminator": Discriminator(
                names,
                width,
                hidden=config.hidden_width,
                out=1,
                highway=config.discriminator == "highway",
                shared_gate=config.shared_gate,
                seed=self.seed,
            )
        }

    def forward(self, query: Tensor, key: Tensor, *rest: Any) -> Tensor:
        """As every matcher; queries are detached before they are brought onto a scale with the keys."""
        return super().forward(query.detach() if self.config.detach_query else query, key, *rest)

    def losses(
        self,
        query: Float[Tensor, "l b h n d"],
        key: Float[Tensor, "l b h m d"],
        query_mask: Bool[Tensor, "lb n"] | None,
        key_mask: Bool[Tensor, "lb m"] | None,
        names: list[str],
    ) -> Float[Tensor, "lb h"]:
        if self.config.matched == "value":
            logits = self.through("discriminator", names, query, key, around=reverse_gradient)
            return self._value(*logits, query_mask, key_mask)
        fused = self._by_kernels(query, key, query_mask, key_mask, names)
        if fused is not None:
            return fused
        network, layers = self.network("discriminator", names, query)
        if network.has_highway:
            return self._by_hand(network, layers, query, key, query_mask, key_mask)
        tokens, *_ = self.shown("discriminator", names, query, key)
        features = parted(network.features(tokens, layers, fixed=True), query, key)
        logits = parted(reverse_gradient(network(tokens.detach(), layers)), query, key)
        value = self._value(*logits, query_mask, key_mask)
        distance = feature_distance(*features, query_mask=query_mask, key_mask=key_mask)
        return distance + (value - value.detach())  # the value's gradient goes into the discriminator alone

    def _by_hand(
        self,
        network: Discriminator,
        layers: Rows,
        query: Tensor,
        key: Tensor,
        query_mask: Tensor | None,
        key_mask: Tensor | None,
    ) -> Tensor:
        """The same, with gradients that are written out."""
        if not self.config.standardise:  # which bounds what networks see
            query, key = (side.clamp(-FINITE_INPUT, FINITE_INPUT) for side in (query, key))
        masks = [None if mask is None else mask.unflatten(0, query.shape[:2]) for mask in (query_mask, key_mask)]
        masks[1] = masks[0] if key_mask is query_mask else masks[1]
        distance, *answers = game(query, key, masks[0], masks[1], *network.weights(query, layers))
        if self.asked:
            self._tell_accuracy(*(side.flatten(0, 1) for side in answers), query_mask, key_mask)
        return distance.flatten(0, 1)

    def _by_kernels(
        self, query: Tensor, key: Tensor, query_mask: Tensor | None, key_mask: Tensor | None, names: list[str]
    ) -> Tensor | None:
        """All of it in few kernels, where they serve; None elsewhere."""
        network, layers = self.network("discriminator", names, query)
        if not (self.config.hidden_width <= kernels.HIGHWAY and network.has_highway):
            return None
        if not kernels.serve(query, widest=kernels.HIGHWAY):
            return None
        from alignattn.matching.kernels.game import game

        if not self.config.standardise:  # which bounds what networks see
            query, key = (side.clamp(-FINITE_INPUT, FINITE_INPUT) for side in (query, key))
        weights = network.weights(query, layers)
        distance, accuracy = game(self.products, query, key, query_mask, key_mask, *weights)
        if self.asked:
            self.tell("discriminator_accuracy", accuracy.mean(), len(accuracy))
        return distance

    def _value(
        self, query_logits: Tensor, key_logits: Tensor, query_mask: Tensor | None, key_mask: Tensor | None
    ) -> Float[Tensor, "lb h"]:
        if self.asked:
            self._tell_accuracy(query_logits, key_logits, query_mask, key_mask)
        return adversarial(query_logits, key_logits, query_mask=query_mask, key_mask=key_mask)

    def _tell_accuracy(self, query_logits: Tensor, key_logits: Tensor, *masks: Tensor | None) -> None:
        self.tell("discriminator_accuracy", _accuracy(query_logits, key_logits, *masks), len(query_logits))


@torch.no_grad()
def _accuracy(
    query_logits: Float[Tensor, "b h n 1"],
    key_logits: Float[Tensor, "b h m 1"],
    query_mask: Bool[Tensor, "b n"] | None,
    key_mask: Bool[Tensor, "b m"] | None,
) -> Float[Tensor, ""]:
    """The share of tokens that the discriminator takes for what they are, queries and keys counting alike."""
    right = [(query_logits[..., 0] > 0, query_mask), (key_logits[..., 0] < 0, key_mask)]
    return torch.stack([masked_mean(values.float(), mask).mean() for values, mask in right]).mean()
