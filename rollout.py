"""
A batch of dialogues between the policy and simulated users, token in, token out.

Sampled ids are never decoded and encoded again: text is derived from ids, for the user's ears only, and what was
sampled is what is trained. All live dialogues advance together; the KV cache stays between turns, so a turn costs
its new tokens, not the whole history again.

No chat template is applied anywhere: the pieces of ChatML (the format of Qwen2.5, Qwen3 and SmolLM2) are put
together here as ids, because templates add a default system prompt (Qwen2.5) or rewrite history (Qwen3) silently.

    python rollout.py show [--model smollm2-135m] [--scenario ID]     play one dialogue, trained tokens in green
"""
import argparse
import re
import threading
from pathlib import Path

import torch

from emotions import EDF, LABELS, read_perceptions, regulate
from episode import Episode, Row, coloured, transcript
from model import Cache, append, sample
from rundir import Flags, die, positive, read_json, seed_number
from weights import load, pick_device, pick_dtype

AFTER = 256                                                # tokens of a user's last line that Episode.beyond keeps, for a critic to read
SYSTEM = "You are talking with someone about what is on their mind. Answer them in one to three short sentences."
THINK = SYSTEM + " Before each answer write a short plan for it between <think> and </think>: what they feel, what they need. They will not see it."
SPANNED = SYSTEM + " Before each answer write three lines between <think> and </think>: 'Understanding:' what happened to them, 'Reasoning:' why it moves them so, 'Emotion:' what they feel, in one word. They will not see them."
PERCEIVE = SYSTEM + " Before each answer you name in brackets what they feel, and are told in brackets what the answer aims at. They will not see either."
FELT = 8                                                   # tokens that the name of a feeling may take
ASKED = {"none": SYSTEM, "think": THINK, "edf": PERCEIVE, "kardia": SPANNED}
TEMPLATES = tuple(ASKED)
NAMED = r"\W*(?:(?:the|their|your) )?(?:feelings?|feels|aims?|perceived|perception|emotions?)\W*"          # "their feeling", "_Aim_"
SPAN = re.compile(rf"[\[\]{{}}［］【】]|[(（]{NAMED}[:=]|(?:^|\n){NAMED}[:=]", re.I)           # what no reply of --template edf holds: any bracket but (), and a line or a ( that begins as the template's do


