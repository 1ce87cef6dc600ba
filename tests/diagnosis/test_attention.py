"""Attention weights of a model, against what transformers and torch say of themselves."""

import pytest
import torch
from torch import nn

import alignattn
from alignattn.diagnosis.attention import attention_of
from alignattn.errors import ConfigError, NothingCapturedError

transformers = pytest.importorskip("transformers", reason="pip install 'alignattn[hf]'")
SMALL = {"vocab_size": 50, "hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4}


def model_of(family: str, implementation: str) -> nn.Module:
    configs = {
        "bert": lambda: transformers.BertConfig(**SMALL),
        "gpt2": lambda: transformers.GPT2Config(vocab_size=50, n_embd=32, n_layer=2, n_head=4),
        "llama": lambda: transformers.LlamaConfig(**SMALL, num_key_value_heads=2),  # fewer heads of keys
        "albert": lambda: transformers.AlbertConfig(**SMALL, embedding_size=16),  # one layer, run twice
    }
    torch.manual_seed(0)
    return transformers.AutoModel.from_config(configs[family](), attn_implementation=implementation)


@pytest.mark.parametrize("implementation", ["eager", "sdpa"])
@pytest.mark.parametrize("padded", [False, True])
@pytest.mark.parametrize("family", ["bert", "gpt2", "llama", "albert"])
def test_weights_are_those_that_transformers_returns(family, padded, implementation, batch):
    inputs = {"input_ids": batch["input_ids"]} | ({"attention_mask": batch["attention_mask"]} if padded else {})
    reference = model_of(family, "eager").eval()
    model = model_of(family, implementation).train()
    expected = reference(**inputs, output_attentions=True).attentions
    for layer, weights in enumerate(expected):
        place = {"layer": 0, "repeat": layer} if family == "albert" else {"layer": layer}
        found = attention_of(model, inputs, **place)
        valid = inputs.get("attention_mask", torch.ones(3, 7)).bool()
        rows = valid[:, None, :, None].expand_as(weights)  # what a padded query sees is nobody's business
        torch.testing.assert_close(found[rows], weights[rows], rtol=1e-4, atol=1e-6)
        assert not found.requires_grad
    assert all(module.training for module in model.modules())


def test_weights_of_multihead_attention_are_those_that_it_returns():
    attention = nn.MultiheadAttention(16, 4, batch_first=True)
    tokens = torch.randn(2, 5, 16)
    hidden = torch.tensor([[False] * 5, [False] * 3 + [True] * 2])
    _, expected = attention(tokens, tokens, tokens, key_padding_mask=hidden, average_attn_weights=False)
    found = attention_of(attention, tokens, 0, call=lambda m, x: m(x, x, x, key_padding_mask=hidden))
    torch.testing.assert_close(found, expected)


def test_weights_of_torch_layers_in_eval_mode_sum_to_one(encoder):
    found = attention_of(encoder.eval(), torch.randn(2, 5, 16), 1)
    assert found.shape == (2, 4, 5, 5)
    torch.testing.assert_close(found.sum(-1), torch.ones(2, 4, 5))


def test_cross_attention_has_its_place_too():
    config = transformers.BartConfig(
        vocab_size=50, d_model=16, encoder_layers=1, decoder_layers=1, encoder_attention_heads=2,
        decoder_attention_heads=2, encoder_ffn_dim=16, decoder_ffn_dim=16,
    )  # fmt: skip
    torch.manual_seed(0)
    model = transformers.BartModel._from_config(config, attn_implementation="eager").eval()
    inputs = {"input_ids": torch.randint(5, 50, (2, 6)), "decoder_input_ids": torch.randint(5, 50, (2, 4))}
    expected = model(**inputs, output_attentions=True).cross_attentions[0]
    found = attention_of(model, inputs, "decoder.layers.0.encoder_attn")
    assert found.shape == (2, 2, 4, 6)
    torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-6)


def test_outputs_are_bit_for_bit_the_same_while_it_looks_and_after(bert, batch):
    inputs = {name: batch[name] for name in ("input_ids", "attention_mask")}
    plain = bert.eval()(**inputs).logits
    seen = []
    attention_of(bert, inputs, 1, call=lambda model, one: seen.append(model(**one).logits))
    assert torch.equal(seen[0], plain) and torch.equal(bert(**inputs).logits, plain)


def test_what_cannot_be_asked_is_refused(bert, batch):
    inputs = {name: batch[name] for name in ("input_ids", "attention_mask")}
    with pytest.raises(ConfigError, match=r"takes one layer, and layer='bert.encoder' are 3: bert.encoder.layer.0"):
        attention_of(bert, inputs, "bert.encoder")
    with pytest.raises(ConfigError, match=r"repeat=1: bert.encoder.layer.0.attention.self ran 1 times"):
        attention_of(bert, inputs, 0, repeat=1)
    with pytest.raises(NothingCapturedError, match="did not run on this batch"):
        attention_of(bert, inputs, 0, call=lambda model, one: None)
    alignattn.align(bert, method="mmd").detach()  # nothing was left attached


def test_of_models_that_write_their_attention_out(batch):
    """Which can be watched, and not stood in for."""
    torch.manual_seed(0)
    config = transformers.DebertaV2Config(**SMALL, relative_attention=True, pos_att_type=["p2c", "c2p"])
    model = transformers.DebertaV2Model(config).eval()
    inputs = {name: batch[name] for name in ("input_ids", "attention_mask")}
    expected = model(**inputs, output_attentions=True).attentions[1]
    rows = inputs["attention_mask"].bool()[:, None, :, None].expand_as(expected)
    torch.testing.assert_close(attention_of(model, inputs, 1)[rows], expected[rows], rtol=1e-4, atol=1e-6)
