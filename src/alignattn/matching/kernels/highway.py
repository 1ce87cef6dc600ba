"""The trunk of discriminator and critic in one pass: nothing between tokens and features is stored.

    t = x W_t + b_t,  g = sigmoid(x W_g + b_g),  h = x + g (relu(t) - x),  features = leaky_relu(h W_1 + b_1)

The backward computes it anew, for tokens and weights at once. Weights are [layers, in, out]. A few programs a layer
take its tokens in turn, some rows at a time, so that weights are read once; for the weights' gradient they add up what
their tokens give, and write it once: nothing is added atomically, and results are the same each time.

Products are of halves (halves.py), each tile of numbers times a power of two of its own: whatever the size of tokens
or gradients, they are as precise.
"""

from collections.abc import Sequence
from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor
from torch.autograd.function import once_differentiable

from alignattn.matching.kernels import EXACT
from alignattn.matching.kernels.halves import powers, product, split
from alignattn.matching.kernels.tiles import has_room, launch

TILE = 32  # rows; with as many warps registers hold weights, and what weights and tokens feel
WARPS = 8
PROGRAMS = 264  # that share the tokens of all layers, and the weights' gradient
SLOPE = 0.01
LOG2E = tl.constexpr(1.4426950408889634)


@triton.jit
def placed(values, PARTS: tl.constexpr):
    """A tile of numbers as halves, and what takes them back."""
    return placed_by(values, tl.max(tl.abs(values)), PARTS)


@triton.jit
def placed_by(values, most, PARTS: tl.constexpr):
    """The same, where none is known to be larger: of all of them, or [rows, 1] of each row."""
    power, unit = powers(most)
    high, low, _ = split(values * power, PARTS)
    return high, low, unit


@triton.jit
def largest_of_rows(values):
    """Of each, [rows, 1]: threads that share a row are of one warp, and need not wait for others."""
    return tl.max(tl.abs(values), 1)[:, None]


@triton.jit
def _times(high, low, other, other_low, unit, PARTS: tl.constexpr):
    return product(high, low, other, other_low, tl.zeros([high.shape[0], other.shape[1]], tl.float32), PARTS) * unit


@triton.jit
def loaded(pointer, layer, rows, columns, ROWS: tl.constexpr, COLUMNS: tl.constexpr):
    """The matrix of a layer."""
    i, j = tl.arange(0, ROWS), tl.arange(0, COLUMNS)
    inside = (i[:, None] < rows) & (j[None, :] < columns)
    return tl.load(pointer + layer * rows * columns + i[:, None] * columns + j[None, :], mask=inside, other=0.0)


@triton.jit
def row_of(pointer, row, count, WIDTH: tl.constexpr):
    """One row of a matrix."""
    j = tl.arange(0, WIDTH)
    return tl.load(pointer + row * count + j, mask=j < count, other=0.0)


@triton.jit
def reach_of(weight, bias):
    """How large x W + b gets: so many times the largest x, and so much beside it."""
    return tl.max(tl.sum(tl.abs(weight), 0), 0), tl.max(tl.abs(bias), 0)


@triton.jit
def weights_of(w_t, w_g, w_1, b_t, layer, d, hidden, WIDTH: tl.constexpr, HIDDEN: tl.constexpr, PARTS: tl.constexpr):
    """Of a layer, as halves, and what takes all of them back; and how large transforms get."""
    transform, gate = loaded(w_t, layer, d, d, WIDTH, WIDTH), loaded(w_g, layer, d, d, WIDTH, WIDTH)
    first = loaded(w_1, layer, d, hidden, WIDTH, HIDDEN)
    most = tl.maximum(tl.max(tl.abs(transform)), tl.max(tl.abs(gate)))
    power, unit = powers(tl.maximum(most, tl.max(tl.abs(first))))
    reach, shift = reach_of(transform, row_of(b_t, layer, d, WIDTH))
    transform, transform_low, _ = split(transform * power, PARTS)
    gate, gate_low, _ = split(gate * power, PARTS)
    first, first_low, _ = split(first * power, PARTS)
    return transform, transform_low, gate, gate_low, first, first_low, unit, reach, shift


