"""The trunk of discriminator and critic in one pass: nothing between tokens and features is stored.

    t = x W_t + b_t,  g = sigmoid(x W_g + b_g),  h = x + g (relu(t) - x),  features = leaky_relu(h W_1 + b_1)

The backward computes it anew, in one kernel for the tokens and one for the weights. Weights are [layers, in, out]; a
program serves some tokens of one layer. For the weights a few programs a layer add up what their tokens give, and
write it once: nothing is added atomically, and results are the same each time.
"""

from collections.abc import Sequence
from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor
from torch.autograd.function import once_differentiable

from alignattn.matching.kernels.tiles import launch

TILE, SMALL_TILE = 64, 32  # the fastest on an H200, of 16 to 128, for tokens and for weights
PROGRAMS = 256  # that share the weights' gradient
SLOPE = 0.01


@triton.jit
def _loaded(pointer, layer, rows, columns, ROWS: tl.constexpr, COLUMNS: tl.constexpr):
    i, j = tl.arange(0, ROWS), tl.arange(0, COLUMNS)
    inside = (i[:, None] < rows) & (j[None, :] < columns)
    return tl.load(pointer + layer * rows * columns + i[:, None] * columns + j[None, :], mask=inside, other=0.0)


@triton.jit
def linear(x, weight, bias, layer, d, out, WIDTH: tl.constexpr, OUT: tl.constexpr, PRECISION: tl.constexpr):
    """Of a layer: x W + b."""
    j = tl.arange(0, OUT)
    shift = tl.load(bias + layer * out + j, mask=j < out, other=0.0)
    return tl.dot(x, _loaded(weight, layer, d, out, WIDTH, OUT), input_precision=PRECISION) + shift[None, :]


@triton.jit
def highway(x, w_t, b_t, w_g, b_g, layer, d, WIDTH: tl.constexpr, PRECISION: tl.constexpr):
    """What is transformed, the gate, and what is carried on."""
    transformed = linear(x, w_t, b_t, layer, d, d, WIDTH, WIDTH, PRECISION)
    gate = tl.sigmoid(linear(x, w_g, b_g, layer, d, d, WIDTH, WIDTH, PRECISION))
    return transformed, gate, x + gate * (tl.maximum(transformed, 0.0) - x)


@triton.jit
def tokens_of(pointer, layer, start, count, d, ROWS: tl.constexpr, WIDTH: tl.constexpr):
    """Some rows of a layer."""
    i, e = start + tl.arange(0, ROWS), tl.arange(0, WIDTH)
    at = (layer * count + i[:, None]) * d + e[None, :]
    return tl.load(pointer + at, mask=(i[:, None] < count) & (e[None, :] < d), other=0.0)


@triton.jit
def store(pointer, values, layer, start, count, d, ROWS: tl.constexpr, WIDTH: tl.constexpr):
    """Put them there."""
    i, e = start + tl.arange(0, ROWS), tl.arange(0, WIDTH)
    at = (layer * count + i[:, None]) * d + e[None, :]
    tl.store(pointer + at, values, mask=(i[:, None] < count) & (e[None, :] < d))


