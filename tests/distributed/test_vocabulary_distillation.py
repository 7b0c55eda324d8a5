"""Distillation over ranks: the loss, the divergence of every token and all gradients are those of two models of
transformers with all logits in double precision, whatever the layouts of student and teacher."""

import copy
import itertools
from dataclasses import dataclass
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from tensor_shapes import TensorShapes
from tiny_models import random_samples, tiny_folder, tiny_model

from shardwise.config import ConfigError, EngineConfig, FrozenEngineConfig, ModelError, OptimizerConfig
from shardwise.data.packing import pack, unpack
from shardwise.engine import Divergence, TrainEngine, vocabulary
from shardwise.ops import plain_name
from shardwise.recipes.losses import distill_loss

CPU = torch.device("cpu")
LONG = [11, 4, 7, 7, 1, 16, 3, 9, 9, 5, 2, 12]
"""Several micro-batches of 16 tokens on four ranks; one sequence trains nothing."""
SHORT = [9, 5, 5]
"""One of four ranks has only an empty micro-batch."""
CAP = 16
COEF = 0.3
VOCAB = 101
PAIRS = {
    # tied student, untied and wider teacher of another family; then untied student, tied teacher with soft caps
    "qwen3 from llama": ("qwen3", {}, "llama", {"hidden_size": 48, "num_attention_heads": 4, "num_hidden_layers": 3}),
    "llama from gemma2": ("llama", {"hidden_size": 28, "num_attention_heads": 4}, "gemma2", {"num_hidden_layers": 3}),
}


def own_reverse_kl(student_logprobs, teacher_logprobs):
    return student_logprobs.exp() * (student_logprobs - teacher_logprobs)


KINDS = {
    "forward": Divergence(kind="forward_kl", temperature=2.0),
    "reverse": Divergence(kind="reverse_kl"),
    "js": Divergence(kind="jensen_shannon", beta=0.3, temperature=0.7),
    "own": Divergence(kind=own_reverse_kl, temperature=0.7),
}


@dataclass(frozen=True)
class Cell:
    """A layout of both models, and how the samples are split."""

    world_size: int = 1
    student: tuple = ()
    teacher: tuple = ()
    lengths: tuple = tuple(LONG)

    @property
    def num_sharing(self):
        return dict(self.student).get("ulysses_size", 1)

    @property
    def fsdp_size(self):
        return dict(self.student).get("fsdp_size", self.world_size)


def cell(world_size, student=None, teacher=None, lengths=LONG):
    return Cell(world_size, tuple((student or {}).items()), tuple((teacher or {}).items()), tuple(lengths))


SP2, SP4 = {"ulysses_size": 2}, {"ulysses_size": 4}
CELLS = {
    "1": cell(1),
    "1, memory options": cell(
        1,
        {"activation_checkpointing": "full", "apply_tiled_mlp": True},
        {"offload_policy": True, "apply_tiled_mlp": True},
    ),
    "2": cell(2),
    "2, empty": cell(2, lengths=[5]),
    "2, replicas of the teacher": cell(2, {"reduce_gradients": "last_micro_batch"}, {"fsdp_size": 1}),
    "2, replicas of the student": cell(2, {"fsdp_size": 1, "reshard_after_forward": False}),
    "2 sp2": cell(2, SP2, SP2),
    "2 sp2, empty": cell(2, SP2, SP2 | {"reshard_after_forward": False}, lengths=[3]),
    "4": cell(4),
    "4, empty": cell(4, lengths=SHORT),
    "2x2 from 4": cell(4, {"fsdp_size": 2}),
    "4 from 2x2": cell(4, {"activation_checkpointing": "selective"}, {"fsdp_size": 2}, lengths=SHORT),
    "4 sp2": cell(4, SP2, SP2),
    "2x2 sp2 from 4 sp2": cell(4, {"fsdp_size": 2} | SP2, SP2, lengths=SHORT),
    "4 sp4 from 4 sp4": cell(4, SP4, SP4),
}


@pytest.fixture(scope="module")
def pairs(tmp_path_factory):
    """(student, teacher, folder of each) by name."""
    made = {}
    for name, (family, options, teacher_family, teacher_options) in PAIRS.items():
        models = [
            tiny_model(family, vocab_size=VOCAB, **options).eval(),
            tiny_model(teacher_family, seed=1, vocab_size=VOCAB, **teacher_options).eval(),
        ]
        folders = [str(tmp_path_factory.mktemp("model")) for _ in models]
        for model, folder in zip(models, folders, strict=True):
            model.save_pretrained(folder)
        made[name] = (*models, *folders)
    return made


