"""The game of queries and keys with a discriminator, in a handful of kernels: what features.py and adversarial.py say.

Features are sixteen numbers a token. A program serves one problem: it passes over its features for their sums, for
their distance, and once more to write what each feature and each answer feels if the problem counts one. The backward
takes that, times what a problem counts, through the trunk (highway.py): from the distance to tokens, from the answers
to weights.
"""

from collections.abc import Sequence
from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor
from torch.autograd.function import once_differentiable

from alignattn.matching.kernels import highway
from alignattn.matching.kernels.highway import (
    PROGRAMS,
    SLOPE,
    SMALL_TILE,
    apart,
    dense,
    put_sums,
    shape,
    size_of,
    store,
    to_highway,
    to_tokens,
    tokens_of,
)
from alignattn.matching.kernels.tiles import TILE, as_bytes, launch, read, valid_rows, write


@triton.jit
def _answers(features, weight, bias):
    return tl.sum(features * weight[None, :], 1) + bias


@triton.jit
def _first_sums(
    features, mask, weight, bias, sign, problem, sample, count, e,
    ROWS: tl.constexpr, HIDDEN: tl.constexpr, MASKED: tl.constexpr,
):  # fmt: skip
    summed, squares = tl.zeros([HIDDEN], tl.float32), tl.zeros([HIDDEN], tl.float32)
    many, right = tl.zeros([ROWS], tl.float32), tl.zeros([ROWS], tl.float32)
    for start in range(0, count, ROWS):
        i = start + tl.arange(0, ROWS)
        valid = valid_rows(mask, sample, i, count, MASKED)
        tile = read(features, problem, i, valid, count, e, HIDDEN)
        answer = sign * _answers(tile, weight, bias)
        summed += tl.sum(tile, 0)
        squares += tl.sum(tile * tile, 0)
        many += valid.to(tl.float32)
        right += tl.where(valid & (answer > 0), 1.0, 0.0)
    return summed, tl.sum(squares, 0), tl.sum(many, 0), tl.sum(right, 0)


@triton.jit
def _centred(features, mask, centre, problem, sample, i, count, e, HIDDEN: tl.constexpr, MASKED: tl.constexpr):
    valid = valid_rows(mask, sample, i, count, MASKED)
    tile = read(features, problem, i, valid, count, e, HIDDEN) - centre[None, :]
    return valid, tl.where(valid[:, None], tile, 0.0)


@triton.jit
def _second_sums(
    features, mask, centre, problem, sample, count, e,
    ROWS: tl.constexpr, HIDDEN: tl.constexpr, MASKED: tl.constexpr,
):  # fmt: skip
    summed, squares = tl.zeros([HIDDEN], tl.float32), tl.zeros([HIDDEN], tl.float32)
    for start in range(0, count, ROWS):
        i = start + tl.arange(0, ROWS)
        valid, x = _centred(features, mask, centre, problem, sample, i, count, e, HIDDEN, MASKED)
        summed += tl.sum(x, 0)
        squares += tl.sum(x * x, 0)
    return summed, tl.sum(squares, 0)


@triton.jit
def _own_pairs(
    query, key, query_mask, key_mask, centre, problem, sample, count, e,
    ROWS: tl.constexpr, HIDDEN: tl.constexpr, QUERY_MASKED: tl.constexpr, KEY_MASKED: tl.constexpr,
):  # fmt: skip
    products, paired = tl.zeros([HIDDEN], tl.float32), tl.zeros([HIDDEN], tl.float32)
    many = tl.zeros([ROWS], tl.float32)
    for start in range(0, count, ROWS):
        i = start + tl.arange(0, ROWS)
        there, x = _centred(query, query_mask, centre, problem, sample, i, count, e, HIDDEN, QUERY_MASKED)
        here, y = _centred(key, key_mask, centre, problem, sample, i, count, e, HIDDEN, KEY_MASKED)
        both = there & here
        products += tl.sum(x * y, 0)
        paired += tl.sum(tl.where(both[:, None], x + y, 0.0), 0)
        many += both.to(tl.float32)
    return tl.sum(products, 0), paired, tl.sum(many, 0)


