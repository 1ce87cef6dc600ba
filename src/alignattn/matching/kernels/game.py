"""The game of queries and keys with a discriminator, in four launches: what features.py and adversarial.py say.

Features are made a tile at a time, queries and keys at once, and only the sums of each tile are kept; a second kernel
makes the distance of them (feature_sums.py), and tells what a feature feels: a vector of the problem, a multiple of
itself, and a multiple of its own pair, which is all that features need to be stored for. A third takes both ways back
through the trunk (highway.py): from the distance to tokens, from the answers to weights. Then these are added up.
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
    dense,
    forth,
    largest,
    leaky,
    placed,
    programs_of,
    put_sums,
    read_tokens,
    row_of,
    shape,
    size_of,
    store,
    to_tokens,
    to_weights,
    weights_of,
)
from alignattn.matching.kernels.tiles import TWO, as_bytes, launch, valid_rows


@triton.jit
def _answers(features, weight, bias):
    return tl.sum(features * weight[None, :], 1) + bias


@triton.jit
def _sample(layer, problems, heads, problem):
    return layer * (problems // heads) + problem // heads


@triton.jit
def _about_mean(
    tokens, mask, features, units, record, at, sign, t, t_low, g, g_low, h, h_low, unit, b_t, b_g, b_1, weight, bias,
    layer, problem, sample, block, blocks, count, d, e, slope,
    ROWS: tl.constexpr, WIDTH: tl.constexpr, HIDDEN: tl.constexpr, PARTS: tl.constexpr, MASKED: tl.constexpr,
    HAS_OWN: tl.constexpr,
):  # fmt: skip
    """Features of some tokens about their mean; that, and their sums, are put down."""
    start, k = block * ROWS, tl.arange(0, HIDDEN)
    valid = valid_rows(mask, sample, start + tl.arange(0, ROWS), count, MASKED)
    _, _, answer, _, _, _, _, _, _ = forth(
        read_tokens(tokens, problem, start, count, d, ROWS, WIDTH), t, t_low, g, g_low, h, h_low, unit, b_t, b_g, b_1,
        layer, d, e, WIDTH, HIDDEN, PARTS,
    )  # fmt: skip
    found = leaky(answer, answer, slope)
    if HAS_OWN:
        kept = found
        if PARTS == 1:
            kept, _, one = placed(found, PARTS)
            tl.store(units + problem * blocks + block, one)
        store(features, kept, problem, start, count, e, ROWS, HIDDEN)
    right = valid & (sign * _answers(found, weight, bias) > 0)
    many = tl.sum(valid.to(tl.float32), 0)
    mean = tl.sum(tl.where(valid[:, None], found, 0.0), 0) / tl.maximum(many, 1.0)
    x = tl.where(valid[:, None], found - mean[None, :], 0.0)
    put(record, 2 * at, k, mean, e)
    put(record, 2 * at + 1, k, tl.sum(x * x, 0), e)
    tl.store(record + VECTORS * e + 2 * at, many)
    tl.store(record + VECTORS * e + 2 * at + 1, tl.sum(right.to(tl.float32), 0))
    return valid, x


@triton.jit
def _play(
    query, key, query_mask, key_mask, w_t, b_t, w_g, b_g, w_1, b_1, w_2, b_2, of_query, of_key, units_query, units_key,
    records, heads, problems, n, m, d, e, blocks, programs, size, slope,
    ROWS: tl.constexpr, WIDTH: tl.constexpr, HIDDEN: tl.constexpr, PARTS: tl.constexpr, QUERY_MASKED: tl.constexpr,
    KEY_MASKED: tl.constexpr, HAS_OWN: tl.constexpr,
):  # fmt: skip
    layer = (tl.program_id(0) // programs).to(tl.int64)
    t, t_low, g, g_low, h, h_low, unit = weights_of(w_t, w_g, w_1, layer, d, e, WIDTH, HIDDEN, PARTS)
    weight, bias, k = row_of(w_2, layer, e, HIDDEN), tl.load(b_2 + layer), tl.arange(0, HIDDEN)
    for place in range(tl.program_id(0) % programs, problems * blocks, programs):
        problem, block = layer * problems + place // blocks, place % blocks
        sample, record = _sample(layer, problems, heads, place // blocks), records + (problem * blocks + block) * size
        there, x = _about_mean(
            query, query_mask, of_query, units_query, record, 0, 1.0, t, t_low, g, g_low, h, h_low, unit, b_t, b_g, b_1,
            weight, bias, layer, problem, sample, block, blocks, n, d, e, slope,
            ROWS, WIDTH, HIDDEN, PARTS, QUERY_MASKED, HAS_OWN,
        )  # fmt: skip
        here, y = _about_mean(
            key, key_mask, of_key, units_key, record, 1, -1.0, t, t_low, g, g_low, h, h_low, unit, b_t, b_g, b_1,
            weight, bias, layer, problem, sample, block, blocks, m, d, e, slope,
            ROWS, WIDTH, HIDDEN, PARTS, KEY_MASKED, HAS_OWN,
        )  # fmt: skip
        if HAS_OWN:
            both = there & here
            put(record, 4, k, tl.sum(x * y, 0), e)
            tl.store(record + VECTORS * e + 4, tl.sum(both.to(tl.float32), 0))
            if QUERY_MASKED or KEY_MASKED:  # else these are sums about means: nothing
                put(record, 5, k, tl.sum(tl.where(both[:, None], x, 0.0), 0), e)
                put(record, 6, k, tl.sum(tl.where(both[:, None], y, 0.0), 0), e)


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
    felt, outer, to_query, to_key, sums, heads, problems, n, m, d, e, blocks, places, programs, size, slope,
    ROWS: tl.constexpr, WIDTH: tl.constexpr, HIDDEN: tl.constexpr, PARTS: tl.constexpr, QUERY_MASKED: tl.constexpr,
    KEY_MASKED: tl.constexpr, HAS_OWN: tl.constexpr, WEIGHTS: tl.constexpr,
):  # fmt: skip
    layer = (tl.program_id(0) // programs).to(tl.int64)
    t, t_low, g, g_low, h, h_low, unit = weights_of(w_t, w_g, w_1, layer, d, e, WIDTH, HIDDEN, PARTS)
    weight, bias, k = row_of(w_2, layer, e, HIDDEN), tl.load(b_2 + layer), tl.arange(0, HIDDEN)
    sum_t, sum_g = tl.zeros([WIDTH, WIDTH], tl.float32), tl.zeros([WIDTH, WIDTH], tl.float32)
    sum_1 = tl.zeros([WIDTH, HIDDEN], tl.float32)
    sum_bt, sum_bg = tl.zeros([WIDTH], tl.float32), tl.zeros([WIDTH], tl.float32)
    sum_b1, sum_2 = tl.zeros([HIDDEN], tl.float32), tl.zeros([HIDDEN], tl.float32)
    sum_b2, most_weight = tl.zeros([ROWS], tl.float32), tl.max(tl.abs(weight), 0)
    for one in range(tl.program_id(0) % programs, problems * places, programs):
        problem, place = layer * problems + one // places, one % places
        are_queries = place < blocks  # first the tiles of queries, then those of keys
        side = tl.where(are_queries, 0, 1)
        block, count = place - side * blocks, tl.where(are_queries, n, m)
        i, sample = block * ROWS + tl.arange(0, ROWS), _sample(layer, problems, heads, one // places)
        valid = _valid(query_mask, key_mask, side, sample, i, count, QUERY_MASKED, KEY_MASKED)
        by = tl.load(outer + problem)
        x = read_tokens(tl.where(are_queries, query, key), problem, block * ROWS, count, d, ROWS, WIDTH)
        mark, lever, answer, high, low, x_unit, carried, carried_low, carried_unit = forth(
            x, t, t_low, g, g_low, h, h_low, unit, b_t, b_g, b_1, layer, d, e, WIDTH, HIDDEN, PARTS
        )
        found = leaky(answer, answer, slope)
        of = felt + problem * (3 * e + 5)
        centre = row_of(of, 0, e, HIDDEN)[None, :]
        given = row_of(of, 1 + side, e, HIDDEN)[None, :] + tl.load(of + 3 * e + side) * (found - centre)
        if HAS_OWN:
            there = _valid(query_mask, key_mask, 1 - side, sample, i, count, QUERY_MASKED, KEY_MASKED)
            other = read_tokens(tl.where(are_queries, of_key, of_query), problem, block * ROWS, count, e, ROWS, HIDDEN)
            if PARTS == 1:
                units = tl.where(are_queries, units_key, units_query)
                other = other.to(tl.float32) * tl.load(units + problem * blocks + block)
            given += tl.where(there[:, None], tl.load(of + 3 * e + 4) * (other - centre), 0.0)
        given = leaky(answer, tl.where(valid[:, None], given, 0.0), slope)
        of_answer, of_answer_low, given_unit = placed(given, PARTS)
        of_carried, of_gate, of_transformed = back(mark, lever, of_answer, of_answer_low, h, h_low, PARTS)
        most = largest(of_gate, of_transformed)
        if WEIGHTS:
            # In a unit of its own, and so about as large as what tokens feel: one power of two serves both.
            sign, answered = tl.where(are_queries, 1.0, -1.0), tl.load(of + 3 * e + 2 + side) * by
            power, felt_unit = powers(tl.abs(answered) * most_weight)
            feels = sign * answered * power * tl.sigmoid(-sign * _answers(found, weight, bias))
            feels = tl.where(valid, feels, 0.0)
            value = feels[:, None] * leaky(answer, weight[None, :], slope)
            of_value, of_value_low, _ = split(value, PARTS)
            _, gate_of_value, transform_of_value = back(mark, lever, of_value, of_value_low, h, h_low, PARTS)
            most = tl.maximum(most, largest(gate_of_value, transform_of_value))
        power, of_unit = powers(most)
        of_t, of_t_low, _ = split(of_transformed * power, PARTS)
        of_g, of_g_low, _ = split(of_gate * power, PARTS)
        by_tokens = given_unit * unit * by
        gradient = to_tokens(
            of_carried, mark, of_t, of_t_low, of_g, of_g_low, of_unit * unit, t, t_low, g, g_low, PARTS
        )
        store(
            tl.where(are_queries, to_query, to_key), gradient * by_tokens, problem, block * ROWS, count, d, ROWS, WIDTH
        )
        if WEIGHTS:
            of_t, of_t_low, _ = split(transform_of_value * power, PARTS)
            of_g, of_g_low, _ = split(gate_of_value * power, PARTS)
            by = felt_unit * unit
            sum_1 += to_weights(carried, carried_low, of_value, of_value_low, carried_unit * felt_unit, PARTS)
            sum_t += to_weights(high, low, of_t, of_t_low, x_unit * of_unit * by, PARTS)
            sum_g += to_weights(high, low, of_g, of_g_low, x_unit * of_unit * by, PARTS)
            sum_b1 += tl.sum(value, 0) * felt_unit
            sum_bt += tl.sum(transform_of_value, 0) * by
            sum_bg += tl.sum(gate_of_value, 0) * by
            sum_2 += tl.sum(found * feels[:, None], 0) * felt_unit
            sum_b2 += feels * felt_unit
    if WEIGHTS:  # the discriminator ascends
        to = sums + tl.program_id(0).to(tl.int64) * size
        put_sums(to, -sum_t, -sum_bt, -sum_g, -sum_bg, -sum_1, -sum_b1, d, e, WIDTH, HIDDEN)
        to += size - e - 1
        tl.store(to + k, -sum_2, mask=k < e)
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
        same = shape(query, e, products, tokens=max(n, m)) | {"HAS_OWN": has_own}
        masked = {"QUERY_MASKED": query_mask is not None, "KEY_MASKED": key_mask is not None}
        blocks = triton.cdiv(max(n, m), same["ROWS"])
        programs, size = programs_of(layers, problems * blocks), VECTORS.value * e + NUMBERS
        features = [side.new_empty(0) for side in (query, key)]
        if has_own:
            kind = query.dtype if products == EXACT else torch.float16
            features = [side.new_empty(*side.shape[:-1], e, dtype=kind) for side in (query, key)]
        units = query.new_empty(2, layers * problems, blocks if has_own else 0)
        records = query.new_empty(layers * problems, blocks, size)
        two = {"maxnreg": TWO} if same["PARTS"] == 1 else {}
        tokens = (query, key, *as_bytes(query_mask, key_mask, query), *kept, *features, *units)
        launch(
            _play, layers * programs, *tokens, records, heads, problems, n, m, d, e, blocks, programs, size, SLOPE,
            **same, **masked, **two,
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
        programs, size = programs_of(layers, problems * places), size_of(weights)
        of_tokens = [torch.empty_like(side) for side in (query, key)]
        sums = query.new_empty(layers, programs, size if learns else 0)
        launch(
            _play_back, layers * programs, *tokens, felt, *dense(outer[0]), *of_tokens, sums, heads, problems, n, m, d,
            e, blocks, places, programs, size, SLOPE, **ctx.settings, WEIGHTS=learns,
        )  # fmt: skip
        of_weights = apart(sums.sum(1), weights) if learns else [None] * 8
        return None, None, None, *of_tokens, *of_weights


def game(
    products: str, query: Tensor, key: Tensor, query_mask: Tensor | None, key_mask: Tensor | None, *weights: Tensor
) -> tuple[Tensor, Tensor]:
    """Feature distance of each problem, whose backward also takes the discriminator upwards; and how often it is right.

    Queries and keys [l, b, h, tokens, d], masks [lb, tokens]; weights and biases of transform, gate, first and second
    layer in turn, the last with one answer.
    """
    distances, accuracies = _Game.apply(products, query_mask, key_mask, query, key, *weights)
    return distances, accuracies
