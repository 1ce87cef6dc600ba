"""Conditional transport along edges: against loops over the nodes of each graph, and in memory that edges bound."""

import pytest
import torch
from problems import random_problem
from torch.autograd import gradcheck

import alignattn
from alignattn.errors import CaptureError, ConfigError, ShapeError
from alignattn.functional import conditional_transport, neighbourhood_transport
from alignattn.matching import neighbourhoods

B, H, N, M = 3, 2, 6, 7
OF_QUERY = torch.tensor([0, 0, 0, 1, 2, 2, 4, 6, 6, 7, 11, 11, 11])  # nodes 3 and 5 attend to nothing; third: no edges
OF_KEY = torch.tensor([0, 3, 6, 3, 0, 0, 1, 7, 8, 13, 7, 9, 12])  # an edge is there twice: 2 to 0
EDGES = OF_QUERY, OF_KEY


def features(seed=0, dtype=torch.float64):
    critic = random_problem(B, H, N, M, d=5, seed=seed, dtype=dtype)
    navigator = random_problem(B, H, N, M, d=4, seed=seed + 100, dtype=dtype)
    return *critic, *[0.7 * side for side in navigator]


def by_loops(critic_query, critic_key, navigator_query, navigator_key, edges, cost="cosine"):
    """One node at a time, with every number looked up by hand."""
    pairs = [(int(q), int(k)) for q, k in zip(*edges, strict=True)]
    losses = critic_query.new_zeros(B, H)
    for sample in range(B):
        own = [(q - sample * N, k - sample * M) for q, k in pairs if q // N == sample]
        for head in range(H):

            def cost_of(query, key, sample=sample, head=head):
                cosine = torch.nn.functional.cosine_similarity(
                    critic_query[sample, head, query], critic_key[sample, head, key], dim=0
                )
                return 1 - cosine if cost == "cosine" else (2 - 2 * cosine).sqrt()

            def score_of(query, key, sample=sample, head=head):
                return navigator_query[sample, head, query] @ navigator_key[sample, head, key]

            for side in (0, 1):
                means = []
                for node in sorted({pair[side] for pair in own}):
                    some = [pair for pair in own if pair[side] == node]
                    weights = torch.stack([score_of(*pair) for pair in some]).softmax(0)
                    means.append((weights * torch.stack([cost_of(*pair) for pair in some])).sum())
                if means:
                    losses[sample, head] = losses[sample, head] + torch.stack(means).mean() / 2
    return losses


@pytest.mark.parametrize("cost", ["cosine", "euclidean"])
def test_value_and_gradients_are_those_of_loops_over_the_nodes(cost):
    found, expected = [], []
    for way, into in ((neighbourhood_transport, found), (by_loops, expected)):
        sides = [side.requires_grad_() for side in features()]
        losses = way(*sides, EDGES, cost=cost)
        weights = torch.linspace(0.5, 2, B * H, dtype=torch.float64).view(B, H)
        (losses * weights).sum().backward()
        into += [losses.detach(), *[side.grad for side in sides]]
    for one, other in zip(found, expected, strict=True):
        torch.testing.assert_close(one, other, rtol=1e-7, atol=1e-9)


def test_gradients_are_those_of_finite_differences():
    sides = [side.requires_grad_() for side in features(seed=3)]
    assert gradcheck(lambda *given: neighbourhood_transport(*given, EDGES), sides)


def test_edges_between_all_nodes_give_conditional_transport_over_all_nodes():
    sides = features(seed=1)
    query, key = torch.meshgrid(torch.arange(N), torch.arange(M), indexing="ij")
    every = [(query + b * N, key + b * M) for b in range(B)]
    edges = torch.cat([q.flatten() for q, _ in every]), torch.cat([k.flatten() for _, k in every])
    torch.testing.assert_close(neighbourhood_transport(*sides, edges), conditional_transport(*sides))


def test_constant_navigator_gives_the_mean_of_the_mean_costs_of_nodes():
    # node 0 attends to keys 0 and 1, node 1 to key 1: costs 0, 1 and 1
    axes = torch.eye(2).double()
    query, key = axes[[0, 0]][None, None], axes[[0, 1]][None, None]
    edges = torch.tensor([0, 0, 1]), torch.tensor([0, 1, 1])
    value = neighbourhood_transport(query, key, 0 * query, 0 * key, edges)
    of_queries, of_keys = ((0 + 1) / 2 + 1) / 2, (0 + (1 + 1) / 2) / 2
    assert value.item() == pytest.approx((of_queries + of_keys) / 2, abs=1e-9)


def test_the_order_of_edges_and_of_nodes_changes_nothing():
    sides = features(seed=2)
    plain = neighbourhood_transport(*sides, EDGES)
    order = torch.randperm(len(OF_QUERY), generator=torch.Generator().manual_seed(0))
    torch.testing.assert_close(neighbourhood_transport(*sides, (OF_QUERY[order], OF_KEY[order])), plain)
    turned = [side.flip(2) for side in sides]
    places = OF_QUERY // N * N + N - 1 - OF_QUERY % N, OF_KEY // M * M + M - 1 - OF_KEY % M
    torch.testing.assert_close(neighbourhood_transport(*turned, places), plain)


def test_a_graph_without_edges_costs_nothing_and_gets_no_gradient():
    sides = [side.requires_grad_() for side in features()]
    losses = neighbourhood_transport(*sides, EDGES)
    losses.sum().backward()
    assert (losses[2] == 0).all() and (losses[:2] > 0).all()
    assert all((side.grad[2] == 0).all() for side in sides)
    nothing = neighbourhood_transport(*sides, (OF_QUERY[:0], OF_KEY[:0]))
    assert (nothing == 0).all()


def test_pieces_of_edges_give_the_same(monkeypatch):
    plain = neighbourhood_transport(*features(), EDGES)
    monkeypatch.setattr(neighbourhoods, "chunks_of", lambda *_: 2)
    sides = [side.requires_grad_() for side in features()]
    pieced = neighbourhood_transport(*sides, EDGES)
    pieced.sum().backward()
    torch.testing.assert_close(pieced.detach(), plain, rtol=1e-12, atol=0)
    monkeypatch.undo()
    whole = [side.requires_grad_() for side in features()]
    neighbourhood_transport(*whole, EDGES).sum().backward()
    for one, other in zip(sides, whole, strict=True):
        torch.testing.assert_close(one.grad, other.grad, rtol=1e-12, atol=1e-15)


def test_huge_navigator_features_are_a_sharp_choice_and_nothing_overflows():
    sides = [side.float().requires_grad_() for side in features()]
    with torch.no_grad():
        for navigator in sides[2:]:  # their products are more than single precision holds
            navigator.mul_(1e30)
    losses = neighbourhood_transport(*sides, EDGES)
    losses.sum().backward()
    assert losses.isfinite().all() and all(side.grad.isfinite().all() for side in sides)


@pytest.mark.parametrize(
    ("edges", "said"),
    [
        ((OF_QUERY, OF_KEY[:3]), "must be pairs"),
        ((OF_QUERY.double(), OF_KEY), "whole numbers"),
        ((OF_QUERY[None], OF_KEY[None]), "two rows"),
    ],
)
def test_edges_that_are_none_are_refused(edges, said):
    with pytest.raises(ShapeError, match=said):
        neighbourhood_transport(*features(), edges)


@pytest.mark.parametrize("method", ["gan", "ot", "mmd"])
def test_other_methods_refuse_it_with_a_sentence(method):
    with pytest.raises(ConfigError, match=rf"matched_over is an option of method 'ct'.*'{method}'"):
        alignattn.Alignment(method, matched_over="neighbourhoods")


def test_what_would_cut_a_graph_to_pieces_is_refused():
    for option in ({"max_tokens": 100}, {"stream": "layer"}):
        with pytest.raises(ConfigError, match=f"{next(iter(option))} .*neighbourhoods"):
            alignattn.Alignment("ct", matched_over="neighbourhoods", **option)
    with pytest.raises(ConfigError, match="transported='heads'"):
        alignattn.Alignment("ct", preset="released", matched_over="neighbourhoods")
    alignattn.Alignment("ct", preset="released", matched_over="neighbourhoods", transported="tokens")
    with pytest.raises(ConfigError, match="matched_over"):
        alignattn.Alignment("ct", matched_over="edges")


def test_attention_without_edges_is_told_so():
    alignment = alignattn.Alignment("ct", matched_over="neighbourhoods")
    alignment.record(torch.randn(1, 2, 5, 4, requires_grad=True), torch.randn(1, 2, 5, 4), name="mine")
    with pytest.raises(CaptureError, match="mine has none"):
        alignment.loss()


def test_edges_are_recorded_with_an_attention_of_one_s_own():
    """Of whole numbers of any kind."""
    query, key = torch.randn(1, 2, 5, 4, requires_grad=True), torch.randn(1, 2, 5, 4)
    edges = torch.tensor([0, 1, 2, 2, 4], dtype=torch.int32), torch.tensor([1, 1, 0, 3, 4], dtype=torch.int32)
    options = {"matched_over": "neighbourhoods", "until_met": False, "standardise": False}
    alignment = alignattn.Alignment("ct", 1.0, **options)
    alignment.record(query, key, name="mine", edges=edges)
    alignment.loss().backward()
    attending = query.grad.abs().sum((0, 1, 3)) > 0
    assert attending.tolist() == [True, True, True, False, True]  # the fourth attends to nobody


def test_result_files_that_are_older_are_still_found():
    assert "matched_over" not in alignattn.Alignment("ct").config.acting()["matcher"]
    along = alignattn.Alignment("ct", matched_over="neighbourhoods").config.acting()["matcher"]
    assert along["matched_over"] == "neighbourhoods"
