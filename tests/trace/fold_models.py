"""Models whose layers repeat, or seem to. Each has eight layers; what is special about it is in its name."""

import random
from collections.abc import Callable
from dataclasses import dataclass
from types import SimpleNamespace

import torch
import torch.nn.functional as F
from torch import Tensor, nn

LAYERS = 8


class Block(nn.Module):
    def __init__(self, index: int = 0) -> None:
        super().__init__()
        self.index = index
        self.norm = nn.LayerNorm(4)
        self.up = nn.Linear(4, 8)
        self.down = nn.Linear(8, 4)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.down(F.gelu(self.up(self.norm(x))))


class Stack(nn.Module):
    """Layers one after the other; subclasses say what is different."""

    block: Callable[[int], nn.Module] = Block

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Linear(4, 4)
        self.layers = nn.ModuleList(type(self).block(i) for i in range(LAYERS))
        self.head = nn.Linear(4, 2)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.run(self.embed(x))).sum()

    def run(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = layer(x)
        return x


# The model looks at its layers: it runs as it is, so each of these folds.


class HiddenStates(Stack):
    def forward(self, x: Tensor) -> tuple[Tensor, list[Tensor]]:
        states = [self.embed(x)]
        for layer in self.layers:
            states.append(layer(states[-1]))
        return self.head(states[-1]).sum(), states


class SkipsToLater(Stack):
    """A U-net: each layer of the second half reads one of the first."""

    def run(self, x: Tensor) -> Tensor:
        kept = []
        for layer in self.layers[: LAYERS // 2]:
            x = layer(x)
            kept.append(x)
        for layer in self.layers[LAYERS // 2 :]:
            x = layer(x + kept.pop())
        return x


class FifthIsSpecial(Stack):
    def run(self, x: Tensor) -> Tensor:
        for i, layer in enumerate(self.layers):
            x = layer(x) if i != 5 else layer(x * 2).relu()
        return x


class EverySecond(Stack):
    def run(self, x: Tensor) -> Tensor:
        for layer in self.layers[::2]:
            x = layer(x)
        for i in range(1, len(self.layers), 2):
            x = self.layers[i](x) * (i / len(self.layers))
        return x


class ScaledByDepth(Stack):
    def run(self, x: Tensor) -> Tensor:
        return super().run(x) / len(self.layers) ** 0.5


class LongConfig(Stack):
    """What the model does between layers is in a list that looks regular for longer than two layers."""

    def run(self, x: Tensor) -> Tensor:
        for kind, layer in zip(["a"] * 5 + ["b"] * 3, self.layers, strict=True):
            x = layer(x if kind == "a" else x.tanh())
        return x


class HookOnLayer(Stack):
    def __init__(self) -> None:
        super().__init__()
        self.layers[3].register_forward_hook(lambda module, args, out: out * 3)


class Pair(nn.Module):
    def __init__(self, index: int) -> None:
        super().__init__()
        self.first, self.second = Block(), Block()
        self.index = index

    def forward(self, x: Tensor, mask: Tensor | None = None, *, scale: float = 1.0) -> dict[str, object]:
        y = self.first(x) if mask is None else self.first(x) * mask
        return {"x": self.second(y) * scale, "given": (x, mask), "aux": y.mean(), "count": 2}


class ReturnsMuch(Stack):
    block = Pair

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        mask = torch.ones(4).cumsum(0) / 4
        x = self.embed(x)
        losses = []
        for i, layer in enumerate(self.layers):
            out = layer(x, mask if i % 2 else None, scale=0.5)
            assert out["given"][0] is x and out["count"] == 2
            x = out["x"]
            losses.append(out["aux"])
        return self.head(x).sum(), torch.stack(losses).sum()


class Experts(nn.Module):
    """A list within a list."""

    def __init__(self, _index: int) -> None:
        super().__init__()
        self.gate = nn.Linear(4, 5)
        self.experts = nn.ModuleList(Block() for _ in range(5))

    def forward(self, x: Tensor) -> Tensor:
        share = self.gate(x).softmax(-1)
        return sum((expert(x) * share[..., i : i + 1] for i, expert in enumerate(self.experts)), x)


class Nested(Stack):
    block = Experts


class Alternating(Stack):
    @staticmethod
    def block(index: int) -> nn.Module:
        block = Block(index)
        if index % 2:
            block.down = nn.Linear(8, 4, bias=False)
        return block


class HalfFrozen(Stack):
    def __init__(self) -> None:
        super().__init__()
        for layer in self.layers[: LAYERS // 2]:
            layer.requires_grad_(False)


class DropsOut(Stack):
    @staticmethod
    def block(_index: int) -> nn.Module:
        return nn.Sequential(nn.Linear(4, 4), nn.Dropout(0.1), nn.ReLU())


class TwoLines(Stack):
    """Layers of torch alone: the user's line of an op is where the layer is called."""

    block = DropsOut.block

    def run(self, x: Tensor) -> Tensor:
        for layer in self.layers[:5]:
            x = layer(x)
        for layer in self.layers[5:]:
            x = layer(x)
        return x


class Transposes(nn.Module):
    def __init__(self, _index: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.eye(4))

    def forward(self, x: Tensor) -> Tensor:
        with torch.no_grad():
            size = x.abs().mean()
        return (x.transpose(0, 1) @ self.weight / size).transpose(0, 1)


class Strided(Stack):
    block = Transposes


class OwnWrites(Block):
    def forward(self, x: Tensor) -> Tensor:
        y = self.up(self.norm(x))
        y.clamp_(min=0.1)
        y /= y.sum(-1, keepdim=True)
        return x + self.down(F.relu_(y))


class WritesInside(Stack):
    block = OwnWrites


# A layer depends on more than its shape: each is traced itself, or the whole model is.


class UsesIndex(Block):
    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x) / (self.index + 1)


class ByIndex(Stack):
    block = UsesIndex


class ComparesIndex(Block):
    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x).relu() if self.index == 5 else super().forward(x)


class LateIndex(Stack):
    block = ComparesIndex


class CatchesAll(Block):
    def forward(self, x: Tensor) -> Tensor:
        try:
            return super().forward(x) * [1.0, 1.0, 2.0, 3.0, 4.0, 5.0, 6.0, 7.0][self.index]
        except Exception:
            return super().forward(x)


class Swallows(Stack):
    block = CatchesAll


class ReturnsIndex(Block):
    def forward(self, x: Tensor) -> tuple[Tensor, int]:
        return super().forward(x), self.index


class Numbers(Stack):
    block = ReturnsIndex

    def forward(self, x: Tensor) -> tuple[Tensor, list[int]]:
        numbers = []
        x = self.embed(x)
        for layer in self.layers:
            x, number = layer(x)
            numbers.append(number)
        return x.sum(), numbers


class Dropping(Block):
    """Stochastic depth: a rate of its own for each layer."""

    def __init__(self, index: int) -> None:
        super().__init__()
        self.rate = index / 10

    def forward(self, x: Tensor) -> Tensor:
        return x + F.dropout(super().forward(x), self.rate)


class StochasticDepth(Stack):
    block = Dropping


class OneFlag(Stack):
    def __init__(self) -> None:
        super().__init__()
        self.layers[6].up = nn.Sequential(nn.Linear(4, 8), nn.ReLU())


class SetFromOutside(Block):
    factor = 1.0

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x) * self.factor


class SetsAttribute(Stack):
    block = SetFromOutside

    def run(self, x: Tensor) -> Tensor:
        for i, layer in enumerate(self.layers):
            layer.factor = 1.0 if i < 5 else 2.0
            x = layer(x)
        return x


@dataclass
class Settings:
    now: int = 0


class ReadsSettings(Block):
    def __init__(self, index: int) -> None:
        super().__init__(index)
        self.settings = SETTINGS

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x) * (2.0 if self.settings.now > 4 else 1.0)


