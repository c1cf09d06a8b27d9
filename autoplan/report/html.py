"""Report -> one HTML file that needs no network: style and pictures are inside, there is no script."""

from collections.abc import Container, Iterable, Sequence
from html import escape

from autoplan.plan.money import BILL_NOTE, Bill, bill_pairs, bill_title, formula_pairs
from autoplan.plan.plan import Plan
from autoplan.plan.rows import ChoiceFacts
from autoplan.plan.summary import mesh_words, not_yet_words, over_data_words, proof_pairs, speed_words, summary_pairs
from autoplan.plan.words import bytes_text, count_text, ranges_text, ranks_text, rate_text, share_text, time_text
from autoplan.report.report import PlaceRow, Report, RunnerUpRow, make_report
from autoplan.report.svg import legend, memory_svg, step_svg, timeline_svg
from autoplan.report.timeline import Timeline, shown_windows, simulate

_STYLE = """
:root { color-scheme: light dark; --page: #f6f7f9; --card: #fff; --ink: #1c2430; --soft: #5b6675; --line: #dfe3e8;
  --idle: #eceff3; --forward: #2f6fde; --backward: #e08214; --after: #9aa5b1; --limit: #c62828; --on: #fff;
  --c0: #2f6fde; --c1: #e08214; --c2: #1b9e77; --c3: #c2479b; --c4: #7b5ea7; --c5: #b8860b; --c6: #17a2b8;
  --c7: #8d6e63; --c8: #6c8e23; --c9: #607d8b; --weight: #1b9e77; }
@media (prefers-color-scheme: dark) { :root { --page: #12161c; --card: #1a2028; --ink: #e6eaf0; --soft: #9aa5b5;
  --line: #2d3641; --idle: #252d37; --forward: #5b93f0; --backward: #f0a04b; --after: #6d7885; --limit: #ff6b6b;
  --on: #10141a; --c0: #5b93f0; --c1: #f0a04b; --c2: #3fc49a; --c3: #e073bd; --c4: #a78bda; --c5: #d9b04a;
  --c6: #45c4d8; --c7: #b79a8f; --c8: #9dbf52; --c9: #90a4ae; --weight: #3fc49a; } }
* { box-sizing: border-box; }
body { margin: 0; background: var(--page); color: var(--ink); font: 15px/1.5 system-ui, sans-serif; }
main { max-width: 1120px; margin: 0 auto; padding: 28px 20px 60px; }
h1 { font-size: 1.55rem; margin: 0 0 2px; overflow-wrap: anywhere; } h2 { font-size: 1.1rem; margin: 0 0 12px; }
p { margin: 6px 0; } .warning { color: var(--limit); } .soft { color: var(--soft); }
section { background: var(--card); border: 1px solid var(--line); border-radius: 10px; padding: 18px 20px;
  margin-top: 18px; }
.facts { display: grid; grid-template-columns: repeat(auto-fit, minmax(165px, 1fr)); gap: 12px; margin: 18px 0 0; }
.facts div { background: var(--card); border: 1px solid var(--line); border-radius: 10px; padding: 12px 16px; }
.facts dt { color: var(--soft); font-size: .85rem; } .facts dd { margin: 0; font-size: 1.25rem; font-weight: 600; }
.scroll { overflow-x: auto; }
table { border-collapse: collapse; width: 100%; font-variant-numeric: tabular-nums; }
caption { text-align: left; color: var(--soft); padding-bottom: 6px; }
th, td { text-align: left; padding: 5px 16px 5px 0; border-bottom: 1px solid var(--line); vertical-align: top; }
th { font-weight: 600; color: var(--soft); font-size: .85rem; } tbody th { color: var(--ink); font-size: inherit; }
.n { text-align: right; } td.n { white-space: nowrap; }
table { margin-top: 10px; } code { font: .9em ui-monospace, monospace; overflow-wrap: anywhere; }
.chart { width: 100%; min-width: 640px; height: auto; display: block; }
.chart text { fill: var(--ink); font-size: 13px; } .chart .axis { fill: var(--soft); font-size: 12px; }
.chart .in { fill: var(--on); font-size: 11px; text-anchor: middle; } .chart .gap { text-anchor: middle; }
.chart rect { stroke: var(--card); stroke-width: .6; } .tick { stroke: var(--soft); }
.idle { fill: var(--idle); } .forward { fill: var(--forward); } .backward { fill: var(--backward); }
.weight { fill: var(--weight); } .after { fill: var(--after); }
.limit { stroke: var(--limit); stroke-width: 2.5; stroke-dasharray: 6 3; }
.legend { list-style: none; display: flex; flex-wrap: wrap; gap: 4px 18px; margin: 10px 0 0; padding: 0; }
.key { display: inline-block; width: 12px; height: 12px; border-radius: 3px; margin-right: 6px; }
""" + "".join(f".c{i} {{ fill: var(--c{i}); background: var(--c{i}); }}\n" for i in range(10))

_TIMELINE_KEYS = (
    ("forward", "forward pass, number of the microbatch"),
    ("backward", "backward pass"),
    ("weight", "gradient of weights"),
    ("idle", "waiting"),
    ("after", "gradient reduction, optimizer"),
)


