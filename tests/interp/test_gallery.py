"""The page of all reports leads everywhere and to nothing that is not there; figures come back from their tables."""

import html
import json
import re
import shutil
from urllib.parse import unquote

import pandas as pd
import pytest
from matplotlib.figure import Figure

from interp import comparison, gallery, lora_svd, patching_report, patching_summary, redraw, report
from interp.figures import save
from interp.gallery import thumbnail, write_gallery
from interp.redraw import DRAWN
from interp.report_folders import find_reports, open_reports
from interp.report_texts import SECTIONS
from interp.verdict import decide
from tests.interp.synthetic import planted_frame
from tests.interp.test_report import CHROMIUM, RUN
from tests.interp.tiny import tiny_pair_folders

INTERVAL = {"estimate": -4.25, "low": -5.5, "high": -3.0, "undefined": 0.0}
EVALUATE = "python -m env.training.evaluate --adapter ckpt/<i>"


def put(file, record):
    file.parent.mkdir(parents=True, exist_ok=True)
    report.write_json(file, record)


@pytest.fixture(scope="module")
def frame():
    return planted_frame(effects={"base": 0.0, "trained": -6.0}, flips={"value": 14.0, "decision": 18.0}, noise=0.1)


@pytest.fixture(scope="module")
def made(frame, tmp_path_factory):
    """An adapter's report of one analysis, a comparison, what another program has made, and what is no report."""
    root = tmp_path_factory.mktemp("made") / "reports"
    summary = patching_summary.summarise(frame)
    patching = root / "a b" / "patching"
    put(patching / "summary.json", summary)
    put(patching / "run.json", RUN)
    frame.to_parquet(patching / "results.parquet", index=False)
    for name, figure in patching_report.figures(frame, seed=0).items():
        save(figure, patching / name)
    put(root / "a b" / "verdict.json", decide({"patching": summary}, None).to_json())
    (root / "a b" / "index.html").write_text("the page")
    row = {"name": "ep050", "case": "created", "effect_trained": INTERVAL}
    put(root / "ep050-ep400" / "comparison.json", {"series": "ep050-ep400", "adapters": [row]})
    (root / "ep050-ep400" / "index.html").write_text("the page")
    save(Figure(figsize=(3, 1)), root / "ep050-ep400" / "lora_svd_growth" / "angles")
    save(Figure(figsize=(3, 1)), root / "ep050-ep400" / "lora_svd_growth" / "growth")
    put(root / "training" / "x" / "summary.json", {"command": EVALUATE})
    save(Figure(figsize=(7, 2)), root / "training" / "x" / "evaluation")
    save(Figure(figsize=(3, 1)), root / "training" / "loose")
    (root / "page").mkdir()
    (root / "page" / "desktop.png").write_bytes(b"a screenshot is no figure")
    put(root / "old.partial" / "summary.json", {"command": "half"})
    return root


@pytest.fixture
def root(made, tmp_path):
    return shutil.copytree(made, tmp_path / "reports")


def test_reports_are_found_with_their_parts(made):
    found = {found.name: (found.kind, [part.folder.name for part in found.parts]) for found in find_reports(made)}
    assert found == {
        "a b": ("adapter", ["patching"]),
        "ep050-ep400": ("comparison", ["lora_svd_growth"]),
        "training": ("alone", ["training"]),
        "training/x": ("alone", ["x"]),
    }


def test_the_page_leads_to_every_page_and_every_figure_and_to_nothing_else(root):
    page = write_gallery(root)
    links = set(re.findall(r'href="([^"]*)"', page.read_text()))
    pages = {file for file in root.rglob("index.html") if file != page}
    assert {root / unquote(link) for link in links} == {*root.rglob("*.pdf"), *pages}
    assert "a%20b/index.html" in links


def test_the_page_says_what_the_records_say(root):
    page = write_gallery(root).read_text()
    text = html.unescape(page).replace("\u00a0", " ")
    effect = json.loads((root / "a b" / "patching" / "summary.json").read_text())
    effect = effect["kinds"]["future_uses"]["models"]["trained"]["sweeps"]["denoise"]["effect"]
    assert f"−{abs(effect['estimate']):.2f} [−{abs(effect['low']):.2f}, −{abs(effect['high']):.2f}] logits" in text
    assert "ep050: created, A − B −4.25 [−5.50, −3.00] logits" in text
    assert RUN["command"] in text
    assert "adapter planted on tiny & base, 24 pairs of 12 graphs, finished 2026-01-02" in text
    assert EVALUATE in text
    assert text.count("not recorded</td>") == 2  # of the loose figure, and of the comparison
    assert f"python -m interp.figures --report '{root}/a b'" in text
    assert text.count("python -m interp.figures") == 1  # nothing else can be drawn from tables here
    assert "half" not in text


