"""The trunk of discriminator and critic (highway.py) by tiles of TF32, for kernels that have more beside it.

Halves of weights and tokens, which highway.py keeps, would not fit the registers of those that serve a navigator too.
"""

import triton
import triton.language as tl

from alignattn.matching.kernels.highway import loaded


@triton.jit
def linear(x, weight, bias, layer, d, out, WIDTH: tl.constexpr, OUT: tl.constexpr, PRECISION: tl.constexpr):
    """Of a layer: x W + b."""
    j = tl.arange(0, OUT)
    shift = tl.load(bias + layer * out + j, mask=j < out, other=0.0)
    return tl.dot(x, loaded(weight, layer, d, out, WIDTH, OUT), input_precision=PRECISION) + shift[None, :]


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
def to_highway(
    own, given, w_t, b_t, w_g, b_g, w_1, b_1, layer, d, hidden, slope,
    WIDTH: tl.constexpr, HIDDEN: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """What is felt along the way, by tokens whose features feel what is given."""
    transformed, gate, carried = highway(own, w_t, b_t, w_g, b_g, layer, d, WIDTH, PRECISION)
    answer = linear(carried, w_1, b_1, layer, d, hidden, WIDTH, HIDDEN, PRECISION)
    of_answer = tl.where(answer > 0, given, slope * given)
    of_carried = tl.dot(of_answer, tl.trans(loaded(w_1, layer, d, hidden, WIDTH, HIDDEN)), input_precision=PRECISION)
    of_gate = of_carried * (tl.maximum(transformed, 0.0) - own) * gate * (1.0 - gate)
    of_transformed = tl.where(transformed > 0, of_carried * gate, 0.0)
    return answer, gate, carried, of_answer, of_carried, of_gate, of_transformed


@triton.jit
def to_tokens(
    gate, of_carried, of_gate, of_transformed, w_t, w_g, layer, d, WIDTH: tl.constexpr, PRECISION: tl.constexpr
):
    """What tokens feel of it."""
    gradient = of_carried * (1.0 - gate)
    gradient += tl.dot(of_transformed, tl.trans(loaded(w_t, layer, d, d, WIDTH, WIDTH)), input_precision=PRECISION)
    gradient += tl.dot(of_gate, tl.trans(loaded(w_g, layer, d, d, WIDTH, WIDTH)), input_precision=PRECISION)
    return gradient
