"""The share of alignment's gradient, and a weight that keeps it, against gradients taken one by one."""

import copy

import numpy as np
import pytest
import torch
from torch import nn

import alignattn
from alignattn import balance
from alignattn.balance import Balance
from alignattn.errors import AlignmentWarning, ConfigError
from alignattn.matching.matcher import MatcherConfig

transformers = pytest.importorskip("transformers", reason="pip install 'alignattn[hf]'")


@pytest.fixture(autouse=True)
def _every_update(monkeypatch):
    monkeypatch.setattr(balance, "EVERY", 1)


@pytest.fixture
def still(bert):
    """Without dropout, and with attention that is not uniform, as in a pretrained model: the task feels q and k."""
    for module in bert.modules():
        if isinstance(module, nn.Dropout):
            module.p = 0.0
    with torch.no_grad():
        for name, parameter in bert.named_parameters():
            if name.endswith(("weight",)) and parameter.ndim == 2 and "embeddings" not in name:
                parameter *= 10
    return bert


def share_by_hand(model, batch, method, weight, **options):
    """weight · |dA/d(q, k)| / |dT/d(q, k)|: task and alignment differentiated apart, in a model of their own."""
    model = copy.deepcopy(model).train()
    alignment = alignattn.align(model, method, weight=1.0, add_to_outputs=False, **options)
    tokens = []
    record = alignment._passes.add
    alignment._tap._watch = lambda one: (tokens.extend((one.query, one.key)), record(one))
    task = model(**batch).loss
    norms = []
    for loss in (alignment.loss(), task):
        gradients = torch.autograd.grad(loss, tokens, retain_graph=True)
        norms.append(torch.stack([g.double().square().sum() for g in gradients]).sum().sqrt())
    return float(weight * norms[0] / norms[1]), float(norms[1] / norms[0])


@pytest.mark.parametrize("method", ["mmd", "gan", "ct"])
@pytest.mark.parametrize("optimizer", ["adam", None])
def test_the_share_in_the_logs_is_that_of_gradients_taken_apart(still, batch, method, optimizer):
    """Of the last layer, behind which there is no other."""
    expected, _ = share_by_hand(still, batch, method, 0.7, layers=-1)
    assert 1e-3 < expected < 1e3
    alignment = alignattn.align(still, method, weight=0.7, adversary_optimizer=optimizer, layers=-1)
    still(**batch).loss.backward()
    torch.optim.SGD(still.parameters(), lr=0.0).step()
    assert alignment.meter.read()["alignment_share"] == pytest.approx(expected, rel=1e-3)


@pytest.mark.parametrize("many", [1, 3000, 2**40])
@pytest.mark.parametrize("layers", [None, -1])
def test_gradients_that_are_measured_together_give_the_share_of_those_that_are_measured_each(
    still, batch, many, layers, monkeypatch
):
    """As on an accelerator: some at a time, or all when the backward is over."""
    shares, calls = [], []
    plain = torch._foreach_norm
    monkeypatch.setattr(
        torch, "_foreach_norm", lambda some, *rest, **more: calls.append(some) or plain(some, *rest, **more)
    )
    for at_once in ({"cpu": 0}, {}):
        monkeypatch.setattr(balance, "AT_ONCE", at_once)
        monkeypatch.setattr(balance, "MANY", many)
        model = copy.deepcopy(still)
        alignment = alignattn.align(model, "mmd", weight=0.7, layers=layers)
        calls.clear()
        for _ in range(2):  # batches of one update
            model(**batch).loss.backward()
        torch.optim.SGD(model.parameters(), lr=0.0).step()
        shares.append(alignment.meter.read()["alignment_share"])
    assert shares[1] == pytest.approx(shares[0], rel=1e-5)
    tokens = 2 * len(alignment.parts)  # of 3 x 4 x 7 x 8 numbers
    assert sum(map(len, calls)) == 2 * tokens
    assert max(map(len, calls)) == {1: 1, 3000: min(5, tokens), 2**40: tokens}[many]