# ---------------------------------------------------------------------------------------------- chat pieces
class Chat:
    """Builds the pieces of a ChatML dialogue as ids, and knows which ids the policy may not sample.

    eot: id of <|im_end|>, the only stop id. banned (V,) bool: every special or added token but eot (and, with think, the pair
    <think> </think>), ids beyond the tokenizer and placeholder ids (pitfalls 5, 6). Text from users or models is encoded as plain
    text, so that "<|im_start|>" in it is just characters. memories: scenario id -> what the policy is told of earlier talks with this person.
    template: "none"; "think", replies begin with a block that nobody hears; "kardia", the same with three labelled lines in it (Kardia-R1, section 5 of methods.md); "edf", perceive, regulate, respond (methods.md 10, our reconstruction): the policy names the feeling, the
    environment answers with an aim (emotions.regulate), and the reply is written towards the aim by a policy that no longer sees the name. perceived: what emotions.read_perceptions
    gives, in place of what the policy would name.
    """
    def __init__(self, tokenizer, vocab, system=None, template="none", memories=None, perceived=None):
        assert template in TEMPLATES, template
        self.tokenizer, self.template, self.memories, self.perceived = tokenizer, template, memories or {}, perceived
        self.hides, self.thinks = template != "none", template in ("think", "kardia")       # hides: a turn is a training row, or two, of its own
        self.role = system or ASKED[template]
        names = tokenizer.get_vocab()
        # split_special_tokens leaves added tokens that aren't "special" whole; so such a string is cut after its first character
        added = [t.content for t in tokenizer.added_tokens_decoder.values() if len(t.content) > 1]
        self.inside_added = re.compile("|".join(f"(?<={re.escape(t[0])})(?={re.escape(t[1:])})" for t in added)) if added else None
        if "<|im_start|>" not in names or "<|im_end|>" not in names:
            die("this tokenizer has no <|im_start|> / <|im_end|>; only ChatML models (Qwen2.5, Qwen3, SmolLM2) are supported")
        self.start, self.eot = names["<|im_start|>"], names["<|im_end|>"]
        self.newline = self.plain("\n")
        banned = set(tokenizer.added_tokens_decoder) | {i for t, i in names.items() if re.fullmatch(r"\[PAD\d+\]", t)} | set(tokenizer.all_special_ids)
        real = torch.zeros(vocab, dtype=torch.bool)
        real[[i for i in names.values() if i < vocab]] = True
        real[[i for i in banned if i < vocab]] = False
        real[[self.eot] + [names[t] for t in ("<think>", "</think>") if self.thinks and t in names]] = True
        self.banned = ~real                                # (V,)
        self.system = self.turn("system", self.role) + self.newline
        self.reply = [self.start] + self.plain("assistant\n")
        if "<think>" in names and not self.thinks:               # Qwen3: an empty think block is its own way of answering without one
            self.reply += [names["<think>"]] + self.plain("\n\n") + [names["</think>"]] + self.plain("\n\n")
        self.ask, self.aims = self.plain("[feeling:"), {name: self.plain(f"[aim: {aim['words']}]\n") for name, aim in EDF["aims"].items()}
        self.extra = max(len(self.ask) + FELT, *map(len, self.aims.values())) if template == "edf" else 0      # tokens of a turn beside the reply

    def plain(self, text):
        """Ids of text in which special and added tokens (<|im_end|>, <think>, <tool_call>) are mere characters."""
        pieces = self.inside_added.split(text) if self.inside_added else [text]
        return [i for piece in pieces if piece for i in self.tokenizer(piece, add_special_tokens=False, split_special_tokens=True)["input_ids"]]

    def turn(self, role, text):
        """<|im_start|>role, newline, text, <|im_end|>: without the newline that follows."""
        return [self.start] + self.plain(role + "\n") + self.plain(text.strip()) + [self.eot]

    def opening(self, text, who=""):
        """System prompt, with what is remembered of scenario id `who`, if anything, first user message, and the header of the policy's first reply."""
        memory = self.memories.get(who)
        system = self.turn("system", f"{self.role} You have talked before: {memory}") + self.newline if memory else self.system
        return system + self.turn("user", text) + self.newline + self.reply

    def prompt(self, messages):
        """Chat messages ({"role", "content"}) as ids, and the header of the answer: what a model is asked beside any dialogue."""
        return [i for m in messages for i in self.turn(m["role"], m["content"]) + self.newline] + self.reply

    def between(self, text):
        """What the environment puts between two replies: the newline after <|im_end|>, the user's turn, the next header."""
        return self.newline + self.turn("user", text) + self.newline + self.reply

    def text(self, ids):
        """Sampled ids as text, without the end of turn."""
        return self.tokenizer.decode(ids, skip_special_tokens=True).strip()

    def heard(self, ids):
        """-> what the user hears of a reply, and whether it had the form that was asked for.

        Think: what follows the last </think>; the form is one block, at the start, and something after it. An open block is not heard at all.
        Example: "<think>sad</think>Oh no." -> ("Oh no.", True); "Oh no." -> ("Oh no.", False); "<think>sad" -> ("", False).
        Edf: what precedes the first bracket, of which a reply should have none: "Oh no. [aim: calm]" -> ("Oh no.", False); nothing where one is closed that was not opened, since
        what precedes it is the rest of a span: "sadness] Oh no." -> ("", False).
        """
        text = self.text(ids)
        if self.template == "edf":
            span = SPAN.search(text)
            said = text if not span else "" if span.group() in "]}］】" else text[:span.start()].strip()
            return said, bool(said) and not span
        if self.template == "none":
            return text, True
        before, closed, after = text.rpartition("</think>")
        said = (after if closed else text).partition("<think>")[0].strip()
        return said, bool(closed and said and before.startswith("<think>") and text.count("<think>") == text.count("</think>") == 1)

    def felt(self, ids):
        """Sampled ids after "[feeling:" -> the label, or "": it must be one of the seven and nothing else, ended by the policy itself."""
        label = self.text(ids).lower()
        return label if label in LABELS and ids[-1] == self.eot else ""


