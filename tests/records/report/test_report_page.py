"""The HTML page about runs: complete, escaped, and without anything from outside."""

import re
from pathlib import Path

import pytest

from launch import report
from megatron_rl.contracts.exit_codes import ExitCode
from megatron_rl.contracts.group import Verdict
from megatron_rl.records.report.charts import COLOURS, DARK_COLOURS, Line, line_chart
from megatron_rl.records.report.page import render_page
from megatron_rl.records.report.past_run import read_run, read_runs
from megatron_rl.records.report.sections import sections_of
from megatron_rl.records.samples.files import samples_file
from megatron_rl.records.samples.sample import SampleKind
from megatron_rl.records.samples.writer import write_samples
from tests.support.past_runs import write_run
from tests.support.samples import make_sample

OUTSIDE = re.compile(r"""(?:src|href)=["'](?!data:|#)|@import|url\((?!#|["']?data:)|<script""")


def run_in(tmp_path: Path, name: str, **values: object) -> Path:
    overrides = ["experiment=smoke", f"run.root={tmp_path}", f"run.name={name}"]
    return write_run(overrides, **values)  # type: ignore[arg-type]


@pytest.mark.slow
def test_the_page_holds_its_runs_and_needs_nothing_from_outside(tmp_path: Path) -> None:
    runs = [
        run_in(tmp_path, "first", accuracies=(0.25, 0.5, 0.75)),
        run_in(tmp_path, "second", accuracies=(0.25, 0.375), clipped_share=0.5),
        run_in(tmp_path, "third", code=4),
    ]
    page = render_page(read_runs(runs))
    assert not OUTSIDE.search(page)
    assert all(name in page for name in ("first", "second", "third"))
    assert "0.250 ± 0.125 → 0.750 ± 0.125" in page and "0.750 (step 2)" in page
    assert "ended with code 4: an engine died" in page
    assert len(page) < 5e6


@pytest.mark.slow
def test_every_figure_draws_something(tmp_path: Path) -> None:
    run = read_run(run_in(tmp_path, "one", accuracies=(0.25, 0.5, 0.75)), "one")
    charts = [chart for section in sections_of([run]) for chart in section.charts]
    assert {"Accuracy by step", "Accuracy by sampled tokens", "Seconds of a step"} <= {
        chart.title for chart in charts
    }
    for chart in charts:
        assert chart.svg.count("<path") > 3, chart.title
        assert "currentColor" in chart.svg and "#123456" not in chart.svg


@pytest.mark.slow
def test_identifiers_of_figures_are_unique_on_the_page(tmp_path: Path) -> None:
    runs = [run_in(tmp_path, name, accuracies=(0.25, 0.5, 0.75)) for name in ("first", "second")]
    identifiers = re.findall(r' id="([^"]+)"', render_page(read_runs(runs)))
    assert len(identifiers) > 50
    assert len(set(identifiers)) == len(identifiers)


@pytest.mark.slow
def test_text_of_settings_and_reasons_is_escaped(tmp_path: Path) -> None:
    directory = run_in(tmp_path, "one", code=None)
    (directory / "exit.json").write_text(
        '{"code": 2, "reason": "<script>alert(1)</script>", "ended": "now"}'
    )
    page = render_page([read_run(directory, "<b>one</b>")])
    assert "<script" not in page and "<b>" not in page
    assert "&lt;script&gt;" in page and "&lt;b&gt;one" in page


@pytest.mark.parametrize(("code", "status"), [(0, "complete"), (4, "failed"), (None, "killed")])
def test_the_state_of_a_run_follows_from_its_exit_record(
    tmp_path: Path, code: int | None, status: str
) -> None:
    assert read_run(run_in(tmp_path, "one", code=code), "one").status == status


@pytest.mark.slow
def test_runs_of_the_same_name_have_their_paths_as_names(tmp_path: Path) -> None:
    runs = read_runs([run_in(tmp_path / folder, "one") for folder in ("a", "b")])
    assert len({run.name for run in runs}) == 2


def test_a_run_without_a_step_has_a_page(tmp_path: Path) -> None:
    page = render_page([read_run(run_in(tmp_path, "one", accuracies=()), "one")])
    assert "No run has a complete step" in page


@pytest.mark.slow
def test_samples_are_shown_with_their_numbers_and_escaped(tmp_path: Path) -> None:
    directory = run_in(tmp_path, "one")
    sample = make_sample("<i>4\x1b[31m2", prompt="<u>17+25=")
    write_samples(samples_file(directory, 10), [sample], 2**20)
    page = render_page([read_run(directory, "one")])
    assert "&lt;u&gt;17+25=" in page and "<u>" not in page and "<i>" not in page
    assert "\x1b" not in page
    assert "clip-high" in page and "entropy 0.5" in page and "advantage +0.500" in page


