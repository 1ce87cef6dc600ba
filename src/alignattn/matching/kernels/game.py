"""The game of queries and keys with a discriminator, in five launches: what features.py and adversarial.py say.

Features are made a tile at a time, queries and keys at once, and only the sums of each tile are kept; a second kernel
makes the distance of them (feature_sums.py), and tells what a feature feels: a vector of the problem, a multiple of
itself, and a multiple of its own pair, which is all that features need to be stored for. A third takes the way back
through the trunk (highway.py) from the distance to tokens, and once more that from the answers to weights: both at once
would need more registers than there are. Then these are added up.
"""

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor
from torch.autograd.function import once_differentiable

from alignattn.matching.kernels import EXACT
from alignattn.matching.kernels.feature_sums import BLOCKS, NUMBERS, ROUNDING, VECTORS, distance, put
from alignattn.matching.kernels.halves import powers, split
from alignattn.matching.kernels.highway import (
    SLOPE,
    apart,
    back,
    column_sums,
    dense,
    forth,
    largest_of_rows,
    leaky,
    loaded,
    placed,
    placed_by,
    programs_of,
    put_sums,
    reach_of,
    read_tokens,
    row_of,
    shape,
    size_of,
    store,
    to_tokens,
    to_weights,
    weights_of,
)
from alignattn.matching.kernels.tiles import as_bytes, launch, valid_rows

TILE, WARPS = 64, 4  # rows, each of one warp: what is largest in it, and its sums, no other warp waits for


@triton.jit
def _answers(features, weight, bias):
    return tl.sum(features * weight[None, :], 1) + bias


