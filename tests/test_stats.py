"""Every statistic against scipy, brute force or a case done by hand."""
import numpy as np
import pytest
import scipy.stats as sp

from stats import bootstrap, half_up, holm, mann_whitney, mean, paired_difference, ranks, spearman, wilson


def test_rounding_is_half_up():
    """Pitfall of the Sentient score: 61.25 is 61.3; Python's round and f-strings give 61.2."""
    assert [half_up(x) for x in (61.25, 61.35, 61.249, 0.05, 100, 54.45, None)] == ["61.3", "61.4", "61.2", "0.1", "100.0", "54.5", "-"]
    assert f"{61.25:.1f}" == "61.2" and half_up(2.5, 0) == "3"


def test_bootstrap_equals_a_brute_force_loop():
    """Same draws, resampled cluster by cluster with lists; unequal cluster sizes."""
    values, clusters = [10, 20, 30, 90, 80, 50, 55, 41], ["b", "b", "b", "a", "a", "c", "d", "d"]
    groups = {c: [v for v, k in zip(values, clusters) if k == c] for c in sorted(set(clusters))}
    names, means = list(groups), []
    for drawn in np.random.default_rng(3).integers(4, size=(500, 4)):
        pool = [v for i in drawn for v in groups[names[i]]]
        means.append(sum(pool) / len(pool))
    assert bootstrap(values, clusters, 500, 3) == pytest.approx(np.percentile(means, [2.5, 97.5]))
    assert bootstrap(values, clusters) == bootstrap(values, clusters)
    assert bootstrap([1, 2, 3], ["a"] * 3) == (None, None) == bootstrap([], [])


def test_interval_covers_the_truth_and_respects_clusters():
    """48 scenarios x 4 repeats with a scenario effect: about 95 % of intervals hold the true mean; resampling dialogues would not."""
    rng = np.random.default_rng(0)
    held, naive = 0, 0
    for i in range(200):
        values = (50 + rng.normal(0, 10, (48, 1)) + rng.normal(0, 5, (48, 4))).ravel()
        low, high = bootstrap(values, np.repeat(np.arange(48), 4), 1000, i)
        held += low < 50 < high
        low, high = bootstrap(values, np.arange(192), 1000, i)
        naive += low < 50 < high
    assert 0.89 <= held / 200 <= 0.99 and naive / 200 < 0.8


def test_paired_difference_is_within_scenarios():
    """A gain of 5 in each of scenarios that differ by 40: two intervals overlap widely, the paired one is a point. Only common scenarios count."""
    a = {f"s{i}": [40.0 + i, 42.0 + i] for i in range(40)}
    b = {name: [v + 5 for v in values] for name, values in a.items()}
    assert paired_difference(a, {**b, "other": [0]}) == {"n": 40, "difference": 5.0, "low": 5.0, "high": 5.0, "resolved": True}
    flat = lambda d: [v for values in d.values() for v in values]
    assert bootstrap(flat(a), [s for s in a for _ in "12"])[1] > bootstrap(flat(b), [s for s in b for _ in "12"])[0]
    unsure = paired_difference({"a": [1], "b": [5]}, {"a": [3, 5], "b": [2]})
    assert (unsure["difference"], unsure["low"], unsure["high"], unsure["resolved"]) == (0.0, -3.0, 3.0, False)
    assert paired_difference(a, {"s0": [1]}) == {"n": 1, "difference": None, "low": None, "high": None, "resolved": False}


def test_resolved_is_rarely_wrong_however_few_scenarios():
    """Gaps around 0, normal and skewed: about 5 % of the comparisons say "resolved", at no n much more; and the width is that of scipy's t quantile."""
    rng = np.random.default_rng(0)
    for n in (2, 3, 5, 6, 8, 10, 24):
        wrong = np.mean([paired_difference({i: [0] for i in range(n)}, {i: [x] for i, x in enumerate(rng.normal(size=n))}, 500)["resolved"] for _ in range(400)])
        assert wrong <= 0.085, (n, wrong)
        gaps = list(rng.normal(size=n))
        tail = 100 * sp.norm.cdf(-sp.t.ppf(0.975, n - 1) * np.sqrt(n / (n - 1)))
        means = np.array(gaps)[np.random.default_rng(0).integers(n, size=(4000, n))].mean(1)
        assert bootstrap(gaps, expanded=True) == pytest.approx(np.percentile(means, [tail, 100 - tail]), abs=0.02)


def test_wilson_is_scipys():
    for k, n in ((0, 60), (1, 60), (30, 60), (60, 60), (3, 7)):
        ours, theirs = wilson(k, n), sp.binomtest(k, n).proportion_ci(method="wilson")
        assert ours == pytest.approx((theirs.low, theirs.high), abs=1e-12)
    assert wilson(0, 0) == (None, None) and wilson(0, 5)[0] == 0.0 and wilson(5, 5)[1] == 1.0


def test_ranks_and_spearman_are_scipys():
    rng = np.random.default_rng(0)
    for n in (2, 3, 10, 57):
        x, y = rng.integers(0, 8, n), rng.normal(size=n).round(1)
        assert ranks(x).tolist() == sp.rankdata(x).tolist()
        if np.ptp(x) and np.ptp(y):
            assert spearman(x, y) == pytest.approx(sp.spearmanr(x, y).statistic)
    assert spearman([1, 1, 1], [1, 2, 3]) == 0.0 == spearman([4], [5]) == spearman([], [])
    assert ranks([3, 1, 3]).tolist() == [2.5, 1, 2.5]
    with pytest.raises(ValueError):
        spearman([1, 2], [1])


def test_mann_whitney_is_scipys():
    """With many ties and without; r by counting pairs."""
    rng = np.random.default_rng(1)
    for m, n, levels in ((8, 12, 5), (60, 60, 100), (30, 9, 2)):
        x, y = rng.integers(0, levels, m), rng.integers(0, levels, n) + 1
        theirs = sp.mannwhitneyu(x, y, alternative="two-sided", method="asymptotic", use_continuity=True)
        u, p, r = mann_whitney(x, y)
        assert u == theirs.statistic and p == pytest.approx(theirs.pvalue)
        assert r == pytest.approx(np.mean([np.sign(a - b) for a in x for b in y]))
    assert mann_whitney([5, 5], [5, 5, 5]) == (3.0, 1.0, 0.0) and mann_whitney([9] * 9, [1] * 9)[2] == 1.0
    with pytest.raises(ValueError):
        mann_whitney([], [1])


def test_holm_by_hand():
    """Four p values sorted .01 .02 .03 .04: times 4, 3, 2, 1, never falling; capped at 1, in the order given."""
    assert holm([0.04, 0.01, 0.03, 0.02]) == pytest.approx([0.06, 0.04, 0.06, 0.06])
    assert holm([0.6, 0.9]) == [1.0, 1.0] and holm([]) == [] and mean([]) is None