def samples_of(lengths):
    return random_samples(list(lengths), vocab=VOCAB, prompt_tokens=1, seed=len(lengths))


def reference(student, teacher, samples, divergence):
    """The loss, the divergence of every token by sample, and the gradients, from all logits of both models: in double
    precision, every sample alone."""
    student, teacher = copy.deepcopy(student).double(), copy.deepcopy(teacher).double()
    total, num_tokens, rows = 0.0, 0, []
    for sample in samples:
        logits = student(input_ids=sample.token_ids[None], use_cache=False).logits[0]
        with torch.no_grad():
            teacher_logits = teacher(input_ids=sample.token_ids[None], use_cache=False).logits[0]
        q = (logits / divergence.temperature).log_softmax(-1)
        p = (teacher_logits / divergence.temperature).log_softmax(-1)
        match "reverse_kl" if divergence.kind is own_reverse_kl else divergence.kind:
            case "forward_kl":
                per_token = (p.exp() * (p - q)).sum(-1)
            case "reverse_kl":
                per_token = (q.exp() * (q - p)).sum(-1)
            case "jensen_shannon":
                beta = divergence.beta
                m = (beta * p.exp() + (1 - beta) * q.exp()).log()
                per_token = beta * (p.exp() * (p - m)).sum(-1) + (1 - beta) * (q.exp() * (q - m)).sum(-1)
        own = torch.zeros(len(sample.token_ids))
        for t in sample.loss_mask.nonzero()[:, 0].tolist():
            surprise = -logits[t - 1].log_softmax(-1)[sample.token_ids[t]]
            total = total + per_token[t - 1] + COEF * surprise
            num_tokens += 1
            own[t] = per_token[t - 1].detach()
        rows.append(own)
    loss = total / num_tokens
    loss.backward()
    return loss.item(), rows, {name: p.grad.float() for name, p in student.named_parameters()}


def distill_cells(student_folder, teacher_folder, cells, divergence):
    """Of every cell: this rank's share of the loss, the divergences by sample, and its shards of the gradients, for the
    samples in order and in reverse."""
    results = []
    for own in cells:
        try:
            results.append(distill_cell(student_folder, teacher_folder, own, divergence))
        except Exception as error:
            error.add_note(f"in the cell {own}")
            raise
    return results


