"""The whole of conditional transport in seven kernels: critic, navigator, what they carry, and the way back.

    tokens -> placed (networks.py, placed.py) -> choices -> losses, what features feel (choices.py)
    tokens, what features feel, what problems count -> what tokens feel, what weights feel (networks.py)

Features are stored as halves alone. What many programs add up is added in one order: results are the same each time,
and whatever else is matched beside.
"""

from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
import triton
from torch import Tensor
from torch.autograd.function import once_differentiable

from alignattn.matching.kernels import networks
from alignattn.matching.kernels.choices import choose, pulls
from alignattn.matching.kernels.highway import SLOPE, dense, size_of
from alignattn.matching.kernels.placed import GUARD, parts_of, room_for
from alignattn.matching.kernels.tiles import as_bytes, launch

WIDEST = 32  # hidden and other features: more would not fit the registers
PROGRAMS = 264  # a layer, at most, that share the weights' gradient
SHARE = 512  # tokens of each, at least, for its sums to be worth writing


class Form(NamedTuple):
    """Of a kernel's tiles: more rows, and for the trunk's sums these, leave the registers."""

    rows: int
    warps: int


FORWARD, TOKENS, TRUNK, REST = Form(64, 4), Form(64, 4), Form(32, 4), Form(64, 4)


class _Carried(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        rows: slice | None,
        products: str,
        largest: float,
        sign: float,
        query_mask: Tensor | None,
        key_mask: Tensor | None,
        query: Tensor,
        key: Tensor,
        *weights: Tensor,
    ) -> Tensor:
        sides, own = dense(query, key), dense(*(weight if rows is None else weight[rows] for weight in weights))
        (layers, samples, heads, n, d), m, e = query.shape, key.shape[3], own[6].shape[-1]
        masks = query_mask, key_mask
        query_placed, key_placed = (room_for(layers * samples * heads, side, e, e, products, query) for side in (n, m))
        problems, hidden = samples * heads, own[4].shape[-1]
        blocks, places = _places(problems, n, m, FORWARD)
        launch(
            networks.features, layers * places, *sides, *as_bytes(*masks, query), *own, *query_placed.all(),
            *key_placed.all(), problems, n, m, heads, d, hidden, e, blocks, places, largest, GUARD, SLOPE,
            OUT=_width(e), QUERY_MASKED=query_mask is not None, KEY_MASKED=key_mask is not None,
            PARTS=parts_of(products), **_shape(d, hidden, products, FORWARD),
        )  # fmt: skip
        chosen = choose(query_placed, key_placed, *masks, heads, products)
        if any(ctx.needs_input_grad[6:]):
            ctx.save_for_backward(*sides, *pulls(query_placed, key_placed, chosen, products), *own)
        ctx.products, ctx.largest, ctx.sign = products, largest, sign
        ctx.rows, ctx.bank = rows, [weight.shape for weight in weights]
        return chosen.losses.view(-1, heads)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *outer: Tensor) -> tuple[Tensor | None, ...]:
        sides, felt, own = ctx.saved_tensors[:2], ctx.saved_tensors[2:6], ctx.saved_tensors[6:]
        (layers, samples, heads, n, d), m = sides[0].shape, sides[1].shape[3]
        hidden, e = own[4].shape[-1], own[6].shape[-1]
        sizes, of_problems = (samples * heads, n, m), outer[0].contiguous()
        of_tokens = [torch.empty_like(side) for side in sides]
        # What the critic's last layer is given, and what is felt there: of queries, of keys.
        given, given_feel = ([side.new_empty(*side.shape[:-1], hidden) for side in sides] for _ in range(2))
        blocks, places = _places(*sizes, TOKENS)
        launch(
            networks.tokens_feel, layers * places, *sides, *felt, of_problems, *own[:7], *own[8:], *of_tokens,
            *given, *given_feel, *sizes, d, hidden, e, blocks, places, ctx.largest, SLOPE,
            OUT=_width(e), **_shape(d, hidden, ctx.products, TOKENS),
        )  # fmt: skip
        of_weights: Sequence[Tensor | None] = [None] * len(own)
        if any(ctx.needs_input_grad[8:]):
            programs, size = min(PROGRAMS, triton.cdiv(samples * heads * (n + m), SHARE)), size_of(own)
            sums = of_problems.new_empty(layers, programs, size)
            launch(
                networks.trunk_feels, layers * programs, *sides, *given_feel, *own[:6], sums, *sizes, d, hidden,
                *_places(*sizes, TRUNK), programs, size, SLOPE, **_shape(d, hidden, ctx.products, TRUNK),
            )  # fmt: skip
            launch(
                networks.rest_feels, layers * programs, *sides, *felt, of_problems, *given, *own[8:], sums, *sizes,
                d, hidden, e, *_places(*sizes, REST), programs, size, ctx.largest, ctx.sign,
                OUT=_width(e), **_shape(d, hidden, ctx.products, REST),
            )  # fmt: skip
            of_weights = _in_bank(sums, ctx.rows, ctx.bank)
        return *[None] * 6, *of_tokens, *of_weights


def _places(problems: int, n: int, m: int, form: Form) -> tuple[int, int]:
    """Blocks of the queries of a layer, and of both sides."""
    blocks = triton.cdiv(problems * n, form.rows)
    return blocks, blocks + triton.cdiv(problems * m, form.rows)


def _width(size: int) -> int:
    return max(16, int(triton.next_power_of_2(size)))


def _shape(d: int, hidden: int, products: str, form: Form) -> dict[str, Any]:
    tiles = {"ROWS": form.rows, "WIDTH": _width(d), "HIDDEN": _width(hidden)}
    return {**tiles, "PRECISION": products, "num_warps": form.warps, "num_stages": 1}


def _in_bank(sums: Tensor, rows: slice | None, bank: Sequence[torch.Size]) -> list[Tensor]:
    """Weights and biases of all layers of a bank, zeros but in these rows. In one tensor: they are many and small."""
    if rows is None:
        total = sums.sum(1)
    else:
        total = sums.new_zeros(bank[0][0], sums.shape[2])
        torch.sum(sums, 1, out=total[rows])
    parts = total.split([shape[1:].numel() for shape in bank], 1)
    return [part.reshape(shape) for part, shape in zip(parts, bank, strict=True)]


def carried(
    products: str,
    query: Tensor,
    key: Tensor,
    query_mask: Tensor | None,
    key_mask: Tensor | None,
    *weights: Tensor,
    rows: slice | None,
    largest: float,
    sign: float,
) -> Tensor:
    """Bidirectional cost [lb, h] of queries and keys [l, b, h, tokens, d], masks [lb, tokens]; the critic ascends.

    Weights and biases of the critic's transform, gate, first and second layer in turn, then of the navigator's two, are
    those of a bank, of which `rows` serve. The gradient of the navigator's is taken times `sign`; what it answers
    counts up to `largest`.
    """
    losses: Tensor = _Carried.apply(rows, products, largest, sign, query_mask, key_mask, query, key, *weights)
    return losses
