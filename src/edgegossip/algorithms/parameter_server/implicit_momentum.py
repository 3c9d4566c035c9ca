"""Implicit momentum: the momentum that asynchrony adds."""

from __future__ import annotations

from collections.abc import Sequence


def implicit_momentum(steps_per_commit: Sequence[float]) -> float:
    r"""Compute the implicit momentum of workers that commit without waiting.

    .. math::
        \mu = 1 - p, \qquad
        p = \frac{1}{1 + (1 - \frac1m) \sum_{i=1}^{m} \frac{\Gamma}{\Delta C_i\, v_i}}

    Fewer commits mean more implicit momentum, and explicit momentum adds to it. The paper calls
    :math:`v_i` a speed; here it is the duration of a step, so the fraction has no unit: it is
    the number of steps between two commits. With one step per commit, the result is the
    :math:`1 - 1/m` of asynchronous SGD.

    Args:
        steps_per_commit: :math:`\Gamma / (\Delta C_i\, v_i)` of each worker, above 0.

    References:
        Hu, Wang & Wu, AAAI 2020, arXiv:1911.06949, Theorem 1. For the limit: Mitliagkas,
        Zhang, Hadjis & Re, "Asynchrony begets momentum", 2016, arXiv:1605.09774.

    >>> implicit_momentum([1.0, 1.0, 1.0, 1.0])
    0.75
    >>> implicit_momentum([20.0])
    0.0
    """
    m = len(steps_per_commit)
    return 1 - 1 / (1 + (1 - 1 / m) * sum(steps_per_commit))