def test_with_projections_it_is_the_share_before_the_gradient_stops(still, batch):
    layer = {"layers": 0}
    model = copy.deepcopy(still)
    alignment = alignattn.align(model, "mmd", weight=0.7, **layer)
    model(**batch).loss.backward()
    torch.optim.SGD(model.parameters(), lr=0.0).step()
    expected = alignment.meter.read()["alignment_share"]
    alignment = alignattn.align(still, "mmd", weight=0.7, generator="projections", **layer)
    still(**batch).loss.backward()
    torch.optim.SGD(still.parameters(), lr=0.0).step()
    assert alignment.meter.read()["alignment_share"] == pytest.approx(expected, rel=1e-3)


@pytest.mark.parametrize("generator", ["model", "projections"])
def test_auto_watches_one_update_and_then_keeps_its_share(still, batch, generator):
    options = {"recentre": False, "layers": -1, "first_weight": 0.0}
    _, ratio = share_by_hand(still, batch, "mmd", 1.0, **options)
    alignment = alignattn.align(still, "mmd", weight=alignattn.Auto(0.3), generator=generator, **options)
    optimizer = torch.optim.SGD(still.parameters(), lr=0.0)
    logs = []
    for _ in range(3):
        still(**batch).loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        logs.append(alignment.meter.read())
    assert logs[0]["alignment_weight"] == 0 and logs[0]["alignment_share"] == 0
    for entry in logs[1:]:
        assert entry["alignment_share"] == pytest.approx(0.3, rel=1e-3)
        assert entry["alignment_weight"] == pytest.approx(0.3 * ratio, rel=1e-3)


def test_batches_of_one_update_are_looked_at_together(still, batch):
    alignment = alignattn.align(still, "mmd", weight="auto", recentre=False, first_weight=0.0)
    optimizer = torch.optim.SGD(still.parameters(), lr=0.0)
    for _ in range(2):
        still(**batch).loss.backward()
    assert alignment._strength.balance.weight == 0
    optimizer.step()
    twice = float(alignment._strength.balance.weight)
    other = copy.deepcopy(still)
    alignment = alignattn.align(other, "mmd", weight="auto", recentre=False, first_weight=0.0)
    other(**batch).loss.backward()
    torch.optim.SGD(other.parameters(), lr=0.0).step()
    assert twice == pytest.approx(float(alignment._strength.balance.weight), rel=1e-4)


def test_only_every_tenth_update_is_looked_at(still, batch, monkeypatch):
    monkeypatch.setattr(balance, "EVERY", 10)
    alignment = alignattn.align(still, "mmd", weight=0.1)
    optimizer = torch.optim.SGD(still.parameters(), lr=0.0)
    told = []
    for _ in range(12):
        still(**batch).loss.backward()
        optimizer.step()
        told.append("alignment_share" in alignment.meter.read())
    assert [step for step, share in enumerate(told) if share] == [0, 10]


def test_what_auto_has_chosen_is_saved_and_smoothed(still, batch, tmp_path):
    alignment = alignattn.align(still, "mmd", weight="auto")
    optimizer = torch.optim.SGD(still.parameters(), lr=0.0)
    still(**batch).loss.backward()
    optimizer.step()
    chosen = float(alignment._strength.balance.weight)
    assert chosen > 0
    alignment.save(tmp_path)
    alignment.detach()
    again = alignattn.Alignment.load(still, tmp_path)
    assert again.config.weight == alignattn.Auto(0.2) and float(again._strength.balance.weight) == chosen
    again._strength.balance._squares = torch.tensor([1.0, 100.0])  # ratio 10: a weight of 2 is asked for
    again._strength.balance.settle(chosen, 10, device=None)
    assert float(again._strength.balance.weight) == pytest.approx(chosen**0.7 * 2.0**0.3)


def test_once_training_has_begun_the_weight_only_falls():
    """Alignment's gradient falls to nothing, and the task's grows: the weight stays. And it follows the task's down."""
    auto = balance.Balance(0.1)
    chosen = []
    course = [(9.0, 8.0), (2.0, 8.0), (4.0, 8.0), *[(0.01, 80.0)] * 30, *[(4.0, 2.0)] * 120]
    for look, (aligned, task) in enumerate(course):
        auto._squares = torch.tensor([aligned**2, task**2])
        auto.settle(0.0, 10 * look, device=None)
        chosen.append(float(auto.weight))
    assert chosen[0] == pytest.approx(0.1 * 8 / 9)
    assert chosen[1] == pytest.approx(chosen[0] ** 0.7 * (0.1 * 8 / 2) ** 0.3)
    assert chosen[2:33] == [chosen[2]] * 31
    assert chosen[-1] == pytest.approx(0.1 * 2 / 4, rel=1e-3)