@triton.jit
def _forward(
    x, w_t, b_t, w_g, b_g, w_1, b_1, features, count, d, hidden, blocks, slope,
    ROWS: tl.constexpr, WIDTH: tl.constexpr, HIDDEN: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    layer = (tl.program_id(0) // blocks).to(tl.int64)
    start = (tl.program_id(0) % blocks) * ROWS
    own = tokens_of(x, layer, start, count, d, ROWS, WIDTH)
    transformed, gate, carried = highway(own, w_t, b_t, w_g, b_g, layer, d, WIDTH, PRECISION)
    answer = linear(carried, w_1, b_1, layer, d, hidden, WIDTH, HIDDEN, PRECISION)
    store(features, tl.where(answer > 0, answer, slope * answer), layer, start, count, hidden, ROWS, HIDDEN)


@triton.jit
def to_highway(
    own, given, w_t, b_t, w_g, b_g, w_1, b_1, layer, d, hidden, slope,
    WIDTH: tl.constexpr, HIDDEN: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """What is felt along the way, by tokens whose features feel what is given."""
    transformed, gate, carried = highway(own, w_t, b_t, w_g, b_g, layer, d, WIDTH, PRECISION)
    answer = linear(carried, w_1, b_1, layer, d, hidden, WIDTH, HIDDEN, PRECISION)
    of_answer = tl.where(answer > 0, given, slope * given)
    of_carried = tl.dot(of_answer, tl.trans(_loaded(w_1, layer, d, hidden, WIDTH, HIDDEN)), input_precision=PRECISION)
    of_gate = of_carried * (tl.maximum(transformed, 0.0) - own) * gate * (1.0 - gate)
    of_transformed = tl.where(transformed > 0, of_carried * gate, 0.0)
    return answer, gate, carried, of_answer, of_carried, of_gate, of_transformed


@triton.jit
def to_tokens(
    gate, of_carried, of_gate, of_transformed, w_t, w_g, layer, d, WIDTH: tl.constexpr, PRECISION: tl.constexpr
):
    """What tokens feel of it."""
    gradient = of_carried * (1.0 - gate)
    gradient += tl.dot(of_transformed, tl.trans(_loaded(w_t, layer, d, d, WIDTH, WIDTH)), input_precision=PRECISION)
    gradient += tl.dot(of_gate, tl.trans(_loaded(w_g, layer, d, d, WIDTH, WIDTH)), input_precision=PRECISION)
    return gradient


@triton.jit
def _backward_tokens(
    x, outer, w_t, b_t, w_g, b_g, w_1, b_1, of_x, count, d, hidden, blocks, slope,
    ROWS: tl.constexpr, WIDTH: tl.constexpr, HIDDEN: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    layer = (tl.program_id(0) // blocks).to(tl.int64)
    start = (tl.program_id(0) % blocks) * ROWS
    own = tokens_of(x, layer, start, count, d, ROWS, WIDTH)
    given = tokens_of(outer, layer, start, count, hidden, ROWS, HIDDEN)
    answer, gate, carried, of_answer, of_carried, of_gate, of_transformed = to_highway(
        own, given, w_t, b_t, w_g, b_g, w_1, b_1, layer, d, hidden, slope, WIDTH, HIDDEN, PRECISION
    )
    gradient = to_tokens(gate, of_carried, of_gate, of_transformed, w_t, w_g, layer, d, WIDTH, PRECISION)
    store(of_x, gradient, layer, start, count, d, ROWS, WIDTH)


@triton.jit
def _backward_weights(
    x, outer, w_t, b_t, w_g, b_g, w_1, b_1, sums, count, d, hidden, programs, size, slope,
    ROWS: tl.constexpr, WIDTH: tl.constexpr, HIDDEN: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    layer = (tl.program_id(0) // programs).to(tl.int64)
    place = tl.program_id(0).to(tl.int64)
    sum_t, sum_g = tl.zeros([WIDTH, WIDTH], tl.float32), tl.zeros([WIDTH, WIDTH], tl.float32)
    sum_1 = tl.zeros([WIDTH, HIDDEN], tl.float32)
    sum_bt, sum_bg = tl.zeros([WIDTH], tl.float32), tl.zeros([WIDTH], tl.float32)
    sum_b1 = tl.zeros([HIDDEN], tl.float32)
    for start in range((tl.program_id(0) % programs) * ROWS, count, programs * ROWS):
        own = tokens_of(x, layer, start, count, d, ROWS, WIDTH)
        given = tokens_of(outer, layer, start, count, hidden, ROWS, HIDDEN)
        answer, gate, carried, of_answer, of_carried, of_gate, of_transformed = to_highway(
            own, given, w_t, b_t, w_g, b_g, w_1, b_1, layer, d, hidden, slope, WIDTH, HIDDEN, PRECISION
        )
        sum_1 += tl.dot(tl.trans(carried), of_answer, input_precision=PRECISION)
        sum_t += tl.dot(tl.trans(own), of_transformed, input_precision=PRECISION)
        sum_g += tl.dot(tl.trans(own), of_gate, input_precision=PRECISION)
        sum_b1 += tl.sum(of_answer, 0)
        sum_bt += tl.sum(of_transformed, 0)
        sum_bg += tl.sum(of_gate, 0)
    put_sums(sums + place * size, sum_t, sum_bt, sum_g, sum_bg, sum_1, sum_b1, d, hidden, WIDTH, HIDDEN)


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


class _Features(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, products: str, tokens: Tensor, *weights: Tensor) -> Tensor:
        ctx.save_for_backward(tokens, *weights)
        ctx.products = products
        return forward(products, tokens, *weights)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor | None, ...]:
        tokens, *weights = ctx.saved_tensors
        given = ctx.products, tokens, gradients[0], *weights
        of_tokens = backward_tokens(*given) if ctx.needs_input_grad[1] else None
        if not any(ctx.needs_input_grad[2:]):
            return None, of_tokens, *[None] * 6
        return None, of_tokens, *backward_weights(*given)


def forward(products: str, tokens: Tensor, *weights: Tensor) -> Tensor:
    """Features [l, t, hidden] of tokens [l, t, d]; weights and biases of transform, gate and first layer in turn."""
    layers, count, d = tokens.shape
    hidden = weights[4].shape[-1]
    features = tokens.new_empty(layers, count, hidden)
    blocks = triton.cdiv(count, TILE)
    sizes = count, d, hidden, blocks, SLOPE
    launch(
        _forward, layers * blocks, *dense(tokens, *weights), features, *sizes, **shape(d, hidden, products, stages=3)
    )
    return features


def backward_tokens(products: str, tokens: Tensor, outer: Tensor, *weights: Tensor) -> Tensor:
    """What tokens feel of features that feel `outer` [l, t, hidden]."""
    layers, count, d = tokens.shape
    hidden = weights[4].shape[-1]
    of_tokens = tokens.new_empty(tokens.shape)
    blocks = triton.cdiv(count, TILE)
    sizes = count, d, hidden, blocks, SLOPE
    launch(
        _backward_tokens,
        layers * blocks,
        *dense(tokens, outer, *weights),
        of_tokens,
        *sizes,
        **shape(d, hidden, products),
    )
    return of_tokens


def backward_weights(products: str, tokens: Tensor, outer: Tensor, *weights: Tensor) -> list[Tensor]:
    """What weights and biases feel, likewise."""
    layers, count, d = tokens.shape
    hidden = weights[4].shape[-1]
    programs = min(triton.cdiv(PROGRAMS, layers), triton.cdiv(count, SMALL_TILE))
    size = size_of(weights)
    sums = tokens.new_empty(layers, programs, size)
    sizes = count, d, hidden, programs, size, SLOPE
    launch(
        _backward_weights, layers * programs, *dense(tokens, outer, *weights), sums, *sizes,
        **shape(d, hidden, products, rows=SMALL_TILE),
    )  # fmt: skip
    return apart(sums.sum(1), weights)


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


def shape(d: int, hidden: int, products: str, *, rows: int = TILE, stages: int = 1) -> dict[str, Any]:
    """Of tiles, and how products are made."""
    width, features = (max(16, triton.next_power_of_2(size)) for size in (d, hidden))
    return {"ROWS": rows, "WIDTH": width, "HIDDEN": features, "PRECISION": products, "num_stages": stages}


def features(products: str, tokens: Tensor, *weights: Tensor) -> Tensor:
    """Features [l, t, hidden] of tokens [l, t, d]; weights and biases of transform, gate and first layer in turn."""
    found: Tensor = _Features.apply(products, tokens, *weights)
    return found
