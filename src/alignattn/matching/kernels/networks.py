"""Critic and navigator of conditional transport as kernels see them, there and back.

    critic:      f = leaky_relu(h W_1 + b_1) W_2 + b_2,  h as in highway.py
    navigator:   g = relu(x V_1 + a_1) V_2 + a_2,   clamped to ± largest

One kernel reads tokens of either side and leaves them placed (placed.py). What features feel, of problems that count
one, and what each problem counts, another takes back through both networks to the tokens. Two add up what the weights
feel: a few programs a layer write their sums once, one behind the other.
"""

import triton
import triton.language as tl

from alignattn.matching.kernels.highway import put_sums, store
from alignattn.matching.kernels.placed import place, tokens_there
from alignattn.matching.kernels.trunk import highway, linear, to_highway, to_tokens, tokens_of


@triton.jit
def features(
    query, key, query_mask, key_mask, w_t, b_t, w_g, b_g, w_1, b_1, w_2, b_2, v_1, a_1, v_2, a_2,
    query_unit, query_unit_low, query_nav, query_nav_low, query_inverse, query_size,
    key_unit, key_unit_low, key_nav, key_nav_low, key_inverse, key_size,
    problems, n, m, heads, d: tl.constexpr, hidden: tl.constexpr, e: tl.constexpr, blocks, places, largest, guard,
    slope,
    ROWS: tl.constexpr, WIDTH: tl.constexpr, HIDDEN: tl.constexpr, OUT: tl.constexpr, QUERY_MASKED: tl.constexpr,
    KEY_MASKED: tl.constexpr, PRECISION: tl.constexpr, PARTS: tl.constexpr,
):  # fmt: skip
    """Tokens of a layer, placed."""
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
def _to_navigator(
    own, given, v_1, a_1, v_2, a_2, layer, d, hidden, e, largest,
    WIDTH: tl.constexpr, HIDDEN: tl.constexpr, OUT: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """What is felt along the navigator, by tokens whose features feel what is given."""
    features = tl.maximum(linear(own, v_1, a_1, layer, d, hidden, WIDTH, HIDDEN, PRECISION), 0.0)
    answer = linear(features, v_2, a_2, layer, hidden, e, HIDDEN, OUT, PRECISION)
    given = tl.where(tl.abs(answer) <= largest, given, 0.0)
    back = tl.trans(tokens_of(v_2, layer, 0, hidden, e, HIDDEN, OUT))
    return features, given, tl.where(features > 0, tl.dot(given, back, input_precision=PRECISION), 0.0)


@triton.jit
def tokens_feel(
    query, key, of_query_unit, of_query_nav, of_key_unit, of_key_nav, of_problems,
    w_t, b_t, w_g, b_g, w_1, b_1, w_2, v_1, a_1, v_2, a_2, of_query, of_key, query_hidden, key_hidden,
    of_query_hidden, of_key_hidden,
    problems, n, m, d: tl.constexpr, hidden: tl.constexpr, e: tl.constexpr, blocks, places, largest, slope,
    ROWS: tl.constexpr, WIDTH: tl.constexpr, HIDDEN: tl.constexpr, OUT: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """What tokens feel; and kept for the weights, what the critic's last layer is given and what is felt there."""
    layer = (tl.program_id(0) // places).to(tl.int64)
    block = tl.program_id(0) % places
    start = tl.where(block < blocks, block, block - blocks) * ROWS
    length = tl.where(block < blocks, n, m)
    count = problems * length
    if block < blocks:
        x, of_unit, of_nav = query, of_query_unit, of_query_nav
        of_x, kept, of_hidden = of_query, query_hidden, of_query_hidden
    else:
        x, of_unit, of_nav = key, of_key_unit, of_key_nav
        of_x, kept, of_hidden = of_key, key_hidden, of_key_hidden
    i = start + tl.arange(0, ROWS)
    by = tl.load(of_problems + layer * problems + i // length, mask=i < count, other=0.0)
    own = tokens_of(x, layer, start, count, d, ROWS, WIDTH)
    given = tokens_of(of_unit, layer, start, count, e, ROWS, OUT) * by[:, None]
    back = tl.trans(tokens_of(w_2, layer, 0, hidden, e, HIDDEN, OUT))
    felt = tl.dot(given, back, input_precision=PRECISION)
    store(of_hidden, felt, layer, start, count, hidden, ROWS, HIDDEN)
    answer, gate, _, _, of_carried, of_gate, of_transformed = to_highway(
        own, felt, w_t, b_t, w_g, b_g, w_1, b_1, layer, d, hidden, slope,
        WIDTH, HIDDEN, PRECISION,
    )  # fmt: skip
    store(kept, tl.where(answer > 0, answer, slope * answer), layer, start, count, hidden, ROWS, HIDDEN)
    gradient = to_tokens(gate, of_carried, of_gate, of_transformed, w_t, w_g, layer, d, WIDTH, PRECISION)
    given = tokens_of(of_nav, layer, start, count, e, ROWS, OUT) * by[:, None]
    _, _, of_answer = _to_navigator(
        own, given, v_1, a_1, v_2, a_2, layer, d, hidden, e, largest, WIDTH, HIDDEN, OUT, PRECISION
    )
    back = tl.trans(tokens_of(v_1, layer, 0, d, hidden, WIDTH, HIDDEN))
    gradient += tl.dot(of_answer, back, input_precision=PRECISION)
    store(of_x, gradient, layer, start, count, d, ROWS, WIDTH)


@triton.jit
def trunk_feels(
    query, key, of_query_hidden, of_key_hidden, w_t, b_t, w_g, b_g, w_1, b_1, sums,
    problems, n, m, d: tl.constexpr, hidden: tl.constexpr, blocks, places, programs, size, slope,
    ROWS: tl.constexpr, WIDTH: tl.constexpr, HIDDEN: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """What its weights feel, and so the critic ascends: the sums of some tokens, with their sign turned."""
    layer = (tl.program_id(0) // programs).to(tl.int64)
    sum_t, sum_g = tl.zeros([WIDTH, WIDTH], tl.float32), tl.zeros([WIDTH, WIDTH], tl.float32)
    sum_1, sum_b1 = tl.zeros([WIDTH, HIDDEN], tl.float32), tl.zeros([HIDDEN], tl.float32)
    sum_bt, sum_bg = tl.zeros([WIDTH], tl.float32), tl.zeros([WIDTH], tl.float32)
    for block in range(tl.program_id(0) % programs, places, programs):
        start = tl.where(block < blocks, block, block - blocks) * ROWS
        count = problems * tl.where(block < blocks, n, m)
        if block < blocks:
            x, of_hidden = query, of_query_hidden
        else:
            x, of_hidden = key, of_key_hidden
        own = tokens_of(x, layer, start, count, d, ROWS, WIDTH)
        given = tokens_of(of_hidden, layer, start, count, hidden, ROWS, HIDDEN)
        _, _, carried, of_answer, _, of_gate, of_transformed = to_highway(
            own, given, w_t, b_t, w_g, b_g, w_1, b_1, layer, d, hidden, slope, WIDTH, HIDDEN, PRECISION
        )
        sum_1 += tl.dot(tl.trans(carried), of_answer, input_precision=PRECISION)
        sum_t += tl.dot(tl.trans(own), of_transformed, input_precision=PRECISION)
        sum_g += tl.dot(tl.trans(own), of_gate, input_precision=PRECISION)
        sum_b1 += tl.sum(of_answer, 0)
        sum_bt += tl.sum(of_transformed, 0)
        sum_bg += tl.sum(of_gate, 0)
    to = sums + tl.program_id(0).to(tl.int64) * size
    put_sums(to, -sum_t, -sum_bt, -sum_g, -sum_bg, -sum_1, -sum_b1, d, hidden, WIDTH, HIDDEN)


@triton.jit
def rest_feels(
    query, key, of_query_unit, of_query_nav, of_key_unit, of_key_nav, of_problems, query_hidden, key_hidden,
    v_1, a_1, v_2, a_2, sums,
    problems, n, m, d: tl.constexpr, hidden: tl.constexpr, e: tl.constexpr, blocks, places, programs, size, largest,
    sign,
    ROWS: tl.constexpr, WIDTH: tl.constexpr, HIDDEN: tl.constexpr, OUT: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """The critic's last layer, beside which its trunk would not fit the registers, and the navigator's both."""
    layer = (tl.program_id(0) // programs).to(tl.int64)
    sum_w2, sum_v1 = tl.zeros([HIDDEN, OUT], tl.float32), tl.zeros([WIDTH, HIDDEN], tl.float32)
    sum_v2, sum_b2 = tl.zeros([HIDDEN, OUT], tl.float32), tl.zeros([OUT], tl.float32)
    sum_a1, sum_a2 = tl.zeros([HIDDEN], tl.float32), tl.zeros([OUT], tl.float32)
    for block in range(tl.program_id(0) % programs, places, programs):
        start = tl.where(block < blocks, block, block - blocks) * ROWS
        length = tl.where(block < blocks, n, m)
        count = problems * length
        if block < blocks:
            x, kept, of_unit, of_nav = query, query_hidden, of_query_unit, of_query_nav
        else:
            x, kept, of_unit, of_nav = key, key_hidden, of_key_unit, of_key_nav
        i = start + tl.arange(0, ROWS)
        by = tl.load(of_problems + layer * problems + i // length, mask=i < count, other=0.0)
        given = tokens_of(of_unit, layer, start, count, e, ROWS, OUT) * by[:, None]
        features = tokens_of(kept, layer, start, count, hidden, ROWS, HIDDEN)
        sum_w2 += tl.dot(tl.trans(features), given, input_precision=PRECISION)
        sum_b2 += tl.sum(given, 0)
        own = tokens_of(x, layer, start, count, d, ROWS, WIDTH)
        given = tokens_of(of_nav, layer, start, count, e, ROWS, OUT) * by[:, None]
        features, given, of_answer = _to_navigator(
            own, given, v_1, a_1, v_2, a_2, layer, d, hidden, e, largest, WIDTH, HIDDEN, OUT, PRECISION
        )
        sum_v2 += tl.dot(tl.trans(features), given, input_precision=PRECISION)
        sum_v1 += tl.dot(tl.trans(own), of_answer, input_precision=PRECISION)
        sum_a2 += tl.sum(given, 0)
        sum_a1 += tl.sum(of_answer, 0)
    to = sums + tl.program_id(0).to(tl.int64) * size + 2 * d * (d + 1) + (d + 1) * hidden  # behind the trunk's
    _put(to, -sum_w2, -sum_b2, hidden, e, HIDDEN, OUT)
    _put(to + (hidden + 1) * e, sign * sum_v1, sign * sum_a1, d, hidden, WIDTH, HIDDEN)
    _put(to + (hidden + 1) * e + (d + 1) * hidden, sign * sum_v2, sign * sum_a2, hidden, e, HIDDEN, OUT)