@triton.jit
def forth(
    x, most, w_t, w_t_low, w_g, w_g_low, w_1, w_1_low, unit, reach, shift, b_t, b_g, b_1, layer, d, hidden,
    WIDTH: tl.constexpr, HIDDEN: tl.constexpr, PARTS: tl.constexpr,
):  # fmt: skip
    """The gate, below zero where the transform is; what it moves; answers; tokens and what is carried, as halves.

    The largest token is told. What is carried lies between tokens and transforms, which bounds it: threads need not
    wait for each other to know what is largest, and of the 30 powers of two that halves tell apart a few stay idle.
    """
    x_high, x_low, x_unit = placed_by(x, most, PARTS)
    if PARTS == 1:
        x = x_high.to(tl.float32) * x_unit  # takes half the registers, and products see no more of it
    by = x_unit * unit
    height = _times(x_high, x_low, w_g, w_g_low, -LOG2E * by, PARTS) - LOG2E * row_of(b_g, layer, d, WIDTH)[None, :]
    gate = 1.0 + tl.exp2(height)
    gate = tl.rsqrt(gate * gate)  # as precise as a quotient, and in fewer instructions
    transformed = _times(x_high, x_low, w_t, w_t_low, by, PARTS) + row_of(b_t, layer, d, WIDTH)[None, :]
    let = gate * (tl.maximum(transformed, 0.0) - x)
    high, low, carried_unit = placed_by(x + let, tl.maximum(most, most * reach + shift), PARTS)
    answer = _times(high, low, w_1, w_1_low, carried_unit * unit, PARTS) + row_of(b_1, layer, hidden, HIDDEN)[None, :]
    mark = tl.where(transformed > 0, gate, -gate)
    lever = let * (1.0 - gate)
    if PARTS == 1:
        mark = mark.to(tl.float16)  # as precise as what it is multiplied with, and registers are few
    return mark, lever, answer, x_high, x_low, x_unit, high, low, carried_unit


@triton.jit
def leaky(answer, values, slope):
    """Values where the answer is above zero, and less of them elsewhere."""
    return tl.where(answer > 0, values, slope * values)


@triton.jit
def back(mark, lever, high, low, w_1, w_1_low, PARTS: tl.constexpr):
    """What is carried on, the gate and the transform feel of answers, which feel these halves; in units of both."""
    nothing = tl.zeros([high.shape[0], w_1.shape[0]], tl.float32)
    of_carried = product(high, low, tl.trans(w_1), tl.trans(w_1_low), nothing, PARTS)
    return of_carried, of_carried * lever, of_carried * tl.maximum(mark.to(tl.float32), 0.0)


@triton.jit
def largest(one, other):
    """Of two tiles."""
    return tl.max(tl.maximum(tl.abs(one), tl.abs(other)))


@triton.jit
def to_tokens(of_carried, mark, of_t, of_t_low, of_g, of_g_low, unit, w_t, w_t_low, w_g, w_g_low, PARTS: tl.constexpr):
    """What tokens feel: past the gate, and of halves through it and the transform."""
    through = tl.zeros([of_t.shape[0], w_t.shape[0]], tl.float32)
    through = product(of_t, of_t_low, tl.trans(w_t), tl.trans(w_t_low), through, PARTS)
    through = product(of_g, of_g_low, tl.trans(w_g), tl.trans(w_g_low), through, PARTS)
    return of_carried * (1.0 - tl.abs(mark.to(tl.float32))) + through * unit


@triton.jit
def to_weights(high, low, felt, felt_low, unit, PARTS: tl.constexpr):
    """What a weight feels of a tile: Σ_i input_i felt_i."""
    return _times(tl.trans(high), tl.trans(low), felt, felt_low, unit, PARTS)


@triton.jit
def column_sums(high, low, unit, weights, PARTS: tl.constexpr):
    """Of halves, with 16 weights for each row, which a half holds: by a product, threads need not wait for others."""
    return _times(tl.trans(high), tl.trans(low), weights, tl.zeros_like(weights), unit, PARTS)


@triton.jit
def read_tokens(pointer, layer, start, count, d, ROWS: tl.constexpr, WIDTH: tl.constexpr):
    """Some rows of a layer."""
    i, e = tl.arange(0, ROWS), tl.arange(0, WIDTH)
    inside = (i[:, None] < count - start) & (e[None, :] < d)
    return tl.load(pointer + (layer * count + start) * d + (i[:, None] * d + e[None, :]), mask=inside, other=0.0)


@triton.jit
def store(pointer, values, layer, start, count, d, ROWS: tl.constexpr, WIDTH: tl.constexpr):
    """Put them there."""
    i, e = tl.arange(0, ROWS), tl.arange(0, WIDTH)
    inside = (i[:, None] < count - start) & (e[None, :] < d)
    tl.store(pointer + (layer * count + start) * d + (i[:, None] * d + e[None, :]), values, mask=inside)


