"""The whole story on one machine: plan for 8 H100s, explain, then train on local ranks beside the plain loop."""

import argparse
import re
import subprocess
import sys
from pathlib import Path

from rich.console import Console
from rich.table import Table

HERE = Path(__file__).parent
RANKS = 2


def run(*command: str) -> str:
    """Run a command, showing what it is; return what it printed. Exits with its code when it fails."""
    print(f"\n$ {' '.join(Path(c).name if Path(c).is_absolute() else c for c in command)}", flush=True)
    done = subprocess.run(command, stdout=subprocess.PIPE, text=True, check=False)
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
    autoplan = str(Path(sys.executable).with_name("autoplan"))
    torchrun = str(Path(sys.executable).with_name("torchrun"))
    model, html = str(HERE / "nanogpt.py"), str(options.out / "plan-8xH100.html")

    print(run(autoplan, "search", model, "--cluster", "8xH100", "--global-batch", "512", "-o", big))
    run(autoplan, "report", big, "--html", html)
    print(f"pictures of this plan: {html}")
    run(autoplan, "search", model, "--cluster", f"{RANKS}xcpu", "--global-batch", "16", "-o", small)

    steps = ("--steps", str(options.steps))
    plain = losses(run(sys.executable, str(HERE / "train.py"), *steps))
    launch = (torchrun, "--standalone", "--nproc-per-node", str(RANKS), "--local-ranks-filter", "0")
    planned = losses(run(*launch, str(HERE / "train_parallel.py"), *steps, "--plan", small))
    table = Table(title=f"{options.steps} steps on real text: one process beside {RANKS} ranks by the plan")
    for heading in ("step", "one process", "planned", "difference"):
        table.add_column(heading, justify="right")
    for step in plain:
        table.add_row(str(step), f"{plain[step]:.6f}", f"{planned[step]:.6f}", f"{planned[step] - plain[step]:+.1e}")
    Console().print(table)
    worst = max(abs(planned[step] - plain[step]) for step in plain)
    print(f"largest difference of the losses: {worst:.1e} (float32)")
    if worst > 1e-3 or len(planned) != options.steps:
        sys.exit("the planned run does not agree with the plain one")


if __name__ == "__main__":
    main()