def report_html(plan: Plan, bill: Bill | None = None) -> str:
    """The whole report as one page."""
    report = make_report(plan, bill)
    body = [
        _head(plan, report),
        _section("Proof", _table(("", ""), proof_pairs(plan))),
        *_choices(report),
        *_bill(report),
        _timeline(plan, report),
        _section("Time of a step", _wide(step_svg(report)), legend([s.cause for s in report.step]), _shares(report)),
        _memory(report),
        _section("Stages", _stages(report)),
        _section("Weights", _weights(plan, report)),
        _section("Communication of one rank in a step", _collectives(report)),
        _section("Runners-up", _runners_up(report)),
        _section("Assumptions", _table(("", ""), report.assumptions)),
    ]
    title = escape(f"Plan for {report.model} on {report.cluster}")
    return (
        '<!doctype html>\n<html lang="en"><head><meta charset="utf-8">'
        '<meta name="viewport" content="width=device-width, initial-scale=1">'
        f"<title>{title}</title><style>{_STYLE}</style></head>\n<body><main>\n"
        + "\n".join(body)
        + "\n</main></body></html>\n"
    )


def _section(title: str, *parts: str) -> str:
    return f"<section><h2>{escape(title)}</h2>{''.join(parts)}</section>"


def _wide(content: str) -> str:
    """What scrolls by itself where the page is narrow."""
    return f'<div class="scroll">{content}</div>'


def _table(
    header: Sequence[str], rows: Iterable[Sequence[str]], numbers: Container[int] = (), code: Container[int] = ()
) -> str:
    """Cells as text; ``numbers`` and ``code`` are the columns that are set right or in type."""

    def cells(row: Sequence[str], tag: str) -> str:
        made = []
        for i, cell in enumerate(row):
            css = ' class="n"' if i in numbers else ""
            text = f"<code>{escape(cell)}</code>" if tag == "td" and i in code and cell else escape(cell)
            made.append(f"<{tag}{css}>{text}</{tag}>")
        return f"<tr>{''.join(made)}</tr>"

    head = f"<thead>{cells(header, 'th')}</thead>" if any(header) else ""
    return _wide(f"<table>{head}<tbody>{''.join(cells(row, 'td') for row in rows)}</tbody></table>")


def _head(plan: Plan, report: Report) -> str:
    fullest = max(report.places, key=lambda row: row.memory_bytes)
    microbatches = count_text(report.num_microbatches, "microbatch")
    facts = {
        "predicted step": time_text(report.step_us),
        "throughput": ", ".join(speed_words(plan)) or "-",
        "mesh": mesh_words(plan),
        "batch": f"{report.batch_size} in {microbatches} of {report.microbatch_size}",
        "fullest device": f"{bytes_text(fullest.memory_bytes)} of {bytes_text(fullest.limit_bytes)}",
    }
    cards = "".join(f"<div><dt>{escape(name)}</dt><dd>{escape(text)}</dd></div>" for name, text in facts.items())
    choices = [(name, text) for name, text in summary_pairs(plan) if name not in ("step", "mesh", "batch")]
    words = "".join(f"<p><b>{escape(name.capitalize())}:</b> {escape(text)}.</p>" for name, text in choices)
    not_yet = not_yet_words(plan)
    warning = f'<p class="warning">{escape(not_yet)}</p>' if not_yet else ""
    return (
        f'<header><h1>{escape(report.model)}</h1><p class="soft">planned for {escape(report.cluster)} '
        f'by autoplan {escape(report.version)}</p><dl class="facts">{cards}</dl></header>'
        f"<section>{words}{warning}</section>"
    )


def _choices(report: Report) -> list[str]:
    """The good plans beside the chosen one; nothing when there are none."""
    if len(report.choices) < 2:
        return []
    unit = "tokens/s" if report.tokens_per_s else "samples/s"
    header = ("rank", "plan", "step", unit, "MFU", "peak memory", "bubble", "communication", "front")
    note = "Rank 1 is this plan. front: no other plan that was solved is both faster and smaller."
    rows = _table(header, [_choice(facts) for facts in report.choices], numbers=(0, 2, 3, 4, 5, 6, 7))
    return [_section("Good plans", f'<p class="soft">{note}</p>', rows)]


def _bill(report: Report) -> list[str]:
    """Time and cost, where somebody asked."""
    if report.bill is None:
        return []
    rows = (*bill_pairs(report.bill), *((f"{name} =", formula) for name, formula in formula_pairs(report.bill)))
    return [_section(bill_title(report.bill), _table(("", ""), rows), f'<p class="soft">{escape(BILL_NOTE)}</p>')]


def _choice(facts: ChoiceFacts) -> tuple[str, ...]:
    rate = facts.tokens_per_s or facts.samples_per_s
    return (
        str(facts.rank),
        facts.label,
        time_text(facts.step_us),
        rate_text(rate) if rate else "-",
        share_text(facts.mfu) if facts.mfu else "-",
        bytes_text(facts.peak_bytes),
        share_text(facts.bubble_share),
        share_text(facts.communication_share),
        "yes" if facts.on_front else "",
    )


