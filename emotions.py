"""
Emotion in conversation: seven labels, the files they come in, and how a recogniser is scored. No model in here.

Read are our own data/emotions.jsonl, MELD's CSV, EmoryNLP's CSV and JSON, and a plain JSONL with one utterance a line, as one exports IEMOCAP. Other label sets are mapped to the seven,
explicitly; what has no place among them is left out and counted. Left out on purpose: audio, and label sets of a task's own.
"""
import csv
import io
import json
import re
from collections import Counter
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np

from appraisal import DATA, families, look
from rundir import die
from scenarios import SPLITS, read_lines

LABELS = ("neutral", "joy", "sadness", "anger", "fear", "surprise", "disgust")
MAPPED = {**{name: name for name in LABELS}, "joyful": "joy", "mad": "anger", "scared": "fear", "sad": "sadness", "peaceful": "neutral", "powerful": "joy",                # EmoryNLP's seven: the last two are our choice
          "hap": "joy", "happy": "joy", "happiness": "joy", "exc": "joy", "excited": "joy", "excitement": "joy", "ang": "anger", "angry": "anger", "fru": "anger", "frustrated": "anger", "frustration": "anger",
          "neu": "neutral", "neutral state": "neutral", "fea": "fear", "fearful": "fear", "sur": "surprise", "surprised": "surprise", "dis": "disgust", "disgusted": "disgust"}              # IEMOCAP's, short and long
EDF = json.loads((DATA / "edf.json").read_text(encoding="utf-8"))
NOT_OURS = ("oth", "other", "xxx", "undefined", "non-neutral")


@dataclass(frozen=True)
class Utterance:
    """One utterance with what was said before it. lines: (speaker, text) of the dialogue so far, this one last; gold: labels, first the main one, () where there are none."""
    dialogue: str; split: str; lines: tuple; gold: tuple

    @property
    def speaker(self):
        return self.lines[-1][0]


# ---------------------------------------------------------------------------------------------- files
def read_emotions(path, split=None):
    """The utterances of a file, any of the formats above (told apart by what is in it). -> list of Utterance, and how many were left out for a label that has no place.
    SystemExit with file:line: field on the first row that can't be read. split: keep this one (files without splits are all "heldout")."""
    path = Path(path)
    try:
        raw = path.read_bytes()
    except OSError as e:
        die(f"{path}: cannot be read ({e.strerror}); give a file of emotions: .csv, .json or .jsonl")
    text = decoded(raw)
    if not text.strip():
        die(f"{path}: the file is empty")
    rows = from_csv(path, text) if path.suffix.lower() == ".csv" else from_json(path, text)
    out, left, dialogues, splits = [], 0, {}, {}
    for where, key, split_, speaker, said, labels in rows:
        said, speaker = " ".join(said.split()), " ".join(speaker.split())
        if re.search("[\ud800-\udfff]", key + speaker + said):
            die(f"{where}: half of a surrogate pair (\\ud800 .. \\udfff) is not text")
        lines = dialogues.setdefault((split_, key), [])
        splits.setdefault(key, set()).add(split_)
        lines += [(speaker or "Someone", said)] if said else []
        names = [str(x).strip().lower() for x in labels]
        if wrong := [n for n in names if n not in MAPPED and n not in NOT_OURS]:
            die(f"{where}: emotion '{wrong[0][:30]}' is not one of {', '.join(LABELS)}, nor one that is mapped to them")
        gold = list(dict.fromkeys(MAPPED[n] for n in names if n in MAPPED))
        gold = tuple(g for g in gold if g != "neutral" or len(gold) == 1)[:2]         # an answer names one or two, and neutral stands alone
        left += bool(names) and not gold
        if said and not (names and not gold) and split in (None, split_):
            out.append(Utterance(key, split_, tuple(lines), gold))
    if not out:
        die(f"{path}: no utterance" + (f" of split '{split}'" if split else ""))
    several = {key for key, of in splits.items() if len(of) > 1}                      # MELD counts its dialogues from 0 in each split
    return [replace(u, dialogue=f"{u.split}:{u.dialogue}") if u.dialogue in several else u for u in out], left


