"""Cases that once went wrong on several ranks."""

import math

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

import autoplan


class TiedOnce(nn.Module):
    """The head reads the embedding twice, once without a gradient; pipeline stages hold a copy each."""

    def __init__(self, learn: bool) -> None:
        super().__init__()
        self.emb = nn.Embedding(7, 6)
        self.layers = nn.ModuleList(nn.Linear(6, 6) for _ in range(3))
        self.head = nn.Linear(6, 7)
        self.learn = learn

    def forward(self, idx: Tensor, targets: Tensor) -> Tensor:
        x = self.emb(idx) if self.learn else F.embedding(idx, self.emb.weight.detach())
        for layer in self.layers:
            x = x + torch.tanh(layer(x))
        logits = F.linear(x, self.emb.weight.detach()) + self.head(x)
        return F.cross_entropy(logits.flatten(0, 1), targets.flatten())


def tied_with_one_gradient(learn: bool) -> list[str]:
    """Names whose gradient differs from the plain model's, or exists on one side only."""
    torch.manual_seed(0)
    plain = TiedOnce(learn).double()
    tokens = torch.arange(20).view(4, 5) % 7
    batch = {"idx": tokens, "targets": tokens.roll(1, 1)}
    plan = autoplan.search(plain, batch, cluster="2xcpu", pp=2, runnable=True)
    model = autoplan.compile(plain, plan)
    model(**batch).backward()
    plain(**batch).backward()
    wanted = {name: p.grad for name, p in plain.named_parameters()}
    wrong = []
    for name, p in model.named_parameters():
        want = wanted[name]
        if (p.grad is None) != (want is None):
            wrong.append(f"{name}: {p.grad is None} {want is None}")
        elif want is not None and not torch.allclose(p.grad.full_tensor(), want, rtol=0, atol=1e-12):
            wrong.append(name)
    return wrong


def norms(learn: bool = True) -> dict[str, float]:
    """Norms over a part of the parameters (some stages hold none of them), and of gradients with a nan on one rank."""
    torch.manual_seed(0)
    plain = TiedOnce(learn).double()
    tokens = torch.arange(20).view(4, 5) % 7
    batch = {"idx": tokens, "targets": tokens.roll(1, 1)}
    model = autoplan.compile(plain, autoplan.search(plain, batch, cluster="2xcpu", pp=2, runnable=True))
    model(**batch).backward()
    plain(**batch).backward()
    some = [p for name, p in model.named_parameters() if name.startswith("layers.0")]
    wanted = torch.nn.utils.clip_grad_norm_([p for n, p in plain.named_parameters() if n.startswith("layers.0")], 1e9)
    found = {"part": autoplan.clip_grad_norm_(some, 1e9).item(), "plain": wanted.item()}
    if model._ranks.pp.coordinate == 1:
        last = next(iter(reversed(list(model.parameters()))))
        assert isinstance(last.grad, DTensor)
        last.grad.to_local().fill_(math.nan)
    found["largest"] = autoplan.clip_grad_norm_(model, 1e9, math.inf).item()
    found["two"] = autoplan.clip_grad_norm_(model, 1e9).item()
    return found