# ---------------------------------------------------------------------------------------------- the loop
def add_template_flags(p):
    p.add_argument("--template", default="none", choices=TEMPLATES, help="what precedes a reply, unheard: none; think, a plan in <think>...</think>; kardia, a plan of three labelled lines; edf, the feeling's name, by which the environment sets the aim that the "
                   "reply is written to. Each turn is a training row of its own, what lacks the form gives reward 0 (default: %(default)s)")
    p.add_argument("--think", dest="template", action="store_const", const="think", default=argparse.SUPPRESS, help="short for --template think")
    p.add_argument("--perception", default="model", metavar="model|FILE", help="with --template edf: who names the feeling, the policy, or rows of scenario, turn, label, confidence in a .jsonl, as a speech-emotion model would write (default: %(default)s)")


def trained_template(args, given):
    """A run folder speaks as it was trained to, unless --template says otherwise."""
    config = Path(args.model) / "config.json"
    if (Path(args.model) / "best").is_dir() and config.is_file() and "template" not in given:
        args.template = read_json(config).get("template", "none")
        if args.template not in TEMPLATES:
            die(f"{config}: field 'template': '{args.template}' is not one of {', '.join(TEMPLATES)}")


def check_template(args, scenarios):
    """SystemExit on flags that don't go together. -> what Chat takes as `perceived`."""
    if args.perception == "model":
        return None
    if args.template != "edf":
        die("--perception: is for --template edf; add it")
    return read_perceptions(args.perception, scenarios)


def check_budget(model, chat, scenarios, max_new_tokens, max_tokens):
    """SystemExit unless every scenario's opening and one reply fit into max_tokens, and those into the model's positions. Who reads on after the end (states, a probe) asks for more."""
    if max_tokens > model.config.max_positions:
        die(f"--max_tokens {max_tokens}: this model knows {model.config.max_positions} positions; lower it")
    longest, name = max((len(chat.opening(" ".join([s.opening, *s.facts[:1]]), s.id)) + chat.extra, s.id) for s in scenarios)       # a user that volunteers opens with its first fact
    if longest + max_new_tokens > max_tokens:
        die(f"--max_tokens {max_tokens} does not hold the opening of {name} ({longest} tokens) and one reply ({max_new_tokens}); raise it")


def aside(model, chat, cache, begun, max_new_tokens, first=None):
    """How the policy goes on, greedily, where the environment has begun its next reply with the text `begun`. -> one text per row of the cache. first: (V,) bool,
    ids it may not begin with (default: those that it may never say).

    The dialogue never knows: the cache is wound back, so that the slots written here are overwritten before they can be read, and no dice are used up."""
    before, banned = cache.n.clone(), chat.banned.to(cache.n.device)
    hidden = append(model, cache, [chat.plain(begun)] * len(before))                                  # (B, D)
    how = dict(temperature=0, generator=torch.Generator())
    begins, _ = sample(model, cache, hidden, [1] * len(before), {chat.eot}, banned if first is None else first.to(banned.device), **how)
    goes_on, _ = sample(model, cache, append(model, cache, begins), [max_new_tokens - 1] * len(before), {chat.eot}, banned, **how)
    cache.n.copy_(before)
    return [chat.text(a if a == [chat.eot] else a + b) for a, b in zip(begins, goes_on)]


