"""
A small decoder (Qwen2/2.5, Qwen3, Llama/SmolLM2) in plain PyTorch: one forward for prefill, decode, turn
append and training; a ragged KV cache; sampling; log-probs that never hold [B, T, V]. Weights come and go in weights.py.

Left out on purpose: dropout (RL needs the trainer to see the sampler's network), left padding, attention over
pad ids, rope scaling, sliding windows, autocast. What we can't run exactly is refused by name, never approximated.

The one idea to take away, "slot == position": token number p of a dialogue lives in cache slot p, and a query
at position p sees the slots <= p. Garbage (the padding of a ragged chunk) can only sit at slots >= n, where the
next real token overwrites it before any query may look. That makes ragged batches, rewinding, sharing a prompt
and retiring a row all one-liners.
"""
from contextlib import contextmanager
from copy import deepcopy
from dataclasses import dataclass

import torch
import torch.nn as nn
import torch.nn.functional as F
from torch.utils.checkpoint import checkpoint

from linear import Linear, product
from recording import GRAPHS, Desk, recorded

# ---------------------------------------------------------------------------------------------- configuration
@dataclass
class Config:
    arch: str            # qwen2 | qwen3 | llama
    vocab: int           # V, rows of the embedding (can be larger than the tokenizer)
    width: int           # D
    layers: int          # L
    heads: int           # H, query heads
    kv_heads: int        # Hkv, each serves H / Hkv query heads
    head_dim: int
    mlp: int             # hidden width of the gated MLP
    norm_eps: float
    rope_theta: float
    tied: bool           # the output head is the embedding
    max_positions: int


