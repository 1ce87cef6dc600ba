"""Queries and keys meet by a change of coordinates, and no output of the model changes."""

import copy
import sys
from pathlib import Path

import numpy as np
import pytest
import torch
import torch.nn.functional as F
import torch.nn.utils.prune
from scipy.linalg import sqrtm
from torch import nn

from alignattn import rebase
from alignattn.capture import Tap
from alignattn.coordinates import meeting_maps
from alignattn.diagnosis.mmd import discrepancy
from alignattn.errors import NothingCapturedError

transformers = pytest.importorskip("transformers", reason="pip install 'alignattn[hf]'")
sys.path[:0] = [str(Path(__file__).parent)]

from zoo import BY_NAME  # noqa: E402

SIZES = {"hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4, "intermediate_size": 48, "vocab_size": 60}


def bert(**options):
    return transformers.BertModel(transformers.BertConfig(**SIZES | options))


def albert():
    return transformers.AlbertModel(transformers.AlbertConfig(**SIZES, embedding_size=16))


def t5():
    sizes = {"d_model": 32, "d_kv": 8, "num_heads": 4, "d_ff": 48, "num_layers": 2, "vocab_size": 60}
    return transformers.T5EncoderModel(transformers.T5Config(**sizes))


class Grouped(nn.Module):
    """Two key heads for four query heads."""

    def __init__(self):
        super().__init__()
        self.embed = nn.Embedding(60, 32)
        self.q, self.k, self.v = nn.Linear(32, 32), nn.Linear(32, 16), nn.Linear(32, 16)

    def turned(self, q, k):
        return q, k

    def forward(self, input_ids, attention_mask=None):
        tokens = self.embed(input_ids)
        q, k, v = (f(tokens).unflatten(-1, (-1, 8)).transpose(1, 2) for f in (self.q, self.k, self.v))
        q, k = self.turned(q, k)
        bias = None if attention_mask is None else attention_mask[:, None, None].bool()
        return F.scaled_dot_product_attention(q, k, v, bias, enable_gqa=True).transpose(1, 2).flatten(2)


class Rotated(Grouped):
    def turned(self, q, k):
        angle = torch.linspace(0, 3, q.shape[2], dtype=q.dtype)[:, None]
        return tuple(x * angle.cos() + x.roll(1, -1) * angle.sin() for x in (q, k))


class Scaled(Grouped):
    def turned(self, q, k):
        return q * 0.5, k


class Torch(nn.Module):
    """nn.MultiheadAttention, one weight for queries, keys and values."""

    def __init__(self, **options):
        super().__init__()
        self.embed = nn.Embedding(60, 32)
        layer = nn.TransformerEncoderLayer(32, 4, 48, dropout=0.1, batch_first=True)
        self.layers = nn.TransformerEncoder(layer, 2, enable_nested_tensor=False)
        for one in self.layers.layers:
            one.self_attn = nn.MultiheadAttention(32, 4, dropout=0.1, batch_first=True, **options)

    def forward(self, input_ids, attention_mask):
        return self.layers(self.embed(input_ids), src_key_padding_mask=attention_mask == 0)


def inputs_of(samples=40, length=30, seed=0):
    numbers = torch.Generator().manual_seed(seed)
    ids = torch.randint(0, 60, (samples, length), generator=numbers)
    mask = torch.ones_like(ids)
    mask[0, 5:] = 0
    mask[1, :] = 0
    mask[1, :2] = 1
    return {"input_ids": ids, "attention_mask": mask}


@torch.no_grad()
def apart(model, seed=1):
    """Queries and keys that lie and spread differently, as pretrained ones do."""
    numbers = torch.Generator().manual_seed(seed)
    for name, parameter in model.named_parameters():
        if any(part in name for part in ("query", "key", "in_proj", "q.", "k.")):
            noise = torch.randn(parameter.shape, generator=numbers, dtype=torch.float64).to(parameter)
            parameter.add_(noise * (0.3 if parameter.ndim == 2 else 1.0))
    return model


@torch.no_grad()
def output_of(model, inputs):
    output = model.eval()(**inputs)
    return output.last_hidden_state if hasattr(output, "last_hidden_state") else output


@torch.no_grad()
def moments_of(model, inputs):
    """Means and covariances by a loop over valid tokens: name -> [means, covariances], each of queries and keys."""
    records = {}

    def watch(record):
        mask = record.key_mask if record.key_mask is not None else torch.ones(record.key[:, 0, :, 0].shape).bool()
        rows = [(b, n) for b in range(len(mask)) for n in range(mask.shape[1]) if mask[b, n]]
        for at, side in enumerate((record.query, record.key)):
            found = torch.stack([side[b, :, n] for b, n in rows]).double()  # (tokens, h, d)
            records.setdefault(record.name, ([], []))[at].append(found)

    tap = Tap(model.eval(), watch=watch, always=True)
    model(**inputs)
    tap.remove()
    result = {}
    for name, sides in records.items():
        tokens = [torch.cat(side).transpose(0, 1).numpy() for side in sides]
        result[name] = [[x.mean(1) for x in tokens], [np.stack([np.cov(h.T, bias=True) for h in x]) for x in tokens]]
    return result


MAKERS = {"BERT": bert, "ALBERT": albert, "grouped": Grouped, "torch": Torch, "no bias": t5}


@pytest.mark.parametrize("kind", MAKERS)
def test_no_output_changes_and_both_have_one_mean_and_covariance(kind):
    model, inputs = apart(MAKERS[kind]()).double(), inputs_of()
    before = output_of(model, inputs)
    names = rebase(model, [inputs])
    assert names == list(moments_of(model, inputs))
    torch.testing.assert_close(output_of(model, inputs), before, rtol=1e-9, atol=1e-9)
    for means, covariances in moments_of(model, inputs).values():
        groups = 2 if kind == "grouped" else 4
        means = [x.reshape(groups, -1, 8).mean(1) for x in means]
        covariances = [x.reshape(groups, -1, 8, 8).mean(1) for x in covariances]
        spread = np.sqrt(np.trace(covariances[0], axis1=1, axis2=2)).max()
        if kind != "no bias":
            assert np.abs(means[0] - means[1]).max() < 1e-9 * spread
            # Few tokens are not trusted wholly: 8 directions, more than a thousand tokens.
            assert np.abs(covariances[0] - covariances[1]).max() < 0.05 * np.abs(covariances[0]).max()


def test_without_a_bias_second_moments_about_zero_meet():
    model, inputs = apart(t5()).double(), inputs_of()
    rebase(model, [inputs])
    for means, covariances in moments_of(model, inputs).values():
        about_zero = [c + m[:, :, None] * m[:, None, :] for m, c in zip(means, covariances, strict=True)]
        assert np.abs(about_zero[0] - about_zero[1]).max() < 0.05 * np.abs(about_zero[0]).max()


@pytest.mark.parametrize("kind", ["BERT", "torch"])
def test_the_distance_falls(kind):
    model, inputs = apart(MAKERS[kind]()), inputs_of()
    call = {"call": lambda model, batch: model(**batch)}
    before = sum(float(v.sum()) for v in discrepancy(model, [inputs], **call).values())
    rebase(model, [inputs])
    after = sum(float(v.sum()) for v in discrepancy(model, [inputs], **call).values())
    assert before > 1 and after < before / 4


def test_the_map_is_half_of_optimal_transport():
    """A² is the map between Gaussians that POT and textbooks have: S1^-1/2 (S1^1/2 S2 S1^1/2)^1/2 S1^-1/2."""
    numbers = np.random.default_rng(0)
    roots = numbers.normal(size=(2, 3, 5, 9))
    first, second = roots @ roots.swapaxes(-1, -2)
    forth, back = (x.numpy() for x in meeting_maps(torch.tensor(first), torch.tensor(second)))
    for a, b, s, t in zip(forth, back, first, second, strict=True):
        root = sqrtm(s)
        expected = np.linalg.inv(root) @ sqrtm(root @ t @ root) @ np.linalg.inv(root)
        np.testing.assert_allclose(a @ a, expected.real, rtol=1e-7, atol=1e-9)
        np.testing.assert_allclose(a @ s @ a, b @ t @ b, rtol=1e-7, atol=1e-9)
        np.testing.assert_allclose(a @ b, np.eye(5), atol=1e-9)
        np.testing.assert_allclose(a, a.T, atol=1e-12)


@pytest.mark.parametrize("kind", ["nothing on one side", "one direction alone", "huge", "tiny"])
def test_degenerate_covariances_give_a_map_that_can_be_inverted(kind):
    first, second = torch.eye(4, dtype=torch.float64)[None], torch.eye(4, dtype=torch.float64)[None]
    if kind == "nothing on one side":
        second = second * 0
    if kind == "one direction alone":
        second = torch.ones(1, 4, 4, dtype=torch.float64)
    if kind in ("huge", "tiny"):
        second = second * (1e12 if kind == "huge" else 1e-12)
    forth, back = meeting_maps(first, second)
    torch.testing.assert_close(forth @ back, first, rtol=1e-9, atol=1e-9)
    assert torch.linalg.eigvalsh(forth).min() >= 0.1 - 1e-9 and torch.linalg.eigvalsh(forth).max() <= 10 + 1e-9


def test_several_batches_are_one_large_one_and_padding_is_no_token():
    model = apart(bert())
    other, inputs = copy.deepcopy(model), inputs_of()
    rebase(model, [inputs])
    garbage = inputs["input_ids"].masked_fill(inputs["attention_mask"] == 0, 7)
    parts = slice(15), slice(15, 40)
    halves = [{"input_ids": garbage[part], "attention_mask": inputs["attention_mask"][part]} for part in parts]
    assert rebase(other, iter(halves))
    for (name, one), two in zip(model.state_dict().items(), other.state_dict().values(), strict=True):
        torch.testing.assert_close(one, two, rtol=1e-4, atol=1e-5, msg=name)


@pytest.mark.parametrize("kind", ["rotary", "scaled", "norm", "bf16", "shared", "extra keys", "DeBERTa-v2", "LoRA"])
def test_what_would_feel_it_is_left_alone(kind):
    inputs = inputs_of()
    if kind == "DeBERTa-v2":
        model, inputs = BY_NAME[kind].build("eager"), BY_NAME[kind].inputs()
    else:
        model = {"rotary": Rotated, "scaled": Scaled, "norm": Grouped, "extra keys": lambda: Torch(add_zero_attn=True)}
        model = apart(model.get(kind, bert)())
    if kind == "norm":
        model.q_norm = nn.LayerNorm(8)
        model.turned = lambda q, k: (model.q_norm(q), k)
    if kind == "bf16":
        model = model.bfloat16()
    if kind == "shared":
        first, second = (layer.attention.self for layer in model.encoder.layer)
        second.query.weight = first.query.weight
    if kind == "LoRA":
        peft = pytest.importorskip("peft")
        model = peft.get_peft_model(model, peft.LoraConfig(target_modules=["query"]))
    before = copy.deepcopy(model.state_dict())
    assert rebase(model, [inputs], call=lambda model, batch: model(**batch)) == []
    for name, value in model.state_dict().items():
        assert torch.equal(value, before[name]), name


class Elsewhere(Grouped):
    """Queries or keys that are used for more than their product."""

    def __init__(self, kind):
        super().__init__()
        self.kind, self.positions = kind, nn.Parameter(torch.randn(30, 8))

    def forward(self, input_ids, attention_mask=None):
        tokens = self.embed(input_ids)
        summary = self.k(tokens.mean(1)) if self.kind == "called before" else 0.0
        q, k, v = (f(tokens).unflatten(-1, (-1, 8)).transpose(1, 2) for f in (self.q, self.k, self.v))
        v = k if self.kind == "values are keys" else v
        bias = q @ self.positions.T if self.kind == "positions" else None
        output = F.scaled_dot_product_attention(q, k, v, bias, enable_gqa=True)
        output = output * q.sigmoid() if self.kind == "gate" else output
        return output.transpose(1, 2).flatten(2)[..., :16] + (summary[:, None] if self.kind == "called before" else 0)


USES = ("called before", "values are keys", "positions", "gate")


@pytest.mark.parametrize("kind", [*USES, "pruned", "one module", "hook"])
def test_what_is_used_elsewhere_too_is_noticed(kind):
    inputs = inputs_of()
    model = apart(Elsewhere(kind) if kind in USES else Grouped())
    if kind == "pruned":
        torch.nn.utils.prune.random_unstructured(model.q, "weight", 0.5)
    if kind == "one module":
        model = apart(bert())
        model.encoder.layer[1].attention.self.key = model.encoder.layer[0].attention.self.key
    if kind == "hook":
        model.q.register_forward_hook(lambda _, __, output: output + 1.0)
    before = copy.deepcopy(model.state_dict())
    assert rebase(model, [inputs if kind == "one module" else inputs["input_ids"]]) == []
    for name, value in model.state_dict().items():
        assert torch.equal(value, before[name]), name


def test_at_one_token_alone_nothing_is_told():
    model = apart(Rotated())
    assert rebase(model, [inputs_of(length=30)["input_ids"][:, :1]]) == []


def test_a_cap_on_logits_feels_a_shift_and_is_left_alone():
    model, inputs = apart(bert(attn_implementation="eager")), inputs_of()
    for layer in model.encoder.layer:
        function = layer.attention.self.forward

        def capped(*args, function=function, **kwargs):
            return function(*args, **kwargs, softcap=50.0)

        layer.attention.self.forward = capped
    assert rebase(model, [inputs]) == []


def test_frozen_parameters_and_modes_are_no_matter():
    model, inputs = apart(bert()).double(), inputs_of()
    before = output_of(model, inputs)
    model.requires_grad_(False)
    model.train()
    model.encoder.layer[0].eval()
    assert len(rebase(model, [inputs])) == 2
    assert model.training and not model.encoder.layer[0].training and model.encoder.layer[1].training
    assert not any(parameter.requires_grad for parameter in model.parameters())
    for means, _ in moments_of(model, inputs).values():
        np.testing.assert_allclose(*means, atol=1e-9)
    torch.testing.assert_close(output_of(model, inputs), before, rtol=1e-9, atol=1e-9)


def test_layers_choose_and_batches_of_other_kinds_are_fed():
    model, inputs = apart(bert()), inputs_of()
    assert rebase(model, [inputs], layers=1) == ["encoder.layer.1.attention.self"]
    other = apart(Grouped())
    assert rebase(other, [(inputs["input_ids"],)]) == [""]
    assert rebase(other, [inputs["input_ids"]]) == [""]


def test_nothing_to_tell_from_is_an_error():
    with pytest.raises(NothingCapturedError, match="no batches"):
        rebase(bert(), [])


# How many attention modules of each are changed: Whisper scales its queries behind their projection.
FREE = {"BERT": 2, "RoBERTa": 2, "ELECTRA": 2, "ALBERT": 1, "DistilBERT": 2, "ViT": 2, "T5": 6, "BART": 6, "CLIP": 4}


@pytest.mark.parametrize(("name", "modules"), [*FREE.items(), ("Whisper", 0), ("Llama", 0)])
def test_families_do_not_feel_it(name, modules):
    family = BY_NAME[name]
    model = apart(family.build(family.implementations[0])).double().eval()
    inputs = {k: v.double() if v.is_floating_point() else v for k, v in family.inputs().items()}
    with torch.no_grad():
        before = model(**inputs)
        assert len(rebase(model, [inputs])) == modules
        after = model(**inputs)
    for key, value in before.items():
        if isinstance(value, torch.Tensor) and value.is_floating_point():
            torch.testing.assert_close(after[key], value, rtol=1e-7, atol=1e-8, msg=key)
