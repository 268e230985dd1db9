"""
The outer loop: which interaction state each intention is practised in next, learned from outcomes that the inner loop has already paid for.

Practise at the edge of competence. For every unit (intention c, state z) the controller keeps how often a dialogue passed, borrows from other
intentions in the same state where it has seen little, and prefers units whose pass rate is near one half, with a bonus for the unknown and a share of
uniform rehearsal. Scenarios stay uniform, only z is chosen; the rollout budget is what uniform sampling would spend. Formulas and constants: dual-loop
self-evolution [P], section by section below. Left out on purpose: a model, text, any second rollout.

    python curriculum.py runs/ppo          what a run practised: 8 x 24 pass rates, counts and probabilities; writes curriculum.svg
    python curriculum.py simulate          no model: learners with known difficulties, all arms, 20 seeds, under a minute
"""
import json
import sys
from dataclasses import asdict, dataclass, replace
from pathlib import Path

import numpy as np
from tqdm import tqdm

from appraisal import INTENTS
from rundir import Flags, die, nonnegative, positive, read_json, record_result, writable
from scenarios import STATES                               # their names, for the tables

ARMS = ("dual", "uniform", "no-states", "bandit")


# ---------------------------------------------------------------------------------------------- flags
@dataclass(frozen=True)
class Settings:
    """Every constant of the controller, with the paper's value."""
    arm: str = "dual"            # dual | uniform | no-states (the plain user) | bandit (mean |advantage| + bonus, SEC / DUMP style)
    eta: float = 50.0            # a dialogue passes at this final emotion
    lam: float = 4.0             # strength of the shared estimate, in groups
    alpha: float = 4.0           # strength of its own prior (1/2), in groups
    beta: float = 0.15           # weight of the uncertainty bonus
    eps: float = 0.10            # share of uniform rehearsal
    gamma: float = 1.0           # temperature of the normalisation: larger is flatter
    floor: float = 0.05          # A_min
    warmup: int = 0              # groups sampled uniformly first
    utility: str = "triangle"    # triangle | p(1-p)
    soft_outcome: bool = False   # a sigmoid of the emotion instead of pass / fail
    half_life: float = 0.0       # groups after which an observation counts half; 0: never forgets (ours)
    group_size: int = 4          # K: dialogues in a complete group


def add_curriculum_flags(p):
    """The controller's flags, alike in both train scripts. Read back with read_settings."""
    d = Settings()
    p.add_argument("--curriculum", default="no-states", choices=ARMS, help="outer loop; dual: practise states near the edge of competence; uniform: 24 states uniformly; no-states: the plain user; bandit: mean |advantage| (default: %(default)s)")
    p.add_argument("--eta", type=positive(float), default=d.eta, help="final emotion at which a dialogue passes (default: %(default)s)")
    p.add_argument("--sharing", type=nonnegative(float), default=d.lam, help="lam, weight, in groups, of what other intentions saw in the same state; --no_sharing puts 1/2 in its place (default: %(default)s)")
    p.add_argument("--prior", type=nonnegative(float), default=d.alpha, help="alpha, weight, in groups, of 1/2 in what the others saw (default: %(default)s)")
    p.add_argument("--uncertainty", type=nonnegative(float), default=d.beta, help="weight of the bonus for units seen little (default: %(default)s)")
    p.add_argument("--rehearsal", type=nonnegative(float), default=d.eps, help="share of uniform sampling, at most 1 (default: %(default)s)")
    p.add_argument("--flatness", type=positive(float), default=d.gamma, help="gamma of the normalisation, exponent 1/this on the utilities: larger is flatter (default: %(default)s)")
    p.add_argument("--least_utility", type=positive(float), default=d.floor, help="A_min, what a unit is worth at least (default: %(default)s)")
    p.add_argument("--utility", default=d.utility, choices=["triangle", "p(1-p)"], help="how the edge of competence is weighed (default: %(default)s)")
    p.add_argument("--soft_outcome", action="store_true", help="ablation: a sigmoid of the final emotion instead of pass / fail")
    p.add_argument("--no_sharing", action="store_true", help="ablation: every unit by itself")
    p.add_argument("--no_uncertainty", action="store_true", help="ablation: no bonus")
    p.add_argument("--no_rehearsal", action="store_true", help="ablation: no uniform share")
    p.add_argument("--half_life", type=nonnegative(float), default=d.half_life, help="groups after which an observation counts half; 0 = never forget (default: %(default)s)")
    p.add_argument("--curriculum_warmup", type=float, default=0.2, help="share of the run's groups that is sampled uniformly first, 0..1; of the --steps it began with, where a run is made longer (default: %(default)s)")


