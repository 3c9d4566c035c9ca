"""Messages that all workers of a server get, and those that they refuse."""

from __future__ import annotations

import math
from typing import Any

import pytest

from edgegossip.algorithms.parameter_server.bsp import BSP


@pytest.mark.parametrize(
    "wrong", [{"rate_ratio": 0.0}, {"rate_ratio": math.inf}, {"resend_after": 0.0}]
)
def test_a_wrong_setting_is_refused(wrong: dict[str, Any]) -> None:
    with pytest.raises(ValueError, match="must be above 0"):
        BSP(num_workers=3, num_rounds=2, **wrong)
