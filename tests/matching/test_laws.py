"""What holds for every loss: padding, order, neighbours, precision, random state."""

import pytest
import torch
from problems import LOSSES, poisoned, random_problem, right_padding, value_and_gradients

each_loss = pytest.mark.parametrize("loss", LOSSES.values(), ids=LOSSES.keys())
HALF = [torch.float16, torch.bfloat16]


def padded_problem(dtype=torch.float64):
    query, key = random_problem(b=4, dtype=dtype)
    return query, key, right_padding([6, 1, 3, 0], 6), right_padding([2, 7, 1, 3], 7)


@each_loss
@pytest.mark.parametrize("value", [1e4, float("nan"), float("inf"), float("-inf")])
def test_padded_tokens_carry_no_mass(loss, value):
    query, key, query_mask, key_mask = padded_problem()
    clean = value_and_gradients(loss, poisoned(query, query_mask, 0), poisoned(key, key_mask, 0), query_mask, key_mask)
    query, key = poisoned(query, query_mask, value), poisoned(key, key_mask, value)
    changed = value_and_gradients(loss, query, key, query_mask, key_mask)
    for before, after in zip(clean, changed, strict=True):
        torch.testing.assert_close(after, before, rtol=1e-12, atol=1e-12)
    for gradient, mask in ((changed[1], query_mask), (changed[2], key_mask)):
        padded = gradient.transpose(1, 2)[~mask]
        assert torch.equal(padded, torch.zeros_like(padded))


@each_loss
@pytest.mark.parametrize("dtype", [torch.float32, *HALF])
def test_padded_tokens_carry_no_mass_in_lower_precision(loss, dtype):
    query, key, query_mask, key_mask = padded_problem(dtype)
    clean = value_and_gradients(loss, query, key, query_mask, key_mask)
    query, key = poisoned(query, query_mask, float("nan")), poisoned(key, key_mask, float("inf"))
    for before, after in zip(clean, value_and_gradients(loss, query, key, query_mask, key_mask), strict=True):
        torch.testing.assert_close(after, before, rtol=1e-5, atol=1e-6)


@each_loss
def test_padding_gives_what_the_shorter_sequence_gives(loss):
    query, key, query_mask, key_mask = padded_problem()
    value, query_grad, key_grad = value_and_gradients(loss, query, key, query_mask, key_mask)
    for b in range(3):
        n, m = int(query_mask[b].sum()), int(key_mask[b].sum())
        alone = value_and_gradients(loss, query[b : b + 1, :, :n], key[b : b + 1, :, :m])
        torch.testing.assert_close(value[b : b + 1], alone[0], rtol=1e-9, atol=1e-10)
        torch.testing.assert_close(query_grad[b : b + 1, :, :n], alone[1], rtol=1e-8, atol=1e-10)
        torch.testing.assert_close(key_grad[b : b + 1, :, :m], alone[2], rtol=1e-8, atol=1e-10)


@each_loss
def test_left_padding_and_right_padding_give_the_same(loss):
    query, key, query_mask, key_mask = padded_problem()
    right = value_and_gradients(loss, query, key, query_mask, key_mask)

    def shifted(tokens, mask, direction):
        rolls = [direction * int((~row).sum()) for row in mask]
        return torch.stack([sample.roll(by, -2) for sample, by in zip(tokens, rolls, strict=True)])

    left_masks = [torch.stack([row.roll(int((~row).sum())) for row in mask]) for mask in (query_mask, key_mask)]
    left = value_and_gradients(loss, shifted(query, query_mask, 1), shifted(key, key_mask, 1), *left_masks)
    torch.testing.assert_close(left[0], right[0], rtol=1e-9, atol=1e-11)
    torch.testing.assert_close(shifted(left[1], query_mask, -1), right[1], rtol=1e-8, atol=1e-11)
    torch.testing.assert_close(shifted(left[2], key_mask, -1), right[2], rtol=1e-8, atol=1e-11)


@each_loss
def test_a_mask_of_all_true_is_no_mask(loss):
    query, key = random_problem()
    masks = torch.ones(3, 6, dtype=torch.bool), torch.ones(3, 7, dtype=torch.bool)
    for with_mask, without in zip(
        value_and_gradients(loss, query, key, *masks), value_and_gradients(loss, query, key), strict=True
    ):
        torch.testing.assert_close(with_mask, without, rtol=1e-9, atol=1e-11)


@each_loss
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, *HALF])
def test_a_sample_of_padding_alone_gives_zero_and_no_gradient(loss, dtype):
    query, key = random_problem(dtype=dtype)
    query_mask, key_mask = right_padding([6, 0, 2], 6), right_padding([7, 0, 3], 7)
    value, query_grad, key_grad = value_and_gradients(loss, query, key, query_mask, key_mask)
    assert torch.equal(value[1], torch.zeros_like(value[1]))
    assert torch.equal(query_grad[1], torch.zeros_like(query_grad[1]))
    assert torch.equal(key_grad[1], torch.zeros_like(key_grad[1]))
    assert (value[[0, 2]] != 0).all()


@pytest.mark.parametrize("name", [name for name in LOSSES if name != "adversarial"])
def test_no_valid_token_on_one_side_gives_zero_and_no_gradient(name):
    query, key = random_problem()
    value, *gradients = value_and_gradients(
        LOSSES[name], query, key, right_padding([6, 0, 2], 6), right_padding([0, 5, 3], 7)
    )
    assert torch.equal(value[:2], torch.zeros_like(value[:2]))
    assert all(torch.equal(gradient[:2], torch.zeros_like(gradient[:2])) for gradient in gradients)


