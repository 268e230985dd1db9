"""
A decode step recorded as a CUDA graph, and the desk it works at: every tensor that model.sample() reads and writes, at addresses that stay.

On a CPU, or with layers parted over GPUs (--fsdp), nothing is recorded and a desk is the variables of one call. Left out on purpose: recorded prefills and updates, whose
shapes differ each time and whose kernels run longer than they take to launch.
"""
from weakref import WeakKeyDictionary

import torch

from linear import Linear, cast

GRAPHS = {"device": "cuda", "stream": None}                # device: where steps are recorded, None once that failed; stream: the one on which they all are, since each keeps a workspace of its own
DESKS = WeakKeyDictionary()                                # model -> its desk


class Desk:
    """All that a decode step reads and writes besides weights: `rows` places, `length` tokens each. Rows that still talk are the first; first(R) is a view of R places.

    A recording knows tensors by their address alone. So each model keeps one desk, with a cache of its own (the caller's is copied there and back, two passes over it a call) and the
    steps recorded on it, and it only grows. Weights stay where they are as well: an optimiser writes in place, and linear.keep renews a cast where the old one lay.
    What did move (a load, --fsdp) is seen by addresses(), and the recordings are made again. Without recording a desk lives for one call, on the caller's cache.
    """
    def __init__(self, model, rows, length, cache, seen):
        c, device = model.config, cache.n.device
        zeros = lambda *shape, dtype=torch.long: torch.zeros(*shape, dtype=dtype, device=device)
        self.cache, self.size = cache, (rows, length, cache.k.shape[3], seen)
        self.token, self.live, self.count, self.budget, self.at = zeros(rows), zeros(rows), zeros(rows), zeros(rows), zeros(1)     # at: t, where a replayed step can count it
        self.going, self.stops, self.banned = (zeros(n, dtype=torch.bool) for n in (rows, c.vocab, c.vocab))
        self.tokens, self.uniform, self.logprobs = zeros(rows, length), zeros(rows, length, dtype=torch.float32), zeros(rows, length, dtype=torch.float32)
        self.state = zeros(rows, c.width, dtype=model.dtype)
        self.seen = zeros(rows, length, c.width, dtype=model.dtype) if seen else None
        self.places, self.pool, self.recordings = None, None, {}

    @staticmethod
    def kept(model, new_cache, *size):
        """The model's desk of at least this size (rows, tokens, slots, whether states are kept), without the recordings that no longer hold. new_cache(model, rows, slots) -> model.Cache."""
        desk, where = DESKS.get(model), (model.dtype, model.model.embed_tokens.weight.device)
        if desk is None or (desk.state.dtype, desk.state.device) != where or any(a > b for a, b in zip(size, desk.size)):
            rows, length, slots, seen = (max(a, b) for a, b in zip(size, desk.size if desk else size))
            DESKS.pop(model, None)                         # the old one goes before the new one is made
            del desk
            desk = DESKS[model] = Desk(model, rows, length, new_cache(model, rows, slots), seen)
        if (places := addresses(model)) != desk.places:
            desk.places, desk.recordings = places, {}
            desk.pool = torch.cuda.graph_pool_handle() if desk.cache.n.is_cuda else None       # one for all: only one recording runs at a time, and none leaves anything there
        return desk

    def begin(self, hidden, budgets, stop_ids, banned, uniform):
        """A call's rows in their places, the first ones; in what is left nobody is going."""
        B = len(hidden)
        self.live.copy_(torch.arange(len(self.live)))
        self.going.copy_(self.live < B)
        self.count.zero_(), self.at.zero_(), self.stops.zero_()
        self.stops[list(stop_ids)] = True
        if banned is not None:
            self.banned.copy_(banned)
        self.state[:B], self.budget[:B], self.uniform[:B, :uniform.shape[1]] = hidden, torch.tensor(budgets), uniform

    def first(self, rows):
        return self.token[:rows], self.live[:rows], self.going[:rows], self.state[:rows], self.cache.first(rows)


@torch.no_grad()
def addresses(model):
    """Where a decode step finds each weight and each cast, which are brought up to date where they are."""
    products = {id(m) for m in model.modules() if isinstance(m, Linear)} | {id(model.head)}
    return [place.data_ptr() for m in model.modules() for name, w in m._parameters.items() if w is not None
            for place in (w, cast(m, name, model.dtype) if id(m) in products and name in ("weight", "bias") else w)]


def recorded(step, pool):
    """Runs step() once, on the stream of recordings, then records it there without running. -> the CUDAGraph, or None and one printed line where this machine can't."""
    GRAPHS["stream"] = side = GRAPHS["stream"] or torch.cuda.Stream()
    before = torch.cuda.current_stream()
    side.wait_stream(before)
    with torch.cuda.stream(side):
        step()
    before.wait_stream(side)
    graph = torch.cuda.CUDAGraph()
    try:                                                   # thread_local: what other threads do meanwhile (a served user, a communication watchdog) spoils nothing
        with torch.cuda.graph(graph, pool=pool, stream=side, capture_error_mode="thread_local"):
            step()
        return graph
    except RuntimeError as e:
        torch.cuda.set_stream(before)                      # a capture that breaks off may leave us on its own
        GRAPHS["device"] = None
        print(f"CUDA graphs are off, decoding goes on without: {str(e.__context__ or e).splitlines()[0]}", flush=True)      # the context: what broke the capture, before ending it failed, too
        return None