def read_settings(args, groups):
    """Settings from a script's flags; groups: how many the whole run will see, for the warm-up."""
    if args.rehearsal > 1 or not 0 <= args.curriculum_warmup <= 1:
        die(f"--rehearsal {args.rehearsal}, --curriculum_warmup {args.curriculum_warmup}: both are shares, 0..1")
    if args.eta > 100:
        die(f"--eta {args.eta}: no dialogue ends above 100")
    if args.curriculum == "bandit" and args.group_size < 2:
        die("--curriculum bandit: the |advantage| of a group of one is 0; use --group_size 2 or more")
    return Settings(args.curriculum, args.eta, args.sharing, args.prior, beta=0.0 if args.no_uncertainty else args.uncertainty, eps=0.0 if args.no_rehearsal else args.rehearsal, gamma=args.flatness, floor=args.least_utility,
                    warmup=round(args.curriculum_warmup * groups) if args.curriculum in ("dual", "bandit") else 0, utility=args.utility, soft_outcome=args.soft_outcome, half_life=args.half_life, group_size=args.group_size)


# ---------------------------------------------------------------------------------------------- the controller
class Curriculum:
    """S: sum of pass rates, N: complete groups, A: sum of mean |advantage| (bandit), all (intents, states). intents, states: names, or how many."""
    def __init__(self, settings=Settings(), intents=8, states=24, sharing=True):
        names = lambda x: list(map(str, range(x) if isinstance(x, int) else x))
        self.settings, self.sharing, self.units = settings, sharing, [names(intents), names(states)]
        self.S, self.N, self.A = (np.zeros(tuple(map(len, self.units))) for _ in range(3))
        self.seen = self.dropped = 0                       # complete groups so far (they do not decay), groups that were not complete

    def pass_rate(self):
        """phat (intents, states): own passes, shrunk by lam groups towards what the other intentions saw in the same state (leave one intent out)."""
        s = self.settings
        others = ((self.S.sum(0) - self.S) + s.alpha / 2 + 1e-12) / ((self.N.sum(0) - self.N) + s.alpha + 2e-12) if self.sharing else np.full_like(self.S, 0.5)
        return (self.S + s.lam * others) / np.maximum(self.N + s.lam, 1e-12) if s.lam > 0 else np.where(self.N > 0, self.S / np.maximum(self.N, 1e-12), 0.5)

    def utility(self):
        """-> B, the boundary utility (1 where half the dialogues pass, 0 where all or none do), and U, the uncertainty, both (intents, states)."""
        s, p = self.settings, self.pass_rate()
        B = self.A / np.maximum(self.N, 1e-12) if s.arm == "bandit" else 4 * p * (1 - p) if s.utility == "p(1-p)" else np.maximum(0, 1 - 2 * np.abs(p - 0.5))
        return B, np.sqrt(np.log(self.N.sum() + 1) / (self.N + 1))

    def probabilities(self):
        """p(z|c) (intents, states), rows sum to 1, each entry >= eps / states once the warm-up is over."""
        s, (C, Z) = self.settings, self.S.shape
        if s.arm == "no-states":
            return np.eye(1, Z).repeat(C, 0)
        if s.arm == "uniform" or self.seen < s.warmup:
            return np.full((C, Z), 1 / Z)
        B, U = self.utility()
        A = np.log(np.maximum(s.floor, B + s.beta * U))
        with np.errstate(over="ignore"):
            A = np.exp((A - A.max(1, keepdims=True)) / s.gamma)       # A^(1/gamma) up to a factor that cancels: no gamma is too small
        return (1 - s.eps) * A / A.sum(1, keepdims=True) + s.eps / Z

    def sample(self, intents, rng):
        """A state for each intent (a list of indices), by its own row of probabilities."""
        cdf = self.probabilities()[intents].cumsum(1)      # (G, states)
        return (cdf > rng.random((len(intents), 1)) * cdf[:, -1:]).argmax(1).tolist()

    def update(self, outcomes):
        """outcomes: [(intent, state, final emotions of its K dialogues)], after the optimizer step, all or nothing. -> [(intent, state, what was added to S)].

        A group with fewer than K emotions, or one that is not finite, is dropped and counted: what is left of it would be a biased sample.
        """
        s, n = self.settings, len(outcomes)
        outcomes = [(c, z, e) for c, z, e in outcomes if len(e) == s.group_size and np.isfinite(e).all()]
        if not outcomes:
            self.dropped += n
            return []
        cs, zs, emotions = (np.array(x) for x in zip(*outcomes))                                      # (n,), (n,), (n, K)
        passed = 1 / (1 + np.exp((s.eta - emotions) / 10)) if s.soft_outcome else emotions >= s.eta   # a step of 10 points: our reconstruction
        decay = 0.5 ** (1 / s.half_life) if s.half_life else 1.0
        weight = decay ** np.arange(len(cs) - 1.0, -1.0, -1.0)                                         # (n,): each group ages those before it
        surprise = np.abs(emotions - emotions.mean(1, keepdims=True)).mean(1) / 50                    # 1 at most: half the group at 0, half at 100
        S, N, A = (old * decay ** len(cs) for old in (self.S, self.N, self.A))
        for total, new in ((S, passed.mean(1)), (N, 1.0), (A, surprise)):
            np.add.at(total, (cs, zs), weight * new)
        self.S, self.N, self.A, self.seen, self.dropped = S, N, A, self.seen + len(cs), self.dropped + n - len(cs)
        return list(zip(cs.tolist(), zs.tolist(), passed.mean(1).tolist()))

    def metrics(self):
        """Numbers for metrics.jsonl: entropy of p (nats, mean over intents), effective pool 1 / sum p^2, max p, means of phat, B, U; pass rate and p of every unit."""
        p, (B, U), phat = self.probabilities(), self.utility(), self.pass_rate()
        logs = np.where(p > 0, p * np.log(np.maximum(p, 1e-300)), 0)
        return {"entropy": float(-logs.sum(1).mean()), "pool": float((1 / (p ** 2).sum(1)).mean()), "max_p": float(p.max()), "phat": float(phat.mean()), "B": float(B.mean()), "U": float(U.mean()),
                "groups": self.seen, "dropped": self.dropped, "pass_rate": [[round(float(s / n), 3) if n else None for s, n in zip(*rows)] for rows in zip(self.S, self.N)], "p": p.round(4).tolist()}

    def state_dict(self):
        return {"settings": asdict(self.settings), "units": self.units, "sharing": self.sharing, "S": self.S.tolist(), "N": self.N.tolist(), "A": self.A.tolist(), "seen": self.seen, "dropped": self.dropped}

    def load_state_dict(self, d):
        """SystemExit where the state is another controller's: counts under another eta or other units mean something else."""
        for name in ("eta", "group_size", "soft_outcome"):
            if d["settings"][name] != getattr(self.settings, name):
                die(f"this run's curriculum counted with {name} {d['settings'][name]}, not {getattr(self.settings, name)}: its counts can't be used; start a new run")
        if d["units"] != self.units:
            die("this run's curriculum counted other intentions or states than data/ has now: its counts can't be used; start a new run")
        self.settings = replace(self.settings, warmup=d["settings"]["warmup"])       # a resumed run may have been given more steps
        self.S, self.N, self.A, self.seen, self.dropped = np.array(d["S"]), np.array(d["N"]), np.array(d["A"]), d["seen"], d["dropped"]


