"""The decision token, and characters to tokens, with byte-level tokenizers of several habits."""

import dataclasses
import json

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, normalizers, pre_tokenizers, processors
from transformers import PreTrainedTokenizerFast

from counterfactuals import CounterfactualPair
from interp.tokens import AlignmentError, EncodedPair, TokenizerError, encode_pair, encode_pairs

CHATML = (
    "{% for message in messages %}<|im_start|>{{ message['role'] }}\n{{ message['content'] }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
LLAMA3_WORDS = (
    r"[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"  # digits in threes
)
SPECIAL = ("<|bos|>", "<|im_start|>", "<|im_end|>")
LISTS = [("Ġ", "["), ("Ġ[", "]"), ("]", "}"), ('"', ":")]
NUMBERS = [("1", "0"), ("1", "2"), ("12", "3"), ("2", "8")]


def build(words="digits", merges=(), *, template=CHATML, adds_bos=False, trim=False, normalizer=None):
    """A byte-level tokenizer: `words` is how it splits text first (digits, threes or not at all)."""
    first = {
        "digits": [pre_tokenizers.Digits(individual_digits=True), pre_tokenizers.ByteLevel(add_prefix_space=False)],
        "threes": [
            pre_tokenizers.Split(Regex(LLAMA3_WORDS), "isolated"),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
        ],
        "none": [pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)],
    }[words]
    tokens = [*SPECIAL, *sorted(pre_tokenizers.ByteLevel.alphabet()), *("".join(pair) for pair in merges)]
    backend = Tokenizer(models.BPE(vocab={token: i for i, token in enumerate(tokens)}, merges=list(merges)))
    backend.pre_tokenizer = pre_tokenizers.Sequence(first)
    backend.decoder = decoders.ByteLevel()
    steps = [processors.ByteLevel(trim_offsets=True)] if trim else []
    if adds_bos:
        steps.append(processors.TemplateProcessing(single="<|bos|> $A", special_tokens=[("<|bos|>", 0)]))
    if steps:
        backend.post_processor = processors.Sequence(steps)
    if normalizer is not None:
        backend.normalizer = normalizer
    backend.add_special_tokens([AddedToken(token, normalized=False, special=True) for token in SPECIAL])
    return PreTrainedTokenizerFast(tokenizer_object=backend, bos_token="<|bos|>", chat_template=template)


def make(values=("2", "0"), *, before='{"future_uses":{"', after=',"3":1}}', answer="[7]}", foil="[]}", **fields):
    """A pair whose user message holds `before`, a key `7`, the value and `after`."""
    text_a, text_b = (f'{before}7":{value}{after}' for value in values)
    start = len(before) + len('7":')
    spans = {"key": (len(before) - 1, start - 1), "value": (start, start + len(values[0]))}
    if after:
        spans["after"] = (start + len(values[0]), len(text_a))
    defaults = {
        "id": "p0",
        "environment": "test",
        "kind": "future_uses",
        "messages_a": ({"role": "user", "content": text_a},),
        "messages_b": ({"role": "user", "content": text_b},),
        "action_prefix": '{"tile": 128, "retain": ',
        "answer": answer,
        "foil": foil,
        "spans": spans,
        "group": "g0",
    }
    return CounterfactualPair(**{**defaults, **fields})


def with_earlier(pair, *earlier):
    return dataclasses.replace(pair, messages_a=(*earlier, *pair.messages_a), messages_b=(*earlier, *pair.messages_b))


def text_of(tokenizer, ids):
    return tokenizer.decode(list(ids), skip_special_tokens=False, clean_up_tokenization_spaces=False)


def reason_of(tokenizer, pair):
    with pytest.raises(AlignmentError) as caught:
        encode_pair(tokenizer, pair)
    assert pair.id in str(caught.value)
    return caught.value.reason


SINGLE = build("digits", LISTS)
THREES = build("threes", LISTS + NUMBERS, trim=True)


@pytest.mark.parametrize("tokenizer", [SINGLE, THREES], ids=["digits", "threes"])
def test_decision_is_the_first_token_at_which_the_actions_differ(tokenizer):
    encoded = encode_pair(tokenizer, make())
    assert text_of(tokenizer, encoded.ids_a).endswith('{"tile": 128, "retain":')
    assert [text_of(tokenizer, [t]) for t in encoded.answer] == [" [", "7", "]}"]
    assert [text_of(tokenizer, [t]) for t in encoded.foil] == [" []", "}"]
    assert encoded.decision == len(encoded.ids_a) - 1 == len(encoded.ids_b) - 1