@each_loss
def test_the_order_of_tokens_does_not_matter(loss):
    query, key, query_mask, key_mask = padded_problem()
    generator = torch.Generator().manual_seed(5)
    rows, columns = torch.randperm(6, generator=generator), torch.randperm(7, generator=generator)
    value, query_grad, key_grad = value_and_gradients(loss, query, key, query_mask, key_mask)
    moved = value_and_gradients(loss, query[:, :, rows], key[:, :, columns], query_mask[:, rows], key_mask[:, columns])
    for expected, got in zip((value, query_grad[:, :, rows], key_grad[:, :, columns]), moved, strict=True):
        torch.testing.assert_close(got, expected, rtol=1e-8, atol=1e-10)


@pytest.mark.parametrize("name", [name for name in LOSSES if name not in ("adversarial", "transport-unrolled")])
def test_queries_and_keys_may_be_swapped(name):
    query, key, query_mask, key_mask = padded_problem()
    value, query_grad, key_grad = value_and_gradients(LOSSES[name], query, key, query_mask, key_mask)
    swapped = value_and_gradients(LOSSES[name], key, query, key_mask, query_mask)
    for expected, got in zip((value, key_grad, query_grad), swapped, strict=True):
        torch.testing.assert_close(got, expected, rtol=1e-7, atol=1e-9)


@each_loss
def test_a_large_batch_gives_what_its_parts_give(loss):
    """More problems than one chunk, and a count that no chunk divides."""
    query, key = random_problem(b=25, h=4, n=120, m=110, d=3)
    query_mask = right_padding([120 - b for b in range(25)], 120)
    whole = value_and_gradients(loss, query, key, query_mask)
    for part in (slice(0, 1), slice(16, 19), slice(24, 25)):
        alone = value_and_gradients(loss, query[part], key[part], query_mask[part])
        for expected, got in zip(whole, alone, strict=True):
            torch.testing.assert_close(got, expected[part], rtol=1e-8, atol=1e-10)


@each_loss
def test_single_precision_agrees_with_double(loss):
    query, key, query_mask, key_mask = padded_problem(torch.float32)
    single = value_and_gradients(loss, query, key, query_mask, key_mask)
    double = value_and_gradients(loss, query.double(), key.double(), query_mask, key_mask)
    assert single[0].dtype == torch.float32 and double[0].dtype == torch.float64
    for low, high in zip(single, double, strict=True):
        torch.testing.assert_close(low.double(), high, rtol=1e-4, atol=1e-5)


@each_loss
@pytest.mark.parametrize("dtype", HALF)
def test_half_precision_input_is_computed_in_single(loss, dtype):
    query, key, query_mask, key_mask = padded_problem(dtype)
    half = value_and_gradients(loss, query, key, query_mask, key_mask)
    single = value_and_gradients(loss, query.float(), key.float(), query_mask, key_mask)
    assert half[0].dtype == torch.float32 and half[1].dtype == dtype and half[2].dtype == dtype
    torch.testing.assert_close(half[0], single[0], rtol=1e-6, atol=1e-6)
    for low, high in zip(half[1:], single[1:], strict=True):  # rounded once, at the end, or twice where q is used twice
        rounding = torch.finfo(dtype).eps
        torch.testing.assert_close(low.float(), high, rtol=rounding, atol=rounding * high.abs().max().item())


@each_loss
def test_autocast_changes_nothing(loss):
    query, key, query_mask, key_mask = padded_problem(torch.float32)
    plain = value_and_gradients(loss, query, key, query_mask, key_mask)
    query, key = query.requires_grad_(), key.requires_grad_()
    with torch.autocast("cpu", dtype=torch.float16):
        value = loss(query, key, query_mask, key_mask)
    value.sum().backward()
    for expected, got in zip(plain, (value.detach(), query.grad, key.grad), strict=True):
        assert got.dtype == torch.float32
        torch.testing.assert_close(got, expected, rtol=1e-5, atol=1e-6)


@each_loss
def test_inputs_and_random_state_are_left_alone(loss):
    query, key, query_mask, key_mask = padded_problem()
    copies = [tensor.clone() for tensor in (query, key, query_mask, key_mask)]
    state = torch.get_rng_state()
    first = value_and_gradients(loss, query, key, query_mask, key_mask)
    assert torch.equal(torch.get_rng_state(), state)
    second = value_and_gradients(loss, query, key, query_mask, key_mask)
    assert all(torch.equal(one, other) for one, other in zip(first, second, strict=True))
    assert all(torch.equal(*pair) for pair in zip(copies, (query, key, query_mask, key_mask), strict=True))


@each_loss
def test_memory_layout_does_not_matter(loss):
    """Heads are usually a transposed view of [b, n, h, d]."""
    query, key = random_problem()
    views = [side.transpose(1, 2).contiguous().transpose(1, 2) for side in (query, key)]
    for expected, got in zip(value_and_gradients(loss, query, key), value_and_gradients(loss, *views), strict=True):
        torch.testing.assert_close(got, expected, rtol=1e-9, atol=1e-11)


@each_loss
def test_nothing_is_kept_for_backward_without_gradients(loss):
    query, key = random_problem()
    assert not loss(query, key, None, None).requires_grad
    with torch.no_grad():
        assert not loss(query.requires_grad_(), key, None, None).requires_grad


@each_loss
def test_only_one_side_may_ask_for_a_gradient(loss):
    query, key = random_problem()
    _, query_grad, key_grad = value_and_gradients(loss, query, key)
    for side, expected in ((0, query_grad), (1, key_grad)):
        sides = [query.clone(), key.clone()]
        sides[side].requires_grad_()
        loss(*sides, None, None).sum().backward()
        torch.testing.assert_close(sides[side].grad, expected, rtol=1e-9, atol=1e-11)
