"""Our kernels against obvious code, and against the libraries that they replace."""

import dataclasses
import math

import numpy as np
import pytest

from eagleeye.detectors import knn_dtw, lof, matrix_profile, peers
from eagleeye.window import Window


def naive_dtw(a, b, band):
    """The textbook recursion over a full table."""
    cost = {(-1, -1): 0.0}
    for i in range(len(a)):
        for j in range(len(b)):
            if abs(i - j) <= band:
                before = min(cost.get((i - 1, j), math.inf), cost.get((i, j - 1), math.inf), cost.get((i - 1, j - 1), math.inf))
                cost[i, j] = (a[i] - b[j]) ** 2 + before
    return math.sqrt(cost[len(a) - 1, len(b) - 1])


def naive_left_profile(series, m, k):
    """Sort the distances to all earlier stretches that do not overlap the last one."""
    query = series[len(series) - m :]
    distances = sorted(float(np.linalg.norm(series[i : i + m] - query)) for i in range(len(series) - 2 * m + 1))
    return distances[k - 1]


@pytest.fixture
def values_RMT():
    return np.random.default_rng(3).normal(0, 2, (5, 3, 40)).astype(np.float32)


@pytest.mark.parametrize("band", [0, 2, 5])
def test_distances_equal_the_textbook_recursion(values_RMT, band):
    found_RRM = knn_dtw.distances_RRM(values_RMT[:, :, :12], ("g",) * 5, band)
    for i in range(5):
        for j in range(5):
            for m in range(3):
                if i != j:
                    a, b = values_RMT[i, m, :12].astype(float), values_RMT[j, m, :12].astype(float)
                    assert found_RRM[i, j, m] == pytest.approx(naive_dtw(a, b, band), rel=1e-12)


def test_ranks_of_other_groups_are_infinitely_far(values_RMT):
    found_RRM = knn_dtw.distances_RRM(values_RMT, ("a", "a", "b", "b", "b"), 2)
    assert np.isinf(found_RRM[0, 2]).all()
    assert np.isfinite(found_RRM[0, 1]).all()
    assert np.isfinite(found_RRM[2, 4]).all()


def test_a_rank_of_nan_is_infinitely_far(values_RMT):
    values_RMT[1, 2, 5] = np.nan
    found_RRM = knn_dtw.distances_RRM(values_RMT, ("g",) * 5, 2)
    assert np.isinf(found_RRM[1, :, 2]).all()
    assert np.isfinite(found_RRM[1, 0, 1])
    assert np.isfinite(found_RRM[0, 2]).all()


def window_of(values_RMT, nodes, groups):
    R, M, _ = values_RMT.shape
    return Window("j", tuple(range(R)), tuple(nodes), tuple(groups), tuple(f"m{m}" for m in range(M)), 1e9, 5.0, values_RMT)


