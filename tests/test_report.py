"""The page: escaped, self-contained, opened in a real browser; training pages; speed."""
import json
import re
import shutil
import subprocess
import time

import pytest

import evaluate
from report import chosen, line_chart, page, side_by_side, training_page

EVIL = "<script>alert(1)</script><img src=http://example.invalid/x onerror=alert(2)>"


def row(id_, points, intent="advice", **more):
    history = [{"role": "user", "content": f"opening of {id_}", "emotion-point": points[0]}]
    for p in points[1:]:
        history += [{"role": "assistant", "content": f"a reply with some words in it {p}", "cut": False}, {"role": "user", "content": "go on", "emotion-point": p, "planning": {"analyse": "hm & <b>"}, "parts": {"listening": 2.0}}]
    return {"id": id_, "emo_point": points[-1], "history": history, "intent": intent, **more}


def rows(n, turns=5, shift=0):
    return [row(f"s{i}", [40] + [min(100, max(0, 40 + (i % 7 - 3 + shift) * t)) for t in range(1, turns + 1)], ("advice", "praise")[i % 2], state=f"delayed/high/{i % 4 + 1}") for i in range(n)]


def test_every_text_is_escaped(tmp_path):
    evil = row(EVIL, [40, 50], state=EVIL, finish=EVIL)
    evil["history"][1]["content"] = evil["history"][2]["content"] = evil["history"][2]["planning"]["analyse"] = EVIL
    evil["history"][2]["parts"] = {EVIL: 1.0}
    page(tmp_path / "p.html", [(EVIL, [evil]), ("two", [evil])], EVIL, [{"step": 0, "emotion": 40}, {"step": 1, "emotion": 50}], EVIL)
    html = (tmp_path / "p.html").read_text()
    assert "&lt;script&gt;" in html and not re.search(r"<(script|img|link|iframe)", html) and "src=" not in html.replace("src=http", "")
    assert not re.search(r"""(href|url\()""", html)


def test_rows_of_any_shape_make_a_page(tmp_path):
    """Rows without a history, with odd planning, one dialogue, floats, half of a surrogate pair."""
    odd = [{"id": 1, "emo_point": 3.5}, {"id": "x", "emo_point": -2, "history": []}, row("y", [40, 41]), {**row("z", [40, 41]), "history": [{"role": "assistant", "content": "\ud800"}]}]
    odd[2]["history"][2].update(planning=None, parts=[1])
    for part in (odd, odd[:1], odd[2:3]):
        page(tmp_path / "p.html", [("a", part)])
        assert "<h2>Dialogues" in (tmp_path / "p.html").read_text()


def test_best_worst_and_pairs():
    picked = chosen(rows(21))
    assert [k for k, _ in picked] == ["best"] * 3 + ["median"] * 3 + ["worst"] * 3 and len({r["id"] for _, r in picked}) == 9
    assert picked[0][1]["emo_point"] >= picked[4][1]["emo_point"] >= picked[-1][1]["emo_point"]
    assert len(chosen(rows(2))) == 2
    text = side_by_side([("base", rows(8)), ("trained", rows(8, shift=3))])
    assert text.count("<details>") == 6 and "base" in text and side_by_side([("a", rows(2)), ("b", [row("other", [40, 50])])]) == ""


def test_chart_maps_values_to_places():
    svg = line_chart("t", "x", "y", [("one", [0, 10], [0, 100], [None, 90], [None, 100])], 100)
    places = [(float(x), float(y)) for x, y in re.findall(r'<circle cx="([\d.]+)" cy="([\d.]+)"', svg)]
    assert places == [(64, 220), (628, 12)] and svg.count("<polygon") == 1 and line_chart("t", "x", "y", [("one", [], [], None, None)]) == ""


def test_training_page_compares_with_the_first_evaluation(tmp_path):
    training_page(tmp_path, {"step": 0, "dev_emotion": 40.0}, rows(6))
    assert "before RL" in (tmp_path / "report.html").read_text()
    (tmp_path / "metrics.jsonl").write_text('{"step": 0, "dev_emotion": 40.0}\n{"step": 1, "emotion": 41.0, "entropy": 2.0}\n')
    training_page(tmp_path, {"step": 2, "emotion": 43.0, "dev_emotion": 44.0, "entropy": 1.9}, rows(6, shift=2))
    html = (tmp_path / "report.html").read_text()
    assert "Training" in html and "step 2" in html and "Entropy" in html and len((tmp_path / "dev_first.jsonl").read_text().splitlines()) == 6
    assert (tmp_path / "dev_first.jsonl").read_text() != (tmp_path / "dev_last.jsonl").read_text()


