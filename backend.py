"""
Who plays the language user, or the judge: a frozen model of our own engine, or any OpenAI-compatible server.

Both are two functions to whoever asks: complete(prompts, max_tokens) -> texts, and choose(prompts, answers) -> probabilities; a
prompt is a list of chat messages. Left out on purpose: streaming, tools, a scheduler. A served model may fail: every call
has a time-out, a bounded number of tries and a budget, and what failed is None, never an exception in the middle of a batch.

    --user scripted                          the rules of appraisal.py (default)
    --user scripted-b                        the other rules of user_b.py, held back for evaluation
    --user lm                                Qwen/Qwen3-4B, thinking off, on the policy's device; wants a GPU
    --user lm:MODEL                          another model: hub name, HF folder, .gguf, or smollm2-135m
    --user lm:self                           the policy as it was before RL
    --user server:http://HOST:PORT/v1#MODEL  any OpenAI-compatible server
"""
import hashlib
import json
import os
import re
import socket
import sqlite3
import threading
import time
from collections import OrderedDict
from concurrent.futures import ThreadPoolExecutor
from contextlib import nullcontext
from copy import deepcopy
from pathlib import Path
from urllib.parse import urlsplit

import torch

import ranks
from model import Cache, append, sample
from rollout import Chat
from rubric import Generated, LanguageRater, Rewards, ScriptedRater
from rundir import die, nonnegative, positive, read_json, write_atomically
from scenarios import load_memories
from simulator import KINDS, LanguageUsers, ScriptedUsers
from user_b import ScriptedUsersB
from weights import cache_folder, load, resolve

SCRIPTED = {"scripted": ScriptedUsers, "scripted-b": ScriptedUsersB}      # by rules: no model is loaded; both pass the battery (qualify.py)


# ---------------------------------------------------------------------------------------------- a model of our own engine
class LocalModel:
    """complete and choose by a frozen model, greedy, all prompts in one batch (in parts of `batch` rows, for memory).

    The system message of a dialogue (persona, background) is the same in every turn, for appraising and for speaking: its keys and values
    are computed once, all that are missing in one batch, and kept: `keep` bytes of them and the last call's at most, the one not used for longest dropped first. context: entered around every forward (LoRA off).
    """
    def __init__(self, model, chat, batch=64, keep=2_000_000_000, context=nullcontext):
        self.model, self.chat, self.batch, self.keep, self.context, self.prefixes, self.calls = model, chat, batch, keep, context, OrderedDict(), 0

    def read(self, prompts, room):
        """A cache with these prompts in it, room for `room` more tokens, and the hidden state (B, D) of each prompt's last token."""
        texts = [p[0]["content"] for p in prompts]
        if missing := [text for text in dict.fromkeys(texts) if text not in self.prefixes]:
            heads, most = [self.chat.turn("system", text) + self.chat.newline for text in missing], self.model.config.max_positions // 2
            end = [self.chat.eot] + self.chat.newline
            heads = [h if len(h) <= most else h[:most - len(end)] + end for h in heads]                # a scenario longer than half the model's memory loses its end
            cache = Cache(self.model, len(heads), max(map(len, heads)))
            append(self.model, cache, heads)
            for b, (text, head) in enumerate(zip(missing, heads)):
                self.prefixes[text] = cache.k[:, b, :, :len(head)].clone(), cache.v[:, b, :, :len(head)].clone()      # (L, Hkv, n, head_dim) each
        for text in texts:
            self.prefixes.move_to_end(text)
        size = sum(k.nbytes + v.nbytes for k, v in self.prefixes.values())
        while size > self.keep and len(self.prefixes) > len(set(texts)):       # what this call reads stays for the next one
            size -= sum(x.nbytes for x in self.prefixes.popitem(last=False)[1])
        heads = [self.prefixes[text] for text in texts]
        tails = [[i for m in p[1:] for i in self.chat.turn(m["role"], m["content"]) + self.chat.newline] + self.chat.reply for p in prompts]
        limit = self.model.config.max_positions - room - 1
        cache = Cache(self.model, len(prompts), max(k.shape[2] for k, _ in heads))
        for b, (k, v) in enumerate(heads):
            n = k.shape[2]
            cache.k[:, b, :, :n], cache.v[:, b, :, :n], cache.n[b] = k, v, n
            tails[b] = tails[b][-(limit - n):]             # a chat longer than it loses its beginning
        return cache, append(self.model, cache, tails)

    def parts(self, prompts):
        """The prompts, `batch` rows at a time; counts the calls."""
        for a in range(0, len(prompts), self.batch):
            self.calls += 1
            yield prompts[a:a + self.batch]

    @torch.no_grad()
    def complete(self, prompts, max_tokens, temperature=0.0):
        """-> one text per prompt, greedy; above temperature 0 drawn from the likeliest 90 %, with dice that depend on the prompts alone: the same call gives the same texts."""
        out, banned = [], self.chat.banned.to(self.model.model.embed_tokens.weight.device)
        generator = torch.Generator().manual_seed(int(hashlib.sha256(json.dumps(prompts).encode()).hexdigest()[:12], 16))
        with self.context():
            for part in self.parts(prompts):
                cache, hidden = self.read(part, max_tokens)
                tokens, _ = sample(self.model, cache, hidden, [max_tokens] * len(part), {self.chat.eot}, banned, temperature=temperature, top_p=0.9 if temperature > 0 else 1.0, generator=generator)
                out += [self.chat.text(t) for t in tokens]
        return out

    @torch.no_grad()
    def choose(self, prompts, answers):
        """-> per prompt the probabilities of the answers among themselves. Each must be one token."""
        ids = [self.chat.plain(a) for a in answers]
        if any(len(i) != 1 for i in ids):
            die(f"this tokenizer splits one of the answers {' '.join(answers)}, so its probability can't be read: --appraise text for a user, --judge_by text for a judge")
        out = []
        with self.context():
            for part in self.parts(prompts):
                _, hidden = self.read(part, 0)
                out += self.model.logits(hidden)[:, [i[0] for i in ids]].softmax(-1).tolist()         # (B, answers)
        return out