@pytest.mark.parametrize("tokenizer", [SINGLE, THREES], ids=["digits", "threes"])
def test_the_tokens_are_those_of_the_whole_texts(tokenizer):
    pair = make()
    encoded = encode_pair(tokenizer, pair)
    for ids, messages in ((encoded.ids_a, pair.messages_a), (encoded.ids_b, pair.messages_b)):
        prompt = tokenizer.apply_chat_template(list(messages), tokenize=False, add_generation_prompt=True)
        for rest, tail in ((pair.answer, encoded.answer), (pair.foil, encoded.foil)):
            whole = tokenizer(prompt + pair.action_prefix + rest, add_special_tokens=False)["input_ids"]
            assert list(ids + tail) == whole


def test_only_the_value_differs_and_its_span_says_where():
    encoded = encode_pair(SINGLE, make(("2", "0")))
    start, end = encoded.spans["value"]
    assert [i for i, (x, y) in enumerate(zip(encoded.ids_a, encoded.ids_b, strict=True)) if x != y] == [start]
    assert encoded.first_difference == start
    assert end == start + 1
    assert text_of(SINGLE, encoded.ids_a[start:end]) == "2"
    assert text_of(SINGLE, encoded.ids_b[start:end]) == "0"
    assert text_of(SINGLE, encoded.ids_a[slice(*encoded.spans["key"])]) == '"7":'  # `":` is one token
    assert text_of(SINGLE, encoded.ids_a[slice(*encoded.spans["after"])]) == ',"3":1}}'


def test_an_answer_that_begins_the_foil_as_text_is_compared_at_the_next_token():
    encoded = encode_pair(SINGLE, make(answer="[1]}", foil="[12]}"))
    assert text_of(SINGLE, encoded.ids_a).endswith('"retain": [1')
    assert (text_of(SINGLE, encoded.answer), text_of(SINGLE, encoded.foil)) == ("]}", "2]}")


@pytest.mark.parametrize(
    ("tokenizer", "compared"),
    [(SINGLE, ("1", "3")), (build("threes", [*LISTS, ("1", "2"), ("12", "8"), ("3", "2")]), ("128", "32"))],
    ids=["digits", "threes"],
)
def test_other_slots_are_found_in_the_same_way(tokenizer, compared):
    encoded = encode_pair(tokenizer, make(action_prefix='{"tile": ', answer="128}", foil="32}"))
    assert (text_of(tokenizer, encoded.answer[:1]), text_of(tokenizer, encoded.foil[:1])) == compared
    assert text_of(tokenizer, encoded.ids_a).endswith('{"tile": ')


def test_an_action_without_prefix_is_decided_at_the_last_token_of_the_prompt():
    encoded = encode_pair(SINGLE, make(action_prefix="", answer="true", foil="false"))
    assert text_of(SINGLE, encoded.ids_a).endswith("<|im_start|>assistant\n")


def test_values_of_different_length_in_tokens_are_refused():
    assert reason_of(SINGLE, make(("0", "10"))) == "length differs"


def test_values_of_different_length_in_characters_align_where_they_are_one_token():
    encoded = encode_pair(THREES, make(("0", "10")))
    start, end = encoded.spans["value"]
    assert text_of(THREES, encoded.ids_b[start:end]) == "10"
    assert text_of(THREES, encoded.ids_b[slice(*encoded.spans["after"])]) == ',"3":1}}'


def test_a_value_of_several_tokens_may_begin_alike():
    encoded = encode_pair(SINGLE, make(("12", "10")))
    start, end = encoded.spans["value"]
    assert end - start == 2
    assert encoded.first_difference == start + 1
    assert encoded.value_positions == (start + 1,)


def test_a_value_that_shares_a_token_with_its_neighbour_is_allowed_while_all_else_aligns():
    tokenizer = build("none", [(":", "0"), (":", "2")])
    encoded = encode_pair(tokenizer, make(("2", "0")))
    assert text_of(tokenizer, encoded.ids_a[slice(*encoded.spans["value"])]) == ":2"


def test_a_value_that_moves_the_boundaries_of_its_neighbours_is_refused():
    assert reason_of(build("none", [(":", "0")]), make(("2", "0"))) == "length differs"
    tokenizer = build("none", [("0", ","), (",", '"')])  # A: 2 ," 3    B: 0, " 3
    pair = make(("2", "0"))
    assert reason_of(tokenizer, pair) == "span differs"
    alone = dataclasses.replace(pair, spans={"value": pair.spans["value"]})
    assert reason_of(tokenizer, alone) == "tokens differ outside the value"


