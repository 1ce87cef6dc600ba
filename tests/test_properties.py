"""No NaN, whatever the shapes, masks, precision and values; and laws that hold for all of them.

50 cases, always the same ones; ALIGNATTN_EXAMPLES=10000 searches at random.
"""

import os
from dataclasses import dataclass

import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from alignattn.functional import adversarial, conditional_transport, mmd, optimal_transport

EXAMPLES = os.environ.get("ALIGNATTN_EXAMPLES")
searching = settings(
    max_examples=int(EXAMPLES or 50),
    derandomize=EXAMPLES is None,
    database=None,
    deadline=None,
    suppress_health_check=list(HealthCheck),
)

HUGE = {
    torch.float16: [6e4],
    torch.bfloat16: [1e4, 1e18, 1e30],
    torch.float32: [1e4, 1e18, 1e30],
    torch.float64: [1e4, 1e18, 1e30, 1e160],
}
TINY = {
    torch.float16: [1e-4, 6e-8],
    torch.bfloat16: [1e-4, 1e-20, 1e-38],
    torch.float32: [1e-4, 1e-20, 1e-38, 1e-44],
    torch.float64: [1e-4, 1e-20, 1e-160, 1e-310],
}
SEED = st.integers(0, 2**31 - 1)


@dataclass
class Case:
    query: torch.Tensor
    key: torch.Tensor
    query_mask: torch.Tensor | None
    key_mask: torch.Tensor | None

    @property
    def masks(self):
        return {"query_mask": self.query_mask, "key_mask": self.key_mask}


def tokens(draw, shape, dtype):
    """[b, h, n, d]: one length for all tokens or one a token, in random, equal or axis-parallel directions."""
    b, h, n, d = shape
    generator = torch.Generator().manual_seed(draw(SEED))
    directions = torch.randn(shape, generator=generator, dtype=torch.float64).clamp(-1, 1)
    match draw(st.sampled_from(["random", "random", "equal", "axis", "sign"])):
        case "equal":
            directions = directions[:, :, :1].expand(shape)
        case "axis":
            directions = torch.eye(d, dtype=torch.float64)[torch.randint(d, (b, h, n), generator=generator)]
        case "sign":
            directions = directions.sign()
    lengths = [0.0, 1.0, 1.0, 10.0, *HUGE[dtype], *TINY[dtype]]
    if draw(st.booleans()):
        scale = torch.tensor(draw(st.sampled_from(lengths)), dtype=torch.float64)
    else:
        choice = torch.randint(len(lengths), (b, h, n, 1), generator=generator)
        scale = torch.tensor(lengths, dtype=torch.float64)[choice]
    return (directions * scale).to(dtype)


def mask(draw, b, n):
    kind = draw(st.sampled_from(["none", "full", "random", "single", "empty sample", "empty"]))
    if kind == "none":
        return None
    valid = torch.ones(b, n, dtype=torch.bool)
    generator = torch.Generator().manual_seed(draw(SEED))
    if kind in ("random", "empty sample"):
        valid = torch.rand(b, n, generator=generator) < 0.6
    if kind == "empty sample":
        valid[draw(st.integers(0, b - 1))] = False
    if kind == "single":
        valid = torch.arange(n)[None] == torch.randint(n, (b, 1), generator=generator)
    return valid & (kind != "empty")


@st.composite
def cases(draw):
    b, h = draw(st.integers(1, 3)), draw(st.integers(1, 3))
    n, m, d = draw(st.integers(1, 7)), draw(st.integers(1, 7)), draw(st.integers(1, 9))
    dtype = draw(st.sampled_from([torch.float16, torch.bfloat16, torch.float32, torch.float64]))
    query = tokens(draw, (b, h, n, d), dtype)
    match draw(st.sampled_from(["own", "own", "own", "same", "opposite"])):
        case "own":
            key = tokens(draw, (b, h, m, d), dtype)
        case "same":
            key = query.clone()
        case "opposite":
            key = -query
    case = Case(query, key, mask(draw, b, query.shape[2]), mask(draw, b, key.shape[2]))
    padding = draw(st.sampled_from([None, float("nan"), float("inf")]))
    for side, valid in ((case.query, case.query_mask), (case.key, case.key_mask)):
        if padding is not None and valid is not None:
            side.transpose(1, 2)[~valid] = padding
        side.requires_grad_()
    return case


def is_sound(case, value, low=-float("inf"), high=float("inf")):
    assert value.dtype == (torch.float64 if case.query.dtype == torch.float64 else torch.float32)
    assert value.shape == case.query.shape[:2]
    assert not value.isnan().any(), "NaN in the value"
    assert ((value >= low) & (value <= high)).all(), f"outside [{low}, {high}]: {value}"
    value.sum().backward()
    for name, side, valid in (("query", case.query, case.query_mask), ("key", case.key, case.key_mask)):
        assert not side.grad.isnan().any(), f"NaN in the gradient of {name}"
        if valid is not None:
            assert (side.grad.transpose(1, 2)[~valid] == 0).all(), f"gradient at padded {name}"


