"""QueryKey is checked when made; AttentionCall is soft attention; packed rows are taken apart."""

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from alignattn.capture import AttentionCall, QueryKey
from alignattn.capture.querykey import as_bias, causal_bias, to_query_heads, valid_keys
from alignattn.errors import AlignmentError, ShapeError

B, H, N, M, D = 2, 4, 5, 6, 3


def random(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


QUERY, KEY = random(B, H, N, D), random(B, H, M, D, seed=1)
ONES = torch.ones(B, N, dtype=torch.bool)


@pytest.mark.parametrize(
    ("wrong", "message"),
    [
        ({"query": QUERY[0]}, r"query must be \[b, h, tokens, d\].*got \(4, 5, 3\)"),
        ({"key": KEY[None]}, r"key must be \[b, h, tokens, d\].*got \(1, 2, 4, 6, 3\)"),
        ({"query": QUERY[:, :, :0]}, r"none of them zero, got \(2, 4, 0, 3\)"),
        ({"key": KEY[:, :, :0]}, r"none of them zero, got \(2, 4, 0, 3\)"),
        ({"query": QUERY[:0], "key": KEY[:0]}, r"none of them zero, got \(0, 4, 5, 3\)"),
        ({"query": QUERY.long()}, "query must be floating point, got torch.int64"),
        ({"key": KEY > 0}, "key must be floating point, got torch.bool"),
        ({"query_mask": ONES.long()}, "query_mask must be boolean, True = valid, got torch.int64"),
        ({"key_mask": torch.ones(B, M)}, "key_mask must be boolean, True = valid, got torch.float32"),
        ({"query_mask": ONES[:, :-1]}, r"query_mask must be \[b, tokens\] = \(2, 5\), got \(2, 4\)"),
        ({"key_mask": ONES}, r"key_mask must be \[b, tokens\] = \(2, 6\), got \(2, 5\)"),
        ({"key_mask": torch.ones(B, 1, 1, M, dtype=torch.bool)}, r"got \(2, 1, 1, 6\)"),
        ({"key": KEY[:1]}, r"query \(2, 4, 5, 3\) and key \(1, 4, 6, 3\) must agree in samples"),
        ({"key": KEY[..., :2]}, r"key \(2, 4, 6, 2\) must agree in samples and width"),
        ({"key": KEY[:, :3]}, "heads of the queries be a multiple of those of the keys"),
        ({"query": QUERY[:, :2]}, "heads of the queries be a multiple of those of the keys"),
    ],
)
def test_what_does_not_fit_is_refused_with_the_name_of_the_layer(wrong, message):
    with pytest.raises(ShapeError, match="encoder.3: .*" + message) as caught:
        QueryKey(**({"query": QUERY, "key": KEY, "name": "encoder.3"} | wrong))
    assert isinstance(caught.value, AlignmentError) and isinstance(caught.value, ValueError)


def test_record_without_a_name_says_so():
    with pytest.raises(ShapeError, match=r"^record: query must be"):
        QueryKey(QUERY[0], KEY)


def test_what_fits_is_taken_as_it_is():
    record = QueryKey(QUERY, KEY, ONES, torch.ones(B, M, dtype=torch.bool), name="a", call=2)
    assert record.query is QUERY and record.key is KEY and record.query_mask is ONES
    assert record.unpacked() is record


@pytest.mark.parametrize("groups", [1, 2, 4])
def test_each_key_head_is_repeated_for_the_query_heads_that_share_it(groups):
    key = random(B, groups, M, D)
    record = QueryKey(QUERY, key)
    for head in range(H):
        assert torch.equal(record.key[:, head], key[:, head * groups // H])
    assert torch.equal(record.key, to_query_heads(key, H))


def unpacked_by_hand(record: QueryKey) -> list[tuple[Tensor, Tensor]]:
    """(query, key) [h, n, d] of each document, in the order of rows and documents."""
    documents = []
    for row, labels in enumerate(record.segments):
        for label in labels.unique(sorted=True):
            members = [
                i
                for i in range(len(labels))
                if labels[i] == label and (record.query_mask is None or record.query_mask[row, i])
            ]
            if members:
                documents.append((record.query[row][:, members], record.key[row][:, members]))
    return documents


SEGMENTS = {
    "one document a row": torch.tensor([[0] * 6, [0] * 6]),
    "several": torch.tensor([[0, 0, 0, 1, 1, 2], [0, 1, 1, 1, 1, 1]]),
    "one token each": torch.tensor([[0, 1, 2, 3, 4, 5], [0, 0, 0, 0, 0, 1]]),
    "a row of one, a row of three": torch.tensor([[0] * 6, [0, 0, 1, 1, 2, 2]]),
    "interleaved": torch.tensor([[0, 1, 0, 2, 1, 0], [1, 0, 1, 0, 0, 1]]),
}
PADDING = {
    "no mask": None,
    "nothing hidden": torch.ones(2, 6, dtype=torch.bool),
    "right": torch.arange(6) < torch.tensor([[4], [5]]),
    "left": torch.arange(6) >= torch.tensor([[2], [1]]),
    "a row of padding": torch.tensor([[False] * 6, [True] * 6]),
}


@pytest.mark.parametrize("segments", SEGMENTS)
@pytest.mark.parametrize("padding", PADDING)
def test_packed_rows_become_one_row_a_document(segments, padding):
    mask = PADDING[padding]
    query, key = random(2, H, 6, D).requires_grad_(), random(2, H, 6, D, seed=1).requires_grad_()
    record = QueryKey(query, key, mask, mask, SEGMENTS[segments], name="a", call=1)
    unpacked, expected = record.unpacked(), unpacked_by_hand(record)
    assert (unpacked.name, unpacked.call, unpacked.segments) == ("a", 1, None)
    assert len(unpacked.query) == len(unpacked.key) == len(expected)
    for row, (queries, keys) in enumerate(expected):
        valid = torch.ones(6, dtype=torch.bool) if unpacked.query_mask is None else unpacked.query_mask[row]
        assert torch.equal(unpacked.query[row][:, valid], queries)
        assert torch.equal(unpacked.key[row][:, valid], keys)
    assert (unpacked.query_mask is None) == (unpacked.key_mask is None)
    together = sum((q * q).sum() + (k * q).sum() for q, k in expected)
    (unpacked.query.square().sum() + (unpacked.query * unpacked.key).sum()).backward()
    of_query, of_key = torch.autograd.grad(together, (query, key))
    torch.testing.assert_close(query.grad, of_query)
    torch.testing.assert_close(key.grad, of_key)


def test_row_of_nothing_but_padding_stays_without_documents():
    nothing = torch.zeros(2, 6, dtype=torch.bool)
    record = QueryKey(random(2, H, 6, D), random(2, H, 6, D), nothing, nothing, SEGMENTS["several"]).unpacked()
    assert not record.query_mask.any() and record.segments is None


@pytest.mark.parametrize("kind", [torch.bool, torch.float32, torch.float16, torch.bfloat16])
@pytest.mark.parametrize("lead", [(2, 1, 1), (2, 1, 5), (2, 4, 5), (1, 1, 5), (4, 5), (5,), (1,)])
def test_key_is_valid_iff_some_query_may_see_it(kind, lead):
    allowed = torch.rand(*lead, M, generator=torch.Generator().manual_seed(5)) > 0.6
    mask = (
        allowed
        if kind is torch.bool
        else torch.zeros(allowed.shape, dtype=kind).masked_fill(~allowed, torch.finfo(kind).min)
    )
    full = allowed.expand(B, H, N, M)
    expected = [[bool(full[b, :, :, m].any()) for m in range(M)] for b in range(B)]
    assert valid_keys(mask, B, M).tolist() == expected
    assert valid_keys(None, B, M) is None


@pytest.mark.parametrize("groups", [1, 2, 4])
@pytest.mark.parametrize("mask", ["none", "causal", "boolean", "float", "some queries see nothing"])
def test_weights_of_a_call_are_those_of_scaled_dot_product_attention(groups, mask):
    key, value = (random(B, groups, M, D, seed=s).requires_grad_() for s in (1, 2))
    query = QUERY.clone().requires_grad_()
    given = {
        "none": None,
        "causal": torch.ones(N, M, dtype=torch.bool).tril(),
        "boolean": random(B, 1, N, M, seed=3) > -0.5,
        "float": random(B, H, N, M, seed=3),
        "some queries see nothing": torch.ones(B, 1, N, M, dtype=torch.bool).index_fill(2, torch.tensor([0, 3]), False),
    }[mask]
    bias = causal_bias(query, key) if mask == "causal" else as_bias(given, query)
    call = AttentionCall(nn.Identity(), query, key, value, 0.7, bias, 0.0, lambda: query)
    output = call.attend(call.weights())
    expected = F.scaled_dot_product_attention(query, key, value, attn_mask=given, scale=0.7, enable_gqa=True)
    torch.testing.assert_close(output, expected)
    inputs = (query, key, value)
    ours, theirs = (torch.autograd.grad(t.square().sum(), inputs) for t in (output, expected))
    torch.testing.assert_close(ours, theirs)
