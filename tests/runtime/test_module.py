"""The module the training loop holds, in one process: names, state, initialisation, calls of other kinds, refusals."""

import copy
from dataclasses import replace

import nanogpt
import pytest
import torch
import torch.nn.functional as F
import zoo
from random_plan import random_plan
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

import autoplan
from autoplan.errors import InputError, PlanError
from autoplan.sharding import PARTIAL, REPLICATE, REPLICATE_PARTIAL_GRAD, Strategy
from autoplan.solver.legal import check_strategies
from autoplan.trace.capture import trace_model
from autoplan.trace.segments import segment_graph

BATCH = 4


def inputs(batch: int = BATCH, length: int = 12, seed: int = 0) -> dict[str, Tensor]:
    tokens = torch.randint(0, 67, (batch, length), generator=torch.Generator().manual_seed(seed))
    return {"idx": tokens, "targets": tokens.roll(-1, 1)}


def config(**changes: object) -> nanogpt.Config:
    sizes: dict[str, object] = {"vocab_size": 67, "block_size": 12, "num_layers": 2, "num_heads": 2, "width": 8}
    return nanogpt.Config(**(sizes | changes))  # type: ignore[arg-type]


def plain(**changes: object) -> nn.Module:
    torch.manual_seed(1)
    return nanogpt.GPT(config(**changes)).double()


@pytest.fixture(scope="module")
def plan() -> autoplan.Plan:
    return autoplan.search(plain(), inputs(), cluster="1xcpu", microbatch=2)


def test_the_original_is_left_alone_and_the_copy_learns(plan: autoplan.Plan) -> None:
    original = plain()
    before = copy.deepcopy(original.state_dict())
    model = autoplan.compile(original, plan)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    losses = []
    for _ in range(5):
        _, loss = model(**inputs())
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    assert losses[-1] < losses[0]
    assert all(torch.equal(before[name], value) for name, value in original.state_dict().items())


def test_names_are_the_users(plan: autoplan.Plan) -> None:
    original = plain()
    model = autoplan.compile(original, plan)
    assert set(model.state_dict()) == set(original.state_dict())
    assert dict(model.named_parameters()).keys() == dict(original.named_parameters()).keys()
    assert all(isinstance(p, DTensor) for p in model.parameters())
    for name, value in original.state_dict().items():
        assert torch.equal(model.state_dict()[name].full_tensor(), value)


def test_gradients_accumulate_and_scale_as_usual(plan: autoplan.Plan) -> None:
    original = plain()
    model = autoplan.compile(original, plan)
    for seed in (0, 1):
        (model(**inputs(seed=seed))[1] / 2).backward()
        (original(**inputs(seed=seed))[1] / 2).backward()
    for (name, p), expected in zip(model.named_parameters(), original.parameters(), strict=True):
        torch.testing.assert_close(p.grad.full_tensor(), expected.grad, rtol=0, atol=1e-12, msg=name)
    with pytest.raises(RuntimeError, match="twice"):
        loss = model(**inputs())[1]
        loss.backward(retain_graph=True)
        loss.backward()


@pytest.mark.parametrize("call", [{"batch": 8}, {"length": 7}, {"batch": 2, "length": 5}])
def test_other_shapes_are_traced_and_run(plan: autoplan.Plan, call: dict[str, int]) -> None:
    original = plain()
    model = autoplan.compile(original, plan)
    batch = inputs(**call)
    torch.testing.assert_close(model(**batch)[1].detach(), original(**batch)[1].detach(), rtol=0, atol=1e-12)
    model.eval()
    torch.testing.assert_close(model(**batch)[0], original(**batch)[0].detach(), rtol=0, atol=1e-12)


def test_evaluation_without_targets_and_positional_calls(plan: autoplan.Plan) -> None:
    original = plain()
    model = autoplan.compile(original, plan)
    batch = inputs()
    with torch.no_grad():
        logits, loss = model(batch["idx"])
        assert loss is None
        torch.testing.assert_close(logits, original(batch["idx"])[0], rtol=0, atol=1e-12)
        torch.testing.assert_close(model(batch["idx"], batch["targets"])[1], original(**batch)[1], rtol=0, atol=1e-12)


def test_a_step_returns_the_loss_alone(plan: autoplan.Plan) -> None:
    logits, loss = autoplan.compile(plain(), plan)(**inputs())
    assert loss.requires_grad
    with pytest.raises(InputError, match=r"eval\(\) mode"):
        logits.argmax(-1)
    for use in (lambda: logits + 1, lambda: float(logits), lambda: bool(logits), lambda: torch.softmax(logits, -1)):
        with pytest.raises(InputError, match=r"eval\(\) mode"):
            use()


def test_a_batch_that_does_not_divide_is_refused(plan: autoplan.Plan) -> None:
    model = autoplan.compile(plain(), plan)
    with pytest.raises(PlanError, match="multiple of 2"):
        model(**inputs(batch=3))


