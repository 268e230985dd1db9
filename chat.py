"""
Talk to a checkpoint in the terminal, you being the user.

With --user you play along a scenario: its lines are suggested (an empty enter sends them), and after every reply you
see what the scripted user would have felt: the rule score of a scripted user, not empathy. Token in, token out with
the KV cache kept between turns and the system prompt of training (but --top_p; training samples with 1). No streaming:
a reply is short. /reset starts again, /quit, Ctrl-C or Ctrl-D ends.

    python chat.py --model runs/NAME                               free chat with a run's best checkpoint
    python chat.py --model runs/NAME --user heldout-praise-01      with the emotion meter
"""
import difflib
import math
import sys
import textwrap

import torch

from model import Cache, append, sample
from rollout import Chat, add_template_flags, check_template, perceive, trained_template
from rundir import Flags, die, positive, seed_number
from scenarios import load_memories, load_scenarios
from simulator import DYNAMICS, ScriptedUser, ScriptedUsers
from weights import load, pick_device, pick_dtype, resolve


def meter(emotion, change):
    """meter(52, 4) == "[#####-----] 52 (+4)": one # per ten points of emotion 0..100."""
    return f"[{'#' * (emotion // 10)}{'-' * (10 - emotion // 10)}] {emotion} ({change:+d})"


class Talk:
    """One dialogue on a live cache of one row; `last` holds the sampled id that was not fed yet, [] before the first reply."""
    def __init__(self, model, chat, limit, budget, who="", **how):
        self.model, self.chat, self.limit, self.budget, self.who, self.how = model, chat, limit, budget, who, how
        self.banned = chat.banned.to(model.model.embed_tokens.weight.device)
        self.cache, self.last, self.turns, self.felt = Cache(model, 1, 512), [], 0, None

    def reply(self, text):
        """The policy's answer to a user's line: (text, cut), cut: it ran out of tokens. None when the dialogue got too long for `limit`."""
        chunk = self.last + (self.chat.between(text) if self.last else self.chat.opening(text, self.who))
        used = int(self.cache.n[0])
        if used + len(chunk) + self.chat.extra + self.budget > self.limit:
            return None
        hidden = append(self.model, self.cache, [chunk])                                              # (1, D)
        before = self.cache.n.clone()
        [self.felt], hidden = perceive(self.model, self.chat, self.cache, hidden, [self.who], self.turns, **self.how)
        self.turns += 1
        [ids], _ = sample(self.model, self.cache, hidden, [self.budget], {self.chat.eot}, self.banned, **self.how)
        cut = ids[-1] != self.chat.eot
        self.last = ids[-1:] + ([self.chat.eot] if cut else [])      # a reply that was cut off is closed for the policy
        said, _ = self.chat.heard(ids)
        if self.chat.hides:                                # what was thought leaves the cache, what was heard is read anew
            self.cache.n.copy_(before)
            self.last = self.chat.plain(said) + [self.chat.eot]
        return said, cut


def converse(new_talk, new_user):
    """The loop at the keyboard; returns when the person leaves. new_user() -> ScriptedUser, or None for free chat."""
    talk, user = new_talk(), new_user()
    suggestion = user.opening if user else ""
    while True:
        if suggestion:
            print(textwrap.fill(f"(enter sends: {suggestion})", 100))
        line = input("you    > ").encode("utf-8", "replace").decode().strip()      # a byte that is no UTF-8 comes as half a character, which no tokenizer takes
        if line == "/quit":
            return
        if line == "/reset":
            talk, user = new_talk(), new_user()
            suggestion = user.opening if user else ""
            print("(a new dialogue)")
            continue
        if line.startswith("/"):
            print("(commands: /reset, /quit)")
            continue
        line = line or suggestion
        if not line:
            continue
        answer = talk.reply(line)
        if answer is None:
            print(f"(this does not fit into {talk.limit} tokens any more: /reset starts a new dialogue, or send a shorter line)")
            continue
        if talk.felt:
            print(f"         (perceived {talk.felt[0] or 'nothing readable'}, aim: {talk.felt[1]})")
        print(f"policy > {answer[0]}{' [cut off]' if answer[1] else ''}")
        if user is None or user.done:
            continue
        user.said[-1] = line                               # what was really said, when the suggestion was not taken
        turn = user.respond(*answer)
        print(f"         {meter(turn.emotion, turn.change)}  {turn.thought}")
        print("         " + "  ".join(f"{name} {points:+.1f}" for name, points in turn.parts.items()))
        suggestion = "" if turn.done else turn.text
        if turn.done:
            print(f"         the scripted user ends here ({turn.why}): {turn.text}\n(talk on without the meter, or /reset)")


