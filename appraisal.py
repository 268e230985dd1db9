"""The rules by which the scripted user feels: pure Python, no model, no dice; the same reply always moves it the same way, and it
says why.

What comes out is the rule score of a scripted user, not empathy: it counts cues, and a policy that learns to please it
has learned to please these rules (weights, cues and lexicons: data/user_tables.json). Left out on purpose: meaning, any
language but English. How a reply is appraised is our own reconstruction; the sources ask a large model instead.
"""
import json
import re
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path

INTENTS = ("analysis", "reflection", "perspective", "advice", "listening", "empathy", "no_fault", "praise")
STAGES = ("heard", "understood", "helped")           # be heard, be understood, be helped
DATA = Path(__file__).resolve().parent / "data"


@dataclass
class Appraisal:
    """One reply, appraised. seen: how far each thing showed, 0..1; parts: the points that came of it; change: their sum."""
    change: int; parts: dict[str, float]; seen: dict[str, float]


# ---------------------------------------------------------------- reading English, roughly
TABLES = json.loads((DATA / "user_tables.json").read_text(encoding="utf-8"))
STOP = frozenset(" ".join(TABLES["stop"]).split())              # function words and words too thin to count as content
LETTERS = frozenset(" ".join(TABLES["letters"]).split())        # letter triples that English uses, ^ and $ for the ends of a word
IRREGULAR = {form: base for base, forms in TABLES["irregular"].items() for form in forms.split()}
CLASH = re.compile("|".join(TABLES["clash"]))         # pairs of function words that English does not put side by side
FLIP = {"my": "your", "our": "your", "i": "you", "me": "you", "we": "you", "i'm": "you're", "i'd": "you'd", "i've": "you've", "mine": "yours", "am": "are"}


def words(text):
    """Lower-case words: words("Mum's OLD car, sold!") == ["mum's", "old", "car", "sold"]."""
    return re.findall(r"[^\W\d_]+(?:'[^\W\d_]+)*|\d+", text.lower().replace("\u2019", "'"))


def sentences(text):
    """Sentences with their end marks: sentences("No. Why? Go") == ["No.", "Why?", "Go"]."""
    return [s.strip() for s in re.findall(r"[^.!?\n]+[.!?]*", text) if s.strip()]


@lru_cache(maxsize=50_000)
def stem(word):
    """A crude stem that joins the forms of a word: sold, sells, selling -> sell; worries, worried -> worr."""
    word = IRREGULAR.get(word.split("'")[0], word.split("'")[0])
    for ending in ("ingly", "edly", "ings", "ing", "ies", "ied", "ed", "es", "ly", "s"):
        if word.endswith(ending) and len(word) - len(ending) >= 3 and not word.endswith("ss"):
            word = re.sub(r"(\w\w)([^ls])\2$", r"\1\2", word[: -len(ending)])             # stopp -> stop
            break
    return word.rstrip("eyi") if len(word) > 3 else word


def content(text):
    """The content words of a text, as stems: content("She sold the violin") == ["sell", "violin"]."""
    return [stem(w) for w in words(text) if w not in STOP and len(w) > 2]


@lru_cache(maxsize=2_000)
def _pattern(cue):
    return re.compile(rf"(?<![\w'])(?:{cue})(?![\w'])")


def _find(cues, text):
    """The first match of any cue in a lower-case text, or None."""
    return next((match for cue in cues if (match := _pattern(cue).search(text))), None)


@lru_cache(maxsize=20_000)
def cues(reply):
    """The cues of a reply, by part: {"praise": [(sentence number, its first three words, strength)], ...}."""
    found = {part: [] for part in TABLES["parts"]}
    for number, sentence in enumerate(sentences(reply.lower().replace("\u2019", "'"))):
        for part, tiers in TABLES["parts"].items():
            strong = _find(tiers["strong"], sentence.rstrip(".!?"))
            if match := strong or _find(tiers["weak"], sentence.rstrip(".!?")):
                found[part].append((number, " ".join(match.group().split()[:3]), 1.0 if strong else 0.5))
    return found


@lru_cache(maxsize=20_000)
def families(text):
    """The feeling families that a text names: families("so worried and alone") == {"anxious", "lonely"}."""
    spaced = f" {' '.join(words(text))} "
    return frozenset(family for family, names in TABLES["feelings"].items() if any(f" {name} " in spaced for name in names))


# ---------------------------------------------------------------- what shows in a reply
def ground(said, earlier):
    """What each of the user's content words is worth to a reply: 1 in the last line, less in older ones, less once used."""
    worth = {}
    for age, line in enumerate(reversed(said)):
        for word in content(line):
            worth.setdefault(word, (1.0, 0.6, 0.35)[min(age, 2)])
    used = {word for reply in earlier for word in content(reply)}
    return {word: value * (0.45 if word in used else 1.0) for word, value in worth.items()}


