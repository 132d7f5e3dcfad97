"""The dialogue: turns, tools, rewards, and the environment as Gymnasium wants it."""

import json

import pytest
from gymnasium.utils.env_checker import check_env
from hypothesis import given, settings
from hypothesis import strategies as st

from env.passes import PassesEnv, load_program
from env.passes.action import ActionError, answer_text, call_text, parse_turn
from env.passes.dataset import main, transcript
from env.passes.prompts import messages
from env.passes.rewards import AT_MOST, PERFECT, checks
from env.passes.tools import FIND_BEST, INSTRCOUNT
from tests.passes.worlds import GOOD, GRAPH, IDLE, NAME, TINY, small


def world(oz_instructions=None, **options):
    return PassesEnv(small(oz_instructions), graph=GRAPH, genetics=TINY, **options)


def measure(sequence, name=NAME):
    return call_text("I measure.", INSTRCOUNT, {"filename": name, "optimization_flags": sequence})


SEARCH = call_text("I search.", FIND_BEST, {"filename": NAME})


def play(env, texts):
    env.reset()
    for text in texts:
        observation, reward, terminated, truncated, info = env.step(text)
    return observation, reward, terminated, truncated, info


def response(observation):
    return json.loads(observation.removeprefix("<tool_response>").removesuffix("</tool_response>"))


def test_gymnasium_accepts_it():
    check_env(world(), skip_render_check=True)


def test_the_question_has_what_the_agent_needs():
    observation, info = PassesEnv(load_program("musl/math/cbrt"), graph=GRAPH).reset()
    assert '"TotalInsts": 139' in observation
    assert "Initial instruction count: 139" in observation
    assert "use the exact filepath: musl/math/cbrt\n" in observation
    assert info == {"instructions": 139, "oz_instructions": 50, "error": None}
    assert [message["role"] for message in messages(observation)] == ["system", "user"]


def test_path_a():
    env = world(oz_instructions=4)
    env.reset()
    observation, reward, terminated, truncated, _ = env.step(measure(GOOD))
    assert response(observation) == {"filename": NAME, "status": "success", "improvement_over_oz": 0.75}
    assert (reward, terminated, truncated) == (0.0, False, False)
    _, reward, terminated, truncated, info = env.step(answer_text("Good.", GOOD))
    assert (terminated, truncated, info["valid_path"], info["score"]) == (True, False, True, 0.75)
    assert reward == pytest.approx(0.5 * 1.5 + 0.5 * 30 * 6 / 7)
    assert env.step("more")[1:] == (0.0, True, False, {})


def test_path_b_with_a_search_that_helps():
    env = world(oz_instructions=4)
    observation, *_ = play(env, [measure(IDLE), SEARCH])
    found = response(observation)
    assert found["improvement_percentage"] == 75.0
    _, reward, _, _, info = env.step(answer_text("Found.", found["best_pass_sequence"]))
    assert info["valid_path"]
    assert reward == pytest.approx(0.5 * 1.5 + 0.5 * 30 * 6 / 7)


def test_path_b_with_a_search_that_does_not_help():
    env = world()
    observation, *_ = play(env, [measure(IDLE), SEARCH])
    assert response(observation)["improvement_percentage"] == 0.0
    found, valid, over = response(observation)["best_pass_sequence"], [], []
    for answer in (found, ["-Oz"]):
        fork = env.clone()
        info = fork.step(answer_text("So be it.", answer))[-1]
        valid.append(info["valid_path"])
        over.append(info["score"])
    assert valid == [False, True]
    assert over == [0.0, 0.0]
    assert not env.episode.ended


@pytest.mark.parametrize(
    ("texts", "passed"),
    [
        ([measure(GOOD), answer_text("", GOOD)], (7, 7)),
        ([measure(GOOD), answer_text("", GOOD) + " Thanks."], (6, 7)),
        ([measure(GOOD), answer_text("", IDLE)], (6, 7)),
        ([measure(GOOD), measure(GOOD), answer_text("", GOOD)], (4, 7)),
        ([answer_text("", GOOD)], (1, 11)),
        ([SEARCH, answer_text("", GOOD)], (3, 11)),
        ([measure(IDLE), answer_text("", IDLE)], (5, 11)),
        ([measure(IDLE, "elsewhere"), SEARCH, answer_text("", GOOD)], (8, 11)),
        (["what?", measure(GOOD), answer_text("", GOOD)], (4, 11)),
    ],
    ids=lambda value: str(value) if isinstance(value, tuple) else "",
)
def test_what_a_transcript_has(texts, passed):
    published, paper = world(oz_instructions=4, rewards="published"), world(oz_instructions=4)
    _, graded, _, _, info = play(published, texts)
    found = checks(NAME, published.episode.exchanges)
    assert (sum(found), len(found)) == passed
    perfect = passed[0] == passed[1]
    assert info["valid_path"] == perfect
    answer = 0.5 * 30 * published.score
    assert graded == pytest.approx(answer + 0.5 * (PERFECT if perfect else AT_MOST * passed[0] / passed[1]))
    over_orig = 0.5 * 30 * paper.program.over_orig(published.episode.instructions)
    assert play(paper, texts)[1] == pytest.approx(over_orig + 0.5 * (PERFECT if perfect else 0.0))


