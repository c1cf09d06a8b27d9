"""The rules of the house that a tool can check: imports, sizes, exports, the promised diff of the example."""

import ast
import difflib
import subprocess
import sys
from pathlib import Path

import pytest

import autoplan

ROOT = Path(__file__).parent.parent
FOLDERS = {"autoplan": "autoplan", "cost_models": "autoplan.cost_models", "runtime": "autoplan.runtime"}
FILES = [path for folder in FOLDERS for path in sorted((ROOT / folder).rglob("*.py"))]
WITH_TORCH = ("autoplan.trace", "autoplan.runtime", "autoplan.api", "autoplan.planning", "autoplan.examine",
              "autoplan.profiler")  # fmt: skip
LONGEST_FUNCTION, LONGEST_FILE = 60, 400


def module_name(path: Path) -> str:
    folder, *rest = path.relative_to(ROOT).with_suffix("").parts
    return ".".join([FOLDERS[folder], *(part for part in rest if part != "__init__")])


def test_every_module_imports_alone_and_only_some_load_torch() -> None:
    """One fresh interpreter per kind, since a module that torch-free code pulls in would hide behind the others."""
    names = [module_name(path) for path in FILES]
    free = [name for name in names if not name.startswith(WITH_TORCH)]
    code = "import sys, importlib; [importlib.import_module(n) for n in sys.argv[1:]]; print('torch' in sys.modules)"
    for chosen, loads in ((free, "False"), ([n for n in names if n not in free], "True")):
        done = subprocess.run([sys.executable, "-c", code, *chosen], capture_output=True, text=True, check=False)
        assert done.stdout.strip() == loads, done.stderr
    seen = "print('torch' in sys.modules)"
    code = f"import sys, autoplan; autoplan.Plan; {seen}; autoplan.search; {seen}"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.split() == ["False", "True"]


def test_a_search_loads_nothing_of_the_runtime() -> None:
    """Nor of FSDP and pipelining, which take longer to load than a small model to plan."""
    heavy = ("autoplan.runtime", "autoplan.api", "torch.distributed.fsdp", "torch.distributed.pipelining")
    code = "import sys, autoplan; autoplan.search; print([n for n in sys.argv[1:] if n in sys.modules])"
    done = subprocess.run([sys.executable, "-c", code, *heavy], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"


def test_exports_are_the_public_names() -> None:
    assert autoplan.__all__ == sorted(autoplan.__all__)
    assert all(getattr(autoplan, name) is not None for name in autoplan.__all__)


@pytest.mark.parametrize("path", FILES, ids=lambda p: str(p.relative_to(ROOT)))
def test_files_and_functions_stay_small(path: Path) -> None:
    text = path.read_text()
    assert len(text.splitlines()) <= LONGEST_FILE
    for node in ast.walk(ast.parse(text)):
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            assert (node.end_lineno or 0) - node.lineno + 1 <= LONGEST_FUNCTION, node.name


def test_private_torch_names_live_in_compat_alone() -> None:
    for path in FILES:
        if path.name == "compat.py":
            continue
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.ImportFrom) and (node.module or "").startswith("torch"):
                parts = [*(node.module or "").split("."), *(alias.name for alias in node.names)]
                assert not any(part.startswith("_") for part in parts), f"{path.name}: {node.module} {parts}"


def test_making_the_example_parallel_takes_five_lines() -> None:
    plain, parallel = ((ROOT / "examples" / name).read_text() for name in ("train.py", "train_parallel.py"))
    changed = [
        line
        for line in difflib.ndiff(plain.splitlines(), parallel.splitlines())
        if line.startswith("+ ") and line[2:].strip() and not line.startswith('+ """')
    ]
    assert 1 <= len(changed) <= 5, changed


def test_the_readme_shows_that_diff() -> None:
    readme = (ROOT / "README.md").read_text()
    for line in ("autoplan.compile(nanogpt.build_model(), plan=options.plan)", "autoplan.clip_grad_norm_("):
        assert line in readme
        assert line in (ROOT / "examples" / "train_parallel.py").read_text()