# ---------------------------------------------------------------------------------------------- a bench without a model
SIMULATED = {"dual": {}, "uniform": {"arm": "uniform"}, "no states": {"arm": "no-states"}, "bandit": {"arm": "bandit"}, "no sharing": {"sharing": False}, "no uncertainty": {"beta": 0.0}, "no rehearsal": {"eps": 0.0},
             "p(1-p)": {"utility": "p(1-p)"}, "soft outcome": {"soft_outcome": True}, "gamma 2": {"gamma": 2.0}, "half-life 1000": {"half_life": 1000.0}}


def simulate(arm, seed, spread=1.0, steps=300, groups=16, K=4, intents=8, states=24, rate=0.005, spill=0.2, hard=1.0, drift=0.0):
    """One simulated learner under one arm. -> (share of mixed groups, mean pass rate over all units at the end, effective pool at the end).

    Difficulty of a unit, in logits: mean `hard`, SD `spread`, the same share of its variance from intent, from state and from the unit itself. A rollout passes with sigmoid(skill - difficulty).
    Skill starts at 0 and grows, after each step, by `rate` for each passing-and-failing pair that a mixed group holds (a group of equal outcomes teaches nothing, as in GRPO), and
    by `spill` of that in the same state of the other intents. drift: SD, in logits a step, of a random walk of the difficulties. Ours, not the paper's.
    """
    how = dict(SIMULATED[arm])
    sharing = how.pop("sharing", True)
    rng = np.random.default_rng([seed, 1])                 # the same learners for every arm
    difficulty = rng.normal(size=(intents, 1)) + rng.normal(size=(1, states)) + rng.normal(size=(intents, states))
    difficulty = hard + spread * (difficulty - difficulty.mean()) / difficulty.std()
    skill = np.zeros((intents, states))
    controller = Curriculum(Settings(warmup=int(0.2 * steps * groups), group_size=K, **how), intents, states, sharing)
    draw, mixed = np.random.default_rng([seed, 2]), 0
    for _ in range(steps):
        cs = draw.integers(intents, size=groups)
        zs = controller.sample(cs, draw)
        passed = draw.random((groups, K)) < 1 / (1 + np.exp(difficulty[cs, zs] - skill[cs, zs]))[:, None]
        pairs = passed.sum(1) * (K - passed.sum(1))                                                   # (groups,)
        mixed += (pairs > 0).sum()
        np.add.at(skill, (cs, zs), rate * (1 - spill) * pairs)
        np.add.at(skill.T, zs, rate * spill * pairs[:, None])                                         # every intent of that state
        controller.update(list(zip(cs, zs, 100.0 * passed)))
        if drift:
            difficulty += drift * rng.normal(size=difficulty.shape)
    p = controller.probabilities()
    return mixed / (steps * groups), float((1 / (1 + np.exp(difficulty - skill))).mean()), float((1 / (p ** 2).sum(1)).mean())