def test_a_weight_that_only_falls_does_not_follow_the_noise_down():
    """Batches differ: ratios that scatter about one value, by a third, leave three quarters of it after 3,000 updates.

    The least of 300 would leave a third; the least of running means over ten looks leaves what a simulation in NumPy
    gives, below.
    """
    random = np.random.default_rng(0)
    ratios = np.exp(0.3 * random.standard_normal(300))
    logs = np.log(0.1 * ratios)
    smoothed = lowest = logs[0]
    for look, log in enumerate(logs[1:], start=1):
        memory = 0.7 if look < 3 else 0.9
        smoothed = memory * smoothed + (1 - memory) * log
        lowest = smoothed if look < 3 else min(lowest, smoothed)
    auto = balance.Balance(0.1)
    for look, ratio in enumerate(ratios):
        auto._squares = torch.tensor([1.0, ratio**2])
        auto.settle(0.0, 10 * look, device=None)
    assert float(auto.weight) == pytest.approx(np.exp(lowest), rel=1e-4)
    assert 0.075 < float(auto.weight) < 0.1 and ratios.min() < 0.5


def test_the_fair_weight_goes_on_from_where_it_was_saved():
    course = [(1.0, float(task)) for task in (9, 7, 8, 5, 9, 6, 4, 8, 3, 7)]

    def run(auto, looks):
        for look in looks:
            auto._squares = torch.tensor(course[look]).square()
            auto.settle(0.0, 10 * look, device=None)
        return float(auto.weight), float(auto.fair_weight)

    whole = run(balance.Balance(0.1), range(10))
    first, second = balance.Balance(0.1), balance.Balance(0.1)
    run(first, range(6))
    second.load_state_dict(first.state_dict())
    assert run(second, range(6, 10)) == pytest.approx(whole, rel=1e-6)
    older = balance.Balance(0.1)
    older.load_state_dict({"weight": 0.5})  # a state that an earlier version wrote
    assert float(older.fair_weight) == 0.5
    assert balance.Balance().state_dict() == {}


def test_in_training_it_only_falls_after_the_beginning_and_not_before(still, batch):
    for update, may_rise in ((0, True), (balance.BEGINNING + 10, False)):
        model = copy.deepcopy(still)
        alignment = alignattn.align(model, "mmd", weight="auto", first_weight=1e-6, recentre=False)
        alignment._strength.set_clock(update)
        model(**batch).loss.backward()
        torch.optim.SGD(model.parameters(), lr=0.0).step()
        weight = float(alignment._strength.balance.weight)
        assert weight > 1e-3 if may_rise else weight == pytest.approx(1e-6)
        alignment.detach()


def test_gradients_of_nothing_leave_the_weight_as_it_was():
    nan = float("nan")
    auto = balance.Balance(0.1)
    auto.weight = torch.tensor(2.0)
    for squares, share in (([0.0, 1.0], 0.0), ([1.0, 0.0], nan), ([nan, 1.0], nan), ([float("inf"), 1.0], nan)):
        auto._squares, auto._watches = torch.tensor(squares), True
        assert float(auto.settle(2.0, 0, device=None)) == pytest.approx(share, nan_ok=True)
        assert auto.weight == 2.0


def test_what_auto_cannot_see_is_refused_with_a_sentence(still, batch):
    with pytest.raises(ConfigError, match="share must be a number > 0"):
        alignattn.Auto(0.0)
    with pytest.raises(ConfigError, match=r"A weight is a number, auto, .* got 'automatic'"):
        alignattn.align(still, weight="automatic")
    with pytest.raises(ConfigError, match="needs adversary_optimizer='adam'"):
        alignattn.align(still, "gan", weight="auto", adversary_optimizer=None)
    alignment = alignattn.align(still, "mmd", weight="auto", add_to_outputs=False, first_weight=0.0)
    torch.compile(still, backend="aot_eager")(**batch)
    with pytest.raises(ConfigError, match="compiled code does not show"):
        alignment.loss()
    torch.compiler.reset()