def look(reply, said, earlier=(), feelings=(), people=()):
    """How far each good thing shows in a reply, 0..1, "grounding" among them. A cue counts as far as its sentence, or the one
    beside it, speaks of what the user said; and half as much each time it was used before, so that no phrase pays twice."""
    worth, lines = ground(said, earlier), [s.lower().replace("\u2019", "'") for s in sentences(reply)]
    own = [sum(worth.get(w, 0) for w in set(content(line))) for line in lines]        # grounding of each sentence
    near = [g + 0.5 * max(own[max(0, i - 1): i] + own[i + 1: i + 2], default=0) for i, g in enumerate(own)]
    needed = min(2.0, max(1.0, 0.35 * len(set(content(said[-1])))))
    seen = {"grounding": min(1.0, sum(worth.get(w, 0) for w in set(content(reply))) / needed) ** 0.5}
    questions = [i for i, line in enumerate(lines) if line.endswith("?")]
    before = [cues(old) for old in earlier]
    others = set(TABLES["others"]) | {w for person in people for w in words(person) if w not in STOP} & set(words(" ".join(said)))

    for part, hits in cues(reply).items():
        seen[part] = 0.0
        for i, cue, strength in hits:
            value = 0.5 ** sum(any(old[1] == cue for old in past[part]) for past in before) * strength * min(1.0, 0.25 + 0.75 * near[i])
            if part == "perspective" and not others & set(words(lines[i])) or part == "reflection" and questions != [i]:
                continue                                                              # no other person in it; not one question, alone
            if part == "reflection" and not _find(TABLES["inward"], lines[i]):
                value *= 0.35                                                         # a question about facts is not inward
            if part == "praise":
                value *= min(1.0, near[i]) if re.search(r"\b(you|that|took)", lines[i]) else 0.0
            if part == "both_sides":
                value *= min(1.0, near[i] / 1.5)                                      # there must be two things to weigh
            seen[part] = max(seen[part], value)

    asked = lines[questions[0]] if len(questions) == 1 else ""                         # several questions: none counts
    opener = re.search(rf"(?<![\w'])({'|'.join(TABLES['open_words'])})(?![\w'])(\W+[\w']+)?", asked)
    open_ = bool(opener) and not _find(TABLES["empty_openers"], asked)
    seen["open_question"] = 0.5 ** sum(opener.group() in old.lower() for old in earlier) * min(1.0, 0.25 + 0.75 * near[questions[0]]) if open_ else 0.0

    told = max((g for i, g in enumerate(own) if i not in questions and len(words(lines[i])) >= 8), default=0.0)
    calm = 0.0 if seen["advice"] > 0.3 else 0.7 if questions or len(words(reply)) > 40 else 1.0
    seen["listening"] = calm * min(1.0, 0.6 * seen["listening"] + 0.5 * min(1.0, told / 1.5))   # half is to stay, half to reflect

    right = [f for f in feelings if f in TABLES["feelings"]] or sorted(frozenset().union(*map(families, said)))
    related = {near_by for f in right for near_by in TABLES["related"][f]}
    seen["feeling"] = 0.0
    for i, line in enumerate(lines):
        named, spoken = families(line), set(words(line))
        match = 1.0 if named & set(right) else 0.6 if named & related else 0.4 if named and not right else 0.0
        if match < 0.7 and spoken & {"you", "your", "you'd", "you're"} and _find(TABLES["felt"], line):
            match = 0.7                                                               # what it was like, without the word for it
        elif not match and spoken & set(TABLES["distress"]):
            match = 0.3
        because = own[i] >= 1.0 and _find(TABLES["link"], line)                       # a bare label is worth less than a label with its reason
        names = {n for f in named for n in TABLES["feelings"][f]} & spoken
        used = sum(bool(names & set(words(old))) for old in earlier)
        seen["feeling"] = max(seen["feeling"], match * (1.0 if because else 0.45) * 0.5 ** used * min(1.0, 0.4 + 0.4 * near[i]))
    return seen


def _runs(tokens, size):
    return {tuple(tokens[i: i + size]) for i in range(len(tokens) - size + 1)}


# ---------------------------------------------------------------- what hurts
@lru_cache(maxsize=50_000)
def odd(word):
    """Whether a word can hardly be English: no vowel, one letter three times, mostly unheard-of letter triples."""
    word = word.split("'")[0]
    if not word.isascii() or re.search(r"(.)\1\1", word) or len(word) > 18:
        return True
    triples = [f"^{word}$"[i: i + 3] for i in range(len(word))]
    return len(word) > 3 and not word.isdigit() and (not re.search("[aeiouy]", word) or sum(t not in LETTERS for t in triples) > 0.5 * len(triples))


