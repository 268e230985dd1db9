"""
One page to look at: figures, curves and dialogues of one or more files of result rows, self-contained HTML.

    python evaluate.py report FILE... --out report.html       several files stand side by side, the first is what the others are compared with

No network, no script: a page that opens anywhere and still does in ten years. Every text is escaped (what a model wrote is data). Charts are inline
SVG in the page's own colours, dark or light. Left out on purpose: a plotting library, interaction beyond folding.
"""
import json
from html import escape
from pathlib import Path

import numpy as np

from rundir import Flags, die, read_json, writable, write_atomically
from scores import by_scenario, curve_of, gaming, groups, number, played_with, read_rows, score, show
from stats import bootstrap, half_up, paired_difference

STYLE = """
:root{color-scheme:light dark;--text:#1c1f23;--faint:#6b7280;--line:#d5d9df;--paper:#fff;--box:#f5f6f8;--c0:#6b7280;--c1:#2563eb;--c2:#c2410c;--c3:#15803d;--c4:#9333ea;--c5:#be185d;--up:#15803d;--down:#b91c1c}
@media(prefers-color-scheme:dark){:root{--text:#e5e7eb;--faint:#9ca3af;--line:#3a4049;--paper:#14171b;--box:#1d2127;--c0:#9ca3af;--c1:#60a5fa;--c2:#fb923c;--c3:#4ade80;--c4:#c084fc;--c5:#f472b6;--up:#4ade80;--down:#f87171}}
body{font:15px/1.5 system-ui,sans-serif;color:var(--text);background:var(--paper);max-width:1080px;margin:2em auto;padding:0 1em}
h1{font-size:1.5em}h2{font-size:1.15em;margin:2em 0 .5em;border-bottom:1px solid var(--line)}
table{border-collapse:collapse;display:block;overflow-x:auto}td,th{padding:.25em .55em;text-align:right;border-bottom:1px solid var(--line)}td{white-space:nowrap}th{font-weight:600;color:var(--faint);vertical-align:bottom}td:first-child,th:first-child{text-align:left}
figure{margin:1em 0;overflow-x:auto}figcaption,.faint{color:var(--faint);font-size:.88em}svg{max-width:100%;height:auto}svg text{fill:var(--text);font-size:11px}svg .axis{stroke:var(--line)}svg .whisker{stroke:var(--text)}
details{background:var(--box);border-radius:6px;margin:.5em 0;padding:.4em .8em}summary{cursor:pointer}.charts{display:grid;grid-template-columns:repeat(auto-fit,minmax(min(440px,100%),1fr));gap:0 1em}.pair{display:grid;grid-template-columns:repeat(auto-fit,minmax(320px,1fr));gap:0 1em}
.talk p{margin:.35em 0;overflow-wrap:anywhere}.who{color:var(--faint);font-size:.8em;display:block}.user{border-left:3px solid var(--line);padding-left:.6em}.policy{border-left:3px solid var(--c1);padding-left:.6em}
.meter{font-variant-numeric:tabular-nums;font-size:.85em;color:var(--faint)}.up{color:var(--up)}.down{color:var(--down)}.key span{display:inline-block;margin-right:1.2em}.key i{display:inline-block;width:.8em;height:.8em;border-radius:2px;margin-right:.4em}
"""


def colour(k):
    return f"var(--c{k % 6})"