@searching
@given(
    cases(),
    st.sampled_from(["cosine", "sqeuclidean"]),
    st.sampled_from([1e-6, 0.01, 1.0, 1e4]),
    st.booleans(),
    st.sampled_from([1, 2, 7, 40]),
    st.sampled_from([0.0, 1e-3]),
    st.sampled_from(["plan", "unrolled"]),
    st.sampled_from(["cost", "regularised"]),
)
def test_optimal_transport_makes_no_nan(
    case, cost, epsilon, relative, max_iterations, tolerance, gradient, differentiated
):
    options = {"max_iterations": max_iterations, "tolerance": tolerance, "gradient": gradient}
    result = optimal_transport(
        case.query, case.key, cost=cost, epsilon=epsilon, relative_epsilon=relative, **options, **case.masks
    )
    for name in ("cost", "regularised", "marginal_error", "epsilon"):
        assert not getattr(result, name).isnan().any(), name
    assert ((result.iterations >= 0) & (result.iterations <= max_iterations)).all()
    paid = result.cost.detach().double()
    if cost == "cosine":
        assert ((paid >= -1e-4) & (paid <= 2.001)).all(), f"cost: {paid}"
    else:  # a difference of squares, right to the rounding of the largest
        largest = max(side.detach().double().nan_to_num(0, 0, 0).abs().max().item() for side in (case.query, case.key))
        assert (paid >= -1e-5 * max(1.0, largest) * max(1.0, largest)).all(), f"cost: {paid}"
    is_sound(case, getattr(result, differentiated))


@searching
@given(cases(), st.sampled_from([1e-3, 1.0, 30.0]))
def test_conditional_transport_makes_no_nan(case, navigator_scale):
    largest = torch.finfo(case.query.dtype).max
    navigators = [
        (navigator_scale * side.double()).clamp(-largest, largest).flip(-1).to(side.dtype)
        for side in (case.query, case.key)
    ]
    is_sound(case, conditional_transport(case.query, case.key, *navigators, **case.masks), -1e-4, 2.001)


@searching
@given(cases(), st.sampled_from(["median", "median", "mean", 1e-3, 1.0, 1e3]), st.booleans())
def test_mmd_makes_no_nan(case, bandwidth, unbiased):
    value = mmd(case.query, case.key, bandwidth=bandwidth, unbiased=unbiased, **case.masks)
    is_sound(case, value, -2.001 if unbiased else -1e-4, 2.001)


@searching
@given(cases())
def test_adversarial_makes_no_nan(case):
    is_sound(case, adversarial(case.query[..., 0], case.key[..., 0], **case.masks), high=0.0)


def moderate(b, h, n, m, d, seed):
    generator = torch.Generator().manual_seed(seed)
    query = torch.randn(b, h, n, d, generator=generator, dtype=torch.float64)
    return query, torch.randn(b, h, m, d, generator=generator, dtype=torch.float64) + 0.5


shapes = st.tuples(*[st.integers(1, 3)] * 2, *[st.integers(1, 7)] * 2, st.integers(2, 6), SEED)


@searching
@given(shapes, st.floats(1e-3, 1e3))
def test_mmd_at_its_own_bandwidth_knows_no_scale(shape, scale):
    query, key = moderate(*shape)
    torch.testing.assert_close(mmd(scale * query, scale * key), mmd(query, key), rtol=1e-7, atol=1e-9)


@searching
@given(shapes)
def test_mmd_and_squared_euclidean_transport_know_no_rotation_and_no_shift(shape):
    query, key = moderate(*shape)
    generator = torch.Generator().manual_seed(0)
    rotation = torch.linalg.qr(torch.randn(2 * query.shape[-1:], generator=generator, dtype=torch.float64)).Q
    moved = query @ rotation + 2, key @ rotation + 2
    torch.testing.assert_close(mmd(*moved), mmd(query, key), rtol=1e-7, atol=1e-9)
    paid = [optimal_transport(*sides, cost="sqeuclidean", epsilon=1.0).cost for sides in (moved, (query, key))]
    torch.testing.assert_close(*paid, rtol=1e-6, atol=1e-8)


@searching
@given(shapes)
def test_transport_is_cheapest_with_little_entropy(shape):
    query, key = moderate(*shape)
    paid = [
        optimal_transport(query, key, epsilon=epsilon, max_iterations=500, tolerance=1e-6).cost
        for epsilon in (0.1, 0.5, 5.0)
    ]
    assert (paid[0] <= paid[1] + 1e-4).all() and (paid[1] <= paid[2] + 1e-4).all()
