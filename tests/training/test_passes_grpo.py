"""Reinforcement on whole dialogues: what a rollout holds, that a planted reward is followed, and interruptions."""

import json
import re

import numpy as np
import pytest
import torch
from peft import PeftModel
from safetensors.torch import load_file
from torch.nn.functional import log_softmax

from counterfactuals.passes_moments import DECIDE, instrcount_text, search_text
from env.passes import PassesEnv, load_program, load_programs
from env.passes.action import answer_text
from env.passes.catalogue import OZ
from env.passes.prompts import messages
from env.training import passes_grpo, passes_rollouts
from env.training.passes_grpo import main
from env.training.passes_rollouts import Chat, play
from env.training.passes_store import earlier_training, trained_programs, with_adapter, write_passes_adapter
from env.training.store import TrainingError
from interp.answers import answer
from interp.base_models import find_base, load_base
from tests.interp.tiny import save_base, tiny_model, tiny_tokenizer
from tests.passes.worlds import GOOD, GRAPH, TINY, small

STEPS, DIALOGUES = 3, 2
PROGRAM = min(load_programs("train"), key=lambda program: program.instructions)
PLAYED = {p.name for p in load_programs("train") if p.instructions == PROGRAM.instructions}
SEQUENCE = ("--sroa", "--instcombine", "--simplifycfg")


@pytest.fixture(scope="module")
def base(tmp_path_factory):
    return save_base(tmp_path_factory.mktemp("tiny") / "base", max_position_embeddings=8192)


@pytest.fixture(scope="module")
def start(base, tmp_path_factory):
    """A fresh adapter, as if fine-tuning had left it."""
    folder = tmp_path_factory.mktemp("start") / "sft"
    resolved = find_base(str(base))
    model, _ = load_base(resolved, dtype="bfloat16")
    write_passes_adapter(with_adapter(model, 2, 0), folder, resolved, {"runs": [{"stage": "sft"}]}, ["a/program"])
    return folder


def right_turn(chat):
    """What keeps to the protocol, after a rendered chat."""
    (name,) = set(re.findall(r"exact filepath: (\S+)\n", chat))
    heard = [json.loads(text) for text in re.findall(r"<tool_response>\n(\{.*?\})\n</tool", chat, re.DOTALL)]
    if not heard:
        return instrcount_text(name, SEQUENCE)
    if len(heard) == 1:
        return answer_text(DECIDE, SEQUENCE) if heard[0]["improvement_over_oz"] > 0 else search_text(name)
    found = heard[1]["best_pass_sequence"] if heard[1]["improvement_percentage"] > 0 else [OZ]
    return answer_text("?", found)


WRONG = answer_text("?", ["--barrier"])


def scripted(choose):
    """A sampler whose dialogues, by their place in the batch, keep to the protocol or do not."""
    tokenizer = tiny_tokenizer()

    def sample(model, prompts, rngs, end, temperature, most):
        turns = [choose(place, tokenizer.decode(prompt)) for place, prompt in enumerate(prompts)]
        return [[*tokenizer(turn)["input_ids"], end] for turn in turns]

    return sample


