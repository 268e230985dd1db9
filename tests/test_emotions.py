"""Files of emotions in every format, and the scores of a recogniser against brute force."""
import json
from collections import Counter

import numpy as np
import pytest

from appraisal import STOP, words
from conftest import ROOT
from emotions import LABELS, classification, consistency, iou, majority, read_emotions
from scenarios import load_scenarios

OURS = ROOT / "data" / "emotions.jsonl"
MELD = '''Sr No.,Utterance,Speaker,Emotion,Sentiment,Dialogue_ID,Utterance_ID,Season,Episode,StartTime,EndTime
1,"Oh, he\u2019s gone. He said ""never"".",Ann,sadness,negative,0,0,4,7,"00:20:57,256","00:21:00,049"
2,"Two
lines",Bo,surprise,negative,0,1,4,7,"00:21:01,927","00:21:03,261"
3,Hi!,All,joy,positive,1,0,4,7,x,y
'''


def test_ours_is_large_balanced_and_split_by_dialogue():
    everything, left = read_emotions(OURS)
    assert len(everything) >= 600 and left == 0
    share = Counter(label for u in everything for label in u.gold)
    assert all(0.08 < share[label] / sum(share.values()) < 0.3 for label in LABELS) and all(1 <= len(u.gold) <= 2 for u in everything)
    by = {split: [u for u in everything if u.split == split] for split in ("train", "dev", "heldout")}
    assert all(len(us) > 90 and {u.gold[0] for u in us} == set(LABELS) for us in by.values())
    texts = {split: {u.lines[-1][1] for u in us if len(u.lines[-1][1].split()) > 3} for split, us in by.items()}
    assert not texts["train"] & texts["heldout"] and not texts["train"] & texts["dev"] and not {u.dialogue for u in by["train"]} & {u.dialogue for u in by["heldout"]}
    runs = lambda text: {tuple(ws[i:i + 4]) for ws in [words(text)] for i in range(len(ws) - 3) if sum(w not in STOP for w in ws[i:i + 4]) >= 3}
    events = {run: s.id for s in load_scenarios(ROOT / "data" / "scenarios.jsonl", "heldout") for text in (s.background, s.opening, *s.facts) for run in runs(text)}
    assert not [(u.dialogue, run) for u in everything for run in runs(u.lines[-1][1]) if run in events]     # no event shared: not even four words of which three mean something


def test_meld_with_its_quotes_line_breaks_and_encodings(tmp_path):
    for encoding in ("utf-8", "cp1252", "utf-8-sig"):
        (tmp_path / "m.csv").write_bytes(MELD.encode(encoding))
        us, left = read_emotions(tmp_path / "m.csv")
        assert [u.gold for u in us] == [("sadness",), ("surprise",), ("joy",)] and left == 0
        assert us[1].lines == (("Ann", 'Oh, he\u2019s gone. He said "never".'), ("Bo", "Two lines")) and us[2].lines == (("All", "Hi!"),)


def test_single_bytes_and_controls_of_windows_do_not_spoil_the_other_rows(tmp_path):
    """A UTF-8 file with one raw 0x92, one with U+0092 for an apostrophe and U+0085 for an ellipsis, and one in UTF-16."""
    mixed = MELD.encode() + b"4,It\x92s me,Bo,joy,positive,1,1,4,7,x,y\n"
    for raw in (mixed, b"\xef\xbb\xbf" + mixed, MELD.replace("\u2019", "\x92").replace("Two", "Two\x85").encode() + "4,It\u2019s me,Bo,joy,positive,1,1,4,7,x,y\n".encode(), (MELD + "4,It\u2019s me,Bo,joy,positive,1,1,4,7,x,y\n").encode("utf-16")):
        (tmp_path / "m.csv").write_bytes(raw)
        us, _ = read_emotions(tmp_path / "m.csv")
        assert "he\u2019s" in us[0].lines[0][1] and us[3].lines[-1] == ("Bo", "It\u2019s me") and us[1].lines[-1][1] in ("Two lines", "Two\u2026 lines")