# ---------------------------------------------------------------------------------------------- what a run practised
def read_run(folder):
    """-> (config, metrics rows) of a run. SystemExit where there is none, or none with an outer loop."""
    try:
        config, rows = read_json(Path(folder) / "config.json"), read_json(Path(folder) / "metrics.jsonl", rows=True)
    except OSError as e:
        die(f"{folder}: no run there ({e.strerror}: {Path(e.filename).name}); runs are folders under runs/")
    if config.get("curriculum", "no-states") == "no-states":
        die(f"{folder}: this run has no outer loop; train with --curriculum dual")
    if len(rows) < 2:
        die(f"{folder}: this run has finished no step yet")
    try:                                                   # all that show() will read
        windows(rows, 1), f"{config['eta']:g}", [float(r["dev_emotion"]) for r in rows if "dev_emotion" in r], [int(r["step"]) for r in rows]
    except (LookupError, TypeError, ValueError) as e:
        die(f"{folder}: config.json or metrics.jsonl is damaged ({type(e).__name__}: {e})")
    return config, rows


def windows(rows, parts=3):
    """The run's steps in `parts` stretches. -> for each: pass rate (intents, states), nan where nothing was practised; count; p at its end."""
    out, rows = [], [r["curriculum"] for r in rows if "curriculum" in r]
    for part in np.array_split(np.arange(len(rows)), parts):
        p = np.array(rows[part[-1] if len(part) else -1]["p"])
        passed, count = np.zeros(p.shape), np.zeros(p.shape)
        for c, z, value in (o for i in part for o in rows[i]["outcomes"]):
            passed[c, z] += value
            count[c, z] += 1
        out.append((np.where(count > 0, passed / np.maximum(count, 1), np.nan), count, p))
    return out


