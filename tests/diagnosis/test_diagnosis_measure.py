"""diagnose() on whole models: the same figures as elsewhere, and nothing of the model changed."""

import math

import pytest
import torch
from torch import nn

import alignattn
from alignattn.diagnosis.mmd import discrepancy
from alignattn.errors import ConfigError, NonFiniteError, NothingCapturedError, UnsupportedModelError
from zoo import BY_NAME


@pytest.fixture
def inputs(batch):
    return {name: value for name, value in batch.items() if name != "labels"}


def figures(heads):
    return [
        [*h.noise, h.mmd, h.mmd_p, h.mean_distance, h.covariance_distance, h.query_norm, h.key_norm, h.entropy]
        for h in heads
    ]


class Projected(nn.Module):
    """Queries and keys given as they are, [b, h, n, d]."""

    def forward(self, one, other):
        return nn.functional.scaled_dot_product_attention(one, other, other)


def test_mmd_is_that_of_discrepancy_head_by_head(bert, inputs):
    found = alignattn.diagnose(bert, [inputs])
    expected = discrepancy(bert, [inputs], call=lambda model, batch: model(**batch))
    assert [(h.layer, h.head) for h in found.heads] == [(name, i) for name in expected for i in range(4)]
    assert [h.mmd for h in found.heads] == [v for values in expected.values() for v in values.tolist()]
    assert {h.samples for h in found.heads} == {3} and {h.tokens for h in found.heads} == {4 + 6 + 7}
    assert found.name == "BertForSequenceClassification"
    assert torch.__version__.startswith(found.versions["torch"])  # which may say more of what it was built for


def test_errors_and_lengths_are_those_of_the_samples():
    query, key = torch.randn(6, 2, 5, 3), torch.randn(6, 2, 5, 3) + 1
    found = alignattn.diagnose(Projected(), [(query, key)]).heads
    values = alignattn.functional.mmd(query, key).double()
    for i, head in enumerate(found):
        assert head.mmd_error == pytest.approx(float(values[:, i].std() / math.sqrt(6)), rel=1e-4)
        assert head.query_norm == pytest.approx(float(query[:, i].norm(dim=-1).mean()), rel=1e-5)
        assert head.key_norm == pytest.approx(float(key[:, i].norm(dim=-1).mean()), rel=1e-5)


def test_the_model_and_random_numbers_are_left_as_they_were(bert, inputs):
    bert.bert.encoder.layer[1].eval()  # a part that is frozen, say
    weight = bert.classifier.weight
    weight.grad = torch.ones_like(weight)
    before = {name: value.clone() for name, value in bert.state_dict().items()}
    modes = [module.training for module in bert.modules()]
    hooks = sum(len(m._forward_hooks) + len(m._forward_pre_hooks) for m in bert.modules())
    state = torch.get_rng_state()

    def call(model, batch):
        torch.rand(3)  # a model may draw numbers in eval mode
        return model(**batch)

    alignattn.diagnose(bert, [inputs], call=call)
    assert [module.training for module in bert.modules()] == modes
    assert sum(len(m._forward_hooks) + len(m._forward_pre_hooks) for m in bert.modules()) == hooks
    assert all(value.equal(before[name]) for name, value in bert.state_dict().items())
    assert torch.get_rng_state().equal(state)
    assert weight.grad.equal(torch.ones_like(weight))
    assert all(p.grad is None for name, p in bert.named_parameters() if name != "classifier.weight")


def test_neither_batches_nor_padding_nor_the_attention_function_change_the_figures(inputs):
    family = BY_NAME["BERT"]
    inputs = family.inputs()
    whole = alignattn.diagnose(family.build(), [inputs]).heads
    parts = [{k: v[i : i + 1] for k, v in inputs.items()} for i in range(3)]
    longer = {k: nn.functional.pad(v, (0, 4), value=int(k == "input_ids")) for k, v in inputs.items()}
    for other in (
        alignattn.diagnose(family.build(), parts).heads,
        alignattn.diagnose(family.build(), [longer]).heads,
        alignattn.diagnose(family.build("eager"), [inputs]).heads,
    ):
        for one, two in zip(figures(whole), figures(other), strict=True):
            assert one == pytest.approx(two, abs=2e-5)
        assert [h.auc for h in whole] == pytest.approx([h.auc for h in other], abs=1e-6, nan_ok=True)


def test_the_same_seed_gives_the_same_diagnosis_and_another_other_noise(bert, inputs):
    first, again, other = (alignattn.diagnose(bert, [inputs], seed=seed) for seed in (0, 0, 1))
    assert first == again
    assert [h.mmd for h in first.heads] == [h.mmd for h in other.heads]
    assert [h.noise for h in first.heads] != [h.noise for h in other.heads]


def test_equal_distributions_are_within_noise_and_different_ones_beyond():
    query, key = torch.randn(60, 8, 10, 6), torch.randn(60, 8, 10, 6)
    key[:, 4:] += 0.7
    found = alignattn.diagnose(Projected(), [(query[i : i + 20], key[i : i + 20]) for i in (0, 20, 40)]).heads
    assert sum(h.beyond_noise for h in found[:4]) <= 1 and all(h.beyond_noise for h in found[4:])
    assert all(h.mmd_p == pytest.approx(1 / 201) for h in found[4:])
    assert all(h.auc_interval[0] <= 0.5 <= h.auc_interval[1] for h in found[:4])
    assert all(h.auc_interval[0] > 0.6 for h in found[4:])


