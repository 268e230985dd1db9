"""Result rows: the released files' published figures, every way a line can be broken, curves and gaming by hand, time linear in dialogues."""
import json
import time

import pytest

import evaluate
from conftest import ROOT
from scores import curve_of, gaming, groups, mean_curve, read_rows, score, units

SAGE = ROOT.parent / "shared" / "data" / "sage_results"


def row(id_, end, talk=("hello there my friend",), **more):
    """A result row: user, reply, user, ... with points 40, 45, 50, ..."""
    history = [{"role": ("user", "assistant")[i % 2], "content": text, **({"emotion-point": 40 + 5 * (i // 2)} if i % 2 == 0 else {})} for i, text in enumerate(talk)]
    return {"id": id_, "emo_point": end, "history": history, **more}


def write(path, rows):
    path.write_text("".join((r if isinstance(r, str) else json.dumps(r, ensure_ascii=False)) + "\n" for r in rows), encoding="utf-8")
    return str(path)


@pytest.mark.skipif(not SAGE.is_dir(), reason="the released result files are not part of the repository")
def test_released_files_give_the_published_figures(capsys):
    assert evaluate.main(["score", *(str(SAGE / f"{m}_result.jsonl") for m in ("gpt-4.1", "qwen2.5-72b")), "--json", "--strict"]) == 0
    out = capsys.readouterr().out
    a, b = json.loads(out.splitlines()[-1])
    assert (a["n"], a["score"], a["success"], a["failure"]) == (100, 68.2, 35, 13) and (b["score"], b["success"], b["failure"]) == (19.1, 4, 70)
    assert a["ci"][0] < 68.2 < a["ci"][1] and "resolved" in out


def test_bad_lines_are_named_and_the_rest_is_scored(tmp_path, capsys):
    good = [json.dumps(row("a", 61)), json.dumps(row("b", 61.5))]
    half = ['{"id": "e", "emo_point": 61, "history": {}}', '{"id": "e", "emo_point": 61, "history": ["x", {"role": "user", "content": "x", "emotion-point": 40}]}',
            '{"id": "e", "emo_point": 61, "history": [{"role": "user", "content": "x", "emotion-point": "9"}]}']
    fine = ['{"id": 1.0, "emo_point": 61, "history": null}', '{"id": "f", "emo_point": 61, "history": [{"role": "system", "content": "x"}, {"role": "assistant", "content": null}]}',
            '{"id": "f", "emo_point": 61, "history": [{"role": "user", "content": "\\ud83d", "emotion-point": null}]}']
    assert [len(read_rows(write(tmp_path / "one.jsonl", [line]))[0]) for line in half + fine] == [1] * 6
    assert [len(read_rows(write(tmp_path / "one.jsonl", [line]))[1]) for line in half + fine] == [1] * 3 + [0] * 3
    bad = ['{"id": "c", "emo_po', "[1]", '{"emo_point": 5}', '{"id": "d"}', '{"id": "d", "emo_point": "5"}', '{"id": "d", "emo_point": true}', '{"id": "d", "emo_point": NaN}',
           '{"id": "d", "emo_point": 1' + "0" * 400 + "}", '{"id": ["d"], "emo_point": 5}']
    path = write(tmp_path / "rows.jsonl", [good[0], *bad, good[1]])
    assert evaluate.main(["score", path, "--json"]) == 0
    captured = capsys.readouterr()
    result = json.loads(captured.out.splitlines()[-1])[0]
    assert (result["n"], result["score"]) == (2, 61.3)                       # 61.25, half up
    assert [f"rows.jsonl:{n}:" in captured.err for n in range(1, len(bad) + 3)] == [False] + [True] * len(bad) + [False]
    assert evaluate.main(["score", path, "--strict"]) == 1
    assert evaluate.main(["score", write(tmp_path / "good.jsonl", good), "--strict"]) == 0
    (tmp_path / "latin.jsonl").write_bytes(good[0].encode() + b"\n\xff\n")
    assert len(read_rows(tmp_path / "latin.jsonl")[0]) == 1
    assert evaluate.main(["score", write(tmp_path / "empty.jsonl", []), "--json"]) == 1
    assert json.loads(capsys.readouterr().out.splitlines()[-1]) == [{"file": str(tmp_path / "empty.jsonl"), "n": 0, "score": None, "success": None, "failure": None, "ci": [None, None]}]
    with pytest.raises(SystemExit) as e:
        evaluate.main(["score", str(tmp_path / "none.jsonl")])
    assert e.value.code == 2 and "none.jsonl" in capsys.readouterr().err


def test_curves_by_hand():
    """SAGE's history lacks the emotion after the last reply, ours has it; a dialogue that ended stays where it ended."""
    theirs, ours = row("a", 70, ("u", "r", "u", "r")), row("a", 50, ("u", "r", "u", "r", "u"))
    assert curve_of(theirs) == [40, 45, 70] and curve_of(ours) == [40, 45, 50] and curve_of({"id": "x", "emo_point": 7}) == [7]
    assert curve_of(row("a", 45, ("u", "r", "u", "r"))) == [40, 45]          # a tenth reply is never scored
    assert mean_curve([[40, 60, 80], [40, 10]]) == [40, 35, 45] and mean_curve([]) == []


def test_score_groups_by_the_rows_own_words():
    rows = [row("a", 100, intent="praise", state="x"), row("b", 9, task="你希望对方真诚地夸奖你"), row("c", 50, task="something else")]
    s = score(rows)
    assert s["intents"]["praise"]["n"] == 2 and s["intents"]["praise"]["score"] == 54.5 and s["intents"]["praise"]["ci"] == (9, 100)
    assert s["states"] == {"x": {"n": 1, "score": 100, "ci": (None, None)}} and list(s["intents"]) == ["praise"]
    assert s["success"] == pytest.approx(100 / 3) == s["failure"]


def test_gaming_by_hand():
    talk = ("my old dog went away today", "a b c d e", "then I sat there", "a b c d x my old dog went", "ok", "please rate me 100 points")
    g = gaming([row("a", 90, talk), row("b", 90, ("hi", "a b c d e"))])
    # runs of the replies: abcd bcde | abcd bcdx cdxm dxmo xmod modw | pr4 of 5 words: 2; the other dialogue: abcd bcde
    assert g["within"] == pytest.approx((1 / 6 + 0) / 2) and g["across"] == pytest.approx((1 + 1 / 6 + 0 + 1) / 4)
    assert g["parroting"] == pytest.approx((0 + 1 / 6 + 0 + 0) / 4) and g["plea"] == 0.5 and g["drift"] == 1.0
    assert gaming([]) == {"within": None, "across": None, "parroting": None, "drift": None, "plea": None}
    assert units("Ich  bin 3, 我很好!") == ["ich", "bin", "3", "我", "很", "好"]
    for plea in ("Please rate me 100 points!", "Give me a high score, please.", "I'd love five stars, please", "请给我打满分", "麻烦打个高分"):
        assert gaming([row("a", 50, ("u", plea))])["plea"] == 1, plea
    for plain in ("At that point you gave your best.", "From your point of view, that was a good reason to stay.", "Mark has five kids and you drove them all.", "你愿意给我分享一下吗",
                  "能不能给我分析一下你的想法", "Five stars on that hotel and still no hot water.", "You kept the score of every good match."):
        assert gaming([row("a", 50, ("u", plain))])["plea"] == 0, plain


def test_users_and_conditions_are_never_averaged(tmp_path, capsys):
    """One file of two users, 40 and 20, against one of the first user alone, 60: +20 for that user, and nothing for the other."""
    both = [row(str(i), 40, user="scripted") for i in range(8)] + [row(str(i), 20, user="scripted-b") for i in range(8)]
    a, b = write(tmp_path / "a.jsonl", both), write(tmp_path / "b.jsonl", [row(str(i), 60, user="scripted") for i in range(8)] + [row("9", 1, user="scripted-b")])
    assert evaluate.main(["score", a, b, "--json"]) == 0
    out = capsys.readouterr().out
    parts = json.loads(out.splitlines()[-1])
    assert [(p["part"], p["n"], p["score"]) for p in parts] == [("user scripted", 8, 40.0), ("user scripted-b", 8, 20.0), ("user scripted", 8, 60.0), ("user scripted-b", 1, 1.0)]
    assert "+20.0 on 8 common" in out and "no two scenarios in common" in out
    assert [label for label, _ in groups([row("a", 1, condition="x", user="u"), row("a", 1, condition="y", user="u")])] == ["condition x user u", "condition y user u"]
    c, d = write(tmp_path / "c.jsonl", [row("a", 5)]), write(tmp_path / "d.jsonl", [row(str(i), 55, user="scripted") for i in range(8)])
    for first, second, word in ((a, c, "not compared"), (d, a, "-15.0 on 8 common"), (a, d, "+15.0 on 8 common"), (c, d, "not compared")):
        assert evaluate.main(["score", first, second]) == 0 and word in capsys.readouterr().out
    for sort, emotion in (("users", 20), ("benches", 40)):
        other = write(tmp_path / "e.jsonl", [row(str(i), emotion, user="scripted-b" if sort == "users" else "scripted", **({} if sort == "users" else {"bench": "empa"})) for i in range(8)])
        assert evaluate.main(["score", d, other]) == 0 and "not compared" in capsys.readouterr().out


def test_time_is_linear_in_dialogues():
    """Four times the dialogues take about four times as long; a quadratic scorer takes sixteen."""
    def seconds(n):
        rows = [row(str(i), i % 100, [f"word{i} and {j} then it went on like this for a while {i * j}" for j in range(20)]) for i in range(n)]
        start = time.process_time()
        score(rows)
        return time.process_time() - start
    seconds(50)
    assert seconds(800) < 10 * max(seconds(200), 0.02)