def test_where_the_model_was_compiled_auto_stays_at_its_first_weight_and_says_so(still, batch):
    alignment = alignattn.align(still, "mmd", weight="auto", first_weight=0.7, add_to_outputs=False)
    compiled = torch.compile(still, backend="aot_eager")
    optimizer = torch.optim.SGD(still.parameters(), lr=0.0)

    def step():
        (compiled(**batch).loss + alignment.loss()).backward()
        optimizer.step()
        assert alignment.meter.read()["alignment_weight"] == pytest.approx(0.7)

    with pytest.warns(AlignmentWarning, match=r"sees no gradients in compiled code, .* first weight, 0\.7"):
        step()
    step()
    alignment.detach()
    torch.compiler.reset()


def test_an_optimizer_of_ones_own_gets_the_first_weight_unless_auto_is_asked_for(still):
    assert alignattn.Alignment("ct", adversary_optimizer=None).config.weight == 0.15
    assert alignattn.Alignment("ct").config.weight == alignattn.Auto(0.2)
    assert alignattn.Alignment("ct", preset="paper", adversary_optimizer=None).config.weight == 0.01
    assert alignattn.Alignment("ct", weight=0.4, adversary_optimizer=None).config.weight == 0.4

    class Own(alignattn.Matcher):
        def losses(self, query, key, query_mask, key_mask, names):
            return (query.mean(3) - key.mean(3)).square().sum(-1).flatten(0, 1)

    assert alignattn.Alignment(Own(MatcherConfig(), seed=0), adversary_optimizer=None).config.weight == 1.0


# nn.MultiheadAttention: what is matched are copies, and the gradients meet in the weights


class Attending(nn.Module):
    """One nn.MultiheadAttention, packed weights or not, with keys of its own or not."""

    def __init__(self, **options):
        super().__init__()
        self.attention = nn.MultiheadAttention(8, 2, batch_first=True, **options)

    def forward(self, tokens):
        others = tokens[..., : self.attention.kdim]
        return self.attention(tokens, tokens if others.shape == tokens.shape else others, others, need_weights=False)[0]

    def weights(self):
        """Of queries and keys, as the module has them."""
        if self.attention._qkv_same_embed_dim:
            return [self.attention.in_proj_weight], lambda grads: grads[0][:16]
        names = ("q_proj_weight", "k_proj_weight")
        return [getattr(self.attention, name) for name in names], lambda grads: torch.cat([g.flatten() for g in grads])


@pytest.mark.parametrize("generator", ["model", "projections"])
@pytest.mark.parametrize(
    "options", [{}, {"add_bias_kv": True}, {"kdim": 6, "vdim": 6}], ids=["packed", "extra", "apart"]
)
def test_copies_are_balanced_where_the_gradients_meet_in_the_weights(generator, options):
    torch.manual_seed(0)
    model, tokens = Attending(**options).double(), torch.randn(3, 5, 8, dtype=torch.float64)
    settings = {"recentre": False, "until_met": False, "generator": generator, "cross": True, "first_weight": 0.0}

    def task():
        return (model(tokens) - 1).square().mean()

    alignment = alignattn.align(model, "mmd", weight=1.0, **settings)
    weights, of_q_and_k = model.weights()
    loss = task()
    norms = [
        of_q_and_k(torch.autograd.grad(one, weights, retain_graph=True)).norm() for one in (alignment.loss(), loss)
    ]
    alignment.detach()
    alignment = alignattn.align(model, "mmd", weight="auto:0.1", **settings)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.0)
    logs = []
    for _ in range(3):
        loss = task()
        (loss + alignment.loss()).backward()
        optimizer.step()
        optimizer.zero_grad()
        logs.append(alignment.meter.read())
    expected = float(0.1 * norms[1] / norms[0])
    assert logs[0]["alignment_share"] == 0 and expected > 0
    for entry in logs[1:]:
        assert entry["alignment_share"] == pytest.approx(0.1, rel=1e-3)
        assert entry["alignment_weight"] == pytest.approx(expected, rel=1e-3)
    assert not any(weight._backward_hooks for weight in weights)  # nothing is left on the parameters


