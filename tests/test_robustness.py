"""What real training does to a library: interrupts, retries, adapters, copies, and steps that were forgotten."""

import copy
import gc
import io
import weakref

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.checkpoint import checkpoint

import alignattn
from alignattn.errors import AlignmentWarning, CaptureError, ConfigError, UnsupportedModelError
from alignattn.matching.matcher import MatcherConfig


def test_queries_and_keys_are_freed_after_each_step(encoder):
    alignment = alignattn.align(encoder, "gan")
    held = []
    watch = alignment._tap._watch

    def remember(record):
        held.append(weakref.ref(record.query))
        watch(record)

    alignment._tap._watch = remember
    for _ in range(3):
        (encoder(torch.randn(2, 5, 16)).sum() + alignment.loss()).backward()
    gc.collect()
    assert len(held) == 6 and not any(reference() is not None for reference in held)


@pytest.mark.parametrize("kind", ["multihead", "interface"])
def test_an_interrupt_in_a_forward_does_not_turn_alignment_off(kind, encoder, bert, batch):
    model = encoder if kind == "multihead" else bert
    last = model.layers[1].linear2 if kind == "multihead" else model.bert.encoder.layer[2].output.dense
    alignment = alignattn.align(model, "mmd", add_to_outputs=False)

    def forward():
        return model(torch.randn(2, 5, 16)) if kind == "multihead" else model(**batch)

    def interrupt(*_):
        raise KeyboardInterrupt

    handle = last.register_forward_hook(interrupt)
    with pytest.raises(KeyboardInterrupt):
        forward()
    handle.remove()
    forward()
    assert alignment.loss().requires_grad
    assert len(alignment.parts) == (2 if kind == "multihead" else 3)
    assert torch.overrides._get_current_function_mode_stack() == []


def test_a_joint_optimizer_goes_on_with_the_networks_that_were_loaded(encoder):
    alignment = alignattn.align(encoder, "gan", adversary_optimizer=None)
    saved = copy.deepcopy(alignment.state_dict())
    optimizer = torch.optim.SGD(alignment.parameters(), lr=1.0)
    alignment.load_state_dict(saved)
    encoder(torch.randn(2, 5, 16))
    alignment.loss().backward()
    before = [p.detach().clone() for p in alignment.parameters()]
    optimizer.step()
    assert any(not torch.equal(a, b) for a, b in zip(before, alignment.parameters(), strict=True))


def test_a_state_that_does_not_fit_changes_nothing(encoder):
    alignment = alignattn.align(encoder, "gan")
    encoder(torch.randn(2, 5, 16))
    alignment.loss().backward()
    good = copy.deepcopy(alignment.state_dict())
    wide = alignattn.align(copy.deepcopy(encoder), "gan", hidden_width=5).state_dict()
    torn = good | {"adversary": {"optimizer": {"state": {}, "param_groups": []}, "gradients": []}}
    for bad in (wide, torn):
        with pytest.raises(ConfigError, match="stays as it was"):
            alignment.load_state_dict(bad)
        now = alignment.state_dict()
        assert all(torch.equal(good["networks"][name], value) for name, value in now["networks"].items())
        assert str(now["adversary"]) == str(good["adversary"])


class TestRecord:
    def tokens(self):
        return torch.randn(2, 2, 4, 8, requires_grad=True), torch.randn(2, 2, 4, 8)

    def test_a_term_that_nobody_took_raises(self):
        alignment = alignattn.Alignment("mmd")
        query, key = self.tokens()
        alignment.record(query, key, name="layer")
        query.sum().backward()
        with pytest.raises(CaptureError, match="never used"):
            alignment.record(query, key, name="layer")

    def test_two_passes_are_averaged_and_share_their_networks(self):
        passes = [[self.tokens() for _ in range(3)] for _ in range(2)]
        for reduction in ("mean", "sum"):
            together, apart = alignattn.Alignment("gan", reduction=reduction), []
            for layers in passes:
                alone = alignattn.Alignment("gan", reduction=reduction)
                for i, (query, key) in enumerate(layers):
                    together.record(query, key, name=f"layer {i}")
                    alone.record(query, key, name=f"layer {i}")
                apart.append(alone.loss())
            torch.testing.assert_close(together.loss(), (apart[0] + apart[1]) / 2)
            assert len(together.matcher.rows) == 3

    def test_a_layer_called_again_at_once_is_another_call_of_the_pass(self):
        alignment = alignattn.Alignment("mmd")
        for _ in range(12):
            alignment.record(*self.tokens(), name="shared")
        alignment.loss()
        assert len(alignment.parts) == 12

    def test_passes_that_pile_up_are_an_error(self):
        alignment = alignattn.Alignment("mmd")
        for _ in range(64):
            alignment.record(*self.tokens(), name="a")
            alignment.record(*self.tokens(), name="b")
        with pytest.raises(CaptureError, match="64 training forwards"):
            alignment.record(*self.tokens(), name="a")


