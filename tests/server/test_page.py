"""The page in a real browser, against the real service."""

import json
import re
import shutil
import threading
import time

import numpy as np
import pytest
import uvicorn

from env.scheduler import Graph, SchedulerEnv, curriculum_graph, load_real, load_task, preset
from env.scheduler.graph import Hardware, Node
from env.scheduler.planner import plan
from env.scheduler.replay import Replay
from env.scheduler.replay import page as replay_page
from env.server.app import create_application

sync_api = pytest.importorskip("playwright.sync_api", reason="the page's tests need the package playwright")
expect = sync_api.expect
PATIENCE = 60_000
"""Milliseconds. How long a busy machine takes says nothing about the page."""
expect.set_options(timeout=PATIENCE)

CHROMIUM = shutil.which("chromium")
QUIET = [
    "--no-sandbox", "--disable-gpu", "--disable-quic", "--no-first-run", "--disable-background-networking",
    "--disable-component-update", "--disable-sync",
]  # fmt: skip
PHONE, DESKTOP = {"width": 360, "height": 800}, {"width": 1400, "height": 1000}
HOSTILE = "</script><img src=x onerror=alert(1)>"

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(CHROMIUM is None, reason="the page's tests need the program chromium on the PATH"),
]


@pytest.fixture(scope="module")
def address():
    server = uvicorn.Server(uvicorn.Config(create_application(), port=0, log_level="error"))
    thread = threading.Thread(target=server.run, daemon=True)
    thread.start()
    deadline = time.monotonic() + 30
    while not server.started:
        assert time.monotonic() < deadline, "the service did not start"
        time.sleep(0.02)
    yield f"http://127.0.0.1:{server.servers[0].sockets[0].getsockname()[1]}/"
    server.should_exit = True
    thread.join(10)


@pytest.fixture(scope="module")
def browser():
    with sync_api.sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=CHROMIUM, args=QUIET)
        yield browser
        browser.close()


class Watched:
    """A tab, and what it complained about and asked for."""

    def __init__(self, browser, **options):
        self.page = browser.new_page(**{"viewport": DESKTOP} | options)
        self.page.set_default_timeout(PATIENCE)
        self.complaints, self.requests = [], []
        self.page.on("console", lambda message: self.complaints.append(message.text) if message.type == "error" else 0)
        self.page.on("pageerror", lambda error: self.complaints.append(str(error)))
        self.page.on("request", lambda request: self.requests.append(request.url))


@pytest.fixture
def tab(browser, address, request):
    """The page, opened; a complaint or a request to anyone else fails the test."""
    watched = Watched(browser, **getattr(request, "param", {}))
    watched.page.goto(address)
    expect(watched.page.locator("#drawing svg")).to_be_visible()
    yield watched.page
    watched.page.close()
    assert watched.complaints == []
    assert [url for url in watched.requests if not url.startswith((address, "blob:"))] == []


def start(tab, graph, hardware="", rules="documented", **fields):
    tab.select_option("#graph", graph)
    tab.select_option("#hardware", hardware)
    tab.select_option("#rules", rules)
    for name, value in fields.items():
        tab.fill(f"#{name}", value)
    with tab.expect_response("**/reset"):
        tab.click("#setup button[type=submit]")
    expect(tab.locator("body[aria-busy]")).to_have_count(0)


def step_to(tab, count, press="ArrowRight"):
    """Press a key until so many steps are taken, one at a time."""
    for number in range(int(tab.input_value("#position")) + 1, count + 1):
        tab.keyboard.press(press)
        expect(tab.locator("#position")).to_have_value(str(number))


def no_wider_than_the_window(tab):
    return tab.evaluate("document.documentElement.scrollWidth <= innerWidth")


def state_now(tab):
    """The service's state of the episode shown, by the page's own last request."""
    return json.loads(tab.locator("#observation").inner_text())


def test_it_opens_with_a_task_drawn_and_everything_to_choose_from(tab):
    expect(tab.locator("#graph-name")).to_have_text("task1_chain, 8 nodes")
    assert tab.locator("#drawing .node").count() == 8
    assert tab.locator("#graph option").count() == 5 + 5 + 1
    expect(tab.locator(".node.current")).to_have_attribute("data-id", "0")
    assert no_wider_than_the_window(tab)