def test_nothing_of_a_file_becomes_markup_and_nothing_is_fetched(root):
    page = write_gallery(root).read_text()
    assert "ckpt/&lt;i&gt;" in page
    assert "ckpt/&lt;b&gt;" in page
    assert not re.search(r'src="(?!data:)', page)
    assert "http" not in page.replace("http-equiv", "")
    assert "<script" not in page


def test_the_same_files_give_the_same_page(root):
    first = write_gallery(root).read_bytes()
    assert write_gallery(root).read_bytes() == first


def test_the_stylesheet_is_that_of_the_reports(root):
    page = write_gallery(root).read_text()
    assert report.render("style.css", {}).strip() in page


def test_a_thumbnail_keeps_its_shape(tmp_path):
    save(Figure(figsize=(3.4, 2)), tmp_path / "drawn")
    found = thumbnail(tmp_path / "drawn.png")
    assert found["width"] / found["height"] == pytest.approx(3.4 / 2, rel=0.01)
    assert len(found["source"]) < 2000  # an empty picture


def test_an_empty_folder_has_a_page_and_a_missing_one_an_error(tmp_path, capsys):
    assert gallery.main(["--reports", str(tmp_path)]) == 0
    assert "no report here yet" in (tmp_path / "index.html").read_text()
    assert gallery.main(["--reports", str(tmp_path / "none")]) == 2
    err = capsys.readouterr().err
    assert err == f"error: {tmp_path / 'none'}: expected a folder of reports, found none\n"


def test_a_record_that_cannot_be_read_is_named(root, capsys):
    file = root / "training" / "x" / "summary.json"
    file.write_text("{")
    assert gallery.main(["--reports", str(root)]) == 2
    err = capsys.readouterr().err
    assert str(file) in err
    assert err.count("\n") == 1


def test_figures_come_back_from_their_tables_to_the_byte(root, frame, capsys):
    folder = root / "a b" / "patching"
    before = {file: file.read_bytes() for file in folder.iterdir()}
    for file in (*folder.glob("*.pdf"), *folder.glob("*.png")):
        file.write_bytes(b"")
    others = {file: file.read_bytes() for file in (root / "training").rglob("*.p*")}
    assert redraw.main(["--all", "--reports", str(root)]) == 0
    assert {file: file.read_bytes() for file in folder.iterdir()} == before
    assert {file: file.read_bytes() for file in (root / "training").rglob("*.p*")} == others
    assert f"{root / 'training' / 'x'}: left as it is; {EVALUATE}" in capsys.readouterr().out


def test_a_run_and_its_tables_give_the_same_figures_and_sizes(tmp_path, capsys):
    adapter, _ = tiny_pair_folders(tmp_path / "tiny")
    out = tmp_path / "reports"
    assert lora_svd.main(["--adapter", str(adapter), "--adapter-only", "--out", str(out), "--quiet"]) == 0
    before = {file: file.read_bytes() for file in (out / "adapter" / "lora_svd").glob("*.p[dn][fg]")}
    assert len(before) == 8
    assert redraw.main(["--report", str(out / "adapter"), "--quiet"]) == 0
    assert {file: file.read_bytes() for file in before} == before
    run = json.loads((out / "adapter" / "lora_svd" / "run.json").read_text())
    put(out / "adapter" / "knockout" / "run.json", run | {"analysis": "knockout"})
    sizes = redraw._profile(open_reports(out / "adapter" / "knockout")[0].parts[0])
    pd.testing.assert_frame_equal(sizes, lora_svd.profile(lora_svd.measure(adapter, adapter_only=True)))