def distill_cell(student_folder, teacher_folder, own, divergence):
    student = TrainEngine.build(
        Path(student_folder), EngineConfig(**dict(own.student)), device=CPU, optimizer=OptimizerConfig()
    )
    teacher = TrainEngine.build(Path(teacher_folder), FrozenEngineConfig(**dict(own.teacher)), device=CPU)
    student.check_teacher(teacher)
    can_leave = not dict(own.teacher).get("offload_policy")
    results = []
    for samples in (samples_of(own.lengths), samples_of(own.lengths)[::-1]):
        step = pack(samples, num_shards=dist.get_world_size() // own.num_sharing, max_tokens=CAP)
        batches = step.shards[dist.get_rank() // own.num_sharing]
        teacher.onload("params")
        teacher_outputs = teacher.teacher_outputs(batches, divergence)
        if can_leave:
            teacher.offload("params")
        evaluated = [
            out.divergence for out in student.forward(batches, with_logprobs=False, teacher_outputs=teacher_outputs)
        ]
        shards = [None] * dist.get_world_size()
        dist.all_gather_object(shards, evaluated)
        metrics = student.forward_backward(
            batches, distill_loss(cross_entropy_coef=COEF), step.denominators, teacher_outputs=teacher_outputs
        )
        gradients = {
            plain_name(name): p.grad.to_local().clone() for name, p in student._model.hf_model.named_parameters()
        }
        student._model.zero_grad()
        divergences = unpack(step, shards[:: own.num_sharing])
        results.append((metrics["train/loss"].result(), divergences, gradients))
    return results


def whole_gradients(shards_by_rank, fsdp_size):
    """Puts the ranks' shards together. Replicas must hold the same bits."""
    first = shards_by_rank[:fsdp_size]
    for start in range(fsdp_size, len(shards_by_rank), fsdp_size):
        for own, other in zip(first, shards_by_rank[start : start + fsdp_size], strict=True):
            assert all(torch.equal(own[name], other[name]) for name in own)
    return {name: torch.cat([rank[name] for rank in first]) for name in first[0]}


COMBINATIONS = list(itertools.product(PAIRS, KINDS, (1, 2, 4)))
COVERING = {
    *(("qwen3 from llama", kind, size) for kind, size in (("forward", 1), ("js", 2))),
    ("llama from gemma2", "reverse", 1),
}


@pytest.mark.parametrize(
    ("pair", "kind", "world_size"),
    [pytest.param(*one, marks=() if one in COVERING else pytest.mark.full) for one in COMBINATIONS],
)
def test_loss_and_gradients_equal_those_of_all_logits(run_ranks, pairs, pair, kind, world_size):
    divergence = KINDS[kind]
    student, teacher, *folders = pairs[pair]
    cells = {name: own for name, own in CELLS.items() if own.world_size == world_size}
    results = run_ranks(
        distill_cells, world_size, *folders, list(cells.values()), divergence, timeout_seconds=60 + 10 * len(cells)
    )
    for (name, own), *ranks in zip(cells.items(), *results, strict=True):
        samples = samples_of(own.lengths)
        loss, rows, gradients = reference(student, teacher, samples, divergence)
        for is_reversed, parts in enumerate(zip(*ranks, strict=True)):
            assert sum(part[0] for part in parts[:: own.num_sharing]) == pytest.approx(loss, rel=2e-6), name
            for part in parts:
                found = part[1][::-1] if is_reversed else part[1]
                torch.testing.assert_close(found, rows, rtol=1e-5, atol=2e-6, msg=name)
            whole = whole_gradients([part[2] for part in parts], own.fsdp_size)
            assert whole.keys() == gradients.keys()
            # The keys' gradient is the small rest of large terms where a query sees two tokens: it has their rounding.
            rounding = torch.finfo(torch.float32).eps * max(g.abs().max() for g in gradients.values())
            for key, gradient in whole.items():
                error = (gradient - gradients[key]).abs().max()
                assert error <= 1e-5 * gradients[key].abs().max() + rounding, (name, key, error)


def learn(student_folder, teacher_folder, options):
    """Divergences of a student that takes 25 steps on the same samples, and whether the teacher stayed as it was."""
    student = TrainEngine.build(
        Path(student_folder),
        EngineConfig(**options),
        device=CPU,
        optimizer=OptimizerConfig(learning_rate=1e-2),
        total_steps=25,
    )
    teacher = TrainEngine.build(Path(teacher_folder), FrozenEngineConfig(), device=CPU)
    before = dict(teacher.named_weights(torch.float32))
    step = pack(samples_of(LONG), num_shards=dist.get_world_size(), max_tokens=CAP)
    batches = step.shards[dist.get_rank()]
    teacher_outputs = teacher.teacher_outputs(batches, Divergence(kind="reverse_kl"))
    divergences = []
    with pytest.raises(ValueError, match=rf"^{len(batches)} micro-batches, and teacher_outputs of {len(batches) + 1}$"):
        student.forward_backward(
            batches, distill_loss(), step.denominators, teacher_outputs=[*teacher_outputs, teacher_outputs[0]]
        )
    for _ in range(25):
        metrics = student.forward_backward(
            batches, distill_loss(), step.denominators, teacher_outputs=teacher_outputs, with_logprobs=False
        )
        assert metrics["train/loss"].total == pytest.approx(
            metrics["train/divergence"].total / step.denominators.num_tokens
        )
        divergences.append(metrics["train/loss"].result())
        student.optim_step()
    return divergences, all(torch.equal(weight, before[n]) for n, weight in teacher.named_weights(torch.float32))


@pytest.mark.parametrize(
    "options",
    [
        {},
        pytest.param({"lora": {"rank": 8}}, marks=pytest.mark.full),
        pytest.param({"param_dtype": "bfloat16"}, marks=pytest.mark.full),
        pytest.param({"wrap_policy": {"wrap_lm_output": True}}, marks=pytest.mark.full),
    ],
    ids=["full", "lora", "bfloat16", "wrapped projection"],
)
def test_a_student_learns_its_teacher(run_ranks, pairs, options):
    """The outputs of a teacher that does not change serve every step."""
    *_, folder, teacher_folder = pairs["llama from gemma2"]
    (first, kept), (second, _) = run_ranks(learn, 2, folder, teacher_folder, options)
    assert first[-1] + second[-1] < 0.5 * (first[0] + second[0])
    assert kept


def refusals(folder, others):
    """The error of each (folder, head, options of the student, options of the teacher) as a teacher."""
    errors = []
    for teacher_folder, head, options, teacher_options in others:
        student = TrainEngine.build(Path(folder), FrozenEngineConfig(**options), device=CPU)
        teacher = build_any(Path(teacher_folder), head, teacher_options)
        try:
            student.check_teacher(teacher)
        except (ModelError, ConfigError) as error:
            errors.append((type(error).__name__, str(error)))
    return errors


def build_any(folder, head, options):
    """A frozen language model, or a critic, whose head is new and so has to be trained."""
    if head == "logprobs":
        return TrainEngine.build(folder, FrozenEngineConfig(**options), device=CPU)
    return TrainEngine.build(folder, EngineConfig(**options), device=CPU, optimizer=OptimizerConfig(), head=head)


def test_a_teacher_that_cannot_teach_is_refused_with_both_numbers(run_ranks, tmp_path):
    folder = str(tiny_folder("qwen3", tmp_path / "student"))
    padded = str(tiny_folder("qwen3", tmp_path / "teacher", vocab_size=192))
    cases = [
        (padded, "logprobs", {}, {}),
        (folder, "token_values", {}, {}),
        (folder, "logprobs", {}, SP2),
        (folder, "logprobs", SP2, {}),
    ]
    for errors in run_ranks(refusals, 2, folder, cases):
        (padding, padding_text), (head, head_text), (sharing, sharing_text), (other, other_text) = errors
        assert (padding, head, sharing, other) == ("ModelError", "ModelError", "ConfigError", "ConfigError")
        assert "has 192 words, the student's 131" in padding_text
        assert "resize_token_embeddings(131)" in padding_text
        assert "both language models" in head_text
        assert "ulysses_size=2 is not the student's 1" in sharing_text
        assert "set the teacher's to 2" in other_text


def test_a_model_has_no_divergence_from_itself(run_ranks, pairs):
    """A trained engine may teach too; its float32 masters are cast as for its own forward."""
    *_, folder, _ = pairs["llama from gemma2"]
    for largest in run_ranks(self_divergence, 2, folder):
        assert largest < 1e-6


def self_divergence(folder):
    engine = TrainEngine.build(
        Path(folder), EngineConfig(param_dtype="bfloat16"), device=CPU, optimizer=OptimizerConfig()
    )
    batches = pack(samples_of(SHORT), num_shards=2, max_tokens=CAP).shards[dist.get_rank()]
    teacher_outputs = engine.teacher_outputs(batches, Divergence())
    assert teacher_outputs[0].projection.dtype == torch.bfloat16
    return max(float(out.divergence.abs().max()) for out in engine.forward(batches, teacher_outputs=teacher_outputs))


def shapes_of_a_step(student_folder, teacher_folder, sample, chunk_elements, options):
    kept, vocabulary.CHUNK_ELEMENTS = vocabulary.CHUNK_ELEMENTS, chunk_elements
    try:
        student = TrainEngine.build(
            Path(student_folder), EngineConfig(**options), device=CPU, optimizer=OptimizerConfig()
        )
        teacher = TrainEngine.build(Path(teacher_folder), FrozenEngineConfig(**options), device=CPU)
        step = pack([sample], num_shards=1, max_tokens=len(sample.token_ids))
        with TensorShapes() as made:
            teacher_outputs = teacher.teacher_outputs(step.shards[0], Divergence(kind="jensen_shannon"))
            student.forward_backward(
                step.shards[0], distill_loss(), step.denominators, teacher_outputs=teacher_outputs, with_logprobs=False
            )
        return made.shapes
    finally:
        vocabulary.CHUNK_ELEMENTS = kept


@pytest.mark.parametrize(("world_size", "options"), [(1, {}), (2, SP2)], ids=["1", "2 sp2"])
def test_step_never_holds_all_logits_of_student_or_teacher(run_ranks, tmp_path, world_size, options):
    """Trap 28: 160 tokens, 120 of them trained, a vocabulary of 8192, and room for 65,536 logits of both models."""
    num_tokens, num_trained, vocab, hidden, chunk = 160, 120, 8192, 8, 2**16
    common = {"vocab_size": vocab, "num_attention_heads": 2}
    folder = str(tiny_folder("llama", tmp_path / "student", hidden_size=hidden, **common))
    teacher_folder = str(tiny_folder("llama", tmp_path / "teacher", hidden_size=hidden + 4, **common))
    [sample] = random_samples([num_tokens], vocab=vocab)
    sample.loss_mask[:] = torch.arange(num_tokens) >= num_tokens - num_trained
    for shapes in run_ranks(shapes_of_a_step, world_size, folder, teacher_folder, sample, chunk, options):
        largest = max(torch.Size(shape).numel() for shape in shapes)
        gathered = 2 * vocab * (hidden + 4) + hidden + 4  # the teacher's root unit: embedding, projection, last norm
        assert largest <= gathered < num_trained * vocab / 4
        rows = {shape[0] for shape in shapes if len(shape) == 2 and shape[1] == vocab}
        assert rows <= {hidden, hidden + 4}, "projections turned over, and no row of logits"
