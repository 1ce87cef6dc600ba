"""Each loss alone, with its backward: how it grows with the length of a sequence, beside attention itself."""

from collections.abc import Callable, Iterator, Sequence

import torch
import torch.nn.functional as F
from torch import Tensor

from alignattn.bench.row import Row, measured
from alignattn.bench.straightforward import LayerLoss
from alignattn.config import METHODS, resolve
from alignattn.matching.at_once import differentiate

LENGTHS = (128, 512, 2048, 8192)
NAIVE_PAIRS = 2**28  # numbers in one matrix of all problems; more are not tried


def alone(
    lengths: Sequence[int], methods: Sequence[str], device: torch.device, *, heads: int, width: int, rounds: int
) -> Iterator[list[Row]]:
    """One sample, so many heads; attention's own forward and backward is what they are compared with."""
    dtype = torch.bfloat16 if device.type == "cuda" else torch.float32
    for tokens in lengths:
        generator = torch.Generator("cpu").manual_seed(0)
        sides = [torch.randn(1, heads, tokens, width, generator=generator) for _ in range(3)]
        query, key, value = (t.to(device, dtype).requires_grad_() for t in sides)
        calls: dict[str, Callable[[], object]] = {"attention": _attention(query, key, value)}
        failed = {}
        for method in methods:
            calls[method] = _ours(method, query, key)
        for method in methods:
            if heads * (2 * tokens) ** 2 > NAIVE_PAIRS:
                failed[f"{method}, straightforward"] = "matrices too large"
            else:
                calls[f"{method}, straightforward"] = _naive(method, query, key)
        case = f"{heads} heads of {tokens} × {width}, {str(dtype).removeprefix('torch.')}"
        yield measured("length", case, calls, device, rounds=rounds, failed=failed)


def _attention(query: Tensor, key: Tensor, value: Tensor) -> Callable[[], None]:
    outer = torch.randn_like(value)

    def call() -> None:
        F.scaled_dot_product_attention(query, key, value).backward(outer)
        _forget(query, key, value)

    return call


def _ours(method: str, query: Tensor, key: Tensor) -> Callable[[], None]:
    matcher = METHODS[method][0](resolve(method, None, "stable", {}).matcher)
    matcher.ensure(["layer"], query.shape[-1], query.device)
    outer = torch.full((1, *query.shape[:2]), 1 / query.shape[1], device=query.device)

    def call() -> None:
        differentiate(matcher, query.detach()[None], key.detach()[None], None, None, ["layer"], outer)

    return call


def _naive(method: str, query: Tensor, key: Tensor) -> Callable[[], None]:
    loss = LayerLoss(method, query.shape[-1]).to(query.device)
    valid = torch.ones(len(query), query.shape[2], dtype=torch.bool, device=query.device)

    def call() -> None:
        loss(query, key, valid).mean().backward()
        _forget(query, key, *loss.parameters())

    return call


def _forget(*leaves: Tensor) -> None:
    for leaf in leaves:
        leaf.grad = None