def test_rows_without_a_label_are_kept_as_unlabelled_and_cells_may_hold_lists(tmp_path):
    (tmp_path / "e.csv").write_text("""Utterance,Speaker,Emotion,Scene_ID,Utterance_ID,Season,Episode
No!,"['Ann O\'Hara', 'Bo']",['Mad'],1,1,1,15
,Bo,,1,2,1,15
Oh.,Bo,,1,3,1,15
""")
    us, left = read_emotions(tmp_path / "e.csv")
    assert [(u.gold, u.speaker) for u in us] == [(("anger",), "Ann O'Hara, Bo"), ((), "Bo")] and left == 0 and len(us[1].lines) == 2
    scene = {"scene_id": "c", "utterances": [{"utterance_id": "u", "speakers": "Ann", "transcript": "Boo!", "emotion": None}]}
    (tmp_path / "e.json").write_text(json.dumps({"episodes": [{"scenes": [scene]}]}))
    assert [(u.gold, u.speaker) for u in read_emotions(tmp_path / "e.json")[0]] == [((), "Ann")]
    (tmp_path / "e.jsonl").write_text("".join(json.dumps({"text": f"line {k}", "emotion": e}) + "\n" for k, e in enumerate((None, "", "sad"))))
    assert [(u.gold, len(u.lines)) for u in read_emotions(tmp_path / "e.jsonl")[0]] == [((), 1), ((), 1), (("sadness",), 1)]           # without an id, each by itself


def test_dialogues_of_two_splits_do_not_mix(tmp_path):
    (tmp_path / "s.jsonl").write_text("".join(json.dumps({"dialogue": "0", "split": s, "text": f"of {s}", "emotion": "joy"}) + "\n" for s in ("train", "heldout")))
    assert [len(u.lines) for u in read_emotions(tmp_path / "s.jsonl")[0]] == [1, 1]


def test_dialogues_that_are_numbered_in_each_split_are_told_apart(tmp_path):
    """MELD's train, dev and test count from 0: as one JSONL no id may make a training dialogue look held out."""
    (tmp_path / "s.jsonl").write_text("".join(json.dumps({"dialogue": d, "split": s, "text": f"of {s} {d}", "emotion": "joy"}) + "\n" for s in ("train", "dev", "heldout") for d in (0, 1)))
    us, _ = read_emotions(tmp_path / "s.jsonl")
    assert len({u.dialogue for u in us}) == 6 and {u.dialogue for u in us if u.split == "train"} == {"train:0", "train:1"}


def test_an_utterances_own_id_does_not_tear_its_dialogue_apart(tmp_path):
    for name in ("dialogue", "dialogue_id"):
        (tmp_path / "s.jsonl").write_text("".join(json.dumps({"id": f"u{k}", name: "d", "speaker": None, "text": f"line {k}", "emotion": "joy"}) + "\n" for k in range(3)))
        us, _ = read_emotions(tmp_path / "s.jsonl")
        assert [len(u.lines) for u in us] == [1, 2, 3] and us[0].speaker == "Someone"
    (tmp_path / "s.jsonl").write_text("".join(json.dumps({"dialogue": None, "text": f"line {k}", "emotion": "joy"}) + "\n" for k in range(3)))
    assert [len(u.lines) for u in read_emotions(tmp_path / "s.jsonl")[0]] == [1, 1, 1]


def test_joined_files_and_rows_twice_begin_a_dialogue_anew(tmp_path):
    """A train.csv and a test.csv in one, a row twice, rows out of order: less context, never a wrong one."""
    head, *rows = MELD.split("\n", 1)[0] + "\n", *(f"{k},{t},Ann,joy,positive,0,{n},4,7,x,y\n" for k, (t, n) in enumerate([("train", 0), ("train too", 1), ("test", 0), ("test", 0), ("late", 7), ("early", 5)]))
    (tmp_path / "m.csv").write_text(head + "".join(rows))
    assert [[text for _, text in u.lines] for u in read_emotions(tmp_path / "m.csv")[0]] == [["train"], ["train", "train too"], ["test"], ["test"], ["test", "late"], ["early"]]