def tiny(family: str, **options):
    import transformers

    sizes = {"vocab_size": 40, "hidden_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2}
    config = getattr(transformers, f"{family}Config")(**sizes, intermediate_size=16, **options)
    return getattr(transformers, f"{family}ForSequenceClassification")(config).train()


@pytest.mark.parametrize(("family", "generator"), [("Bert", "projections"), ("Bert", "model"), ("DebertaV2", "model")])
def test_adapters_that_come_after_align_are_reached(family, generator):
    from peft import LoraConfig, get_peft_model

    targets = {"Bert": ["query", "key"], "DebertaV2": ["query_proj", "key_proj"]}[family]
    tokens = torch.randint(5, 40, (3, 6), generator=torch.Generator().manual_seed(0))
    found = {}
    for order in ("before", "after"):
        torch.manual_seed(0)
        model = tiny(family)
        adapters = LoraConfig(target_modules=targets, r=2, lora_alpha=4, init_lora_weights="gaussian")
        if order == "after":
            alignment = alignattn.align(model, "mmd", generator=generator, add_to_outputs=False)
        torch.manual_seed(1)
        peft = get_peft_model(model, adapters)
        if order == "before":
            alignment = alignattn.align(model, "mmd", generator=generator, add_to_outputs=False)
        torch.manual_seed(2)
        peft(input_ids=tokens)
        alignment.loss().backward()
        grads = [p.grad for name, p in peft.named_parameters() if "lora_B" in name]
        assert all(g is not None and g.abs().sum() > 0 for g in grads), order
        found[order] = torch.cat([g.flatten() for g in grads])
        alignment.detach()
    torch.testing.assert_close(found["after"], found["before"])


def test_a_first_pass_of_one_token_does_not_fix_what_later_ones_record():
    from transformers import GPTJConfig, GPTJForCausalLM

    config = GPTJConfig(vocab_size=30, n_positions=16, n_embd=16, n_layer=1, n_head=2, rotary_dim=4)
    config.resid_pdrop = config.embd_pdrop = config.attn_pdrop = 0.0
    torch.manual_seed(0)
    model = GPTJForCausalLM(config).train()
    long = torch.randint(0, 30, (2, 7))
    expected = None
    for first in (None, torch.randint(0, 30, (2, 1))):
        alignment = alignattn.align(model, "mmd", weight=1.0, add_to_outputs=False)
        if first is not None:
            model(input_ids=first)
            alignment.loss()
        model(input_ids=long)
        value = alignment.loss().detach()
        alignment.detach()
        expected = value if expected is None else expected
    torch.testing.assert_close(value, expected)


class Branching(nn.Module):
    """As nanoGPT: fused or written out."""

    def __init__(self, *, flash: bool) -> None:
        super().__init__()
        self.qkv, self.flash = nn.Linear(8, 24), flash

    def forward(self, x):
        q, k, v = self.qkv(x).view(*x.shape[:2], 3, 2, 4).permute(2, 0, 3, 1, 4)
        if self.flash:
            return F.scaled_dot_product_attention(q, k, v).transpose(1, 2).flatten(2)
        return ((q @ k.mT).softmax(-1) @ v).transpose(1, 2).flatten(2)


def test_an_attention_that_ran_unseen_is_an_error_and_the_advice_works():
    model = nn.Sequential(Branching(flash=True), Branching(flash=False))
    alignment = alignattn.align(model)
    with pytest.raises(UnsupportedModelError, match=r"1 \(Branching\).*layers="):
        model(torch.randn(2, 5, 8))
    alignment.detach()
    alignment = alignattn.align(model, layers=0)
    model(torch.randn(2, 5, 8))
    assert alignment.loss().requires_grad


def test_the_term_is_never_added_to_logits(batch):
    from transformers import BertConfig, BertForPreTraining

    sizes = {"vocab_size": 50, "hidden_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2}
    model = BertForPreTraining(BertConfig(**sizes, intermediate_size=16, hidden_dropout_prob=0.0)).eval()
    model.bert.encoder.layer[0].attention.self.train()
    model.bert.encoder.layer[0].attention.self.dropout.p = 0.0
    plain = model(input_ids=batch["input_ids"], labels=batch["input_ids"], return_dict=False)[0]
    alignment = alignattn.align(model, weight=1000.0)
    attached = model(input_ids=batch["input_ids"], labels=batch["input_ids"], return_dict=False)[0]
    assert plain.ndim == 3
    assert torch.equal(plain, attached)
    assert alignment.loss() != 0


@pytest.mark.parametrize("method", ["gan", "ot", "ct", "mmd"])
@pytest.mark.parametrize("options", [{}, {"preset": "paper"}, {"preset": "released", "mask_padding": True}])
@pytest.mark.parametrize("n", [6, 300])
def test_padded_and_unpadded_give_the_same(method, options, n):
    """However much padding there is, and on which side; above 512 tokens the median is of a subset."""
    if n == 300 and method == "ot":
        options = options | {"max_iterations": 2}
    query, key = torch.randn(2, 1, n, 4), torch.randn(2, 1, n, 4)
    valid = torch.ones(2, n, dtype=torch.bool)
    values = []
    for left, right in ((0, 0), (0, 7), (5, 0), (100, 300)):
        alignment = alignattn.Alignment(method, weight=1.0, **options)
        padded = [F.pad(t, (0, 0, left, right), value=3.0).requires_grad_() for t in (query, key)]
        mask = F.pad(valid, (left, right), value=False)
        alignment.record(*padded, mask, mask, name="layer")
        loss = alignment.loss()
        loss.backward()
        values.append((loss.detach(), padded[1].grad[:, :, left : left + n]))
    for loss, gradient in values[1:]:
        torch.testing.assert_close(loss, values[0][0], rtol=1e-4, atol=1e-6)
        torch.testing.assert_close(gradient, values[0][1], rtol=1e-3, atol=1e-6)


def test_networks_that_nobody_optimizes_are_warned_of(encoder):
    def train(optimizer, steps=9):
        for _ in range(steps):
            encoder(torch.randn(2, 5, 16))
            alignment.loss().backward()
            encoder.zero_grad()
            if optimizer is not None:
                optimizer.step()

    alignment = alignattn.align(encoder, "gan", adversary_optimizer=None)
    with pytest.warns(AlignmentWarning, match="have not moved in 8 steps"):
        train(None)
    alignment.detach()
    alignment = alignattn.align(encoder, "gan", adversary_optimizer=None)
    train(torch.optim.Adam(alignment.parameters()))


class Scaled(alignattn.Matcher):
    """A matcher of one's own with a parameter of its own, and another constructor."""

    def __init__(self) -> None:
        super().__init__(MatcherConfig())
        self.scale = nn.Parameter(torch.ones(()))

    def losses(self, query, key, query_mask, key_mask, names):
        return self.scale * (query.mean(3) - key.mean(3)).square().sum(-1).flatten(0, 1)


def test_parameters_of_ones_own_matcher_learn_and_are_restored(encoder):
    alignment = alignattn.align(encoder, Scaled())
    for _ in range(3):
        encoder(torch.randn(2, 5, 16))
        alignment.loss().backward()
    state = alignment.state_dict()
    assert alignment.matcher.scale.item() != 1.0
    again = alignattn.align(copy.deepcopy(encoder), Scaled())
    again.load_state_dict(state)
    assert again.matcher.scale.item() == alignment.matcher.scale.item()


def test_recomputing_the_whole_aligned_model_is_no_new_forward(encoder):
    alignment = alignattn.align(encoder, "gan")
    start = [p.detach().clone() for p in alignment.parameters()]
    output = checkpoint(encoder, torch.randn(2, 5, 16, requires_grad=True), use_reentrant=False)
    (output.sum() + alignment.loss()).backward()
    assert all(torch.equal(a, b) for a, b in zip(start, alignment.parameters(), strict=True))
    assert not alignment._passes.waiting


def test_align_that_fails_half_way_leaves_the_model_free(bert):
    with pytest.raises(ConfigError, match="adversary_betas"):
        alignattn.align(bert, "gan", adversary_betas=(2.0, 0.5))

    class Broken(Scaled):
        def networks(self, names, width):
            raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError):
        alignattn.align(bert, Broken())
    alignattn.align(bert, "gan").detach()


def test_what_the_term_delivered_is_freed_by_the_backward(bert, batch):
    alignment = alignattn.align(bert, "mmd", generator="projections", add_to_outputs=False)
    bert(**batch)
    loss = alignment.loss()
    loss.backward()
    with pytest.raises(RuntimeError, match="second time"):
        loss.backward()


def test_second_derivatives_are_refused_and_not_wrong():
    query = torch.randn(1, 1, 4, 3, dtype=torch.float64, requires_grad=True)
    value = alignattn.functional.mmd(query, torch.randn(1, 1, 4, 3, dtype=torch.float64)).sum()
    (first,) = torch.autograd.grad(value, query, create_graph=True)
    with pytest.raises(RuntimeError, match="does not require grad"):
        first.sum().backward()


def test_data_parallel_is_refused_with_a_sentence(bert, batch):
    alignattn.align(bert)
    replica = bert._replicate_for_data_parallel()
    with pytest.raises(UnsupportedModelError, match=r"DataParallel.*torchrun"):
        replica(**batch)


@pytest.mark.parametrize("generator", ["model", "projections"])
def test_a_pickled_model_is_the_plain_model(bert, batch, generator):
    alignattn.align(bert, "gan", generator=generator)
    file = io.BytesIO()
    torch.save(bert, file)
    file.seek(0)
    loaded = torch.load(file, weights_only=False)
    bert.eval()
    loaded.eval()
    assert torch.equal(loaded(**batch).logits, bert(**batch).logits)
    alignattn.align(loaded.train(), "gan").detach()


def test_networks_are_single_precision_whatever_the_default(encoder):
    torch.set_default_dtype(torch.bfloat16)
    try:
        alignment = alignattn.align(encoder, "gan")
    finally:
        torch.set_default_dtype(torch.float32)
    assert {p.dtype for p in alignment.parameters()} == {torch.float32}


def test_joint_networks_get_the_weighted_gradient_by_either_generator(bert, batch):
    found = {}
    for weight in (1.0, 0.1):
        for generator in ("model", "projections"):
            alignment = alignattn.align(bert, "ct", weight=weight, generator=generator, adversary_optimizer=None)
            torch.manual_seed(3)
            bert(**batch).loss.backward()
            found[weight, generator] = torch.cat([p.grad.flatten() for p in alignment.parameters()])
            alignment.detach()
    torch.testing.assert_close(found[0.1, "projections"], found[0.1, "model"])
    torch.testing.assert_close(found[0.1, "model"], 0.1 * found[1.0, "model"])


def test_queries_are_the_last_of_the_keys_where_a_prefix_comes_first():
    from transformers import DynamicCache, LlamaConfig, LlamaForCausalLM

    from alignattn.capture import Tap

    config = LlamaConfig(
        vocab_size=30,
        hidden_size=16,
        intermediate_size=16,
        num_hidden_layers=1,
        num_attention_heads=2,
        num_key_value_heads=1,
    )
    model = LlamaForCausalLM(config).eval()
    tokens = torch.randint(0, 30, (2, 8))
    mask = torch.ones(2, 8, dtype=torch.long)
    mask[0, :2] = mask[1, 6:] = 0
    records = []
    with torch.no_grad():
        cache = model(
            tokens[:, :3], attention_mask=mask[:, :3], past_key_values=DynamicCache(config=config)
        ).past_key_values
        tap = Tap(model, watch=records.append, always=True)
        model(tokens[:, 3:], attention_mask=mask, past_key_values=cache)
        tap.remove()
    assert records[0].query.shape[2] == 5 and records[0].key.shape[2] == 8
    assert torch.equal(records[0].key_mask, mask.bool())
    assert torch.equal(records[0].query_mask, mask.bool()[:, 3:])


def test_common_scale_is_of_the_valid_tokens_and_its_gradient_neither_shifts_nor_scales():
    """What shifts and scales leave as it is has a gradient across both: its sum and its product with q, k vanish."""
    from alignattn.matching.scale import standardise

    query, key = torch.randn(2, 1, 5, 3, requires_grad=True), (torch.randn(2, 1, 6, 3) + 2).requires_grad_()
    mask = torch.tensor([[True] * 3 + [False] * 2, [True] * 5])
    scaled, other = standardise(query, key, mask, None)
    pooled = torch.cat([query[0, 0, :3], key[0, 0]]).detach()
    spread = (pooled - pooled.mean(0)).square().mean().sqrt()
    torch.testing.assert_close(scaled[0, 0, :3], (query[0, 0, :3] - pooled.mean(0)) / spread)
    ((scaled[0, 0, :3] ** 3).sum() + (other[0] * torch.randn(6, 3)).sum()).backward()
    gradient = torch.cat([query.grad[0, 0, :3], key.grad[0, 0]])
    assert gradient.abs().max() > 0.1
    torch.testing.assert_close(gradient.sum(0), torch.zeros(3), atol=1e-4, rtol=0)
    torch.testing.assert_close((gradient * (pooled - pooled.mean(0))).sum(), torch.tensor(0.0), atol=1e-4, rtol=0)
    assert query.grad[0, 0, 3:].abs().sum() == 0


def test_presets_are_what_the_documentation_says():
    from alignattn.config import METHODS, PRESETS

    assert [PRESETS[preset]["all"]["weight"] for preset in ("paper", "released")] == [0.01, 0.01]
    assert all(str(PRESETS["stable"][method]["weight"]) == "auto:0.2" for method in METHODS)
    first = {method: PRESETS["stable"][method]["first_weight"] for method in METHODS}
    assert first == {"gan": 0.1, "ot": 0.3, "ct": 0.15, "mmd": 0.3}
    assert [PRESETS[p]["all"]["reduction"] for p in ("paper", "released", "stable")] == ["sum", "mean", "mean"]