# ---------------------------------------------------------------------------------------------- the cache
class Cache:
    """Keys and values of B dialogues; row b holds n[b] real tokens, in slots 0..n[b]-1.

    k, v: (L, B, Hkv, Tmax, head_dim) in the compute dtype: 2 L Hkv head_dim bytes-per-number a token
    (SmolLM2-135M in bf16: 23 kB, so 64 dialogues of 500 tokens are 0.7 GB).
    `top` is a host-side upper bound of max(n): slicing needs no device sync.
    """
    def __init__(self, model, batch, capacity):
        c, w = model.config, model.model.embed_tokens.weight
        self.k = torch.zeros(c.layers, batch, c.kv_heads, capacity, c.head_dim, dtype=model.dtype, device=w.device)
        self.v = torch.zeros_like(self.k)
        self.n = torch.zeros(batch, dtype=torch.long, device=w.device)
        self.top = 0

    def rows(self, index):
        """A new cache made of copies of these rows: sharing a prompt is rows([0, 0, 0, 0]), retiring is rows(live)."""
        new = Cache.__new__(Cache)
        index = torch.as_tensor(index, device=self.n.device)
        new.k, new.v = (torch.zeros(x.shape[0], len(index), *x.shape[2:], dtype=x.dtype, device=x.device) for x in (self.k, self.v))
        for a, b in ((new.k, self.k), (new.v, self.v)):
            a[:, :, :, :self.top] = b[:, index, :, :self.top]      # copy what is used, not the capacity
        new.n, new.top = self.n[index].clone(), self.top
        return new

    def permute(self, order):
        """Put row order[i] at place i, in place; only the rows that move are copied."""
        moved = [i for i, j in enumerate(order) if i != j]
        if moved:
            to = torch.tensor(moved, device=self.n.device)
            come = torch.tensor([order[i] for i in moved], device=self.n.device)
            for x in (self.k, self.v):
                x[:, to, :, :self.top] = x[:, come, :, :self.top]
            self.n[to] = self.n[come]

    def take(self, other, order):
        """Row order[i] of `other` comes to place i, as many slots of it as self has in use; layer by layer, so that no second copy of it all is made on the way."""
        order = torch.as_tensor(order, device=self.n.device)
        for mine, theirs in ((self.k, other.k), (self.v, other.v)):
            for layer, from_layer in zip(mine, theirs):
                layer[:len(order), :, :self.top] = from_layer[order, :, :self.top]
        self.n[:len(order)] = other.n[order]

    def reserve(self, slots):
        """Make room for `slots` slots in all; grows by blocks of 128, so that memory follows the dialogues' real length."""
        more = slots - self.k.shape[3]
        for name in ("k", "v") if more > 0 else ():        # one after the other: the old keys are gone before the values grow
            setattr(self, name, F.pad(getattr(self, name), (0, 0, 0, -(-more // 128) * 128)))

    def first(self, rows):
        """A view of the first `rows` rows: writes go through, n and all."""
        new = Cache.__new__(Cache)
        new.k, new.v, new.n, new.top = self.k[:, :rows], self.v[:, :rows], self.n[:rows], self.top
        return new


# ---------------------------------------------------------------------------------------------- the network
class RMSNorm(nn.Module):
    def __init__(self, width, eps):
        super().__init__()
        self.weight, self.eps = nn.Parameter(torch.ones(width)), eps

    def forward(self, x):
        h = x.float()                                                                   # the mean square is taken in fp32; F.rms_norm would keep a tenth more for backward in bf16
        h = h * torch.rsqrt(h.square().mean(-1, keepdim=True) + self.eps)
        return h.to(x.dtype) * self.weight.to(x.dtype)


def rotate(x, cos, sin):
    """Rotary positions on x (B, T, heads, head_dim) with cos, sin (B|1, T, 1, head_dim), the first half of sin negative: number i turns with
    number i + head_dim/2, halves, not pairs, as HF stores them: (a, b) -> (a cos - b sin, b cos + a sin)."""
    return torch.addcmul(x * cos, x.roll(x.shape[-1] // 2, -1), sin)


class Attention(nn.Module):
    def __init__(self, c):
        super().__init__()
        self.heads, self.kv_heads, self.head_dim = c.heads, c.kv_heads, c.head_dim
        bias = c.arch == "qwen2"
        self.q_proj = Linear(c.width, c.heads * c.head_dim, bias=bias)
        self.k_proj = Linear(c.width, c.kv_heads * c.head_dim, bias=bias)
        self.v_proj = Linear(c.width, c.kv_heads * c.head_dim, bias=bias)
        self.o_proj = Linear(c.heads * c.head_dim, c.width, bias=False)
        if c.arch == "qwen3":
            self.q_norm, self.k_norm = RMSNorm(c.head_dim, c.norm_eps), RMSNorm(c.head_dim, c.norm_eps)

    def forward(self, x, cos, sin, layer_cache, place, mask):
        B, T, _ = x.shape
        H, K, D = self.heads, self.kv_heads, self.head_dim
        q = self.q_proj(x).view(B, T, H, D)
        k = self.k_proj(x).view(B, T, K, D)
        v = self.v_proj(x).view(B, T, K, D)
        if hasattr(self, "q_norm"):
            q, k = self.q_norm(q), self.k_norm(k)
        q, k = rotate(q, cos, sin), rotate(k, cos, sin)
        if layer_cache is None:                            # training: right padding needs no mask, a causal query can't see it
            if mask is not None:                           # with one, only kernels that know no groups are fast on CUDA
                k, v = (x.repeat_interleave(H // K, 2) for x in (k, v))
            y = F.scaled_dot_product_attention(q.transpose(1, 2), k.transpose(1, 2), v.transpose(1, 2), attn_mask=mask, is_causal=mask is None, enable_gqa=mask is None)
            return self.o_proj(y.transpose(1, 2).reshape(B, T, H * D))
        cache_k, cache_v, S = layer_cache                  # (B, K, Tmax, D) both; S slots are in use
        rows, slots, unpack = place                        # (B, 1), (B, T), None; of a packed chunk: (1, N), (1, N), its places in (B, T)
        cache_k[rows, :, slots] = k                        # indexed assignment: slot == position, (B, T, K, D)
        cache_v[rows, :, slots] = v
        # The H/K query heads that share a key head become extra queries: no copy of the cache, one small product a key head.
        if unpack is not None:                             # only attention needs the rows apart: (1, N, H, D) -> (B, T, H, D)
            B, T = len(cache_k), mask.shape[2] // (H // K)
            q = q.new_zeros(B, T, H, D).index_put(unpack, q[0])
        q = q.view(B, T, K, H // K, D).permute(0, 2, 3, 1, 4).reshape(B, K, H // K * T, D)
        y = F.scaled_dot_product_attention(q, cache_k[:, :, :S], cache_v[:, :, :S], attn_mask=mask)      # (B, K, H/K * T, D)
        y = y.view(B, K, H // K, T, D).permute(0, 3, 1, 2, 4).reshape(B, T, H * D)
        return self.o_proj(y if unpack is None else y[unpack][None])


class MLP(nn.Module):
    def __init__(self, c):
        super().__init__()
        self.gate_proj, self.up_proj = Linear(c.width, c.mlp, bias=False), Linear(c.width, c.mlp, bias=False)
        self.down_proj = Linear(c.mlp, c.width, bias=False)

    def forward(self, x):
        if torch.is_grad_enabled():
            return self.down_proj(F.silu(self.gate_proj(x)) * self.up_proj(x))
        return self.down_proj(F.silu(self.gate_proj(x), inplace=True).mul_(self.up_proj(x)))          # the same numbers; two buffers less to page in, 5 % of a prefill on a CPU


class Block(nn.Module):
    def __init__(self, c):
        super().__init__()
        self.self_attn, self.mlp = Attention(c), MLP(c)
        self.input_layernorm, self.post_attention_layernorm = RMSNorm(c.width, c.norm_eps), RMSNorm(c.width, c.norm_eps)

    def forward(self, x, *where):
        x = x + self.self_attn(self.input_layernorm(x), *where)
        return x + self.mlp(self.post_attention_layernorm(x))


class Trunk(nn.Module):                                    # attribute names are HF's, so a state dict needs no translation
    def __init__(self, c):
        super().__init__()
        self.embed_tokens = nn.Embedding(c.vocab, c.width, _weight=torch.empty(c.vocab, c.width))      # not drawn at random: every weight is loaded
        self.layers = nn.ModuleList(Block(c) for _ in range(c.layers))
        self.norm = RMSNorm(c.width, c.norm_eps)


class Policy(nn.Module):
    """The language model. `dtype` is the compute dtype; parameters are always fp32."""
    def __init__(self, config, hf_config=None, dtype=torch.float32):
        super().__init__()
        self.config, self.hf_config, self.dtype, self.checkpointed = config, hf_config, dtype, False
        self.model = Trunk(config)
        if not config.tied:
            self.lm_head = Linear(config.width, config.vocab, bias=False)
        self.rope = {}                                     # device -> table; cheap to make, so in no checkpoint

    @property
    def head(self):                                        # the module whose .weight (V, D) maps hidden states to logits
        return self.model.embed_tokens if self.config.tied else self.lm_head

    def train_only_upper(self, layers):
        """Train the upper `layers` blocks and the final norm, freeze the rest (embedding and head too); 0 trains everything.
        The frozen part costs no backward, no gradient and no Adam state, and its cast copies are kept."""
        self.requires_grad_(layers == 0)
        if layers:
            for part in [*self.model.layers[-layers:], self.model.norm]:
                part.requires_grad_(True)

    def add_lora(self, rank, seed=0):
        """Adapters of this rank beside q, k, v, o, gate, up and down of every block that was trained so far; all else is frozen.
        They start at zero, so the network is unchanged; alpha / rank is 2."""
        generator = torch.Generator().manual_seed(seed)
        blocks = [b for b in self.model.layers if b.mlp.gate_proj.weight.requires_grad]
        self.requires_grad_(False)
        for module in (m for b in blocks for m in b.modules() if isinstance(m, Linear)):
            module.add_lora(rank, generator)

    @contextmanager
    def without_adapters(self):
        """Inside `with`: the network that LoRA started from, the reference of a KL term. No adapters: nothing happens."""
        adapted = [m for m in self.modules() if isinstance(m, Linear) and m.rank]
        for m in adapted:
            m.adapted = False
        try:
            yield
        finally:
            for m in adapted:
                m.adapted = True

    def rope_table(self, device):
        if device not in self.rope:
            c = self.config
            freq = 1.0 / c.rope_theta ** (torch.arange(0, c.head_dim, 2, dtype=torch.float32) / c.head_dim)
            # twice the positions: the padding of a ragged chunk may stick out beyond the last real one
            angle = torch.outer(torch.arange(2 * c.max_positions, dtype=torch.float32), freq)         # (positions, head_dim/2)
            cos, sin = angle.cos(), angle.sin()
            self.rope[device] = (torch.cat((cos, cos), 1).to(device), torch.cat((-sin, sin), 1).to(device))      # (positions, head_dim)
        return self.rope[device]

    def forward(self, ids, cache=None, lengths=None, branches=None):
        """Hidden states after the final norm, (B, T, D) in the compute dtype.

        ids (B, T) long, right-padded with anything. cache None: positions 0..T-1 (training). Otherwise the chunk is
        appended: row b goes to positions n[b] .. n[b]+T-1 and n grows by lengths[b] (default T).
        Example: n = [3, 1], ids (2, 2), lengths = [2, 1] -> slots 3,4 of row 0 and slot 1 of row 1 are real, n = [5, 2].
        branches (2, B, T), in training: sequences that are trees (episode.Tree); the position of each token, and the last one that sees it, from the token itself on.
        """
        B, T = ids.shape
        cos, sin = self.rope_table(ids.device)
        if cache is None:
            assert branches is not None or T <= self.config.max_positions, f"{T} tokens, but the model knows {self.config.max_positions} positions"
            place = mask = None
            position = torch.arange(T, device=ids.device)[None]                                       # (1, T)
            if branches is not None:
                order, (position, last) = position, branches                                          # (B, T) each
                mask = ((order[..., None] >= order[:, None]) & (order[..., None] <= last[:, None]))[:, None]      # (B, 1, T, T), one for all layers
        else:
            cache.top += T
            S = cache.top
            assert S <= cache.k.shape[3], f"cache of {cache.k.shape[3]} slots is too short for {S}"
            position = cache.n[:, None] + torch.arange(T, device=ids.device)                          # (B, T)
            place = (torch.arange(B, device=ids.device)[:, None], position, None)
            hidden = torch.arange(S, device=ids.device)[None, None] > position[..., None]             # (B, T, S): later slots
            group = self.config.heads // self.config.kv_heads
            mask = torch.zeros(B, 1, group, T, S, dtype=self.dtype, device=ids.device)                # (B, 1, g, T, S), one for all layers
            mask = mask.masked_fill_(hidden[:, None, None], float("-inf")).view(B, 1, group * T, S)
            if T > 1 and lengths is not None:              # a ragged chunk: everything but attention sees the N real tokens, no padding
                real = torch.nonzero(torch.arange(T, device=ids.device) < lengths[:, None], as_tuple=True)       # (N,), (N,)
                ids, position = ids[real][None], position[real][None]                                 # (1, N)
                place = (real[0][None], position, real)
        cos, sin = cos[position][:, :, None].to(self.dtype), sin[position][:, :, None].to(self.dtype)  # (B|1, T, 1, head_dim)
        x = F.embedding(ids, self.model.embed_tokens.weight).to(self.dtype)                           # (B, T, D)
        for i, block in enumerate(self.model.layers):
            where = cos, sin, None if cache is None else (cache.k[i], cache.v[i], S), place, mask
            # checkpointed: backward gets the block's input only and makes the rest again, a third more compute for a tenth of the memory
            x = checkpoint(block, x, *where, use_reentrant=False) if self.checkpointed and torch.is_grad_enabled() and cache is None else block(x, *where)
        if cache is not None:
            cache.n += T if lengths is None else lengths
            if place[2] is not None:
                x = x.new_zeros(B, T, x.shape[2]).index_put(real, x[0])                               # (B, T, D)
        return self.model.norm(x)

    def logits(self, hidden):
        """(..., D) -> (..., V) fp32. For a few positions only: training uses token_logprobs."""
        return product(self.head, hidden).float()


class Critic(nn.Module):
    """V(s), the return to expect before each policy token: a linear head, zero at the start, on the policy's trunk or on its own copy.

    V = known + head(h), where `known` is the return if nothing moved any more (undiscounted), so the untrained critic says "it stays as it is".
    With `bound` V = sigmoid(logit(known) + head(h)): it can't leave [0, 1], where the return lives (known 0 and 1 count as .01 and .99).
    h is scaled to a root mean square of 1, whatever the trunk's final norm does: one Adam step then moves V by about lr x width.
    """
    def __init__(self, policy, separate=False, bound=False):
        super().__init__()
        self.bound, self.own = bound, deepcopy(policy) if separate else None     # own: with the same layers trained and the same adapters
        if separate and not policy.config.tied:
            del self.own.lm_head
        self.head = nn.Linear(policy.config.width, 1, device=policy.model.embed_tokens.weight.device)
        nn.init.zeros_(self.head.weight)
        nn.init.zeros_(self.head.bias)

    def forward(self, hidden, known):
        """hidden (N, D) in the compute dtype, known (N,) -> V (N,) in fp32."""
        h = F.rms_norm(hidden.float(), hidden.shape[-1:])
        change = self.head(h)[:, 0]                                                                   # (N,)
        return torch.sigmoid(torch.logit(known, 0.01) + change) if self.bound else known + change


# ---------------------------------------------------------------------------------------------- generation
@torch.no_grad()
def append(model, cache, chunks):
    """Feed one list of ids per row, of any lengths >= 1, in one padded forward. -> hidden state (B, D) of each row's last id."""
    device = cache.n.device
    lengths = torch.tensor([len(c) for c in chunks], device=device)
    T = max(len(c) for c in chunks)
    ids = torch.tensor([c + [0] * (T - len(c)) for c in chunks], device=device)                       # (B, T)
    cache.top, longest = torch.stack((cache.n, cache.n + lengths)).amax(1).tolist()     # host sync: the bound must not drift above the real lengths
    assert longest <= model.config.max_positions, f"{longest} tokens, but the model knows {model.config.max_positions} positions"
    cache.reserve(cache.top + T)
    hidden = model(ids, cache, lengths)                                                               # (B, T, D)
    return hidden[torch.arange(len(chunks), device=device), lengths - 1]


@torch.no_grad()
def sample(model, cache, hidden, budgets, stop_ids, banned=None, temperature=1.0, top_k=0, top_p=1.0, generator=None, check_every=8, states=None):
    """Continue every row of a live cache until a stop id or its budget.

    hidden (B, D): state of each row's last fed id. budgets: tokens allowed, one int a row, >= 1. banned (V,) bool or None.
    temperature 0 is greedy. -> (tokens, logprobs): a list of ids and of floats per row, the stop id included.
    logprobs are of the distribution at that temperature over the allowed ids (what token_logprobs scores; at
    temperature 0: at temperature 1), before top-k / top-p. states: a list, to be filled with the hidden states (tokens, D) that
    each row's tokens were drawn from: what a critic on this trunk reads, computed anyway. The last sampled id is *not* in the cache yet: begin the
    next chunk with it.

    One uniform number a token, drawn up front, picks the token by inverse CDF: no RNG in the loop, and a row's tokens do
    not depend on which other rows are alive. Finished flags are read back every `check_every` tokens (the only host
    sync of the loop); then rows that still talk are moved to the front and the others cost nothing more.

    CUDA: launching a step's kernels one by one takes longer than running them, so a step is recorded once (torch.cuda.CUDAGraph) and replayed, in later calls and after optimiser steps
    too: see Desk. A recording holds one number of rows and of cache slots; rows come in powers of two and slots in multiples of 256, so that there are few.
    """
    B, device, longest = len(budgets), cache.n.device, max(budgets)
    start = int(cache.n.max())
    assert start + longest <= model.config.max_positions, f"{start + longest} tokens, but the model knows {model.config.max_positions} positions"
    record = device.type == GRAPHS["device"] and not hasattr(model, "unshard")         # parted layers (--fsdp) put work on streams that a recording can't follow
    cache.reserve(start + longest + 1)
    cache.top = start
    rows, slots = (1 << (B - 1).bit_length(), -(-(start + longest) // 256) * 256) if record else (B, 0)        # rows beyond B are never going
    desk = Desk.kept(model, Cache, rows, longest, slots, states is not None) if record else Desk(model, rows, longest, cache, states is not None)
    if record:
        desk.cache.top = start
        desk.cache.take(cache, range(B))
    desk.begin(hidden, budgets, stop_ids, banned, torch.rand(B, longest, generator=generator))
    tokens, logprobs, count, budget, uniform, at, seen = desk.tokens, desk.logprobs, desk.count, desk.budget, desk.uniform, desk.at, desk.seen
    order = list(range(rows))                              # order[place] = row; the first len(live) places are being decoded
    token, live, going, state, view = desk.first(rows)     # live: rows at those places; state: what their next token is drawn from

    def draw():                                            # everything in place: a recording knows tensors by their address
        if states is not None:
            seen[live, at] = state
        logits = model.logits(state)                                                                  # (R, V)
        if banned is not None:
            logits.masked_fill_(desk.banned, float("-inf"))
        if temperature > 0:
            logits /= temperature
        lse = logits.logsumexp(-1, keepdim=True)                                                      # (R, 1)
        if temperature == 0:
            token.copy_(logits.argmax(-1))
        else:
            kept = truncate(logits, top_k, top_p)
            cdf = (kept - lse).exp_().cumsum(-1)                                                      # (R, V)
            total = cdf[:, -1:].contiguous()
            below = torch.minimum(uniform[live, at][:, None] * total, total.nextafter(torch.zeros_like(total)))   # < total: never past the last allowed id
            token.copy_(torch.searchsorted(cdf, below, right=True)[:, 0])
        tokens[live, at] = token
        logprobs[live, at] = (logits.gather(1, token[:, None]) - lse)[:, 0]
        count[live] += going.long()
        going.logical_and_(~desk.stops[token] & (at + 1 < budget[live]))
        at.add_(1)

    def step():
        view.top = (slots or start + t) - 1                # recorded: a mask over all slots that will be there
        # a finished row keeps writing garbage to its slot n, which nobody sees: its n stays
        state.copy_(model(token[:, None], view, going.long())[:, 0])                                  # (R, D)
        draw()

    draw()
    t = 0
    for t in range(1, longest):
        if t % check_every == 0:
            alive = going.tolist()
            if not any(alive):
                break
            size = 1 << (sum(alive) - 1).bit_length() if record else sum(alive)
            if size <= (0.5 if record else 0.75) * len(alive):
                places = [p for p, a in enumerate(alive) if a] + [p for p, a in enumerate(alive) if not a]
                desk.cache.top = start + t
                desk.cache.permute(places)
                order[:len(alive)] = [order[p] for p in places]
                index = torch.tensor(places[:size], device=device)
                for x in (token, live, going, state):
                    x[:size] = x[index]
                token, live, going, state, view = desk.first(size)
        key = (len(live), slots, temperature, top_k, top_p, banned is None, states is None)
        if record and key in desk.recordings:
            desk.recordings[key].replay()
        elif record:
            graph = recorded(step, desk.pool)
            if record := graph is not None:
                desk.recordings[key] = graph
        else:
            step()
    back = [0] * rows
    for place, row in enumerate(order):
        back[row] = place
    cache.top = start + t + 1
    cache.take(desk.cache, back[:B]) if slots else cache.permute(back)
    count = count[:B].tolist()
    if states is not None:
        states += [s[:n].clone() for s, n in zip(seen, count)]
    rows_t, rows_l = tokens[:B, :longest].tolist(), logprobs[:B, :longest].tolist()
    return [r[:n] for r, n in zip(rows_t, count)], [r[:n] for r, n in zip(rows_l, count)]


def truncate(logits, top_k=0, top_p=1.0):
    """logits (R, V) with everything outside the top k, and outside the smallest set that holds probability top_p, set to -inf."""
    if top_k > 0:
        kth = logits.topk(min(top_k, logits.shape[-1]), dim=-1).values[:, -1:]
        logits = logits.masked_fill(logits < kth, float("-inf"))
    if top_p < 1:
        value, index = logits.sort(dim=-1, descending=True)
        p = value.softmax(-1)
        out = p.cumsum(-1) - p >= top_p                    # the mass before this token already suffices
        logits = logits.masked_fill(out.scatter(1, index, out), float("-inf"))
    return logits


@torch.no_grad()
def generate(model, prompts, max_new_tokens, stop_ids, **how):
    """Prompts (lists of ids, any lengths) -> (tokens, logprobs, cache): append + sample, for callers with one turn."""
    cache = Cache(model, len(prompts), max(map(len, prompts)) + max_new_tokens + 1)
    hidden = append(model, cache, prompts)
    return *sample(model, cache, hidden, [max_new_tokens] * len(prompts), stop_ids, **how), cache


# ---------------------------------------------------------------------------------------------- log-probs for training
class TokenLogprobs(torch.autograd.Function):
    """log p(target) and entropy of softmax(hidden @ weight.T / temperature), streamed over the vocabulary.

    Forward keeps (N,) statistics, backward makes each slice of logits again: extra memory is a few (N, chunk) buffers and
    the weight's own gradient, never (N, V). With p = softmax, per token: d logp / d logit = onehot - p, and
    dH / d logit = -p (log p + H).
    """
    @staticmethod
    def forward(ctx, hidden, weight, target, banned, temperature, chunk):
        ctx.set_materialize_grads(False)                   # an unused entropy then has gradient None, and costs nothing
        N, V = len(hidden), len(weight)
        top = torch.full((N,), -float("inf"), device=hidden.device)
        total, first = torch.zeros_like(top), torch.zeros_like(top)           # sum e^(l-top), sum l e^(l-top)
        chosen = torch.zeros_like(top)
        for a in range(0, V, chunk):
            l = slice_logits(hidden, weight, banned, temperature, a, chunk)                           # (N, chunk) fp32
            new = torch.maximum(top, l.amax(1))
            e = (l - new[:, None]).exp_()
            scale = (top - new).exp().nan_to_num_(0.0)     # -inf - -inf while nothing was allowed yet
            total = total * scale + e.sum(1)
            first = first * scale + e.mul_(l.clamp_(min=-1e30)).sum(1)        # banned: 0 * -1e30 = 0, not 0 * -inf
            here = (target >= a) & (target < a + l.shape[1])
            chosen = torch.where(here, l.gather(1, (target - a).clamp(0, l.shape[1] - 1)[:, None])[:, 0], chosen)
            top = new
        lse = top + total.log()
        entropy = lse - first / total
        ctx.save_for_backward(hidden, weight, target, banned, lse, entropy)
        ctx.temperature, ctx.chunk = temperature, chunk
        return chosen - lse, entropy

    @staticmethod
    def backward(ctx, g_logp, g_entropy):
        hidden, weight, target, banned, lse, entropy = ctx.saved_tensors
        V, chunk = len(weight), ctx.chunk
        g_logp = torch.zeros_like(lse) if g_logp is None else g_logp
        d_hidden = torch.zeros(hidden.shape, dtype=torch.float32, device=hidden.device)
        d_weight = torch.empty_like(weight) if ctx.needs_input_grad[1] else None
        rows = torch.arange(len(hidden), device=hidden.device)
        for a in range(0, V, chunk):
            l = slice_logits(hidden, weight, banned, ctx.temperature, a, chunk).sub_(lse[:, None])    # log p
            p = l.exp()
            if g_entropy is not None:
                d = p * (-g_logp[:, None] - g_entropy[:, None] * (l.clamp_(min=-1e30) + entropy[:, None]))
            else:
                d = p.mul_(-g_logp[:, None])
            here = (target >= a) & (target < a + d.shape[1])
            d[rows, (target - a).clamp(0, d.shape[1] - 1)] += g_logp * here               # one target a row: no collisions, no sync
            d = d.div_(ctx.temperature).to(hidden.dtype)                                              # (N, chunk)
            d_hidden += d @ weight[a:a + chunk].to(hidden.dtype)
            if d_weight is not None:
                d_weight[a:a + chunk] = d.t() @ hidden
        return d_hidden.to(hidden.dtype), d_weight, None, None, None, None


def slice_logits(hidden, weight, banned, temperature, a, chunk):
    """fp32 logits (N, <= chunk) of ids a .. a+chunk-1 at that temperature, banned ids -inf; forward and backward must agree on them."""
    l = F.linear(hidden, weight[a:a + chunk].to(hidden.dtype)).float().div_(temperature)
    return l if banned is None else l.masked_fill_(banned[a:a + chunk], float("-inf"))


def token_logprobs(model, hidden, target, banned=None, temperature=1.0, chunk=8192):
    """Log-prob and entropy, two (N,) fp32 tensors with gradient, of ids `target` (N,) given hidden states (N, D).

    Select the policy's positions before the call (position i-1 predicts id i). Temperature and banned ids as when
    sampling: the log-prob is of the distribution the token was drawn from (pitfalls 18, 25).
    """
    return TokenLogprobs.apply(hidden, model.head.weight, target, banned, temperature, chunk)
