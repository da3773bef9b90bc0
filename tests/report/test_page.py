"""The page in a real browser: it draws, obeys its switches, fits, can be read by everyone, and asks for nothing."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest

from fedveil.runs import session
from pairs import crossed
from report.browser import Browser
from report.material import ROUNDS, SCHEMES, small

pytest.importorskip("plotly", reason="needs the extra report")

WIDTHS = (1400, 390)
SEVEN = ("fedavg", "lossless", "veil-secagg", "nadp", "ldp", "veil-dp", "paraaegis")
TRACES = """(name) => document.getElementById(name).data.map(
    (one) => ({...one.meta, shown: one.visible, points: one.x.length, colour: one.line.color, name: one.name}))"""

# Every visible text's colour against what lies behind it, as the browser computed both. Texts in pictures are filled.
CONTRASTS = """(() => {
  const parse = (text) => { const n = text.match(/[\\d.]+/g).map(Number); return n.length > 3 ? n : [...n, 1]; };
  const over = (top, under) => [0, 1, 2].map((i) => top[i] * top[3] + under[i] * (1 - top[3])).concat(1);
  const light = (c) => { const f = (v) => (v /= 255) <= 0.04045 ? v / 12.92 : ((v + 0.055) / 1.055) ** 2.4;
    return 0.2126 * f(c[0]) + 0.7152 * f(c[1]) + 0.0722 * f(c[2]); };
  const behind = (e) => { const chain = [];
    for (; e; e = e.parentElement) chain.unshift(getComputedStyle(e).backgroundColor);
    return chain.reduce((under, one) => over(parse(one), under), [255, 255, 255, 1]); };
  const found = [], walker = document.createTreeWalker(document.body, NodeFilter.SHOW_TEXT);
  while (walker.nextNode()) {
    const text = walker.currentNode.textContent.trim(), e = walker.currentNode.parentElement;
    if (!text || /^(SCRIPT|STYLE|NOSCRIPT|TITLE)$/.test(e.tagName) || !e.checkVisibility()) continue;
    const box = e.getBoundingClientRect(), style = getComputedStyle(e);
    if (!box.width || !box.height) continue;
    const inPicture = e instanceof SVGElement;
    const ground = behind(e), ink = over(parse(inPicture ? style.fill : style.color), ground);
    const [a, b] = [light(ink), light(ground)];
    found.push([(Math.max(a, b) + 0.05) / (Math.min(a, b) + 0.05), text.slice(0, 60), inPicture]);
  }
  return found;
})()"""

# Anything that is wider than the window without standing in a box that scrolls by itself.
TOO_WIDE = """(() => {
  const wide = innerWidth + 0.5, out = [];
  if (document.scrollingElement.scrollWidth > innerWidth) out.push("the page itself");
  for (const e of document.querySelectorAll("body *")) {
    if (e.parentElement.closest(".scroll, pre") || e.closest(".skip, #js-plotly-tester")) continue;
    const box = e.getBoundingClientRect();
    if (e.checkVisibility() && box.width && (box.right > wide || box.left < -0.5)) out.push(e.outerHTML.slice(0, 90));
  }
  return out;
})()"""


# Numbers with their units, intervals and powers of ten that a line's end cuts in two.
CUT = """(() => {
  const out = [], walker = document.createTreeWalker(document.getElementById("main"), NodeFilter.SHOW_TEXT);
  const figure = /\\d[\\d.,\\u2060]*(?:e[-\\u2060]*\\d+)?(?:[\\u2060–]+[\\d.,]+)?(?:\\s(?:%|dB|[kMG]?B|s)(?=\\W|$))?/g;
  while (walker.nextNode()) {
    const node = walker.currentNode, e = node.parentElement;
    if (!e.checkVisibility() || e.closest("svg, pre, code, figcaption, script")) continue;
    for (const hit of node.textContent.matchAll(figure)) {
      const range = document.createRange();
      range.setStart(node, hit.index);
      range.setEnd(node, hit.index + hit[0].length);
      if (new Set([...range.getClientRects()].map((box) => Math.round(box.top))).size > 1) out.push(hit[0]);
    }
  }
  return out;
})()"""


def traces(tab: Browser, name: str) -> list[dict[str, Any]]:
    found: list[dict[str, Any]] = tab.run(f"({TRACES})({name!r})")
    return found


@pytest.fixture
def comparison(tab: Browser, comparison_page: Path) -> Browser:
    tab.show(comparison_page)
    return tab


def open_all(tab: Browser) -> None:
    tab.run("document.querySelectorAll('details').forEach((one) => { one.open = true; })")


def test_it_complains_about_nothing_asks_for_nothing_and_its_curves_have_a_point_a_round(comparison: Browser) -> None:
    assert comparison.complaints == []
    assert [one for one in comparison.requests if not one.startswith(("data:", "blob:"))] == [
        comparison.run("location.href")
    ]
    for name in ("curve-test-accuracy", "curve-loss"):
        lines = [one for one in traces(comparison, name) if one["role"] == "line"]
        assert {one["points"] for one in lines} == {ROUNDS}
    drawn = comparison.run("document.querySelectorAll('#curve-test-accuracy .scatterlayer .trace .point').length")
    assert drawn == ROUNDS * len(SCHEMES)
    assert comparison.run("document.querySelectorAll('.plot .main-svg').length") >= 2


@pytest.mark.slow
def test_the_mouse_over_a_curve_shows_every_scheme_s_figure(comparison: Browser) -> None:
    x, y = comparison.middle("#curve-test-accuracy .nsewdrag")
    comparison.send("Input.dispatchMouseEvent", type="mouseMoved", x=x, y=y)
    comparison.wait("document.querySelector('#curve-test-accuracy .hoverlayer').textContent.includes('%')")
    told = comparison.run("document.querySelector('#curve-test-accuracy .hoverlayer').textContent")
    assert all(scheme in told for scheme in SCHEMES)


def test_a_scheme_s_switch_takes_it_out_of_every_picture_and_back_by_mouse_and_by_key(comparison: Browser) -> None:
    names = comparison.run("[...document.querySelectorAll('.plot')].map((one) => one.id)")
    assert len(names) >= 5

    def shown(slot: int) -> set[bool]:
        return {one["shown"] for name in names for one in traces(comparison, name) if one["slot"] == slot}

    assert shown(1) == {True}
    comparison.click("#chips input[data-slot='1']")
    comparison.wait("!document.querySelector(\"#chips input[data-slot='1']\").checked")
    assert shown(1) == {False}
    assert shown(0) == {True}
    comparison.run("document.querySelector(\"#chips input[data-slot='1']\").focus()")
    comparison.press(" ", 32)
    comparison.wait("document.querySelector(\"#chips input[data-slot='1']\").checked")
    assert shown(1) == {True}


def test_the_theme_follows_the_system_and_the_switch_turns_pages_and_pictures(comparison: Browser) -> None:
    def look() -> tuple[str, str]:
        page = comparison.run("getComputedStyle(document.body).backgroundColor")
        return page, next(one["colour"] for one in traces(comparison, "curve-loss") if one["role"] == "line")

    light = look()
    comparison.media("screen", dark=True)
    comparison.wait("document.getElementById('theme').textContent === 'Light theme'")
    dark = look()
    assert light[0] == "rgb(255, 255, 255)"
    assert all(one != other for one, other in zip(light, dark, strict=True))
    comparison.click("#theme")
    comparison.wait("document.getElementById('theme').textContent === 'Dark theme'")
    assert look() == light


@pytest.mark.slow
def test_focus_can_be_seen(comparison: Browser) -> None:
    comparison.press("Tab", 9)
    comparison.press("Tab", 9)
    assert comparison.run("document.activeElement.id") == "theme"
    assert comparison.run("getComputedStyle(document.activeElement).outlineStyle") == "solid"


@pytest.mark.parametrize(("kind", "width"), crossed(["comparison", "audit"], WIDTHS))
def test_nothing_is_wider_than_the_window(tab: Browser, kind: str, width: int, request: pytest.FixtureRequest) -> None:
    tab.show(request.getfixturevalue(f"{kind}_page"), width=width)
    open_all(tab)
    assert tab.run(TOO_WIDE) == []


@pytest.mark.parametrize("kind", ["comparison", pytest.param("audit", marks=pytest.mark.slow)])
def test_every_text_stands_out_in_both_themes(tab: Browser, kind: str, request: pytest.FixtureRequest) -> None:
    tab.show(request.getfixturevalue(f"{kind}_page"))
    open_all(tab)
    for _ in ("light", "dark"):
        found = tab.run(CONTRASTS)
        assert len(found) > 100
        assert any(in_picture for _, _, in_picture in found)
        assert [one for one in found if one[0] < 4.5] == []
        tab.run("document.getElementById('theme').click()")


def test_pictures_have_words_and_charts_have_names(tab: Browser, audit_page: Path) -> None:
    tab.show(audit_page)
    assert tab.complaints == []
    texts = tab.run("[...document.images].map((one) => [one.alt, one.naturalWidth])")
    assert len(texts) == 1
    alternative, width = texts[0]
    assert width > 0
    assert "original, got from this run, got without protection" in alternative
    assert "100.0 dB" in alternative
    charts = tab.run("[...document.querySelectorAll('.plot')].map((one) => one.getAttribute('aria-label'))")
    assert charts
    assert all("ends at" in one or "is off by" in one for one in charts)


@pytest.mark.parametrize("width", [pytest.param(1280, marks=pytest.mark.slow), 390])
def test_no_line_ends_within_a_number(tab: Browser, comparison_page: Path, audit_page: Path, width: int) -> None:
    for page in (comparison_page, audit_page):
        tab.show(page, width=width)
        tab.run("document.querySelectorAll('details').forEach((one) => { one.open = true; })")
        assert tab.run(CUT) == []
        # Figures differ from run to run, and so does where lines end: in narrow columns one ends nearly everywhere.
        for ems in range(10, 20):
            tab.run(f"for (const text of document.querySelectorAll('#main p, #main li')) text.style.width = '{ems}em'")
            assert tab.run(CUT) == []
    tab.run("document.querySelectorAll('td').forEach((one) => { one.style.width = one.style.maxWidth = '20px'; })")
    tab.run("document.querySelectorAll('td').forEach((one) => { one.textContent = '12.5 % and 3 s'; })")
    assert tab.run(CUT), "this test could not fail"


@pytest.mark.slow
def test_a_table_wider_than_the_window_says_that_it_scrolls(tab: Browser, comparison_page: Path) -> None:
    said = "document.querySelector('#results .scroll').dataset.more"
    hint = "getComputedStyle(document.querySelector('#results .scroll'), '::before').content"
    tab.show(comparison_page, width=390)
    tab.wait(f"{said} === 'right'")
    assert "Scroll sideways" in tab.run(hint)
    tab.run("document.querySelector('#results .scroll').scrollLeft = 60")
    tab.wait(f"{said} === 'left right'")
    tab.run("document.querySelector('#results .scroll').scrollLeft = 9999")
    tab.wait(f"{said} === 'left'")
    tab.resize(1400)
    tab.wait(f"{said} === undefined")
    assert tab.run(hint) == "none"


def pages(pdf: bytes) -> int:
    """How many sheets a PDF has."""
    return len(re.findall(rb"/Type\s*/Page\b", pdf))


@pytest.mark.slow
def test_seven_schemes_print_on_ten_pages(tab: Browser, tmp_path: Path) -> None:
    from fedveil.report import write_report

    folders = [tmp_path / scheme for scheme in SEVEN]
    for folder in folders:
        own = {"cipher": "pads"} if folder.name == "paraaegis" else {}
        session.run(small(scheme=folder.name, **own), folder, quiet=True)
    tab.show(write_report(folders, tmp_path / "seven.html"))
    tab.media("print")
    tab.wait("document.querySelectorAll('details:not([open])').length === 0")
    assert 5 <= pages(tab.printed()) <= 10


@pytest.mark.slow
def test_on_paper_it_is_light_and_open_and_has_no_switches(tab: Browser, comparison_page: Path) -> None:
    tab.show(comparison_page, dark=True)
    tab.media("print", dark=True)
    tab.wait("document.querySelectorAll('details:not([open])').length === 0")
    assert tab.run("getComputedStyle(document.body).backgroundColor") == "rgb(255, 255, 255)"
    hidden = "[...document.querySelectorAll('nav, button, #chips input, .modebar-container')]"
    assert tab.run(f"{hidden}.length") > 5
    assert tab.run(f"{hidden}.every((one) => getComputedStyle(one).display === 'none')")
    assert tab.run("[...document.querySelectorAll('.plot .main-svg')].every((one) => one.clientWidth <= 680)")
    assert tab.printed().startswith(b"%PDF")
    tab.media("screen", dark=True)
    tab.wait("document.querySelectorAll('details:not([open])').length > 0")
    assert tab.run("getComputedStyle(document.body).backgroundColor") != "rgb(255, 255, 255)"