def show(folders, curves):
    """Prints the 8 x 24 table of each run and writes its curriculum.svg; of several runs also the curves of their dev scores. -> exit code."""
    if "simulate" in folders:
        die("simulate stands alone: python curriculum.py simulate")
    if not curves.endswith(".svg"):
        die(f"--curves {curves}: the name must end in .svg")
    runs = [read_run(folder) for folder in folders]
    for folder, (config, rows) in zip(folders, runs):
        [(rate, count, p)] = windows(rows, 1)
        print(f"{folder}: --curriculum {config['curriculum']}, {len(rows) - 1} steps, {int(count.sum())} groups; pass rate ({'soft, ' * config['soft_outcome']}final emotion >= {config['eta']:g}), groups, p in %")
        for z, state in enumerate(STATES):
            print(f"  {str(state):24}" + "".join(f" {'  -' if np.isnan(rate[c, z]) else format(rate[c, z], '.1f'):>4} {count[c, z]:3.0f} {100 * p[c, z]:4.1f} |" for c in range(len(INTENTS))))
        print(f"  {'':24}" + "".join(f" {intent:^13} |" for intent in INTENTS))
    try:
        from matplotlib.figure import Figure
    except ImportError:
        die("the figures need matplotlib: pip install matplotlib")
    for folder, (_, rows) in zip(folders, runs):
        p = np.array(rows[-1]["curriculum"]["p"])
        figure = Figure((15, 7), layout="constrained")
        for axes, kind, top in zip(figure.subplots(2, 3), (0, 2), (1.0, max(0.1, p.max()))):
            for ax, stretch, name in zip(axes, windows(rows), ("early", "middle", "late")):
                image = ax.pcolormesh(stretch[kind], vmin=0, vmax=top, cmap="viridis")
                ax.set_title(f"{name}: {'pass rate of what was practised' if kind == 0 else 'sampling probability at its end'}")
                ax.set_yticks(np.arange(len(INTENTS)) + 0.5, INTENTS)
                ax.set_xticks(np.arange(len(STATES)) + 0.5, map(str, STATES), rotation=90, fontsize=6)
            figure.colorbar(image, ax=axes)
        figure.savefig(Path(folder) / "curriculum.svg")
        print(f"wrote {folder}/curriculum.svg")
    if len(runs) > 1:
        ax = (figure := Figure((7, 4), layout="constrained")).subplots()
        flags = [k for k in runs[0][0] if k not in ("run", "seed", "threads", "init") and len({str(config.get(k)) for config, _ in runs}) > 1]     # what the runs differ in, seeds aside
        arms = [", ".join(str(config[k]) if k == "curriculum" else f"{k} {config.get(k)}" for k in flags) or config["curriculum"] for config, _ in runs]
        for arm in dict.fromkeys(arms):
            scores = [{r["step"]: r["dev_emotion"] for r in rows if "dev_emotion" in r} for (_, rows), theirs in zip(runs, arms) if theirs == arm]
            steps = sorted(set.intersection(*map(set, scores)))
            values = np.array([[s[k] for k in steps] for s in scores])                                # (runs, points)
            [line] = ax.plot(steps, values.mean(0), marker="o", label=f"{arm}, mean of {len(scores)}")
            for v in values:
                ax.plot(steps, v, color=line.get_color(), alpha=0.3, linewidth=0.8)
        ax.set(xlabel="batches", ylabel="dev emotion, all 24 states")
        ax.legend()
        figure.savefig(curves)
        print(f"wrote {curves}")
    return 0


