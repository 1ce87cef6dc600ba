"""Conditional transport between queries and keys.

    CT = 1/2 E_q[ sum_k pi(k|q) c(q,k) ] + 1/2 E_k[ sum_q pi(q|k) c(q,k) ]
    pi(k|q) ∝ exp(navigator(k)·navigator(q)),   c = 1 - cos(critic(q), critic(k))

The critic ascends; navigator, queries and keys descend. Padded tokens carry no mass. Zhang et al. 2021, section 2.3.3.

Departure: both expectations run as attention. With unit critic features u,
    sum_j pi(k_j|q_i) c(q_i,k_j) = 1 - u(q_i) · sum_j pi(k_j|q_i) u(k_j),
and the sum is attention with navigator features as queries and keys and critic features as values. The value is the
same; no n×m matrix exists. Short problems on a CPU are computed by matrices all the same (plans.py). In a graph both
can follow its edges (neighbourhoods.py).
"""

from dataclasses import dataclass
from functools import partial
from typing import ClassVar

import torch
import torch.nn.functional as F
from jaxtyping import Bool, Float
from torch import Tensor

from alignattn.errors import CaptureError, ConfigError, ShapeError, checked
from alignattn.matching import kernels, plans
from alignattn.matching.ascent import ascending
from alignattn.matching.carriers import Pair, critic_and_navigator
from alignattn.matching.matcher import FINITE_INPUT, Edges, Matcher, NetworkConfig
from alignattn.matching.neighbourhoods import neighbourhood_transport
from alignattn.matching.networks import Discriminator, Navigator, reverse_gradient
from alignattn.matching.tokens import (
    blank_padding,
    check_pair,
    direction,
    full_precision,
    masked_mean,
    samples_with_tokens,
    without_empty,
    zero_where_empty,
)

WIDEST = 64  # features for which there are kernels
LARGEST_FEATURE = 1e6  # of the navigator: beyond it the choice is as sharp as fp32 can tell, and products stay finite


def check_features(
    critic_query: Tensor,
    critic_key: Tensor,
    navigator_query: Tensor,
    navigator_key: Tensor,
    *,
    query_mask: Tensor | None = None,
    key_mask: Tensor | None = None,
) -> None:
    """Both kinds of features must be of the same tokens."""
    check_pair(critic_query, critic_key, query_mask, key_mask)
    check_pair(navigator_query, navigator_key, query_mask, key_mask)
    if critic_query.shape[:3] != navigator_query.shape[:3] or critic_key.shape[:3] != navigator_key.shape[:3]:
        raise ShapeError(
            f"critic features {tuple(critic_query.shape)}, {tuple(critic_key.shape)} and navigator features "
            f"{tuple(navigator_query.shape)}, {tuple(navigator_key.shape)} must be of the same tokens."
        )


@checked(check_features)
@full_precision
def conditional_transport(
    critic_query: Float[Tensor, "b h n e"],
    critic_key: Float[Tensor, "b h m e"],
    navigator_query: Float[Tensor, "b h n f"],
    navigator_key: Float[Tensor, "b h m f"],
    *,
    query_mask: Bool[Tensor, "b n"] | None = None,
    key_mask: Bool[Tensor, "b m"] | None = None,
) -> Float[Tensor, "b h"]:
    """Bidirectional conditional transport cost of each problem, from features [b, h, n, e] and [b, h, m, e].

    Critic and navigator features may differ in width; the fast attention kernels want them equal.
    """
    critics, navigators = (critic_query, critic_key), (navigator_query, navigator_key)
    return _transport(critics, navigators, query_mask, key_mask, kernels.EXACT)