# ---------------------------------------------------------------------------------------------- charts
def line_chart(title, x_label, y_label, lines, y_max=None):
    """SVG of lines: list of (name, xs, ys, lows or None, highs or None); a band is drawn where lows are given, and skipped where it is None."""
    lines = [(k, *line) for k, line in enumerate(lines) if line[1] and np.isfinite(line[2]).all()]
    if not lines:
        return ""
    W, H, left, bottom, top = 640, 260, 64, 40, 12
    xs, ys = [x for _, _, a, *_ in lines for x in a], [y for _, _, _, b, lows, highs in lines for part in (b, lows or [], highs or []) for y in part if y is not None]
    x0, x1, y0 = min(xs), max(max(xs), min(xs) + 1), 0 if y_max else min(0, *ys)
    rough = ((y_max or max(max(ys), y0 + 1e-9)) - y0) / 4
    tick = next(m for m in 10.0 ** np.floor(np.log10(rough)) * np.array([1, 2, 2.5, 5, 10]) if m >= rough * 0.9999)      # a round step, 4 of them
    y0 = np.floor(y0 / tick) * tick
    y1 = y_max or max(np.ceil(max(ys) / tick) * tick, y0 + tick)
    X = lambda x: left + (x - x0) / (x1 - x0) * (W - left - 12)
    Y = lambda y: H - bottom - (y - y0) / (y1 - y0) * (H - bottom - top)
    out = [f'<svg viewBox="0 0 {W} {H}" width="{W}" height="{H}" role="img" aria-label="{escape(title)}">']
    for y in np.arange(y0, y1 + tick / 2, tick):
        out.append(f'<line class="axis" x1="{left}" x2="{W - 12}" y1="{Y(y):.1f}" y2="{Y(y):.1f}"/><text x="{left - 6}" y="{Y(y) + 4:.1f}" text-anchor="end">{y:.4g}</text>')
    step = max(1, -(-round(x1 - x0) // 12))
    out += [f'<text x="{X(x):.1f}" y="{H - bottom + 16}" text-anchor="middle">{x:g}</text>' for x in np.arange(x0, x1 + 1e-9, step)]
    out.append(f'<text x="{(W + left) / 2}" y="{H - 6}" text-anchor="middle">{escape(x_label)}</text><text transform="translate(12 {(H - bottom) / 2}) rotate(-90)" text-anchor="middle">{escape(y_label)}</text>')
    for k, name, a, b, lows, highs in lines:
        known = [i for i in range(len(a)) if lows and lows[i] is not None]
        if known:
            path = [f"{X(a[i]):.1f},{Y(highs[i]):.1f}" for i in known] + [f"{X(a[i]):.1f},{Y(lows[i]):.1f}" for i in reversed(known)]
            out.append(f'<polygon points="{" ".join(path)}" fill="{colour(k)}" opacity=".15"/>')
        out.append(f'<polyline points="{" ".join(f"{X(x):.1f},{Y(y):.1f}" for x, y in zip(a, b))}" fill="none" stroke="{colour(k)}" stroke-width="2"/>')
        out += [f'<circle cx="{X(x):.1f}" cy="{Y(y):.1f}" r="2.5" fill="{colour(k)}"><title>{escape(name)}: {y:.4g} at {x:g}</title></circle>' for x, y in zip(a, b)]
    return f'<figure>{"".join(out)}</svg><figcaption>{escape(title)}</figcaption></figure>'


def bar_chart(title, groups, runs):
    """SVG of horizontal bars, 0..100, with 95 % whiskers. groups: names; runs: per run, group -> {"n", "score", "ci"}."""
    if not groups:
        return ""
    left, thick = 200, 11
    height = len(groups) * (thick * len(runs) + 9) + 34
    out, y = [f'<svg viewBox="0 0 640 {height}" width="640" height="{height}" role="img" aria-label="{escape(title)}">'], 4
    for x in (0, 25, 50, 75, 100):
        out.append(f'<line class="axis" x1="{left + 3.8 * x}" x2="{left + 3.8 * x}" y1="0" y2="{height - 30}"/><text x="{left + 3.8 * x}" y="{height - 18}" text-anchor="middle">{x}</text>')
    for group in groups:
        out.append(f'<text x="{left - 8}" y="{y + thick * len(runs) / 2 + 4}" text-anchor="end">{escape(group)}</text>')
        for k, run in enumerate(runs):
            if group in run:
                low, high, size = (None if x is None else max(0, min(100, x)) for x in (*run[group]["ci"], run[group]["score"]))
                end = left + 3.8 * max(size, high or 0)
                out.append(f'<rect x="{left}" y="{y}" width="{3.8 * size:.1f}" height="{thick - 1}" fill="{colour(k)}"/>'
                           + (f'<line class="whisker" x1="{left + 3.8 * low:.1f}" x2="{left + 3.8 * high:.1f}" y1="{y + 5}" y2="{y + 5}"/>' if low is not None else "") + f'<text x="{end + 5:.1f}" y="{y + 9}">{half_up(run[group]["score"])} (n {run[group]["n"]})</text>')
            y += thick
        y += 9
    out.append(f'<text x="{left + 190}" y="{height - 3}" text-anchor="middle">mean final emotion</text>')
    return f'<figure>{"".join(out)}</svg><figcaption>{escape(title)}</figcaption></figure>'


def emotion_chart(named):
    """Mean emotion after each reply with its 95 % band (scenarios resampled); a dialogue that has ended stays where it ended."""
    lines = []
    for name, rows in named:
        curves = [curve_of(r) for r in rows]
        length = max(map(len, curves), default=0)
        table = np.array([c + c[-1:] * (length - len(c)) for c in curves], float).reshape(len(curves), length).clip(0, 100)        # (dialogues, turns + 1)
        bands = [bootstrap(table[:, t], [str(r["id"]) for r in rows], 1000) for t in range(length)]
        lines.append((name, list(range(length)), table.mean(0).tolist() if length else [], [b[0] for b in bands], [b[1] for b in bands]))
    return line_chart("Emotion by turn: mean and 95 % interval", "replies so far", "emotion", lines, 100)


# ---------------------------------------------------------------------------------------------- dialogues
def dialogue(row):
    """One dialogue: what was said, the emotion after each turn, what moved it, the user's thought."""
    out, before = [], None
    for h in row.get("history", []):
        text = f'{escape(h["content"])}{" <span class=faint>[cut off]</span>" if h.get("cut") else ""}'
        if h["role"] == "assistant":
            out.append(f'<p class="policy"><span class="who">policy</span>{text}</p>')
            continue
        meter, e = "", h.get("emotion-point")
        if e is not None:
            change = "" if before is None else f' <span class="{"up" if e > before else "down" if e < before else ""}">({e - before:+g})</span>'
            moved = ", ".join(f"{escape(str(k))} {v:+.1f}" for k, v in h.get("parts", {}).items() if number(v) and v) if isinstance(h.get("parts"), dict) else ""
            plan = h.get("planning") if isinstance(h.get("planning"), dict) else {}
            thought = escape(str(plan.get("analyse") or plan.get("activity") or ""))
            meter, before = f'<p class="meter">emotion {e:g}{change}{" · " + moved if moved else ""}{"<br>thinks: " + thought if thought else ""}</p>', e
        out.append(f'{meter}<p class="user"><span class="who">user</span>{text}</p>' * bool(h["content"] or meter))
    if before is not None and before != row["emo_point"]:
        out.append(f'<p class="meter">emotion at the end {row["emo_point"]:g}</p>')
    return f'<div class="talk">{"".join(out)}</div>'


def heading(row):
    facts = [row["id"], row.get("intent"), row.get("state"), row.get("finish")]
    return f'{escape(" · ".join(str(f) for f in facts if f))} <b>{f"{curve_of(row)[0]:g} → " * (len(curve_of(row)) > 1)}{row["emo_point"]:g}</b>'


def chosen(rows, k=3):
    """(title, row) of the k best, k median and k worst dialogues, none twice."""
    order = sorted(range(len(rows)), key=lambda i: -rows[i]["emo_point"])
    middle, seen, out = max(0, (len(order) - k) // 2), set(), []
    for title, part in (("best", order[:k]), ("worst", order[::-1][:k]), ("median", order[middle:middle + k])):
        out += [(title, rows[i]) for i in part if not (i in seen or seen.add(i))]
    return sorted(out, key=lambda item: ("best", "median", "worst").index(item[0]))


def side_by_side(named, k=6):
    """The same scenario (and state) in the first run and in the last, k pairs from most gained to most lost."""
    key = lambda r: (str(r["id"]), str(r.get("state")))
    (first, a), (last, b) = named[0], named[-1]
    before, after = ({key(r): r for r in reversed(rows)} for rows in (a, b))
    common = sorted(before.keys() & after.keys(), key=lambda i: before[i]["emo_point"] - after[i]["emo_point"])
    pick = sorted({round(i) for i in np.linspace(0, len(common) - 1, min(k, len(common)))}) if common else []
    out = []
    for i in pick:
        x, y = before[common[i]], after[common[i]]
        out.append(f'<details><summary>{escape(" · ".join(filter(None, [str(x["id"]), str(x.get("state") or "")])))}: {escape(first)} <b>{x["emo_point"]:g}</b>, {escape(last)} <b>{y["emo_point"]:g}</b></summary>'
                   f'<div class="pair"><div><h4>{escape(first)}</h4>{dialogue(x)}</div><div><h4>{escape(last)}</h4>{dialogue(y)}</div></div></details>')
    return "".join(out)


# ---------------------------------------------------------------------------------------------- the page
def summary_table(named, scores, compare):
    head = ("", "n", "score", "95 % CI", "success %", "failure %", "against the first", "within %", "across %", "parroting %", "drift", "plea %")
    out = "".join(f"<th>{h}</th>" for h in head)
    for k, ((name, rows), s) in enumerate(zip(named, scores)):
        g, against = gaming(rows), "-"
        if k and compare:
            d = paired_difference(by_scenario(named[0][1]), by_scenario(rows))
            against = "-" if d["difference"] is None else f'{d["difference"]:+.1f} [{d["low"]:+.1f}, {d["high"]:+.1f}]{"" if d["resolved"] else " not resolved"}'
        cells = [s["n"], half_up(s["score"]), f'{half_up(s["low"])} .. {half_up(s["high"])}', half_up(s["success"]), half_up(s["failure"]), against,
                 *(half_up(None if g[i] is None else 100 * g[i], 0) for i in ("within", "across", "parroting")), half_up(g["drift"], 2), half_up(None if g["plea"] is None else 100 * g["plea"], 0)]
        out += f'</tr><tr><td><i style="color:{colour(k)}">■</i> {escape(name)}</td>' + "".join(f"<td>{c}</td>" for c in cells)
    return f"<table><tr>{out}</tr></table>"


def page(path, named, note="", metrics=(), title="nanoempathy: evaluation", compare=True):
    """Writes the page. named: list of (name, result rows), the first is the base of comparison (compare; else they are not alike: other users); metrics: a training run's lines, for its curves."""
    scores = [score(rows) for _, rows in named]
    key = '<p class="key">' + "".join(f'<span><i style="background:{colour(k)}"></i>{escape(name)}</span>' for k, (name, _) in enumerate(named)) + "</p>"
    parts = [f"<h1>{escape(title)}</h1>", f'<p class="faint">{escape(note)}</p>' if note else "", summary_table(named, scores, compare),
             '<p class="faint">score: mean final emotion, 0 to 100; the interval resamples scenarios; success: ends at 100, failure: below 10. within, across: share of a reply\'s 4-word runs said before in the '
             "dialogue, in another dialogue; parroting: taken from the user; drift: last reply's length over the first's; plea: dialogues that ask for a good rating.</p>"]
    if metrics:
        lines = lambda *names: [(n, [m["step"] for m in metrics if m.get(n) is not None], [m[n] for m in metrics if m.get(n) is not None], None, None) for n in names]
        legend = lambda *names: '<p class="key">' + "".join(f'<span><i style="background:{colour(k)}"></i>{escape(n)}</span>' for k, n in enumerate(names)) + "</p>"
        parts += ["<h2>Training</h2>", legend("emotion in training", "emotion on the dev split"), '<div class="charts">', line_chart("Final emotion by step", "step", "emotion", lines("emotion", "dev_emotion"), 100),
                  *(line_chart(what, "step", name, lines(name)) for name, what in (("entropy", "Entropy of the policy, nats a token"), ("kl", "KL from the sampling policy, nats a token"), ("tokens", "Mean reply length, tokens"))),
                  *(line_chart(f"Reward by {name.removeprefix('reward_')}, mean over replies", "step", name, lines(name)) for name in sorted({n for m in metrics for n in m if n.startswith("reward_")})), "</div>"]
    if any(len(curve_of(r)) > 1 for _, rows in named for r in rows):
        parts += ["<h2>Emotion by turn</h2>", key, emotion_chart(named)]
    for title_, kind in (("By hidden intention", "intents"), ("By interaction state", "states")):
        groups = list(dict.fromkeys(g for s in scores for g in s[kind]))
        parts += [f"<h2>{title_}</h2>", key, bar_chart(f"{title_}: mean final emotion", groups, [s[kind] for s in scores])] if groups else []
    if len(named) > 1:
        parts += [f"<h2>The same scenarios, {escape(named[0][0])} and {escape(named[-1][0])}</h2>", side_by_side(named)]
    for name, rows in named:
        parts += [f"<h2>Dialogues: {escape(name)}</h2>"] + [f"<details><summary>{kind}: {heading(row)}</summary>{dialogue(row)}</details>" for kind, row in chosen(rows)]
    html = f'<!doctype html><html lang="en"><meta charset="utf-8"><meta name="viewport" content="width=device-width"><title>{escape(title)}</title><style>{STYLE}</style><body>{"".join(parts)}</body></html>'
    write_atomically(Path(path), html.encode("utf-8", "replace"))


def beside(out, *args, **kwargs):
    """The page of the rows in file `out`, beside it. What can't be written costs a warning: the rows and figures are there already."""
    path = Path(out).with_suffix(".html")
    try:
        page(path, *args, **kwargs)
        print(f"to look at: {path}")
    except OSError as e:
        print(f"warning: {path} cannot be written ({e.strerror}); make it with: python evaluate.py report {out}", flush=True)


def training_page(folder, record, rows):
    """The page of a training run: dev dialogues before RL against the latest ones, with the curves. record: metrics of this step; rows: its dev dialogues,
    kept as dev_first.jsonl and dev_last.jsonl."""
    folder, lines = Path(folder), "".join(json.dumps(r, ensure_ascii=False) + "\n" for r in rows).encode("utf-8", "replace")
    first, metrics = folder / "dev_first.jsonl", folder / "metrics.jsonl"
    if record["step"] == 0 or not first.exists():
        write_atomically(first, lines)
    write_atomically(folder / "dev_last.jsonl", lines)
    before = [m for m in (read_json(metrics, rows=True) if metrics.exists() else []) if m.get("step", 0) < record["step"]]
    named = [("before RL", read_rows(first)[0])] + [(f"step {record['step']}", rows)] * bool(record["step"])
    page(folder / "report.html", named, "dialogues of the dev split, played at each evaluation", [*before, record], f"nanoempathy: {folder.name}")


def main(argv=None):
    """`evaluate.py report`; returns the exit code."""
    p = Flags(prog="evaluate.py report", description=__doc__)
    p.add_argument("files", nargs="+", metavar="FILE", help="result rows, as evaluate.py run --out writes them, or SAGE's")
    p.add_argument("--compare", nargs="+", default=[], metavar="FILE", help="more files, side by side with the first")
    p.add_argument("--names", default="", metavar="A,B,...", help="what to call the files, in order (default: their names)")
    p.add_argument("--out", type=writable, default="report.html", metavar="FILE", help="page to write (default: %(default)s)")
    args, _ = p.parse(argv)
    files = [*args.files, *args.compare]
    stems = [Path(f).stem for f in files]
    names = [n.strip() for n in args.names.split(",")] if args.names else stems if len(set(stems)) == len(stems) else files
    if len(names) != len(files) or not all(names):
        die(f"--names {args.names}: {len(list(filter(None, names)))} names for {len(files)} files")
    out = Path(args.out)
    if out.exists() and (out.suffix not in (".html", ".htm") or any(out.samefile(f) for f in files if Path(f).exists())):
        die(f"--out {out}: exists and is no page; give a name that ends in .html")
    named, kinds = [], set()
    for name, path in zip(names, files):
        rows, problems = read_rows(path)
        show(problems)
        if not rows:
            die(f"{path}: no result row in it")
        kinds |= {played_with(r) for r in rows}
        named += [(f"{name}, {label}" if label else name, part) for label, part in groups(rows)]
    page(args.out, named, compare=len(kinds) == 1)         # other users are no other policies: side by side, but no difference is taken
    print(f"wrote {args.out}: {', '.join(f'{name} (n {len(rows)})' for name, rows in named)}")
    return 0