def test_gold_is_what_an_answer_could_be(tmp_path):
    (tmp_path / "s.jsonl").write_text("".join(json.dumps({"text": "x", "emotions": e}) + "\n" for e in (["neutral", "joy"], ["sad", "joy", "anger"], ["neutral"], ["peaceful", "joyful"])))
    assert [u.gold for u in read_emotions(tmp_path / "s.jsonl")[0]] == [("joy",), ("sadness", "joy"), ("neutral",), ("joy",)]


def test_emorynlp_csv_and_json_are_mapped(tmp_path):
    (tmp_path / "e.csv").write_text("Utterance,Speaker,Emotion,Scene_ID,Utterance_ID,Season,Episode,Start_Time,End_Time\nNo!,['Ann B'],Mad,1,1,1,15,a,b\nOh.,['Bo'],Peaceful,1,2,1,15,a,b\nHa,['Bo'],Powerful,1,1,1,16,a,b\n")
    us, _ = read_emotions(tmp_path / "e.csv")
    assert [(u.gold, len(u.lines), u.speaker) for u in us] == [(("anger",), 1, "Ann B"), (("neutral",), 2, "Bo"), (("joy",), 1, "Bo")]
    scene = {"scene_id": "s01_e01_c01", "utterances": [{"utterance_id": "u1", "speakers": ["Ann"], "transcript": "Boo!", "emotion": "Scared"}, {"utterance_id": "u2", "speakers": [], "transcript": "", "emotion": "Neutral"}]}
    (tmp_path / "e.json").write_text(json.dumps({"season_id": "s01", "episodes": [{"episode_id": "e", "scenes": [scene]}]}))
    assert [u.gold for u in read_emotions(tmp_path / "e.json")[0]] == [("fear",)]


def test_plain_jsonl_as_iemocap_is_exported(tmp_path):
    rows = [("a", "fru"), ("a", "xxx"), ("b", "exc"), ("b", "neu")]
    (tmp_path / "i.jsonl").write_text("".join(json.dumps({"dialogue": d, "speaker": "F", "text": f"line {k}", "emotion": e}) + "\n" for k, (d, e) in enumerate(rows)))
    us, left = read_emotions(tmp_path / "i.jsonl")
    assert [u.gold for u in us] == [("anger",), ("joy",), ("neutral",)] and left == 1 and [len(u.lines) for u in us] == [1, 1, 2]


@pytest.mark.parametrize("name,text,word", [("a.csv", "Utterance,Speaker,Emotion\nx,y,joy\n", "Scene_ID"), ("a.csv", MELD.replace("surprise", "glee"), "a.csv:4: emotion 'glee'"), ("a.csv", "", "empty"), ("a.jsonl", "{", "a.jsonl:1"),
                                            ("a.jsonl", '{"text": 3, "emotion": "joy"}', "'text'"), ("a.jsonl", '{"text": "x", "emotion": 3}', "'emotions'"), ("a.jsonl", "[]", "object"), ("a.jsonl", '{"text": "", "emotion": "joy"}', "no utterance"),
                                            ("a.csv", MELD + '9,"open quote,Ann,joy\n', "Emotion"), ("a.csv", MELD.replace("3,Hi!", '3,"Hi!') + "4,x,Ann,joy,p,1,1,1,1,a,b\n" * 9000, "quote"),
                                            ("a.json", '{"episodes": [{"x": 1}]}', "EmoryNLP"), ("a.csv", MELD + "9,cut off,Ann,joy", "a.csv:6: field 'Dialogue_ID'"), ("a.csv", "Utterance,Speaker,Emotion,Scene_ID\nx,y,joy,1\n", "Season"), ("a.csv", 'Utterance,"Speaker' + "x" * 140000, "quote"),
                                            ("a.jsonl", '{"text": "x", "split": "Train"}', "'split'"), ("a.jsonl", '{"text": "x", "split": ["train"]}', "'split'"), ("a.jsonl", '{"text": "x", "dialogue": [1]}', "'dialogue'"), ("a.jsonl", '{"text": "\\ud83d"}', "surrogate"),
                                            ("a.jsonl", '{"text": "x", "speaker": 3}', "'speaker'"), ("a.json", "[" * 99999, "a.json:1"), ("a.jsonl", '{"id": "x", "utterances": [{"text": "a", "emotions": ["joy"]}]}\n' * 2, "used before")])
