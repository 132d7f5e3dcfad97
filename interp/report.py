"""The page of one adapter, `index.html`: what was asked, what was found, and what that rests on, for a reader.

Made from the files that the analyses have written, without a model. One file: figures are inlined, nothing is fetched
and nothing runs. What was not measured is said to be missing.
"""

from __future__ import annotations

import base64
import json
import re
import struct
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import jinja2
import pandas as pd

from interp.report_folders import read_object
from interp.report_texts import AUDIT, CONTROLS, SECTIONS, FigureText
from interp.verdict_rules import dig, shown

PNG_DPI, CSS_DPI, ENLARGED = 300, 96, 1.35  # a paper's column is small on a screen
Decode = Callable[[Sequence[int]], str]


def write_page(folder: Path) -> Path:
    """Write `index.html` from the files in an adapter's folder of results, `verdict.json` among them.

    Returns:
        Its path.

    Raises:
        OSError: if a file is missing that a whole analysis has written.
    """
    page = folder / "index.html"
    page.write_text(render("index.html.j2", page_context(folder)), encoding="utf-8")
    return page


def render(template: str, context: Mapping[str, Any]) -> str:
    """Fill a template of this package; all texts are escaped."""
    environment = jinja2.Environment(
        loader=jinja2.PackageLoader("interp"), autoescape=True, undefined=jinja2.StrictUndefined,
        trim_blocks=True, lstrip_blocks=True,
    )  # fmt: skip
    environment.filters |= {"interval": _interval, "typeset": typeset}
    return environment.get_template(template).render(context)


def typeset(text: str) -> str:
    """Minus signs as minus signs, and an interval in one piece, in a text with numbers."""
    text = re.sub(r"(?<![\w.\-])-(?=\d)", "−", text).replace(" - ", " − ")
    return re.sub(r"(?<=\[)(−?[\d.]+), (−?[\d.]+)(?=\])", "\\1,\u00a0\\2", text)


def _interval(record: Mapping[str, Any] | None, digits: int = 2) -> str:
    return typeset(shown(record, digits))


def page_context(folder: Path) -> dict[str, Any]:
    """What the page of an adapter shows."""
    summaries, runs = read_results(folder)
    first = next(iter(runs.values()), None)
    example_file = folder / "example.json"
    return {
        "name": folder.name,
        "verdict": read_json(folder / "verdict.json"),
        "run": first,
        "base": Path(first["base"]["name"]).name if first else None,  # a folder's own name, wherever it was
        "sections": [_section(folder, name, summaries.get(name), runs.get(name)) for name in SECTIONS],
        "example": read_json(example_file) if example_file.exists() else None,
        "controls": list(control_rows(dig(summaries, "patching", "controls"))),
        "pairs_of_controls": dig(summaries, "patching", "controls", "pairs"),
        "models": _models(summaries.get("patching")),
        "audit_names": AUDIT,
        "left_out": [row for name, summary in summaries.items() for row in left_out_rows(name, summary)],
        "runs": runs,
    }


def read_results(folder: Path) -> tuple[dict[str, Any], dict[str, Any]]:
    """(summaries, run records) of the analyses in a folder that are whole, by name."""
    summaries, runs = {}, {}
    for name in SECTIONS:
        if (folder / name / "run.json").exists():
            summaries[name] = read_json(folder / name / "summary.json")
            runs[name] = read_json(folder / name / "run.json")
    return summaries, runs


def read_json(path: Path) -> dict[str, Any]:
    """The JSON object in a file.

    Raises:
        InputError: if it holds none.
        OSError: if there is no such file.
    """
    return read_object(path)


def write_json(path: Path, record: Mapping[str, Any]) -> None:
    """Write a JSON file, indented; NaN is refused with a ValueError, since JSON has none."""
    path.write_text(json.dumps(record, indent=2, ensure_ascii=False, allow_nan=False) + "\n", encoding="utf-8")


def example(tokens: Path, decode: Decode) -> dict[str, Any]:
    """The first pair of `tokens.parquet`, token by token, as it was fed.

    Returns:
        `tokens`: each with its `text` in A, `other`, the text in B where that differs (else None), and `role`: `value`,
        `key`, `decision` or empty. `answer` and `foil`: texts of the tokens after the decision.
    """
    row = pd.read_parquet(tokens).iloc[0]
    spans = json.loads(row["spans"])
    roles = {position: name for name in ("key", "value") if name in spans for position in range(*spans[name])}
    roles[int(row["decision"])] = "decision"
    fed = []
    for position, (a, b) in enumerate(zip(row["ids_a"], row["ids_b"], strict=True)):
        other = None if a == b else decode([int(b)])
        fed.append({"text": decode([int(a)]), "other": other, "role": roles.get(position, "")})
    return {
        "id": str(row["id"]),
        "tokens": fed,
        **{name: [decode([int(token)]) for token in row[name]] for name in ("answer", "foil")},
    }