def test_a_plan_for_another_model_is_refused(plan: autoplan.Plan) -> None:
    with pytest.raises(PlanError, match="search again"):
        autoplan.compile(plain(num_layers=3), plan)
    with pytest.raises(PlanError, match="search again"):
        autoplan.compile(plain(width=16), plan, example_inputs=inputs())


def test_a_plan_for_more_ranks_is_refused() -> None:
    wide = autoplan.search(plain(), inputs(), cluster="2xcpu", runnable=True)
    with pytest.raises(PlanError, match="needs 2 ranks"):
        autoplan.compile(plain(), wide)


def test_a_plan_that_shapes_make_illegal_is_refused() -> None:
    two_heads = segment_graph(trace_model(plain(), inputs()).graph)
    one_head = segment_graph(trace_model(plain(num_heads=1), inputs()).graph)
    refused = 0
    for seed in range(6):
        found = random_plan(two_heads, pp=1, dp=1, tp=2, microbatches=2, seed=seed)
        check_strategies(found, two_heads)
        heads_split = any("Shard(1)" in str(op.tensor) for op in found.layouts[1].ops if "attention" in op.node)
        if heads_split:
            refused += 1
            with pytest.raises(PlanError, match="cannot run as"):
                check_strategies(found, one_head)
    assert refused, "no random plan split the heads"


class Centered(nn.Module):
    """A model that mixes samples."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Linear(3, 3)

    def forward(self, x: Tensor) -> Tensor:
        y = self.inner(x)
        return (y - y.mean(0)).pow(2).mean()


def test_an_edited_plan_cannot_cut_a_batch_that_does_not_split() -> None:
    model = Centered().double()
    batch = {"x": torch.randn(4, 3, dtype=torch.float64)}
    found = autoplan.search(model, batch, cluster="1xcpu")
    assert autoplan.compile(model, found)(**batch).item() == pytest.approx(model(**batch).item(), abs=1e-12)
    with pytest.raises(PlanError, match="over the batch|no sum over its samples"):
        autoplan.compile(model, replace(found, num_microbatches=2))(**batch)


def test_edited_tensor_placements_are_refused() -> None:
    graph = segment_graph(trace_model(plain(), inputs()).graph)
    found = random_plan(graph, pp=1, dp=1, tp=2, microbatches=1, seed=0)
    check_strategies(found, graph)
    head = found.layouts[-1]
    for wrong in (PARTIAL, REPLICATE_PARTIAL_GRAD):
        outputs = tuple(wrong if p == REPLICATE else p for p in head.outputs)
        edited = replace(found, layouts=(*found.layouts[:-1], replace(head, outputs=outputs)))
        with pytest.raises(PlanError, match="must leave its segment"):
            check_strategies(edited, graph)
    block = found.layouts[1]
    mixed = tuple(
        replace(op, tensor=Strategy(inputs=(REPLICATE_PARTIAL_GRAD,) * len(op.tensor.inputs), outputs=(REPLICATE,)))
        if op.node.startswith("linear") else op
        for op in block.ops
    )  # fmt: skip
    edited = replace(found, layouts=(found.layouts[0], replace(block, ops=mixed), *found.layouts[2:]))
    with pytest.raises(PlanError, match="cannot run as"):
        check_strategies(edited, graph)


class Moody(nn.Module):
    """Part of the model is kept in evaluation by its owner."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Linear(3, 3)
        self.switch = nn.Dropout(0.0)

    def forward(self, x: Tensor) -> Tensor:
        y = self.inner(x)
        return (y * (3.0 if self.switch.training else 1.0)).pow(2).mean()


def test_a_part_in_eval_mode_stays_there() -> None:
    model = Moody().double()
    model.switch.eval()
    batch = {"x": torch.randn(4, 3, dtype=torch.float64)}
    compiled = autoplan.compile(model, autoplan.search(model, batch, cluster="1xcpu"))
    assert compiled(**batch).item() == pytest.approx(model(**batch).item(), abs=1e-12)
    compiled.train(), model.train()
    assert compiled(**batch).item() == pytest.approx(model(**batch).item(), abs=1e-12)