def test_bad_files_are_named_by_line(name, text, word, tmp_path, capsys):
    (tmp_path / name).write_text(text, encoding="utf-8")
    with pytest.raises(SystemExit) as e:
        read_emotions(tmp_path / name)
    assert e.value.code == 2 and word in capsys.readouterr().err


SHARED = ROOT.parent / "shared" / "data"


@pytest.mark.parametrize("name,n", [("meld_sample.csv", 76), ("emorynlp_sample.csv", 59)])
def test_the_released_samples_load_whole(name, n):
    if not (SHARED / name).exists():
        pytest.skip(f"{name} is not at hand")
    us, left = read_emotions(SHARED / name)
    assert len(us) == n and left == 0


def test_scores_by_brute_force():
    rng = np.random.default_rng(0)
    gold = [tuple(rng.choice(LABELS, rng.integers(1, 3), replace=False)) for _ in range(300)]
    predicted = [None if rng.random() < 0.05 else str(rng.choice(LABELS[:6])) for _ in gold]
    got = classification(gold, predicted)
    truth = [p if p in g else g[0] for g, p in zip(gold, predicted)]
    f = {}
    for label in LABELS:
        tp = sum(t == p == label for t, p in zip(truth, predicted))
        fp, fn = sum(p == label != t for t, p in zip(truth, predicted)), sum(t == label != p for t, p in zip(truth, predicted))
        precision, recall = tp / (tp + fp) if tp + fp else 0, tp / (tp + fn) if tp + fn else 0
        f[label] = 2 * precision * recall / (precision + recall) if precision + recall else 0
    assert got["accuracy"] == pytest.approx(np.mean([t == p for t, p in zip(truth, predicted)])) and got["macro_f1"] == pytest.approx(np.mean(list(f.values())))
    assert got["weighted_f1"] == pytest.approx(sum(f[t] for t in truth) / len(truth)) and got["unread"] == predicted.count(None)
    assert np.sum(got["confusion"]) == 300 - got["unread"] and classification([("joy",)], ["joy"])["macro_f1"] == 1


def test_an_utterance_with_two_labels_by_hand():
    """Gold anger and surprise: surprise is right, and counts as surprise; joy is wrong, and counts as a missed anger."""
    got = classification([("anger", "surprise"), ("anger", "surprise")], ["surprise", "joy"])
    assert got["accuracy"] == 0.5 and got["confusion"][LABELS.index("surprise")][LABELS.index("surprise")] == 1 == got["confusion"][LABELS.index("anger")][LABELS.index("joy")]


def test_overlap_consistency_and_majority_by_hand():
    assert iou({"joy"}, {"joy"}) == iou({}, {}) == iou({"joy", "fear"}, {"fear", "joy"}) == 1 and iou({"joy"}, {"fear"}) == pytest.approx(0.1 / 2.1)
    assert iou({"joy"}, {"joy", "fear"}) == pytest.approx(1.1 / 2.1) and iou({"joy"}, {}) == pytest.approx(0.1 / 1.1)
    rng = np.random.default_rng(1)
    for _ in range(100):                                   # one more common label never lowers it
        a, b = (set(rng.choice(LABELS, rng.integers(0, 4), replace=False)) for _ in range(2))
        for more in set(LABELS) - a - b:
            assert iou(a | {more}, b | {more}) >= iou(a, b)
    assert consistency([{"joy"}] * 4) == [1] * 4 and consistency([{"joy"}]) == [1]
    assert consistency([{"joy"}, {"joy"}, {"fear"}]) == pytest.approx([(1 + 0.1 / 2.1) / 2] * 2 + [0.1 / 2.1])
    assert majority([{"joy"}, {"joy", "fear"}, {"fear"}, set()]) == ("joy", "fear") and majority([{"joy"}, {"fear"}, {"anger"}]) == () and majority([]) == ()
