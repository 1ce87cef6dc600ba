"""Entropy of attention: in closed form, and from the attention weights that models hand out themselves."""

import math

import pytest
import torch
from torch import nn

import alignattn
from alignattn.capture import Attending, QueryKey
from alignattn.diagnosis.entropy import entropies
from zoo import BY_NAME


def mean_entropy(query, key, attending, **masks):
    total, counted = entropies(QueryKey(query=query, key=key, attending=attending, **masks))
    return (total / counted).tolist()


def test_keys_that_are_all_alike_give_one_and_a_single_one_zero():
    query, key = torch.randn(2, 3, 4, 5), torch.zeros(2, 3, 6, 5)
    assert mean_entropy(query, key, Attending()) == pytest.approx([1.0] * 3)
    query, key = torch.ones(2, 3, 4, 5), torch.zeros(2, 3, 6, 5)
    key[:, :, 2] = 100.0
    assert mean_entropy(query, key, Attending()) == pytest.approx([0.0] * 3, abs=1e-6)


def test_two_keys_are_weighed_with_the_scale_of_the_call():
    query, key = torch.ones(1, 1, 1, 1), torch.tensor([0.0, 3.0]).view(1, 1, 2, 1)
    a = 1 / (1 + math.exp(-1.5))
    expected = -(a * math.log(a) + (1 - a) * math.log(1 - a)) / math.log(2)
    assert mean_entropy(query, key, Attending(0.5)) == pytest.approx([expected])
    capped = 1 / (1 + math.exp(-2 * math.tanh(0.75)))
    expected = -(capped * math.log(capped) + (1 - capped) * math.log(1 - capped)) / math.log(2)
    assert mean_entropy(query, key, Attending(0.5, cap=2.0)) == pytest.approx([expected])


def test_only_keys_that_may_be_seen_count_and_queries_with_a_choice():
    hidden = torch.zeros(4, 4).masked_fill(torch.ones(4, 4).triu(1).bool(), -math.inf)
    query, key = torch.randn(2, 1, 4, 3), torch.zeros(2, 1, 4, 3)
    total, counted = entropies(QueryKey(query=query, key=key, attending=Attending(bias=hidden)))
    assert counted.tolist() == [6] and total.tolist() == pytest.approx([6.0])  # the first of four sees itself alone
    total, counted = entropies(QueryKey(query=query[:, :, :1], key=key[:, :, :1], attending=Attending()))
    assert counted.tolist() == [0]


def test_padding_changes_nothing():
    query, key = torch.randn(2, 2, 5, 3), torch.randn(2, 2, 5, 3)
    mask = torch.tensor([[1, 1, 1, 0, 0], [1, 1, 1, 1, 0]]).bool()
    bias = torch.zeros(2, 1, 1, 5).masked_fill(~mask[:, None, None], torch.finfo(torch.float32).min)
    masks = {"query_mask": mask, "key_mask": mask}
    plain = mean_entropy(query, key, Attending(0.7, bias), **masks)
    wild = [t.masked_fill(~mask[:, None, :, None], torch.nan) for t in (query, key)]
    assert mean_entropy(*wild, Attending(0.7, bias), **masks) == pytest.approx(plain)


def by_hand(weights, query_mask):
    """[b, h, n, m] of a model; keys that no query may see have weight zero."""
    samples, heads, n, _ = weights.shape
    found = []
    for h in range(heads):
        values = []
        for i in range(samples):
            for j in range(n):
                row = weights[i, h, j].double()
                row = row[row > 0]
                if query_mask[i, j] and len(row) > 1:
                    values.append(float(-(row * row.log()).sum()) / math.log(len(row)))
        found.append(sum(values) / len(values))
    return found


NAMES = ["BERT", "ALBERT", "MPNet", "DeBERTa", "GPT-2", "BLOOM", "Llama", "Gemma 2", "T5"]
CASES = [(name, implementation) for name in NAMES for implementation in BY_NAME[name].implementations]


@pytest.mark.parametrize(("name", "implementation"), CASES)
def test_it_is_that_of_the_weights_the_model_hands_out(name, implementation):
    family = BY_NAME[name]
    inputs = family.inputs()
    with torch.no_grad():
        given = family.build("eager")(**inputs, output_attentions=True)
    masks = {inputs[kind].shape[1]: inputs[kind].bool() for kind in inputs if kind.endswith("attention_mask")}
    attentions = given.attentions if "attentions" in given else given.encoder_attentions + given.decoder_attentions
    assert all(weights is not None for weights in attentions)
    found = alignattn.diagnose(family.build(implementation), [inputs]).heads
    expected = [value for weights in attentions for value in by_hand(weights, masks[weights.shape[2]])]
    assert [head.entropy for head in found] == pytest.approx(expected, abs=2e-4)


def test_a_cap_on_logits_is_part_of_the_call():
    from transformers import Gemma2ForCausalLM

    config, inputs = BY_NAME["Gemma 2"].config(), BY_NAME["Gemma 2"].inputs()
    config._attn_implementation, config.attn_logit_softcapping, config.initializer_range = "eager", 0.3, 0.5
    model = Gemma2ForCausalLM(config).eval()
    with torch.no_grad():
        attentions = model(**inputs, output_attentions=True).attentions
    expected = [value for weights in attentions for value in by_hand(weights, inputs["attention_mask"].bool())]
    assert [head.entropy for head in alignattn.diagnose(model, [inputs]).heads] == pytest.approx(expected, abs=1e-5)


def test_torchs_own_attention_causal_and_padded():
    attention = nn.MultiheadAttention(12, 3, batch_first=True)
    tokens, padding = torch.randn(2, 6, 12), torch.zeros(2, 6).bool()
    padding[1, 4:] = True
    hidden = torch.ones(6, 6).triu(1).bool()

    class Model(nn.Module):
        def __init__(self):
            super().__init__()
            self.attention = attention

        def forward(self, x):
            return self.attention(
                x, x, x, key_padding_mask=padding, attn_mask=hidden, need_weights=True, average_attn_weights=False
            )[1]

    model = Model().eval()
    weights = model(tokens).detach()
    found = alignattn.diagnose(model, [tokens]).heads
    assert [head.entropy for head in found] == pytest.approx(by_hand(weights, ~padding), abs=1e-5)


@pytest.mark.parametrize("options", [{}, {"is_causal": True}, {"scale": 0.9}])
def test_any_other_attention_by_scaled_dot_product_attention(options):
    class Attention(nn.Module):
        def __init__(self):
            super().__init__()
            self.project = nn.Linear(8, 24)

        def heads(self, x):
            return self.project(x).view(*x.shape[:2], 3, 2, 4).permute(2, 0, 3, 1, 4)  # (3, b, h, n, d)

        def forward(self, x):
            return nn.functional.scaled_dot_product_attention(*self.heads(x), **options)

    model, x = Attention().eval(), torch.randn(3, 5, 8) * 3
    query, key, _ = model.heads(x).detach()
    logits = query @ key.mT * options.get("scale", 0.5)
    if options.get("is_causal"):
        logits = logits.masked_fill(torch.ones(5, 5).triu(1).bool(), -math.inf)
    expected = by_hand(logits.softmax(-1), torch.ones(3, 5).bool())
    assert [head.entropy for head in alignattn.diagnose(model, [x]).heads] == pytest.approx(expected, abs=1e-5)