def _transport(
    critics: tuple[Tensor, Tensor],
    navigators: tuple[Tensor, Tensor],
    query_mask: Tensor | None,
    key_mask: Tensor | None,
    products: str,
) -> Float[Tensor, "b h"]:
    if all(kernels.serve(side, widest=WIDEST) for side in (*critics, *navigators)):
        from alignattn.matching.kernels.conditional import transport

        clamped = [side.clamp(-LARGEST_FEATURE, LARGEST_FEATURE) for side in navigators]
        return transport(products, critics, (clamped[0], clamped[1]), query_mask, key_mask)
    if plans.serve(*critics):
        return plans.transport(critics, navigators, query_mask, key_mask, largest=LARGEST_FEATURE)
    (critic_query, critic_key), (navigator_query, navigator_key) = critics, navigators
    alive = samples_with_tokens(query_mask, key_mask)
    features = ((critic_query, True), (critic_key, False), (navigator_query, True), (navigator_key, False))
    query_mask, key_mask, blanked = without_empty(query_mask, key_mask, *features)
    units = [direction(features) for features in blanked[:2]]
    clamped = [features.clamp(-LARGEST_FEATURE, LARGEST_FEATURE) for features in blanked[2:]]
    carried_to_keys = _carried(units[0], clamped[0], units[1], clamped[1], query_mask, key_mask)
    carried_to_queries = _carried(units[1], clamped[1], units[0], clamped[0], key_mask, query_mask)
    return zero_where_empty((carried_to_keys + carried_to_queries) / 2, alive)


def _carried(
    critic_from: Float[Tensor, "b h n e"],
    navigator_from: Float[Tensor, "b h n f"],
    critic_to: Float[Tensor, "b h m e"],
    navigator_to: Float[Tensor, "b h m f"],
    mask_from: Bool[Tensor, "b n"] | None,
    mask_to: Bool[Tensor, "b m"] | None,
) -> Float[Tensor, "b h"]:
    """E_from[ sum_to pi(to|from) c(from, to) ]."""
    width = critic_to.shape[-1]
    extra = width - navigator_to.shape[-1]  # kernels without an n×m matrix need one width; zeros change no product
    mean_to = F.scaled_dot_product_attention(
        F.pad(navigator_from, (0, max(0, extra))),
        F.pad(navigator_to, (0, max(0, extra))),
        F.pad(critic_to, (0, max(0, -extra))),
        attn_mask=None if mask_to is None else mask_to[:, None, None, :],
        scale=1.0,
    )[..., :width]  # (b, h, n, e)
    return masked_mean(1 - (critic_from * mean_to).sum(-1), mask_from)


@dataclass(frozen=True, kw_only=True)
class ConditionalConfig(NetworkConfig):
    """Options of method "ct"."""

    feature_width: int = 16  # of critic and navigator alike: the fast attention kernels want them equal
    normalise_navigator: bool = False  # unit navigator features, as in the released code
    navigator_ascends: bool = False  # with the critic, as in the released code
    critic_cost: str = "cosine"  # or "euclidean": distance of unit critic features, as in the released code
    transported: str = "tokens"  # or "heads" at one position, as in the released code, whose axes are swapped
    matched_over: str = "all"  # tokens or nodes; in a graph also "neighbourhoods": a query and the keys it attends to

    choices: ClassVar = {
        "critic_cost": ("cosine", "euclidean"),
        "transported": ("tokens", "heads"),
        "matched_over": ("all", "neighbourhoods"),
    }

    def __post_init__(self) -> None:
        super().__post_init__()
        if not isinstance(self.feature_width, int) or self.feature_width < 1:
            raise ConfigError(f"feature_width must be a whole number >= 1, got {self.feature_width!r}.")
        if self.matched_over == "neighbourhoods" and self.transported == "heads":
            raise ConfigError(
                "matched_over='neighbourhoods' transports nodes along edges, and transported='heads' the heads of one "
                "node: give transported='tokens' with it."
            )