def test_clicks_write_the_answer_and_the_answer_is_what_is_sent(tab):
    start(tab, "task:task2_residual")
    tab.click("#drawing .node[data-id='0']")
    expect(tab.locator("#text")).to_have_value('{"fuse_with_prev": false, "tile": 128, "retain": [0]}')
    tab.click("#tiles label:has-text('64')")
    tab.click("#send")
    expect(tab.locator(".node.current")).to_have_attribute("data-id", "1")
    assert json.loads(tab.input_value("#text")) == {"fuse_with_prev": True, "tile": 64, "retain": [0]}
    tab.uncheck("#fuse")
    tab.uncheck("#keep [data-keep='0']")
    tab.click("#send")
    expect(tab.locator("#last")).to_contain_text('{"fuse_with_prev": false, "tile": 64, "retain": []}')
    assert state_now(tab)["fast_mem"] == [0]
    expect(tab.locator("#memory .memory-row").first).to_contain_text("256 KiB of 1 MiB")
    assert tab.locator("#kernels tr").first.inner_text().split()[:3] == ["0", "64", "0"]
    expect(tab.locator("#observation mark").filter(has_text="[0]").first).to_be_visible()


def test_the_drawing_is_worked_by_keyboard(tab):
    start(tab, "task:task2_residual")
    tab.focus("#drawing .node[data-id='0']")
    tab.keyboard.press("Space")
    expect(tab.locator("#drawing .node[data-id='0']")).to_have_attribute("aria-checked", "true")
    assert tab.evaluate("document.activeElement.dataset.id") == "0"
    tab.keyboard.press("Enter")
    expect(tab.locator("#drawing .node[data-id='0']")).to_have_attribute("aria-checked", "false")


def test_a_whole_episode_by_hand_from_the_keyboard(tab):
    answers = []
    for number in range(8):
        tab.keyboard.press(str(number % 4 + 1))
        if number % 3 == 0:
            tab.keyboard.press("f")
        answers.append(tab.input_value("#text"))
        step_to(tab, number + 1, "Enter")
    env = SchedulerEnv(load_task("task1_chain"))
    for text in answers:
        *_, info = env.step(text)
    expect(tab.locator("#now")).to_contain_text(f"Score {info['score']:.3f}".replace("-", "−"))
    assert {json.loads(text)["tile"] for text in answers} == {32, 64, 128, 256}
    expect(tab.locator("#answer")).to_be_hidden()
    expect(tab.locator("#forward")).to_be_disabled()


def test_an_invalid_answer_is_named_and_places_nothing(tab):
    tab.fill("#text", "keep everything " + HOSTILE)
    tab.keyboard.press("Control+Enter")
    expect(tab.locator("#remark")).to_have_text(
        "The environment: invalid action: expected a JSON object, found text that is not JSON (Expecting value)"
    )
    expect(tab.locator(".node.current")).to_have_attribute("data-id", "0")
    expect(tab.locator("#last")).to_contain_text(HOSTILE)
    expect(tab.locator("#last")).to_contain_text("reward -0.1000")
    assert tab.locator("img").count() == 0


def test_the_planner_plays_to_the_optimum(tab):
    start(tab, "random:", "hard_bandwidth_bound", level="0.2", seed="7")
    graph = preset("hard_bandwidth_bound", curriculum_graph(0.2, rng=np.random.default_rng(7)))
    best, greedy = plan(graph).latency, SchedulerEnv(graph).greedy_latency
    tab.select_option("#player", "planner")
    tab.fill("#speed", "4")
    tab.click("#play")
    expect(tab.locator("#now")).to_contain_text("Done")
    gain = f"{100 * (greedy - best) / greedy:.1f} % faster"
    expect(tab.locator("#now")).to_contain_text(f"{gain} than greedy. The optimum is {gain}.")
    expect(tab.locator("#position")).to_have_value(str(len(graph)))
    expect(tab.locator("#play")).to_have_text("Play")
    assert tab.locator("#latency .trace.spent").count() == 1


def test_space_plays_and_pauses(tab):
    tab.select_option("#player", "greedy")
    tab.focus("#drawing")
    tab.keyboard.press("Space")
    expect(tab.locator("#position")).to_have_value("2")
    tab.keyboard.press("Space")
    expect(tab.locator("#play")).to_have_text("Play")
    reached = int(tab.input_value("#position"))
    tab.wait_for_timeout(1500)
    assert int(tab.input_value("#position")) <= reached + 1 < 8  # a step under way is finished


