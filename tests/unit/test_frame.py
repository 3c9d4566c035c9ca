"""Results as a table of pandas."""

from __future__ import annotations

from pathlib import Path

import pytest
from tests.small_runs import small_run

from edgegossip.contract.errors import UsageError
from edgegossip.runs.runner import run


def test_a_frame_has_a_row_for_each_evaluation(tmp_path: Path) -> None:
    pytest.importorskip("pandas", reason="needs pip install 'edgegossip[pandas]'")
    results = run(small_run("gosgd"), out=tmp_path, num_threads=0)
    frame = results.frame()
    assert [*frame.columns] == [*results.history[0].line()]
    assert frame["accuracy"].tolist() == [each.accuracy for each in results.history]
    assert frame["samples_processed"].tolist() == sorted(frame["samples_processed"])
    assert frame["bytes_sent"].dtype.kind == "i"


def test_without_pandas_a_line_says_what_to_install(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    results = run(small_run("gosgd"), out=tmp_path, num_threads=0)
    monkeypatch.setattr("importlib.util.find_spec", lambda *_: None)
    with pytest.raises(UsageError, match=r"Results.frame needs .*'edgegossip\[pandas\]'"):
        results.frame()
