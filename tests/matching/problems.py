"""Random problems, masks and the losses as functions of (query, key, query_mask, key_mask), for the tests here."""

from collections.abc import Callable

import torch
from torch import Tensor

from alignattn import functional as F

Mask = Tensor | None
Loss = Callable[[Tensor, Tensor, Mask, Mask], Tensor]


def random_problem(
    b: int = 3, h: int = 2, n: int = 6, m: int = 7, d: int = 5, *, seed: int = 0, dtype: torch.dtype = torch.float64
) -> tuple[Tensor, Tensor]:
    """Queries and keys of different mean and spread, as in real attention."""
    generator = torch.Generator().manual_seed(seed)
    query = torch.randn(b, h, n, d, generator=generator, dtype=torch.float64)
    key = 1.3 * torch.randn(b, h, m, d, generator=generator, dtype=torch.float64) + 0.4
    return query.to(dtype), key.to(dtype)


def right_padding(lengths: list[int], width: int) -> Tensor:
    return torch.arange(width)[None, :] < torch.tensor(lengths)[:, None]


def poisoned(tokens: Tensor, mask: Tensor, value: float) -> Tensor:
    """tokens [b, h, n, ...] with value at every padded position."""
    valid = mask[:, None, :].reshape(mask.shape[0], 1, mask.shape[1], *[1] * (tokens.ndim - 3))
    return torch.where(valid, tokens, torch.full_like(tokens, value))


def value_and_gradients(loss: Loss, query: Tensor, key: Tensor, query_mask: Mask = None, key_mask: Mask = None):
    query, key = query.detach().clone().requires_grad_(), key.detach().clone().requires_grad_()
    value = loss(query, key, query_mask, key_mask)
    value.sum().backward()
    return value.detach(), query.grad, key.grad


def _transport(**options: object) -> Loss:
    def loss(query: Tensor, key: Tensor, query_mask: Mask = None, key_mask: Mask = None) -> Tensor:
        masks = {"query_mask": query_mask, "key_mask": key_mask}
        return F.optimal_transport(query, key, **options, **masks).cost  # type: ignore[arg-type]

    return loss


def _mmd(**options: object) -> Loss:
    def loss(query: Tensor, key: Tensor, query_mask: Mask = None, key_mask: Mask = None) -> Tensor:
        return F.mmd(query, key, query_mask=query_mask, key_mask=key_mask, **options)  # type: ignore[arg-type]

    return loss


def _conditional(query: Tensor, key: Tensor, query_mask: Mask = None, key_mask: Mask = None) -> Tensor:
    masks = {"query_mask": query_mask, "key_mask": key_mask}
    return F.conditional_transport(query, key, query.flip(-1), key.flip(-1), **masks)


def _adversarial(query: Tensor, key: Tensor, query_mask: Mask = None, key_mask: Mask = None) -> Tensor:
    return F.adversarial(query[..., 0], key[..., 0], query_mask=query_mask, key_mask=key_mask)


_CONVERGED = {"epsilon": 0.5, "relative_epsilon": True, "max_iterations": 500, "tolerance": 1e-11}


def _features(query: Tensor, key: Tensor, query_mask: Mask, key_mask: Mask) -> Tensor:
    return F.feature_distance(query, key, query_mask=query_mask, key_mask=key_mask)


LOSSES: dict[str, Loss] = {
    "adversarial": _adversarial,
    "features": _features,
    "transport-cosine": _transport(cost="cosine", **_CONVERGED),
    "transport-sqeuclidean": _transport(cost="sqeuclidean", **_CONVERGED),
    "transport-unrolled": _transport(gradient="unrolled", epsilon=0.5, max_iterations=8, tolerance=0.0),
    "conditional": _conditional,
    "mmd-median": _mmd(bandwidth="median"),
    "mmd-mean": _mmd(bandwidth="mean"),
    "mmd-fixed": _mmd(bandwidth=1.5),
    "mmd-biased": _mmd(bandwidth="median", unbiased=False),
}
