"""torch.compile: the losses of the plain model, no graph break (`fullgraph=True` would raise), nothing compiled twice.

Backend aot_eager traces forward and backward as inductor does, and needs no C++ compiler. test_compile.py runs this
file.
"""

import copy
import gc

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import alignattn
from alignattn import functional
from alignattn.capture.compiled import CompiledHooks
from alignattn.errors import AlignmentWarning, CaptureError, NonFiniteError
from alignattn.terms import Terms
from alignattn.weights import Ramp
from test_replay import Recorder

dynamo = pytest.importorskip("torch._dynamo.testing")
transformers = pytest.importorskip("transformers", reason="pip install 'alignattn[hf]'")

LENGTHS = (10, 10, 10, 10, 10)
SIZES = {"hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4, "intermediate_size": 48, "vocab_size": 60}


@pytest.fixture(autouse=True)
def _fresh():
    torch.compiler.reset()
    yield
    torch.compiler.reset()


def bert():
    still = {"hidden_dropout_prob": 0.0, "attention_probs_dropout_prob": 0.0}
    config = transformers.BertConfig(**SIZES, **still, problem_type="single_label_classification")
    return transformers.BertForSequenceClassification(config)


def llama():
    return transformers.LlamaForCausalLM(transformers.LlamaConfig(**SIZES, num_key_value_heads=2))


class Plain(nn.Module):
    """Attention of one's own by scaled_dot_product_attention."""

    def __init__(self):
        super().__init__()
        self.embed, self.out = nn.Embedding(60, 32), nn.Linear(32, 2)
        self.q, self.k, self.v = (nn.Linear(32, 32) for _ in range(3))

    def forward(self, ids):
        tokens = self.embed(ids)
        q, k, v = (f(tokens).unflatten(-1, (4, 8)).transpose(1, 2) for f in (self.q, self.k, self.v))
        return self.out(F.scaled_dot_product_attention(q, k, v).transpose(1, 2).flatten(2).mean(1))


class Encoder(nn.Module):
    def __init__(self):
        super().__init__()
        layer = nn.TransformerEncoderLayer(32, 4, 48, dropout=0.0, batch_first=True)
        self.embed, self.out = nn.Embedding(60, 32), nn.Linear(32, 2)
        self.layers = nn.TransformerEncoder(layer, 2, enable_nested_tensor=False)

    def forward(self, ids):
        return self.out(self.layers(self.embed(ids)).mean(1))


def train(
    make, method, *, lengths=LENGTHS, compile_model=None, compile_step=None, counter=None, recorder=None, **options
):
    """Losses of each step, and the alignment, with a weight that changes every step. Frames compiled go to `frames`."""
    torch.manual_seed(0)
    model = make().train()
    options = {"weight": Ramp(1.0, 4)} | options
    alignment = alignattn.align(model, method, **options)
    alignment.objective.recorder = recorder
    called = model if compile_model is None else compile_model(model)
    of_transformers = isinstance(model, transformers.PreTrainedModel)

    def loss_of(ids, mask, labels):
        if of_transformers:
            return called(input_ids=ids, attention_mask=mask, labels=ids if make is llama else labels).loss
        return F.cross_entropy(called(ids), labels) + alignment.loss()

    step = loss_of if compile_step is None else compile_step(loss_of)
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    numbers = torch.Generator().manual_seed(1)
    losses = []
    for length in lengths:
        ids = torch.randint(0, 60, (4, length), generator=numbers)
        mask = torch.ones_like(ids)
        mask[0, length // 2 :] = 0
        optimizer.zero_grad()
        loss = step(ids, mask, torch.arange(4) % 2)
        loss.backward()
        optimizer.step()
        losses.append(loss.detach())
        if counter is not None:
            counter.frames.append(counter.frame_count)
    return torch.stack(losses), alignment


def without_share(logs):
    """The task's gradients cannot be seen in compiled code."""
    return {name: value for name, value in logs.items() if name != "alignment_share"}


def counting():
    counter = dynamo.CompileCounterWithBackend("aot_eager")
    counter.frames = []  # after each step
    return counter, lambda function: torch.compile(function, backend=counter, fullgraph=True)


@pytest.mark.parametrize(
    ("method", "whole_step"),
    [("gan", False), ("ot", False), ("ct", False), ("mmd", False), ("gan", True), ("mmd", True)],
)
def test_compiled_training_is_plain_training_while_the_weight_changes(method, whole_step):
    expected, plain = train(bert, method)
    counter, compiled = counting()
    how = {"compile_step" if whole_step else "compile_model": compiled}
    losses, alignment = train(bert, method, counter=counter, **how)
    torch.testing.assert_close(losses, expected)
    assert counter.frames == [counter.frames[0]] * len(LENGTHS)
    logged, told = (without_share(one.meter.read()) for one in (plain, alignment))
    assert told.keys() == logged.keys() and told == pytest.approx(logged, rel=1e-4, abs=1e-6)
    assert told["alignment_weight"] == pytest.approx((0 + 0.25 + 0.5 + 0.75 + 1) / 5)
    for mine, theirs in zip(alignment.parameters(), plain.parameters(), strict=True):
        torch.testing.assert_close(mine, theirs, rtol=1e-4, atol=1e-5)
    assert alignment.steps == plain.steps == len(LENGTHS)


@pytest.mark.parametrize(
    ("make", "method", "whole_step"),
    [(llama, "gan", False), (Plain, "gan", False), (Plain, "mmd", True), (Encoder, "gan", True)],
)
def test_other_kinds_of_attention_compile_whole(make, method, whole_step):
    expected, _ = train(make, method, lengths=LENGTHS[:3])
    _, compiled = counting()
    how = {"compile_step" if whole_step else "compile_model": compiled}
    losses, _ = train(make, method, lengths=LENGTHS[:3], **how)
    torch.testing.assert_close(losses, expected)


def test_auto_stays_at_its_first_weight_and_says_so():
    expected, _ = train(bert, "ct", weight=0.15)
    _, compiled = counting()
    with pytest.warns(AlignmentWarning, match=r"sees no gradients in compiled code, .* first weight, 0\.15"):
        losses, alignment = train(bert, "ct", weight=None, compile_model=compiled)
    torch.testing.assert_close(losses, expected)
    assert alignment.meter.read()["alignment_weight"] == pytest.approx(0.15)


def test_networks_that_must_be_made_in_the_first_pass_break_it_alone():
    """An attention of one's own does not say how wide its heads are."""
    expected, _ = train(Plain, "gan")
    counter = dynamo.CompileCounterWithBackend("aot_eager")
    counter.frames = []
    losses, _ = train(
        Plain, "gan", counter=counter, compile_step=lambda function: torch.compile(function, backend=counter)
    )
    torch.testing.assert_close(losses, expected)
    assert counter.frames[-1] == counter.frames[-2]


@pytest.mark.parametrize("method", ["ct", "mmd"])
def test_one_compilation_serves_all_lengths(method):
    lengths = (10, 12, 9, 14, 11, 8, 13)
    expected, _ = train(bert, method, lengths=lengths)
    counter, compiled = counting()
    losses, _ = train(bert, method, lengths=lengths, compile_step=compiled, counter=counter)
    torch.testing.assert_close(losses, expected)
    assert counter.frames[1:] == [counter.frames[1]] * (len(lengths) - 1)


@pytest.mark.parametrize("use_cache", [False, True])
def test_packed_rows_are_unpacked_where_their_documents_can_be_counted(use_cache):
    """With a cache transformers takes a row for one document, whatever its positions."""
    ids = torch.randint(0, 60, (2, 12), generator=torch.Generator().manual_seed(0))
    positions = torch.tensor([[*range(5), *range(7)], [*range(9), *range(3)]])

    def losses(compiled):
        torch.manual_seed(0)
        model = llama().train()
        alignment = alignattn.align(model, "mmd", weight=1.0)
        called = torch.compile(model, backend="aot_eager", fullgraph=True) if compiled else model
        inputs = {"input_ids": ids, "position_ids": positions, "labels": ids, "use_cache": use_cache}
        return [called(**inputs).loss.detach() for _ in range(2)], alignment

    (expected, plain), (told, alignment) = losses(False), losses(True)
    torch.testing.assert_close(told, expected)
    logged = plain.meter.read()
    del logged["alignment_mmd"]  # nothing was updated: compiled code does not ask whether something was
    assert alignment.meter.read() == pytest.approx(logged, rel=1e-4, abs=1e-6)


@pytest.mark.parametrize("name", ["mmd", "ot", "unrolled ot", "ct", "gan"])
def test_the_functions_stand_in_compiled_code_of_ones_own(name):
    generator = torch.Generator().manual_seed(0)
    sides = [torch.randn(2, 3, 7, 5, generator=generator) for _ in range(4)]
    calls = {
        "mmd": lambda q, k, *_: functional.mmd(q, k),
        "ot": lambda q, k, *_: functional.optimal_transport(q, k).cost,
        "unrolled ot": lambda q, k, *_: functional.optimal_transport(q, k, gradient="unrolled", max_iterations=4).cost,
        "ct": functional.conditional_transport,
        "gan": lambda q, k, *_: functional.adversarial(q[..., :1], k[..., :1]),
    }

    def gradients(function):
        leaves = [side.clone().requires_grad_() for side in sides]
        losses = function(*leaves)
        return losses.detach(), *torch.autograd.grad(losses.sum(), leaves, allow_unused=True)

    torch.testing.assert_close(gradients(counting()[1](calls[name])), gradients(calls[name]))


def test_unrolled_sinkhorn_compiles():
    options = {"gradient": "unrolled", "max_iterations": 4, "tolerance": 0.5}
    expected, _ = train(Plain, "ot", lengths=(6, 6), weight=0.5, **options)
    _, compiled = counting()
    losses, _ = train(Plain, "ot", lengths=(6, 6), weight=0.5, compile_step=compiled, **options)
    torch.testing.assert_close(losses, expected)


def test_a_weight_of_one_number_is_the_same_in_compiled_code():
    expected, _ = train(bert, "mmd", weight=0.3)
    _, compiled = counting()
    losses, alignment = train(bert, "mmd", weight=0.3, compile_model=compiled)
    torch.testing.assert_close(losses, expected)
    assert alignment.meter.read()["alignment_weight"] == pytest.approx(0.3)


@pytest.mark.parametrize("method", ["gan", "mmd"])
def test_matchings_are_recorded_and_replayed_within_compiled_code(method):
    lengths = (10,) * 9
    expected, plain = train(bert, method, lengths=lengths)
    recorder = Recorder()
    counter, compiled = counting()
    losses, alignment = train(bert, method, lengths=lengths, compile_model=compiled, counter=counter, recorder=recorder)
    assert recorder.played >= 4 and counter.frames == [counter.frames[0]] * len(lengths)
    torch.testing.assert_close(losses, expected)
    for mine, theirs in zip(alignment.parameters(), plain.parameters(), strict=True):
        torch.testing.assert_close(mine, theirs, rtol=1e-4, atol=1e-5)


def test_heads_that_have_met_are_left_alone():
    """In the second layer: with the same projection for queries and keys nothing tells one from the other."""

    def met():
        model = bert()
        own = model.bert.encoder.layer[1].attention.self
        own.key.load_state_dict(own.query.state_dict())
        return model

    expected, plain = train(met, "mmd", weight=3.0)
    acting = plain._strength.distances.acting(["bert.encoder.layer.1.attention.self"], 4, torch.device("cpu"))
    assert not acting.any()
    losses, alignment = train(met, "mmd", weight=3.0, compile_model=counting()[1])
    torch.testing.assert_close(losses, expected)
    told = alignment._strength.distances.acting(["bert.encoder.layer.1.attention.self"], 4, torch.device("cpu"))
    torch.testing.assert_close(told, acting)


def test_tokens_are_drawn_anew_in_each_step():
    expected, _ = train(bert, "mmd", weight=1.0, max_tokens=4)
    counter, compiled = counting()
    losses, _ = train(bert, "mmd", weight=1.0, max_tokens=4, compile_model=compiled, counter=counter)
    torch.testing.assert_close(losses, expected)
    assert counter.frames == [counter.frames[0]] * len(LENGTHS)
    whole, _ = train(bert, "mmd", weight=1.0)
    assert not torch.allclose(whole, expected, atol=1e-4)


def test_a_part_of_the_layers_is_matched_outside_of_compiled_code():
    expected, plain = train(bert, "mmd", weight=1.0, every=2)
    losses, alignment = train(
        bert, "mmd", weight=1.0, every=2, compile_model=lambda model: torch.compile(model, backend="aot_eager")
    )
    torch.testing.assert_close(losses, expected)
    assert without_share(alignment.meter.read()) == pytest.approx(without_share(plain.meter.read()), rel=1e-4)


def test_gradients_of_half_precision_do_not_vanish():
    """Of large tokens each gets less than fp16 can hold, without a weight too; a scaler's factor comes behind that."""
    generator = torch.Generator().manual_seed(0)
    query, key = (1000 * (torch.randn(8, 4, 64, 8, generator=generator) + shift) for shift in (0.0, 1.0))
    factor = 2.0**14

    def gradient(kind, how):
        alignment = alignattn.Alignment("mmd", 0.1)
        leaf = query.detach().to(kind).requires_grad_()

        def loss():
            alignment.record(leaf, key.to(kind), name="layer")
            return alignment.loss()

        (how(loss)() * factor).backward()
        return leaf.grad.float() / factor

    expected = gradient(torch.float32, lambda loss: loss)
    assert expected.abs().max() < 2**-24  # the least that fp16 has
    found = gradient(torch.float16, counting()[1])
    torch.testing.assert_close(found, expected, rtol=0.02, atol=1e-11)


class Own(nn.Module):
    """Attention of one's own that records what it attends by."""

    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.q, self.k, self.out = nn.Linear(16, 16), nn.Linear(16, 16), nn.Linear(16, 2)
        self.alignment = alignattn.Alignment("gan", 1.0, until_met=False)

    def forward(self, tokens):
        query, key = (f(tokens).unflatten(-1, (2, 8)).transpose(1, 2) for f in (self.q, self.k))
        self.alignment.record(query, key, name="own")
        attended = (query @ key.mT).softmax(-1) @ tokens[:, None]
        return self.out(attended.mean((1, 2))).square().mean() + self.alignment.loss()


def test_a_copy_is_matched_by_networks_of_its_own():
    _, compiled = counting()
    tokens = torch.randn(4, 6, 16, generator=torch.Generator().manual_seed(1))
    first = Own().train()
    first(tokens)  # its networks are made
    twin = copy.deepcopy(first)
    with torch.no_grad():
        for parameter in twin.alignment.parameters():
            parameter.mul_(3.0)
    expected = copy.deepcopy(twin)(tokens)
    assert not torch.isclose(expected, copy.deepcopy(first)(tokens))
    loss = compiled(lambda model, tokens: model(tokens))
    torch.testing.assert_close(loss(twin, tokens), expected)
    del first
    gc.collect()
    torch.testing.assert_close(loss(copy.deepcopy(twin), tokens), twin(tokens))


def test_networks_that_took_no_part_get_no_gradient():
    alignment = alignattn.Alignment("gan", 1.0, adversary_optimizer=None)
    generator = torch.Generator().manual_seed(0)
    queries = {width: torch.randn(4, 2, 6, width, generator=generator).requires_grad_() for width in (8, 16)}

    def loss(width):
        alignment.record(queries[width], queries[width] + 1, name=f"layer of {width}")
        return alignment.loss()

    for width in queries:
        loss(width).backward()

    def have_gradients(function):
        for parameter in alignment.parameters():
            parameter.grad = None
        function(8).backward()
        return [parameter.grad is not None for parameter in alignment.parameters()]

    expected = have_gradients(loss)
    assert any(expected) and not all(expected)
    assert have_gradients(counting()[1](loss)) == expected


def test_the_same_tokens_are_drawn_where_a_backward_saves_memory(monkeypatch):
    expected, plain = train(bert, "mmd", weight=1.0, max_tokens=4)
    runs, run = [], Terms.run
    monkeypatch.setattr(Terms, "run", lambda *given: runs.append(1) or run(*given))
    with torch._functorch.config.patch(activation_memory_budget=0.0):
        losses, alignment = train(bert, "mmd", weight=1.0, max_tokens=4, compile_model=counting()[1])
    assert len(runs) == 2 * len(LENGTHS)  # else this shows nothing
    torch.testing.assert_close(losses, expected)
    assert alignment.meter.read() == pytest.approx(without_share(plain.meter.read()), rel=1e-4, abs=1e-6)


def test_a_plain_number_is_a_weight_where_all_numbers_may_change():
    expected, _ = train(bert, "mmd", weight=0.3)
    losses, _ = train(
        bert,
        "mmd",
        weight=0.3,
        compile_model=lambda model: torch.compile(model, backend="aot_eager", fullgraph=True, dynamic=True),
    )
    torch.testing.assert_close(losses, expected)


def test_nothing_is_said_of_a_share_that_cannot_be_seen():
    """Matched outside of compiled code, queries and keys get alignment's gradient alone."""
    _, alignment = train(
        bert, "mmd", weight=1.0, every=2, compile_model=lambda model: torch.compile(model, backend="aot_eager")
    )
    logs = alignment.meter.read()
    assert "alignment_mmd" in logs and "alignment_share" not in logs


def test_training_goes_on_after_nan():
    torch.manual_seed(0)
    model = bert().train()
    alignattn.align(model, "mmd", weight=1.0)
    called = counting()[1](model)
    inputs = {"input_ids": torch.arange(20).view(2, 10), "labels": torch.tensor([0, 1])}
    bias = model.bert.encoder.layer[0].attention.self.query.bias
    expected = called(**inputs).loss
    for _ in range(2):
        with torch.no_grad():
            bias[0] = float("nan")
        with pytest.raises(NonFiniteError):
            called(**inputs)
        with torch.no_grad():
            bias[0] = 0.0
        torch.testing.assert_close(called(**inputs).loss, expected)


def test_nan_is_found_where_it_is():
    def broken():
        model = Plain()
        with torch.no_grad():
            model.k.bias[0] = float("nan")
        return model

    _, compiled = counting()
    with pytest.raises(NonFiniteError, match="NaN or infinity"):
        train(broken, "mmd", compile_step=compiled)


def test_frozen_projections_are_told_of():
    def frozen():
        model = bert()
        for name, parameter in model.named_parameters():
            parameter.requires_grad = "query" not in name and "key" not in name
        return model

    _, compiled = counting()
    with pytest.warns(AlignmentWarning, match="frozen"):
        train(frozen, "mmd", compile_model=compiled)


def test_projections_are_refused_with_a_sentence():
    with pytest.raises(CaptureError, match=r"generator='model' with torch\.compile"):
        train(
            bert,
            "mmd",
            generator="projections",
            compile_model=lambda model: torch.compile(model, backend="aot_eager"),
        )


def test_models_of_one_class_are_not_taken_for_each_other(monkeypatch):
    """A plain one, compiled first, and aligned ones beside it: torch would run one's code for all of them."""
    monkeypatch.setattr(CompiledHooks, "_models", 0)  # other tests may have left theirs attached
    monkeypatch.setattr(torch._dynamo.config, "skip_nnmodule_hook_guards", True)
    models = {name: bert().train() for name in ("soft", "mmd", "gan")}
    for model in models.values():
        model.load_state_dict(models["soft"].state_dict())
    aligned = {name: alignattn.align(models[name], name, weight=1.0, until_met=False) for name in ("mmd", "gan")}
    ids, labels = torch.randint(0, 60, (4, 10), generator=torch.Generator().manual_seed(0)), torch.arange(4) % 2
    calls = {name: torch.compile(model, backend="aot_eager") for name, model in models.items()}
    for _ in range(2):
        of_task = models["soft"](input_ids=ids, labels=labels).loss
        for name, call in calls.items():
            loss = call(input_ids=ids, labels=labels).loss
            term = loss - of_task
            assert (term.abs() > 0.01) == (name in aligned)
            if name in aligned:
                torch.testing.assert_close(term, torch.stack(list(aligned[name].parts.values())).mean())
            loss.backward()
    before = torch._dynamo.config.skip_nnmodule_hook_guards
    aligned["mmd"].detach()
    assert torch._dynamo.config.skip_nnmodule_hook_guards is before is False
    aligned["gan"].detach()
    assert torch._dynamo.config.skip_nnmodule_hook_guards