@triton.jit
def put_sums(to, sum_t, sum_bt, sum_g, sum_bg, sum_1, sum_b1, d, hidden, WIDTH: tl.constexpr, HIDDEN: tl.constexpr):
    """What weights and biases feel, one behind the other."""
    e, k = tl.arange(0, WIDTH), tl.arange(0, HIDDEN)
    store(to, sum_t, 0, 0, d, d, WIDTH, WIDTH)
    tl.store(to + d * d + e, sum_bt, mask=e < d)
    to += d * (d + 1)
    store(to, sum_g, 0, 0, d, d, WIDTH, WIDTH)
    tl.store(to + d * d + e, sum_bg, mask=e < d)
    to += d * (d + 1)
    store(to, sum_1, 0, 0, d, hidden, WIDTH, HIDDEN)
    tl.store(to + d * hidden + k, sum_b1, mask=k < hidden)


@triton.jit
def _features_of(
    x, w_t, b_t, w_g, b_g, w_1, b_1, features, count, d, hidden, programs, slope,
    ROWS: tl.constexpr, WIDTH: tl.constexpr, HIDDEN: tl.constexpr, PARTS: tl.constexpr,
):  # fmt: skip
    layer = (tl.program_id(0) // programs).to(tl.int64)
    t, t_low, g, g_low, h, h_low, unit, reach, shift = weights_of(
        w_t, w_g, w_1, b_t, layer, d, hidden, WIDTH, HIDDEN, PARTS
    )
    for start in range((tl.program_id(0) % programs) * ROWS, count, programs * ROWS):
        own = read_tokens(x, layer, start, count, d, ROWS, WIDTH)
        _, _, answer, _, _, _, _, _, _ = forth(
            own, tl.max(tl.abs(own)), t, t_low, g, g_low, h, h_low, unit, reach, shift, b_t, b_g, b_1, layer, d, hidden,
            WIDTH, HIDDEN, PARTS,
        )  # fmt: skip
        store(features, leaky(answer, answer, slope), layer, start, count, hidden, ROWS, HIDDEN)


@triton.jit
def _features_back(
    x, outer, w_t, b_t, w_g, b_g, w_1, b_1, of_x, sums, count, d, hidden, programs, size, slope,
    ROWS: tl.constexpr, WIDTH: tl.constexpr, HIDDEN: tl.constexpr, PARTS: tl.constexpr,
    TOKENS: tl.constexpr, WEIGHTS: tl.constexpr,
):  # fmt: skip
    layer = (tl.program_id(0) // programs).to(tl.int64)
    t, t_low, g, g_low, h, h_low, unit, reach, shift = weights_of(
        w_t, w_g, w_1, b_t, layer, d, hidden, WIDTH, HIDDEN, PARTS
    )
    sum_t, sum_g = tl.zeros([WIDTH, WIDTH], tl.float32), tl.zeros([WIDTH, WIDTH], tl.float32)
    sum_1 = tl.zeros([WIDTH, HIDDEN], tl.float32)
    sum_bt, sum_bg = tl.zeros([WIDTH], tl.float32), tl.zeros([WIDTH], tl.float32)
    sum_b1 = tl.zeros([HIDDEN], tl.float32)
    for start in range((tl.program_id(0) % programs) * ROWS, count, programs * ROWS):
        own = read_tokens(x, layer, start, count, d, ROWS, WIDTH)
        given = read_tokens(outer, layer, start, count, hidden, ROWS, HIDDEN)
        mark, lever, answer, high, low, one, carried, carried_low, carried_one = forth(
            own, tl.max(tl.abs(own)), t, t_low, g, g_low, h, h_low, unit, reach, shift, b_t, b_g, b_1, layer, d, hidden,
            WIDTH, HIDDEN, PARTS,
        )  # fmt: skip
        of_answer = leaky(answer, given, slope)
        felt, felt_low, felt_one = placed(of_answer, PARTS)
        of_carried, of_gate, of_transformed = back(mark, lever, felt, felt_low, h, h_low, PARTS)
        by = felt_one * unit
        power, of_one = powers(largest(of_transformed, of_gate))
        of_t, of_t_low, _ = split(of_transformed * power, PARTS)
        of_g, of_g_low, _ = split(of_gate * power, PARTS)
        if TOKENS:
            gradient = to_tokens(
                of_carried, mark, of_t, of_t_low, of_g, of_g_low, of_one * unit, t, t_low, g, g_low, PARTS
            )
            store(of_x, gradient * by, layer, start, count, d, ROWS, WIDTH)
        if WEIGHTS:
            sum_1 += to_weights(carried, carried_low, felt, felt_low, carried_one * felt_one, PARTS)
            sum_t += to_weights(high, low, of_t, of_t_low, one * of_one * by, PARTS)
            sum_g += to_weights(high, low, of_g, of_g_low, one * of_one * by, PARTS)
            sum_b1 += tl.sum(of_answer, 0)
            sum_bt += tl.sum(of_transformed, 0) * by
            sum_bg += tl.sum(of_gate, 0) * by
    if WEIGHTS:
        to = sums + tl.program_id(0).to(tl.int64) * size
        put_sums(to, sum_t, sum_bt, sum_g, sum_bg, sum_1, sum_b1, d, hidden, WIDTH, HIDDEN)


class _Features(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, products: str, tokens: Tensor, *weights: Tensor) -> Tensor:
        tokens, *kept = dense(tokens, *weights)
        (layers, count, d), hidden = tokens.shape, kept[4].shape[-1]
        features = tokens.new_empty(layers, count, hidden)
        same = shape(tokens, hidden, products)
        programs = programs_of(layers, triton.cdiv(count, same["ROWS"]))
        launch(_features_of, layers * programs, tokens, *kept, features, count, d, hidden, programs, SLOPE, **same)
        ctx.save_for_backward(tokens, *kept)
        ctx.products = products
        return features

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor | None, ...]:
        tokens, *weights = ctx.saved_tensors
        (layers, count, d), hidden, size = tokens.shape, weights[4].shape[-1], size_of(weights)
        felt = {"TOKENS": ctx.needs_input_grad[1], "WEIGHTS": any(ctx.needs_input_grad[2:])}
        same = shape(tokens, hidden, ctx.products)
        programs = programs_of(layers, triton.cdiv(count, same["ROWS"]))
        of_tokens = torch.empty_like(tokens) if felt["TOKENS"] else tokens
        sums = tokens.new_empty(layers, programs, size) if felt["WEIGHTS"] else tokens
        sizes = count, d, hidden, programs, size, SLOPE
        given = (tokens, *dense(*gradients), *weights)
        launch(_features_back, layers * programs, *given, of_tokens, sums, *sizes, **same, **felt)
        of_weights = apart(sums.sum(1), weights) if felt["WEIGHTS"] else [None] * 6
        return None, of_tokens if felt["TOKENS"] else None, *of_weights


def programs_of(layers: int, tiles: int) -> int:
    """How many share the tiles of a layer."""
    return min(-(-PROGRAMS // layers), tiles)


def size_of(weights: Sequence[Tensor]) -> int:
    """Numbers in the weights and biases of a layer."""
    return sum(weight[0].numel() for weight in weights)


def apart(total: Tensor, weights: Sequence[Tensor]) -> list[Tensor]:
    """Numbers [l, size] that stand one behind the other, as weights and biases."""
    parts = total.split([weight[0].numel() for weight in weights], 1)
    return [part.reshape(weight.shape) for part, weight in zip(parts, weights, strict=True)]


def dense(*tensors: Tensor) -> list[Tensor]:
    """As kernels read them."""
    return [tensor.contiguous() for tensor in tensors]


def shape(
    like: Tensor, hidden: int, products: str, *, tokens: int = TILE, tile: int = TILE, warps: int = WARPS
) -> dict[str, Any]:
    """Of tiles, and how products are made."""
    width, features = (max(16, triton.next_power_of_2(size)) for size in (like.shape[-1], hidden))
    parts = 3 if products == EXACT else 1
    most = tile if parts == 1 or has_room(like.device) else tile // 2  # as much as smaller devices hold
    rows = min(most, max(16, triton.next_power_of_2(tokens)))
    return {"ROWS": rows, "WIDTH": width, "HIDDEN": features, "PARTS": parts, "num_warps": warps}


def features(products: str, tokens: Tensor, *weights: Tensor) -> Tensor:
    """Features [l, t, hidden] of tokens [l, t, d]; weights and biases of transform, gate and first layer in turn."""
    found: Tensor = _Features.apply(products, tokens, *weights)
    return found