def decoded(raw):
    """Bytes as text: UTF-8 with or without a mark, UTF-16 with one; a byte that is none, and a C1 control, as the spreadsheet of Windows meant it (MELD went through one: 0x92 is an apostrophe)."""
    if raw[:2] in (b"\xff\xfe", b"\xfe\xff"):
        return raw.decode("utf-16", "replace")
    text = raw.removeprefix(b"\xef\xbb\xbf").decode("utf-8", errors="surrogateescape")
    return re.sub("[\x80-\x9f\udc80-\udcff]", lambda m: bytes([ord(m[0]) & 0xFF]).decode("cp1252", "replace"), text)


def cell(text):
    """What a table's cell holds: "joy" -> ["joy"], "['Joyful']" -> ["Joyful"], "" -> []."""
    text = text.strip()
    quoted = [found[1] for found in re.findall(r"""(['"])(.*?)\1(?=\s*[,\]])""", text)] if text.startswith("[") else []
    return quoted or [part.strip() for part in (text.strip("[]").split(",") if text.startswith("[") else [text]) if part.strip()]


def from_csv(path, text):
    """MELD's and EmoryNLP's tables, by the names of their columns. Where the numbers of a dialogue's utterances don't rise, another one with its name begins: joined files, rows twice."""
    reader = csv.DictReader(io.StringIO(text, newline=""))
    try:
        names = reader.fieldnames or []
    except csv.Error as e:
        die(f"{path}:1: {e} (a quote that is not closed?)")
    keys = ("Dialogue_ID",) if "Dialogue_ID" in names else ("Scene_ID", "Season", "Episode")
    if missing := [n for n in ("Utterance", "Speaker", "Emotion", *keys) if n not in names]:
        die(f"{path}:1: column '{missing[0]}': missing; the columns are {', '.join(names)[:120]}")
    last, begun = {}, Counter()
    while True:
        try:
            row = next(reader, None)
        except csv.Error as e:
            die(f"{path}:{reader.line_num}: {e} (a quote that is not closed?)")
        if row is None:
            return
        where = f"{path}:{reader.line_num}"
        if short := next((n for n in ("Utterance", "Emotion", *keys) if row[n] is None), None):
            die(f"{where}: field '{short}': missing (a quote that is not closed, or a line cut off?)")
        key, number = "-".join(row[n] for n in keys), row.get("Utterance_ID") or ""
        if number.strip().isdigit():
            begun[key] += int(number) <= last.get(key, -1)
            last[key] = int(number)
        key += f"#{begun[key] + 1}" if begun[key] else ""
        yield where, key, "heldout", ", ".join(cell(row["Speaker"] or "")), row["Utterance"], cell(row["Emotion"])


