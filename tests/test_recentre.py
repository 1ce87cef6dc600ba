"""Keys are shifted to the queries' mean, and the model does not feel it."""

import copy

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import alignattn
from alignattn.capture import Tap
from alignattn.capture.keybias import KeyBias, shift_each

transformers = pytest.importorskip("transformers", reason="pip install 'alignattn[hf]'")

SIZES = {"hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4, "intermediate_size": 48, "vocab_size": 60}


def still_bert():
    config = transformers.BertConfig(**SIZES, hidden_dropout_prob=0.0, attention_probs_dropout_prob=0.0)
    return transformers.BertForSequenceClassification(config)


def encoder_of_torch():
    layer = nn.TransformerEncoderLayer(32, 4, 48, dropout=0.0, batch_first=True)
    return nn.TransformerEncoder(layer, 2, enable_nested_tensor=False)


class Grouped(nn.Module):
    """Two key heads for four query heads."""

    def __init__(self):
        super().__init__()
        self.q, self.k, self.v = nn.Linear(32, 32), nn.Linear(32, 16), nn.Linear(32, 16)

    def forward(self, tokens):
        q, k, v = (f(tokens).unflatten(-1, (-1, 8)).transpose(1, 2) for f in (self.q, self.k, self.v))
        return F.scaled_dot_product_attention(q, k, v, enable_gqa=True).transpose(1, 2).flatten(2)


class Rotated(Grouped):
    """Keys turned by their position: a shift before the turn is none after it."""

    def forward(self, tokens):
        q, k, v = (f(tokens).unflatten(-1, (-1, 8)).transpose(1, 2) for f in (self.q, self.k, self.v))
        turn = torch.linspace(0, 3, tokens.shape[1])[:, None]
        k = k * torch.cos(turn) + k.roll(1, -1) * torch.sin(turn)
        return F.scaled_dot_product_attention(q, k, v, enable_gqa=True).transpose(1, 2).flatten(2)


def inputs_of(model, seed=0):
    numbers = torch.Generator().manual_seed(seed)
    if isinstance(model, transformers.PreTrainedModel):
        ids = torch.randint(0, 60, (3, 9), generator=numbers)
        mask = torch.ones_like(ids)
        mask[0, 5:] = 0
        return {"input_ids": ids, "attention_mask": mask}
    return {"src" if isinstance(model, nn.TransformerEncoder) else "tokens": torch.randn(3, 9, 32, generator=numbers)}


def offset(model, size=1.0):
    """Keys and queries that lie apart, as pretrained ones do."""
    numbers = torch.Generator().manual_seed(7)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if name.endswith(("query.bias", "key.bias", "in_proj_bias", "q.bias", "k.bias")):
                parameter.add_(size * torch.randn(parameter.shape, generator=numbers))
    return model


def output_of(model, **inputs):
    output = model(**inputs)
    return output.logits if hasattr(output, "logits") else output


@torch.no_grad()
def mean_gaps(model, **inputs):
    """For each layer the distance of means a key head, by a plain loop over the valid tokens."""
    records = []
    tap = Tap(model, watch=records.append, always=True)
    model.eval()(**inputs)
    tap.remove()
    gaps = []
    for record in records:
        mask = record.key_mask if record.key_mask is not None else torch.ones(record.key[:, 0, :, 0].shape).bool()
        sides = [
            torch.stack([side[b, :, n] for b in range(len(mask)) for n in range(mask.shape[1]) if mask[b, n]]).mean(0)
            for side in (record.query, record.key)
        ]
        gaps.append((sides[0] - sides[1]).unflatten(0, (-1, 1)))
    return gaps


def shifted(model, updates=1, method="mmd", weight=1e-3, rate=0.0, **options):
    """The model after some updates that change nothing but what recentring does; and the alignment."""
    alignment = alignattn.align(model, method, weight=weight, add_to_outputs=False, **options)
    model.train()
    optimizer = torch.optim.SGD(model.parameters(), lr=rate)
    for _ in range(updates):
        optimizer.zero_grad()
        output = output_of(model, **inputs_of(model))
        (output.square().mean() + alignment.loss()).backward()
        optimizer.step()
    return alignment


@pytest.mark.parametrize("make", [still_bert, encoder_of_torch, Grouped])
def test_means_meet_after_one_update_and_no_output_changes(make):
    model = offset(make())
    inputs = inputs_of(model)
    before = output_of(model.eval(), **inputs)
    apart = mean_gaps(model, **inputs)
    alignment = shifted(model)
    alignment.detach()
    together = mean_gaps(model, **inputs)
    groups = 2 if make is Grouped else 4
    for far, near in zip(apart, together, strict=True):
        near = near.view(groups, -1, 8).mean(1)  # query heads that share a key head can be met on average alone
        assert far.norm() > 3
        assert near.norm() < 1e-5 * far.norm()
    torch.testing.assert_close(output_of(model.eval(), **inputs), before, rtol=1e-4, atol=1e-6)


def test_ten_updates_later_half_of_what_is_left_is_closed():
    model = offset(still_bert())
    inputs = inputs_of(model)
    alignment = shifted(model)
    with torch.no_grad():
        model.bert.encoder.layer[0].attention.self.key.bias += 1.0
    (gap, *_) = mean_gaps(model, **inputs)
    lefts = []
    for _ in range(10):
        model.train()
        output_of(model, **inputs)
        alignment.loss()
        alignment.advance()
        lefts.append(mean_gaps(model, **inputs)[0])
    torch.testing.assert_close(torch.stack(lefts[:-1]), gap.expand(9, *gap.shape), rtol=1e-4, atol=1e-5)
    torch.testing.assert_close(lefts[-1], 0.5 * gap, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize(
    "leave", ["rotary", "no bias", "frozen", "weight zero", "paper", "asked for", "extra key", "written out"]
)
def test_biases_that_are_not_free_or_not_ours_stay(leave):
    make = {"rotary": Rotated, "no bias": Grouped, "extra key": encoder_of_torch}.get(leave, still_bert)
    model = make()
    options = {"weight zero": {"weight": 0.0}, "paper": {"preset": "paper"}, "asked for": {"recentre": False}}
    if leave == "no bias":
        model.k = nn.Linear(32, 16, bias=False)
    if leave == "extra key":
        for layer in model.layers:
            layer.self_attn.bias_k, layer.self_attn.bias_v = (nn.Parameter(torch.zeros(1, 1, 32)) for _ in range(2))
    if leave == "written out":
        config = transformers.DebertaV2Config(
            **SIZES, relative_attention=True, pos_att_type=["c2p", "p2c"], hidden_dropout_prob=0.0
        )
        model = transformers.DebertaV2ForSequenceClassification(config)
    offset(model)
    if leave == "frozen":
        for layer in model.bert.encoder.layer:
            layer.attention.self.key.bias.requires_grad = False
    before = copy.deepcopy(model.state_dict())
    shifted(model, updates=2, **options.get(leave, {}))
    for name, value in model.state_dict().items():
        assert torch.equal(value, before[name]), name


def test_where_there_are_no_updates_nothing_moves():
    model = offset(still_bert()).train()
    before = copy.deepcopy(model.state_dict())
    alignment = alignattn.align(model, "mmd", add_to_outputs=False)
    for _ in range(3):
        model(**inputs_of(model))
        alignment.loss()
    for name, value in model.state_dict().items():
        assert torch.equal(value, before[name]), name


def test_updates_by_hand_are_enough_and_our_own_shift_is_none():
    model = offset(still_bert()).train()
    alignment = alignattn.align(model, "gan", add_to_outputs=False)
    inputs = inputs_of(model)
    for _ in range(3):
        model(**inputs)
        alignment.loss().backward()
        with torch.no_grad():
            for parameter in model.parameters():
                if parameter.grad is not None:
                    parameter.sub_(0.0 * parameter.grad)
        model.zero_grad()
    (gap, *_) = mean_gaps(model, **inputs)
    assert gap.norm() < 1e-3


def test_a_batch_that_is_not_finite_shifts_nothing():
    """Padded tokens may hold anything."""
    model = offset(Grouped()).train()
    alignment = alignattn.align(model, "mmd")
    recentring = alignment._terms.recentring
    before = model.k.bias.detach().clone()
    tokens = torch.full((1, 1, 4, 3, 8), float("nan"))
    recentring.blind[""] = True
    recentring.watch([""], tokens, tokens, None, None)
    recentring.close(first=True)
    assert torch.equal(model.k.bias, before)
    mask = torch.zeros(1, 1, 3, dtype=torch.bool)
    mask[..., 0] = True
    tokens[..., 0, :] = torch.arange(8.0)
    recentring.watch([""], tokens + 1, tokens, mask, mask)
    recentring.close(first=True)
    torch.testing.assert_close(model.k.bias, before + 1)


def test_layers_that_come_in_other_companies_are_each_shifted_by_their_own_mean():
    """Batches of one update may be stacked in different ways."""
    model = still_bert().train()
    recentring = alignattn.align(model, "mmd")._terms.recentring
    names = list(recentring.biases)
    recentring.blind = dict.fromkeys(names, True)
    before = [bias.parameter.detach().clone() for bias in recentring.biases.values()]
    numbers = torch.Generator().manual_seed(0)
    sides = [torch.randn(2, samples, 4, 5, 8, generator=numbers) for samples in (3, 3, 2, 2, 4, 4)]  # (l, b, h, n, d)
    recentring.watch(names, *sides[:2], None, None)
    recentring.watch(names[::-1], *sides[2:4], None, None)
    recentring.watch(names, *sides[4:], None, None)
    recentring.close(first=True)
    for layer, bias in enumerate(recentring.biases.values()):
        means = [
            torch.cat([sides[side][layer], sides[2 + side][1 - layer], sides[4 + side][layer]]).mean((0, 2)).flatten()
            for side in range(2)
        ]
        torch.testing.assert_close(bias.parameter.detach(), before[layer] + means[0] - means[1], rtol=1e-4, atol=1e-5)


def test_biases_are_shifted_together_as_one_by_one():
    owners = [nn.Linear(4, size) for size in (6, 10, 6, 6)]
    owners[2].bias.requires_grad = False
    shared = nn.Module()
    shared.bias = owners[0].bias
    biases = [
        KeyBias(owner, "bias", start, 6, None) for owner, start in zip(owners, (0, 3, 0, 0), strict=True)
    ]  # the second lies among others
    by = torch.randn(5, 6, generator=torch.Generator().manual_seed(0))
    for some in (biases, [*biases, KeyBias(shared, "bias", 0, 6, None)]):
        before = [owner.bias.detach().clone() for owner in owners]
        versions = [owner.bias._version for owner in owners]
        shift_each(some, by[: len(some)])
        twice = by[4] if len(some) == 5 else 0.0
        assert torch.equal(owners[0].bias, before[0] + by[0] + twice)
        assert torch.equal(owners[1].bias[3:9], before[1][3:9] + by[1])
        assert torch.equal(owners[1].bias[[0, 1, 2, 9]], before[1][[0, 1, 2, 9]])
        assert torch.equal(owners[2].bias, before[2])
        assert torch.equal(owners[3].bias, before[3] + by[3])
        written = [owner.bias._version > version for owner, version in zip(owners, versions, strict=True)]
        assert written == [True, True, False, True]  # as autograd and updates.py go by


def test_what_we_shift_ourselves_ends_no_update_of_several_batches():
    """Weights written by hand, every second batch: the shift that follows must not count as one more update."""
    model = offset(still_bert()).train()
    alignment = alignattn.align(model, "gan", add_to_outputs=False)
    taken = []
    for batch in range(6):
        model(**inputs_of(model, batch))
        taken.append(alignment.steps)
        alignment.loss().backward()
        if batch % 2:
            with torch.no_grad():
                for parameter in model.parameters():
                    if parameter.grad is not None:
                        parameter.sub_(0.01 * parameter.grad)
            model.zero_grad()
    assert taken == [0, 1, 1, 2, 2, 3]