# ---------------------------------------------------------------------------------------------- a server
class BudgetSpent(Exception):
    """The run has made all the calls it was allowed to."""


class Server:
    """complete and choose by an OpenAI-compatible server, `parallel` calls at a time.

    A call that meets 408, 429, 5xx, a broken answer or silence is tried `tries` times with growing pauses, then it is None. Every answer is kept
    in an SQLite file under the user's cache, keyed by model, prompt and decoding, so that a resumed run pays nothing twice. The key
    comes from the environment variable key_env and is written nowhere. BudgetSpent after `budget` calls, tries counted (0: no limit).
    """
    def __init__(self, url, model, parallel=16, key_env="", budget=0, timeout=60.0, tries=4, pause=1.0, seed=0, keep=True):
        from huggingface_hub import InferenceClient
        # without a key of its own the client would send the hub token of this machine to a stranger; a key with a space at its end would be quoted in an error
        self.key = os.environ.get(key_env, "").strip() or "none"
        self.client = InferenceClient(base_url=url, api_key=self.key, timeout=timeout)
        self.url, self.model, self.budget, self.tries, self.pause, self.decoding = url, model, budget, tries, pause, {"temperature": 0.0, "top_p": 1.0, "seed": seed}
        self.pool, self.lock, self.calls, self.failures = ThreadPoolExecutor(parallel), threading.Lock(), 0, 0
        self.file, self.trouble = None, ""
        if keep:
            path = cache_folder() / "served.sqlite"
            try:
                self.file = sqlite3.connect(path, check_same_thread=False, timeout=60)
                self.file.execute("create table if not exists answers (question text primary key, answer text)")
            except sqlite3.Error as e:
                die(f"{path}: not a file of kept answers ({e}); remove it")

    def ask(self, messages, read, **how):
        """read(response) of one call, from the file where it was asked before; None after the last failed try.

        What looks like a tag is broken up: the server's chat template would take "<|im_end|>" in a reply for the end of it, and a policy could write the verdict itself.
        """
        how = {**self.decoding, **how}
        messages = [{**m, "content": re.sub(r"<(?=[|/\w])", "< ", m["content"])} for m in messages]
        question = hashlib.sha256(json.dumps([self.url, self.model, messages, how], sort_keys=True).encode()).hexdigest()
        with self.lock:
            found = self.file and self.file.execute("select answer from answers where question = ?", (question,)).fetchone()
        if found:
            return json.loads(found[0])
        for attempt in range(self.tries):
            with self.lock:
                if self.budget and self.calls >= self.budget:
                    raise BudgetSpent(f"--server_calls {self.budget} are spent")
                self.calls += 1
            try:
                answer = read(self.client.chat_completion(messages, model=self.model, **how))
            except Exception as e:                         # whatever a server or the network can do; KeyboardInterrupt is none
                answer, told = None, str(e)
                for key in {self.key, repr(self.key)[1:-1]} - {"none"}:     # as it is, or as an error about a malformed header quotes it
                    told = told.replace(key, "***")
                self.trouble = f"{type(e).__name__}: {(told.splitlines() or [''])[0][:200]}"
                status = getattr(getattr(e, "response", None), "status_code", 0)
                if 400 <= status < 500 and status not in (408, 429):
                    break                                  # a wrong key, model or request stays wrong
            if answer is not None:
                with self.lock:
                    if self.file:
                        self.file.execute("insert or replace into answers values (?, ?)", (question, json.dumps(answer)))
                        self.file.commit()
                return answer
            if attempt + 1 < self.tries:
                time.sleep(self.pause * 2 ** attempt)
        with self.lock:
            self.failures += 1
        return None

    def complete(self, prompts, max_tokens, temperature=0.0):
        """-> one text per prompt, None where every try failed."""
        how = {"temperature": temperature, "top_p": 0.9} if temperature > 0 else {}
        def read(response):
            text = response.choices[0].message.content
            said = text.rpartition("</think>")[2].partition("<think>")[0].strip() if isinstance(text, str) else ""
            return said or None                            # a thought that was never closed is no answer
        return list(self.pool.map(lambda p: self.ask(p, read, max_tokens=max_tokens, **how), prompts))

    def choose(self, prompts, answers):
        """-> per prompt the probabilities of the answers among themselves, from the top 20 log-probs of the first token; None where that failed."""
        def read(response):
            top = {t.token.strip(): t.logprob for t in reversed(response.choices[0].logprobs.content[0].top_logprobs)}
            p = torch.tensor([top.get(a, float("-inf")) for a in answers], dtype=torch.float64).softmax(-1)
            return p.tolist() if p.isfinite().all() else None
        return list(self.pool.map(lambda p: self.ask(p, read, max_tokens=1, logprobs=True, top_logprobs=20), prompts))