@triton.jit
def _felt(
    own, other, own_mask, other_mask, centre, of_own, of_answers, weight, bias, sign, shared, multiple, paired,
    answered, problem, sample, count, e,
    ROWS: tl.constexpr, HIDDEN: tl.constexpr, OWN_MASKED: tl.constexpr, OTHER_MASKED: tl.constexpr,
    HAS_OWN: tl.constexpr,
):  # fmt: skip
    for start in range(0, count, ROWS):
        i = start + tl.arange(0, ROWS)
        valid, x = _centred(own, own_mask, centre, problem, sample, i, count, e, HIDDEN, OWN_MASKED)
        gradient = shared[None, :] + multiple * x
        if HAS_OWN:
            there, y = _centred(other, other_mask, centre, problem, sample, i, count, e, HIDDEN, OTHER_MASKED)
            gradient += paired * y
        write(of_own, tl.where(valid[:, None], gradient, 0.0), problem, i, count, e, HIDDEN)
        answer = sign * _answers(x + centre[None, :], weight, bias)
        felt = tl.where(valid, sign * answered * tl.sigmoid(-answer), 0.0)
        tl.store(of_answers + problem * count + i, felt, mask=i < count)


@triton.jit
def _play(
    query, key, query_mask, key_mask, w_2, b_2, distances, accuracies, of_query, of_key, of_yes, of_no,
    heads, problems, n, m, e, rounding,
    ROWS: tl.constexpr, HIDDEN: tl.constexpr, QUERY_MASKED: tl.constexpr, KEY_MASKED: tl.constexpr,
    HAS_OWN: tl.constexpr,
):  # fmt: skip
    problem = tl.program_id(0).to(tl.int64)
    sample, layer = problem // heads, problem // problems
    k = tl.arange(0, HIDDEN)
    weight, bias = tl.load(w_2 + layer * e + k, mask=k < e, other=0.0), tl.load(b_2 + layer)
    sum_q, square_q, many_q, right_q = _first_sums(
        query, query_mask, weight, bias, 1.0, problem, sample, n, e, ROWS, HIDDEN, QUERY_MASKED
    )
    sum_k, square_k, many_k, right_k = _first_sums(
        key, key_mask, weight, bias, -1.0, problem, sample, m, e, ROWS, HIDDEN, KEY_MASKED
    )
    count_q, count_k = tl.maximum(many_q, 1.0), tl.maximum(many_k, 1.0)
    tl.store(accuracies + problem, (right_q / count_q + right_k / count_k) / 2)
    size = (square_q / (n * e) + square_k / (m * e)) / 2
    centre = (sum_q / count_q + sum_k / count_k) / 2
    sum_x, square_x = _second_sums(query, query_mask, centre, problem, sample, n, e, ROWS, HIDDEN, QUERY_MASKED)
    sum_y, square_y = _second_sums(key, key_mask, centre, problem, sample, m, e, ROWS, HIDDEN, KEY_MASKED)
    cross, pairs = tl.sum(sum_x * sum_y, 0), many_q * many_k
    of_x = 1.0 / tl.maximum(many_q * (many_q - 1.0), 1.0)
    of_y = 1.0 / tl.maximum(many_k * (many_k - 1.0), 1.0)
    apart = tl.zeros([HIDDEN], tl.float32)
    if HAS_OWN:
        product, apart, own = _own_pairs(
            query, key, query_mask, key_mask, centre, problem, sample, n, e, ROWS, HIDDEN, QUERY_MASKED, KEY_MASKED
        )
        cross, pairs = cross - product, pairs - own
    across = 2.0 / tl.maximum(pairs, 1.0)
    gap = (tl.sum(sum_x * sum_x, 0) - square_x) * of_x + (tl.sum(sum_y * sum_y, 0) - square_y) * of_y - cross * across
    variance = (square_x / count_q + square_y / count_k) / 2
    counts = (many_q >= 2) & (many_k >= 2) & (variance > rounding * e * size)
    variance = tl.where(counts, variance, 1.0)
    distance = tl.where(counts, gap, 0.0) / variance
    tl.store(distances + problem, distance)
    scale = tl.where(counts, 1.0, 0.0) / variance
    # What the centre's way gives: nothing where every token has its own pair.
    of_centre = many_q * across * sum_y + many_k * across * sum_x - across * apart
    of_centre -= 2.0 * sum_x / count_q + 2.0 * sum_y / count_k
    shared_x = (2.0 * of_x * sum_x - across * sum_y + of_centre / (2.0 * count_q)) * scale
    shared_y = (2.0 * of_y * sum_y - across * sum_x + of_centre / (2.0 * count_k)) * scale
    alive = tl.where((many_q >= 1) & (many_k >= 1), 1.0, 0.0)
    _felt(
        query, key, query_mask, key_mask, centre, of_query, of_yes, weight, bias, 1.0,
        shared_x, -(2.0 * of_x + distance / count_q) * scale, across * scale, alive / count_q, problem, sample, n, e,
        ROWS, HIDDEN, QUERY_MASKED, KEY_MASKED, HAS_OWN,
    )  # fmt: skip
    _felt(
        key, query, key_mask, query_mask, centre, of_key, of_no, weight, bias, -1.0,
        shared_y, -(2.0 * of_y + distance / count_k) * scale, across * scale, alive / count_k, problem, sample, m, e,
        ROWS, HIDDEN, KEY_MASKED, QUERY_MASKED, HAS_OWN,
    )  # fmt: skip


