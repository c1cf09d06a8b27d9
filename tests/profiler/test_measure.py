"""The loop over cases: resume, what does not fit, Ctrl-C, and the clocks, all without waiting."""

from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from autoplan.cost import Call
from autoplan.errors import InputError
from autoplan.ir import TensorMeta, Token
from autoplan.profiler import measure as loop
from autoplan.profiler import timing
from autoplan.profiler.cache import open_cache
from autoplan.profiler.cases import Dispatch, Matmul, OpCase, Stream
from autoplan.profiler.collectives import World
from autoplan.profiler.measure import Stopwatch, measure, measure_case
from autoplan.profiler.ops import make_run
from autoplan.profiler.timing import Effort

ALONE = World(rank=0, size=1, per_node=1, device=torch.device("cpu"), groups={})
PLACE = {"device": "cpu", "ranks": "1"}
CASES = (Dispatch(), Matmul(m=2, n=2, k=2, dtype="float32"), Stream(op="gelu", num_bytes=64, dtype="float32"))


def fake(us: float) -> Callable[[object, int], float]:
    return lambda _run, _count: us


WATCH = Stopwatch(compute=fake(7.0), transfer=fake(9.0), effort=Effort(seconds=0.0, least=1))


def test_a_second_run_measures_only_what_is_missing(tmp_path: Path) -> None:
    path, told = tmp_path / "times", list[str]()
    measure(CASES[:2], ALONE, open_cache(path, PLACE), WATCH, told.append)
    assert open_cache(path, PLACE).times == {case.key: 7.0 for case in CASES[:2]}
    told.clear()
    measure(CASES, ALONE, open_cache(path, PLACE), WATCH, told.append)
    assert told == [f"1 of 1: {CASES[2].key}"]
    assert len(path.read_text().splitlines()) == len(CASES)


def test_another_place_shares_the_file_and_no_times(tmp_path: Path) -> None:
    path = tmp_path / "times"
    measure(CASES, ALONE, open_cache(path, PLACE), WATCH, lambda _: None)
    other = open_cache(path, {**PLACE, "ranks": "2"})
    assert other.times == {}
    other.add("dispatch", 1.0)
    assert open_cache(path, PLACE).times["dispatch"] == 7.0
    assert open_cache(path, PLACE, fresh=True).times == {}


def test_a_cut_off_last_line_is_dropped_and_another_one_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "times"
    open_cache(path, PLACE).add("dispatch", 2.0)
    path.write_text(path.read_text() + '{"place": "x", "ke')
    assert open_cache(path, PLACE).times == {"dispatch": 2.0}
    open_cache(path, PLACE).add("other", 3.0)
    assert open_cache(path, PLACE).times == {"dispatch": 2.0, "other": 3.0}
    path.write_text("nonsense\n" + path.read_text())
    with pytest.raises(InputError, match="line 1"):
        open_cache(path, PLACE)


def test_what_does_not_fit_is_noted_and_skipped(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def make(case: object, device: torch.device) -> object:
        if isinstance(case, Matmul):
            raise torch.OutOfMemoryError("tried to allocate more than there is")
        return make_run(case, device)  # type: ignore[arg-type]

    monkeypatch.setattr(loop, "make_run", make)
    cache, told = open_cache(tmp_path / "times", PLACE), list[str]()
    measure(CASES, ALONE, cache, WATCH, told.append)
    assert cache.times == {CASES[0].key: 7.0, CASES[1].key: None, CASES[2].key: 7.0}
    assert [text for text in told if "left out" in text] == [told[2]]
    told.clear()
    measure(CASES, ALONE, cache, WATCH, told.append)
    assert told == []


def test_a_bug_is_no_lack_of_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    def broken(_case: object, _device: object) -> object:
        raise AttributeError("a bug")

    monkeypatch.setattr(loop, "make_run", broken)
    with pytest.raises(AttributeError):
        measure_case(Dispatch(), ALONE, WATCH)


def test_ctrl_c_keeps_what_was_measured(tmp_path: Path) -> None:
    path, seen = tmp_path / "times", list[str]()

    def interrupt(message: str) -> None:
        seen.append(message)
        if len(seen) == 3:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        measure(CASES, ALONE, open_cache(path, PLACE), WATCH, interrupt)
    assert list(open_cache(path, PLACE).times) == [case.key for case in CASES[:2]]


def test_the_quartile_is_deaf_to_noise_and_short_runs_are_timed_in_a_row() -> None:
    times, counts = iter([1.0, 9.0, 50.0, 2.0, 9.0]), list[int]()

    def elapsed(_run: object, count: int) -> float:
        counts.append(count)
        return next(times)

    assert timing.typical_us(lambda: None, elapsed, Effort(seconds=0.0, least=4)) == 9.0
    assert counts == [3, 300, 300, 300, 300]
    assert timing.quartile([5.0]) == 5.0
    assert timing.num_samples(1e4, Effort(seconds=0.05, least=2)) == 5


def test_the_clocks_tell_microseconds_of_one_run() -> None:
    for clock in (timing.host_us, timing.thread_us):
        assert 0 <= clock(lambda: None, 1000) < 1000
    compute, transfer = timing.clocks(torch.device("cpu"))
    assert transfer is timing.host_us
    assert compute is (timing.thread_us if torch.get_num_threads() == 1 else timing.host_us)


LINEAR = ("aten.linear.default", (Token("value", "0"), Token("value", "1")))
CALLS = (
    Call(op=LINEAR[0], args=LINEAR[1], kwargs=(), operands=(meta := TensorMeta(shape=(3, 4), dtype="float32"), meta)),
    Call(op=LINEAR[0], args=LINEAR[1], kwargs=(), operands=(meta, meta), needs=(True, True)),
    Call(op="aten.layer_norm.default", args=(Token("value", "0"), (4,)), kwargs=(), operands=(meta,), needs=(True,)),
    Call(op="aten.to.dtype", args=(Token("value", "0"), Token("dtype", "float64")), kwargs=(), operands=(meta,)),
    Call(
        op="aten.embedding.default", args=LINEAR[1], kwargs=(), needs=(True, False),
        operands=(meta, TensorMeta(shape=(9,), dtype="int64")),
    ),
)  # fmt: skip


@pytest.mark.parametrize("call", CALLS, ids=str)
def test_an_op_of_a_model_runs_alone_in_either_direction(call: Call) -> None:
    run = make_run(OpCase(call=call, flops=1, num_bytes=1), torch.device("cpu"))
    assert run is not None
    first, again = run(), run()
    if call.needs:
        assert [x.shape for x in first] == [(3, 4)] * sum(call.needs)  # type: ignore[attr-defined]
        assert all(torch.equal(x, y) for x, y in zip(first, again, strict=True))  # type: ignore[call-overload]
    else:
        assert first.requires_grad  # type: ignore[attr-defined]


def test_an_op_that_cannot_run_alone_has_no_time() -> None:
    call = Call(op=LINEAR[0], args=LINEAR[1], kwargs=(), operands=(TensorMeta(shape=(3, 4), dtype="float32"),
                TensorMeta(shape=(5, 6), dtype="float32")))  # fmt: skip
    assert measure_case(OpCase(call=call, flops=1, num_bytes=1), ALONE, WATCH) is None