def test_an_identical_pair_differs_nowhere_and_begins_at_its_value():
    encoded = encode_pair(SINGLE, make(("2", "2")))
    assert encoded.ids_a == encoded.ids_b
    assert encoded.value_positions == tuple(range(*encoded.spans["value"]))


def test_a_difference_that_the_tokenizer_does_not_see_is_refused():
    tokenizer = build("digits", LISTS, normalizer=normalizers.NFKC())
    assert reason_of(tokenizer, make(("2", "２"))) == "no difference"


def test_a_key_is_where_the_pair_says_not_where_its_digits_recur():
    before = '{"nodes":[7,{"17":2}],"fast_mem":[7],"future_uses":{"17":0,"'
    encoded = encode_pair(SINGLE, make(before=before, after=',"77":2}}'))
    prompt = text_of(SINGLE, encoded.ids_a)
    start = encoded.spans["value"][0]
    assert text_of(SINGLE, encoded.ids_a[:start]) == prompt[: prompt.index('"7":2') + len('"7":')]


def test_a_user_message_that_occurs_twice_is_found_in_its_own_place():
    pair = make()
    quoted = with_earlier(
        pair,
        {"role": "system", "content": f"user-message, for example {pair.user_a}"},
        {"role": "user", "content": pair.user_a},
        {"role": "assistant", "content": '{"tile": 128, "retain": [7]}'},
    )
    alone, encoded = encode_pair(SINGLE, pair), encode_pair(SINGLE, quoted)
    shift = len(encoded.ids_a) - len(alone.ids_a)
    assert shift > 0
    assert encoded.spans == {name: (start + shift, end + shift) for name, (start, end) in alone.spans.items()}
    assert encoded.first_difference == encoded.spans["value"][0]


def test_characters_are_counted_as_characters_not_as_bytes():
    encoded = encode_pair(SINGLE, make(before='{"é🙂":"naïve 検索","future_uses":{"'))
    assert text_of(SINGLE, encoded.ids_a[slice(*encoded.spans["value"])]) == "2"


def test_white_space_that_a_tokenizer_leaves_out_of_its_offsets_still_has_a_token():
    pair = make()
    start, end = pair.spans["value"]
    spaced = dataclasses.replace(
        pair,
        messages_a=({"role": "user", "content": pair.user_a[:start] + " [" + pair.user_a[start:]},),
        messages_b=({"role": "user", "content": pair.user_b[:start] + " [" + pair.user_b[start:]},),
        spans={"value": (start + 2, end + 2), "space": (start, start + 1)},
    )
    encoded = encode_pair(THREES, spaced)
    assert text_of(THREES, encoded.ids_a[slice(*encoded.spans["space"])]) == " ["


@pytest.mark.parametrize("adds_bos", [True, False])
@pytest.mark.parametrize("writes_bos", [True, False])
def test_a_beginning_of_sequence_token_comes_from_the_template_alone(adds_bos, writes_bos):
    tokenizer = build("digits", LISTS, template=("{{ bos_token }}" if writes_bos else "") + CHATML, adds_bos=adds_bos)
    pair = make()
    encoded = encode_pair(tokenizer, pair)
    fed = tokenizer.apply_chat_template(list(pair.messages_a), add_generation_prompt=True)["input_ids"]
    assert list(encoded.ids_a[: len(fed)]) == fed
    assert encoded.ids_a.count(tokenizer.bos_token_id) == int(writes_bos)
    assert text_of(tokenizer, encoded.ids_a[slice(*encoded.spans["value"])]) == "2"


@pytest.mark.parametrize(
    ("template", "reason"),
    [
        (
            CHATML.replace("message['content']", "message['content'] | upper"),
            "template drops or repeats the user message",
        ),
        (CHATML.replace("message['content']", "message['content'] | trim"), "template alters the user message"),
        (CHATML.replace("message['content']", "message['content'] * 2"), "template drops or repeats the user message"),
        (CHATML.replace("message['content']", "''"), "template drops or repeats the user message"),
        ("{{ raise_exception('System role not supported') }}", "template refuses the messages"),
    ],
)
def test_a_template_that_does_not_pass_the_message_on_is_refused(template, reason):
    assert reason_of(build("digits", LISTS, template=template), make(after=',"3":1}}\n')) == reason


def test_a_template_may_trim_what_has_nothing_to_trim():
    template = CHATML.replace("message['content']", "message['content'] | trim")
    assert encode_pair(build("digits", LISTS, template=template), make()) == encode_pair(SINGLE, make())


def test_a_prompt_that_merges_with_the_action_is_refused():
    template = "{% for m in messages %}{{ m['content'] }}{% endfor %} assistant:"
    assert reason_of(build("none", [(":", "{")], template=template), make()) == "prompt and action share a token"
    assert encode_pair(build("none", template=template), make())


