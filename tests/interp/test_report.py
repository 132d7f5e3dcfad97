"""The page: what it says, what it escapes, and the example token by token."""

import json
import re
import shutil

import pandas as pd
import pytest
from matplotlib.figure import Figure

from interp import knockout_report, logit_lens_report, patching_summary, report
from interp.figures import save
from interp.report import control_rows, example, figure, left_out_rows, typeset, write_page
from interp.report_texts import SECTIONS, FigureText
from interp.verdict import decide
from tests.interp.synthetic import planted_frame

CHROMIUM = [
    "--no-sandbox", "--disable-gpu", "--disable-background-networking", "--disable-component-update",
    "--disable-sync", "--no-first-run",
]  # fmt: skip
RUN = {
    "analysis": "patching", "command": "python -m interp.patching --adapter ckpt/<b>",
    "finished": "2026-01-02T03:04:05",
    "adapter": {"name": "planted", "sha256": "a" * 64}, "base": {"name": "tiny & base", "sha256": "b" * 64},
    "device": "cpu", "dtype": "float32", "load_in_4bit": False, "threads": 2, "seed": 0, "wall_seconds": 12.3,
    "peak_memory_bytes": 2e9, "git": {"revision": "c" * 40, "modified": True}, "python": "3.11",
    "versions": {"torch": "2"},
    "pairs": {"source": "generated", "used": 24, "used_sha256": "d" * 64, "groups": 12, "left_out": []},
}  # fmt: skip


@pytest.fixture
def folder(tmp_path):
    """An adapter's folder with a planted patching result only, whose names try to be markup."""
    folder = tmp_path / "planted"
    (folder / "patching").mkdir(parents=True)
    frame = planted_frame(effects={"base": 0.0, "trained": -6.0}, flips={"value": 14.0, "decision": 18.0}, noise=0.1)
    summary = patching_summary.summarise(frame)
    summary |= {"left_out": [{"id": "p", "reason": "<script>alert(1)</script>"}] * 3}
    report.write_json(folder / "patching" / "summary.json", summary)
    report.write_json(folder / "patching" / "run.json", RUN)
    save(Figure(figsize=(3.4, 1)), folder / "patching" / "patching")
    report.write_json(folder / "verdict.json", decide({"patching": summary}, None).to_json())
    return folder


def test_the_page_says_what_the_files_say(folder):
    page = write_page(folder).read_text()
    verdict = json.loads((folder / "verdict.json").read_text())
    summary = json.loads((folder / "patching" / "summary.json").read_text())
    text = re.sub(r"\s+", " ", page.replace("&#39;", "'").replace("\u00a0", " "))
    assert "Created" in text
    effect = summary["kinds"]["future_uses"]["models"]["trained"]["sweeps"]["denoise"]["effect"]
    assert f"−{abs(effect['estimate']):.2f} [−{abs(effect['low']):.2f}, −{abs(effect['high']):.2f}]" in text
    assert verdict["axis"]["why"] in text
    assert "Not available: the training run recorded no audit" in text
    assert text.count("Not run: nothing is known of this here.") == len(SECTIONS) - 1
    assert "No controls were measured." in text
    words = SECTIONS["patching"].figures["patching"]
    assert words.shows in text
    assert words.does_not in text
    assert "a" * 64 in text
    assert "12 s" in text


def test_nothing_of_a_file_becomes_markup_and_nothing_is_fetched(folder):
    page = write_page(folder).read_text()
    assert "<script" not in page
    assert "&lt;script&gt;" in page
    assert "ckpt/&lt;b&gt;" in page
    assert not re.search(r"(src|href)=\"(?!data:)", page)
    assert "url(" not in page


def test_the_example_has_the_tokens_with_their_roles(tmp_path):
    row = {
        "id": "p0", "ids_a": [1, 2, 30, 4, 5], "ids_b": [1, 2, 31, 4, 5], "answer": [7, 8], "foil": [9],
        "spans": json.dumps({"value": [2, 3], "key": [1, 2], "future_uses": [0, 4]}), "decision": 4,
    }  # fmt: skip
    pd.DataFrame([row, {**row, "id": "p1"}]).to_parquet(tmp_path / "tokens.parquet")
    found = example(tmp_path / "tokens.parquet", lambda ids: f"<{ids[0]}>")
    assert found["id"] == "p0"
    assert [token["text"] for token in found["tokens"]] == ["<1>", "<2>", "<30>", "<4>", "<5>"]
    assert [token["role"] for token in found["tokens"]] == ["", "key", "value", "", "decision"]
    assert [token["other"] for token in found["tokens"]] == [None, None, "<31>", None, None]
    assert (found["answer"], found["foil"]) == (["<7>", "<8>"], ["<9>"])