def test_the_past_is_shown_as_it_was_and_cannot_be_changed(tab):
    start(tab, "task:task2_residual")
    tab.select_option("#player", "heuristic")
    tab.focus("#drawing")
    step_to(tab, 3)
    shown = tab.inner_text("#observation")
    tab.keyboard.press("ArrowLeft")
    expect(tab.locator("#position")).to_have_value("2")
    given = tab.input_value("#text")
    expect(tab.locator("#send")).to_be_disabled()
    assert tab.locator("#drawing [role=checkbox]").count() == 0
    tab.keyboard.press("ArrowRight")
    assert tab.inner_text("#observation") == shown
    expect(tab.locator("#last")).to_contain_text(given)


def test_worth_is_shown_where_it_is_decided(tab):
    start(tab, "real:smollm2_135m_layer", "medium_bandwidth_bound")
    tab.select_option("#player", "planner")
    tab.focus("#drawing")
    step_to(tab, 6)
    env = SchedulerEnv(preset("medium_bandwidth_bound", load_real("smollm2_135m_layer")))
    row = tab.locator("#keep .keep-row.pays").first
    expect(row.locator(".worth-text")).to_have_text(re.compile(r"^\+\d"))
    tensor = row.locator("input").get_attribute("data-keep")
    assert int(tensor) in range(len(env.graph))
    expect(tab.locator(f"#drawing .node[data-id='{tensor}'] .worth.pays")).to_have_count(1)


def test_upstream_rules_have_no_planner_and_say_so(tab):
    start(tab, "task:task2_residual", rules="upstream")
    expect(tab.locator("#keep")).to_contain_text("the planner knows the documented rules, not the upstream ones")
    assert "optimum" not in tab.inner_text("#latency")


def test_a_replay_is_saved_opened_and_played_again(tab, tmp_path):
    tab.select_option("#player", "greedy")
    tab.focus("#drawing")
    step_to(tab, 8)
    result = tab.inner_text("#now")
    with tab.expect_download() as download:
        tab.click("#save")
    file = tmp_path / "replay.json"
    download.value.save_as(file)
    assert Replay.from_json(json.loads(file.read_text())).graph == load_task("task1_chain")
    tab.set_input_files("#file", file)
    expect(tab.locator("#position")).to_have_value("0")
    expect(tab.locator("#player")).to_have_value("recording")
    tab.focus("#drawing")
    step_to(tab, 8)
    assert tab.inner_text("#now") == result


@pytest.mark.parametrize(
    ("name", "text", "message"),
    [
        ("a.json", "{", "a.json: expected JSON, found something else"),
        ("b.json", "[]", "b.json: expected a replay of the format scheduler-replay-1 or a graph, found neither"),
        ("c.json", '{"format": "scheduler-replay-1", "actions": [1]}', "c.json: actions: expected a list of texts"),
        ("d.json", "null", "d.json: expected a replay of the format scheduler-replay-1 or a graph, found neither"),
    ],
)
def test_a_file_that_is_no_replay_is_refused(tab, tmp_path, name, text, message):
    file = tmp_path / name
    file.write_text(text)
    tab.set_input_files("#file", file)
    expect(tab.locator("#error")).to_have_text(message)
    expect(tab.locator("#graph-name")).to_have_text("task1_chain, 8 nodes")


def test_names_are_text_never_markup(tab, tmp_path):
    graph = Graph(HOSTILE, (Node(0, "matmul", (64, 64)), Node(1, "relu", (64, 64), (0,))), Hardware(10**6, 8.0, 9.0, 4))
    file = tmp_path / "graph.json"
    file.write_text(json.dumps(graph.to_json()))
    tab.set_input_files("#file", file)
    expect(tab.locator("#graph-name")).to_have_text(f"{HOSTILE}, 2 nodes")
    assert tab.locator("img").count() == 0


def test_a_plain_environment_is_a_text_a_command_and_a_step(tab):
    tab.select_option("#environment", "fusionops")
    with tab.expect_response("**/reset"):
        tab.click("#setup button[type=submit]")
    expect(tab.locator("#drawing")).to_be_hidden()
    before = tab.inner_text("#observation")
    assert before
    tab.fill("#text", "no such command")
    tab.click("#send")
    expect(tab.locator("#position")).to_have_value("1")
    expect(tab.locator("#last")).to_contain_text("after no such command")
    tab.select_option("#environment", "scheduler")
    tab.click("#setup button[type=submit]")
    expect(tab.locator("#drawing")).to_be_visible()