def test_a_prompt_that_ends_in_trimmed_white_space_does_not_merge_with_the_action():
    template = "{% for m in messages %}{{ m['content'] }}{% endfor %}{{ '\\n\\n### Response:\\n' }}"
    tokenizer = build("threes", [*LISTS, (":", "Ċ")], template=template, trim=True)
    assert text_of(tokenizer, encode_pair(tokenizer, make()).ids_a).endswith('Response:\n{"tile": 128, "retain":')


def test_actions_of_which_one_begins_the_other_leave_nothing_to_compare():
    assert reason_of(SINGLE, make(answer="[7", foil="[7]}")) == "answer and foil begin alike"
    assert reason_of(SINGLE, make(answer="[7]}", foil="[7")) == "answer and foil begin alike"


def test_a_tokenizer_without_template_stops_the_run():
    with pytest.raises(TokenizerError, match="chat_template"):
        encode_pairs(build(template=None), [make()])


def test_pairs_left_out_are_named_in_order():
    pairs = [make(id="good"), make(("0", "10"), id="long"), make(("1", "111"), id="longer"), make(id="fine")]
    encoded, left_out = encode_pairs(SINGLE, pairs)
    assert [pair.id for pair in encoded] == ["good", "fine"]
    assert left_out == [("long", "length differs"), ("longer", "length differs")]


def test_an_encoded_pair_does_not_change():
    encoded = encode_pair(SINGLE, make())
    assert isinstance(encoded, EncodedPair)
    with pytest.raises(dataclasses.FrozenInstanceError):
        encoded.ids_a = ()
    with pytest.raises(TypeError):
        encoded.spans["value"] = (0, 1)


@settings(max_examples=60, deadline=None)
@given(
    uses=st.dictionaries(st.integers(0, 40), st.integers(0, 20), min_size=1, max_size=8),
    choice=st.integers(0, 7),
    values=st.tuples(st.integers(0, 9), st.integers(0, 9)).filter(lambda pair: pair[0] != pair[1]),
    note=st.text(st.characters(exclude_categories=["Cs"]), max_size=12),
    tokenizer=st.sampled_from([SINGLE, THREES, build("threes", LISTS)]),
)
def test_spans_hold_their_characters_and_nothing_else_differs(uses, choice, values, note, tokenizer):
    key = sorted(uses)[choice % len(uses)]
    texts = [
        json.dumps({"note": note, "uses": {**uses, key: value}}, ensure_ascii=False, separators=(",", ":"))
        for value in values
    ]
    start = texts[0].index("{", 1) + texts[0][texts[0].index("{", 1) :].index(f'"{key}":') + len(f'"{key}":')
    if not texts[0][start:].startswith(str(values[0])) or texts[0][:start] != texts[1][:start]:
        return  # the note holds a brace, so that this simple search found another place
    pair = make(
        messages_a=({"role": "user", "content": texts[0]},),
        messages_b=({"role": "user", "content": texts[1]},),
        spans={"value": (start, start + 1), "all": (0, len(texts[0]))},
    )
    encoded = encode_pair(tokenizer, pair)
    assert text_of(tokenizer, encoded.ids_a[slice(*encoded.spans["value"])]) == str(values[0])
    assert text_of(tokenizer, encoded.ids_b[slice(*encoded.spans["value"])]) == str(values[1])
    assert text_of(tokenizer, encoded.ids_a[slice(*encoded.spans["all"])]) == texts[0]
    differ = [i for i, (x, y) in enumerate(zip(encoded.ids_a, encoded.ids_b, strict=True)) if x != y]
    assert differ == list(encoded.value_positions)


@pytest.mark.slow
def test_generated_pairs_align_in_the_built_in_models_own_tokenizer():
    from transformers import AutoTokenizer

    from counterfactuals import generate_pairs
    from interp.built_in import built_in_folder

    tokenizer = AutoTokenizer.from_pretrained(built_in_folder(), local_files_only=True)
    pairs = generate_pairs(12, 0)
    encoded, left_out = encode_pairs(tokenizer, pairs)
    assert left_out == []
    for pair, found in zip(pairs, encoded, strict=True):
        assert (text_of(tokenizer, found.answer[:1]), text_of(tokenizer, found.foil[:1])) == (" [", " []")
        assert text_of(tokenizer, found.ids_a[slice(*found.spans["value"])]) == pair.value_a
        assert text_of(tokenizer, found.ids_b[slice(*found.spans["value"])]) == pair.value_b
        assert text_of(tokenizer, found.ids_a).endswith('"retain":')
