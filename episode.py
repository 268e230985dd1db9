"""
What a dialogue leaves behind: `Episode`, its training rows token by token, batches of rows, and both as text.

Rows of one dialogue, which all repeat what was said before, are read as one sequence (`Tree`). Left out on purpose: packing rows of different dialogues, and anything that knows what a reward is.
"""
from dataclasses import dataclass, field

import torch


@dataclass
class Row:
    """One training sequence. mask is 1 exactly for sampled tokens, <|im_end|> included; logp is 0 and turn -1 elsewhere."""
    ids: list = field(default_factory=list)
    mask: list = field(default_factory=list)
    logp: list = field(default_factory=list)
    turn: list = field(default_factory=list)               # which reply (0, 1, ...) a policy token belongs to

    def environment(self, ids):
        self.ids += ids
        self.mask += [0] * len(ids)
        self.logp += [0.0] * len(ids)
        self.turn += [-1] * len(ids)

    def policy(self, ids, logp, turn):
        assert len(ids) == len(logp) > 0, "a reply has at least one sampled token, each with its log-prob"
        self.ids += ids
        self.mask += [1] * len(ids)
        self.logp += logp
        self.turn += [turn] * len(ids)


@dataclass
class Episode:
    """One dialogue. finish: success | failure | goodbye | max_turns | max_tokens | user_failed."""
    scenario: object
    state: object
    group: int
    opening: str
    start_emotion: int
    rows: list = field(default_factory=list)
    turns: list = field(default_factory=list)              # UserTurn after each reply
    replies: list = field(default_factory=list)
    cuts: list = field(default_factory=list)               # reply hit its token budget
    malformed: list = field(default_factory=list)          # reply lacked the think block that was asked for, or was no feeling's name and a clean reply
    perceived: list = field(default_factory=list)          # with --template edf: (label, or "" where it could not be read, and the aim), for each reply
    plans: list = field(default_factory=list)              # with think blocks, what was in them: for a judge, never for a user
    beyond: list = field(default_factory=list)             # ids up to the next reply that never was, where the dialogue was truncated
    asides: list = field(default_factory=list)             # where asked for: what the policy said aside, as text, after the user's line of each turn
    states: list = field(default_factory=list)             # where asked for: hidden states (tokens, D) before the policy tokens of each reply, then (1, D) after `beyond`
    finish: str = ""

    @property
    def truncated(self):
        """The turn or token budget ran out. That is not an end: the user had not left yet (pitfall 20)."""
        return self.finish in ("max_turns", "max_tokens")

    @property
    def outcome(self):
        """What the dialogue was worth, 0..100: its last emotion, or 0 where a reply was malformed."""
        return 0 if any(self.malformed) else self.emotion

    @property
    def emotion(self):
        """Emotion after the last scored reply, 0..100."""
        return self.turns[-1].emotion if self.turns else self.start_emotion


# ---------------------------------------------------------------------------------------------- rows to batches
def micro_batches(rows, budget):
    """Split row indices into lists whose padded size (rows x longest) stays within `budget` tokens, long rows together."""
    order = sorted(range(len(rows)), key=lambda i: -len(rows[i].ids))
    batches = []
    for i in order:
        if batches and len(rows[batches[-1][0]].ids) * (len(batches[-1]) + 1) <= budget:
            batches[-1].append(i)
        else:
            batches.append([i])
    return batches


@dataclass
class Tree:
    """Rows as one sequence in which what several begin with stands once: token k stands at position[k] of its rows, and is seen by the tokens k .. last[k] alone,
    its own rows' later ones. places[r][i] is where token i of row r stands. What a token's hidden state hangs on is the same as in a row of its own.

    Example: rows [7, 8, 9] and [7, 5] -> ids [7, 5, 8, 9], position [0, 1, 1, 2], last [3, 1, 3, 3], places [[0, 2, 3], [0, 1]].
    """
    rows: list

    def __post_init__(self):
        self.ids, self.position, self.last, self.places = [], [], [], [None] * len(self.rows)
        path, before = [], []                              # where the tokens of the row before stand, and that row
        for r in sorted(range(len(self.rows)), key=lambda r: self.rows[r].ids):        # in this order rows that begin alike are neighbours
            row = self.rows[r].ids
            shared = next((i for i, (a, b) in enumerate(zip(row, before)) if a != b), min(len(row), len(before)))
            for k in path[shared:]:
                self.last[k] = len(self.ids) - 1
            path = path[:shared] + list(range(len(self.ids), len(self.ids) + len(row) - shared))
            self.ids += row[shared:]
            self.position += range(shared, len(row))
            self.last += [0] * (len(row) - shared)
            self.places[r], before = path, row
        for k in path:
            self.last[k] = len(self.ids) - 1