def from_json(path, text):
    """EmoryNLP's JSON; ours, a dialogue a line; or plain JSONL, an utterance a line: {"dialogue", "speaker", "text", "emotion"}."""
    try:
        whole = json.loads(text)
    except (ValueError, RecursionError):
        whole = None
    if isinstance(whole, dict) and "episodes" in whole:
        try:
            found = [({"scene_id": f"{i}-{j}", **s}, u) for i, e in enumerate(whole["episodes"]) for j, s in enumerate(e["scenes"]) for u in s["utterances"] if u.get("transcript")]
            named = [[u["speakers"]] if isinstance(u.get("speakers"), str) else u.get("speakers") or [] for _, u in found]
            found = [(f"{path}: {u.get('utterance_id')}", str(s.get("scene_id")), "heldout", ", ".join(who), str(u["transcript"]), [u["emotion"]] if u.get("emotion") else []) for (s, u), who in zip(found, named)]
        except (KeyError, TypeError, AttributeError):
            die(f"{path}: has 'episodes', but not EmoryNLP's episodes > scenes > utterances > transcript, speakers, emotion")
        yield from found
        return
    ids = set()
    for number, line in enumerate(text.split("\n"), start=1):
        if not line.strip():
            continue
        where = f"{path}:{number}"
        try:
            row = json.loads(line)
        except (ValueError, RecursionError) as e:
            die(f"{where}: broken JSON ({getattr(e, 'msg', e)})")
        if not isinstance(row, dict):
            die(f"{where}: a JSON object is expected")
        whole = isinstance(row.get("utterances"), list)
        inside = row["utterances"] if whole else [row]
        named = [row[n] for n in (("id", "dialogue") if whole else ("dialogue", "dialogue_id", "id")) if row.get(n) is not None] or [where]      # without any, a dialogue of its own
        key, split = str(named[0]), row.get("split", "heldout")
        if type(named[0]) not in (str, int):
            die(f"{where}: field 'dialogue': must be a string or a whole number")
        if split not in SPLITS:
            die(f"{where}: field 'split': {json.dumps(split)[:40]} is not one of {', '.join(SPLITS)}")
        if "utterances" in row and (key in ids or ids.add(key)):
            die(f"{where}: field 'id': '{key[:40]}' was used before")
        for u in inside:
            said, labels = u.get("text", u.get("utterance")) if isinstance(u, dict) else None, u.get("emotions", u.get("emotion", [])) if isinstance(u, dict) else None
            labels = [labels] if isinstance(labels, str) and labels else labels or []
            if not isinstance(said, str):
                die(f"{where}: field 'text': must be a string")
            if not (isinstance(labels, list) and all(isinstance(x, str) for x in labels)):
                die(f"{where}: field 'emotions': must be a list of labels")
            if not isinstance(u.get("speaker") or "", str):
                die(f"{where}: field 'speaker': must be a string")
            yield where, key, split, u.get("speaker") or "", said, labels


# ---------------------------------------------------------------------------------------------- scores
def classification(gold, predicted):
    """gold: list of label tuples; predicted: one label each, or None. -> dict: n, accuracy, weighted_f1, macro_f1 (over labels that occur), confusion (7, 7) counts, unread.

    An utterance with two gold labels counts as the predicted one where that is among them, else as its first. None is wrong, and in no column."""
    truth = [p if p in g else g[0] for g, p in zip(gold, predicted)]
    confusion = np.zeros((7, 7), int)
    for t, p in zip(truth, predicted):
        if p is not None:
            confusion[LABELS.index(t), LABELS.index(p)] += 1
    support = Counter(truth)
    f1 = {}
    for k, label in enumerate(LABELS):
        hit, said = confusion[k, k], confusion[:, k].sum()
        if support[label] or said:
            f1[label] = 2 * hit / (support[label] + said)  # precision and recall in one: 2 TP / (positives + predicted)
    return {"n": len(truth), "accuracy": float(np.mean([t == p for t, p in zip(truth, predicted)])), "weighted_f1": float(sum(f1[x] * n for x, n in support.items()) / len(truth)),
            "macro_f1": float(np.mean(list(f1.values()))), "confusion": confusion.tolist(), "unread": sum(p is None for p in predicted)}


def iou(a, b, s=0.1):
    """Smoothed overlap of two sets: (|a and b| + s) / (|a or b| + s). Equal sets 1, disjoint singletons s / (2 + s); empty against empty 1 (SELF-EMO; methods: s at most .1)."""
    a, b = set(a), set(b)
    return (len(a & b) + s) / (len(a | b) + s)


def consistency(answers, s=0.1):
    """Of each answer (a set) its mean overlap with the group's others; 1 for a unanimous group, and for a group of one."""
    return [float(np.mean([iou(a, b, s) for j, b in enumerate(answers) if j != i])) if len(answers) > 1 else 1.0 for i, a in enumerate(answers)]