def main(argv=None):
    p = Flags(description=__doc__)
    p.add_argument("--model", default="smollm2-135m", help="smollm2-135m, hub name, HF folder, run folder (its best/), or .gguf (default: %(default)s)")
    p.add_argument("--user", metavar="ID", help="id of a scenario to play along, with the emotion meter")
    p.add_argument("--scenarios", default="data/scenarios.jsonl", metavar="FILE", help="where --user is looked up (default: %(default)s)")
    p.add_argument("--dynamics", default="sage", choices=sorted(DYNAMICS), help="sage: from 40, fails below 10; rlver: from 30, fails at 0 (default: %(default)s)")
    p.add_argument("--temperature", type=float, default=0.7, help="of sampling; 0 is greedy (default: %(default)s)")
    p.add_argument("--top_p", type=float, default=0.9, help="smallest set of tokens that holds this probability; 1: all (default: %(default)s)")
    p.add_argument("--top_k", type=int, default=0, help="the k likeliest tokens only; 0: all (default: %(default)s)")
    p.add_argument("--max_new_tokens", type=positive(int), default=96, help="tokens per reply (default: %(default)s)")
    p.add_argument("--memory", default="none", metavar="none|FILE", help="with --user: what the policy is told of earlier talks with this person, data/memories.jsonl (default: %(default)s)")
    add_template_flags(p)
    p.add_argument("--max_tokens", type=positive(int), help="tokens per dialogue (default: what the model knows)")
    p.add_argument("--seed", type=seed_number, default=0, help="the same seed and the same lines: the same replies (default: %(default)s)")
    p.add_argument("--dtype", default="auto", choices=["auto", "fp32", "bf16", "fp16"], help="compute dtype; fp16 is refused (default: %(default)s)")
    p.add_argument("--device", default="auto", choices=["auto", "cuda", "mps", "cpu"], help="auto: cuda, then mps, then cpu (default: %(default)s)")
    args, given = p.parse(argv)
    trained_template(args, given)
    if not 0 <= args.temperature < math.inf or not 0 < args.top_p <= 1 or args.top_k < 0 or args.seed < 0:
        die("--temperature, --top_k and --seed must be 0 or more, --top_p above 0 and at most 1")
    scenario = None
    if args.user:
        known = {s.id: s for s in load_scenarios(args.scenarios)}
        near = difflib.get_close_matches(args.user, known, 1, 0)
        scenario = known.get(args.user) or die(f"--user {args.user}: no such id in {args.scenarios}; the nearest is {near[0]}")
    if args.memory != "none" and not scenario:
        die("--memory: is about the person of a scenario; give --user ID too")
    if args.perception != "model" and not scenario:
        die("--perception: is about the lines of a scenario; give --user ID too")
    memories, perceived = {} if args.memory == "none" else load_memories(args.memory, [scenario]), check_template(args, [scenario])
    device = pick_device(args.device)
    dtype, _ = pick_dtype(args.dtype, device), resolve(args.model)
    model, tokenizer = load(args.model, dtype, device)
    chat = Chat(tokenizer, model.config.vocab, template=args.template, memories=memories, perceived=perceived)
    generator = torch.Generator().manual_seed(args.seed)
    print(f"{args.model}; /reset starts again, /quit ends")
    if scenario:
        print("\n" + textwrap.fill(f"you are: {scenario.persona} {scenario.background}", 100) + f"\n(the meter is {ScriptedUsers.note}; it starts at {DYNAMICS[args.dynamics][0]})")
    how = dict(temperature=args.temperature, top_k=args.top_k, top_p=args.top_p, generator=generator)
    try:
        converse(lambda: Talk(model, chat, min(args.max_tokens or model.config.max_positions, model.config.max_positions), args.max_new_tokens, scenario.id if scenario else "", **how),
                 lambda: ScriptedUser(scenario, dynamics=args.dynamics) if scenario else None)
    except (EOFError, KeyboardInterrupt):
        print()
    return 0


if __name__ == "__main__":
    sys.exit(main())
