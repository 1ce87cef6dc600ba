"""Kernels in Triton, in its interpreter where there is no accelerator, against double precision.

Run in a process of its own: Triton decides when a kernel is defined whether it is interpreted.
"""

import functools
import math
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

pytest.importorskip("triton", reason="pip install triton")
INTERPRETED = os.environ.get("TRITON_INTERPRET") == "1"
inside = pytest.mark.skipif(not INTERPRETED and not torch.cuda.is_available(), reason="runs in a process of its own")
DEVICE = "cpu" if INTERPRETED else "cuda"


@pytest.fixture(autouse=True)
def _asked_for(monkeypatch):
    monkeypatch.setenv("ALIGNATTN_KERNELS", "1")


@pytest.mark.skipif(INTERPRETED or torch.cuda.is_available(), reason="is that process, or has an accelerator")
@pytest.mark.parametrize("chosen", ["transport", "not transport"])  # side by side
def test_in_the_interpreter(chosen):
    _passes(__file__, "-k", chosen, TRITON_INTERPRET="1", CUDA_VISIBLE_DEVICES="")


@pytest.mark.skipif(INTERPRETED or torch.cuda.is_available(), reason="is a process of its own, or has an accelerator")
def test_in_the_interpreter_all_may_pass_that_no_accelerator_takes():
    _passes(str(Path(__file__).with_name("compiled_kernels.py")))


def _passes(*arguments, **variables):
    command = [sys.executable, "-m", "pytest", "-q", "-o", "addopts=", "-p", "no:cacheprovider", *arguments]
    ran = subprocess.run(command, env=os.environ | variables, capture_output=True, text=True, check=False)
    assert ran.returncode == 0 and " passed" in ran.stdout, ran.stdout[-6000:]


# Sinkhorn


def problems(p, n, m, d, *, masked=False, seed=0):
    generator = torch.Generator().manual_seed(seed)
    x = torch.randn(p, n, d, generator=generator, dtype=torch.float64)
    y = torch.randn(p, m, d, generator=generator, dtype=torch.float64) + 0.3
    log_a, log_b = torch.full((p, n), 1 / n).double().log(), torch.full((p, m), 1 / m).double().log()
    if masked:
        kept = max(1, m - 3)
        log_b[0, kept:] = -torch.inf
        log_b[0, :kept] = -torch.tensor(float(kept)).double().log()
    epsilon = torch.linspace(0.5, 2.0, p, dtype=torch.float64) * d**0.5
    alpha, beta = x.square().sum(-1) / 2, y.square().sum(-1) / 2
    return x, y, alpha, beta, log_a, log_b, epsilon


SIZES = [(1, 1, 1, 8), (2, 5, 7, 8), (3, 16, 16, 16), (2, 33, 17, 24), (1, 70, 40, 128), (2, 20, 20, 64)]
SIZES += [(1, 40, 600, 16)]  # several tiles, and columns of which a program holds few rows


def kept(kind, monkeypatch):
    """Scores are stored, or streamed."""
    monkeypatch.setattr("alignattn.matching.kernels.stored_scores.pay", lambda *_: kind == "stored")


def scores(kind, *given):
    from alignattn.matching.kernels.sinkhorn import StreamedScores
    from alignattn.matching.kernels.stored_scores import StoredScores

    return {"stored": StoredScores, "streamed": StreamedScores}[kind](*given)


KINDS = pytest.mark.parametrize("kind", ["stored", "streamed"])


@inside
@KINDS
@pytest.mark.parametrize(("p", "n", "m", "d"), SIZES)
@pytest.mark.parametrize("masked", [False, True])
def test_as_precise_as_plain_torch_in_single_precision(p, n, m, d, masked, kind, monkeypatch):
    from alignattn.matching import kernels, sinkhorn

    given = problems(p, n, m, d, masked=masked)
    never = -1.0  # within the tolerance: single precision may come to rest before
    exact = sinkhorn._plans(*given, 20, never)
    single = [tensor.float().to(DEVICE) for tensor in given]
    assert kernels.serve(single[0])
    kept(kind, monkeypatch)
    found = sinkhorn._plans(*single, 20, never)
    monkeypatch.setattr(kernels, "serve", lambda tensor, **_: False)
    plain = sinkhorn._plans(*single, 20, never)
    for told, usual, truth in zip(found, plain, exact, strict=True):
        assert told.shape == truth.shape and told.dtype == (
            torch.int64 if truth.dtype == torch.int64 else torch.float32
        )
        off, allowed = ((t.cpu().double() - truth).square().mean().sqrt() for t in (told, usual))
        assert off <= 2 * allowed + 1e-6 * truth.double().abs().max().clamp_min(1.0)


@inside
def test_tiles_runs_and_memory_make_no_difference():
    from alignattn.matching.kernels.sinkhorn import StreamedScores

    x, y, _, _, log_a, log_b, epsilon = (tensor.float().to(DEVICE) for tensor in problems(2, 50, 37, 8))
    f, g = torch.randn(2, 50, device=DEVICE), torch.randn(2, 37, device=DEVICE)

    def all_of(some):
        return *some.solve(log_a, log_b, g, 3, 0.0, 10), *some.carry(f, g)[0], *some.carry(f, g)[1]

    tiled = all_of(StreamedScores(x, y, epsilon, largest_tile=16))
    for kind in ("stored", "streamed"):
        first, again = (all_of(scores(kind, x, y, epsilon)) for _ in range(2))
        for one, other, small in zip(first, again, tiled, strict=True):
            assert torch.equal(one, other)
            torch.testing.assert_close(small, one, rtol=1e-4, atol=1e-4)


@inside
@KINDS
@pytest.mark.parametrize(("p", "n", "m", "d"), SIZES)
@pytest.mark.parametrize("masked", [False, True])
def test_values_alone_are_as_precise(p, n, m, d, masked, kind, monkeypatch):
    from alignattn.matching import kernels, sinkhorn

    given = problems(p, n, m, d, masked=masked)
    single = [tensor.float().to(DEVICE) for tensor in given]
    monkeypatch.setattr("alignattn.matching.tokens.MATRIX_ELEMENTS", {"cpu": n * m, "cuda": n * m})  # one at a time
    exact = sinkhorn.with_fixed_plan(sinkhorn.Problems(*given), 20, -1.0)
    kept(kind, monkeypatch)
    found = sinkhorn.with_fixed_plan(sinkhorn.Problems(*single), 20, -1.0)
    monkeypatch.setattr(kernels, "serve", lambda tensor, **_: False)
    plain = sinkhorn.with_fixed_plan(sinkhorn.Problems(*single), 20, -1.0)
    for told, usual, truth in zip(found, plain, exact, strict=True):
        assert told.shape == truth.shape
        off, allowed = ((t.cpu().double() - truth).square().mean().sqrt() for t in (told, usual))
        assert off <= 2 * allowed + 1e-6 * truth.double().abs().max().clamp_min(1.0)