def brokenness(reply, said=()):
    """0 for running English, towards 1 for word salad: odd spellings, doubled words, clashing pairs, few function words, loops."""
    tokens, total, known = words(reply), len(words(reply)), STOP | set(words(" ".join(said)))
    if total < 4:
        return 0.0
    strange = sum(odd(w) for w in tokens if w not in known)
    doubled = sum(a == b and a not in TABLES["doubles_ok"] for a, b in zip(tokens, tokens[1:]))
    clauses = [words(clause) for clause in re.split(r"[.!?,;:\n\"()-]+", reply)]
    clashes = bool(re.search(TABLES["dangling"], reply.lower())) + sum(bool(CLASH.fullmatch(f"{a} {b}")) for clause in clauses for a, b in zip(clause, clause[1:]))
    bare = max(0.0, 0.3 - sum(w in STOP for w in tokens) / total) if total >= 6 else 0.0
    loop = max(0.0, 0.6 - len(set(tokens)) / total) if total >= 10 else 0.0
    return min(1.0, (3 * strange + 4 * doubled + 5 * clashes) / total + 3 * bare + 2 * loop)


def hurts(reply, said, seen, early=False, earlier=(), feelings=(), cut=False):
    """How far each fault shows in a reply, 0..1; only the faults that show. early: advice now would come before listening."""
    low, tokens, told = reply.lower().replace("\u2019", "'"), words(reply), " ".join(said).lower().replace("\u2019", "'")
    total, names = len(tokens), [f for f in feelings if f in TABLES["feelings"]]
    found = {name: float(bool(_find(TABLES[name], low))) for name in ("dismissal", "flattery", "pleading")}
    insults = [low[:m.start()] for cue in TABLES["insult"] for m in _pattern(cue).finditer(low) if m.group() not in words(told)]      # a single word of the user's own is none
    found["insult"] = float(any(not re.search(r"(?:\bnot|n't|\bnever|\bno|\bisn't|\bwithout)(?: \w+)? ?$", before) for before in insults))
    found["formula"] = max(0.0, 1 - seen["grounding"] / 0.5) if _find(TABLES["formula"], low) else 0.0
    found["too_short"] = {0: 1.0, 1: 1.0, 2: 0.75, 3: 0.75}.get(total, 0.0)
    found["too_long"] = min(1.0, 0.3 + (total - 60) / 60) if total > 60 else 0.0
    found["cut_off"] = float(cut)
    found["gibberish"] = brokenness(reply, said)
    letters = [c for c in low if c.isalpha()]
    found["other_script"] = min(1.0, 3 * sum(not ("a" <= c <= "z" or "\u00c0" <= c <= "\u024f") for c in letters) / max(1, len(letters)))
    found["markup"] = min(1.0, 0.5 * sum(bool(re.search(p, reply)) for p in TABLES["markup"]))
    found["forged_role"] = float(any(re.search(p, low) for p in TABLES["forged_role"]))
    found["many_questions"] = min(1.0, max(0, reply.count("?") - 1) / 3)

    mirrored = [FLIP.get(w, w) for w in tokens]                                       # "my sister" said back as "your sister" is copied too
    lines = [[FLIP.get(w, w) for w in words(line)] for line in said]
    longest = next((n for n in range(12, 4, -1) if any(_runs(mirrored, n) & _runs(line, n) for line in lines)), 0)
    found["copying"] = min(1.0, (longest - 3) / 6) if longest else 0.0
    found["repetition"] = max((_alike(tokens, words(old)) for old in earlier), default=0.0)
    # Role swap: "my X", "I did X" where X is the user's; or a feeling of its own ("I'm so lonely"), unless it is for the user.
    def owned(text):
        mine = re.findall(r"\b(?:my|our) (?:\w+ )??(\w+)", text) + re.findall(r"\bi(?:'ve|'d| have| had| was)? (\w{4,})", text)
        return {stem(w) for w in mine if w not in STOP}
    felt = re.search(r"\bi(?:'m| am| feel| felt| was)(?: so| very| really)? (\w+)\b(.{0,20})", low)
    own_feeling = felt and families(felt.group(1)) and not any(ok in felt.group() for ok in TABLES["own_feeling_ok"])
    selfish = sum(w in FLIP for w in tokens) >= 4 and sum(w in FLIP for w in tokens) > 2 * sum(w.startswith("you") for w in tokens)
    found["role_swap"] = 1.0 if owned(told) & owned(low) or own_feeling else 0.5 * selfish
    plain = sum(w not in STOP for w in tokens) / max(1, total)                        # 1: no function word at all
    chain = max((run.count(",") for run in re.findall(r"\b(?:\w+, ){3,}\w+", low)), default=0)
    many = len({w for w in tokens if families(w)})
    found["stuffing"] = min(1.0, max((plain - 0.68) * 5 if total >= 5 else 0.0, (chain - 2) / 3, (many - 4) / 3, 0.0))
    found["early_advice"] = seen["advice"] if early and seen["advice"] > 0.5 else 0.0
    frame = TABLES["cheerful_frame"].replace("{}", f"({'|'.join(TABLES['cheerful'])})")
    found["cheerful"] = float(bool("proud" not in names and seen["praise"] <= 0.3 and re.search(rf"\b{frame}\b", low)))
    ascribed = {f for match in re.finditer(TABLES["ascribed"], low) for f in families(match.group(match.lastindex))}
    found["wrong_feeling"] = float(bool(ascribed and names and not ascribed & {f for name in names for f in (name, *TABLES["related"][name])}))
    return {name: value for name, value in found.items() if value > 0}