@pytest.mark.parametrize("factor", [1024.0, 0.25])
@pytest.mark.parametrize("generator", ["model", "projections"])
@pytest.mark.parametrize("kind", ["bert", "torch"])
def test_a_factor_on_the_whole_loss_is_of_no_account(kind, generator, factor, still, batch):
    """A gradient scaler's, or one over the number of batches that are accumulated."""
    torch.manual_seed(0)
    tokens = torch.randn(3, 5, 8)
    first = still if kind == "bert" else Attending()
    chosen = []
    for by in (1.0, factor):
        model = copy.deepcopy(first)
        alignment = alignattn.align(model, "mmd", "auto", generator=generator, add_to_outputs=False, recentre=False)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.0)
        for _ in range(3):
            loss = model(**batch).loss if kind == "bert" else (model(tokens) - 1).square().mean()
            ((loss + alignment.loss()) * by).backward()
            optimizer.step()
        chosen.append(float(alignment._strength.balance.weight))
    assert chosen[1] == pytest.approx(chosen[0], rel=1e-3) and chosen[0] > 0


@pytest.mark.parametrize("generator", ["model", "projections"])
def test_calls_that_share_a_weight_are_balanced_together(generator):
    """Siamese passes: the task's gradient comes once for all, and alignment's parts add up as vectors."""
    torch.manual_seed(0)
    model, batches = Attending().double(), torch.randn(3, 3, 5, 8, dtype=torch.float64)
    settings = {"recentre": False, "generator": generator}

    def losses(alignment):
        task = sum((model(tokens) - i).square().mean() for i, tokens in enumerate(batches))
        return alignment.loss(), task

    alignment = alignattn.align(model, "mmd", weight=1.0, **settings)
    weight = model.attention.in_proj_weight
    norms = [torch.autograd.grad(one, weight, retain_graph=True)[0][:16].norm() for one in losses(alignment)]
    alignment.detach()
    alignment = alignattn.align(model, "mmd", weight="auto:0.1", **settings)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.0)
    for _ in range(2):
        sum(losses(alignment)).backward()
        optimizer.step()
        optimizer.zero_grad()
    assert float(alignment._strength.balance.weight) == pytest.approx(float(0.1 * norms[1] / norms[0]), rel=1e-3)


def test_detached_in_the_middle_nothing_is_left_on_the_weights():
    model = Attending()
    alignment = alignattn.align(model, "mmd", weight=0.1)
    (model(torch.randn(3, 5, 8)).square().mean() + alignment.loss()).backward()
    alignment.detach()
    assert not any(parameter._backward_hooks for parameter in model.parameters())


def test_auto_says_when_it_sees_nothing():
    model = nn.Sequential(nn.Linear(8, 8), Attending())
    model[1].attention.in_proj_weight.requires_grad_(False)
    alignment = alignattn.align(model, "mmd", weight="auto")
    optimizer = torch.optim.SGD([p for p in model.parameters() if p.requires_grad], lr=0.0)

    def train():
        for _ in range(8):
            (model(torch.randn(3, 5, 8)).square().mean() + alignment.loss()).backward()
            optimizer.step()

    with pytest.warns(alignattn.AlignmentWarning, match="sees no gradient"):
        train()


def test_a_loss_that_is_dropped_leaves_no_hook_on_the_weights():
    model = Attending()
    alignment = alignattn.align(model, "mmd", weight="auto")
    optimizer = torch.optim.SGD(model.parameters(), lr=0.0)
    for backward in (False, True):
        loss = model(torch.randn(3, 5, 8)).square().mean() + alignment.loss()
        if backward:
            loss.backward()
    optimizer.step()
    assert not model.attention.in_proj_weight._backward_hooks
    assert 0 < float(alignment._strength.balance.weight) < float("inf")