@pytest.mark.parametrize("loss", [F.mse_loss, F.l1_loss, F.smooth_l1_loss, F.huber_loss])
def test_losses_that_broadcast_first(loss) -> None:
    class Regression(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.inner = nn.Linear(3, 2)

        def forward(self, x: Tensor, y: Tensor) -> Tensor:
            return loss(self.inner(x), y)

    model = Regression().double()
    batch = {"x": torch.randn(4, 3, dtype=torch.float64), "y": torch.randn(4, 2, dtype=torch.float64)}
    compiled = autoplan.compile(model, autoplan.search(model, batch, cluster="1xcpu", microbatch=2))
    assert compiled(**batch).item() == pytest.approx(model(**batch).item(), abs=1e-12)


def test_returning_a_parameter_is_refused_in_evaluation() -> None:
    class Returns(Centered):
        def forward(self, x: Tensor) -> dict[str, Tensor]:
            return {"loss": self.inner(x).pow(2).mean(), "bias": self.inner.bias, "like": torch.zeros_like(x)}

    model = Returns().double()
    batch = {"x": torch.randn(4, 3, dtype=torch.float64)}
    compiled = autoplan.compile(model, autoplan.search(model, batch, cluster="1xcpu", microbatch=2))
    assert compiled(**batch)["loss"].item() == pytest.approx(model(**batch)["loss"].item(), abs=1e-12)
    with pytest.raises(InputError, match="returns its parameter inner.bias"):
        compiled.eval()(**batch)


def test_dropout_no_loss_and_frozen_parameters_are_refused(plan: autoplan.Plan) -> None:
    dropping = plain(dropout=0.1)
    found = autoplan.search(dropping, inputs(), cluster="1xcpu", microbatch=2)
    model = autoplan.compile(dropping, found)
    with pytest.raises(InputError, match=r"dropout .*not supported yet"):
        model(**inputs())
    with pytest.raises(InputError, match="needs the loss"):
        autoplan.compile(plain(), plan)(idx=inputs()["idx"])
    frozen = plain()
    frozen.wpe.weight.requires_grad_(False)
    with pytest.raises(InputError, match="frozen"):
        autoplan.compile(frozen, plan)
    with pytest.raises(InputError, match=r"before autoplan\.compile"):
        autoplan.compile(plain(), plan).float()


def test_a_model_on_meta_is_initialised_the_same_every_time(plan: autoplan.Plan) -> None:
    def build(seed: int) -> nn.Module:
        with torch.device("meta"):
            model = nanogpt.GPT(config()).double()
        compiled = autoplan.compile(model, plan)
        with pytest.raises(InputError, match="init_weights"):
            compiled(**inputs())
        compiled.init_weights(seed)
        return compiled

    first, second, other = build(0), build(0), build(1)
    for (name, a), b, c in zip(first.named_parameters(), second.parameters(), other.parameters(), strict=True):
        assert torch.equal(a.full_tensor(), b.full_tensor()), name
        if name.endswith("weight") and "ln" not in name:
            assert not torch.equal(a.full_tensor(), c.full_tensor()), name
    weight = dict(first.named_parameters())["h.0.mlp.c_fc.weight"].full_tensor()
    assert weight.std().item() == pytest.approx(0.02, rel=0.3), "the model's own _init_weights ran"
    assert first(**inputs())[1].isfinite()


def test_loading_is_strict_and_writes_nothing_when_it_fails(plan: autoplan.Plan) -> None:
    source, model = plain(), autoplan.compile(plain(), plan)
    state = {name: value + 1 for name, value in source.state_dict().items()}
    before = {name: value.full_tensor().clone() for name, value in model.state_dict().items()}
    for broken, match in (
        ({k: v for k, v in state.items() if k != "wpe.weight"}, "missing"),
        ({**state, "extra": torch.zeros(1)}, "unexpected"),
        ({**state, "ln_f.weight": torch.zeros(3)}, "shape"),
    ):
        with pytest.raises(InputError, match=match):
            model.load_state_dict(broken)
    assert all(torch.equal(value.full_tensor(), before[name]) for name, value in model.state_dict().items())
    model.load_state_dict(state)
    assert all(torch.equal(value.full_tensor(), state[name]) for name, value in model.state_dict().items())


def test_without_a_plan_one_is_searched() -> None:
    original = plain()
    model = autoplan.compile(original, example_inputs=inputs())
    assert model(**inputs())[1].item() == pytest.approx(original(**inputs())[1].item(), abs=1e-12)
    deferred = autoplan.compile(original)
    with pytest.raises(InputError, match="first call"):
        list(deferred.parameters())
    assert deferred(**inputs())[1].item() == pytest.approx(original(**inputs())[1].item(), abs=1e-12)
    assert len(list(deferred.parameters())) == len(list(original.parameters()))


def test_clipping_wants_a_compiled_model(plan: autoplan.Plan) -> None:
    original = plain()
    original(**inputs())[1].backward()
    with pytest.raises(InputError, match=r"autoplan\.compile"):
        autoplan.clip_grad_norm_(original.parameters(), 1.0)


class Extra(nn.Module):
    """A model with a parameter that nothing reads."""

    def __init__(self) -> None:
        super().__init__()
        self.spare = nn.Parameter(torch.zeros(3))
        self.body = nanogpt.GPT(config())

    def forward(self, idx: Tensor, targets: Tensor) -> object:
        return self.body(idx, targets)


def test_unused_parameters_are_kept() -> None:
    original = Extra().double()
    model = autoplan.compile(original, autoplan.search(original, inputs(), cluster="1xcpu"))
    model(**inputs())[1].backward()
    assert set(model.state_dict()) == set(original.state_dict())
    assert dict(model.named_parameters())["spare"].grad is None


def test_the_zoo_has_what_the_oracle_needs() -> None:
    for name, entry in zoo.ZOO.items():
        batch = entry.batch(8, 0)
        labels = batch.get("targets", batch.get("labels"))
        assert labels is not None
        valid = [(row >= 0).sum().item() for row in labels]
        assert len(set(valid)) > 2 and 0 in valid, f"{name}: labels must be unevenly ignored"