def test_a_figure_is_inlined_at_a_size_that_keeps_its_shape(tmp_path):
    save(Figure(figsize=(3.4, 2)), tmp_path / "drawn")
    found = figure(tmp_path / "drawn.png", FigureText("shows", "does not"))
    assert found["source"].startswith("data:image/png;base64,iVBOR")
    assert found["width"] / found["height"] == pytest.approx(3.4 / 2, rel=0.01)
    assert 300 < found["width"] < 600


@pytest.mark.parametrize(
    ("plain", "set_in_type"),
    [
        ("-1.50 [-2.00, -1.00]", "−1.50 [−2.00,\u00a0−1.00]"),
        ("A - B", "A − B"),
        ("1e-05", "1e-05"),
        ("SmolLM2-135M", "SmolLM2-135M"),
        ("layers 3-5", "layers 3-5"),
    ],
)
def test_only_numbers_get_a_minus(plain, set_in_type):
    assert typeset(plain) == set_in_type


def test_controls_are_listed_with_what_was_not_measured():
    interval = {"estimate": 0.5, "low": 0.25, "high": 0.75, "undefined": 0.0}
    rows = list(
        control_rows(
            {
                "self": {"largest_change": 0.0},
                "everything": {"base": {"largest_difference_from_a": 1e-5}},
                "other_key": "not available in any pair",
                "other_position": {"base": {"shift": interval}, "trained": {"shift": interval}},
                "random_b": {"effect": interval},
            }
        )
    )
    by_name = {name.split()[0] + name.split()[-1]: cells for name, *cells in rows}
    assert len(rows) == 11
    assert by_name["patchedtype"] == ["0.50 [0.25, 0.75]"] * 2
    assert by_name["patchedkey"] == ["not available in any pair"] * 2
    assert by_name["A'sexactly"] == ["off by 1e-05", "not measured"]
    assert by_name["Anorm"] == ["", "0.50 [0.25, 0.75]"]
    assert list(control_rows(None)) == []


def test_what_was_left_out_is_counted_by_reason():
    summary = {
        "left_out": [{"id": "a", "reason": "length"}, {"id": "b", "reason": "length"}, {"id": "c", "reason": "other"}],
        "decisions_left_out": [{"id": "d", "reason": "no list"}],
    }
    assert list(left_out_rows("retention_heads", summary)) == [
        ("retention_heads", "pairs", "length", 2),
        ("retention_heads", "pairs", "other", 1),
        ("retention_heads", "ordinary states", "no list", 1),
    ]


def test_every_figure_that_an_analysis_draws_has_its_words():
    assert set(knockout_report.CAPTIONS) == set(SECTIONS["knockout"].figures)
    assert set(logit_lens_report.CAPTIONS) == set(SECTIONS["logit_lens"].figures)


@pytest.mark.slow
@pytest.mark.parametrize("width", [1280, 390])
def test_nothing_is_wider_than_the_window(folder, width):
    playwright = pytest.importorskip("playwright.sync_api")
    chromium = shutil.which("chromium") or shutil.which("chromium-browser")
    if chromium is None:
        pytest.skip("there is no chromium on the PATH")
    report.write_json(folder / "example.json", {
        "id": "p0", "answer": [" ["], "foil": [" []"],
        "tokens": [{"text": "0123456789" * 40, "other": None, "role": ""}],
    })  # fmt: skip
    page_file = write_page(folder)
    with playwright.sync_playwright() as running:
        browser = running.chromium.launch(executable_path=chromium, args=CHROMIUM)
        page = browser.new_page(viewport={"width": width, "height": 800})
        requested = []
        page.on("request", lambda request: requested.append(request.url))
        page.goto(page_file.as_uri())
        wide = page.evaluate("document.documentElement.scrollWidth")
        browser.close()
    assert wide <= width
    assert {url.split(":")[0] for url in requested} <= {"file", "data"}