class ConditionalMatcher(Matcher):
    """One critic and one navigator a layer, shared by its heads."""

    config: ConditionalConfig
    separable = separable_by_heads = replayable = layered = True

    def follows_edges(self) -> bool:
        return self.config.matched_over == "neighbourhoods"

    def is_separable(self) -> bool:
        """Edges count through all samples."""
        return not self.follows_edges() and super().is_separable()

    def is_replayable(self) -> bool:
        """Edges may be others each time."""
        return not self.follows_edges() and super().is_replayable()

    def is_separable_by_heads(self) -> bool:
        """Not where they are transported to each other."""
        return self.config.transported == "tokens" and super().is_separable_by_heads()

    def networks(self, names: list[str], width: int) -> dict[str, Discriminator | Navigator]:
        hidden, out = self.config.hidden_width, self.config.feature_width
        return {
            "critic": Discriminator(names, width, hidden=hidden, out=out, seed=self.seed, role="critic"),
            "navigator": Navigator(names, width, hidden=hidden, out=out, seed=self.seed),
        }

    def losses(
        self,
        query: Float[Tensor, "l b h n d"],
        key: Float[Tensor, "l b h m d"],
        query_mask: Bool[Tensor, "lb n"] | None,
        key_mask: Bool[Tensor, "lb m"] | None,
        names: list[str],
    ) -> Float[Tensor, "lb h"]:
        config = self.config
        fused = self._by_kernels(query, key, query_mask, key_mask, names)
        if fused is not None:
            return fused
        critics, navigators = self._features(query, key, names)
        if self.asked:
            self.tell("critic_gap", _critic_gap(critics, query_mask, key_mask), len(critics[0]))
        if config.normalise_navigator:
            navigators = direction(navigators[0]), direction(navigators[1])
        if self.follows_edges():
            return neighbourhood_transport(*critics, *navigators, self._edges_of(names), cost=config.critic_cost)
        if config.transported == "heads":
            return self._over_heads(critics, navigators, query_mask, key_mask)
        if config.critic_cost == "euclidean":
            return _euclidean(critics, navigators, query_mask, key_mask)
        return _transport(critics, navigators, query_mask, key_mask, self.products)

    def _by_kernels(
        self, query: Tensor, key: Tensor, query_mask: Tensor | None, key_mask: Tensor | None, names: list[str]
    ) -> Tensor | None:
        """All of it in few kernels, where they serve and nothing departs from the defaults; None elsewhere."""
        config = self.config
        departs = config.normalise_navigator or config.critic_cost != "cosine" or config.transported != "tokens"
        if departs or self.follows_edges() or not kernels.serve(query, widest=kernels.HIGHWAY):
            return None
        from alignattn.matching.kernels import carriers

        if max(config.hidden_width, config.feature_width) > carriers.WIDEST:
            return None
        if self.asked:
            with torch.no_grad():
                critics = self._criticised(query, key, names)
            self.tell("critic_gap", _critic_gap(critics, query_mask, key_mask), len(critics[0]))
        critic, rows = self.network("critic", names, query)
        navigator, _ = self.network("navigator", names, query)
        # Slices of a bank are taken within: autograd would make a whole bank of zeros for each weight.
        whole = None if isinstance(rows, slice) else rows
        weights = [*critic.weights(query, whole), *navigator.weights(query, whole)]
        if not config.standardise:  # which bounds what networks see
            query, key = (side.clamp(-FINITE_INPUT, FINITE_INPUT) for side in (query, key))
        return carriers.carried(
            self.products,
            query,
            key,
            query_mask,
            key_mask,
            *weights,
            rows=rows if isinstance(rows, slice) else None,
            largest=LARGEST_FEATURE,
            sign=-1.0 if config.navigator_ascends else 1.0,
        )

    def _features(self, query: Tensor, key: Tensor, names: list[str]) -> tuple[Pair, Pair]:
        """Of critic and navigator."""
        ascends = self.config.navigator_ascends
        if kernels.serve(query, widest=kernels.HIGHWAY):
            around = reverse_gradient if ascends else lambda tensor: tensor
            return self._criticised(query, key, names), self.through("navigator", names, query, key, around=around)
        critic, rows = self.network("critic", names, query)
        navigator, _ = self.network("navigator", names, query)
        if not self.config.standardise:  # which bounds what networks see
            query, key = (side.clamp(-FINITE_INPUT, FINITE_INPUT) for side in (query, key))
        weights = critic.weights(query, rows), navigator.weights(query, rows)
        return critic_and_navigator(query, key, *weights, navigator_ascends=ascends)

    def _criticised(self, query: Tensor, key: Tensor, names: list[str]) -> Pair:
        return self.through("critic", names, query, key, call=partial(ascending, products=self.products))

    def _edges_of(self, names: list[str]) -> Edges:
        if self.edges is None:
            raise CaptureError(
                f"matched_over='neighbourhoods' follows the edges of a graph, and {names[0]} has none. Leave it out "
                "with layers=, give them to record(edges=...), or match over 'all'."
            )
        return self.edges

    def _over_heads(
        self,
        critics: tuple[Tensor, Tensor],
        navigators: tuple[Tensor, Tensor],
        query_mask: Bool[Tensor, "lb n"] | None,
        key_mask: Bool[Tensor, "lb n"] | None,
    ) -> Float[Tensor, "lb h"]:
        """The heads at each position as tokens, the positions as problems; each head is given their mean."""
        if critics[0].shape[2] != critics[1].shape[2]:
            raise ShapeError(
                f"transported='heads' pairs positions, so queries and keys must be equally many, got "
                f"{critics[0].shape[2]} and {critics[1].shape[2]}. Use transported='tokens'."
            )
        heads = critics[0].shape[1]
        swapped = [t.transpose(1, 2) for t in (*critics, *navigators)]  # (lb, n, h, e)
        if self.config.critic_cost == "euclidean":
            losses = _euclidean((swapped[0], swapped[1]), (swapped[2], swapped[3]), None, None)
        else:
            losses = conditional_transport(*swapped)
        masks = [mask for mask in (query_mask, key_mask) if mask is not None]
        valid = torch.stack(masks).all(0) if masks else None
        return masked_mean(losses[:, None], valid).expand(-1, heads)