def naive_neighbour(values_RMT, nodes, groups, r, m, neighbours=3, band=2):
    """All distances of one rank, sorted: the k-th decides; ranks elsewhere alone if there are two."""
    same = [i for i in range(len(nodes)) if groups[i] == groups[r]]
    elsewhere = [i for i in same if nodes[i] != nodes[r]]
    chosen = elsewhere if len(elsewhere) >= 2 else [i for i in same if i != r]
    if len(same) < 3 or np.isnan(values_RMT[r, m]).any():
        return math.nan
    series = values_RMT.astype(float)
    known = [i for i in chosen if not np.isnan(series[i, m]).any()]
    distances = sorted(naive_dtw(series[r, m], series[i, m], band) for i in known)
    k = min(neighbours, (len(chosen) + 1) // 2)
    return distances[k - 1] if k <= len(distances) else math.nan


@pytest.mark.parametrize("seed", range(12))
def test_the_nearest_neighbour_equals_sorted_distances(seed):
    """Groups, nodes and gaps drawn at random: one node alone, small groups, ranks that are missing."""
    rng = np.random.default_rng(seed)
    R = int(rng.integers(3, 20))
    values_RMT = rng.normal(0, 1, (R, 2, 12)).astype(np.float32)
    values_RMT[rng.random((R, 2)) < 0.15, 4] = np.nan
    nodes = [f"n{i}" for i in rng.integers(0, rng.integers(1, R + 1), R)]
    groups = list(rng.choice(["a", "b", "c"][: seed % 3 + 1], R))
    found_RM = knn_dtw.KnnDtw().neighbour_RM(window_of(values_RMT, nodes, groups))
    expected = [[naive_neighbour(values_RMT, nodes, groups, r, m) for m in range(2)] for r in range(R)]
    np.testing.assert_allclose(found_RM, expected, rtol=1e-12)


@pytest.mark.parametrize("R", [63, 64, 65, 130])
def test_blocks_of_ranks_have_no_seams(R):
    values_RMT = np.random.default_rng(R).normal(0, 1, (R, 1, 12)).astype(np.float32)
    found_RM = knn_dtw.KnnDtw().neighbour_RM(window_of(values_RMT, [f"n{r}" for r in range(R)], [""] * R))
    distances_RRM = knn_dtw.distances_RRM(values_RMT, ("",) * R, 2)
    np.testing.assert_array_equal(found_RM, np.sort(distances_RRM, axis=1)[:, 2])


def references(window, neighbours=3):
    (group,) = knn_dtw.comparisons(window.ranks, window.nodes, window.groups, neighbours)
    return group.references_N


def large(R=knn_dtw.EXACT_RANKS + 8, per_node=4):
    values_RMT = np.random.default_rng(1).normal(0, 1, (R, 2, 12)).astype(np.float32)
    return window_of(values_RMT, [f"n{r // per_node}" for r in range(R)], [""] * R)


def test_a_small_group_is_compared_each_with_each():
    R = knn_dtw.EXACT_RANKS
    np.testing.assert_array_equal(references(large(R)), np.arange(R))


def test_references_of_a_large_group_are_spread_over_nodes():
    window = large()
    chosen = references(window)
    assert len(chosen) == len({window.nodes[i] for i in chosen}) == knn_dtw.REFERENCES
    few_nodes = dataclasses.replace(window, nodes=tuple(f"n{r % 3}" for r in window.ranks))
    per_node = np.bincount([int(few_nodes.nodes[i][1:]) for i in references(few_nodes)])
    assert sorted(per_node) == [42, 43, 43]


def test_references_do_not_depend_on_the_order_of_ranks():
    window = large()
    order = np.random.default_rng(2).permutation(len(window.ranks))
    ranks, node_R = np.array(window.ranks), peers.numbered(window.nodes)
    plain = peers.spread_over_nodes(window.ranks, node_R, 100)
    other = peers.spread_over_nodes(ranks[order], node_R[order], 100)
    assert set(ranks[order][other]) == set(ranks[plain])


def test_sick_references_do_not_make_healthy_ranks_look_sick():
    window = large()
    healthy_RM = knn_dtw.KnnDtw().neighbour_RM(window)
    sick = references(window)[:60]
    values_RMT = window.values_RMT.copy()
    values_RMT[sick] += 50 * (1 + np.arange(60)[:, None, None])
    found_RM = knn_dtw.KnnDtw().neighbour_RM(dataclasses.replace(window, values_RMT=values_RMT))
    others = np.setdiff1d(np.arange(len(window.ranks)), sick)
    assert found_RM[others].max() < 2 * healthy_RM.max()
    assert found_RM[sick].min() > 5 * healthy_RM.max()


@pytest.mark.parametrize(("m", "k"), [(6, 1), (6, 3), (4, 7)])
def test_left_profile_equals_sorted_distances(values_RMT, m, k):
    found_RM = matrix_profile.left_profile_RM(values_RMT, m, k)
    expected = [[naive_left_profile(values_RMT[r, c].astype(float), m, k) for c in range(3)] for r in range(5)]
    np.testing.assert_allclose(found_RM, expected, rtol=1e-12)


def test_left_profile_of_a_gap_is_unknown(values_RMT):
    values_RMT[2, 1, 0] = np.nan
    found_RM = matrix_profile.left_profile_RM(values_RMT, 6, 3)
    assert np.isnan(found_RM[2, 1])
    assert np.isfinite(np.delete(found_RM.ravel(), 2 * 3 + 1)).all()


def test_a_level_shift_and_a_constant_stretch_are_seen():
    """Which a z-normalised profile sees neither of: one equals any other constant, the other any stretch at another level."""
    values_RMT = np.zeros((3, 1, 40), dtype=np.float32)
    values_RMT[1, 0, -6:] = 2.0
    values_RMT[2, 0, :-6] = np.sin(np.arange(34))
    found_R = matrix_profile.left_profile_RM(values_RMT, 6, 3)[:, 0]
    assert found_R[0] == 0.0
    assert found_R[1] == pytest.approx(2.0 * math.sqrt(6))
    assert found_R[2] > 1.0


def test_a_series_too_short_for_k_neighbours_is_unknown(values_RMT):
    assert np.isnan(matrix_profile.left_profile_RM(values_RMT[:, :, :13], 6, 3)).all()
    assert np.isfinite(matrix_profile.left_profile_RM(values_RMT[:, :, :14], 6, 3)).all()


def test_lof_of_the_textbook():
    """Breunig's definition by sorting, vector by vector."""
    rng = np.random.default_rng(5)
    known_NF, query_QF, k = rng.normal(0, 1, (40, 3)), rng.normal(0, 3, (10, 3)), 5

    def nearest(vector, leave_out=-1):
        distances = np.linalg.norm(known_NF - vector, axis=1)
        order = [n for n in np.argsort(distances) if n != leave_out][:k]
        return order, distances[order]

    reach_N = [nearest(v, n)[1][-1] for n, v in enumerate(known_NF)]

    def density(vector, leave_out=-1):
        order, distances = nearest(vector, leave_out)
        return 1 / (np.mean([max(d, reach_N[n]) for n, d in zip(order, distances, strict=True)]) + 1e-10)

    density_N = np.array([density(v, n) for n, v in enumerate(known_NF)])
    expected = [density_N[nearest(q)[0]].mean() / density(q) for q in query_QF]
    np.testing.assert_allclose(lof.Known(known_NF, k).factor_Q(query_QF), expected, rtol=1e-12)


def test_lof_of_equal_vectors_is_finite():
    known = lof.Known(np.zeros((30, 2)), 20)
    assert np.isfinite(known.factor_Q(np.array([[0.0, 0.0], [5.0, 0.0]]))).all()


@pytest.mark.jit
@pytest.mark.parametrize(("N", "F"), [(1000, 1), (1000, 8), (30, 3), (7, 2)])
def test_lof_equals_scikit_learn(N, F):
    rng = np.random.default_rng(N + F)
    assert lof.check_kernel(rng.normal(0, 1, (N, F)), rng.normal(0, 2, (300, F)), 20) < 1e-9


@pytest.mark.jit
@pytest.mark.slow
def test_the_nearest_neighbour_equals_all_pairs_of_tslearn():
    from tslearn.metrics import cdist_dtw

    values_RMT = np.random.default_rng(7).normal(0, 1, (70, 2, 12)).astype(np.float32)
    found_RM = knn_dtw.KnnDtw().neighbour_RM(window_of(values_RMT, [f"n{r}" for r in range(70)], [""] * 70))
    for m in range(2):
        series = values_RMT[:, m, :, None].astype(float)
        pairs_RR = cdist_dtw(series, global_constraint="sakoe_chiba", sakoe_chiba_radius=2)
        np.testing.assert_allclose(found_RM[:, m], np.sort(pairs_RR, axis=1)[:, 3], rtol=1e-12)


@pytest.mark.jit
@pytest.mark.slow
def test_dtw_equals_tslearn(values_RMT):
    assert knn_dtw.check_kernel(values_RMT[:, :, :12], 2) < 1e-12


@pytest.mark.jit
@pytest.mark.slow
def test_left_profile_equals_stumpy(values_RMT):
    assert matrix_profile.check_kernel(values_RMT, 6, 3) < 1e-7
