"""stream="layer": the losses and gradients of matching all layers together, and nothing of a layer kept."""

import copy
import functools
import weakref

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.checkpoint import checkpoint, create_selective_checkpoint_contexts

import alignattn
from alignattn import balance
from alignattn.bench.memory import peak
from alignattn.capture import Tap
from alignattn.errors import CaptureError, ConfigError
from alignattn.matching.discrepancy import DiscrepancyConfig, DiscrepancyMatcher
from alignattn.matching.matcher import Matcher, MatcherConfig
from model_facts import tensors_of
from zoo import BY_NAME

transformers = pytest.importorskip("transformers", reason="pip install 'alignattn[hf]'")

METHODS = ["gan", "ot", "ct", "mmd"]
SIZES = {"hidden_size": 32, "num_hidden_layers": 4, "num_attention_heads": 4, "intermediate_size": 48, "vocab_size": 60}
STILL = {"hidden_dropout_prob": 0.0, "attention_probs_dropout_prob": 0.0}
CLOSE = {torch.float32: {"rtol": 1e-5, "atol": 1e-7}, torch.float64: {"rtol": 1e-10, "atol": 1e-14}}
both_ways = pytest.mark.parametrize("checkpointed", [False, True], ids=["plain", "checkpointed"])


def bert(**changes):
    config = transformers.BertConfig(**(SIZES | STILL | changes))
    return transformers.BertForSequenceClassification(config)


def llama():
    return transformers.LlamaForCausalLM(transformers.LlamaConfig(**SIZES, num_key_value_heads=2, use_cache=False))


def deberta():
    config = transformers.DebertaV2Config(**SIZES, **STILL, relative_attention=True, pos_att_type=["p2c", "c2p"])
    return transformers.DebertaV2ForSequenceClassification(config)


class Attention(nn.Module):
    """By scaled_dot_product_attention, or told by hand to an Alignment of its own."""

    def __init__(self):
        super().__init__()
        self.q, self.k, self.v = (nn.Linear(32, 32) for _ in range(3))
        self.alignment = None  # in a list, so that it is no part of the model

    def forward(self, tokens):
        q, k, v = (part(tokens).unflatten(-1, (4, 8)).transpose(1, 2) for part in (self.q, self.k, self.v))
        if self.alignment is not None:
            self.alignment[0].record(q, k, name=self.alignment[1])
        return tokens + F.scaled_dot_product_attention(q, k, v).transpose(1, 2).flatten(2)


class Layers(nn.Module):
    """Layers one behind the other, checkpointed or not."""

    def __init__(self, make, count=4):
        super().__init__()
        self.layers = nn.ModuleList(make() for _ in range(count))
        self.checkpointed = False
        self.how = {}

    def forward(self, tokens):
        for layer in self.layers:
            tokens = checkpoint(layer, tokens, use_reentrant=False, **self.how) if self.checkpointed else layer(tokens)
        return tokens

    def gradient_checkpointing_enable(self, **_):
        self.checkpointed = True


def encoder_layer():
    return nn.TransformerEncoderLayer(32, 4, 48, dropout=0.0, batch_first=True)


def sentences(samples=4, length=9):
    ids = torch.randint(0, 60, (samples, length), generator=torch.Generator().manual_seed(1))
    mask = torch.ones_like(ids)
    mask[0, 4:] = 0
    return {"input_ids": ids, "attention_mask": mask, "labels": torch.arange(samples) % 2}


def tokens(dtype=torch.float32):
    return torch.randn(4, 8, 32, generator=torch.Generator().manual_seed(1), dtype=dtype)


def task(model, batch):
    return model(**batch).loss if isinstance(batch, dict) else model(batch).square().mean()


def trained(model, batches, method, *, checkpointed=False, updates=1, factor=1.0, rate=0.1, **options):
    """Some updates of a copy: the losses, the last gradients, the weights, and what the logs and the heads say."""
    model = copy.deepcopy(model).train()
    if checkpointed:
        model.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": False})
    alignment = alignattn.align(model, method, **options)
    optimizer = torch.optim.SGD(model.parameters(), lr=rate)
    losses, gradients = [], []
    for _ in range(updates):
        for batch in batches:
            loss = task(model, batch)
            loss = loss if alignment._added_to_outputs else loss + alignment.loss()
            (loss * factor).backward()
            losses.append(loss.detach())
        gradients = [p.grad.clone() for p in model.parameters() if p.grad is not None]
        of_networks = {n: p.grad.clone() for n, p in alignment.matcher.named_parameters() if p.grad is not None}
        optimizer.step()
        optimizer.zero_grad()
    told = alignment.meter.read() | {
        f"{name} {head}": float(value)
        for name, heads in alignment._strength.distances.state_dict().items()
        for head, value in enumerate(heads)
    }
    alignment.detach()
    return losses, gradients, of_networks, [p.detach() for p in model.parameters()], told