def figure(path: Path, text: FigureText) -> dict[str, Any]:
    """A figure as the template takes it: inlined, at the size of a column, a little enlarged."""
    content = path.read_bytes()
    width, height = struct.unpack(">II", content[16:24])  # the header of a PNG
    scale = ENLARGED * CSS_DPI / PNG_DPI
    return {
        "name": path.stem,
        "source": "data:image/png;base64," + base64.b64encode(content).decode("ascii"),
        "width": round(width * scale),
        "height": round(height * scale),
        "shows": text.shows,
        "does_not": text.does_not,
    }


def control_rows(controls: Mapping[str, Any] | None) -> Iterator[tuple[str, ...]]:
    """(control, base, trained) in words and numbers; nothing if no controls were measured."""
    for name, text in CONTROLS.items() if controls else ():
        found = dig(controls, name)
        if found is None or isinstance(found, str):
            yield text, found or "not measured", found or "not measured"
        elif name == "self":
            yield text, *2 * (f"{found['largest_change']:.1g}",)
        elif name == "everything":
            yield text, *(_missed(dig(found, model)) for model in ("base", "trained"))
        elif "effect" in found:
            yield text, "", shown(found["effect"])
        else:
            yield text, *(shown(dig(found, model, "shift")) if model in found else "" for model in ("base", "trained"))


def left_out_rows(name: str, summary: Mapping[str, Any]) -> Iterator[tuple[str, str, str, int]]:
    """(analysis, what, reason, how many) of what an analysis left out."""
    what = {"lora_svd": "modules or pairs", "logit_lens": "pairs or texts"}.get(name, "pairs")
    kinds = {"left_out": what, "left_out_of_controls": "control pairs", "decisions_left_out": "ordinary states"}
    for key, what in kinds.items():
        for reason, count in Counter(entry["reason"] for entry in summary.get(key) or ()).items():
            yield name, what, reason, count
    for reason, count in (summary.get("not_available") or {}).items():
        yield name, "modules without a metric", reason, count


def _missed(found: Mapping[str, Any] | None) -> str:
    return f"off by {found['largest_difference_from_a']:.1g}" if found else "not measured"


def _section(
    folder: Path, name: str, summary: Mapping[str, Any] | None, run: Mapping[str, Any] | None
) -> dict[str, Any]:
    section = SECTIONS[name]
    files = [(folder / name / f"{stem}.png", text) for stem, text in section.figures.items()]
    return {
        "name": name,
        "title": section.title,
        "question": section.question,
        "statement": summary["statement"] if summary else None,
        "more": (summary or {}).get("failures"),
        "size": _size(summary, run),
        "figures": [figure(path, text) for path, text in files if summary and path.exists()],
    }


def _size(summary: Mapping[str, Any] | None, run: Mapping[str, Any] | None) -> str:
    """How many pairs, decisions and graphs an analysis used."""
    pairs = dig(run, "pairs")
    if not pairs:
        return ""
    decisions = dig(summary, "decisions")
    decisions = dig(decisions, "used") if isinstance(decisions, Mapping) else decisions
    more = f" and {decisions} ordinary states" if decisions else ""
    return f"{pairs['used']} pairs of {pairs['groups']} graphs{more}"


def _models(patching: Mapping[str, Any] | None) -> list[tuple[str, str, str]]:
    """The main table: (quantity, base, trained), of the main kind of pairs."""
    kind: Mapping[str, Any] = next(iter((dig(patching, "kinds") or {}).values()), {})
    if not kind:
        return []
    rows: dict[str, tuple[str, ...]] = {}
    for metric, text in (("p_answer", "P(answer)"), ("logit_difference", "logit difference")):
        for side in "ab":
            rows[f"{text} in {side.upper()}"] = ("baselines", metric, side)
    rows["logit difference, A − B"] = ("sweeps", "denoise", "effect")
    for position in ("value", "decision"):
        rows[f"flip layer at the {position}"] = ("sweeps", "denoise", "flips", position, "ratio_of_means")

    def cell(model: str, path: tuple[str, ...]) -> str:
        found = dig(kind, "models", model, *path)
        return "nothing to locate" if found is None and "flips" in path else shown(found)

    return [(text, cell("base", path), cell("trained", path)) for text, path in rows.items()]
