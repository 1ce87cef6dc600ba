"""How far apart keys and queries are, against loops over tokens."""

import statistics

import pytest
import torch

from alignattn.diagnosis.mmd import discrepancy
from alignattn.errors import NothingCapturedError


def naive(query, key, bandwidth, without_own=False):
    """Unbiased squared MMD of [n, d] and [m, d] by the definition, bandwidth None: the median of squared distances."""
    tokens = torch.cat([query, key])
    if bandwidth is None:
        pairs = [float((a - b).square().sum()) for i, a in enumerate(tokens) for b in tokens[:i]]
        scale = statistics.median(pairs)
    else:
        scale = 2 * bandwidth**2

    def kernel(x, y, skip):
        values = [
            float(torch.exp(-(a - b).square().sum() / scale))
            for i, a in enumerate(x)
            for j, b in enumerate(y)
            if not (skip and i == j)
        ]
        return sum(values) / len(values)

    return kernel(query, query, True) + kernel(key, key, True) - 2 * kernel(query, key, without_own)


@pytest.mark.parametrize("without_own", [False, True])
@pytest.mark.parametrize("bandwidth", [None, 1.0])
def test_it_is_the_mean_over_samples_of_the_definition_padding_left_out(bert, batch, bandwidth, without_own):
    inputs = {name: value for name, value in batch.items() if name != "labels"}
    options = {"without_own": without_own} | ({} if bandwidth is None else {"bandwidth": bandwidth})
    found = discrepancy(bert, [inputs], call=lambda model, batch: model(**batch), **options)
    assert list(found) == [f"bert.encoder.layer.{i}.attention.self" for i in range(3)]
    bert.eval()
    with torch.no_grad():
        states = bert(**inputs, output_hidden_states=True).hidden_states
        attention = bert.bert.encoder.layer[1].attention.self
        query, key = (p(states[1]).view(3, 7, 4, 8).transpose(1, 2) for p in (attention.query, attention.key))
    lengths = [4, 6, 7]
    for head in range(4):
        values = [naive(query[i, head, :n], key[i, head, :n], bandwidth, without_own) for i, n in enumerate(lengths)]
        expected = sum(values) / 3
        assert float(found[attention_name(1)][head]) == pytest.approx(expected, abs=1e-5)


def attention_name(layer):
    return f"bert.encoder.layer.{layer}.attention.self"


def test_batches_count_by_their_samples_and_those_of_one_token_not_at_all(bert, batch):
    inputs = {name: value for name, value in batch.items() if name != "labels"}
    call = {"call": lambda model, batch: model(**batch)}
    whole = discrepancy(bert, [inputs], **call)
    parts = [{k: v[:1] for k, v in inputs.items()}, {k: v[1:] for k, v in inputs.items()}]
    lonely = {"input_ids": torch.tensor([[7, 0]]), "attention_mask": torch.tensor([[1, 0]])}
    for name, value in discrepancy(bert, [*parts, lonely], **call).items():
        torch.testing.assert_close(value, whole[name], rtol=1e-4, atol=1e-6)


def test_the_model_is_left_as_it_was(bert, batch):
    inputs = {name: value for name, value in batch.items() if name != "labels"}
    before = {name: value.clone() for name, value in bert.state_dict().items()}
    hooks = sum(len(m._forward_hooks) + len(m._forward_pre_hooks) for m in bert.modules())
    assert bert.training
    discrepancy(bert, [inputs], call=lambda model, batch: model(**batch))
    assert bert.training
    assert all(value.equal(before[name]) for name, value in bert.state_dict().items())
    assert sum(len(m._forward_hooks) + len(m._forward_pre_hooks) for m in bert.modules()) == hooks


def test_a_shared_layer_counts_each_time_it_is_called():
    from transformers import AlbertConfig, AlbertModel

    config = AlbertConfig(
        vocab_size=30,
        embedding_size=8,
        hidden_size=16,
        num_hidden_layers=3,
        num_attention_heads=2,
        intermediate_size=16,
    )
    found = discrepancy(AlbertModel(config), [torch.randint(0, 30, (2, 6))])
    assert len(found) == 3 and len({name.partition("#")[0] for name in found}) == 1
    assert sorted(name.partition("#")[2] for name in found) == ["", "1", "2"]


def test_no_batch_is_an_error(bert):
    with pytest.raises(NothingCapturedError, match="no batches"):
        discrepancy(bert, [])
