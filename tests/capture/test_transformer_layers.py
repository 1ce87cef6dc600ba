"""What torch builds of nn.MultiheadAttention: encoders, decoders, and their fused path in eval mode."""

from unittest import mock

import pytest
import torch
from tiny import records_of, seeded, traces
from torch import Tensor, nn

from alignattn.capture import Tap

E = 16
TOKENS = torch.randn(3, 6, E, generator=torch.Generator().manual_seed(0))
PADDED = torch.arange(6) >= torch.tensor([4, 6, 3])[:, None]


def layer(**options) -> nn.TransformerEncoderLayer:
    return seeded(lambda: nn.TransformerEncoderLayer(E, 4, 24, dropout=0.0, batch_first=True, **options))


def encoder(layers: int = 2, **options) -> nn.TransformerEncoder:
    return seeded(lambda: nn.TransformerEncoder(layer(), layers, **options))


def hooks_below(model: nn.Module) -> int:
    """Hooks on the modules inside, each of which would switch off the fused path."""
    return sum(len(m._forward_hooks) + len(m._forward_pre_hooks) for m in model.modules() if m is not model)


def fused() -> mock._patch:
    return mock.patch("torch._transformer_encoder_layer_fwd", wraps=torch._transformer_encoder_layer_fwd)


MODELS = {
    "encoder": (encoder, "src_key_padding_mask"),
    "encoder without nested tensors": (lambda: encoder(enable_nested_tensor=False), "src_key_padding_mask"),
    "layer": (layer, "src_key_padding_mask"),
    "encoder inside a model": (lambda: nn.Sequential(encoder()), None),
}


@pytest.mark.filterwarnings("ignore:The PyTorch API of nested tensors")
@pytest.mark.parametrize("kind", MODELS)
@pytest.mark.parametrize("padded", [True, False])
@pytest.mark.parametrize("trained", [True, False])
def test_eval_is_bit_identical_and_fused_while_attached(kind, padded, trained):
    build, argument = MODELS[kind]
    model = build()
    rest = {argument: PADDED} if padded and argument else {}
    with torch.no_grad(), fused() as calls:
        plain = model.eval()(TOKENS, **rest)
        expected_calls = calls.call_count
    assert expected_calls > 0
    records = []
    tap = Tap(model.train(trained), watch=records.append)
    if trained:
        model(TOKENS, **rest)
        assert len(records) == sum(isinstance(m, nn.MultiheadAttention) for m in model.modules())
    records.clear()
    with torch.no_grad(), fused() as calls:
        assert torch.equal(model.eval()(TOKENS, **rest), plain)
        assert calls.call_count == expected_calls
    assert hooks_below(model) == 0 and not records
    tap.remove()
    model.train()
    assert traces(model) == traces(build().train())


@pytest.mark.parametrize("build", [encoder, layer])
def test_padding_is_known_and_the_records_are_those_of_the_layers(build):
    model = build().train()
    records = records_of(model, TOKENS, src_key_padding_mask=PADDED)
    assert [r.name for r in records] == (
        ["self_attn"] if build is layer else ["layers.0.self_attn", "layers.1.self_attn"]
    )
    for record in records:
        assert torch.equal(record.key_mask, ~PADDED) and torch.equal(record.query_mask, ~PADDED)
    attention = model.get_submodule(records[0].name)
    query = TOKENS @ attention.in_proj_weight[:E].T + attention.in_proj_bias[:E]
    torch.testing.assert_close(records[0].query, torch.stack(query.chunk(4, -1), 1))


@pytest.mark.parametrize("build", [encoder, layer])
def test_causal_mask_hides_no_key_from_all(build):
    mask = nn.Transformer.generate_square_subsequent_mask(6)
    for record in records_of(build().train(), TOKENS, mask, is_causal=True):
        assert record.key_mask is None or record.key_mask.all()


