"""Train the character model of nanogpt.py on text that every Python ships. The loop of train.py, made parallel."""

import argparse
from pydoc_data.topics import topics

import nanogpt
import torch

import autoplan


def batches(batch_size: int, length: int, seed: int):
    """Yield batches of characters and the characters that follow them, the same for the same seed, for ever."""
    text = "".join(topics[name] for name in sorted(topics))
    codes = torch.tensor([min(ord(c), 126) for c in text])
    generator = torch.Generator().manual_seed(seed)
    while True:
        starts = torch.randint(len(codes) - length - 1, (batch_size,), generator=generator)
        windows = torch.stack([codes[s : s + length + 1] for s in starts.tolist()])
        yield {"idx": windows[:, :-1].contiguous(), "targets": windows[:, 1:].contiguous()}


def main() -> None:
    """Train and print the loss of every step."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--steps", type=int, default=30)
    parser.add_argument("--batch-size", type=int, default=16)
    parser.add_argument("--plan", default="plan.json")
    options = parser.parse_args()
    torch.manual_seed(0)
    torch.set_num_threads(1)
    model = autoplan.compile(nanogpt.build_model(), plan=options.plan)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    data = batches(options.batch_size, nanogpt.Config().block_size, seed=0)
    for step in range(options.steps):
        _, loss = model(**next(data))
        loss.backward()
        autoplan.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
        print(f"step {step:3d}  loss {loss.item():.6f}", flush=True)


if __name__ == "__main__":
    main()