def test_where_some_are_no_copies_those_decide(still, batch):
    """A transformers model with an nn.MultiheadAttention in it: the share is that of the former's queries and keys."""
    model = copy.deepcopy(still)
    alignment = alignattn.align(model, "mmd", weight=0.7, reduction="sum", layers=-1)
    model(**batch).loss.backward()
    torch.optim.SGD(model.parameters(), lr=0.0).step()
    expected = alignment.meter.read()["alignment_share"]
    still.beside = Attending()
    names = ["bert.encoder.layer.2.attention.self", "beside.attention"]
    alignment = alignattn.align(still, "mmd", weight=0.7, reduction="sum", layers=names, add_to_outputs=False)
    torch.manual_seed(0)
    beside: list[torch.Tensor] = []
    still.bert.encoder.register_forward_hook(lambda *_: beside.append(still.beside(torch.randn(3, 5, 8))))
    task = still(**batch).loss
    (task + beside[0].square().sum() + alignment.loss()).backward()
    torch.optim.SGD(still.parameters(), lr=0.0).step()
    logs = alignment.meter.read()
    assert "alignment/beside.attention" in logs
    assert logs["alignment_share"] == pytest.approx(expected, rel=1e-3)


def test_the_summary_says_how_the_weight_is_chosen(still):
    assert "weight auto (share 0.2)" in alignattn.align(still, weight="auto").summary()


@pytest.mark.parametrize("spread", [1.0, 5.0])
def test_auto_chooses_in_half_precision_what_it_chooses_in_single(spread):
    """A gradient of 1e-8 is nothing in fp16, until a scaler's factor has made it larger."""
    chosen = []
    for dtype in (torch.float32, torch.float16):
        generator = torch.Generator().manual_seed(0)
        alignment = alignattn.Alignment("mmd", "auto")
        sides = [torch.randn(32, 12, 128, 32, generator=generator) * spread for _ in range(2)]
        query, key = (side.to(dtype).requires_grad_() for side in sides)
        alignment.record(query, key, name="a")
        task = 1e-3 * sum((side.float() - 1).square().mean() for side in (query, key))
        ((task + alignment.loss()) * 65536).backward()
        alignment.advance()
        chosen.append(float(alignment._strength.balance.weight))
    assert chosen[1] == pytest.approx(chosen[0], rel=1e-2) and chosen[0] > 0


def test_however_many_batches_an_update_has_little_of_them_is_kept(still, batch):
    alignment = alignattn.align(still, "mmd", weight=0.1)
    kept = []
    for _ in range(4):
        still(**batch).loss.backward()
        auto = alignment._strength.balance
        kept.append((len(auto._aligned), len(auto._task)))
    assert kept == [(6, 6)] * 4  # queries and keys of three layers


def test_the_share_is_of_tokens_that_the_backward_came_to(still, batch):
    """Who asks for the gradient of one layer's keys alone gets no other hook called."""
    alignment = alignattn.align(still, "mmd", weight=0.1, add_to_outputs=False)
    records = []
    keep = alignment._tap._watch
    alignment._tap._watch = lambda record: (records.append(record), keep(record))
    task = still(**batch).loss
    (task + alignment.loss()).backward(inputs=[records[-1].key])
    auto = alignment._strength.balance
    assert (len(auto._aligned), len(auto._task)) == (1, 1)


def test_processes_that_watched_nothing_have_no_share(monkeypatch, tmp_path):
    """As in compiled code: zeros over zeros, from everyone, would stand in the logs as NaN."""
    monkeypatch.setattr("alignattn.balance.several", lambda: True)
    torch.distributed.init_process_group("gloo", init_method=f"file://{tmp_path}/meeting", rank=0, world_size=1)
    try:
        balance = Balance()
        assert balance.settle(0.3, 10, device=torch.device("cpu")) is None
        tokens = torch.ones(1, 1, 2, 3, requires_grad=True)
        meet = balance.expect(tokens, None, through=True)
        meet(torch.full_like(tokens, 2.0), 0.5, None)
        tokens.backward(torch.full_like(tokens, 5.0))  # one of it alignment's: 0.5 times 2
        assert balance.settle(0.5, 20, device=torch.device("cpu")) == pytest.approx(0.25)
        assert balance.settle(0.5, 30, device=torch.device("cpu")) is None
    finally:
        torch.distributed.destroy_process_group()