def test_more_keys_than_queries_in_cross_attention():
    family = BY_NAME["BART"]
    inputs, model = family.inputs(), family.build()
    plain = alignattn.diagnose(model, [inputs]).heads
    every = alignattn.diagnose(model, [inputs], cross=True).heads
    cross = [h for h in every if "encoder_attn" in h.layer]
    assert len(cross) == 2 * 4 and [h for h in every if h not in cross] == plain
    assert all(math.isfinite(value) for row in figures(cross) for value in row)
    assert {h.tokens for h in cross} == {inputs["decoder_input_ids"].numel()}  # nobody tells which of them are padding


def test_layers_are_chosen_as_align_does(bert, inputs):
    found = alignattn.diagnose(bert, [inputs], layers=[-1]).heads
    assert {h.layer for h in found} == {"bert.encoder.layer.2.attention.self"}
    with pytest.raises(ConfigError, match="matches no attention module"):
        alignattn.diagnose(bert, [inputs], layers="decoder.*")


def test_samples_of_one_token_tell_nothing_and_break_nothing():
    query, key = torch.randn(4, 2, 1, 3), torch.randn(4, 2, 1, 3)
    found = alignattn.diagnose(Projected(), [(query, key)])
    assert {(h.samples, h.tokens, h.mmd, h.noise, h.mmd_p) for h in found.heads} == {(0, 4, 0.0, (0.0, 0.0), 1.0)}
    assert all(math.isnan(h.entropy) and math.isfinite(h.auc) for h in found.heads)
    assert found.words == [
        "No sample has two tokens or more on both sides: whether keys and queries differ cannot be told."
    ]


def test_keys_that_never_vary():
    query = torch.randn(20, 1, 6, 4)
    (head,) = alignattn.diagnose(Projected(), [(query, torch.full_like(query, 2.0))]).heads
    assert head.entropy == pytest.approx(1.0) and head.covariance_distance == pytest.approx(2.0)
    assert head.beyond_noise and head.auc > 0.9
    (head,) = alignattn.diagnose(Projected(), [(torch.ones(3, 1, 6, 4), torch.ones(3, 1, 6, 4))]).heads
    assert not head.beyond_noise and head.mmd_p == 1.0 and head.auc == 0.5 and head.mean_distance == 0.0


def test_queries_that_are_keys_are_within_noise():
    tokens = torch.randn(8, 2, 6, 4)
    for head in alignattn.diagnose(Projected(), [(tokens, tokens.clone())]).heads:
        assert head.mmd < 0 and not head.beyond_noise and head.mmd_p == 1.0


def test_nan_is_told_with_the_layer(bert, inputs):
    with torch.no_grad():
        bert.bert.encoder.layer[1].attention.self.query.bias[0] = torch.nan
    with pytest.raises(NonFiniteError, match=r"NaN or infinity in the queries or keys of bert\.encoder\.layer\.1"):
        alignattn.diagnose(bert, [inputs])
    assert bert.training and not any(len(m._forward_pre_hooks) for m in bert.modules())


def test_half_precision_is_measured_in_full(inputs):
    family = BY_NAME["BERT"]
    plain = alignattn.diagnose(family.build(), [family.inputs()]).heads
    half = alignattn.diagnose(family.build().bfloat16(), [family.inputs()]).heads
    for one, two in zip(figures(plain), figures(half), strict=True):
        assert one == pytest.approx(two, rel=0.1, abs=0.05)


def test_autocast_around_the_model_leaves_the_figures_alone():
    pair = torch.randn(6, 2, 5, 3), torch.randn(6, 2, 5, 3) + 0.3

    def call(model, batch):
        with torch.autocast("cpu", torch.bfloat16):
            return model(*batch)

    plain, around = alignattn.diagnose(Projected(), [pair]), alignattn.diagnose(Projected(), [pair], call=call)
    assert plain == around


@pytest.mark.parametrize("name", ["Llama", "GPT-2", "T5", "DeBERTa", "ViT", "Wav2Vec2", "ModernBERT", "GPT-OSS"])
def test_families_of_all_kinds_are_measured(name):
    family = BY_NAME[name]
    found = alignattn.diagnose(family.build(), [family.inputs()]).heads
    assert len(found) >= family.calls * 2
    assert all(math.isfinite(value) for row in figures(found) for value in row)
    assert all(0 <= head.entropy <= 1 + 1e-6 and 0 <= head.auc <= 1 for head in found)


def test_packed_documents_are_samples():
    family = BY_NAME["Llama"]
    model, lengths = family.build(), (5, 3, 4)
    ids = torch.randint(5, 99, (1, sum(lengths)))
    positions = torch.cat([torch.arange(n) for n in lengths])[None]
    packed = alignattn.diagnose(model, [{"input_ids": ids, "position_ids": positions, "use_cache": False}]).heads
    single = alignattn.diagnose(model, [{"input_ids": part} for part in ids.split(lengths, 1)]).heads
    for one, two in zip(figures(packed), figures(single), strict=True):
        assert one == pytest.approx(two, abs=1e-4)


def test_what_cannot_be_is_refused(bert, inputs):
    with pytest.raises(NothingCapturedError, match="no batches"):
        alignattn.diagnose(bert, [])
    with pytest.raises(ConfigError, match="permutations must be at least 40, got 5"):
        alignattn.diagnose(bert, [inputs], permutations=5)
    with pytest.raises(ConfigError, match="max_tokens must be at least 20, got 3"):
        alignattn.diagnose(bert, [inputs], max_tokens=3)
    with pytest.raises(ConfigError, match="seed must be from 0"):
        alignattn.diagnose(bert, [inputs], seed=-1)
    with pytest.raises(UnsupportedModelError, match="no attention that can be captured"):
        alignattn.diagnose(nn.Linear(2, 2), [torch.zeros(1, 2)])