def majority(answers):
    """The labels that at least half of the group named, in the order of LABELS: a pseudo-label; () where there is none."""
    votes = Counter(label for a in answers for label in set(a))
    return tuple(label for label in LABELS if 2 * votes[label] >= len(answers) > 0)


# ---------------------------------------------------------------------------------------------- perceive, regulate
def regulate(label, confidence=1.0):
    """The aim of a reply to somebody who feels `label`, by valence and arousal (methods.md 10: V-, A+ calm; V-, A- be present; V+ share; neutral follow). "" or a confidence below 0.5: follow.
    Examples: regulate("anger") == "calm"; regulate("sadness") == "stay"; regulate("sadness", 0.3) == "follow"."""
    valence, arousal = EDF["affect"][label] if label and confidence >= 0.5 else (0, 0)
    return "follow" if abs(valence) <= 0.2 else "share" if valence > 0 else "calm" if arousal > 0 else "stay"


def felt_by(scenario):
    """A scenario's feelings among the seven labels, the first one first: ["torn", "anxious", "sad"] -> ["fear", "sadness"]; none -> ["neutral"]."""
    return list(dict.fromkeys(EDF["seven"][f] for f in scenario.feelings if f in EDF["seven"])) or ["neutral"]


def regulation(episode):
    """For each reply of an Episode, whether it "follows" the aim that the scenario's own feeling asks for, "mirrors" that feeling (names it, and does nothing of the aim), or "neither".
    By the scripted appraisal, so English only; our reconstruction."""
    label, said, out = felt_by(episode.scenario)[0], [episode.opening], []
    for t, reply in enumerate(episode.replies):
        seen = look(reply, said, episode.replies[:t], episode.scenario.feelings, episode.scenario.people) if reply.strip() else {}
        follows = any(seen.get(part, 0) >= 0.3 for part in EDF["aims"][regulate(label)]["shows"])
        out.append("follows" if follows else "mirrors" if any(EDF["seven"].get(f) == label for f in families(reply)) else "neither")
        said.append(episode.turns[t].text)
    return out


def read_perceptions(path, scenarios):
    """What somebody else perceived, a speech-emotion model for example: JSONL rows {"scenario", "label", "turn": 1.. (default 1), "confidence": 0..1 (default 1)} -> {scenario: {turn: (label,
    confidence)}}; a turn without a row keeps the one before. SystemExit with file:line: field."""
    path, out = Path(path), {}
    try:
        lines = list(read_lines(path))
    except OSError as e:
        die(f"--perception {path}: cannot be read ({e.strerror}); give model, or a .jsonl of scenario, turn, label, confidence")
    for number, row, problem in lines:
        where = f"{path}:{number}:"
        if problem:
            die(f"{where} {problem}")
        label, turn, confidence = MAPPED.get(str(row.get("label")).strip().lower()), row.get("turn", 1), row.get("confidence", 1.0)
        if label is None:
            die(f"{where} field 'label': {json.dumps(row.get('label'))[:40]} is not one of {', '.join(LABELS)}")
        if not isinstance(row.get("scenario"), str):
            die(f"{where} field 'scenario': must be the id of one")
        if type(turn) is not int or turn < 1:
            die(f"{where} field 'turn': must be a whole number from 1 on")
        if type(confidence) not in (int, float) or not 0 <= confidence <= 1:
            die(f"{where} field 'confidence': must be a number from 0 to 1")
        if turn in out.setdefault(row["scenario"], {}):
            die(f"{where} field 'turn': {row['scenario']} has turn {turn} already")
        out[row["scenario"]][turn] = (label, confidence)
    if missing := next((s.id for s in scenarios if 1 not in out.get(s.id, {})), None):
        die(f"--perception {path}: has no row for turn 1 of scenario {missing}")
    return out
