"""How well an anomaly score of one series ranks its labelled points: volume under the precision-recall surface. Pure.

No threshold is chosen, and no point adjustment: a score is paid for the points that it marks, with a tolerance that is itself
integrated over.
"""

import numpy as np
from numpy.typing import ArrayLike, NDArray


def vus_pr(score_T: ArrayLike, label_T: ArrayLike, max_buffer: int) -> float:
    """Return VUS-PR, between 0 and 1; a score without any information reaches about the share of labelled points.

    Parameters
    ----------
    score_T : (T,) finite, higher = more anomalous; only its order counts
    label_T : (T,) 1 or True within anomalies
    max_buffer : largest buffer length in samples; half of it lies on either side of an anomaly. 0 leaves the area under the
        range-aware precision-recall curve of the labels as they are

    Raises
    ------
    ValueError
        Shapes differ, a score is not finite, or nothing is labelled (there is no recall of nothing).

    Source: Paparrizos et al., PVLDB 15(11), 2022 (10.14778/3551793.3551830): continuous labels, positives as the mean of both
    labels, recall with the existence reward, trapezoids over buffer lengths. *Differs*: steps instead of trapezoids over
    thresholds, as a line between two points of a precision-recall curve promises what no threshold gives (Davis and Goadrich,
    10.1145/1143844.1143874) and would reward scores of few values; every distinct score is a threshold (the definition leaves
    their choice open); recall is at most 1; an anomaly exists when its buffer is touched.
    """
    score, label = np.asarray(score_T, dtype=np.float64), np.asarray(label_T).astype(bool)
    if score.ndim != 1 or score.shape != label.shape:
        raise ValueError(f"scores of shape {score.shape} do not fit labels of shape {label.shape}")
    if not np.isfinite(score).all():
        raise ValueError("a score is not finite; leave such points out or give them the lowest score")
    if not label.any():
        raise ValueError("nothing is labelled, so there is no recall")
    if max_buffer < 0:
        raise ValueError(f"max_buffer must not be negative, not {max_buffer}")
    order = np.argsort(-score, kind="stable")
    # the last of equal scores stands for the threshold
    last_K = np.flatnonzero(np.diff(score[order], append=-np.inf))
    areas_L = [_area(order, last_K, label, _softened(label, buffer), buffer // 2) for buffer in range(max_buffer + 1)]
    if max_buffer == 0:
        return areas_L[0]
    return float(np.trapezoid(areas_L) / max_buffer)


def _softened(label_T: NDArray[np.bool_], buffer: int) -> NDArray[np.float64]:
    """Return (T,) the continuous label: 1 within anomalies, beside them the root of the share of the buffer that is left."""
    soft_T = label_T.astype(np.float64)
    for distance in range(1, min(buffer // 2, len(label_T) - 1) + 1):
        value = np.sqrt(1 - distance / buffer)
        soft_T[distance:] = np.maximum(soft_T[distance:], value * label_T[:-distance])
        soft_T[:-distance] = np.maximum(soft_T[:-distance], value * label_T[distance:])
    return soft_T


def _area(
    order: NDArray[np.int64], last_K: NDArray[np.int64], label_T: NDArray[np.bool_], soft_T: NDArray[np.float64], half: int
) -> float:
    """Return the area under precision over recall; `order` sorts by falling score, `last_K` are its places of the thresholds."""
    hits_K = np.cumsum(soft_T[order])[last_K]
    positives = (label_T.sum() + soft_T.sum()) / 2
    place_T = np.empty_like(order)
    place_T[order] = np.arange(order.size)
    edges = np.flatnonzero(np.diff(label_T, prepend=False, append=False)).reshape(-1, 2)
    # an anomaly exists from the threshold on at which one of its points, those of its buffer included, is marked
    first_A = np.sort([place_T[max(0, start - half) : end + half].min() for start, end in edges])
    existing_K = np.searchsorted(first_A, last_K, side="right") / len(edges)
    recall_K = np.minimum(hits_K / positives, 1.0) * existing_K
    precision_K = hits_K / (last_K + 1)
    return float(np.sum(precision_K * np.diff(recall_K, prepend=0.0)))
