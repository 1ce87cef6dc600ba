"""The whole of conditional transport in seven kernels: critic, navigator, what they carry, and the way back.

    critic:      f = leaky_relu(h W_1 + b_1) W_2 + b_2,  h as in highway.py
    navigator:   g = relu(x V_1 + a_1) V_2 + a_2,   clamped to ± largest

One kernel reads tokens of either side and leaves them placed (placed.py): features are stored as halves alone. Three
transport them (choices.py) and leave what features feel where a problem counts one. One takes that, times what it does
count, back through both networks to the tokens, and adds up what the weights feel; a few programs a layer write their
sums once, and are added in one order: results are the same each time, and whatever else is matched beside.
"""

from collections.abc import Sequence
from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor
from torch.autograd.function import once_differentiable

from alignattn.matching.kernels.choices import choose, pulls
from alignattn.matching.kernels.highway import (
    SLOPE,
    apart,
    dense,
    highway,
    linear,
    put_sums,
    size_of,
    store,
    to_highway,
    to_tokens,
    tokens_of,
)
from alignattn.matching.kernels.placed import GUARD, Placed, parts_of, place, room_for, tokens_there
from alignattn.matching.kernels.tiles import as_bytes, launch

WIDEST = 32  # hidden and other features: all sums of the weights stay in registers
FORWARD_TILE, FORWARD_WARPS = 64, 4
BACKWARD_TILE, BACKWARD_WARPS = 64, 8
PROGRAMS = 264  # a layer, at most, that share the weights' gradient
SHARE = 512  # tokens of each, at least, for its sums to be worth writing


