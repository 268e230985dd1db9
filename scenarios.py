"""
Who the simulated user is: scenarios, the files they come in, and the interaction states.

A scenario (persona, event, hidden intention) never changes; a state says how the user deals with the other, and reaches the user only. Our own
rows and RLVER's and SAGE's profile files are read, every bad row by file, line and field. Left out on purpose: anything a user does (simulator.py).
"""
import json
import sys
from dataclasses import dataclass, fields
from pathlib import Path

from appraisal import DATA, INTENTS, TABLES

SPLITS = ("train", "dev", "heldout")


@dataclass(frozen=True)
class Scenario:
    """Who the user is; never changes during a dialogue. intent, hidden_need and feelings are never shown to a policy."""
    id: str; split: str; intent: str; persona: str; background: str; hidden_need: str; opening: str
    facts: list[str]; feelings: list[str]; people: list[str]; language: str; source: str


STATE_CLAUSES = json.loads((DATA / "states.json").read_text(encoding="utf-8"))


@dataclass(frozen=True)
class State:
    """How a user interacts: disclosure delayed | conditional | proactive, activation moderate | high, trust "1" .. "4" (dual-loop's 3 x 2 x 4 states).
    It reaches the user only; who the user is, what happened and what they need never change with it."""
    disclosure: str; activation: str; trust: str

    def __str__(self):
        return f"{self.disclosure}/{self.activation}/{self.trust}"

    @property
    def clause(self):
        """The behaviour in words, for a language user: no axis, level or number is named."""
        return " ".join(STATE_CLAUSES[axis][value] for axis, value in zip(STATE_CLAUSES, (self.disclosure, self.activation, self.trust)))


STATES = [State(d, a, t) for d in STATE_CLAUSES["disclosure"] for a in STATE_CLAUSES["activation"] for t in STATE_CLAUSES["trust"]]      # 24, in this order


def die(message):
    """Ends the program with one line on stderr and exit code 2: for a user's mistake, never for a bug."""
    print(message, file=sys.stderr)
    raise SystemExit(2)


# ---------------------------------------------------------------- scenario files
def row_problem(row):
    """The first thing wrong with a parsed row, as "field 'x': what is wrong"; "" for a good row."""
    ours = row.get("source") == "nanoempathy"         # our own rows promise more than rows made from other data
    kinds = {f.name: f.type for f in fields(Scenario)}
    for name, kind in kinds.items():
        value = row.get(name)
        if name not in row:
            return f"field '{name}': missing"
        if kind is str and not (isinstance(value, str) and value.strip()):
            return f"field '{name}': must be a non-empty string, not {json.dumps(value)[:40]}"
        if kind is not str and not (isinstance(value, list) and all(isinstance(v, str) and v.strip() for v in value)
                                    and (value or name in ("feelings", "people") and not ours)):
            return f"field '{name}': must be a list of non-empty strings, not {json.dumps(value)[:40]}"
    if unknown := [name for name in row if name not in kinds]:
        return f"field '{unknown[0]}': unknown; the fields are {', '.join(kinds)}"
    if ours and not 4 <= len(row["facts"]) <= 6:
        return f"field 'facts': {len(row['facts'])} facts; a nanoempathy row has 4 to 6"
    for name, values, allowed in (("intent", [row["intent"]], INTENTS), ("split", [row["split"]], SPLITS),
                                  ("feelings", row["feelings"] if ours else [], TABLES["feelings"])):
        if wrong := [v for v in values if v not in allowed]:
            return f"field '{name}': '{wrong[0]}' is not one of {', '.join(allowed)}"
    return ""


# RLVER's and SAGE's profile files: what each hidden intention is called there. Told apart by one phrase each, so that small edits of the wording don't matter.
PROFILE_TASKS = {"辩证": "analysis", "自我反思": "reflection", "其他人物": "perspective", "建议": "advice", "倾听": "listening", "共情": "empathy", "没有错": "no_fault", "夸奖": "praise"}


def read_profile(row, split="train"):
    """An RLVER / SAGE profile as (scenario, ""), or (None, what is wrong). Fields id, player (persona), scene (background, which ends with a heading
    and *** and the task), main_cha and cha_group (traits), task, and not always first_talk: without it the user's first line is generated."""
    for name in ("id", "player", "scene", "task"):
        if not (isinstance(row.get(name), str) and row[name].strip()):
            return None, f"field '{name}': must be a non-empty string" if name in row else f"field '{name}': missing"
    if not isinstance(row.get("first_talk", ""), str):
        return None, "field 'first_talk': must be a string"
    traits = row.get("cha_group", [])
    if not (isinstance(traits, list) and all(isinstance(x, str) for x in traits)):
        return None, "field 'cha_group': must be a list of strings"
    intents = [intent for phrase, intent in PROFILE_TASKS.items() if phrase in row["task"]]
    if len(set(intents)) != 1:
        return None, f"field 'task': '{row['task'][:40]}' is none of the eight hidden intentions"
    background = row["scene"].rsplit("***", 1)[0].rstrip()
    background = "\n".join(background.split("\n")[:-1]).rstrip() if background.split("\n")[-1].lstrip().startswith("#") else background   # the heading of the hidden theme
    persona = row["player"].strip() + f"\n* {row.get('main_cha', '')}: {', '.join(traits)}" * bool(traits)
    return Scenario(row["id"], split, intents[0], persona, background, row["task"].strip(), row.get("first_talk", "").strip(), [], [], [], "zh", "rlver"), ""