def test_what_is_missing_is_named_and_the_other_reports_are_drawn(root, capsys):
    knockout = root / "a b" / "knockout"
    put(knockout / "run.json", RUN | {"analysis": "knockout"})
    put(knockout / "summary.json", {})
    table = root / "c" / "patching" / "results.parquet"
    put(table.with_name("run.json"), RUN)
    pd.DataFrame({"a": [1]}).to_parquet(knockout / "results.parquet")
    (root / "a b" / "patching" / "patching.png").unlink()
    assert redraw.main(["--all", "--reports", str(root), "--quiet"]) == 2
    first, second = capsys.readouterr().err.splitlines()
    sizes = root / "a b" / "lora_svd" / "results.parquet"
    assert first == (f"error: {sizes}: expected what figures are drawn from, found no such file; written by "
                     "python -m interp.lora_svd")  # fmt: skip
    assert str(table) in second
    assert second.endswith(RUN["command"])
    assert (root / "a b" / "patching" / "patching.png").exists()
    assert {file.name for file in knockout.iterdir()} == {"run.json", "summary.json", "results.parquet"}


def test_a_broken_table_is_named(root, capsys):
    table = root / "a b" / "patching" / "results.parquet"
    table.write_bytes(b"nothing of the kind")
    assert redraw.main(["--report", str(root / "a b"), "--quiet"]) == 2
    err = capsys.readouterr().err
    assert f"{table}: expected a table as Parquet" in err
    assert err.count("\n") == 1


def test_the_sizes_of_another_adapter_are_refused(root):
    for name, sha in (("knockout", "a"), ("lora_svd", "e")):
        folder = root / "a b" / name
        put(folder / "run.json", RUN | {"analysis": name, "adapter": {"name": "planted", "sha256": sha * 64}})
        put(folder / "summary.json", {"statement": ""})
        pd.DataFrame({"a": [1]}).to_parquet(folder / "results.parquet")
    with pytest.raises(
        redraw.cli.InputError, match=rf"lora_svd/run.json: adapter.sha256: expected {'a' * 64}.*e{{64}}"
    ):
        redraw.redraw(open_reports(root / "a b" / "knockout")[0].parts[0])


def test_the_list_has_each_figure_once_with_its_command(root, capsys):
    assert redraw.main(["--list", "--reports", str(root)]) == 0
    lines = [line.split("  ", 1) for line in capsys.readouterr().out.splitlines()]
    assert {root / file for file, _ in lines} == set(root.rglob("*.pdf"))
    commands = {str((root / file).stem): command for file, command in lines}
    assert commands["patching"] == RUN["command"]
    assert commands["evaluation"] == EVALUATE
    assert commands["loose"] == "no command recorded"


@pytest.mark.parametrize(
    ("argv", "said"),
    [
        ([], "expected --all, --report DIR or --list"),
        (["--report", "nowhere"], "nowhere: expected the folder of a rep"),
    ],
)
def test_what_to_draw_has_to_be_said(argv, said, capsys):
    assert redraw.main(argv) == 2
    err = capsys.readouterr().err
    assert said in err
    assert err.count("\n") == 1


def test_every_analysis_that_has_a_section_can_be_drawn_again():
    assert set(DRAWN) == {*SECTIONS, *(analysis for analysis, _ in comparison.FIGURES)}


@pytest.mark.slow
@pytest.mark.parametrize("width", [1400, 360])
def test_nothing_is_wider_than_the_window(root, width):
    playwright = pytest.importorskip("playwright.sync_api")
    chromium = shutil.which("chromium") or shutil.which("chromium-browser")
    if chromium is None:
        pytest.skip("there is no chromium on the PATH")
    put(root / "y" / "run.json", {"command": "python -m " + "x" * 300})
    save(Figure(figsize=(20, 1)), root / "y" / ("wide" * 30))
    page_file = write_gallery(root)
    with playwright.sync_playwright() as running:
        browser = running.chromium.launch(executable_path=chromium, args=CHROMIUM)
        page = browser.new_page(viewport={"width": width, "height": 800})
        requested = []
        page.on("request", lambda request: requested.append(request.url))
        page.goto(page_file.as_uri())
        wide = page.evaluate("document.documentElement.scrollWidth")
        unseen = page.evaluate("[...document.images].filter(i => !i.complete || !i.naturalWidth).length")
        browser.close()
    assert wide <= width
    assert unseen == 0
    assert {url.split(":")[0] for url in requested} <= {"file", "data"}