@triton.jit
def _forward(
    query, key, query_mask, key_mask, w_t, b_t, w_g, b_g, w_1, b_1, w_2, b_2, v_1, a_1, v_2, a_2,
    query_unit, query_unit_low, query_nav, query_nav_low, query_inverse, query_size,
    key_unit, key_unit_low, key_nav, key_nav_low, key_inverse, key_size,
    problems, n, m, heads, d, hidden, e, blocks, places, largest, guard, slope,
    ROWS: tl.constexpr, WIDTH: tl.constexpr, HIDDEN: tl.constexpr, OUT: tl.constexpr, QUERY_MASKED: tl.constexpr,
    KEY_MASKED: tl.constexpr, PRECISION: tl.constexpr, PARTS: tl.constexpr,
):  # fmt: skip
    layer = (tl.program_id(0) // places).to(tl.int64)
    block = tl.program_id(0) % places  # first the blocks of queries, then those of keys
    start = tl.where(block < blocks, block, block - blocks) * ROWS
    length = tl.where(block < blocks, n, m)
    count = problems * length
    i = start + tl.arange(0, ROWS)
    if block < blocks:
        x, there = query, tokens_there(query_mask, layer, i, count, length, heads, QUERY_MASKED)
        unit, unit_low, nav, nav_low = query_unit, query_unit_low, query_nav, query_nav_low
        inverse, size = query_inverse, query_size
    else:
        x, there = key, tokens_there(key_mask, layer, i, count, length, heads, KEY_MASKED)
        unit, unit_low, nav, nav_low = key_unit, key_unit_low, key_nav, key_nav_low
        inverse, size = key_inverse, key_size
    own = tokens_of(x, layer, start, count, d, ROWS, WIDTH)
    _, _, carried = highway(own, w_t, b_t, w_g, b_g, layer, d, WIDTH, PRECISION)
    answer = linear(carried, w_1, b_1, layer, d, hidden, WIDTH, HIDDEN, PRECISION)
    features = tl.where(answer > 0, answer, slope * answer)
    critic = linear(features, w_2, b_2, layer, hidden, e, HIDDEN, OUT, PRECISION)
    features = tl.maximum(linear(own, v_1, a_1, layer, d, hidden, WIDTH, HIDDEN, PRECISION), 0.0)
    navigator = tl.clamp(linear(features, v_2, a_2, layer, hidden, e, HIDDEN, OUT, PRECISION), -largest, largest)
    place(
        critic, navigator, there, unit, unit_low, nav, nav_low, inverse, size, layer, start, count, e, e, guard,
        ROWS, OUT, OUT, PARTS,
    )  # fmt: skip


@triton.jit
def _put(to, weight, bias, rows, columns, ROWS: tl.constexpr, COLUMNS: tl.constexpr):
    """What one layer feels, its bias behind its weight."""
    store(to, weight, 0, 0, rows, columns, ROWS, COLUMNS)
    j = tl.arange(0, COLUMNS)
    tl.store(to + rows * columns + j, bias, mask=j < columns)


@triton.jit
def _backward(
    query, key, of_query_unit, of_query_nav, of_key_unit, of_key_nav, of_problems,
    w_t, b_t, w_g, b_g, w_1, b_1, w_2, b_2, v_1, a_1, v_2, a_2, of_query, of_key, sums,
    problems, n, m, d, hidden, e, blocks, places, programs, size, largest, sign, slope,
    ROWS: tl.constexpr, WIDTH: tl.constexpr, HIDDEN: tl.constexpr, OUT: tl.constexpr, PRECISION: tl.constexpr,
    TOKENS: tl.constexpr, WEIGHTS: tl.constexpr,
):  # fmt: skip
    layer = (tl.program_id(0) // programs).to(tl.int64)
    sum_t, sum_g = tl.zeros([WIDTH, WIDTH], tl.float32), tl.zeros([WIDTH, WIDTH], tl.float32)
    sum_w1, sum_v1 = tl.zeros([WIDTH, HIDDEN], tl.float32), tl.zeros([WIDTH, HIDDEN], tl.float32)
    sum_w2, sum_v2 = tl.zeros([HIDDEN, OUT], tl.float32), tl.zeros([HIDDEN, OUT], tl.float32)
    sum_bt, sum_bg = tl.zeros([WIDTH], tl.float32), tl.zeros([WIDTH], tl.float32)
    sum_b1, sum_a1 = tl.zeros([HIDDEN], tl.float32), tl.zeros([HIDDEN], tl.float32)
    sum_b2, sum_a2 = tl.zeros([OUT], tl.float32), tl.zeros([OUT], tl.float32)
    for block in range(tl.program_id(0) % programs, places, programs):
        start = tl.where(block < blocks, block, block - blocks) * ROWS
        length = tl.where(block < blocks, n, m)
        count = problems * length
        if block < blocks:
            x, of_unit, of_nav, of_x = query, of_query_unit, of_query_nav, of_query
        else:
            x, of_unit, of_nav, of_x = key, of_key_unit, of_key_nav, of_key
        i = start + tl.arange(0, ROWS)
        own = tokens_of(x, layer, start, count, d, ROWS, WIDTH)
        by = tl.load(of_problems + layer * problems + i // length, mask=i < count, other=0.0)
        given = tokens_of(of_unit, layer, start, count, e, ROWS, OUT) * by[:, None]
        back = tl.trans(tokens_of(w_2, layer, 0, hidden, e, HIDDEN, OUT))
        answer, gate, carried, of_answer, of_carried, of_gate, of_transformed = to_highway(
            own, tl.dot(given, back, input_precision=PRECISION), w_t, b_t, w_g, b_g, w_1, b_1, layer, d, hidden, slope,
            WIDTH, HIDDEN, PRECISION,
        )  # fmt: skip
        if WEIGHTS:
            features = tl.where(answer > 0, answer, slope * answer)
            sum_w2 += tl.dot(tl.trans(features), given, input_precision=PRECISION)
            sum_w1 += tl.dot(tl.trans(carried), of_answer, input_precision=PRECISION)
            sum_t += tl.dot(tl.trans(own), of_transformed, input_precision=PRECISION)
            sum_g += tl.dot(tl.trans(own), of_gate, input_precision=PRECISION)
            sum_b2 += tl.sum(given, 0)
            sum_b1 += tl.sum(of_answer, 0)
            sum_bt += tl.sum(of_transformed, 0)
            sum_bg += tl.sum(of_gate, 0)
        if TOKENS:
            gradient = to_tokens(gate, of_carried, of_gate, of_transformed, w_t, w_g, layer, d, WIDTH, PRECISION)
        features = tl.maximum(linear(own, v_1, a_1, layer, d, hidden, WIDTH, HIDDEN, PRECISION), 0.0)
        navigator = linear(features, v_2, a_2, layer, hidden, e, HIDDEN, OUT, PRECISION)
        given = tokens_of(of_nav, layer, start, count, e, ROWS, OUT) * by[:, None]
        given = tl.where(tl.abs(navigator) <= largest, given, 0.0)
        back = tl.trans(tokens_of(v_2, layer, 0, hidden, e, HIDDEN, OUT))
        of_answer = tl.where(features > 0, tl.dot(given, back, input_precision=PRECISION), 0.0)
        if WEIGHTS:
            sum_v2 += tl.dot(tl.trans(features), given, input_precision=PRECISION)
            sum_v1 += tl.dot(tl.trans(own), of_answer, input_precision=PRECISION)
            sum_a2 += tl.sum(given, 0)
            sum_a1 += tl.sum(of_answer, 0)
        if TOKENS:
            back = tl.trans(tokens_of(v_1, layer, 0, d, hidden, WIDTH, HIDDEN))
            gradient += tl.dot(of_answer, back, input_precision=PRECISION)
            store(of_x, gradient, layer, start, count, d, ROWS, WIDTH)
    if WEIGHTS:
        to = sums + tl.program_id(0).to(tl.int64) * size
        # The critic ascends.
        put_sums(to, -sum_t, -sum_bt, -sum_g, -sum_bg, -sum_w1, -sum_b1, d, hidden, WIDTH, HIDDEN)
        to += 2 * d * (d + 1) + (d + 1) * hidden
        _put(to, -sum_w2, -sum_b2, hidden, e, HIDDEN, OUT)
        to += (hidden + 1) * e
        _put(to, sign * sum_v1, sign * sum_a1, d, hidden, WIDTH, HIDDEN)
        to += (d + 1) * hidden
        _put(to, sign * sum_v2, sign * sum_a2, hidden, e, HIDDEN, OUT)


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
        sides, networks = dense(query, key), dense(*(weight if rows is None else weight[rows] for weight in weights))
        masks = query_mask, key_mask
        placed = _placed(products, largest, sides, masks, networks)
        chosen = choose(*placed, *masks, query.shape[2], products)
        if any(ctx.needs_input_grad[6:]):
            ctx.save_for_backward(*sides, *pulls(*placed, chosen, products), *networks)
        ctx.products, ctx.largest, ctx.sign = products, largest, sign
        ctx.rows, ctx.bank = rows, [weight.shape for weight in weights]
        return chosen.losses.view(-1, query.shape[2])

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *outer: Tensor) -> tuple[Tensor | None, ...]:
        (query, key), felt, networks = ctx.saved_tensors[:2], ctx.saved_tensors[2:6], ctx.saved_tensors[6:]
        wanted = ctx.needs_input_grad[6:]
        of_tokens = [torch.empty_like(side) for side in (query, key)] if any(wanted[:2]) else [query, key]
        layers, samples, heads, n, d = query.shape
        m, hidden, e = key.shape[3], networks[4].shape[-1], networks[6].shape[-1]
        settings = _shape(d, hidden, e, ctx.products, BACKWARD_TILE, BACKWARD_WARPS)
        blocks, places = _places(samples * heads, n, m, BACKWARD_TILE)
        programs = min(PROGRAMS, triton.cdiv(places * BACKWARD_TILE, SHARE)) if any(wanted[2:]) else places
        size = size_of(networks)
        sums = query.new_empty(layers, programs, size) if any(wanted[2:]) else query
        launch(
            _backward, layers * programs, query, key, *felt, outer[0].contiguous(), *networks, *of_tokens, sums,
            samples * heads, n, m, d, hidden, e, blocks, places, programs, size, ctx.largest, ctx.sign, SLOPE,
            TOKENS=any(wanted[:2]), WEIGHTS=any(wanted[2:]), **settings,
        )  # fmt: skip
        of_weights: Sequence[Tensor | None] = _in_bank(sums, ctx.rows, ctx.bank) if any(wanted[2:]) else [None] * 12
        return *[None] * 6, *(of if want else None for of, want in zip((*of_tokens, *of_weights), wanted, strict=True))


def _placed(
    products: str,
    largest: float,
    sides: Sequence[Tensor],
    masks: tuple[Tensor | None, Tensor | None],
    networks: Sequence[Tensor],
) -> tuple[Placed, Placed]:
    query, key = sides
    (layers, samples, heads, n, d), m = query.shape, key.shape[3]
    hidden, e = networks[4].shape[-1], networks[6].shape[-1]
    placed = [room_for(layers * samples * heads, count, e, e, products, query) for count in (n, m)]
    blocks, places = _places(samples * heads, n, m, FORWARD_TILE)
    launch(
        _forward, layers * places, *sides, *as_bytes(*masks, query), *networks, *placed[0].all(), *placed[1].all(),
        samples * heads, n, m, heads, d, hidden, e, blocks, places, largest, GUARD, SLOPE, PARTS=parts_of(products),
        QUERY_MASKED=masks[0] is not None, KEY_MASKED=masks[1] is not None,
        **_shape(d, hidden, e, products, FORWARD_TILE, FORWARD_WARPS),
    )  # fmt: skip
    return placed[0], placed[1]


def _places(problems: int, n: int, m: int, rows: int) -> tuple[int, int]:
    """Blocks of queries, and of both sides."""
    blocks = triton.cdiv(problems * n, rows)
    return blocks, blocks + triton.cdiv(problems * m, rows)


def _shape(d: int, hidden: int, e: int, products: str, rows: int, warps: int) -> dict[str, Any]:
    width, middle, out = (max(16, triton.next_power_of_2(size)) for size in (d, hidden, e))
    tiles = {"ROWS": rows, "WIDTH": width, "HIDDEN": middle, "OUT": out}
    return {**tiles, "PRECISION": products, "num_warps": warps, "num_stages": 1}


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
