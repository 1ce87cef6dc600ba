"""Means, covariances and lengths of queries and keys, over all tokens of all samples.

    distance of means        |μ_q - μ_k| / √tr Σ,      Σ = (Σ_q + Σ_k) / 2
    distance of covariances  ‖Σ_q - Σ_k‖ / ‖Σ‖         (Frobenius, from 0 to 2)

Both are blind to the scale and to a rotation of all vectors. For small differences the distance of two such Gaussians
(Fréchet) is tr Σ · (means² + covariances² / 4): that sets the one beside the other.
"""

import torch
from jaxtyping import Bool, Float
from torch import Tensor


class Moments:
    """Of one side, [h, d] and [h, d, d] in double precision; added to batch by batch."""

    def __init__(self, like: Float[Tensor, "b h n d"]) -> None:
        heads, width = like.shape[1], like.shape[3]
        self.count = 0
        self.sums = torch.zeros(heads, width, dtype=torch.float64, device=like.device)
        self.squares = torch.zeros(heads, width, width, dtype=torch.float64, device=like.device)
        self.lengths = torch.zeros(heads, dtype=torch.float64, device=like.device)

    def add(self, tokens: Float[Tensor, "b h n d"], mask: Bool[Tensor, "b n"]) -> None:
        """The valid tokens of a batch."""
        valid = tokens.transpose(1, 2)[mask].double().transpose(0, 1)  # (h, t, d)
        self.count += valid.shape[1]
        self.sums += valid.sum(1)
        self.squares += valid.mT @ valid
        self.lengths += valid.norm(dim=-1).sum(-1)

    @property
    def mean(self) -> Float[Tensor, "h d"]:
        return self.sums / max(1, self.count)

    @property
    def covariance(self) -> Float[Tensor, "h d d"]:
        about = self.squares - self.count * self.mean[:, :, None] * self.mean[:, None, :]
        return about / max(1, self.count - 1)

    @property
    def length(self) -> Float[Tensor, " h"]:
        """The mean of |x|."""
        return self.lengths / max(1, self.count)


def distances(query: Moments, key: Moments) -> tuple[Float[Tensor, " h"], Float[Tensor, " h"]]:
    """Of means and of covariances. Two points: zero where they are one, infinity where they are not."""
    pooled = (query.covariance + key.covariance) / 2
    gap = (query.mean - key.mean).norm(dim=-1)
    size = query.length + key.length
    deviation = pooled.diagonal(0, 1, 2).sum(-1).clamp_min(0).sqrt()
    still = deviation <= 1e-6 * size  # rounding alone: squares of lengths were subtracted from each other
    means = torch.where(still, torch.where(gap <= 1e-6 * size, 0.0, torch.inf), gap / torch.where(still, 1, deviation))
    apart = (query.covariance - key.covariance).flatten(1).norm(dim=-1)
    norm = pooled.flatten(1).norm(dim=-1)
    return means, torch.where(still, 0.0, apart / torch.where(still, 1, norm))