def same(one, other, **close):
    close = close or CLOSE[torch.float32]
    for mine, theirs in zip(one[:-1], other[:-1], strict=True):
        torch.testing.assert_close(mine, theirs, **close)
    assert one[-1] == pytest.approx(other[-1], rel=1e-4, abs=1e-6, nan_ok=True)


def of_each_layer(alignment):
    """The gradients of the networks of each layer, however they lie in banks."""
    gradients = {name: parameter.grad for name, parameter in alignment.matcher.named_parameters()}
    rows = sorted(alignment.matcher.rows.items())
    return [g[row] for _, (bank, row) in rows for n, g in gradients.items() if n.startswith(f"banks.{bank}.")]


# --- the same numbers ------------------------------------------------------------------------------------------------


@both_ways
@pytest.mark.parametrize("generator", ["model", "projections"])
@pytest.mark.parametrize("method", METHODS)
def test_losses_gradients_and_logs_of_bert_are_those_of_all_layers_together(method, generator, checkpointed):
    model, batches = bert(), [sentences()]
    options = {"weight": 0.5, "generator": generator, "factor": 1024.0}
    together = trained(model, batches, method, **options)
    streamed = trained(model, batches, method, checkpointed=checkpointed, stream="layer", **options)
    same(streamed, together, rtol=1e-5, atol=1e-4)  # of gradients a thousand times as large
    soft = trained(model, batches, method, **(options | {"weight": 0.0}))
    assert max(float((a - b).abs().max()) for a, b in zip(streamed[1], soft[1], strict=True)) > 1.0
    assert {"alignment_share", "alignment_mmd"} <= streamed[-1].keys()


@both_ways
@pytest.mark.parametrize("method", METHODS)
@pytest.mark.parametrize("reduction", ["mean", "sum"])
def test_gradients_of_an_attention_of_ones_own_are_the_same_to_ten_digits(method, reduction, checkpointed):
    """Two passes into one loss, averaged over; in double precision."""
    found = []
    for stream in (None, "layer"):
        torch.manual_seed(0)
        model = Layers(Attention).double()
        model.checkpointed = checkpointed
        alignment = alignattn.Alignment(method, weight=0.5, reduction=reduction, stream=stream)
        for place, layer in enumerate(model.layers):
            layer.alignment = [alignment, f"layer {place}"]
        x = tokens(torch.float64)
        outputs = [model(x), model(x * 2 + 1)]
        term = alignment.loss()
        (torch.stack(outputs).square().mean() + 3 * term).backward()
        found.append((term.detach(), [p.grad for p in model.parameters()], of_each_layer(alignment), alignment.parts))
    for mine, theirs in zip(*found, strict=True):
        close = CLOSE[torch.float64] if mine is not found[0][2] else CLOSE[torch.float32]
        torch.testing.assert_close(mine, theirs, **close)


@both_ways
@pytest.mark.parametrize("generator", ["model", "projections"])
@pytest.mark.parametrize("make", [lambda: Layers(Attention), lambda: Layers(encoder_layer), deberta, llama])
def test_every_way_to_reach_attention_streams(make, generator, checkpointed):
    torch.manual_seed(0)
    model = make()
    batch = tokens() if isinstance(model, Layers) else sentences()
    if isinstance(model, transformers.LlamaForCausalLM):
        batch |= {"labels": batch["input_ids"]}
    options = {"weight": 0.5, "generator": generator}
    together = trained(model, [batch], "mmd", **options)
    same(trained(model, [batch], "mmd", checkpointed=checkpointed, stream="layer", **options), together)


@both_ways
@pytest.mark.parametrize("name", ["SEW-D", "ALBERT", "T5"])
def test_families_with_ways_of_their_own(name, checkpointed):
    """A softmax that is an autograd function; one module that is called for every layer; cross-attention."""
    found = []
    for stream in (None, "layer"):
        model = BY_NAME[name].build().train()
        for dropout in (module for module in model.modules() if isinstance(module, nn.Dropout)):
            dropout.p = 0.0
        if checkpointed:
            if not model.supports_gradient_checkpointing:
                pytest.skip(f"{name} refuses checkpointing")
            model.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": False})
        options = {"add_to_outputs": False, "cross": True, "stream": stream}
        alignment = alignattn.align(model, "mmd", weight=1.0, **options)
        output = next(t for t in tensors_of(model(**BY_NAME[name].inputs())) if t.requires_grad)
        term = alignment.loss()
        (output.square().mean() + term).backward()
        found.append((term.detach(), [p.grad for p in model.parameters() if p.grad is not None], alignment.parts))
        alignment.detach()
    torch.testing.assert_close(*found)


