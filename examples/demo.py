"""The whole story on one machine: plan for 8 H100s, explain, then train on local ranks beside the plain loop."""

import argparse
import os
import re
import subprocess
import sys
from pathlib import Path

from rich.console import Console
from rich.table import Table

HERE = Path(__file__).parent
BIN = Path(sys.executable).parent
RANKS = 2


def say(text: str) -> None:
    """Say what comes next and why."""
    print(f"\n=== {text}", flush=True)


def run(*command: str) -> str:
    """Run a command, showing it as it can be typed here; return what it printed. Exits with its code on failure."""
    shown = [os.path.relpath(part) if os.path.isabs(part) else part for part in command]
    print(f"$ {' '.join(shown)}", flush=True)
    # One thread per rank, as torchrun would set with a warning.
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    done = subprocess.run(command, stdout=subprocess.PIPE, text=True, check=False, env=environment)
    if done.returncode:
        print(done.stdout)
        sys.exit(done.returncode)
    return done.stdout


def losses(output: str) -> dict[int, float]:
    """Loss by step, as train.py prints it."""
    return {int(step): float(loss) for step, loss in re.findall(r"step +(\d+) +loss +([\d.]+)", output)}


def main() -> None:
    """Plan, report, train twice, compare."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--steps", type=int, default=30)
    parser.add_argument("--out", type=Path, default=Path("out"))
    options = parser.parse_args()
    options.out.mkdir(parents=True, exist_ok=True)
    big, small = str(options.out / "plan-8xH100.json"), str(options.out / "plan-2xcpu.json")
    autoplan, torchrun = str(BIN / "autoplan"), str(BIN / "torchrun")
    model, html = str(HERE / "nanogpt.py"), str(options.out / "plan-8xH100.html")

    say("Plan a small GPT for hardware that is not here: 8 H100s. No GPU is needed and no weights are allocated.")
    run(autoplan, "search", model, "--cluster", "8xH100", "--global-batch", "512", "-o", big)
    print(run(autoplan, "report", big, "--html", html))
    print(f"The same with pictures of the step and the memory: {html}")

    say(f"Plan the same model for {RANKS} processes on this machine, to run it for real.")
    here = ("--cluster", f"{RANKS}xcpu", "--global-batch", "16", "--runnable")
    plan = run(autoplan, "search", model, *here, "-o", small)
    print("\n".join(plan.splitlines()[:8]))

    say(f"Train {options.steps} steps on real text (the help topics of Python) with the plain loop, in one process.")
    steps = ("--steps", str(options.steps))
    plain = losses(run(sys.executable, str(HERE / "train.py"), *steps))

    say(f"Train with the same loop on {RANKS} ranks by the plan.")
    launch = (torchrun, "--standalone", "--nproc-per-node", str(RANKS), "--local-ranks-filter", "0")
    planned = losses(run(*launch, str(HERE / "train_parallel.py"), *steps, "--plan", small))

    say("Both losses side by side.")
    table = Table()
    for heading in ("step", "one process", f"{RANKS} ranks, planned", "difference"):
        table.add_column(heading, justify="right")
    for step, loss in plain.items():
        table.add_row(str(step), f"{loss:.6f}", f"{planned[step]:.6f}", f"{planned[step] - loss:+.1e}")
    Console().print(table)
    worst = max(abs(planned[step] - loss) for step, loss in plain.items())
    print(f"largest difference of the losses: {worst:.1e} (float32)")
    if worst > 1e-3 or len(planned) != options.steps:
        sys.exit("the planned run does not agree with the plain one")


if __name__ == "__main__":
    main()
