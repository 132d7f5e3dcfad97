"""Attribution against gradients of a plain forward, and against small patches, to which it is the limit."""

from dataclasses import replace

import pytest
import torch

from interp.attribution import attribute, gradients
from interp.components import patch_component
from interp.subject import Subject
from interp.sweep import patch, run_pair
from tests.interp.test_sweep import DECISION, VALUE, make_pair
from tests.interp.tiny import SIZES, tiny_pair_folders

ANSWER, FOIL = 40, 41
STEP = 1e-2


@pytest.fixture(scope="module", params=["llama", "qwen2"])
def subject(request, tmp_path_factory):
    return Subject.load(tiny_pair_folders(tmp_path_factory.mktemp(request.param), request.param)[0])


@pytest.fixture(scope="module")
def pair():
    return make_pair(1)


def towards(recipient, donor, step):
    """The recipient's run moved by `step` of the way to the donor's, in everything that is recorded."""
    moved = {
        name: ours + step * (donor.components[name] - ours) for name, ours in recipient.components.items()
    }  # fmt: skip
    return replace(donor, residual=recipient.residual + step * (donor.residual - recipient.residual), components=moved)


def test_gradients_equal_those_of_a_plain_forward(subject, pair):
    run, _ = run_pair(subject, pair)
    found = gradients(subject, run, ANSWER, FOIL)
    causal, kept = subject.causal_lm, []
    handles = [layer.mlp.register_forward_hook(lambda *args: kept.append(args[2])) for layer in subject.decoder.layers]
    embedded = causal.get_input_embeddings()(torch.tensor([run.ids])).detach().requires_grad_()
    logits = causal(inputs_embeds=embedded, use_cache=False).logits[0, -1]
    stream, *mlp = torch.autograd.grad(logits[ANSWER] - logits[FOIL], [embedded, *kept])
    for handle in handles:
        handle.remove()
    torch.testing.assert_close(found["residual"][0], stream[0, run.start :], rtol=1e-3, atol=1e-4)
    for layer, gradient in enumerate(mlp):
        torch.testing.assert_close(found["mlp"][layer], gradient[0, run.start :], rtol=1e-3, atol=1e-4)
    assert all(parameter.grad is None for parameter in causal.parameters())


@pytest.mark.parametrize("position", [VALUE, DECISION])
@pytest.mark.parametrize("component", ["residual", "attention", "mlp", "heads"])
def test_attribution_is_the_limit_of_small_patches(subject, pair, position, component):
    donor, recipient = run_pair(subject, pair)
    score = attribute(gradients(subject, recipient, ANSWER, FOIL), recipient, donor, [position])[component]
    if component == "heads":
        score = score.unflatten(-1, (-1, SIZES["head_dim"])).sum(-1).flatten()

    def moved(step):
        towards_donor = towards(recipient, donor, step)
        if component == "residual":
            logits = patch(subject, recipient, towards_donor, [position]).logits
        else:
            logits = patch_component(subject, recipient, towards_donor, [position], component).logits
        return logits[:, ANSWER] - logits[:, FOIL]

    slope = (moved(STEP) - moved(-STEP)) / (2 * STEP)
    torch.testing.assert_close(score, slope, rtol=0.03, atol=5e-3)
    assert score.abs().max() > 0.02


def test_nothing_is_attributed_to_a_run_itself(subject, pair):
    run, _ = run_pair(subject, pair)
    scores = attribute(gradients(subject, run, ANSWER, FOIL), run, run, [VALUE, DECISION])
    assert all(not score.any() for score in scores.values())
