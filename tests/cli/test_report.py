from __future__ import annotations

from pathlib import Path

from tests.analysis.samples import make_run


def test_a_run_by_path_or_name_becomes_a_page(autockpt, tmp_path: Path) -> None:
    run = make_run(tmp_path / "results")
    result = autockpt("report", run.path.name)
    assert result.code == 0 and (run.path / "report.html").exists(), result.err
    assert result.out.strip().endswith("report.html")
    elsewhere = tmp_path / "page.html"
    assert autockpt("report", str(run.path), "--report-out", str(elsewhere)).code == 0
    assert elsewhere.read_text().startswith("<!doctype html>")


def test_what_is_no_run_is_an_error(autockpt, tmp_path: Path) -> None:
    (tmp_path / "other").mkdir()
    for given in ("nothing", "other"):
        result = autockpt("report", given)
        assert result.code == 2 and "autockpt search" in result.err and not result.out