@inside
@pytest.mark.parametrize(("n", "m", "d"), [(1, 1, 8), (5, 7, 8), (33, 17, 24), (20, 20, 64)])
@pytest.mark.parametrize(("cost", "epsilon"), [("sqeuclidean", 0.05), ("half_sqeuclidean", 1.0)])
@pytest.mark.parametrize("masked", [False, True])
def test_values_from_tokens_are_as_precise_as_plain_torch(n, m, d, cost, epsilon, masked, monkeypatch):
    """Of tokens far from the origin; one sample has padding that is NaN, another no keys at all."""
    from alignattn.matching import kernels
    from alignattn.matching.transport import optimal_transport

    generator = torch.Generator().manual_seed(0)
    query, key = (torch.randn(3, 2, count, d, generator=generator, dtype=torch.float64) + 3 for count in (n, m))
    masks = [None, None]
    if masked:
        masks = [torch.ones(3, count, dtype=torch.bool) for count in (n, m)]
        masks[0][0, (n + 1) // 2 :] = masks[1][1, (m + 1) // 2 :] = masks[1][2] = False
        query[0, :, (n + 1) // 2 :] = float("nan")
    settings = {"cost": cost, "epsilon": epsilon, "max_iterations": 20, "tolerance": 0.0}

    def solved(dtype, device):
        there = [None if mask is None else mask.to(device) for mask in masks]
        given = query.to(device, dtype), key.to(device, dtype)
        return optimal_transport(*given, query_mask=there[0], key_mask=there[1], **settings)

    called = []
    monkeypatch.setattr("alignattn.matching.sinkhorn._scored", lambda *_, **__: called.append(1))
    monkeypatch.setattr("alignattn.matching.tokens.MATRIX_ELEMENTS", {"cpu": 4 * n * m, "cuda": 4 * n * m})
    found = solved(torch.float32, DEVICE)
    monkeypatch.undo()
    assert not called
    monkeypatch.setattr(kernels, "serve", lambda tensor, **_: False)
    plain, exact = solved(torch.float32, "cpu"), solved(torch.float64, "cpu")
    assert torch.equal(found.epsilon.cpu(), plain.epsilon)
    for name in ("cost", "regularised", "marginal_error"):
        told, usual, truth = (getattr(one, name).cpu().double() for one in (found, plain, exact))
        off, allowed = ((t - truth).square().mean().sqrt() for t in (told, usual))
        assert off <= 2 * allowed + 1e-6 * truth.abs().max().clamp_min(1.0)


@inside
def test_values_from_tokens_stop_when_they_are_right(monkeypatch):
    from alignattn.matching import kernels
    from alignattn.matching.transport import optimal_transport

    generator = torch.Generator().manual_seed(0)
    query, key = (torch.randn(2, 2, 12, 8, generator=generator).to(DEVICE) for _ in range(2))
    settings = {"cost": "sqeuclidean", "epsilon": 0.1, "max_iterations": 200, "tolerance": 1e-2}
    found = optimal_transport(query, key, **settings)
    monkeypatch.setattr(kernels, "serve", lambda tensor, **_: False)
    usual = optimal_transport(query, key, **settings)
    assert (found.iterations - usual.iterations).abs().max() <= 1 and found.iterations.unique().numel() > 1
    assert (found.marginal_error <= 1.1e-2).all() and (found.iterations < 200).all()
    torch.testing.assert_close(found.cost, usual.cost, rtol=1e-2, atol=0)


@inside
@KINDS
@pytest.mark.parametrize("epsilon", [1e-2, 1e-10])
def test_sharp_plans_are_as_precise(epsilon, kind, monkeypatch):
    """Potentials of thousands cancel in the entropy, and where single precision knows them to hundreds they jump."""
    from alignattn.matching import kernels, sinkhorn

    x, y, alpha, beta, log_a, log_b, _ = problems(2, 24, 18, 8, masked=True)
    given = (x, y, alpha, beta, log_a, log_b, torch.full((2,), epsilon, dtype=torch.float64))
    single = [tensor.float().to(DEVICE) for tensor in given]
    kept(kind, monkeypatch)
    found = sinkhorn._plans(*single, 30, -1.0)
    monkeypatch.setattr(kernels, "serve", lambda tensor, **_: False)
    plain, truth = sinkhorn._plans(*single, 30, -1.0), sinkhorn._plans(*given, 30, -1.0)
    for told, usual, right in zip(found, plain, truth, strict=True):
        off, allowed = ((t.cpu().double() - right).square().mean().sqrt() for t in (told, usual))
        assert off <= 2 * allowed + 1e-6 * right.double().abs().max().clamp_min(1.0)


@inside
def test_values_of_what_is_not_finite_say_so_and_leave_others_alone():
    from alignattn.matching import sinkhorn

    given = [tensor.float().to(DEVICE) for tensor in problems(3, 12, 9, 8)]
    right = sinkhorn.with_fixed_plan(sinkhorn.Problems(*given), 5, 1e-3)
    given[0][1, 2, 3] = float("nan")
    for told, usual in zip(sinkhorn.with_fixed_plan(sinkhorn.Problems(*given), 5, 1e-3)[:3], right, strict=False):
        assert told[1].isnan() and torch.equal(told[[0, 2]], usual[[0, 2]])


@inside
def test_scores_are_stored_where_they_are_few():
    """At most four times as many numbers as queries and keys: memory is linear in their number."""
    from alignattn.matching.kernels.stored_scores import pay

    assert pay(512, 512, 64) and not pay(513, 512, 64)
    assert pay(8, 8192, 64) and not pay(8, 8193, 64)  # a row that no program holds
    assert pay(4096, 64, 64) and not pay(4097, 64, 64)  # too many rows for one


@inside
def test_halves_are_as_precise_as_single_precision():
    """To 22 bits of each number, down to 2^-18 of the largest, and 2^-40 of that below; the high part alone to 11."""
    from alignattn.matching.kernels import EXACT, ROUNDED
    from alignattn.matching.kernels.halves import halves

    generator = torch.Generator().manual_seed(0)
    sizes = 2.0 ** torch.randint(-60, 1, (4, 50, 9), generator=generator)
    tokens = torch.randn(4, 50, 9, generator=generator) * sizes * torch.tensor([1e-30, 1.0, 7e4, 1e33])[:, None, None]
    tokens[:, 0, 0] = 4 * tokens.abs().amax((1, 2))
    factor = torch.tensor([3.0, 0.7, 1.0, 1.3])
    largest = tokens[:, :1, :1].double() * factor[:, None, None]
    for products, bits in ((EXACT, 22), (ROUNDED, 11)):
        found = halves(tokens.to(DEVICE), products, factor.to(DEVICE))
        total = found.high.double() + (found.low.double() if found.parts == 3 else 0)
        off = (total.cpu() * found.unit.cpu().double()[:, None, None] - tokens.double() * factor[:, None, None]).abs()
        exact = tokens.double().abs() * factor[:, None, None]
        assert (off <= exact * 2.0**-bits + largest * 2.0 ** (-39 if bits == 22 else -29)).all()
        assert torch.equal(found.unit.log2().round(), found.unit.log2())
    nothing = halves(torch.zeros(1, 3, 8, device=DEVICE), EXACT)
    assert not nothing.high.any() and nothing.unit.isfinite().all()


@inside
@KINDS
def test_each_problem_stops_by_itself(kind):
    """After as many iterations as it takes alone, with what it finds alone, whatever the others take: as plain code."""
    from alignattn.matching.scores import MatrixScores, Problems

    given = [tensor.float().to(DEVICE) for tensor in problems(3, 12, 10, 8, masked=True)]
    x, y, _, beta, log_a, log_b, epsilon = given
    start = log_b - beta / epsilon[:, None]

    def solved(places):
        some = scores(kind, x[places], y[places], epsilon[places])
        return some.solve(log_a[places], log_b[places], start[places], 200, 1e-4, 10)

    together = solved(slice(None))
    iterations = together[2].tolist()
    assert len(set(iterations)) > 1 and max(iterations) < 200
    for place in range(3):
        for whole, own in zip(together, solved(slice(place, place + 1)), strict=True):
            assert torch.equal(whole[place], own[0])
    plain = MatrixScores(Problems(*given)).solve(log_a, log_b, start, 200, 1e-4, 10)
    assert plain[2].tolist() == iterations
    for one, other in zip(together[:2], plain[:2], strict=True):
        torch.testing.assert_close(one * math.log(2), other, rtol=1e-4, atol=1e-4)  # as powers of two


# MMD


def sides(b, n, m, d, *, masked):
    generator = torch.Generator().manual_seed(n * m * d)
    query = torch.randn(b, 2, n, d, generator=generator, dtype=torch.float64)
    key = torch.randn(b, 2, m, d, generator=generator, dtype=torch.float64) * 1.5 + 0.5
    masks = [torch.ones(b, count, dtype=torch.bool) for count in (n, m)] if masked else [None, None]
    if masked:
        masks[0][0, (n + 1) // 2 :] = False
        masks[1][-1, : m // 3] = False
    return query, key, masks


@inside
@pytest.mark.parametrize(("n", "m", "d"), [(1, 1, 8), (2, 2, 8), (5, 7, 16), (33, 33, 24), (70, 20, 64), (18, 18, 128)])
@pytest.mark.parametrize("masked", [False, True])
@pytest.mark.parametrize("without_own", [False, True])
@pytest.mark.parametrize("bandwidth", ["mean", "median", 3.0])
def test_mmd_is_as_precise_as_plain_torch_in_single_precision(n, m, d, masked, without_own, bandwidth, monkeypatch):
    from alignattn.functional import mmd
    from alignattn.matching import kernels

    query, key, masks = sides(2, n, m, d, masked=masked)

    def found(dtype):
        leaves = [t.detach().to(DEVICE, dtype).requires_grad_() for t in (query, key)]
        given = [None if mask is None else mask.to(DEVICE) for mask in masks]
        options = {"bandwidth": bandwidth, "without_own": without_own, "unbiased": n > 1}
        values = mmd(*leaves, query_mask=given[0], key_mask=given[1], **options)
        values.sum().backward()
        return [t.detach().double().cpu() for t in (values, leaves[0].grad, leaves[1].grad)]

    exact, told = found(torch.float64), found(torch.float32)
    served = []
    monkeypatch.setattr(kernels, "serve", lambda tensor, **_: bool(served.append(tensor)))
    plain = found(torch.float32)
    assert served
    for one, usual, truth in zip(told, plain, exact, strict=True):
        off, allowed = ((t - truth).square().mean().sqrt() for t in (one, usual))
        assert off <= 2 * allowed + 1e-6 * truth.abs().max().clamp_min(1.0)


@inside
def test_mmd_is_the_same_each_time_and_without_gradients():
    from alignattn.functional import mmd

    query, key, _ = sides(2, 21, 21, 8, masked=False)
    query, key = query.float().to(DEVICE), key.float().to(DEVICE)
    again = []
    for _ in range(2):
        leaf = query.clone().requires_grad_()
        value = mmd(leaf, key, bandwidth="mean", without_own=True)
        value.sum().backward()
        again.append((value.detach(), leaf.grad))
    assert torch.equal(again[0][0], again[1][0]) and torch.equal(again[0][1], again[1][1])
    torch.testing.assert_close(mmd(query, key, bandwidth="mean", without_own=True), again[0][0])


@inside
def test_mmd_of_the_largest_numbers_of_one_point_and_of_nothing():
    from alignattn.functional import mmd

    query, key, _ = sides(2, 21, 21, 8, masked=False)
    query, key = query.float().to(DEVICE), key.float().to(DEVICE)
    expected = mmd(query, key, bandwidth="mean")
    torch.testing.assert_close(mmd(query * 1e30, key * 1e30, bandwidth="mean"), expected, rtol=1e-4, atol=1e-5)
    far = torch.full((8,), 1e4, device=DEVICE)
    torch.testing.assert_close(mmd(query + far, key + far, bandwidth="mean"), expected, rtol=2e-2, atol=2e-3)
    one = torch.ones_like(query)
    torch.testing.assert_close(mmd(one, one, bandwidth="mean"), torch.zeros_like(expected))
    nothing = torch.zeros(2, 21, dtype=torch.bool, device=DEVICE)
    leaf = query.clone().requires_grad_()
    value = mmd(leaf, key, bandwidth="mean", query_mask=nothing, key_mask=nothing)
    value.sum().backward()
    assert not value.any() and not leaf.grad.any()


# One scale


@inside
@pytest.mark.parametrize(("n", "m", "d"), [(1, 1, 8), (5, 7, 16), (33, 33, 24), (70, 20, 64), (18, 130, 128)])
@pytest.mark.parametrize("masked", [False, True])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_scaling_is_as_precise_as_plain_torch(n, m, d, masked, dtype, monkeypatch):
    from alignattn.matching import kernels
    from alignattn.matching.scale import standardise

    query, key, masks = sides(2, n, m, d, masked=masked)
    query, key = query.to(dtype).double(), key.to(dtype).double()
    outer = [
        torch.randn(t.shape, generator=torch.Generator().manual_seed(3), dtype=torch.float64) for t in (query, key)
    ]

    def found(dtype):
        leaves = [t.detach().to(DEVICE, dtype).requires_grad_() for t in (query, key)]
        given = [None if mask is None else mask.to(DEVICE) for mask in masks]
        scaled = standardise(*leaves, *given)
        torch.autograd.backward(scaled, [g.to(s) for g, s in zip(outer, scaled, strict=True)])
        assert all(leaf.grad.dtype == dtype for leaf in leaves)
        return [t.detach().double().cpu() for t in (*scaled, leaves[0].grad, leaves[1].grad)]

    told = found(dtype)
    served = []
    monkeypatch.setattr(kernels, "serve", lambda tensor, **_: bool(served.append(tensor)))
    plain, exact = found(dtype), found(torch.float64)
    assert served
    for one, usual, truth in zip(told, plain, exact, strict=True):
        usual = usual.to(dtype).double()  # plain code in half precision would hold them so
        off, allowed = ((t - truth).square().mean().sqrt() for t in (one, usual))
        times = 3 if INTERPRETED and dtype == torch.bfloat16 else 2  # the interpreter cuts bf16 off and does not round
        assert off <= times * allowed + 1e-6 * truth.abs().max().clamp_min(1.0)
        assert torch.equal(one == 0, truth == 0) or n == m == 1  # padding


@inside
@pytest.mark.parametrize("away", [1e3, -3e5])
def test_scaling_of_tokens_far_from_zero(away):
    """Almost all of their squares is taken off again: what is left is 1e-6 of them, and 1e-11."""
    from alignattn.matching.scale import on_one_scale

    query, key, masks = sides(2, 130, 70, 16, masked=True)
    query, key = ((side.float() + away) for side in (query, key))
    given = [mask.to(DEVICE) for mask in masks]
    told = on_one_scale(query.to(DEVICE), key.to(DEVICE), *given)
    exact = on_one_scale(query.double(), key.double(), *masks)
    # The mean is of single precision: all may be off by what its last bit is worth; the deviation by less.
    for one, truth, bit in zip(told[:3], exact[:3], (1e-7, 1e-7, 1e-10), strict=True):
        assert (one.cpu().double() - truth).abs().max() <= bit * abs(away) + 1e-6 * truth.abs().max()


@inside
@pytest.mark.parametrize("masked", [False, True])
def test_scaling_takes_tokens_as_they_lie_and_hands_gradients_back_so(masked):
    from alignattn.matching.scale import standardise

    query, key, masks = sides(2, 18, 130, 16, masked=masked)
    found = []
    for beside in (False, True, "cut"):
        leaves = [t.to(DEVICE, torch.float32) for t in (query, key)]
        if beside == "cut":  # some heads of many: no gradient has gaps
            leaves = [torch.cat([t, t], 1)[:, : t.shape[1]] for t in leaves]
        elif beside:
            leaves = [t.transpose(1, 2).contiguous().transpose(1, 2) for t in leaves]
        leaves = [t.requires_grad_() for t in leaves]
        scaled = standardise(*leaves, *(None if mask is None else mask.to(DEVICE) for mask in masks))
        outer = [torch.linspace(-1, 1, t.numel(), device=DEVICE).view(t.shape) for t in scaled]
        gradients = torch.autograd.grad(scaled, leaves, outer)
        if beside != "cut":
            assert [g.stride() for g in gradients] == [t.stride() for t in leaves]
        found.append((*scaled, *gradients))
    for others in found[1:]:
        for one, other in zip(found[0], others, strict=True):
            assert torch.equal(one, other)


@inside
def test_scaling_survives_the_largest_numbers_and_nothing_at_all():
    from alignattn.matching.scale import standardise

    huge = torch.randn(1, 2, 9, 8, device=DEVICE) * 1e30
    for side in standardise(huge, huge.flip(2), None, None):
        assert side.isfinite().all() and 0.9 < side.std() < 1.1
    nothing = torch.zeros(1, 9, dtype=torch.bool, device=DEVICE)
    for side in standardise(huge, huge, nothing, nothing):
        assert not side.any()
    padded = huge.clone()
    padded[:, :, 5:] = float("nan")
    mask = (torch.arange(9, device=DEVICE) < 5)[None]
    whole, part = standardise(padded, padded, mask, mask)[0], standardise(huge[:, :, :5], huge[:, :, :5], None, None)[0]
    assert not whole[:, :, 5:].any()
    torch.testing.assert_close(whole[:, :, :5], part)


@inside
def test_scaling_where_some_tiles_are_padding_alone():
    from alignattn.matching.scale import standardise

    query, key, _ = sides(3, 200, 70, 16, masked=False)
    query, key = query + 2.0, key * 3.0
    masks = [torch.arange(count)[None] < torch.tensor([[left], [count], [0]]) for count, left in ((200, 30), (70, 66))]
    outer = [torch.linspace(-1, 3, side.numel(), dtype=torch.float64).view(side.shape) for side in (query, key)]

    def found(dtype, device):
        leaves = [side.to(device, dtype).requires_grad_() for side in (query, key)]
        scaled = standardise(*leaves, *(mask.to(device) for mask in masks))
        gradients = torch.autograd.grad(scaled, leaves, [of.to(leaves[0]) for of in outer])
        return [one.detach().cpu().double() for one in (*scaled, *gradients)]

    for one, truth in zip(found(torch.float32, DEVICE), found(torch.float64, "cpu"), strict=True):
        torch.testing.assert_close(one, truth, rtol=1e-5, atol=1e-5)
        assert truth[0].any() and truth[1].any()


@inside
@pytest.mark.parametrize("number", [math.inf, -math.inf, math.nan])
def test_what_is_not_finite_has_no_scale_and_leaves_others_theirs(number):
    from alignattn.matching.scale import on_one_scale

    query, key = (side.to(DEVICE).float() for side in sides(3, 150, 20, 16, masked=False)[:2])
    mask = (torch.arange(150, device=DEVICE) < 140).expand(3, -1)
    clean = on_one_scale(query, key, mask, None)
    query[0, 1, 130, 3] = number  # a token
    query[1, 0, 140, 3] = number  # padding
    told = on_one_scale(query, key, mask, None)
    expected = clean.inverse.clone()
    expected[0, 1] = torch.nan
    torch.testing.assert_close(told.inverse, expected, rtol=0, atol=0, equal_nan=True)
    for one, other in ((told.query, clean.query), (told.key, clean.key)):
        assert not one[0, 1, :20].isfinite().any()
        one[0, 1] = other[0, 1]
        assert torch.equal(one, other)


@inside
@pytest.mark.parametrize(("n", "m"), [(18, 18), (5, 21)])
def test_what_is_on_one_scale_is_one_tensor_already(n, m):
    """Else whoever takes queries and keys together copies both, and a record keeps room for that."""
    from alignattn.matching.beside import joined
    from alignattn.matching.scale import standardise

    query, key, masks = sides(2, n, m, 16, masked=True)
    scaled = standardise(*(t.to(DEVICE, torch.float32) for t in (query, key)), *(mask.to(DEVICE) for mask in masks))
    layer = [side[None] for side in scaled]
    tokens = joined(*layer)
    assert tokens.data_ptr() == scaled[0].data_ptr()
    assert torch.equal(tokens, torch.cat([side.flatten(1, 3) for side in layer], 1))


class Passes(TorchDispatchMode):
    """Names what torch itself computes number by number, or copies, of so many numbers at least."""

    def __init__(self, least, *, copies=False):
        super().__init__()
        self.least, self.copies, self.seen = least, copies, []

    def __torch_dispatch__(self, operator, types, given=(), settings=None):
        found = operator(*given, **(settings or {}))
        counts = operator is torch.ops.aten.copy_.default if self.copies else torch.Tag.pointwise in operator.tags
        if counts and found.numel() >= self.least:
            self.seen.append(f"{operator} of {found.dtype}")
        return found


@inside
@pytest.mark.parametrize(("method", "options"), [("mmd", {"bandwidth": "mean"}), ("ot", {})])
def test_losses_that_come_with_their_gradients_are_weighed_on_the_way_back(method, options):
    """And not in a pass over all of them; what is on no scale has no such way."""
    query, key, masks = layered(33, 20, 16, masked=True)
    for standardise in (True, False):
        _, found = matchings(method, 16, standardise=standardise, **options)
        with Passes(min(query.numel(), key.numel())) as counted:
            found(query, key, masks, torch.float32)
        assert counted.seen.count("aten.mul.Tensor of torch.float32") == (0 if standardise else 2)


@inside
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize(("n", "m"), [(150, 20), (33, 33)])
@pytest.mark.parametrize("method", ["mmd", "ot"])
def test_losses_tell_sums_of_the_gradients_they_come_with(method, n, m, dtype, monkeypatch):
    """Of gradients, and of them times tokens; as precise as the halves of which the gradients were made."""
    from alignattn.matching.scale import Way

    own, seen = Way.back, []

    def back(self, gradients, kept, counts, sums):
        tokens = torch.cat(kept[:2], 2).flatten(0, 1).double()
        seen.append((torch.cat(gradients, 2).flatten(0, 1).double(), tokens, sums.double().sum(1)))
        return own(self, gradients, kept, counts, sums)

    monkeypatch.setattr(Way, "back", back)
    _, found = matchings(method, 24)
    query, key, masks = layered(n, m, 24, masked=True)
    found(query, key, masks, dtype)
    ((gradients, tokens, sums),) = seen
    felt = (gradients * tokens).sum((1, 2))
    of_one = 1e-6 if dtype == torch.float32 else 2**-11 / (n + m) ** 0.5  # of many the rounding is another each
    size = gradients.abs().sum((1, 2))
    assert ((sums[:, :-1] - gradients.sum(1)).abs() <= 1e-6 * size[:, None]).all()
    assert ((sums[:, -1] - felt).abs() <= of_one * (gradients * tokens).abs().sum((1, 2))).all()
    assert (felt.abs() > 100 * of_one * size).all()


@inside
@pytest.mark.parametrize(("method", "places", "n"), [("mmd", 16, 21), ("mmd", 1, 150), ("ot", 2, 21)])
def test_gradients_past_the_scale_and_through_it_are_added(method, places, n, monkeypatch):
    """A class may make of its method's losses, and of tokens on one scale, what it likes.

    And sums that come with gradients are read at once, or some at a time.
    """
    from alignattn.matching import kernels
    from alignattn.matching.kernels import scale

    monkeypatch.setattr(scale, "PLACES", places)
    matcher, _ = matchings(method, 16)

    class Own(type(matcher)):
        def losses(self, query, key, *given):
            apart = (query.square().mean((-1, -2)) * key.sum((-1, -2))).flatten(0, 1)
            return super().losses(query, key, *given) * 3 + apart + super().losses(2 * query, key, *given)

    own = Own(matcher.config)
    query, key, masks = layered(n, 18, 16, masked=True)

    def found(dtype):
        leaves = [t.to(DEVICE, dtype).requires_grad_() for t in (query, key)]
        losses = own(*leaves, *(mask.to(DEVICE) for mask in masks), ["a", "b"])
        outer = torch.linspace(-0.5, 1.5, losses.numel()).view(losses.shape).to(losses)
        return [t.detach().double().cpu() for t in (losses, *torch.autograd.grad(losses, leaves, outer))]

    told = found(torch.float32)
    monkeypatch.setattr(kernels, "serve", lambda *_, **__: False)
    for one, truth in zip(told, found(torch.float64), strict=True):
        assert (one - truth).square().mean().sqrt() <= 1e-5 * truth.square().mean().sqrt()


OVERWRITTEN = {
    "gan": {},
    "gan, keys alone": {"detach_query": True},
    "gan of values": {"matched": "value"},
    "ct": {},
    "ct of unit navigators": {"normalise_navigator": True},
    "mmd": {"bandwidth": "mean"},
    "mmd as it is": {"standardise": False},
    "ot": {},
    "ot unrolled": {"gradient": "unrolled"},
}


def differentiated(matcher, query, key, masks, *, beside, **settings):
    """Of copies that lie as models make them, `beside`: with the heads of a token beside each other."""
    from alignattn.matching.at_once import differentiate

    copies = [side.transpose(2, 3).contiguous().transpose(2, 3) if beside else side.clone() for side in (query, key)]
    outer = torch.linspace(0.5, 1.5, query.shape[:3].numel(), device=query.device).view(query.shape[:3])
    return differentiate(matcher, *copies, *masks, ["a", "b"], outer, **settings), copies


@inside
@pytest.mark.parametrize(("cut", "beside"), [("layers", False), ("heads", True)])
@pytest.mark.parametrize("method", OVERWRITTEN)
def test_gradients_are_the_same_where_tokens_were(method, cut, beside, monkeypatch):
    from alignattn.matching import at_once

    matcher, _ = matchings(method.replace(",", "").split()[0], 8, **OVERWRITTEN[method])
    query, key, masks = layered(5, 7, 8, masked=True)
    query, key = (side.to(DEVICE, torch.bfloat16) for side in (query, key))
    masks = [mask.to(DEVICE) for mask in masks]
    size = {"layers": (query.numel() + key.numel()) // 2, "heads": 1}[cut]
    monkeypatch.setitem(at_once.PIECE, query.device.type, size)
    apart, _ = differentiated(matcher, query, key, masks, beside=beside)
    over, tokens = differentiated(matcher, query, key, masks, beside=beside, in_place=True)
    assert torch.equal(over.losses, apart.losses)
    for told, other, place in zip((over.query, over.key), (apart.query, apart.key), tokens, strict=True):
        assert told is (None if other is None else place)
        assert torch.equal(place, torch.zeros_like(place) if other is None else other)
    for told, other in zip(over.networks, apart.networks, strict=True):
        assert torch.equal(told, other)


@inside
@pytest.mark.parametrize(("method", "beside"), [("gan", False), ("ct", True), ("mmd", True), ("ot", False)])
def test_no_gradient_is_copied_to_where_tokens_were(method, beside):
    query, key, masks = layered(18, 18, 16, masked=True)
    query, key = (side.to(DEVICE, torch.bfloat16) for side in (query, key))
    masks = [mask.to(DEVICE) for mask in masks]
    copied = {}
    for standardise in (True, False):
        matcher, _ = matchings(method, 16, standardise=standardise)
        with Passes(query.numel() // 2, copies=True) as counted:
            differentiated(matcher, query, key, masks, beside=beside, in_place=True)
        copied[standardise] = counted.seen.count("aten.copy_.default of torch.bfloat16")
    assert copied == {True: 0, False: 2}


@inside
@pytest.mark.parametrize("says", [False, True])
def test_tokens_that_a_class_reads_otherwise_are_left_until_it_has(says, monkeypatch):
    """Two ways back from one scale have two places. Who reads the tokens as they came has not said that all is gone."""
    from alignattn.matching import kernels

    matcher, _ = matchings("mmd", 16)
    query, key, masks = layered(18, 21, 16, masked=True)

    class Scaled(type(matcher)):
        replayable = True

        def losses(self, query, key, *given):
            apart = query.square().mean((-1, -2)) * key.sum((-1, -2))
            return super().losses(query, key, *given) + apart.flatten(0, 1)

    class Own(type(matcher)):
        def forward(self, query, key, *given):
            apart = query.square().mean((-1, -2)) * key.sum((-1, -2))  # made first, it is differentiated last
            return super().forward(query, key, *given) + apart

    own = (Scaled if says else Own)(matcher.config)
    given = [mask.to(DEVICE) for mask in masks]
    single = [side.to(DEVICE, torch.float32) for side in (query, key)]
    told, _ = differentiated(own, *single, given, beside=True, in_place=True)
    monkeypatch.setattr(kernels, "serve", lambda *_, **__: False)
    truth, _ = differentiated(own, query, key, masks, beside=True)
    for one, exact in ((told.query, truth.query), (told.key, truth.key)):
        assert (one.cpu() - exact).square().mean().sqrt() <= 1e-5 * exact.square().mean().sqrt()


# The networks' trunk


@inside
@pytest.mark.parametrize(
    ("layers", "tokens", "d", "hidden"), [(1, 1, 8, 16), (2, 70, 16, 64), (3, 129, 24, 20), (1, 64, 64, 16)]
)
@pytest.mark.parametrize("learns", ["tokens", "weights", "both"])
def test_features_are_as_precise_as_plain_torch_in_single_precision(layers, tokens, d, hidden, learns, monkeypatch):
    from alignattn.matching import kernels
    from alignattn.matching.networks import Discriminator

    names = [f"layer{i}" for i in range(layers)]
    network = Discriminator(names, d, hidden=hidden, out=1).to(DEVICE)
    x = torch.randn(layers, tokens, d, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    outer = torch.randn(layers, tokens, hidden, generator=torch.Generator().manual_seed(1), dtype=torch.float64)

    def found(dtype):
        network.to(dtype).zero_grad()
        leaf = x.to(DEVICE, dtype).requires_grad_(learns != "weights")
        features = network.features(leaf, fixed=learns == "tokens")
        features.backward(outer.to(features))
        gradients = [leaf.grad, *(p.grad for p in network.parameters())]
        return [t.detach().double().cpu() for t in (features, *gradients) if t is not None]

    told = found(torch.float32)
    served = []
    monkeypatch.setattr(kernels, "serve", lambda tensor, **_: bool(served.append(tensor)))
    plain, exact = found(torch.float32), found(torch.float64)
    assert served and len(told) == len(exact) == {"tokens": 2, "weights": 7, "both": 8}[learns]
    for one, usual, truth in zip(told, plain, exact, strict=True):
        off, allowed = ((t - truth).square().mean().sqrt() for t in (one, usual))
        assert off <= 2 * allowed + 1e-6 * truth.abs().max().clamp_min(1.0)


# Whole matchings


def matchings(method, d, **options):
    """The method as it is by default, with networks that are far from their beginning, in any precision."""
    from alignattn.config import METHODS, resolve

    matcher = METHODS[method][0](resolve(method, None, "stable", options).matcher)
    matcher.ensure(["a", "b"], d, torch.device(DEVICE))
    generator = torch.Generator().manual_seed(5)
    for parameter in matcher.parameters():
        parameter.data += 0.3 * torch.randn(parameter.shape, generator=generator).to(DEVICE)

    def found(query, key, masks, dtype):
        matcher.to(torch.float64 if dtype == torch.float64 else torch.float32)
        leaves = [t.to(DEVICE, dtype).requires_grad_() for t in (query, key)]
        given = [None if mask is None else mask.to(DEVICE) for mask in masks]
        losses = matcher(*leaves, *given, ["a", "b"])
        outer = torch.linspace(0.5, 1.5, losses.numel()).view(losses.shape).to(losses)
        gradients = torch.autograd.grad(losses, [*leaves, *matcher.parameters()], outer)
        return [t.detach().double().cpu() for t in (losses, *gradients)]

    return matcher, found


def layered(n, m, d, *, masked):
    pairs = [sides(2, n, m, d, masked=masked) for _ in range(2)]
    query = torch.stack([query for query, _, _ in pairs]) + torch.linspace(0, 1, 2).double().view(2, 1, 1, 1, 1)
    key = torch.stack([key for _, key, _ in pairs])
    masks = [None if mask is None else mask.expand(2, *mask.shape) for mask in pairs[0][2]]
    return query, key, masks


SHAPES = [(1, 1, 8), (2, 2, 8), (5, 7, 16), (33, 33, 24), (70, 20, 64)]
OPTIONS = {
    "gan as it is": {"standardise": False},
    "ct as it is": {"standardise": False},
    "ct of unit navigators": {"normalise_navigator": True},
}


@inside
@pytest.mark.parametrize(("n", "m", "d"), SHAPES)
@pytest.mark.parametrize("masked", [False, True])
@pytest.mark.parametrize("method", ["gan", "ct", "mmd", "ot", *OPTIONS])
def test_matchings_are_as_precise_as_plain_torch_in_single_precision(method, n, m, d, masked, monkeypatch):
    from alignattn.matching import kernels

    matcher, found = matchings(method.split()[0], d, **OPTIONS.get(method, {}))
    query, key, masks = layered(n, m, d, masked=masked)
    told = found(query, key, masks, torch.float32)
    assert matcher.products == kernels.EXACT
    served = []
    monkeypatch.setattr(kernels, "serve", lambda tensor, **_: bool(served.append(tensor)))
    plain, exact = found(query, key, masks, torch.float32), found(query, key, masks, torch.float64)
    assert served
    for one, usual, truth in zip(told, plain, exact, strict=True):
        off, allowed = ((t - truth).square().mean().sqrt() for t in (one, usual))
        assert off <= 2 * allowed + 2e-6 * truth.abs().max().clamp_min(1.0)


@inside
@pytest.mark.parametrize(("n", "m", "d"), SHAPES[2:])
@pytest.mark.parametrize("method", ["gan", "ct", "mmd", "ot"])
def test_matchings_of_half_precision_are_as_precise_as_it(method, n, m, d, monkeypatch):
    """Plain code in half precision would at least hold tokens and weights so: it could not do better."""
    from alignattn.matching import kernels
    from alignattn.matching import matcher as base
    from alignattn.matching.scale import OnOneScale

    matcher, found = matchings(method, d)
    query, key, masks = layered(n, m, d, masked=True)
    query, key = query.bfloat16().double(), key.bfloat16().double()
    told = found(query, key, masks, torch.bfloat16)
    assert matcher.products == kernels.ROUNDED
    monkeypatch.setattr(kernels, "serve", lambda tensor, **_: False)
    exact = found(query, key, masks, torch.float64)
    scaled = base.on_one_scale

    def rounded(*given, **settings):
        query, key, *rest = scaled(*given, **settings)
        return OnOneScale(*(side + (side.detach().bfloat16().to(side) - side.detach()) for side in (query, key)), *rest)

    monkeypatch.setattr(base, "on_one_scale", rounded)
    for parameter in matcher.parameters():
        parameter.data = parameter.data.bfloat16().to(parameter)
    plain = found(query, key, masks, torch.float64)
    for one, usual, truth in zip(told, plain, exact, strict=True):
        if one.shape == query.shape or one.shape == key.shape:  # gradients leave in half precision
            usual = usual.bfloat16().double()
        off, allowed = ((t - truth).square().mean().sqrt() for t in (one, usual))
        assert off <= 2 * allowed + 1e-6 * truth.abs().max().clamp_min(1.0)


@inside
@pytest.mark.parametrize("method", ["gan", "ct"])
def test_matchings_of_one_point_and_of_nothing(method, monkeypatch):
    from alignattn.matching import kernels

    _, found = matchings(method, 8)
    query, key, _ = layered(9, 9, 8, masked=False)
    mask = torch.ones(2, 2, 9, dtype=torch.bool)
    mask[0, 1] = False  # nothing
    mask[1, 0, 1:] = False  # one token
    key[1, 1] = query[1, 1] = 3.0  # one point
    told = found(query, key, [mask, mask], torch.float32)
    monkeypatch.setattr(kernels, "serve", lambda tensor, **_: False)
    for one, other in zip(told, found(query, key, [mask, mask], torch.float32), strict=True):
        torch.testing.assert_close(one, other, rtol=1e-3, atol=1e-4)
    assert not told[0][0, 1].any() and not told[1][0, 1].any() and not told[2][0, 1].any()


@inside
def test_transport_of_huge_features_and_of_samples_with_one_empty_side(monkeypatch):
    from alignattn.functional import conditional_transport
    from alignattn.matching import kernels

    generator = torch.Generator().manual_seed(0)
    features = [torch.randn(3, 2, n, 16, generator=generator) for n in (9, 7, 9, 7)]
    for one, head, place in ((3, 0, 0), (2, 1, 3)):  # else scores would be huge too, and any rounding a choice
        features[one][0, head, :, place] *= 1e-6
    features[2][0, 0, 0, 0] = features[3][0, 1, 1, 3] = 1e9  # beyond what a navigator's feature counts
    features[0][1, 1, 2] = 1e30
    masks = [torch.ones(3, n, dtype=torch.bool) for n in (9, 7)]
    masks[0][2] = False

    def found():
        leaves = [t.clone().to(DEVICE).requires_grad_() for t in features]
        losses = conditional_transport(*leaves, query_mask=masks[0].to(DEVICE), key_mask=masks[1].to(DEVICE))
        return [losses.detach(), *torch.autograd.grad(losses.sum(), leaves)]

    told = found()
    monkeypatch.setattr(kernels, "serve", lambda tensor, **_: False)
    for one, other in zip(told, found(), strict=True):
        torch.testing.assert_close(one, other, rtol=1e-3, atol=1e-5)  # features of 1e6 round all they are added to
    assert not any(t[2].any() for t in told) and told[3][0, 0, 0, 0] == told[4][0, 1, 1, 3] == 0


# Transport at once


def transports(**options):
    """Losses and gradients by the kernels that have one pass for it; and without that, where kernels serve or not."""
    from alignattn.matching.transport import TransportMatcher

    matcher, found = matchings("ot", 16, **{"standardise": False, **options})
    assert matcher._at_once()

    def otherwise(monkeypatch, *given):
        with monkeypatch.context() as patch:
            patch.setattr(TransportMatcher, "_at_once", lambda _: False)
            return found(*given)

    return found, otherwise


@inside
@pytest.mark.parametrize(
    "options",
    [
        {"debiased": False},
        {"cost": "half_sqeuclidean", "epsilon": 3.0, "max_iterations": 2},
        {"tolerance": 0.01, "max_iterations": 10},
        {"epsilon": 0.1, "max_iterations": 10, "tolerance": 0.0},
    ],
    ids=str,
)
@pytest.mark.parametrize(("n", "m"), [(1, 9), (40, 17), (20, 70)])
def test_transport_at_once_is_as_precise_as_plain_torch_in_single_precision(options, n, m, monkeypatch):
    from alignattn.matching import kernels

    found, otherwise = transports(**options)
    query, key, masks = layered(n, m, 12, masked=True)
    masks = [mask.clone() for mask in masks]
    masks[1][1, 0] = False  # the other side has tokens
    query[1, 0, 0, 0] = float("nan")
    told, others = (f(query, key, masks, torch.float32) for f in (found, functools.partial(otherwise, monkeypatch)))
    monkeypatch.setattr(kernels, "serve", lambda tensor, **_: False)
    plain, exact = (found(query, key, masks, dtype) for dtype in (torch.float32, torch.float64))
    for one, other, usual, truth in zip(told, others, plain, exact, strict=True):
        torch.testing.assert_close(one, other, rtol=1e-3, atol=1e-4)
        off, allowed = ((t - truth).square().mean().sqrt() for t in (one, usual))
        assert off <= 2 * allowed + 2e-6 * truth.abs().max().clamp_min(1.0)
        assert not one[1, 0].any() and truth[0].any()


@inside
def test_each_of_three_transports_stops_by_itself(monkeypatch):
    """Odd or even, the last potentials are told from those before."""
    from alignattn.matching.kernels import about_origin, divergence

    found, otherwise = transports(tolerance=1e-3, max_iterations=10, epsilon=0.3)
    query, key, masks = layered(24, 20, 8, masked=True)
    seen, launch = [], divergence.launch
    for module in (divergence, about_origin):
        monkeypatch.setattr(module, "launch", lambda *given, **of: (seen.append(given), launch(*given, **of)))
    told = found(query, key, masks, torch.float32)
    assert len(seen) == 2 + 2 * 10 + 1
    (steps,) = (tensor for tensor in seen[1] if isinstance(tensor, torch.Tensor) and tensor.shape[1:] == (2, 3))
    done, iterations = steps.unbind(1)
    assert {0, 1} == set((iterations % 2).flatten().tolist()) and len(iterations.unique()) > 2
    assert torch.equal(done.bool(), iterations < 10) and (iterations[:, 0] != iterations[:, 1]).any()
    for one, other in zip(told, otherwise(monkeypatch, query, key, masks, torch.float32), strict=True):
        torch.testing.assert_close(one, other, rtol=1e-4, atol=1e-5)


@inside
def test_transport_at_once_knows_no_origin_and_no_number_that_is_too_large(monkeypatch):
    found, otherwise = transports()
    query, key, masks = layered(20, 33, 16, masked=True)
    near = found(query, key, masks, torch.float32)
    for one, other in zip(near, found(query + 1e3, key + 1e3, masks, torch.float32), strict=True):
        torch.testing.assert_close(one, other, rtol=1e-2, atol=1e-3)
    for size in (300.0, 1e5, 1e30):  # of one that stands apart; then scores have no bits left for the others
        query[0, 1, 1, 3, 5], key[1, 0, 0, 4, 2] = size, -size
        told = found(query, key, masks, torch.float32)
        assert all(one.isfinite().all() for one in told)
        if size == 300.0:
            for one, other in zip(told, otherwise(monkeypatch, query, key, masks, torch.float32), strict=True):
                torch.testing.assert_close(one, other, rtol=1e-3, atol=1e-4)
    assert not told[1][0, 1, 1, :, 5].any() and not told[2][0, 1, 1, :, 5].any()  # what is clamped feels nothing
    assert told[1][0, 1, 1].any() and told[2][0, 1, 0, :, 5].any()


def asked_at_once(query, key, masks, *, products, with_gradient=True, debiased=True):
    from alignattn.matching.divergence import Asked
    from alignattn.matching.kernels.divergence import divergence

    asked = Asked(0.25, 5e7, 1.0, 3, 0.05, debiased)
    given = [None if side is None else side.to(DEVICE) for side in (query, key, *masks)]
    return divergence(*given, asked, with_gradient=with_gradient, products=products)[:3]


@inside
@pytest.mark.parametrize("products", ["tf32x3", "tf32"])
@pytest.mark.parametrize("debiased", [True, False])
def test_transport_at_once_is_the_same_each_time_and_whatever_is_beside_it(products, debiased):
    query, key, masks = sides(3, 140, 20, 16, masked=True)
    how = {"products": products, "debiased": debiased}
    once, again = (asked_at_once(query.float(), key.float(), masks, **how) for _ in range(2))
    alone = asked_at_once(query[1:].float(), key[1:].float(), [mask[1:] for mask in masks], **how)
    for one, other, part in zip(once, again, alone, strict=True):
        assert torch.equal(one, other) and torch.equal(one[1:], part)
    values = asked_at_once(query.float(), key.float(), masks, **how, with_gradient=False)
    assert torch.equal(values[0], once[0]) and not values[1].numel() + values[2].numel()


@inside
@pytest.mark.parametrize("products", ["tf32x3", "tf32"])
def test_transport_at_once_of_what_is_not_finite_says_so_and_leaves_others_alone(products):
    query, key, masks = sides(2, 30, 20, 16, masked=True)
    query, key = query.float(), key.float()
    right = asked_at_once(query, key, masks, products=products)
    query[0, 0, 29], key[1, 0, 0] = float("nan"), float("nan")  # padding
    for one, other in zip(asked_at_once(query, key, masks, products=products), right, strict=True):
        assert torch.equal(one, other)
    for bad in (float("nan"), float("inf")):
        query[1, 1, 4, 2] = bad
        told = asked_at_once(query, key, masks, products=products)
        assert told[0][1, 1].isnan() and told[1][1, 1].isnan().any() and told[2][1, 1].isnan().any()
        for one, other in zip(told, right, strict=True):
            assert torch.equal(one[0], other[0]) and torch.equal(one[1, 0], other[1, 0])


@inside
@pytest.mark.parametrize("debiased", [True, False])
def test_transport_at_once_of_an_empty_side_is_nothing(debiased):
    """Nor what logarithms of 6 and 13 are rounded to."""
    query, key, masks = sides(3, 6, 13, 16, masked=True)
    masks[0][1], masks[1][2] = False, False
    told = asked_at_once(query.float(), key.float(), masks, products="tf32x3", debiased=debiased)
    assert told[0][0].all() and not any(t[1:].any() for t in told)


@inside
@pytest.mark.parametrize(
    "options",
    [{"cost": "cosine"}, {"relative_epsilon": True}, {"gradient": "unrolled"}, {"max_iterations": 11}],
    ids=str,
)
def test_other_transports_go_their_own_way(options):
    matcher, _ = matchings("ot", 8, **options)
    assert not matcher._at_once()


def test_products_are_as_precise_as_the_tokens_of_both_sides_are_worth():
    from alignattn.matching.kernels import EXACT, ROUNDED, products_for

    assert products_for(torch.bfloat16, torch.float16) == ROUNDED
    assert products_for(torch.bfloat16, torch.float32) == products_for(torch.float64, torch.float64) == EXACT


@inside
@pytest.mark.parametrize(("n", "m", "d"), SHAPES[2:])
def test_a_game_of_halves_knows_eleven_bits(n, m, d, monkeypatch):
    """As many as tokens of fp16. Of tokens the typical one: where a ReLU bends, any rounding may take another side."""
    from alignattn.matching import kernels
    from alignattn.matching import matcher as base
    from alignattn.matching.scale import OnOneScale

    matcher, found = matchings("gan", d)
    query, key, masks = layered(n, m, d, masked=True)
    query, key = query.half().double(), key.half().double()
    told = found(query, key, masks, torch.float16)
    monkeypatch.setattr(kernels, "serve", lambda tensor, **_: False)
    exact = found(query, key, masks, torch.float64)
    scaled = base.on_one_scale

    def rounded(*given, **settings):
        query, key, *rest = scaled(*given, **settings)
        return OnOneScale(*(side.half().to(side) for side in (query, key)), *rest)

    monkeypatch.setattr(base, "on_one_scale", rounded)
    for parameter in matcher.parameters():
        parameter.data = parameter.data.half().to(parameter)
    plain = found(query, key, masks, torch.float64)
    for one, usual, truth in zip(told, plain, exact, strict=True):
        if one.shape == query.shape or one.shape == key.shape:
            counted = truth.norm(dim=-1) > 0  # not padding
            off, allowed = ((t - truth).norm(dim=-1)[counted].median() for t in (one, usual.half().double()))
        else:
            off, allowed = ((t - truth).square().mean().sqrt() for t in (one, usual))
        assert off <= 2 * allowed + 1e-6 * truth.abs().max().clamp_min(1.0)


def played(n, m, *, products, masked, outer=None):
    """The game of tokens about one in size: distances, and what tokens and weights feel."""
    from alignattn.matching.kernels.game import game
    from alignattn.matching.networks import Discriminator

    query, key, masks = layered(n, m, 16, masked=masked)
    network = Discriminator(["a", "b"], 16, hidden=20, out=1).to(DEVICE)
    leaves = [t.float().to(DEVICE).requires_grad_() for t in (query, key)]
    given = [None if mask is None else mask.flatten(0, 1).to(DEVICE) for mask in masks]
    distances, _ = game(products, *leaves, *given, *network.weights(leaves[0]))
    outer = torch.linspace(0.5, 1.5, distances.numel(), device=DEVICE).view_as(distances) * (outer or 1.0)
    return distances.detach(), *torch.autograd.grad(distances, [*leaves, *network.parameters()], outer)


@inside
@pytest.mark.parametrize("products", ["tf32", "tf32x3"])
@pytest.mark.parametrize("power", [2.0**16, 2.0**-20])
def test_what_a_game_teaches_grows_as_what_is_felt_of_it(products, power):
    """By powers of two, exactly, as a scaler of gradients makes it."""
    once = played(40, 40, products=products, masked=True)
    again = played(40, 40, products=products, masked=True, outer=power)
    assert torch.equal(again[0], once[0])
    for one, other in zip(once[1:], again[1:], strict=True):
        assert one.any() and torch.equal(one * power, other)


@inside
@pytest.mark.parametrize("products", ["tf32", "tf32x3"])
@pytest.mark.parametrize("size", [1e-12, 1e9])
def test_features_of_tokens_and_gradients_of_any_size(products, size, monkeypatch):
    """No power of two is too large for halves, or too small."""
    from alignattn.matching import kernels
    from alignattn.matching.networks import Discriminator

    generator = torch.Generator().manual_seed(0)
    network = Discriminator(["a"], 16, hidden=20, out=1).to(DEVICE)
    for bias in (network.transform.bias, network.gate.bias, network.first.bias):
        bias.data.zero_()
    x = torch.randn(1, 50, 16, generator=generator).to(DEVICE) * size
    outer = torch.randn(1, 50, 20, generator=generator).to(DEVICE) / size

    def found():
        leaf = x.clone().requires_grad_()
        features = network.features(leaf, products=products)
        return [features.detach(), *torch.autograd.grad(features, [leaf, network.first.weight], outer)]

    told = found()
    monkeypatch.setattr(kernels, "serve", lambda tensor, **_: False)
    for one, other in zip(told, found(), strict=True):
        bits = 9 if products == "tf32" else 19
        assert (one - other).norm() <= 2.0**-bits * other.norm()


@inside
@pytest.mark.parametrize("method", ["gan", "ct"])
def test_matchings_are_the_same_each_time(method):
    _, found = matchings(method, 16)
    query, key, masks = layered(33, 20, 16, masked=True)
    once, again = (found(query, key, masks, torch.float32) for _ in range(2))
    assert all(torch.equal(one, other) for one, other in zip(once, again, strict=True))


@inside
def test_the_share_of_right_answers_is_told_alike(monkeypatch):
    from alignattn.matching import kernels

    matcher, found = matchings("gan", 16)
    matcher.asked = True
    query, key, masks = layered(33, 33, 16, masked=True)
    shares = []
    for _ in range(2):
        found(query, key, masks, torch.float32)
        shares.append(matcher.figures()["discriminator_accuracy"].cpu())
        monkeypatch.setattr(kernels, "serve", lambda tensor, **_: False)
    torch.testing.assert_close(shares[0], shares[1])
    assert 0 < shares[0] < 1


# Conditional transport from tokens to losses and back


def carrying(monkeypatch, *, served=True):
    """Transport by the kernels that take the networks along, or piece by piece; and the kernels it launches."""
    from alignattn.matching.conditional import ConditionalMatcher
    from alignattn.matching.kernels import carriers, choices, tiles

    launched = []
    if not served:
        monkeypatch.setattr(ConditionalMatcher, "_by_kernels", lambda *_: None)
    for module in (carriers, choices):
        counted = lambda kernel, *given, **of: (launched.append(kernel.__name__), tiles.launch(kernel, *given, **of))  # noqa: E731
        monkeypatch.setattr(module, "launch", counted)
    return launched


def close(found, expected, share):
    """To a share of the largest number that is expected, each tensor; of a tenth, where nothing is felt."""
    for one, other in zip(found, expected, strict=True):
        torch.testing.assert_close(one, other, rtol=0, atol=share * float(other.abs().max().clamp_min(0.1)))


@inside
@pytest.mark.parametrize(
    ("options", "n", "m"),
    [
        ({}, 1, 1),
        ({}, 1, 40),
        ({}, 33, 20),
        ({"hidden_width": 20, "feature_width": 9}, 33, 20),
        ({"hidden_width": 8, "feature_width": 32}, 1, 40),
        ({"navigator_ascends": True}, 33, 20),
        ({"standardise": False}, 1, 1),
        ({"standardise": False}, 33, 20),
        ({"mask_padding": False}, 33, 20),
    ],
    ids=str,
)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_transport_with_its_networks_is_transport_of_what_they_answer(options, n, m, dtype, monkeypatch):
    _, found = matchings("ct", 24, **options)
    query, key, masks = layered(n, m, 24, masked=True)
    query, key = query.to(dtype).double(), key.to(dtype).double()
    masks[0] = masks[0].clone()
    masks[0][0, 1] = False  # a side that is empty
    launched = carrying(monkeypatch)
    told = found(query, key, masks, dtype)
    assert len(launched) == 7
    carrying(monkeypatch, served=False)
    # Halves round features to eleven bits, after sums that were made in another order; and of one token all that the
    # navigator feels is rounding. How precise either way is, the tests beside fp64 tell. With numbers cut to eleven
    # bits, as a device cuts them, the interpreter has both ways 1.3 % apart, and on an H200 one was beyond 2 %.
    on_one_scale, as_they_are = (2e-5, 1e-4) if dtype == torch.float32 else (4e-2, 1e-1)
    share = on_one_scale if options.get("standardise", True) else as_they_are
    close(told, found(query, key, masks, dtype), share)
    if options.get("mask_padding", True):
        assert not told[0][0, 1].any() and not told[1][0, 1].any() and not told[2][0, 1].any()


def of_four(names, query, key, monkeypatch, *, served=True):
    """Losses, gradients of queries and keys, and those of all weights, for some layers of a bank of four."""
    from alignattn.config import METHODS, resolve

    matcher = METHODS["ct"][0](resolve("ct", None, "stable", {}).matcher)
    matcher.ensure(list("abcd"), query.shape[-1], torch.device(DEVICE))
    with monkeypatch.context() as patched:
        carrying(patched, served=served)
        leaves = [t.float().to(DEVICE).requires_grad_() for t in (query, key)]
        losses = matcher(*leaves, None, None, names)
        outer = torch.linspace(0.5, 1.5, losses[0].numel(), device=DEVICE).view_as(losses[0]).expand_as(losses)
        return [losses.detach(), *torch.autograd.grad(losses, [*leaves, *matcher.parameters()], outer)]


@inside
@pytest.mark.parametrize("names", ["bc", "a", "d", "abcd", "db", "bb"])
def test_transport_teaches_the_layers_of_a_bank_that_were_matched(names, monkeypatch):
    query, key, _ = layered(9, 20, 8, masked=False)
    query, key = (torch.cat([side, side + 1.0, side])[: len(names)] for side in (query, key))
    told, expected = (of_four(list(names), query, key, monkeypatch, served=served) for served in (True, False))
    close(told, expected, 2e-5)
    for gradient in told[3:]:
        taught = {name for name, row in zip("abcd", gradient, strict=True) if row.any()}
        assert gradient.shape[0] == 4 and taught <= set(names)
    assert told[3][["abcd".index(name) for name in names]].flatten(1).any(1).all()


@inside
def test_transport_does_not_depend_on_what_is_matched_beside(monkeypatch):
    query, key, _ = layered(40, 140, 8, masked=False)
    together = of_four(["b", "c"], query, key, monkeypatch)
    assert all(torch.equal(*pair) for pair in zip(together, of_four(["b", "c"], query, key, monkeypatch), strict=True))
    for place, name in enumerate("bc"):
        alone = of_four([name], query[place : place + 1], key[place : place + 1], monkeypatch)
        assert all(torch.equal(whole[place], own[0]) for whole, own in zip(together[:3], alone[:3], strict=True))
        row = "abcd".index(name)
        assert all(torch.equal(whole[row], own[row]) for whole, own in zip(together[3:], alone[3:], strict=True))


@inside
@pytest.mark.parametrize("form", [(128, 32, 8, 2), (128, 64, 8, 2), (64, 64, 4, 1), (64, 32, 4, 1)], ids=str)
def test_tiles_of_any_form_make_the_same_transport(form, monkeypatch):
    from alignattn.matching.kernels import choices

    _, found = matchings("ct", 16)
    query, key, masks = layered(130, 40, 16, masked=True)
    query, key = query.bfloat16().double(), key.bfloat16().double()
    expected = found(query, key, masks, torch.bfloat16)
    monkeypatch.setattr(choices, "FIRST", choices.Form(*form))
    monkeypatch.setattr(choices, "SECOND", choices.Form(*form))
    close(found(query, key, masks, torch.bfloat16), expected, 1e-2)


@inside
def test_a_side_alone_and_networks_alone_are_taught_alike(monkeypatch):
    matcher, _ = matchings("ct", 16)
    query, key, _ = layered(20, 33, 16, masked=False)
    gradients = []
    for learns in ((True, True, True), (True, False, False), (False, True, False), (False, False, True)):
        leaves = [t.float().to(DEVICE).requires_grad_(wanted) for t, wanted in zip((query, key), learns, strict=False)]
        matcher.requires_grad_(learns[2])
        losses = matcher(*leaves, None, None, ["a", "b"])
        of = [leaf for leaf in (*leaves, *matcher.parameters()) if leaf.requires_grad]
        gradients.append(torch.autograd.grad(losses.sum(), of))
    whole, of_query, of_key, of_weights = gradients
    for one, other in zip((*of_query, *of_key, *of_weights), whole, strict=True):
        assert torch.equal(one, other)


@inside
def test_the_critics_gap_is_told_alike(monkeypatch):
    from alignattn.matching import kernels

    matcher, found = matchings("ct", 16)
    matcher.asked = True
    query, key, masks = layered(33, 20, 16, masked=True)
    gaps = []
    for _ in range(2):
        found(query, key, masks, torch.float32)
        gaps.append(matcher.figures()["critic_gap"].cpu())
        monkeypatch.setattr(kernels, "serve", lambda tensor, **_: False)
    torch.testing.assert_close(gaps[0], gaps[1])
    assert 0 < gaps[0] < 2


@inside
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_times_one_number_in_single_precision(dtype):
    from alignattn.matching.kernels.times import times

    values = torch.randn(3, 5, 777, generator=torch.Generator().manual_seed(0)).to(DEVICE, dtype)
    by = torch.tensor(1.0 / 3.0, device=DEVICE)
    expected = (values.float() * by).to(dtype)
    near = {"rtol": torch.finfo(dtype).eps, "atol": 0.0}  # the interpreter cuts off what a device rounds
    torch.testing.assert_close(times(values, by), expected, **near)
    torch.testing.assert_close(times(values.mT, by), expected.mT, **near)  # however they lie in memory
    beside = values.transpose(0, 1)  # as heads of a token lie
    found = times(beside, by)
    torch.testing.assert_close(found, expected.transpose(0, 1), **near)
    assert found.stride() == beside.stride()
    for over in (values.clone(), values.clone().mT, values.clone().transpose(0, 1)):
        before = over.clone()
        assert times(over, by, over) is over
        torch.testing.assert_close(over, (before.float() * by).to(dtype), **near)


@inside
def test_a_device_that_is_too_small_is_told_of(monkeypatch):
    from triton.runtime.errors import OutOfResources

    from alignattn.errors import AlignmentError
    from alignattn.matching.kernels import tiles

    class Large:
        def __getitem__(self, programs):
            def run(*given, **settings):
                raise OutOfResources(200_000, 100_000, "shared memory")

            return run

    with pytest.raises(AlignmentError, match=r"shared memory, .*ALIGNATTN_KERNELS=0"):
        tiles.launch(Large(), 1, torch.zeros(1, device=DEVICE))


@inside
def test_wide_tokens_are_taken_in_smaller_tiles_where_there_is_little_room(monkeypatch):
    from alignattn.matching.kernels import sinkhorn

    x, y, _, _, log_a, log_b, epsilon = (tensor.float().to(DEVICE) for tensor in problems(1, 70, 40, 100))
    rows = []
    launch = sinkhorn.launch
    monkeypatch.setattr(sinkhorn, "launch", lambda *given, **of: (rows.append(of.get("ROWS")), launch(*given, **of)))
    found = []
    for room in (True, False):
        monkeypatch.setattr(sinkhorn, "has_room", lambda _, room=room: room)
        found.append(sinkhorn.StreamedScores(x, y, epsilon).carry(log_a, log_b)[0])
    assert rows == [128, 64, 64, 64]
    torch.testing.assert_close(found[0], found[1], rtol=1e-4, atol=1e-6)