@triton.jit
def _backward_tokens(
    x, outer, of_problems, w_t, b_t, w_g, b_g, w_1, b_1, of_x, count, length, d, hidden, blocks, slope,
    ROWS: tl.constexpr, WIDTH: tl.constexpr, HIDDEN: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    layer = (tl.program_id(0) // blocks).to(tl.int64)
    start = (tl.program_id(0) % blocks) * ROWS
    own = tokens_of(x, layer, start, count, d, ROWS, WIDTH)
    i = start + tl.arange(0, ROWS)
    by = tl.load(of_problems + layer * (count // length) + i // length, mask=i < count, other=0.0)
    given = tokens_of(outer, layer, start, count, hidden, ROWS, HIDDEN) * by[:, None]
    answer, gate, carried, of_answer, of_carried, of_gate, of_transformed = to_highway(
        own, given, w_t, b_t, w_g, b_g, w_1, b_1, layer, d, hidden, slope, WIDTH, HIDDEN, PRECISION
    )
    gradient = to_tokens(gate, of_carried, of_gate, of_transformed, w_t, w_g, layer, d, WIDTH, PRECISION)
    store(of_x, gradient, layer, start, count, d, ROWS, WIDTH)


@triton.jit
def _backward_weights(
    x, of_answers, of_problems, w_t, b_t, w_g, b_g, w_1, b_1, w_2, sums,
    count, length, d, hidden, programs, first, places, size, slope,
    ROWS: tl.constexpr, WIDTH: tl.constexpr, HIDDEN: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    layer = (tl.program_id(0) // programs).to(tl.int64)
    place = layer * places + first + tl.program_id(0) % programs
    k = tl.arange(0, HIDDEN)
    weight = tl.load(w_2 + layer * hidden + k, mask=k < hidden, other=0.0)
    sum_t, sum_g = tl.zeros([WIDTH, WIDTH], tl.float32), tl.zeros([WIDTH, WIDTH], tl.float32)
    sum_1 = tl.zeros([WIDTH, HIDDEN], tl.float32)
    sum_bt, sum_bg = tl.zeros([WIDTH], tl.float32), tl.zeros([WIDTH], tl.float32)
    sum_b1, sum_2 = tl.zeros([HIDDEN], tl.float32), tl.zeros([HIDDEN], tl.float32)
    sum_b2 = tl.zeros([ROWS], tl.float32)
    for start in range((tl.program_id(0) % programs) * ROWS, count, programs * ROWS):
        own = tokens_of(x, layer, start, count, d, ROWS, WIDTH)
        i = start + tl.arange(0, ROWS)
        by = tl.load(of_problems + layer * (count // length) + i // length, mask=i < count, other=0.0)
        felt = tl.load(of_answers + layer * count + i, mask=i < count, other=0.0) * by
        answer, gate, carried, of_answer, of_carried, of_gate, of_transformed = to_highway(
            own, felt[:, None] * weight[None, :], w_t, b_t, w_g, b_g, w_1, b_1, layer, d, hidden, slope,
            WIDTH, HIDDEN, PRECISION,
        )  # fmt: skip
        sum_1 += tl.dot(tl.trans(carried), of_answer, input_precision=PRECISION)
        sum_t += tl.dot(tl.trans(own), of_transformed, input_precision=PRECISION)
        sum_g += tl.dot(tl.trans(own), of_gate, input_precision=PRECISION)
        sum_b1 += tl.sum(of_answer, 0)
        sum_bt += tl.sum(of_transformed, 0)
        sum_bg += tl.sum(of_gate, 0)
        sum_2 += tl.sum(tl.where(answer > 0, answer, slope * answer) * felt[:, None], 0)
        sum_b2 += felt
    # The discriminator ascends.
    to = sums + place * size
    put_sums(to, -sum_t, -sum_bt, -sum_g, -sum_bg, -sum_1, -sum_b1, d, hidden, WIDTH, HIDDEN)
    to += size - hidden - 1
    tl.store(to + k, -sum_2, mask=k < hidden)
    tl.store(to + hidden, -tl.sum(sum_b2, 0))


class _Game(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        products: str,
        query_mask: Tensor | None,
        key_mask: Tensor | None,
        query: Tensor,
        key: Tensor,
        *weights: Tensor,
    ) -> tuple[Tensor, Tensor]:
        layers, samples, heads, n, _ = query.shape
        sides, masks = [query, key], (query_mask, key_mask)
        tokens = [side.flatten(1, 3).contiguous() for side in sides]
        features = [highway.forward(products, side, *weights[:6]) for side in tokens]
        problems, hidden = samples * heads, features[0].shape[-1]
        distances, accuracies = (query.new_empty(layers * samples, heads) for _ in range(2))
        of_features = [torch.empty_like(side) for side in features]
        of_answers = [side.new_empty(side.shape[:2]) for side in features]
        launch(
            _play, layers * problems, *features, *as_bytes(*masks, query), *dense(*weights[6:]), distances, accuracies,
            *of_features, *of_answers, heads, problems, n, key.shape[3], hidden, ROUNDING,
            ROWS=TILE, HIDDEN=max(16, triton.next_power_of_2(hidden)), QUERY_MASKED=query_mask is not None,
            KEY_MASKED=key_mask is not None, HAS_OWN=n == key.shape[3],
        )  # fmt: skip
        ctx.save_for_backward(*tokens, *of_features, *of_answers, *weights)
        ctx.products, ctx.shapes = products, [side.shape for side in sides]
        ctx.mark_non_differentiable(accuracies)
        return distances, accuracies

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *outer: Tensor) -> tuple[Tensor | None, ...]:
        tokens, of_features, of_answers = (ctx.saved_tensors[start : start + 2] for start in (0, 2, 4))
        weights = ctx.saved_tensors[6:]
        counts = outer[0].contiguous()
        of_tokens: list[Tensor | None] = [None, None]
        of_weights: list[Tensor | None] = [None] * 8
        for side in range(2):
            if ctx.needs_input_grad[3 + side]:
                of_tokens[side] = _to_tokens(
                    ctx.products, tokens[side], of_features[side], counts, ctx.shapes[side], weights
                )
        if any(ctx.needs_input_grad[5:]):
            lengths = [whole[3] for whole in ctx.shapes]
            of_weights = [*_to_weights(ctx.products, tokens, of_answers, counts, lengths, weights)]
        return None, None, None, *of_tokens, *of_weights


def _to_tokens(
    products: str, tokens: Tensor, of_features: Tensor, of_problems: Tensor, whole: torch.Size, weights: Any
) -> Tensor:
    (layers, count, d), hidden = tokens.shape, of_features.shape[-1]
    of_tokens = torch.empty_like(tokens)
    blocks = triton.cdiv(count, highway.TILE)
    sizes = count, whole[3], d, hidden, blocks, SLOPE
    launch(
        _backward_tokens, layers * blocks, tokens, of_features, of_problems, *dense(*weights[:6]), of_tokens, *sizes,
        **shape(d, hidden, products),
    )  # fmt: skip
    return of_tokens.view(whole)


def _to_weights(
    products: str,
    tokens: Sequence[Tensor],
    of_answers: Sequence[Tensor],
    of_problems: Tensor,
    lengths: Sequence[int],
    weights: Sequence[Tensor],
) -> list[Tensor]:
    """Of queries and keys, added up together."""
    layers, _, d = tokens[0].shape
    hidden, size = weights[4].shape[-1], size_of(weights)
    programs = [min(triton.cdiv(PROGRAMS, layers), triton.cdiv(side.shape[1], SMALL_TILE)) for side in tokens]
    sums = tokens[0].new_empty(layers, sum(programs), size)
    for side, count in enumerate(programs):
        sizes = tokens[side].shape[1], lengths[side], d, hidden, count, side * programs[0], sum(programs), size, SLOPE
        launch(
            _backward_weights, layers * count, tokens[side], of_answers[side], of_problems, *dense(*weights[:7]), sums,
            *sizes, **shape(d, hidden, products, rows=SMALL_TILE),
        )  # fmt: skip
    return apart(sums.sum(1), weights)


ROUNDING = (64 * torch.finfo(torch.float32).eps) ** 2  # of features that are all one


def game(
    products: str, query: Tensor, key: Tensor, query_mask: Tensor | None, key_mask: Tensor | None, *weights: Tensor
) -> tuple[Tensor, Tensor]:
    """Feature distance of each problem, whose backward also takes the discriminator upwards; and how often it is right.

    Queries and keys [l, b, h, tokens, d], masks [lb, tokens]; weights and biases of transform, gate, first and second
    layer in turn, the last with one answer.
    """
    distances, accuracies = _Game.apply(products, query_mask, key_mask, query, key, *weights)
    return distances, accuracies