@pytest.mark.parametrize("tab", [{"viewport": PHONE}], indirect=True)
@pytest.mark.parametrize("graph", ["task:task1_chain", "task:task3_attention", "real:smollm2_135m_layer"])
def test_on_a_phone_nothing_is_wider_than_the_screen(tab, graph):
    start(tab, graph, "hard_bandwidth_bound")
    tab.select_option("#player", "planner")
    for number in range(3):
        tab.click("#forward")
        expect(tab.locator("#position")).to_have_value(str(number + 1))
    assert no_wider_than_the_window(tab)
    buttons = tab.locator("button:visible, select:visible")
    assert min(box["height"] for box in (button.bounding_box() for button in buttons.all())) >= 30


def test_every_control_has_a_name(tab):
    unnamed = tab.evaluate(
        """[...document.querySelectorAll("button, input, select, textarea, [role=checkbox], svg")].filter(
            (e) => !(e.labels?.length && [...e.labels].some((l) => l.textContent.trim())) && !e.ariaLabel
                && !(e.tagName === "BUTTON" && e.textContent.trim())).map((e) => e.outerHTML)"""
    )
    assert unnamed == []


def test_a_player_that_the_server_has_not_is_an_error_in_words(browser, address):
    watched = Watched(browser)
    tab = watched.page
    tab.goto(address)
    expect(tab.locator("#drawing svg")).to_be_visible()
    tab.select_option("#player", "adapter")
    tab.click("#play")
    expect(tab.locator("#error")).to_contain_text("--adapter")
    expect(tab.locator("#play")).to_have_text("Play")
    assert all("404" in complaint for complaint in watched.complaints)
    tab.close()


def test_nodes_stand_below_what_they_read_and_never_on_one_another(tab):
    for name in ("task:task3_attention", "task:task5_adversarial", "real:unet_level", "real:smollm2_135m_layer"):
        start(tab, name)
        kind, graph = name.split(":")
        nodes = (load_task if kind == "task" else load_real)(graph).nodes
        boxes = tab.evaluate(
            """Object.fromEntries([...document.querySelectorAll(".node")].map((node) => {
                const box = node.querySelector(".box");
                return [node.dataset.id, ["x", "y", "width", "height"].map((name) => Number(box.getAttribute(name)))];
            }))"""
        )
        places = [boxes[str(node.id)] for node in nodes]
        for node in nodes:
            assert all(places[node.id][1] >= places[i][1] + places[i][3] for i in node.inputs)
        for first, a in enumerate(places):
            for b in places[first + 1 :]:
                assert abs(a[1] - b[1]) >= a[3] or abs(a[0] - b[0]) >= a[2]


# The self-contained page of one replay.


@pytest.fixture
def replayed(browser, tmp_path):
    graph = load_task("task2_residual")
    texts = tuple(action.to_text() for action in plan(graph).actions)
    file = tmp_path / "replay.html"
    file.write_text(replay_page(Replay(graph, "documented", ("nonsense", *texts), HOSTILE)), encoding="utf-8")
    watched = Watched(browser)
    watched.page.goto(file.as_uri())
    yield watched.page, len(texts) + 1
    watched.page.close()
    assert watched.complaints == []
    assert [url for url in watched.requests if not url.startswith(("blob:", "data:"))] == [file.as_uri()]


def test_a_replay_page_plays_without_a_server(replayed):
    tab, steps = replayed
    expect(tab.locator("#subtitle")).to_have_text(f"Replay, documented rules, made by {HOSTILE}.")
    assert tab.locator("img").count() == 0
    expect(tab.locator("#setup")).to_be_hidden()
    expect(tab.locator("#player")).to_be_hidden()
    expect(tab.locator("#text")).to_have_value("nonsense")
    step_to(tab, 1)
    expect(tab.locator("#remark")).to_contain_text("invalid action")
    tab.keyboard.press("Space")
    expect(tab.locator("#now")).to_contain_text("Done")
    expect(tab.locator("#position")).to_have_value(str(steps))
    with tab.expect_download() as download:
        tab.click("#save")
    assert Replay.from_json(json.loads(download.value.path().read_text())).made_by == HOSTILE


@pytest.mark.parametrize("width", [360, 1400])
def test_a_replay_page_fits(replayed, width):
    tab, _ = replayed
    tab.set_viewport_size({"width": width, "height": 800})
    tab.keyboard.press("ArrowRight")
    assert no_wider_than_the_window(tab)