# ---------------------------------------------------------------------------------------------- flags
def add_user_flags(p):
    """The flags that say who the user is, alike in every script that plays dialogues."""
    p.add_argument("--user", default="scripted", help="scripted | scripted-b (a second one, for evaluation only) | lm (Qwen/Qwen3-4B) | lm:MODEL (hub name, folder, .gguf, smollm2-135m) | lm:self (the policy before RL) | server:URL#MODEL (default: %(default)s)")
    p.add_argument("--user_kind", default="vanilla", choices=sorted(KINDS), help="of a language user; vanilla: warms to any sincere support; challenging: only to what serves its hidden need (default: %(default)s)")
    p.add_argument("--appraise", default="text", choices=["text", "logits"], help="how a language user's change is read; text: it writes a number; logits: expectation over five answers, deterministic and cheap (default: %(default)s)")
    p.add_argument("--max_change", type=positive(int), default=10, help="most points that one reply moves a language user by --appraise text; RLVER's release has no limit: 100 (default: %(default)s)")
    p.add_argument("--user_temperature", type=nonnegative(float), default=0.0, help="of a language user's next line, never of its appraisal; 0 = greedy; small models repeat themselves then (default: %(default)s)")
    p.add_argument("--user_tokens", type=positive(int), default=200, help="most tokens of a language user's appraisal, and of its next line (default: %(default)s)")
    add_server_flags(p)


def add_server_flags(p):
    """The flags of whatever asks a server, a user or a judge."""
    p.add_argument("--server_parallel", type=positive(int), default=16, help="calls to a server at a time (default: %(default)s)")
    p.add_argument("--server_key_env", default="", metavar="NAME", help="environment variable that holds the server's key; the key itself is never written anywhere")
    p.add_argument("--server_timeout", type=positive(float), default=60.0, help="seconds before a call counts as failed; what may pass (408, 429, 5xx, silence) is tried four times (default: %(default)s)")
    p.add_argument("--server_calls", type=nonnegative(int), default=0, help="calls, counted from each start, after which the run saves and stops; 0 = no limit (default: %(default)s)")