def collate(trees, device):
    """Trees (or rows, trees of one) -> ids (B, T) right-padded; branches, None where no tree has several rows, else (2, B, T): the positions, and the last token that sees each (model.Policy.forward); and for the
    N policy tokens, tree by tree and row by row: source (N,) flat index of the position that predicts the token, target (N,), logp (N,) as sampled, and `at`, a list of (tree, turn).
    Padding is known by length, never by id.

    Example: rows with ids [7, 8, 9] and mask [0, 1, 1] -> source [0, 1], target [8, 9], at [(0, 0), (0, 0)].
    """
    trees = [t if isinstance(t, Tree) else Tree([t]) for t in trees]
    T = max(len(t.ids) for t in trees)
    pad = lambda values, fill: torch.tensor([v + [fill] * (T - len(v)) for v in values], device=device)       # (B, T)
    branches = torch.stack((pad([t.position for t in trees], 0), pad([t.last for t in trees], T - 1))) if any(len(t.rows) > 1 for t in trees) else None
    at = [(b, row, i, t.places[r]) for b, t in enumerate(trees) for r, row in enumerate(t.rows) for i, m in enumerate(row.mask) if m]
    assert all(i > 0 for _, _, i, _ in at), "the first token of a row cannot be the policy's"
    pick = lambda values, dtype: torch.tensor(values, dtype=dtype, device=device)
    return (pad([t.ids for t in trees], 0), branches, pick([b * T + places[i - 1] for b, _, i, places in at], torch.long), pick([row.ids[i] for _, row, i, _ in at], torch.long),
            pick([row.logp[i] for _, row, i, _ in at], torch.float32), [(b, row.turn[i]) for b, row, i, _ in at])


def critic_rows(chat, episode, prefix=(), beyond=False):
    """The dialogue's rows as a critic reads them: prefix (ids that the policy isn't shown) first. beyond: where a budget cut the dialogue, one policy token
    more that never was: its place is the state in which the policy would have gone on, after the user's last line."""
    rows = []
    for real in episode.rows:
        rows.append(Row())
        rows[-1].environment(list(prefix))
        for name in ("ids", "mask", "logp", "turn"):
            getattr(rows[-1], name).extend(getattr(real, name))
    if beyond and episode.truncated:
        if chat.hides:                                     # what was thought is no part of the state: a row of its own
            rows.append(Row())
            rows[-1].environment(list(prefix) + episode.beyond)
        else:
            rows[-1].environment(episode.beyond[len(episode.rows[0].ids):])
        rows[-1].policy([chat.eot], [0.0], len(episode.turns))
    return rows


def training_batches(episodes, use, budget, device, read=lambda e: e.rows):
    """Episodes `use` as padded micro-batches within `budget` tokens, a dialogue's rows as one tree. Yields ids (B, T), branches, and for its N policy tokens source, target, logp
    (N,) as collate has them, and three lists: the episode, the place among that episode's policy tokens, the turn. read(episode) -> its rows.

    A dialogue that thinks has a row or two a turn, any other one row in all; places run on from row to row. Apart, the rows of an edf dialogue are 4.6 times its tree's tokens (data/demonstrations.jsonl).
    """
    trees = [Tree(read(episodes[i])) for i in use]
    for part in micro_batches(trees, budget):
        *batch, at = collate([trees[j] for j in part], device)
        episode, place = map(list, zip(*[(use[j], k) for j in part for k in range(sum(sum(row.mask) for row in trees[j].rows))]))
        yield *batch, episode, place, [turn for _, turn in at]


# ---------------------------------------------------------------------------------------------- for the eyes
def transcript(e, parts=True):
    """A dialogue as text: emotion after each turn, what moved it, and the user's thought."""
    lines = [f"{e.scenario.id} ({e.scenario.intent}){f', {e.state}' if e.state else ''}: {e.start_emotion} -> {e.emotion}, {e.finish}", f"  user      {e.opening}"]
    for t, (reply, cut, answer) in enumerate(zip(e.replies, e.cuts, e.turns)):
        lines += [f"  perceived {label or '(unreadable)'}, aim: {aim}" for label, aim in e.perceived[t:t + 1]]
        lines.append(f"  policy    {reply}{' [cut off]' if cut else ''}")
        moved = ", ".join(f"{k} {v:+.2f}" for k, v in answer.parts.items() if v) if parts else ""
        lines.append(f"  emotion   {answer.emotion} ({answer.change:+d}){'  ' + moved if moved else ''}")
        if parts and answer.thought:
            lines.append(f"  thought   {answer.thought}")
        if answer.text:
            lines.append(f"  user      {answer.text}")
    return "\n".join(lines)


def marked(row, tokenizer):
    """The row as text with each trained span in [[ ]], end of turn included: what samples/ shows of the tokens."""
    out, start = [], 0
    for i in range(1, len(row.ids) + 1):
        if i == len(row.ids) or row.mask[i] != row.mask[start]:
            text = tokenizer.decode(row.ids[start:i])
            out.append(f"[[{text}]]" if row.mask[start] else text)
            start = i
    return "".join(out)


def coloured(row, tokenizer):
    """The row's tokens one by one: trained ones green, the environment's grey."""
    out = []
    for i, m in zip(row.ids, row.mask):
        text = tokenizer.decode([i]).replace("\n", "\\n\n")
        out.append(f"\033[{'32' if m else '90'}m{text}\033[0m")
    return "".join(out)
