"""
The statistics of every table: intervals, paired differences, ranks. numpy and plain numbers, no model, no text.

Dialogues of one scenario are alike, so whatever is resampled is the scenario, never the dialogue. Two models played on
the same scenarios are compared within scenarios, which is far sharper than two intervals side by side. Left out on
purpose: significance stars, and any number without its n.
"""
import math
from decimal import ROUND_HALF_UP, Decimal

import numpy as np


def half_up(x, digits=1):
    """Rounded half up, as text: half_up(61.25) == "61.3" (Python's own rounding gives 61.2). None -> "-"."""
    return "-" if x is None else str(Decimal(str(float(x))).quantize(Decimal(1).scaleb(-digits), ROUND_HALF_UP))


def mean(values):
    """Mean of a list, None of an empty one."""
    return sum(values) / len(values) if values else None   # ints are summed exactly, so that 61.25 is 61.25


def bootstrap(values, clusters=None, resamples=4000, seed=0, expanded=False):
    """95 % percentile interval (low, high) of the mean of `values`, resampling whole clusters with replacement (each value its own where None).
    expanded: wider by what a t interval is wider than a normal one, for few clusters (Hesterberg 2015; at 10 clusters 22 %, at 48 4 %).

    Repeats of one scenario are alike: resampling dialogues would give an interval that is far too narrow. A resample's
    mean is sum / count of what it drew. With fewer than two clusters nothing can be said: (None, None).
    """
    names, index = np.unique(np.arange(len(values)) if clusters is None else clusters, return_inverse=True)
    if len(names) < 2:
        return None, None
    sums, counts = np.bincount(index, np.asarray(values, float)), np.bincount(index)                  # (S,), (S,)
    drawn = np.random.default_rng(seed).integers(len(names), size=(resamples, len(names)))            # (R, S)
    tail = 2.5
    if expanded:
        z, v = 1.959963984540054, len(names) - 1
        t = {1: 12.706, 2: 4.303}.get(v) or z + (z**3 + z) / (4 * v) + (5 * z**5 + 16 * z**3 + 3 * z) / (96 * v * v) + (3 * z**7 + 19 * z**5 + 17 * z**3 - 15 * z) / (384 * v**3)
        tail = 50 * math.erfc(t * math.sqrt((v + 1) / v) / math.sqrt(2))
    low, high = np.percentile(sums[drawn].sum(1) / counts[drawn].sum(1), [tail, 100 - tail])
    return float(low), float(high)


def paired_difference(a, b, resamples=4000, seed=0):
    """How much higher b is than a on the scenarios both were played on. a, b: scenario -> list of values (repeats).

    -> {"n": scenarios in common, "difference": mean over them of (mean of b - mean of a), "low", "high": its 95 % interval, scenarios resampled (expanded),
    "resolved": whether that leaves out 0}. With fewer than two in common: numbers None. Fewer than six resolve nothing: five differences of one sign happen by chance in 6 %.
    """
    common = sorted(a.keys() & b.keys())
    gaps = [float(np.mean(b[s]) - np.mean(a[s])) for s in common]
    low, high = bootstrap(gaps, None, resamples, seed, expanded=True)
    known = low is not None
    return {"n": len(common), "difference": float(np.mean(gaps)) if known else None, "low": low, "high": high, "resolved": known and len(gaps) >= 6 and not low <= 0 <= high}


def wilson(k, n):
    """95 % Wilson score interval (low, high) of a share, k of n, as fractions; unlike mean +- 1.96 SE it is honest at 0 of n. (None, None) of n = 0."""
    if not n:
        return None, None
    z, p = 1.959963984540054, k / n
    middle, half = (p + z * z / (2 * n)) / (1 + z * z / n), z / (1 + z * z / n) * math.sqrt(p * (1 - p) / n + z * z / (4 * n * n))
    return (max(0.0, middle - half) if k else 0.0), (min(1.0, middle + half) if k < n else 1.0)


def ranks(values):
    """Ranks from 1, ties sharing their mean: ranks([3, 1, 3]) == [2.5, 1, 2.5]."""
    values, order = np.asarray(values, float), np.argsort(values, kind="stable")
    _, first, group, count = np.unique(values[order], return_index=True, return_inverse=True, return_counts=True)
    out = np.empty(len(values))
    out[order] = (first + (count + 1) / 2)[group]
    return out


def spearman(x, y):
    """Rank correlation in [-1, 1]; 0 where a series is constant or shorter than two, since it then orders nothing."""
    if len(x) != len(y):
        raise ValueError(f"{len(x)} values against {len(y)}")
    if len(x) < 2 or np.ptp(x) == 0 or np.ptp(y) == 0:
        return 0.0
    return float(np.corrcoef(ranks(x), ranks(y))[0, 1])


def mann_whitney(x, y):
    """Do values of x tend to be above those of y? -> (U of x, two-sided p, rank-biserial r = 2 U / (n1 n2) - 1 in [-1, 1], 1: every x above every y).

    p by the normal approximation, variance corrected for ties, with continuity correction (from about 8 values a side it is good). It
    treats values as independent: give one per scenario. ValueError where a side is empty.
    """
    m, n = len(x), len(y)
    if not m or not n:
        raise ValueError("nothing to compare: one side has no values")
    both = ranks([*x, *y])
    u, (_, ties) = float(both[:m].sum() - m * (m + 1) / 2), np.unique(both, return_counts=True)
    variance = m * n / 12 * (m + n + 1 - float((ties.astype(float) ** 3 - ties).sum()) / ((m + n) * (m + n - 1)))
    z = max(0.0, abs(u - m * n / 2) - 0.5) / math.sqrt(variance) if variance > 0 else 0.0
    return u, min(1.0, math.erfc(z / math.sqrt(2))), 2 * u / (m * n) - 1


def holm(p):
    """p values adjusted for having made several tests (Holm 1979), in the order given: compare each with .05."""
    out, worst = [0.0] * len(p), 0.0
    for k, i in enumerate(sorted(range(len(p)), key=lambda i: p[i])):
        worst = max(worst, min(1.0, (len(p) - k) * p[i]))
        out[i] = worst
    return out