def perceive(model, chat, cache, hidden, scenarios, turn, temperature, states=None, **how):
    """--template edf, before a reply: the policy names the feeling, the cache is wound back, and the environment writes the aim in its place. hidden: (B, D) after the context, used where
    nothing is written; scenarios: the id of each row's, read only with chat.perceived; turn: from 0. -> list of (label or "", aim, ids, log-probs; both empty where it was handed in), and hidden (B, D) after the aims."""
    if chat.template != "edf":
        return [None] * len(scenarios), hidden
    before = cache.n.clone()
    if chat.perceived is None:
        tokens, logps = sample(model, cache, append(model, cache, [chat.ask] * len(scenarios)), [FELT] * len(scenarios), {chat.eot}, chat.banned.to(cache.n.device), temperature, states=states, **how)
        cache.n.copy_(before)
        out = [(label, regulate(label), *sampled) for label, *sampled in zip(map(chat.felt, tokens), tokens, logps)]
    else:
        heard = [chat.perceived[s] for s in scenarios]
        known = [of[max(t for t in of if t <= turn + 1)] for of in heard]
        out = [(label, regulate(label, confidence), [], []) for label, confidence in known]
    return out, append(model, cache, [chat.aims[aim] for _, aim, *_ in out])


@torch.no_grad()
def rollout(model, chat, users, jobs, copies=1, max_turns=5, max_new_tokens=48, max_tokens=1024, temperature=1.0, generator=None, progress=None, keep_states=False, probe=None):
    """Play len(jobs) x copies dialogues to their end. jobs: list of (scenario, state). -> list[Episode], the copies of a job adjacent.

    `users` is the population: users.prepare(jobs), once; users.start(scenario, state) -> a user with .opening and .emotion; and
    users.respond(list of users, replies, cuts) -> list[UserTurn], all live dialogues in one call.
    A dialogue ends when its user ends it, after max_turns replies, or when another turn might not fit into max_tokens
    tokens. With chat.hides each turn is a row of its own (two with --template edf: the feeling's name, the reply): earlier thoughts leave the context, the cache is wound back to before
    the reply and reads on with what was heard. The prompt of a group is computed once and its cache row copied. progress: a tqdm bar over jobs x copies x max_turns replies; one that isn't
    needed any more counts as made. keep_states: fill Episode.states, which sampling has computed anyway, for a critic on the policy's trunk;
    (policy tokens x D) numbers in all: 12 MB for 64 dialogues of SmolLM2-135M. probe: (text, tokens) or (text, tokens, first), as aside() has them, after each turn, the last one included, for
    Episode.asides; it enters no row and no later context. A turn whose user failed has none.
    """
    assert not (probe and keep_states), "a critic's last state is read after AFTER tokens, an aside after the whole line"
    device = model.model.embed_tokens.weight.device
    banned = chat.banned.to(device)
    users.prepare(jobs)
    talks = []                                             # (episode, its user): bound by identity, never by place in the batch
    for group, (scenario, state) in enumerate(jobs):
        for _ in range(copies):
            user = users.start(scenario, state)
            talks.append((Episode(scenario, state, group, user.opening, user.emotion, [Row()]), user))
    episodes = [e for e, _ in talks]
    prompts = [chat.opening(e.opening, e.scenario.id if chat.memories else "") for e in episodes[::copies]]
    for i, e in enumerate(episodes):
        e.rows[0].environment(prompts[i // copies])
    cache = Cache(model, len(jobs), max(map(len, prompts)))
    hidden = append(model, cache, prompts)                                                            # (G, D)
    if copies > 1:
        index = torch.arange(len(jobs), device=device).repeat_interleave(copies)
        cache, hidden = cache.rows(index), hidden[index]                                              # (G * K, ...)
    for turn in range(max_turns):
        before, states, felt_states = cache.n.clone(), [] if keep_states else None, [] if keep_states else None
        felt, hidden = perceive(model, chat, cache, hidden, [chat.perceived and e.scenario.id for e, _ in talks], turn, temperature, felt_states, generator=generator)
        tokens, logps = sample(model, cache, hidden, [max_new_tokens] * len(talks), {chat.eot}, banned, temperature, generator=generator, states=states)
        replies, formed = zip(*map(chat.heard, tokens))
        cuts = [t[-1] != chat.eot for t in tokens]
        if chat.hides:
            cache.n.copy_(before)                          # slot == position: what was sampled is overwritten by what was heard
        answers = users.respond([user for _, user in talks], replies, cuts)
        keep, chunks, cut, cut_chunks = [], [], [], []
        for i, ((e, _), answer) in enumerate(zip(talks, answers)):
            row = e.rows[-1]
            context = list(row.ids) if chat.hides else None
            if felt[i]:
                label, aim, ids, logp = felt[i]
                e.perceived.append((label, aim))
                if ids:
                    row.environment(chat.ask)
                    row.policy(ids, logp, turn)
                    e.states += [felt_states[i]] if keep_states else []
                    e.rows.append(row := Row())
                    row.environment(context)
                row.environment(chat.aims[aim])
            row.policy(tokens[i], logps[i], turn)
            e.malformed.append(not formed[i] or bool(felt[i]) and not felt[i][0])
            e.plans += [chat.text(tokens[i]).partition("<think>")[2].partition("</think>")[0]] if chat.thinks else []
            e.turns.append(answer)
            e.replies.append(replies[i])
            e.cuts.append(cuts[i])
            e.states += [states[i]] if keep_states else []
            # a reply that was cut off is closed by the environment, untrained
            between = ([chat.eot] if cuts[i] else []) + chat.between(answer.text)
            chunk = tokens[i][-1:] + between               # the last sampled id was not fed yet
            if chat.hides:
                between = chunk = chat.plain(replies[i]) + [chat.eot] + chat.between(answer.text)
            else:
                context = row.ids
            if answer.failed:
                e.finish = "user_failed"
            elif answer.done:
                e.finish = answer.why
            elif turn + 1 == max_turns:
                e.finish = "max_turns"
            elif len(context) + len(between) + chat.extra + max_new_tokens > max_tokens:
                e.finish = "max_tokens"
            if e.truncated:
                e.beyond = context + between[:AFTER]
                if keep_states:
                    cut.append(i)
                    cut_chunks.append(chunk[:len(chunk) - len(between) + AFTER])
            if e.finish and probe and not answer.failed:   # the user's last line is read for the aside's sake only
                cut.append(i)
                cut_chunks.append(chunk)
            if not e.finish:
                if chat.hides:
                    e.rows.append(Row())
                    between = context + between
                e.rows[-1].environment(between)
                keep.append(i)
                chunks.append(chunk)
        if progress is not None:
            progress.update(len(talks) + (len(talks) - len(keep)) * (max_turns - 1 - turn))
        if not keep + cut:
            break
        cache.permute(keep + cut + sorted(set(range(len(talks))) - set(keep + cut)))
        cache = cache.first(len(keep + cut))
        hidden = append(model, cache, chunks + cut_chunks)                                            # (live + cut, D)
        if probe:
            for i, text in zip(keep + cut, aside(model, chat, cache, *probe)):
                talks[i][0].asides.append(text)
        for i, state in zip(cut, hidden[len(keep):] if keep_states else []):
            talks[i][0].states.append(state[None])
        if not keep:
            break
        cache, hidden, talks = cache.first(len(keep)), hidden[:len(keep)], [talks[i] for i in keep]
    for e in episodes:
        for row in e.rows:
            assert len(row.ids) == len(row.mask) == len(row.logp) == len(row.turn), "ids, mask, logp and turn are aligned"
    return episodes


def overlapped(model, chat, users, jobs, copies=1, generator=None, progress=None, **how):
    """rollout() in two halves that take turns: while the users of one half think, which for a served user is waiting, the other half decodes. -> list[Episode], as rollout() has it.

    Each half draws from a generator of its own, so that what is said does not depend on who waited for whom. An error of either half is raised once both have ended."""
    lock, out, seeds = threading.Lock(), [None, None], torch.randint(2 ** 62, (2,), generator=generator).tolist()

    class Waiting:                                         # the users, but for the device being the other half's while they think
        def __getattr__(self, name):
            return getattr(users, name)

        def respond(self, *said):
            lock.release()
            try:
                return users.respond(*said)
            finally:
                lock.acquire()

    def half(which, part):
        try:
            if (device := model.model.embed_tokens.weight.device).type == "cuda":
                torch.cuda.set_device(device)              # each thread has a current one of its own
            with lock:
                out[which] = rollout(model, chat, Waiting(), part, copies, generator=torch.Generator().manual_seed(seeds[which]), progress=progress, **how)
        except BaseException as e:
            out[which] = e
    cut = (len(jobs) + 1) // 2
    other = threading.Thread(target=half, args=(1, jobs[cut:]), daemon=True)         # daemon: Ctrl-C doesn't wait for it
    if jobs[cut:]:
        other.start()
    half(0, jobs[:cut])
    if isinstance(out[0], KeyboardInterrupt):
        raise out[0]
    if jobs[cut:]:
        other.join()
    for found in out:
        if isinstance(found, BaseException):
            raise found
    for e in out[1] or []:
        e.group += cut
    return out[0] + (out[1] or [])


@torch.no_grad()
def answers(model, chat, prompts, copies, max_new_tokens, temperature, generator, batch=256):
    """`copies` answers to each prompt (ids), a prompt read once, about `batch` answers at a time: 7 MB of cache each, for the small model and 150 tokens. -> list[Episode] of one row each,
    the copies of a prompt adjacent and one group; `replies` holds the text."""
    device, size, out = model.model.embed_tokens.weight.device, max(1, batch // copies), []
    for a in range(0, len(prompts), size):
        part = prompts[a:a + size]
        cache = Cache(model, len(part), max(map(len, part)))
        hidden, index = append(model, cache, part), torch.arange(len(part), device=device).repeat_interleave(copies)
        tokens, logps = sample(model, cache.rows(index), hidden[index], [max_new_tokens] * len(index), {chat.eot}, chat.banned.to(device), temperature, generator=generator)
        for i, (ids, logp) in enumerate(zip(tokens, logps)):
            row = Row()
            row.environment(part[i // copies])
            row.policy(ids, logp, 0)
            out.append(Episode(None, None, a + i // copies, "", 0, [row], replies=[chat.text(ids)], cuts=[ids[-1] != chat.eot], finish="goodbye"))
    return out


# ---------------------------------------------------------------------------------------------- for the eyes
def main():
    p = Flags(description="Play one dialogue and print its tokens: green = sampled and trained, grey = environment.")
    p.add_argument("what", choices=["show"])
    p.add_argument("--model", default="smollm2-135m", help="smollm2-135m, hub name, HF folder, run folder's best/, or .gguf (default: %(default)s)")
    p.add_argument("--scenarios", default="data/scenarios.jsonl", help="scenario file (default: %(default)s)")
    p.add_argument("--scenario", help="id of the scenario (default: the first of the dev split)")
    p.add_argument("--turns", type=positive(int), default=3, help="replies (default: %(default)s)")
    p.add_argument("--max_new_tokens", type=positive(int), default=48, help="tokens a reply (default: %(default)s)")
    p.add_argument("--temperature", type=float, default=0.8, help="sampling temperature, 0 = greedy (default: %(default)s)")
    p.add_argument("--seed", type=seed_number, default=0)
    args, _ = p.parse()
    from scenarios import load_scenarios
    from simulator import ScriptedUsers
    scenarios = load_scenarios(args.scenarios)
    chosen = next((s for s in scenarios if s.id == args.scenario or (args.scenario is None and s.split == "dev")), None)
    if chosen is None:
        die(f"--scenario {args.scenario}: no such id in {args.scenarios}")
    device = pick_device()
    model, tokenizer = load(args.model, pick_dtype("auto", device), device)
    chat = Chat(tokenizer, model.config.vocab)
    [e] = rollout(model, chat, ScriptedUsers(max_turns=args.turns), [(chosen, None)], max_turns=args.turns, max_new_tokens=args.max_new_tokens,
                  temperature=args.temperature, generator=torch.Generator().manual_seed(args.seed))
    print(coloured(e.rows[0], tokenizer))
    print("\n" + transcript(e))
    print(f"\n{sum(e.rows[0].mask)} of {len(e.rows[0].ids)} tokens are the policy's and are trained")


if __name__ == "__main__":
    main()