@torch.no_grad()
def _critic_gap(
    critics: tuple[Float[Tensor, "b h n e"], Float[Tensor, "b h m e"]],
    query_mask: Bool[Tensor, "b n"] | None,
    key_mask: Bool[Tensor, "b m"] | None,
) -> Float[Tensor, ""]:
    """How far apart the critic puts queries and keys: the distance of their mean directions, 0 to 2."""
    means = []
    for features, mask in zip(critics, (query_mask, key_mask), strict=True):
        units = blank_padding(direction(features), mask)
        count = features.shape[2] if mask is None else mask.sum(-1).clamp_min(1)[:, None, None]
        means.append(units.sum(2) / count)  # (b, h, e)
    gap: Tensor = (means[0] - means[1]).norm(dim=-1).mean()
    return gap


def _euclidean(
    critics: tuple[Float[Tensor, "b h n e"], Float[Tensor, "b h m e"]],
    navigators: tuple[Float[Tensor, "b h n f"], Float[Tensor, "b h m f"]],
    query_mask: Bool[Tensor, "b n"] | None,
    key_mask: Bool[Tensor, "b m"] | None,
) -> Float[Tensor, "b h"]:
    """The same with c = |u(q) - u(k)|. A distance is no inner product: this one holds the n×m matrix."""
    alive = samples_with_tokens(query_mask, key_mask)
    features = ((critics[0], True), (critics[1], False), (navigators[0], True), (navigators[1], False))
    query_mask, key_mask, blanked = without_empty(query_mask, key_mask, *features)
    units = [direction(t) for t in blanked[:2]]
    similarity = units[0] @ units[1].mT  # (b, h, n, m)
    cost = (2 - 2 * similarity).clamp_min(1e-6).sqrt()  # the guard keeps the gradient finite where q and k meet
    logits = blanked[2].clamp(-LARGEST_FEATURE, LARGEST_FEATURE) @ blanked[3].mT.clamp(
        -LARGEST_FEATURE, LARGEST_FEATURE
    )
    losses = []
    for scores, costs, mask_from, mask_to in (
        (logits, cost, query_mask, key_mask),
        (logits.mT, cost.mT, key_mask, query_mask),
    ):
        if mask_to is not None:
            scores = scores.masked_fill(~mask_to[:, None, None, :], float("-inf"))
        losses.append(masked_mean((scores.softmax(-1) * costs).sum(-1), mask_from))
    return zero_where_empty((losses[0] + losses[1]) / 2, alive)
