"""
What a dialogue is worth: text and user turns in, named numbers out.

For now the one reward of RLVER: the user's final emotion / 100, a verifiable number that no judge model produces.
With the scripted user it is the rule score of a scripted user, not empathy. Rubric rewards plug in here later.
"""
from dataclasses import dataclass, field

REWARDS = ("emotion",)


@dataclass
class Reward:
    total: float                                           # in [0, 1]; what GRPO compares within a group
    parts: dict = field(default_factory=dict)              # name -> float, each logged by itself
    turns: list = field(default_factory=list)              # per reply, in [-1, 1]: the emotion change / 100

    def __str__(self):                                     # as samples/ shows it: "0.71 = emotion 0.71; by reply +0.05 -0.02"
        return f"{self.total:.2f} = " + ", ".join(f"{k} {v:.2f}" for k, v in self.parts.items()) + "; by reply " + " ".join(f"{x:+.2f}" for x in self.turns)


def score(episodes, reward="emotion"):
    """Reward of each episode: r = max(e_T, 0) / 100 (RLVER), and r_t = (e_t - e_{t-1}) / 100 per turn (MICA's potential difference
    with only an emotion number). A dialogue whose user failed gets None: it leaves the batch's statistics. One with a malformed think
    block gets 0 (RLVER): from that reply on the emotion counts as 0."""
    assert reward in REWARDS, f"reward {reward!r} is not one of {REWARDS}"
    out = []
    for e in episodes:
        if e.finish == "user_failed":
            out.append(None)
            continue
        emotions = [e.start_emotion] + [0 if any(e.malformed[:i + 1]) else t.emotion for i, t in enumerate(e.turns)]
        total = max(emotions[-1], 0) / 100
        out.append(Reward(total, {"emotion": total}, [(b - a) / 100 for a, b in zip(emotions, emotions[1:])]))
    return out