SETTINGS = Settings()


class SharedSettings(Stack):
    block = ReadsSettings

    def run(self, x: Tensor) -> Tensor:
        for i, layer in enumerate(self.layers):
            layer.settings.now = i
            x = layer(x)
        return x


STATE = SimpleNamespace(calls=0, kept=[])


def _scaled(x: Tensor) -> Tensor:
    return x * (2.0 if STATE.calls > 4 else 1.0)


class CountsCalls(Block):
    def forward(self, x: Tensor) -> Tensor:
        STATE.calls += 1
        return _scaled(super().forward(x))


class GlobalCounter(Stack):
    block = CountsCalls

    def run(self, x: Tensor) -> Tensor:
        STATE.calls = 0
        return super().run(x)


class KeepsOutside(Block):
    def forward(self, x: Tensor) -> Tensor:
        y = super().forward(x)
        STATE.kept.append(y)
        return y if len(STATE.kept) < 5 else y + STATE.kept[-5]


class FirstIsSpecial(Block):
    def forward(self, x: Tensor) -> Tensor:
        STATE.calls += 1
        return super().forward(x) * (2.0 if STATE.calls == 1 else 1.0)


class SecondCall(GlobalCounter):
    block = FirstIsSpecial


class GlobalList(Stack):
    block = KeepsOutside

    def run(self, x: Tensor) -> Tensor:
        STATE.kept = []
        return super().run(x)