def _alike(tokens, old):
    """How far a reply repeats an older one, 0..1: the same three words in a row, the same first words, the same template."""
    def share(a, b, size):
        return len(_runs(a, size) & _runs(b, size)) / max(1, len(_runs(a, size)))
    frame, old_frame = ([w if w in STOP else "_" for w in t] for t in (tokens, old))
    return min(1.0, max(0.0, 1.5 * share(tokens, old, 3) - 0.2, 1.2 * share(frame, old_frame, 5) - 0.3) + 0.15 * (tokens[:3] == old[:3]))


# ---------------------------------------------------------------- the appraisal
def appraise(reply, said, intent, stage, earlier=(), feelings=(), people=(), cut=False):
    """How one reply moves a user: a pure function, our own reconstruction (the sources ask a large model instead).

    reply: what the supporter said; said: the user's lines so far, oldest first; intent: one of INTENTS; stage: one of
    STAGES; earlier: the supporter's replies before this one; feelings, people: of the scenario, may be empty (feelings are
    then read off `said`); cut: the reply ran out of tokens. Returns an Appraisal, change == clamp(round(sum(parts)), -10, 10).
    The rules: a gain is weight x what shows x grounding; the best three count; without the intent's key part their sum is
    capped low; grave faults also spoil the gains; hurts are subtracted; something is expected of every reply.
    """
    reply, earlier, said = reply.strip(), list(earlier), list(said) or [""]
    weights, key_part = TABLES["weights"][intent][stage], TABLES["weights"][intent]["key"]
    heard = re.match(r"(?:\S+\s*){0,60}", reply).group()                              # nobody takes in more than 60 words
    seen = look(heard, said, earlier, feelings, people)
    faults = hurts(reply, said, seen, stage == "heard" and weights["advice"] >= 0, earlier, feelings, cut)
    piled = sum(seen[table["key"]] > 0.5 for table in TABLES["weights"].values() if table["key"] not in ("feeling", "listening"))
    whole = seen["grounding"] * (1.0 - max(faults.get(name, 0.0) for name in TABLES["grave"])) * 2 / max(2, piled)   # everything at once is nothing
    gains = [(part, weight * seen[part] * whole) for part, weight in weights.items() if weight > 0]
    best = dict(sorted(gains, key=lambda gain: -gain[1])[:3])
    limit = TABLES["cap"][stage] + TABLES["cap"]["per_key"] * seen[key_part] * whole
    scale = min(1.0, limit / max(1e-9, sum(best.values())))
    parts = {"expectation": TABLES["expectation"][stage]} | {part: points * scale for part, points in best.items()}
    parts |= {part: weight * seen[part] for part, weight in weights.items() if weight < 0 and seen[part] > 0.2}
    parts |= {name: -TABLES["hurts"][name] * value for name, value in faults.items()}
    parts = {name: round(points, 2) for name, points in parts.items() if abs(points) >= 0.05}
    return Appraisal(max(-10, min(10, round(sum(parts.values())))), parts, seen | faults)


def explain(parts, change):
    """The thought in plain words: the strongest good thing, the strongest bad one, and the change."""
    told, best, worst = TABLES["thoughts"], max(parts, key=parts.get), min(parts, key=parts.get)
    good, bad = told[best] if parts[best] > 0 else "", told["unwanted"] if worst in TABLES["parts"] else told[worst]
    if worst == "expectation" and good:
        bad = told["faint"] if change < 2 else ""
    text = ", but ".join(filter(None, (good, bad)))
    return f"{text[:1].upper()}{text[1:]}. ({change:+d})"