@pytest.mark.slow
def test_responses_to_one_question_are_below_it(tmp_path: Path) -> None:
    """With a word and a colour for each verdict; prompts with a sample kept for a reason first."""
    directory = run_in(tmp_path, "one")
    other = make_sample("4", group=0, prompt_id="q1", prompt="1+2=", expected_answer="3")
    incorrect = Verdict(reward=0.0, correctness=0.0)
    unknown = Verdict(reward=None, correctness=None, reason="no answer")
    samples = [
        other,
        make_sample("42", kinds=(SampleKind.LONGEST,)),
        make_sample("43", sample_index=1, verdict=incorrect),
        make_sample("44", sample_index=2, verdict=Verdict(reward=0.5, correctness=0.5)),
        make_sample("45", sample_index=3, verdict=unknown),
    ]
    write_samples(samples_file(directory, 10), samples, 2**20)
    page = render_page([read_run(directory, "one")])
    assert page.count("17+25=") == page.count("expected: 42") == 1
    assert page.index("17+25=") < page.index("1+2=")
    badges = re.findall(r'class="badge (\w+)">([^<]+)<', page)
    assert badges == [
        ("good", "correct"),
        ("bad", "incorrect"),
        ("partial", "correctness 0.5"),
        ("partial", "no reward"),
        ("good", "correct"),
    ]


@pytest.mark.slow
def test_colours_of_charts_can_be_seen_on_both_backgrounds(tmp_path: Path) -> None:
    page = render_page([read_run(run_in(tmp_path, "one"), "one")])
    body = page[page.index("<body>") :]
    assert "var(--chart-0)" in body and not any(colour in body for colour in COLOURS)
    assert all(colour in page for colour in (*COLOURS, *DARK_COLOURS))
    assert len(set(DARK_COLOURS)) == len(set(COLOURS)) == len(COLOURS)
    for colour in DARK_COLOURS:
        assert contrast(colour, "#1b212a") > 4.5, colour


def contrast(one: str, other: str) -> float:
    """Return the contrast ratio of two colours, as WCAG 2 defines it."""

    def luminance(colour: str) -> float:
        values = [int(colour[place : place + 2], 16) / 255 for place in (1, 3, 5)]
        red, green, blue = (
            v / 12.92 if v <= 0.04045 else ((v + 0.055) / 1.055) ** 2.4 for v in values
        )
        return 0.2126 * red + 0.7152 * green + 0.0722 * blue

    low, high = sorted((luminance(one), luminance(other)))
    return (high + 0.05) / (low + 0.05)


def texts(svg: str) -> list[str]:
    return re.findall(r"<text[^>]*>([^<]*)</text>", svg)


@pytest.mark.slow
def test_an_axis_of_rounding_or_of_zeros_does_not_zoom_in() -> None:
    rounding = line_chart("t", [Line("a", [1, 2, 3], [7.3e-8, 7.7e-8, 7.4e-8])], from_zero=True)
    assert "0" in texts(rounding.svg)
    zeros = line_chart("t", [Line("a", [1, 2], [0.0, 0.0])])
    assert [text for text in texts(zeros.svg) if text not in ("1", "2", "step")] == ["0"]


@pytest.mark.slow
def test_parts_of_a_step_have_words_and_colours_of_their_own(tmp_path: Path) -> None:
    directory = run_in(tmp_path, "one", accuracies=(0.25, 0.5, 0.75))
    file = directory / "metrics.jsonl"
    parts = '"time/old_policy": 1.0, "time/exchange": 1.0, "time/step"'
    file.write_text(file.read_text().replace('"time/step"', parts))
    sections = sections_of([read_run(directory, "one")])
    charts = {chart.title: chart for section in sections for chart in section.charts}
    words = texts(charts["Seconds by part of one"].svg)
    assert "old policy" in words and "old_policy" not in words
    assert "exchange" not in words and "other" in words


@pytest.mark.slow
def test_damaged_samples_cost_only_the_samples(tmp_path: Path) -> None:
    directory = run_in(tmp_path, "one")
    file = samples_file(directory, 1)
    file.parent.mkdir()
    file.write_bytes(b"damaged")
    page = render_page([read_run(directory, "one")])
    assert "cannot be read" in page and "Accuracy by step" in page


@pytest.mark.slow
def test_the_command_writes_the_page_into_the_run(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    first = run_in(tmp_path, "first")
    second = run_in(tmp_path, "second")
    assert report.main([str(first)]) == ExitCode.OK
    assert capsys.readouterr().out == f"{first / 'report.html'}\n"
    assert report.main([str(first), str(second)]) == ExitCode.OK
    assert "second" in (tmp_path / "report.html").read_text()
    out = tmp_path / "other.html"
    assert report.main([str(first), "--out", str(out)]) == ExitCode.OK
    assert out.read_text().startswith("<!doctype html>")


def test_a_directory_that_is_no_run_is_refused(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert report.main([str(tmp_path)]) == ExitCode.REFUSED
    assert "metrics.jsonl" in capsys.readouterr().err
    assert not (tmp_path / "report.html").exists()


def test_a_name_with_dollar_signs_is_no_formula() -> None:
    chart = line_chart("t", [Line("a", [1], [1]), Line("b$x_$", [1], [1])])
    assert "b$x_$" in chart.svg