class CountsOnClass(Block):
    calls = 0

    def forward(self, x: Tensor) -> Tensor:
        type(self).calls += 1
        return super().forward(x) * (2.0 if self.calls > 4 else 1.0)


class ClassCounter(Stack):
    block = CountsOnClass

    def run(self, x: Tensor) -> Tensor:
        CountsOnClass.calls = 0
        return super().run(x)


def _closure() -> tuple[type[nn.Module], list[int]]:
    calls = [0]

    class CountsInClosure(Block):
        def forward(self, x: Tensor) -> Tensor:
            calls[0] += 1
            return super().forward(x) * (2.0 if calls[0] > 4 else 1.0)

    return CountsInClosure, calls


class ClosureCounter(Stack):
    block, calls = _closure()

    def run(self, x: Tensor) -> Tensor:
        self.calls[0] = 0
        return super().run(x)


class KeepsLoss(Block):
    def __init__(self, index: int) -> None:
        super().__init__(index)
        self.loss: Tensor | float = 0.0

    def forward(self, x: Tensor) -> Tensor:
        y = super().forward(x)
        self.loss = y.pow(2).mean()
        return y


class LossOnLayer(Stack):
    block = KeepsLoss

    def forward(self, x: Tensor) -> Tensor:
        loss = super().forward(x) + sum(layer.loss for layer in self.layers)
        for layer in self.layers:
            layer.loss = 0.0
        return loss


class Lucky(Block):
    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x) * (2.0 if random.random() > 0.5 else 1.0)


class PythonRandom(Stack):
    block = Lucky

    def run(self, x: Tensor) -> Tensor:
        random.seed(3)
        return super().run(x)


class MakesConstant(Block):
    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x) * torch.tensor([1.0, 2.0, 3.0, 4.0])


class Constants(Stack):
    block = MakesConstant


class WritesToGiven(Block):
    def forward(self, x: Tensor) -> Tensor:
        y = super().forward(x)
        x.mul_(2)
        return y