@both_ways
@pytest.mark.parametrize("method", ["ct", "mmd"])
def test_a_course_of_training_with_everything_that_looks_on_the_way(method, checkpointed, monkeypatch):
    """The weight that auto chooses, heads that are left alone, keys that are recentred, two batches an update."""
    monkeypatch.setattr(balance, "EVERY", 2)
    model, batches = bert(), [sentences(), sentences(length=6)]
    together = trained(model, batches, method, updates=5)
    streamed = trained(model, batches, method, checkpointed=checkpointed, updates=5, stream="layer")
    same(streamed, together, rtol=1e-3, atol=1e-5)
    assert streamed[-1]["alignment_weight"] > 0


@both_ways
def test_at_the_weights_of_multihead_attention_auto_sees_the_same_share(checkpointed, monkeypatch):
    monkeypatch.setattr(balance, "EVERY", 1)
    model = Layers(encoder_layer)
    together = trained(model, [tokens()], "mmd", updates=3, rate=0.01)
    streamed = trained(model, [tokens()], "mmd", checkpointed=checkpointed, updates=3, rate=0.01, stream="layer")
    same(streamed, together, rtol=1e-3, atol=1e-5)
    assert streamed[-1]["alignment_share"] > 0


@both_ways
@pytest.mark.parametrize("max_tokens", [None, 3])
def test_packed_rows_samples_that_count_by_labels_and_tokens_that_are_drawn(max_tokens, checkpointed):
    model = llama()
    ids = sentences()["input_ids"]
    positions = torch.tensor([0, 1, 2, 3, 0, 1, 2, 3, 4]).expand(4, 9)
    labels = ids.clone()
    labels[2, :5] = -100
    batch = {"input_ids": ids, "position_ids": positions, "labels": labels, "num_items_in_batch": torch.tensor(50)}
    options = {"weight": 0.5, "max_tokens": max_tokens}
    together = trained(model, [batch, batch], "mmd", checkpointed=checkpointed, **options)
    same(trained(model, [batch, batch], "mmd", checkpointed=checkpointed, stream="layer", **options), together)
    if max_tokens:
        same(trained(model, [batch, batch], "mmd", **options), together)


def test_half_precision_with_the_factor_of_a_scaler():
    found = []
    for stream in (None, "layer"):
        numbers = torch.Generator().manual_seed(0)
        query, key = (torch.randn(2, 3, 9, 4, generator=numbers).half().requires_grad_() for _ in range(2))
        alignment = alignattn.Alignment("mmd", weight=1e-4, stream=stream)
        alignment.record(query, key)
        (alignment.loss() * 2.0**16).backward()
        found.append((query.grad, key.grad))
    torch.testing.assert_close(found[1], found[0], rtol=2e-3, atol=1e-4)
    assert float(found[1][0].abs().max()) > 0.01


def test_the_term_can_go_back_twice_and_alone():
    model = bert().train()
    model.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": False})
    alignment = alignattn.align(model, "mmd", weight=1.0, add_to_outputs=False, stream="layer")
    model(**sentences())
    term = alignment.loss()
    weight = model.bert.encoder.layer[0].attention.self.query.weight
    (once,) = torch.autograd.grad(term, weight, retain_graph=True)
    term.backward()
    torch.testing.assert_close(weight.grad, once)


def test_weight_zero_leaves_no_trace():
    model, batches = bert(), [sentences()]
    streamed = trained(model, batches, "gan", weight=0.0, stream="layer")
    plain = copy.deepcopy(model).train()
    plain(**batches[0]).loss.backward()
    for mine, theirs in zip(streamed[1], [p.grad for p in plain.parameters() if p.grad is not None], strict=True):
        assert torch.equal(mine, theirs)
    assert streamed[2]  # and the networks learn all the same