def read_lines(path, mend=False):
    """The rows of a JSON Lines file (UTF-8), as (line number, parsed row, ""), or (line number, None, what is wrong with it). OSError where it can't be read.
    mend: half of a surrogate pair becomes "?" instead of a fault (what a model said may be cut anywhere)."""
    for number, raw in enumerate(Path(path).read_bytes().split(b"\n"), start=1):
        if not raw.strip():
            continue
        try:
            row = json.loads(raw.decode("utf-8-sig"))
            text = json.dumps(row, ensure_ascii=False).encode("utf-8", "replace" if mend else "strict")
            row = json.loads(text) if mend and b"?" in text else row
            yield (number, row, "") if isinstance(row, dict) else (number, None, "the line is not a JSON object")
        except UnicodeDecodeError:
            yield number, None, "not UTF-8; save the file as UTF-8"
        except UnicodeEncodeError:
            yield number, None, "half of a surrogate pair (\\ud800 .. \\udfff) is not text"
        except (ValueError, RecursionError) as error:
            yield number, None, f"broken JSON: {error}"


def check_file(path):
    """Reads a scenario file (JSON Lines, UTF-8): our rows, or RLVER's and SAGE's profiles. Returns (good scenarios, problems); a problem reads
    file:line: field 'x': ..."""
    path, good, problems, first = Path(path), [], [], {}
    try:
        lines = list(read_lines(path))
    except OSError as error:
        return [], [f"{path}: cannot be read ({error.strerror}); give the path of a scenario file"]
    for number, row, problem in lines:
        scenario = None
        if not problem and {"player", "scene", "task"} & row.keys():
            scenario, problem = read_profile(row, (("train",) * 6 + ("dev", "heldout"))[len(good) % 8])    # these files have no splits of their own
        elif not problem:
            problem = row_problem(row)
        if not problem and row["id"] in first:
            problem = f"field 'id': '{row['id']}' was used before, on line {first[row['id']]}"
        if problem:
            problems.append(f"{path.name}:{number}: {problem}")
        else:
            first[row["id"]] = number
            good.append(scenario or Scenario(**row))
    if not good and not problems:
        problems.append(f"{path.name}:1: the file is empty; one JSON object a line is expected")
    return good, problems


def load_memories(path, scenarios):
    """What is remembered of earlier talks: rows {"scenario": id, "memory": [sentence, ...]} -> {id: text}. SystemExit on a bad row, or where one of the scenarios has none."""
    out, name = {}, Path(path).name
    try:
        lines = list(read_lines(path))
    except OSError as error:
        die(f"--memory {path}: cannot be read ({error.strerror}); give data/memories.jsonl, or none")
    for number, row, problem in lines:
        memory = row and row.get("memory")
        if not problem and not (isinstance(row.get("scenario"), str) and row["scenario"]):
            problem = "field 'scenario': must be the id of a scenario"
        if not problem and not (isinstance(memory, list) and memory and all(isinstance(x, str) and x.strip() for x in memory)):
            problem = "field 'memory': must be a list of sentences"
        if not problem and row["scenario"] in out:
            problem = f"field 'scenario': '{row['scenario']}' was used before"
        if problem:
            die(f"{name}:{number}: {problem}")
        out[row["scenario"]] = " ".join(x.strip() for x in memory)
    if missing := [s.id for s in scenarios if s.id not in out]:
        die(f"--memory {path}: nothing about scenario {missing[0]} ({len(missing)} of {len(scenarios)} have none); add a row, or leave --memory out")
    return out


def load_scenarios(path, split=None):
    """All scenarios of a file, or those of one split. The first bad row, or no row at all, ends the program (exit code 2)."""
    scenarios, problems = check_file(path)
    if problems:
        die(problems[0])
    if not (chosen := [s for s in scenarios if split in (None, s.split)]):
        die(f"{Path(path).name}: no scenario of split '{split}'; it has {', '.join(sorted({s.split for s in scenarios}))}")
    return chosen