class WritesOutside(Stack):
    block = WritesToGiven

    def run(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = layer(x) + x
        return x


class ReturnsView(Block):
    def forward(self, x: Tensor) -> Tensor:
        return x.transpose(0, 1)


class WritesToView(Stack):
    block = ReturnsView

    def run(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            y = layer(x)
            y.mul_(2)
            x = x + y.transpose(0, 1)
        return x


class ReturnsViewOnce(ReturnsView):
    def __init__(self, index: int) -> None:
        super().__init__(index)
        self.rate = index / 10


class WritesToOneView(WritesToView):
    """No layer is like another, so each is marked and none is repeated."""

    block = ReturnsViewOnce


class CallsHeld(Block):
    """Calls a function that it is given as an attribute."""

    scale: Callable[[Tensor], Tensor]

    def forward(self, x: Tensor) -> Tensor:
        return self.scale(super().forward(x))


def _counted(x: Tensor) -> Tensor:
    STATE.calls += 1
    return _scaled(x)


class HeldFunction(GlobalCounter):
    block = CallsHeld

    def __init__(self) -> None:
        super().__init__()
        for layer in self.layers:
            layer.scale = _counted


class AppendsToGiven(Block):
    def forward(self, x: Tensor, states: list[Tensor]) -> Tensor:
        y = super().forward(x)
        states.append(y)
        return y


class ListArgument(Stack):
    block = AppendsToGiven

    def run(self, x: Tensor) -> Tensor:
        states: list[Tensor] = []
        for layer in self.layers:
            x = layer(x, states)
        return torch.stack(states).sum(0)


class HookInside(Stack):
    def __init__(self) -> None:
        super().__init__()
        self.layers[6].up.register_forward_hook(lambda module, args, out: out * 3)


class HooksCollect(Stack):
    """Each layer hands out something by the way."""

    def __init__(self) -> None:
        super().__init__()
        for layer in self.layers:
            layer.up.register_forward_hook(_collect)

    def run(self, x: Tensor) -> Tensor:
        STATE.kept = []
        return super().run(x) + torch.stack(STATE.kept).mean()


def _collect(_module: nn.Module, _args: object, out: Tensor) -> None:
    STATE.kept.append(out)


class SumsWeights(Stack):
    """A penalty on the weights of all layers, without a call of them."""

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x) + sum(p.pow(2).sum() for p in self.layers.parameters())


class ReadsLastWeight(Stack):
    def run(self, x: Tensor) -> Tensor:
        return super().run(x) * self.layers[-1].up.weight.mean()


class CallsInside(Stack):
    """Not the layers are called, but what is in them."""

    def run(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = x + layer.down(F.gelu(layer.up(layer.norm(x))))
        return x


class TiedLayers(Stack):
    """Layers 2 and 3 share a weight, layer 5 has that of the embedding."""

    def __init__(self) -> None:
        super().__init__()
        self.layers[2].up.weight = self.layers[3].up.weight
        self.layers[5].norm.bias = self.embed.bias


class SharedNorm(Stack):
    """A module that is part of every layer goes by one name."""

    def __init__(self) -> None:
        super().__init__()
        for layer in self.layers:
            layer.norm = self.layers[0].norm


class OneLayerAgain(Stack):
    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList([self.layers[0]] * LAYERS)


class TwiceThrough(Stack):
    def run(self, x: Tensor) -> Tensor:
        return super().run(super().run(x))


class NoGradLayers(Stack):
    def run(self, x: Tensor) -> Tensor:
        with torch.no_grad():
            return super().run(x)


class AutocastLayers(Stack):
    def run(self, x: Tensor) -> Tensor:
        with torch.autocast("cpu", dtype=torch.bfloat16):
            return super().run(x)


class LastAuxIsRead(Stack):
    """Of all but the last layer one output is dropped."""

    block = Pair

    def forward(self, x: Tensor) -> Tensor:
        x = self.embed(x)
        for layer in self.layers:
            out = layer(x)
            x = out["x"]
        return self.head(x).sum() + out["aux"]


class Finds(Block):
    def __init__(self, index: int) -> None:
        super().__init__(index)
        self.around: list[nn.Module] = []

    def forward(self, x: Tensor) -> Tensor:
        place = next(i for i, layer in enumerate(self.around[0].layers) if layer is self)
        return super().forward(x) * (2.0 if place > 4 else 1.0)


class LooksAround(Stack):
    block = Finds

    def __init__(self) -> None:
        super().__init__()
        for layer in self.layers:
            layer.around.append(self)


FOLDED = (
    HiddenStates, SkipsToLater, FifthIsSpecial, EverySecond, ScaledByDepth, LongConfig, HookOnLayer, ReturnsMuch,
    Nested, Alternating, HalfFrozen, DropsOut, TwoLines, Strided, WritesInside, SetsAttribute, LastAuxIsRead,
    SumsWeights, ReadsLastWeight,
)  # fmt: skip
"""Some layers are repeated."""
IN_PART = (OneFlag, HookInside, TiedLayers, StochasticDepth)
"""Layers that differ are traced themselves."""
IN_FULL = (
    ByIndex, LateIndex, Swallows, Numbers, GlobalCounter, GlobalList, ClassCounter, ClosureCounter, LossOnLayer,
    PythonRandom, Constants, WritesOutside, WritesToView, ListArgument, OneLayerAgain, TwiceThrough, NoGradLayers,
    AutocastLayers, LooksAround, SharedSettings, HooksCollect, CallsInside, SharedNorm, SecondCall,
    WritesToOneView, HeldFunction,
)  # fmt: skip
"""No layer is repeated."""