def test_command_line(tmp_path, capsys):
    for name, shift in (("a", 0), ("b", 2)):
        (tmp_path / f"{name}.jsonl").write_text("".join(json.dumps(r) + "\n" for r in rows(10, shift=shift)))
    a, b, out = (str(tmp_path / n) for n in ("a.jsonl", "b.jsonl", "page.html"))
    assert evaluate.main(["report", a, "--compare", b, "--names", "base,after", "--out", out]) == 0 and "after (n 10)" in capsys.readouterr().out
    (tmp_path / "empty.jsonl").write_text("{}\n")
    keep = (tmp_path / "b.jsonl").read_text()
    for target in (a, b):                                                    # rows are never replaced by a page
        with pytest.raises(SystemExit):
            evaluate.main(["report", a, "--out", target])
        assert "is no page" in capsys.readouterr().err and (tmp_path / "b.jsonl").read_text() == keep
    (tmp_path / "x").mkdir()
    (tmp_path / "x" / "a.jsonl").write_text(json.dumps(row("s1", [40, 50])) + "\n")
    assert evaluate.main(["report", a, str(tmp_path / "x" / "a.jsonl"), "--out", out]) == 0 and "x/a.jsonl" in (tmp_path / "page.html").read_text()
    (tmp_path / "wild.jsonl").write_text("".join(json.dumps(row(str(i), [40, e])) + "\n" for i, e in enumerate((-50, 150))))
    assert evaluate.main(["report", str(tmp_path / "wild.jsonl"), "--out", out]) == 0
    html = (tmp_path / "page.html").read_text()
    assert all(0 <= float(y) <= 260 for y in re.findall(r'cy="(-?[\d.]+)"', html)) and all(0 <= float(x) <= 640 for x in re.findall(r'whisker" x1="(-?[\d.]+)"', html)) and "cy=" in html
    for wrong, word in (([a, "--names", ",b"], "--names"), ([a, "--names", "x,y"], "--names"), ([str(tmp_path / "empty.jsonl")], "no result row"), ([str(tmp_path / "none")], "none")):
        with pytest.raises(SystemExit) as e:
            evaluate.main(["report", *wrong, "--out", out])
        assert e.value.code == 2 and word in capsys.readouterr().err


def test_a_hundred_dialogues_of_ten_turns_take_seconds(tmp_path):
    many, start = rows(100, 10), time.process_time()
    page(tmp_path / "p.html", [("a", many), ("b", many)])
    assert time.process_time() - start < 5


@pytest.mark.skipif(not (BROWSER := next(filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome"))), None)), reason="no Chromium on this machine")
def test_page_in_a_browser(tmp_path):
    """Headless: no console message, no request but the page's own, charts with a size, the script shown as text."""
    evil = row("x", [40, 70])
    evil["history"][1]["content"] = EVIL
    named = [("base", rows(12) + [evil]), ("after", rows(12, shift=2) + [evil])]
    page(tmp_path / "p.html", named, metrics=[{"step": s, "emotion": 40.0 + s, "entropy": 2.0} for s in range(5)])
    html = (tmp_path / "p.html").read_text().replace("<details>", "<details open>")
    probe = ('<script>addEventListener("load",()=>{const s=[...document.querySelectorAll("svg")].map(x=>x.getBoundingClientRect());document.body.dataset.found=JSON.stringify({charts:s.length,'
             'small:s.filter(r=>r.width<100||r.height<50).length,requests:performance.getEntriesByType("resource").length,wide:document.documentElement.scrollWidth>innerWidth,shown:document.body.innerText.includes("<script>alert(1)")})})</script>')
    (tmp_path / "probe.html").write_text(html.replace("</body>", probe + "</body>"))
    done = subprocess.run([BROWSER, "--headless", "--no-sandbox", "--disable-gpu", "--enable-logging=stderr", "--virtual-time-budget=3000", "--window-size=1000,800", "--dump-dom", (tmp_path / "probe.html").as_uri()],
                          capture_output=True, text=True, timeout=120)
    found = json.loads(re.search(r'data-found="([^"]*)"', done.stdout).group(1).replace("&quot;", '"'))
    assert found == {"charts": 5, "small": 0, "requests": 0, "wide": False, "shown": True}
    assert "CONSOLE" not in done.stderr