@pytest.mark.parametrize("gain", [4, None], ids=["A", "B"])
def test_a_rollout_is_the_chat_as_it_is_rendered_with_the_agents_tokens_marked(gain, monkeypatch):
    monkeypatch.setattr(passes_rollouts, "_sample", scripted(lambda _, chat: right_turn(chat)))
    monkeypatch.setattr("tests.training.test_passes_grpo.SEQUENCE", tuple(GOOD))
    tokenizer = tiny_tokenizer()
    env = PassesEnv(small(gain), max_turns=3, graph=GRAPH, genetics=TINY)
    (one,) = play(None, Chat(tokenizer), [env], [np.random.default_rng(0)])
    turns = [exchange.turn for exchange in env.episode.exchanges]
    assert (len(turns), one.valid_path) == (2 if gain else 3, True)

    again, observation = env.clone(), None
    observation, _ = again.reset()
    chat, total, marked = list(messages(observation)), 0.0, []
    while not again.episode.ended:
        text = right_turn(tokenizer.apply_chat_template(chat, tokenize=False))
        marked.append(text + "<|im_end|>")
        observation, reward, *_ = again.step(text)
        total += reward
        chat += [{"role": "assistant", "content": text}, {"role": "user", "content": observation}]
    rendered = tokenizer.apply_chat_template(chat[:-1], tokenize=False).removesuffix("\n")
    assert tokenizer.decode(one.prompt + one.ids) == rendered
    assert one.prompt + one.ids == tokenizer(rendered)["input_ids"]
    assert "".join(tokenizer.decode([i]) for i, mine in zip(one.ids, one.mask, strict=True) if mine) == "".join(marked)
    assert one.reward == pytest.approx(total)


def test_a_turn_that_is_cut_is_ended_by_what_is_not_learnt(base):
    tokenizer, model = tiny_tokenizer(), tiny_model(max_position_embeddings=8192)
    env = PassesEnv(small(), max_turns=2, graph=GRAPH, genetics=TINY)
    (one,) = play(model, Chat(tokenizer), [env], [np.random.default_rng(3)], max_new_tokens=5)
    assert env.episode.truncated
    assert (one.reward, one.valid_path, sum(one.mask)) == (0.0, False, 10)
    between = Chat(tokenizer).between(env.clone().reset()[0])
    assert tokenizer.decode(between).startswith("\n<|im_start|>user\n")
    assert one.ids[5] == tokenizer.eos_token_id
    assert one.mask[:6] == [1] * 5 + [0]


def test_dialogues_do_not_depend_on_their_neighbours_and_cold_ones_are_the_likeliest():
    tokenizer, model = tiny_tokenizer(), tiny_model(max_position_embeddings=8192)
    chat = Chat(tokenizer)

    def written(places, temperature=1.0):
        envs = [PassesEnv(small(), max_turns=1, graph=GRAPH, genetics=TINY) for _ in places]
        rngs = [np.random.default_rng([7, place]) for place in places]
        return [one.ids for one in play(model, chat, envs, rngs, temperature, max_new_tokens=12)]

    together = written([0, 1, 2])
    assert together == [written([place])[0] for place in range(3)]
    assert len(set(map(tuple, together))) == 3
    question = PassesEnv(small(), graph=GRAPH, genetics=TINY).reset()[0]
    (expected,) = answer(model, tokenizer, [list(messages(question))], max_new_tokens=12)
    assert tokenizer.decode(written([0], 1e-6)[0], skip_special_tokens=True) == expected


def test_tokens_are_drawn_as_often_as_the_model_says():
    logits = torch.tensor([[0.0, 1.0, 2.0, -30.0]])
    rng, count = np.random.default_rng(0), 4000
    drawn = np.bincount([passes_rollouts._draw(logits, [rng], 0.5)[0] for _ in range(count)], minlength=4) / count
    expected = torch.softmax(logits[0] / 0.5, 0).numpy()
    assert drawn == pytest.approx(expected, abs=4 * (0.25 / count) ** 0.5)
    assert drawn[3] == 0


def run(base, start, out, *more):
    arguments = ["--base", str(base), "--init", str(start), "--steps", str(STEPS), "--dialogues", str(DIALOGUES)]
    arguments += ["--largest", str(PROGRAM.instructions), "--learning-rate", "2e-2", "--save-every", "1"]
    return main([*arguments, "--out", str(out), "--quiet", *more])