@pytest.mark.parametrize(
    ("call", "problem"),
    [
        (measure(GOOD, "elsewhere"), "filename: expected 'hand/small', found 'elsewhere'"),
        (measure([]), "optimization_flags: expected a list of at least one pass"),
        (measure("--sroa"), "optimization_flags: expected a list of at least one pass"),
        (measure(["--barrier"]), "pass: --barrier has no successor in LLVM 20"),
        (measure([["--sroa"]]), "pass: expected a name such as --sroa, found list"),
        (call_text("", "rm", {}), "tool: expected instrcount or find_best_pass_sequence, found 'rm'"),
        ("hello", "invalid turn: expected one <tool_call> or one <answer>, found 0"),
        ("<answer>[]</answer><answer>[]</answer>", "found 2"),
        ("<answer>['--sroa']</answer>", "expected JSON in <answer>"),
        ("<answer>[1]</answer>", "expected a list of passes in <answer>"),
        ("<tool_call>[]</tool_call>", "expected an object with name and arguments"),
        ('<tool_call>{"name": "instrcount", "arguments": 3}</tool_call>', "arguments: expected an object, found int"),
        ("<answer>" + "[" * 100_000 + "</answer>", "nested too deeply"),
    ],
)
def test_what_cannot_be_done_is_told_and_uses_a_turn(call, problem):
    env = world(max_turns=2)
    observation, reward, terminated, truncated, info = play(env, [call])
    assert problem in response(observation)["error"]
    assert problem in info["error"]
    assert (reward, terminated, truncated) == (0.0, False, False)
    _, reward, terminated, truncated, info = env.step(call)
    assert (reward, terminated, truncated, info["score"], info["valid_path"]) == (0.0, False, True, 0.0, False)


def test_an_answer_that_cannot_be_measured_is_worth_nothing():
    observation, reward, terminated, _, info = play(world(), [answer_text("", ["--barrier"])])
    assert "could not be measured: pass: --barrier has no successor" in observation
    assert (reward, terminated, info["score"]) == (0.0, True, 0.0)
    assert info["over_orig"] == 6 / 7


texts = st.one_of(
    st.text(max_size=40),
    st.sampled_from([measure(GOOD), measure(IDLE), SEARCH, answer_text("", GOOD), measure(["--barrier"])]),
    st.builds("<{}>{}</{}>".format, st.sampled_from(["answer", "tool_call"]), st.text(max_size=20), st.just("answer")),
)


@settings(max_examples=40)
@given(st.lists(texts, max_size=8))
def test_any_text_gives_a_step_that_can_be_told_and_a_clone_goes_its_own_way(written):
    env = world(oz_instructions=4)
    env.reset()
    for text in written:
        before, twin = env.episode, env.clone()
        observation, reward, terminated, truncated, info = env.step(text)
        assert env.observation_space.contains(observation)
        json.dumps(info)
        assert not (terminated and truncated)
        assert twin.episode == before
        assert twin.step(text) == (observation, reward, terminated, truncated, info)
        assert reward == 0.0 or (env.episode.ended and not before.ended)


@given(st.text(max_size=80))
def test_a_turn_or_an_error(text):
    try:
        turn = parse_turn(text)
    except ActionError:
        return
    assert turn.tool or isinstance(turn.answer, tuple)


@given(st.lists(st.text(max_size=8)), st.text(alphabet="abc <>\n", max_size=20))
def test_turns_survive_their_texts(flags, thought):
    assert parse_turn(answer_text(thought, flags)).answer == tuple(flags)
    call = parse_turn(call_text(thought, INSTRCOUNT, {"optimization_flags": flags}))
    assert (call.tool, call.arguments) == (INSTRCOUNT, {"optimization_flags": flags})


@pytest.mark.parametrize(
    ("oz", "first", "path", "answer"), [(4, GOOD, "A", GOOD), (4, IDLE, "B", None), (None, IDLE, "B", ["-Oz"])]
)
def test_transcripts_are_perfect_and_their_responses_the_tools_own(oz, first, path, answer):
    env = world(oz_instructions=oz)
    made = transcript(env, first)
    assert made.path == path
    assert len(made.messages) == 2 + (3 if path == "A" else 5)
    assert made.reward == pytest.approx(0.5 * 1.5 + 0.5 * 30 * 6 / 7)
    said = [message["content"] for message in made.messages if message["role"] == "assistant"]
    heard = [message["content"] for message in made.messages if message["role"] == "user"]
    observation, _ = env.reset()
    for text, seen in zip(said, heard, strict=True):
        assert seen == observation
        observation, *_ = env.step(text)
    if answer:
        assert json.loads(said[-1].split("<answer>")[1].removesuffix("</answer>")) == answer


def test_a_candidate_that_no_tool_takes_makes_no_transcript():
    with pytest.raises(ValueError, match="expected a transcript on a valid path"):
        transcript(world(), ["--barrier"])


def test_the_dataset_command_goes_on_where_its_file_ends(tmp_path):
    out = tmp_path / "data.jsonl"
    arguments = [
        "--split",
        "test",
        "--out",
        str(out),
        "--walks",
        "3",
        "--population",
        "3",
        "--generations",
        "0",
        "--quiet",
    ]
    main([*arguments, "--limit", "1"])
    before = out.read_text()
    main([*arguments, "--limit", "2"])
    lines = out.read_text().splitlines(keepends=True)
    assert (lines[0], len(lines)) == (before, 2)
    assert {json.loads(line)["path"] for line in lines} <= {"A", "B"}
    assert main(["--out", str(tmp_path), "--quiet"]) == 2