@triton.jit
def _sample(layer, problems, heads, problem):
    return layer * (problems // heads) + problem // heads


@triton.jit
def _three_more(one, two, three, other_one, other_two, other_three):
    return one + other_one, two + other_two, three + other_three


@triton.jit
def _about_mean(
    tokens, features, units, largest, record, at, sign, valid, both, t, t_low, g, g_low, h, h_low, unit, reach, shift,
    reach_1, shift_1, b_t, b_g, b_1, w_2, bias, layer, problem, block, blocks, count, d, e, slope,
    ROWS: tl.constexpr, WIDTH: tl.constexpr, HIDDEN: tl.constexpr, PARTS: tl.constexpr, MASKED: tl.constexpr,
    HAS_OWN: tl.constexpr,
):  # fmt: skip
    """Features of some tokens about their mean; their sums are put down."""
    start, k = block * ROWS, tl.arange(0, HIDDEN)
    x = read_tokens(tokens, problem, start, count, d, ROWS, WIDTH)
    most = tl.max(tl.max(tl.abs(x), 1), 0)
    tl.store(largest + problem * blocks + block, most)
    _, _, answer, _, _, _, _, _, _ = forth(
        x, most, t, t_low, g, g_low, h, h_low, unit, reach, shift, b_t, b_g, b_1, layer, d, e, WIDTH, HIDDEN, PARTS
    )
    found = tl.where(valid[:, None], leaky(answer, answer, slope), 0.0)
    most = tl.maximum(most, most * reach + shift) * reach_1 + shift_1
    high, low, one = placed_by(found, most, PARTS)
    if HAS_OWN:
        kept = found
        if PARTS == 1:
            kept = high
            tl.store(units + problem * blocks + block, one)
        store(features, kept, problem, start, count, e, ROWS, HIDDEN)
    right = valid & (sign * _answers(found, row_of(w_2, layer, e, HIDDEN), bias) > 0)
    first = tl.arange(0, 16)[None, :] == 0
    weights = tl.where(first, valid[:, None], both[:, None]).to(tl.float16)
    sums = column_sums(high, low, one, weights, PARTS)
    of_all = tl.sum(tl.where(first, sums, 0.0), 1)
    many = tl.sum(valid.to(tl.float32), 0)
    mean = of_all / tl.maximum(many, 1.0)
    x = tl.where(valid[:, None], found - mean[None, :], 0.0)
    pairs, told, squares = tl.reduce((both.to(tl.float32), right.to(tl.float32), tl.sum(x * x, 1)), 0, _three_more)
    put(record, at, k, mean, e)
    if MASKED:  # else these are sums about means: nothing
        put(record, 2 + at, k, tl.sum(tl.where(first, 0.0, sums), 1) / 15.0 - pairs * mean, e)
    numbers = record + VECTORS * e
    tl.store(numbers + 3 * at, many)
    tl.store(numbers + 3 * at + 1, told)
    tl.store(numbers + 3 * at + 2, squares)
    tl.store(numbers + 6, pairs)
    return x


@triton.jit
def _play(
    query, key, query_mask, key_mask, w_t, b_t, w_g, b_g, w_1, b_1, w_2, b_2, of_query, of_key, units_query, units_key,
    largest_query, largest_key, records, heads, problems, n, m, d, e, blocks, programs, size, slope,
    ROWS: tl.constexpr, WIDTH: tl.constexpr, HIDDEN: tl.constexpr, PARTS: tl.constexpr, QUERY_MASKED: tl.constexpr,
    KEY_MASKED: tl.constexpr, HAS_OWN: tl.constexpr,
):  # fmt: skip
    layer = (tl.program_id(0) // programs).to(tl.int64)
    t, t_low, g, g_low, h, h_low, unit, reach, shift = weights_of(w_t, w_g, w_1, b_t, layer, d, e, WIDTH, HIDDEN, PARTS)
    bias = tl.load(b_2 + layer)
    reach_1, shift_1 = reach_of(loaded(w_1, layer, d, e, WIDTH, HIDDEN), row_of(b_1, layer, e, HIDDEN))
    for place in range(tl.program_id(0) % programs, problems * blocks, programs):
        problem, block = layer * problems + place // blocks, place % blocks
        sample, record = _sample(layer, problems, heads, place // blocks), records + (problem * blocks + block) * size
        i = block * ROWS + tl.arange(0, ROWS)
        there = valid_rows(query_mask, sample, i, n, QUERY_MASKED)
        here = valid_rows(key_mask, sample, i, m, KEY_MASKED)
        x = _about_mean(
            query, of_query, units_query, largest_query, record, 0, 1.0, there, there & here, t, t_low, g, g_low, h,
            h_low, unit, reach, shift, reach_1, shift_1, b_t, b_g, b_1, w_2, bias, layer, problem, block, blocks, n,
            d, e, slope, ROWS, WIDTH, HIDDEN, PARTS, QUERY_MASKED or KEY_MASKED, HAS_OWN,
        )  # fmt: skip
        y = _about_mean(
            key, of_key, units_key, largest_key, record, 1, -1.0, here, there & here, t, t_low, g, g_low, h, h_low,
            unit, reach, shift, reach_1, shift_1, b_t, b_g, b_1, w_2, bias, layer, problem, block, blocks, m, d, e,
            slope, ROWS, WIDTH, HIDDEN, PARTS, QUERY_MASKED or KEY_MASKED, HAS_OWN,
        )  # fmt: skip
        if HAS_OWN:
            tl.store(record + VECTORS * e + 7, tl.sum(tl.sum(x * y, 1), 0))


@triton.jit
def _valid(query_mask, key_mask, side, sample, i, count, QUERY_MASKED: tl.constexpr, KEY_MASKED: tl.constexpr):
    valid = i < count
    if QUERY_MASKED:
        valid = valid & (tl.load(query_mask + sample * count + i, mask=i < count * (1 - side), other=1) != 0)
    if KEY_MASKED:
        valid = valid & (tl.load(key_mask + sample * count + i, mask=i < count * side, other=1) != 0)
    return valid


@triton.jit
def _play_back(  # noqa: PLR0915
    query, key, query_mask, key_mask, w_t, b_t, w_g, b_g, w_1, b_1, w_2, b_2, of_query, of_key, units_query, units_key,
    largest_query, largest_key, felt, outer, to_query, to_key, sums, heads, problems, n, m, d, e, blocks, places,
    programs, size, slope,
    ROWS: tl.constexpr, WIDTH: tl.constexpr, HIDDEN: tl.constexpr, PARTS: tl.constexpr, QUERY_MASKED: tl.constexpr,
    KEY_MASKED: tl.constexpr, HAS_OWN: tl.constexpr, TOKENS: tl.constexpr, WEIGHTS: tl.constexpr,
):  # fmt: skip
    layer = (tl.program_id(0) // programs).to(tl.int64)
    t, t_low, g, g_low, h, h_low, unit, reach, shift = weights_of(w_t, w_g, w_1, b_t, layer, d, e, WIDTH, HIDDEN, PARTS)
    bias, k = tl.load(b_2 + layer), tl.arange(0, HIDDEN)
    steep = 1.0 / slope
    if WEIGHTS:
        answering = loaded(w_1, layer, d, e, WIDTH, HIDDEN) * row_of(w_2, layer, e, HIDDEN)[None, :]
        v, v_low, v_unit = placed(answering, PARTS)
        # Halves of what answers feel are below 2^15, which bounds what is felt through these weights.
        span = 32768.0 / v_unit * tl.max(tl.sum(tl.abs(answering), 1), 0)
        t_power, t_unit = powers(span)
        ones = tl.full([ROWS, 16], 1.0, tl.float16)
        sum_t, sum_g = tl.zeros([WIDTH, WIDTH], tl.float32), tl.zeros([WIDTH, WIDTH], tl.float32)
        sum_1 = tl.zeros([HIDDEN, WIDTH], tl.float32)
        sum_bt, sum_bg = tl.zeros([WIDTH, 16], tl.float32), tl.zeros([WIDTH, 16], tl.float32)
        sum_b1 = tl.zeros([HIDDEN, 16], tl.float32)
        sum_b2 = tl.zeros([ROWS], tl.float32)
    for one in range(tl.program_id(0) % programs, problems * places, programs):
        problem, place = layer * problems + one // places, one % places
        are_queries = place < blocks  # first the tiles of queries, then those of keys
        side = tl.where(are_queries, 0, 1)
        block, count = place - side * blocks, tl.where(are_queries, n, m)
        i, sample = block * ROWS + tl.arange(0, ROWS), _sample(layer, problems, heads, one // places)
        valid = _valid(query_mask, key_mask, side, sample, i, count, QUERY_MASKED, KEY_MASKED)
        by = tl.load(outer + problem)
        x = read_tokens(tl.where(are_queries, query, key), problem, block * ROWS, count, d, ROWS, WIDTH)
        again = layer + tl.minimum(one, 0)  # the layer, as a number that changes: else biases would stay in registers
        most = tl.load(
            tl.where(are_queries, largest_query, largest_key) + problem * tl.cdiv(tl.maximum(n, m), ROWS) + block
        )
        mark, lever, answer, high, low, x_unit, carried, carried_low, carried_unit = forth(
            x, most, t, t_low, g, g_low, h, h_low, unit, reach, shift, b_t, b_g, b_1, again, d, e, WIDTH, HIDDEN, PARTS
        )
        found = leaky(answer, answer, slope)
        of = felt + problem * (3 * e + 5)
        if TOKENS:
            centre = row_of(of, 0, e, HIDDEN)[None, :]
            given = row_of(of, 1 + side, e, HIDDEN)[None, :] + tl.load(of + 3 * e + side) * (found - centre)
            if HAS_OWN:
                there = _valid(query_mask, key_mask, 1 - side, sample, i, count, QUERY_MASKED, KEY_MASKED)
                other = read_tokens(
                    tl.where(are_queries, of_key, of_query), problem, block * ROWS, count, e, ROWS, HIDDEN
                )
                if PARTS == 1:
                    units = tl.where(are_queries, units_key, units_query)
                    other = other.to(tl.float32) * tl.load(units + problem * blocks + block)
                given += tl.where(there[:, None], tl.load(of + 3 * e + 4) * (other - centre), 0.0)
            given = leaky(answer, tl.where(valid[:, None], given, 0.0), slope)
            of_answer, of_answer_low, given_unit = placed_by(given, largest_of_rows(given), PARTS)
            of_carried, of_gate, of_transformed = back(mark, lever, of_answer, of_answer_low, h, h_low, PARTS)
            power, of_unit = powers(largest_of_rows(tl.maximum(tl.abs(of_gate), tl.abs(of_transformed))))
            of_t, of_t_low, _ = split(of_transformed * power, PARTS)
            of_g, of_g_low, _ = split(of_gate * power, PARTS)
            gradient = to_tokens(
                of_carried, mark, of_t, of_t_low, of_g, of_g_low, of_unit * unit, t, t_low, g, g_low, PARTS
            )
            store(
                tl.where(are_queries, to_query, to_key), gradient * (given_unit * (unit * by)), problem, block * ROWS,
                count, d, ROWS, WIDTH,
            )  # fmt: skip
        if WEIGHTS:
            # Slopes are one, or `steep` of them, which halves hold.
            sign = tl.where(are_queries, 1.0, -1.0)
            feels = tl.where(
                valid, sign * tl.sigmoid(-sign * _answers(found, row_of(w_2, again, e, HIDDEN), bias)), 0.0
            )
            power, felt_unit = powers(steep * tl.max(tl.abs(feels), 0))
            value = feels * power
            of_value, of_value_low, _ = split(value[:, None] * tl.where(answer > 0, steep, 1.0), PARTS)
            _, gate_of_value, transform_of_value = back(mark, lever, of_value, of_value_low, v, v_low, PARTS)
            g_power, g_unit = powers(span * tl.maximum(most, most * reach + shift) * 2.0)
            of_t, of_t_low, _ = split(transform_of_value * t_power, PARTS)
            of_g, of_g_low, _ = split(gate_of_value * g_power, PARTS)
            by = tl.load(of + 3 * e + 2 + side) * by * slope * felt_unit
            sum_1 += to_weights(of_value, of_value_low, carried, carried_low, carried_unit * by, PARTS)
            sum_b1 += column_sums(of_value, of_value_low, by, ones, PARTS)
            by_t, by_g = by * v_unit * t_unit, by * v_unit * g_unit
            sum_t += to_weights(of_t, of_t_low, high, low, x_unit * by_t, PARTS)
            sum_g += to_weights(of_g, of_g_low, high, low, x_unit * by_g, PARTS)
            sum_bt += column_sums(of_t, of_t_low, by_t, ones, PARTS)
            sum_bg += column_sums(of_g, of_g_low, by_g, ones, PARTS)
            sum_b2 += value * (by * steep)
    if WEIGHTS:  # the discriminator ascends
        to = sums + tl.program_id(0).to(tl.int64) * size
        weight = row_of(w_2, layer, e, HIDDEN)
        sum_t, sum_g, sum_1 = tl.trans(sum_t), tl.trans(sum_g), tl.trans(sum_1)
        bias_t, bias_g, bias_1 = tl.sum(sum_bt, 1) / 16.0, tl.sum(sum_bg, 1) / 16.0, tl.sum(sum_b1, 1) / 16.0
        put_sums(to, -sum_t, -bias_t, -sum_g, -bias_g, -sum_1 * weight[None, :], -bias_1 * weight, d, e, WIDTH, HIDDEN)
        to += size - e - 1
        of_last = tl.sum(sum_1 * loaded(w_1, layer, d, e, WIDTH, HIDDEN), 0) + bias_1 * row_of(b_1, layer, e, HIDDEN)
        tl.store(to + k, -of_last, mask=k < e)
        tl.store(to + e, -tl.sum(sum_b2, 0))


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
        query, key, *kept = dense(query, key, *weights)
        (layers, samples, heads, n, d), m = query.shape, key.shape[3]
        problems, e, has_own = samples * heads, kept[4].shape[-1], n == m
        same = shape(query, e, products, tokens=max(n, m), tile=TILE, warps=WARPS) | {"HAS_OWN": has_own}
        masked = {"QUERY_MASKED": query_mask is not None, "KEY_MASKED": key_mask is not None}
        blocks = triton.cdiv(max(n, m), same["ROWS"])
        programs = programs_of(layers, problems * blocks)
        size = VECTORS.value * e + NUMBERS
        features = [side.new_empty(0) for side in (query, key)]
        if has_own:
            kind = query.dtype if products == EXACT else torch.float16
            features = [side.new_empty(*side.shape[:-1], e, dtype=kind) for side in (query, key)]
        units = query.new_empty(2, layers * problems, blocks if has_own else 0)
        largest = query.new_empty(2, layers * problems, blocks)
        records = query.new_empty(layers * problems, blocks, size)
        tokens = (query, key, *as_bytes(query_mask, key_mask, query), *kept, *features, *units, *largest)
        launch(
            _play, layers * programs, *tokens, records, heads, problems, n, m, d, e, blocks, programs, size, SLOPE,
            **same, **masked, num_stages=1,
        )  # fmt: skip
        distances, accuracies = query.new_empty(2, layers * samples, heads)
        felt = query.new_empty(layers * problems, 3 * e + 5)
        launch(
            distance, layers * problems, records, felt, distances, accuracies, n, m, e, blocks, size, ROUNDING,
            HIDDEN=same["HIDDEN"], BLOCKS=BLOCKS, MASKED=any(masked.values()), HAS_OWN=has_own, num_warps=1,
        )  # fmt: skip
        ctx.save_for_backward(*tokens, felt)
        ctx.settings, ctx.blocks = same | masked, blocks
        ctx.mark_non_differentiable(accuracies)
        ctx.set_materialize_grads(False)  # no zeros for these
        return distances, accuracies

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *outer: Tensor) -> tuple[Tensor | None, ...]:
        *tokens, felt = ctx.saved_tensors
        query, key, weights = tokens[0], tokens[1], tokens[4:12]
        (layers, samples, heads, n, d), m = query.shape, key.shape[3]
        problems, e, learns = samples * heads, weights[4].shape[-1], any(ctx.needs_input_grad[5:])
        blocks = triton.cdiv(n, ctx.settings["ROWS"])
        places = blocks + triton.cdiv(m, ctx.settings["ROWS"])
        size = size_of(weights)
        of_tokens = [torch.empty_like(side) for side in (query, key)]
        programs = programs_of(layers, problems * places)
        sums = query.new_empty(layers, programs, size if learns else 0)
        for of_weights in (False, True)[: 1 + learns]:
            launch(
                _play_back, layers * programs, *tokens, felt, *dense(outer[0]), *of_tokens, sums, heads, problems, n, m,
                d, e, blocks, places, programs, size, SLOPE,
                TOKENS=not of_weights, WEIGHTS=of_weights, num_stages=1 + of_weights, **ctx.settings,
            )  # fmt: skip
        gradients = apart(sums.sum(1), weights) if learns else [None] * 8
        return None, None, None, *of_tokens, *gradients


def game(
    products: str, query: Tensor, key: Tensor, query_mask: Tensor | None, key_mask: Tensor | None, *weights: Tensor
) -> tuple[Tensor, Tensor]:
    """Feature distance of each problem, whose backward also takes the discriminator upwards; and how often it is right.

    Queries and keys [l, b, h, tokens, d], masks [lb, tokens]; weights and biases of transform, gate, first and second
    layer in turn, the last with one answer.
    """
    distances, accuracies = _Game.apply(products, query_mask, key_mask, query, key, *weights)
    return distances, accuracies