def _timeline(plan: Plan, report: Report) -> str:
    timeline = simulate(plan)
    cut = len(shown_windows(timeline)) > 1
    note = f"Beginning and end of {count_text(report.num_microbatches, 'microbatch')}. " if cut else ""
    words = f'<p class="soft">{note}Replayed from the predicted forward and backward times of each stage.</p>'
    picture = _wide(timeline_svg(timeline))
    return _section("Timeline of a step", words, picture, _timeline_legend(timeline))


def _timeline_legend(timeline: Timeline) -> str:
    keys = [key for key in _TIMELINE_KEYS if key[0] != "weight" or timeline.splits_backward]
    items = [f'<li><span class="key" style="background:var(--{css})"></span>{words}</li>' for css, words in keys]
    if timeline.chunks > 1:
        items.append("<li>stages of a place from dark to light</li>")
    return f'<ul class="legend">{"".join(items)}</ul>'


def _shares(report: Report) -> str:
    rows = [(s.cause, time_text(s.amount), share_text(s.share)) for s in report.step]
    return _table(("cause", "time", "share"), [*rows, ("total", time_text(report.step_us), "100.0%")], numbers=(1, 2))


def _memory(report: Report) -> str:
    causes = list(dict.fromkeys(part.cause for row in report.places for part in row.memory))
    header = ("place" if report.chunks > 1 else "stage", *causes, "total", "limit", "free")
    rows = [_memory_row(row, causes) for row in report.places]
    picture = _wide(memory_svg(report))
    return _section(
        "Peak memory of a device", picture, legend(causes), _table(header, rows, numbers=range(1, len(header)))
    )


def _memory_row(row: PlaceRow, causes: list[str]) -> tuple[str, ...]:
    amounts = {part.cause: part.amount for part in row.memory}
    free = bytes_text(row.free_bytes) if row.free_bytes >= 0 else f"over by {bytes_text(-row.free_bytes)}"
    totals = (bytes_text(row.memory_bytes), bytes_text(row.limit_bytes), free)
    return (str(row.place), *(bytes_text(amounts.get(cause, 0)) for cause in causes), *totals)


def _stages(report: Report) -> str:
    """One row per group of layers; a stage's facts stand on its first row, those of its place on the place's."""
    rows, several = [], report.chunks > 1
    for row in report.stages:
        place = report.places[row.place]
        ranks = ranks_text([range(first, last + 1) for first, last in place.ranks])
        for i, layer in enumerate(row.layers):
            first, top = i == 0, i == row.chunk == 0
            left = ((str(row.place) if top else "", str(row.chunk) if first else "")) if several else ()
            times = (time_text(row.forward_us), time_text(row.backward_us)) if first else ("",) * 2
            what = (layer.layers, layer.recompute, layer.layout)
            idle = time_text(place.idle_us) if top else ""
            rows.append((*left, str(row.stage) if first else "", ranks if top else "", *what, *times, idle))
    header = ("stage", "ranks", "layers", "recompute", "layout", "forward", "backward", "idle in a step")
    more = ("place", "chunk") if several else ()
    return _table((*more, *header), rows, numbers=range(5 + len(more), 8 + len(more)), code=(4 + len(more),))


def _weights(plan: Plan, report: Report) -> str:
    experts = plan.expert > 1
    over_expert = (f"over ep {plan.expert}",) if experts else ()
    header = ("weight", "count", "stages", f"over tp {plan.mesh.size('tp')}", *over_expert, over_data_words(plan))
    rows = [
        (w.pattern, str(w.count), ranges_text(w.stages), w.tensor, *((w.expert,) if experts else ()), w.data)
        for w in report.weights
    ]
    legend_words = (
        "Shard(d): split along dim d; blocks=n: within each of n equal blocks of it. Replicate: whole on each device; "
        "partial_grad: its gradient is summed over the axis once a step."
    )
    return f'<p class="soft">{legend_words}</p>' + _table(header, rows, numbers=(1,), code=(0, 3, 4, 5))


def _collectives(report: Report) -> str:
    stages: dict[tuple[str, ...], list[int]] = {}
    for row in report.stages:
        for c in row.collectives:
            stages.setdefault((c.axis, c.kind.value, f"{c.count:,}", bytes_text(c.num_bytes)), []).append(row.stage)
    rows = [(ranges_text(found), *facts) for facts, found in stages.items()]
    return _table(("stages", "axis", "collective", "count", "bytes"), rows, numbers=(3, 4)) if rows else "<p>None.</p>"


def _runners_up(report: Report) -> str:
    rows = [_runner_up(row) for row in report.runners_up]
    return _table(("plan", "step", "against this plan", "lost by"), rows, numbers=(1, 2)) if rows else "<p>None.</p>"


def _runner_up(row: RunnerUpRow) -> tuple[str, ...]:
    if row.step_us is None:
        return (row.label, "refused", "", row.reason)
    slower = "" if row.slower_share is None else f"{100 * row.slower_share:+.1f}%"
    return (row.label, time_text(row.step_us), slower, row.reason)