def test_decoder_has_its_self_attention_captured_and_its_cross_attention_on_request():
    model = seeded(lambda: nn.Transformer(E, 4, 1, 2, 24, dropout=0.0, batch_first=True)).train()
    target = TOKENS[:, :4]
    own = ["encoder.layers.0.self_attn", "decoder.layers.0.self_attn", "decoder.layers.1.self_attn"]
    padding = {"src_key_padding_mask": PADDED, "memory_key_padding_mask": PADDED}
    assert [r.name for r in records_of(model, TOKENS, target, **padding)] == own
    everything = records_of(model, TOKENS, target, tap={"cross": True}, **padding)
    cross = [r for r in everything if r.name not in own]
    assert [r.name for r in cross] == [f"decoder.layers.{i}.multihead_attn" for i in range(2)]
    for record in cross:
        assert (record.query.shape[2], record.key.shape[2]) == (4, 6)
        assert record.query_mask is None and torch.equal(record.key_mask, ~PADDED)


@pytest.mark.filterwarnings("ignore:The PyTorch API of nested tensors")
@pytest.mark.parametrize("how", ["always", "stand-in"])
def test_encoder_in_eval_mode_can_be_reached_when_asked(how):
    """Its fused path would hide the attention, and hand nested tensors to layers that cannot take them."""
    model = encoder().eval()
    with torch.no_grad():
        plain = model(TOKENS, src_key_padding_mask=PADDED)
        seen = []
        options = {"watch": seen.append, "always": True} if how == "always" else {
            "attend": lambda call: seen.append(call) or call.attend(call.weights())
        }  # fmt: skip
        before = traces(model)
        tap = Tap(model, **options)
        reached = model(TOKENS, src_key_padding_mask=PADDED)
        tap.remove()
        assert len(seen) == 2
        torch.testing.assert_close(reached[~PADDED], plain[~PADDED], rtol=1e-4, atol=1e-5)
        assert traces(model) == before
        assert torch.equal(model(TOKENS, src_key_padding_mask=PADDED), plain)


class FrozenBelow(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.frozen, self.head = encoder(), encoder(1)

    def train(self, mode: bool = True) -> "FrozenBelow":
        super().train(mode)
        self.frozen.eval()
        return self

    def forward(self, tokens: Tensor) -> Tensor:
        with torch.no_grad():
            features = self.frozen(tokens, src_key_padding_mask=PADDED)
        self.features = features
        if features.shape[1] < tokens.shape[1]:
            features = nn.functional.pad(features, (0, 0, 0, tokens.shape[1] - features.shape[1]))
        return self.head(features, src_key_padding_mask=PADDED)


@pytest.mark.filterwarnings("ignore:The PyTorch API of nested tensors")
@pytest.mark.parametrize("options", [{}, {"projections": True}])
def test_frozen_encoder_keeps_its_fused_path_while_the_rest_trains(options):
    model = FrozenBelow().train()
    model(TOKENS)
    plain = model.features
    records = []
    tap = Tap(model, watch=records.append, **options)
    for _ in range(2):
        model(TOKENS)
        assert torch.equal(model.features, plain)
    tap.remove()
    assert [record.name for record in records] == ["head.layers.0.self_attn"] * 2
    assert not any(torch.isnan(record.query).any() for record in records)


def test_encoder_that_is_frozen_later_is_let_go():
    model = nn.Sequential(encoder(1), encoder(1)).train()
    records = []
    tap = Tap(model, watch=records.append)
    model(TOKENS)
    model[0].eval()
    model(TOKENS)
    assert hooks_below(model[0]) == 0 and hooks_below(model[1]) > 0
    model[0].train()
    model(TOKENS)
    tap.remove()
    first, second = (f"{i}.layers.0.self_attn" for i in range(2))
    assert [r.name for r in records] == [first, second, second, first, second]


@pytest.mark.filterwarnings("ignore:The PyTorch API of nested tensors")
def test_fused_path_is_given_back_by_several_taps():
    model = encoder().eval()
    taps = [Tap(model, watch=lambda _: None, always=True) for _ in range(2)]
    taps.append(Tap(model, attend=lambda call: call.proceed()))
    with torch.no_grad():
        model(TOKENS, src_key_padding_mask=PADDED)
    assert torch.backends.mha.get_fastpath_enabled()
    with pytest.raises(RuntimeError):
        model(TOKENS[..., :3])
    assert torch.backends.mha.get_fastpath_enabled()
    for tap in taps:
        tap.remove()