def main(argv=None):
    p = Flags(description=__doc__)
    p.add_argument("what", metavar="RUN | simulate", nargs="+", help="folders of runs, or simulate; of several runs the learning curves are drawn too, a mean per --curriculum")
    p.add_argument("--curves", type=writable, metavar="FILE", help="where to draw them (default: curves.svg)")
    p.add_argument("--spread", type=nonnegative(float), nargs="+", default=[0.5, 1.0, 2.0, 3.0], help="SD of the units' difficulty, logits (default: %(default)s)")
    p.add_argument("--seeds", type=positive(int), default=20, help="learners per arm (default: %(default)s)")
    p.add_argument("--steps", type=positive(int), default=300, help="batches of 16 groups of 4 (default: %(default)s)")
    p.add_argument("--drift", type=nonnegative(float), default=0.0, help="logits a step that difficulties wander (default: %(default)s)")
    p.add_argument("--json", action="store_true", help="one line of JSON last: the spread nearest to 1 logit")
    p.add_argument("--record", type=writable, metavar="FILE", help="append the result, with command, commit and machine, to this .jsonl")
    args, _ = p.parse(argv)
    if args.what != ["simulate"]:
        return show(args.what, args.curves or "curves.svg")
    if args.seeds < 2:
        die("--seeds 1: an interval needs 2 or more")
    results = {}
    with tqdm(total=len(args.spread) * len(SIMULATED) * args.seeds, desc="learners", leave=False) as bar:
        for spread in args.spread:
            for arm in SIMULATED:
                runs = []
                for seed in range(args.seeds):
                    runs.append(simulate(arm, seed, spread, args.steps, drift=args.drift))
                    bar.update()
                runs = np.array(runs)                                                                 # (seeds, 3)
                half = 1.96 * runs.std(0, ddof=1) / np.sqrt(len(runs))
                results[spread, arm] = {name: [round(float(x), 4) for x in (m, m - h, m + h)] for name, m, h in zip(("mixed", "pass", "pool"), runs.mean(0), half)}
    for spread in args.spread:
        print(f"difficulty SD {spread} logits, {args.seeds} learners, {args.steps} batches of 16 groups of 4 (mean, 95 % CI)")
        print(f"  {'arm':16} {'mixed groups':>24} {'pass rate at the end':>24} {'effective pool':>24}")
        for arm in SIMULATED:
            print(f"  {arm:16} " + " ".join(f"{r[0]:10.3f} {f'{r[1]:.3f} .. {r[2]:.3f}':>14}" for r in results[spread, arm].values()))
    if args.record:
        for spread in args.spread:
            record_result(args.record, {"spread": spread, "seeds": args.seeds, "steps": args.steps, "drift": args.drift, **{arm: results[spread, arm] for arm in SIMULATED}})
    if args.json:
        nearest = min(args.spread, key=lambda x: abs(x - 1))
        print(json.dumps({arm: results[nearest, arm] for arm in SIMULATED}))
    return 0


if __name__ == "__main__":
    sys.exit(main())