def log_probability(base, adapter, turn):
    """Of a first turn about the program."""
    model, tokenizer = load_base(find_base(str(base)), dtype="float32")
    model = PeftModel.from_pretrained(model, adapter)
    prompt = Chat(tokenizer).prompt(PassesEnv(PROGRAM).reset()[0])
    ids = [*prompt, *tokenizer(turn)["input_ids"]]
    with torch.no_grad():
        logits = model(torch.tensor([ids])).logits[0, len(prompt) - 1 : -1]
    return float(log_softmax(logits, -1).gather(1, torch.tensor(ids[len(prompt) :])[:, None]).sum())


def worth(name):
    """The reward of the dialogue that keeps to the protocol."""
    env, total = PassesEnv(load_program(name), genetics=TINY), 0.0
    chat, _ = env.reset()
    while not env.episode.ended:
        observation, reward, *_ = env.step(right_turn(chat))
        chat, total = chat + observation, total + reward
    return total


@pytest.mark.slow
def test_what_is_rewarded_becomes_likelier_and_an_interruption_changes_nothing(base, start, tmp_path, monkeypatch):
    monkeypatch.setattr(
        passes_rollouts, "_sample", scripted(lambda place, chat: right_turn(chat) if place == 0 else WRONG)
    )
    monkeypatch.setattr(passes_grpo, "SEARCH", TINY)
    assert run(base, start, tmp_path / "whole") == 0
    right = instrcount_text(PROGRAM.name, SEQUENCE)
    moved = [log_probability(base, tmp_path / "whole", t) - log_probability(base, start, t) for t in (right, WRONG)]
    assert moved[0] > 1 > moved[1]

    class Interrupting(passes_grpo.JsonLog):
        def on_log(self, args, state, control, **kw):
            super().on_log(args, state, control, **kw)
            if state.global_step == 2:
                raise KeyboardInterrupt

    with monkeypatch.context() as patched:
        patched.setattr(passes_grpo, "JsonLog", Interrupting)
        with pytest.raises(KeyboardInterrupt):
            run(base, start, tmp_path / "broken")
    assert run(base, start, tmp_path / "broken", "--resume") == 0
    whole, resumed = (load_file(tmp_path / name / "adapter_model.safetensors") for name in ("whole", "broken"))
    assert whole.keys() == resumed.keys()
    assert all(torch.equal(whole[key], resumed[key]) for key in whole)
    log = [json.loads(line) for line in (tmp_path / "broken" / "training.jsonl").read_text().splitlines()]
    assert [line["step"] for line in log] == list(range(1, STEPS + 1))
    assert all(line["rewards/valid_path/mean"] == 0.5 for line in log)
    # Of the two dialogues of a step one is worth nothing, and the other what the environment says.
    assert {round(line["reward"], 4) for line in log} == {round(worth(name) / 2, 4) for name in PLAYED}
    runs = earlier_training(tmp_path / "whole")["runs"]
    assert [entry["stage"] for entry in runs] == ["sft", "grpo"]
    assert trained_programs(tmp_path / "whole") == {"a/program", *PLAYED}


def test_a_run_says_why_it_does_not_start(base, start, tmp_path, capsys):
    assert run(base, start, tmp_path / "a", "--resume") == 2
    assert "expected an unfinished run, found none" in capsys.readouterr().err
    (tmp_path / "b" / "checkpoints").mkdir(parents=True)
    assert run(base, start, tmp_path / "b") == 2
    assert "expected no unfinished run, found one; --resume goes on with it" in capsys.readouterr().err
    assert run(base, base, tmp_path / "c") == 2
    assert "workbench.json: expected the record of a training run" in capsys.readouterr().err
    with pytest.raises(SystemExit) as exit_:
        run(base, start, tmp_path / "d", "--dialogues", "1")
    assert exit_.value.code == 2


def test_a_chat_template_that_rewrites_a_chat_is_refused():
    tokenizer = tiny_tokenizer()
    tokenizer.chat_template = "{{ messages | length }}" + tokenizer.chat_template
    with pytest.raises(TrainingError, match="chat template: expected one that continues a chat"):
        Chat(tokenizer)