def test_a_state_goes_from_one_to_the_other(tmp_path):
    model, batch = bert().train(), sentences()
    alignment = alignattn.align(model, "ct", weight=0.5, stream="layer")
    model(**batch).loss.backward()
    alignment.save(tmp_path)
    alignment.detach()
    again = alignattn.Alignment.load(model, tmp_path)
    assert again.config.stream == "layer"
    again.detach()
    together = alignattn.align(model, "ct", weight=0.5)
    together.restore(tmp_path)
    for mine, theirs in zip(together.parameters(), alignment.parameters(), strict=True):
        torch.testing.assert_close(mine, theirs)


# --- nothing is kept -------------------------------------------------------------------------------------------------


def kept_after_forward(stream, *, checkpointed):
    """How many queries and keys are alive between forward and backward, and how many gradients of their size."""
    model = bert().train()
    if checkpointed:
        model.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": False})
    alignment = alignattn.align(model, "mmd", weight=0.5, stream=stream)
    seen, watch = [], alignment._tap._watch

    def remember(record):
        seen.extend(weakref.ref(side) for side in (record.query, record.key))
        watch(record)

    alignment._tap._watch = remember
    loss = model(**sentences()).loss
    saved = loss.grad_fn.next_functions[-1][0]
    gradients = getattr(saved, "saved_tensors", ())
    return sum(side() is not None for side in seen), sum(gradient.ndim >= 4 for gradient in gradients)


def test_under_checkpointing_nothing_of_a_layer_outlives_its_forward():
    assert kept_after_forward("layer", checkpointed=True) == (0, 0)
    assert kept_after_forward(None, checkpointed=True)[1] == 2 * SIZES["num_hidden_layers"]


def growth(make, stream, *, checkpointed, align=True):
    """By how much the most memory of a step grows with each layer, in queries and keys of one."""
    most = []
    for layers in (6, 14):
        model = make(layers).train()
        if checkpointed:
            model.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": False})
        batch = {"input_ids": torch.randint(0, 60, (16, 64)), "labels": torch.arange(16) % 2}
        batch = torch.randn(16, 64, 32) if isinstance(model, Layers) else batch
        alignment = alignattn.align(model, "mmd", weight=0.5, stream=stream, recentre=False) if align else None
        if alignment is not None:
            alignment._strength.set_clock(1)  # not an update that is looked at

        def step(model=model, batch=batch, alignment=alignment):
            loss = task(model, batch)
            with_term = alignment is not None and not alignment._added_to_outputs
            (loss + alignment.loss() if with_term else loss).backward()

        most.append(peak(step, torch.device("cpu")))
    return (most[1] - most[0]) / 8 / (2 * 16 * 64 * 32 * 4)


@both_ways
@pytest.mark.parametrize(
    "make", [lambda n: bert(num_hidden_layers=n), lambda n: Layers(encoder_layer, n)], ids=["bert", "multihead"]
)
def test_memory_does_not_grow_with_the_layers_that_are_matched(make, checkpointed, request):
    soft = growth(make, None, checkpointed=checkpointed, align=False)
    # Otherwise gradients wait for the backward. Where queries and keys are computed again, they have taken their place.
    without = growth(make, None, checkpointed=checkpointed) - soft
    assert without > 0.9
    if checkpointed:
        assert without < 1.1
    # nn.MultiheadAttention copies its input for itself, and ours is then kept beside it, half of queries and keys.
    allowed = 0.55 if "multihead" in request.node.name and not checkpointed else 0.05
    assert growth(make, "layer", checkpointed=checkpointed) - soft < allowed


# --- nothing is lost, or disturbed -----------------------------------------------------------------------------------


def test_a_term_that_nobody_used_changes_nothing_and_is_told():
    model = Layers(Attention).train()
    plain = copy.deepcopy(model)
    alignattn.align(model, "mmd", weight=5.0, stream="layer")
    for one in (model, plain):
        one(tokens()).square().mean().backward()
    for mine, theirs in zip(model.parameters(), plain.parameters(), strict=True):
        assert torch.equal(mine.grad, theirs.grad)
    with pytest.raises(CaptureError, match="never used"):
        model(tokens())


@pytest.mark.parametrize("make", [Attention, encoder_layer])
def test_layers_that_are_checkpointed_and_were_not_recorded_are_left_alone(make):
    """Part of the model is called by itself: a checkpoint must find what it found before."""
    model = Layers(make).train()
    model.checkpointed = True
    alignment = alignattn.align(model, "mmd", weight=0.5, stream="layer")
    (model(tokens()).square().mean() + alignment.loss()).backward()
    checkpoint(model.layers[0], tokens().requires_grad_(), use_reentrant=False).sum().backward()


