"""What a teacher says, and how far a student is from it: against whole logits in float64."""

import pytest
import torch

from shardwise.engine.teacher_outputs import Divergence, TeacherOutputs
from shardwise.ops import LogitTransform

TEACHER, STUDENT = LogitTransform(softcap=3.0), LogitTransform(scale=0.5)


def log_softmax(states, projection, transform, temperature):
    logits = transform.forward_(states.double() @ projection.double().t())
    return torch.log_softmax(logits / temperature, dim=-1)


@pytest.mark.parametrize("temperature", [1.0, 2.0])
@pytest.mark.parametrize("kind", ["forward_kl", "reverse_kl", "jensen_shannon"])
def test_each_side_goes_through_its_own_projection_and_transform(kind, temperature):
    generator = torch.Generator().manual_seed(0)
    own, projection = torch.randn(5, 8, generator=generator), torch.randn(17, 8, generator=generator)
    states, words = torch.randn(5, 4, generator=generator), torch.randn(17, 4, generator=generator)
    divergence = Divergence(kind=kind, beta=0.3, temperature=temperature)
    outputs = TeacherOutputs(states=states, projection=words, transform=TEACHER, divergence=divergence)
    teacher, student = (
        log_softmax(states, words, TEACHER, temperature),
        log_softmax(own, projection, STUDENT, temperature),
    )
    match kind:
        case "forward_kl":
            expected = (teacher.exp() * (teacher - student)).sum(1)
        case "reverse_kl":
            expected = (student.exp() * (student - teacher)).sum(1)
        case _:
            mixture = (0.3 * teacher.exp() + 0.7 * student.exp()).log()
            expected = (0.3 * teacher.exp() * (teacher - mixture) + 0.7 * student.exp() * (student - mixture)).sum(1)
    found = outputs.divergence_of(own, projection, STUDENT)
    torch.testing.assert_close(found.double(), expected, atol=1e-5, rtol=1e-5)


def test_outputs_for_other_tokens_are_a_bug():
    outputs = TeacherOutputs(
        states=torch.zeros(3, 4), projection=torch.zeros(17, 4), transform=TEACHER, divergence=Divergence()
    )
    with pytest.raises(AssertionError, match="2 scored tokens, teacher outputs of 3"):
        outputs.divergence_of(torch.zeros(2, 8), torch.zeros(17, 8), STUDENT)