def check_user(args, scenarios, flag="--user", training=False):
    """SystemExit on a --user that can't be, or, for training, must not be, before any weights are loaded. Fills in the model that `lm` alone stands for."""
    if training and args.user == "scripted-b":
        die("--user scripted-b is kept for evaluation; train on scripted, lm, lm:MODEL, lm:self, or server:URL#MODEL")
    if args.user == "lm":
        args.user = "lm:Qwen/Qwen3-4B"
    if args.user not in (*SCRIPTED, "lm:self"):
        check_backend(flag, args.user, args, "scripted, scripted-b, lm, lm:MODEL, lm:self, or server:URL#MODEL")
    foreign = next((s for s in scenarios if s.language != "en"), None)
    if args.user in SCRIPTED and foreign is not None:
        die(f"{flag} {args.user} understands English only, and scenario {foreign.id} is in '{foreign.language}'; use --user lm:MODEL or server:URL#MODEL")


def check_backend(flag, spec, args, allowed="lm:MODEL or server:URL#MODEL"):
    """SystemExit on a model that can't be asked: spec, as `flag` gave it, is lm:MODEL or server:URL#MODEL. allowed: what to use, for the message."""
    kind, _, rest = spec.partition(":")
    if kind not in ("lm", "server") or not rest or kind == "server" and not all(rest.partition("#")):
        die(f"{flag} {spec}: use {allowed}")
    if kind == "lm":
        resolve(rest, f"{flag} lm:")
    if kind == "server":
        from huggingface_hub import constants
        try:
            url = urlsplit(rest.partition("#")[0])
        except ValueError as e:
            die(f"{flag} {spec}: no address of a server ({e})")
        if url.scheme not in ("http", "https") or not url.hostname:
            die(f"{flag} {spec}: the server's address must begin with http:// or https://")
        if args.server_key_env and not os.environ.get(args.server_key_env, "").strip():
            die(f"--server_key_env {args.server_key_env}: this environment variable is not set")
        if constants.HF_HUB_OFFLINE:
            die("HF_HUB_OFFLINE is set: it also forbids calls to a server, on this machine too; unset it")
        try:
            socket.create_connection((url.hostname, url.port or (443 if url.scheme == "https" else 80)), min(10, args.server_timeout)).close()
        except (OSError, ValueError) as e:
            die(f"{flag} {spec}: nobody answers at {url.netloc} ({e})")


def make_backend(spec, args, dtype, device):
    """Who answers to spec, lm:MODEL or server:URL#MODEL, already checked: a LocalModel on `device`, or a Server."""
    kind, _, rest = spec.partition(":")
    if kind == "server":
        url, _, name = rest.partition("#")
        return Server(url, name, args.server_parallel, args.server_key_env, args.server_calls, args.server_timeout, seed=args.seed)
    model, tokenizer = load(rest, dtype)
    return LocalModel(model.requires_grad_(False).to(device, dtype), Chat(tokenizer, model.config.vocab))


def check_rewards(args, scenarios):
    """SystemExit on a --reward stack that can't be, before any weights are loaded. -> what is remembered of each scenario's person, {} with --memory none."""
    named = [part[7:] for part in args.reward.split("+") if part.startswith("rubric:")]
    if args.judge != "scripted":
        check_backend("--judge", args.judge, args, "scripted, lm:MODEL or server:URL#MODEL")
    if "kardia" in named and args.template != "kardia":
        die("--reward rubric:kardia reads understanding, reasoning and emotion off the plan before a reply; add --template kardia")
    if "peregrm" in named and args.memory == "none":
        die("--reward rubric:peregrm is about people with a history; add --memory data/memories.jsonl")
    if "care" in named:
        folder = generator_folder(args.generator) or die(f"--generator {args.generator}: no rubric generator there; make one with python rubric.py sft --out {args.generator}, or use rubric:care-prior")
        args.generator = str(folder)                       # a run goes on with the generator it began with, whatever a later stage leaves beside it
    deficit = getattr(args, "credit_from", "emotion") == "deficit"
    if deficit and args.credit == "trajectory":
        die("--credit_from deficit has no say in --credit trajectory, which compares final emotions; add --credit turn or mica")
    if args.judge != "scripted" and not named and not deficit:
        die(f"--judge {args.judge} would have nothing to mark; add --reward emotion+rubric:NAME{' or --credit_from deficit' if hasattr(args, 'credit_from') else ''}")
    if args.judge == "scripted" and (named or deficit):
        foreign = next((s for s in scenarios if s.language != "en"), None)
        if foreign is not None:
            die(f"--judge scripted understands English only, and scenario {foreign.id} is in '{foreign.language}'; use --judge lm:MODEL or server:URL#MODEL")
    return {} if args.memory == "none" else load_memories(args.memory, scenarios)