class Slope(Matcher):
    """One that differentiates within itself."""

    separable = True

    def losses(self, query, key, query_mask, key_mask, names):
        query, key = (side.flatten(0, 1) for side in (query, key))
        with torch.enable_grad():
            at = query.detach().requires_grad_()
            (slope,) = torch.autograd.grad(at.pow(3).sum(), at)
        return ((query - key).square() + query * slope).mean((2, 3))


def test_a_checkpoint_does_not_see_what_happens_inside_a_matching():
    model = Layers(Attention)
    together = trained(model, [tokens()], Slope(MatcherConfig()))
    same(trained(model, [tokens()], Slope(MatcherConfig()), checkpointed=True, stream="layer"), together)


@pytest.mark.parametrize("method", METHODS)
def test_a_selective_checkpoint_keeps_no_results_of_a_matching_for_those_of_the_layer(method):
    """It keeps what some operators put out, by their order: a matching calls the same ones."""
    operators = [torch.ops.aten.mm.default, torch.ops.aten.addmm.default, torch.ops.aten.bmm.default]
    operators += [torch.ops.aten.baddbmm.default, torch.ops.aten.clone.default, torch.ops.aten.new_zeros.default]
    operators += [torch.ops.aten.mul.Tensor, torch.ops.aten.sum.dim_IntList]
    model = Layers(Attention)
    together = trained(model, [tokens()], method, weight=0.5)
    model.how = {"context_fn": functools.partial(create_selective_checkpoint_contexts, operators)}
    streamed = trained(model, [tokens()], method, weight=0.5, checkpointed=True, stream="layer")
    torch.testing.assert_close(streamed[1], together[1], **CLOSE[torch.float32])


def test_another_tap_does_not_see_what_happens_inside_a_matching():
    """CT calls attention itself."""
    model, seen = Layers(Attention).train(), []
    tap = Tap(model, watch=seen.append)
    alignment = alignattn.align(model, "ct", weight=0.5, stream="layer")
    model(tokens())
    assert len(seen) == len(alignment._passes.waiting[0].records) == 4
    alignment.detach()
    tap.remove()


def test_the_whole_model_in_a_checkpoint():
    found = []
    for stream in (None, "layer"):
        torch.manual_seed(0)
        model = bert().train()
        alignment = alignattn.align(model, "mmd", weight=0.5, stream=stream)
        batch = sentences()
        labels = batch.pop("labels")
        logits = checkpoint(lambda model=model, batch=batch: model(**batch).logits, use_reentrant=False)
        (F.cross_entropy(logits, labels) + alignment.loss()).backward()
        found.append([p.grad for p in model.parameters()])
    torch.testing.assert_close(*found, **CLOSE[torch.float32])


def test_a_forward_that_fails_is_no_part_of_the_next_loss():
    model = Layers(Attention).train()
    alignment = alignattn.align(model, "mmd", weight=0.5, stream="layer")
    last, model.layers[-1] = model.layers[-1], nn.Linear(1, 1)
    with pytest.raises(RuntimeError):
        model(tokens())
    model.layers[-1] = last
    model(tokens())
    alignment.loss()
    assert len(alignment.parts) == 4


@pytest.mark.parametrize(
    ("options", "message"),
    [({"stream": "token"}, "stream"), ({"stream": "layer", "every": 2}, r"every draws.*max_tokens")],
)
def test_what_cannot_be_is_refused(options, message):
    with pytest.raises(ConfigError, match=message):
        alignattn.Alignment("mmd", **options)


def test_a_matcher_that_does_not_say_that_layers_are_apart_is_refused():
    class Mine(DiscrepancyMatcher):
        def losses(self, *args):
            return super().losses(*args)

    with pytest.raises(ConfigError, match=r"Mine does not say.*separable = True"):
        alignattn.Alignment(Mine(DiscrepancyConfig()), stream="layer")


@pytest.mark.parametrize("part", [False, True])
def test_compiled_code_is_refused(part):
    model = bert().train()
    alignattn.align(model, "mmd", weight=0.5, stream="layer")
    called = model
    if part:
        model.bert.encoder.layer[1].compile(backend="eager")
    else:
        called = torch.compile(model, backend="eager")
    with pytest.raises(ConfigError, match=r"Leave it out with torch\.compile"):
        called(**sentences())
    torch.compiler.reset()


def test_unset_it_leaves_no_trace_in_a_result_file():
    assert "stream" not in alignattn.Alignment("mmd").config.acting()
    assert alignattn.Alignment("mmd", stream="layer").config.acting()["stream"] == "layer"