def generator_folder(run):
    """The HF folder of the rubric generator in a run of care.py: after preference RL where there is one, else after imitation; or None."""
    return next((f for f in (Path(run) / "preferred", Path(run) / "sft", Path(run)) if (f / "model.safetensors").is_file()), None)


def make_rewards(args, memories, dtype, device):
    """The reward stack that the flags name, already checked. -> rubric.Rewards."""
    deficit = getattr(args, "credit_from", "emotion") == "deficit"
    backend = make_backend(args.judge, args, dtype, device) if args.judge != "scripted" and (deficit or "rubric" in args.reward) else None
    generated = potential = None
    if "rubric:care" in args.reward.split("+"):
        generated = Generated(make_backend(f"lm:{generator_folder(args.generator)}", args, dtype, device).complete)
    if deficit:
        from empa import LanguageJudge, ScriptedJudge, potentials          # it knows this file
        potential = potentials, LanguageJudge(backend.complete, unread=None) if backend else ScriptedJudge()
    return Rewards(args.reward, LanguageRater(backend.complete, backend.choose, args.judge_by) if backend else ScriptedRater(), generated, potential, memories, ranks.everyone)


def user_name(args):
    """What was, or wasn't, qualified, as flags: the model with the way it is read. Users of both kinds share a verdict."""
    return args.user if args.user in SCRIPTED else f"{args.user}{f' --model {args.model}' if args.user == 'lm:self' else ''} --appraise {args.appraise}"


def verdicts():
    """user name -> bool, as `simulator.py qualify` left them in the user's cache."""
    path = cache_folder() / "qualified.json"
    return {**dict.fromkeys(SCRIPTED, True), **(read_json(path) if path.is_file() else {})}


def remember(args, qualified):
    """Keeps a verdict (bool) where verdicts() finds it."""
    write_atomically(cache_folder() / "qualified.json", json.dumps({**verdicts(), user_name(args): qualified}, indent=1).encode())


def make_users(args, policy, dtype, device, loud=True):
    """The population that --user names. policy: (model, Chat) as they are before RL, for lm:self. loud: say so where it has not qualified. -> users."""
    if loud and not verdicts().get(user_name(args)):
        print(f"WARNING: the user {user_name(args)} has {'failed' if user_name(args) in verdicts() else 'not taken'} the battery: its emotion may mean little; "
              f"see python simulator.py qualify --user {user_name(args)}", flush=True)
    if args.user in SCRIPTED:
        return SCRIPTED[args.user](args.dynamics, args.max_turns)
    if args.user == "lm:self":
        model, chat = policy[0], Chat(policy[1].tokenizer, policy[0].config.vocab)     # a user speaks without thinking aloud, whatever the policy does
        adapted = any(k.endswith("lora_a") for k, _ in model.named_parameters())
        backend = LocalModel(model, chat, context=model.without_adapters) if adapted else LocalModel(deepcopy(model).requires_grad_(False), chat)
    else:
        backend = make_backend(args.user, args, dtype, device)
    served = isinstance(backend, Server)
    if not served and backend.model.config.max_positions < 2 * args.user_tokens + 512:
        die(f"--user_tokens {args.user_tokens}: {args.user} knows {backend.model.config.max_positions} positions, half of which are the scenario's; lower it")
    users = LanguageUsers(backend.complete, args.dynamics, args.max_turns, args.appraise, args.user_kind, backend.choose, args.user_tokens, args.max_change, args.user_temperature)
    if served:
        users.trouble = lambda: f" (last: {backend.trouble})"
    return users
