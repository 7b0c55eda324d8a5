"""The files of a training state: written once, by a thread, without pickle; what is damaged or another's is refused."""

import json
import os
import pickle
import shutil
import time
from contextlib import closing
from dataclasses import replace
from pathlib import Path
from unittest.mock import patch

import pytest
import torch
import torch.distributed as dist
from ranks import RankError
from resumed_engines import LORA, assert_same, build, resumed, state_of, steps, uninterrupted
from safetensors.torch import load_file
from stand_in_streams import OnAccelerator, Streams
from tiny_models import tiny_folder

from shardwise.config import DamagedError, ExportError, ModelError
from shardwise.engine.files import checkpoint
from shardwise.engine.files.safetensors_file import SafetensorsReader
from shardwise.engine.files.state_files import StateIndex


def saved_after_a_step(folder, state, engine):
    trained = build(folder, engine, {})
    steps(trained, [0])
    trained.state.save(Path(state))


def saved_meanwhile(folder, state):
    """How much of this rank's file was there at the end of what was done meanwhile; then again, with an error."""
    trained = build(folder, {}, {})
    steps(trained, [0])
    trained.state.save(Path(state) / "before")
    name = f"rank_{dist.get_rank()}.safetensors"
    whole = (Path(state) / "before" / name).stat().st_size

    def wait():
        file, deadline = Path(state) / "after" / name, time.monotonic() + 30
        while not (file.is_file() and file.stat().st_size == whole):
            assert time.monotonic() < deadline, f"{file} is written afterwards"
            time.sleep(0.01)
        dist.barrier()

    def fail():
        raise ExportError("the model cannot be written")

    trained.state.save(Path(state) / "after", meanwhile=wait)
    with pytest.raises(ExportError, match="the model cannot be written"):
        trained.state.save(Path(state) / "failed", meanwhile=fail)
    trained.state.save(Path(state) / "failed")


def test_a_thread_writes_the_state_while_something_else_is_done(run_ranks, tmp_path):
    run_ranks(saved_meanwhile, 2, str(tiny_folder("llama", tmp_path / "model")), str(tmp_path))
    before, *others = (
        {path.name: path.read_bytes() for path in (tmp_path / name).iterdir()} for name in ("before", "after", "failed")
    )
    assert others == [before, before]


def gathered_in_a_save(folder, state):
    """Elements that this rank gives where all ranks receive them, in the first save."""
    trained, gather, gathered = build(folder, {}, {}), dist.all_gather, []
    steps(trained, [0])

    def noted(received, tensor):
        gathered.append(tensor.numel())
        gather(received, tensor)

    with patch.object(dist, "all_gather", noted):
        trained.state.save(Path(state))
    return gathered


def test_what_the_ranks_wrote_goes_to_rank_0_alone(run_ranks, tmp_path):
    """The others are sent the ranks' numbers of bytes, and nothing else: every rank has planned alone."""
    folder = str(tiny_folder("llama", tmp_path / "model"))
    assert run_ranks(gathered_in_a_save, 2, folder, str(tmp_path / "state")) == [[1], [1]]


def opened_by_the_ranks_that_wrote(folder, state):
    """The files that this rank opens to read what it has saved itself."""
    trained = build(folder, {}, {})
    steps(trained, [0])
    trained.state.save(Path(state))
    dist.barrier()
    with patch.object(StateIndex, "open", autospec=True, side_effect=StateIndex.open) as opened:
        build(folder, {}, {}, with_trained=False).state.load(Path(state))
    return sorted(call.args[1].name for call in opened.call_args_list)


def test_a_rank_opens_its_own_file_and_the_one_with_all_step_counters(run_ranks, tmp_path):
    folder = str(tiny_folder("llama", tmp_path / "model"))
    first = "rank_0.safetensors"
    wanted = [[first], *([first, f"rank_{rank}.safetensors"] for rank in (1, 2))]
    assert run_ranks(opened_by_the_ranks_that_wrote, 3, folder, str(tmp_path / "state")) == wanted


def test_a_shard_that_replicas_share_is_written_once(run_ranks, tmp_path):
    folder = str(tiny_folder("llama", tmp_path / "model"))
    sizes = {}
    for name, engine in {"sharded": {}, "2x2": {"fsdp_size": 2}}.items():
        state = tmp_path / name
        run_ranks(saved_after_a_step, 4, folder, str(state), engine)
        tensors = [load_file(file) for file in state.glob("*.safetensors")]
        sizes[name] = sum(tensor.numel() for file in tensors for tensor in file.values())
        assert len(tensors) > 1, "replicas share the writing"
    assert len(set(sizes.values())) == 1
    index = json.loads((tmp_path / "sharded" / "index.json").read_text())["content"]["tensors"]
    assert sizes["sharded"] == sum(torch.Size(tensor["shape"]).numel() for tensor in index.values())


class Trap:
    """Unpickled, it leaves a mark."""

    def __init__(self, mark):
        self.mark = mark

    def __reduce__(self):
        return os.mkdir, (self.mark,)


def test_trap_15_a_pickle_beside_the_files_is_never_read(run_ranks, tmp_path):
    folder, state = str(tiny_folder("llama", tmp_path / "model")), tmp_path / "state"
    _, saved, _, _ = run_ranks(uninterrupted, 1, folder, str(state), {}, {})[0]
    for name in (".metadata", "state.pt", "__0_0.distcp", "rng_state.pkl"):
        (state / name).write_bytes(pickle.dumps(Trap(str(tmp_path / "mark"))))
    ((loaded, _, _),) = run_ranks(resumed, 1, folder, str(state), {}, {})
    assert_same(loaded, saved)
    assert not (tmp_path / "mark").exists()
    assert pickle.loads((state / ".metadata").read_bytes()) is None, "the trap does not work"
    assert (tmp_path / "mark").exists()


@pytest.fixture(scope="module")
def kept(run_ranks, tmp_path_factory):
    """A model folder, and the state of two ranks that trained it."""
    root = tmp_path_factory.mktemp("kept")
    folder, state = str(tiny_folder("llama", root / "model")), str(root / "state")
    run_ranks(uninterrupted, 2, folder, state, {}, {})
    return Path(folder), Path(state)


def refused(folder, states, engines, num_steps=0):
    """The errors of loading each state into an engine, after steps of its own; none may have changed a tensor, nor left
    optimizer states where there were none. None: an engine without weights, which has none after it either."""
    errors = []
    for state, (engine, optimizer) in zip(states, engines, strict=True):
        own = build(folder, engine, optimizer, with_trained=num_steps is not None)
        if num_steps is None:
            with pytest.raises(ModelError) as error:
                own.state.load(Path(state))
            assert not own._optimizer.has_states
            assert not own.state.has_weights
            errors.append(str(error.value))
            continue
        steps(own, range(num_steps))
        before, numbers = state_of(own)
        with pytest.raises(ModelError) as error:
            own.state.load(Path(state))
        after, numbers_after = state_of(own)
        assert after.keys() == before.keys()
        assert all(torch.equal(after[name], tensor) for name, tensor in before.items())
        assert numbers_after == numbers
        errors.append(str(error.value))
    return errors


def cut(path, num_bytes):
    path.write_bytes(path.read_bytes()[:num_bytes])


def flip(path, position):
    data = bytearray(path.read_bytes())
    data[position] ^= 1
    path.write_bytes(bytes(data))


def flip_inside(path, name):
    with closing(SafetensorsReader(path)) as file:
        start, num_bytes = file.spans[name]
    flip(path, start + num_bytes // 2)


DAMAGES = {
    "middle of a matrix": (
        lambda state: flip_inside(state / "rank_0.safetensors", "exp_avg/lm_head.weight"),
        "rank_0.safetensors is damaged: exp_avg/lm_head.weight is not what was written (xxh3)",
    ),
    "empty": (lambda state: cut(state / "rank_1.safetensors", 0), "rank_1.safetensors is damaged: it has 0 bytes"),
    "cut": (lambda state: cut(state / "rank_0.safetensors", -1), "rank_0.safetensors is damaged: it has"),
    "missing": (lambda state: (state / "rank_1.safetensors").unlink(), "rank_1.safetensors is missing"),
    "index cut": (lambda state: cut(state / "index.json", 500), "index.json is damaged"),
    "index missing": (lambda state: (state / "index.json").unlink(), "index.json is missing"),
    "last bit": (lambda state: flip(state / "rank_1.safetensors", -1), "rank_1.safetensors is damaged: "),
    "header": (lambda state: flip(state / "rank_0.safetensors", 30), "rank_0.safetensors is damaged: its header"),
    "index number": (
        lambda state: (state / "index.json").write_text(
            (state / "index.json").read_text().replace('"num_steps": 3', '"num_steps": 2')
        ),
        "index.json is damaged: its content does not have the xxh3 hash",
    ),
}


@pytest.mark.parametrize(
    ("world_size", "num_steps"),
    [(2, None), (3, None), *(pytest.param(2, steps, marks=pytest.mark.full) for steps in (0, 1))],
    ids=["hashed on the way", "resharded", "before its first step", "used before"],
)
def test_a_damaged_file_is_named_on_every_rank_before_anything_is_loaded(
    run_ranks, kept, tmp_path, world_size, num_steps
):
    copies = [Path(shutil.copytree(kept[1], tmp_path / name)) for name in DAMAGES]
    for copied, (damage, _) in zip(copies, DAMAGES.values(), strict=True):
        damage(copied)
    states, engines = list(map(str, copies)), [({}, {})] * len(copies)
    first, *others = run_ranks(refused, world_size, str(kept[0]), states, engines, num_steps)
    assert all(other == first for other in others)
    for error, copied, (_, expected) in zip(first, copies, DAMAGES.values(), strict=True):
        assert f"{copied}/{expected}" in error
    bit = first[list(DAMAGES).index("last bit")]
    assert any(f"{key}/" in bit for key in ("master", "exp_avg", "exp_avg_sq", "step")), "the tensor is named"


def bytes_read(folder, state, with_trained):
    """Of tensors, by this rank, in loading a state into an engine."""
    own, sizes, preadv = build(folder, {}, {}, with_trained=with_trained), [], os.preadv

    def counting(file, buffers, offset):
        sizes.append(len(buffers[0]) if offset > 0 else 0)  # headers are read from the first byte on
        return preadv(file, buffers, offset)

    os.preadv = counting
    try:
        own.state.load(Path(state))
    finally:
        os.preadv = preadv
    return sum(sizes)


def test_a_state_is_read_once_where_ranks_read_whole_shards(run_ranks, kept):
    """Twice where an engine has weights, which a damaged file must not change. Step counters are of every rank."""
    folder, state = kept
    tensors = [item for file in sorted(state.glob("*.safetensors")) for item in load_file(file).items()]
    counters = sum(tensor.nbytes for name, tensor in tensors if name.startswith("step/"))
    shards = sum(tensor.nbytes for _, tensor in tensors) - counters
    empty, filled = (run_ranks(bytes_read, 2, str(folder), str(state), with_trained) for with_trained in (False, True))
    assert sum(empty) == shards + 2 * counters
    assert sum(filled) == 2 * shards + 3 * counters


def loaded_after_another(folder, states, engine, optimizer):
    """The state after the second of two states was loaded behind the first; and into a new engine."""
    used, fresh = build(folder, engine, optimizer), build(folder, engine, optimizer)
    for state in states:
        used.state.load(Path(state))
    fresh.state.load(Path(states[-1]))
    rows = [steps(own, [1]) for own in (used, fresh)]
    return state_of(used), state_of(fresh), rows[0] == rows[1]


def saved_early_and_late(folder, root, engine, optimizer):
    own = build(folder, engine, optimizer)
    own.state.save(Path(root) / "early")
    steps(own, [0])
    own.state.save(Path(root) / "late")


@pytest.mark.parametrize(
    ("engine", "optimizer"),
    [({}, {}), ({"param_dtype": "bfloat16", "master_dtype": "bfloat16"}, {}), ({}, {"optimizer": "muon"})],
    ids=["adamw", "bfloat16", "muon"],
)
def test_an_engine_falls_back_to_a_state_from_before_its_first_update(run_ranks, tmp_path, engine, optimizer):
    """As a policy does whose critic was damaged in the newer checkpoint: the older one has no optimizer states."""
    folder = str(tiny_folder("llama", tmp_path / "model"))
    run_ranks(saved_early_and_late, 2, folder, str(tmp_path), engine, optimizer)
    states = [str(tmp_path / "late"), str(tmp_path / "early")]
    for used, fresh, goes_on_the_same in run_ranks(loaded_after_another, 2, folder, states, engine, optimizer):
        assert_same(used, fresh)
        assert goes_on_the_same


def flipped_meanwhile(folder, state, name):
    """The error of a state of which a tensor changes after its file was verified, before it is read."""
    own, verify = build(folder, {}, {}), checkpoint._verify_files
    steps(own, [0])

    def verify_and_flip(*arguments):
        verify(*arguments)
        dist.barrier()
        if dist.get_rank() == 0:
            with closing(SafetensorsReader(Path(state) / "rank_0.safetensors")) as file:
                place = file.spans[name][0]
            flip(Path(state) / "rank_0.safetensors", place)
        dist.barrier()

    checkpoint._verify_files = verify_and_flip
    try:
        with pytest.raises(DamagedError) as error:
            own.state.load(Path(state))
    finally:
        checkpoint._verify_files = verify
    return str(error.value)


def test_weights_that_change_after_they_were_verified_are_noticed(run_ranks, kept, tmp_path):
    state = shutil.copytree(kept[1], tmp_path / "state")
    name = next(name for name in load_file(state / "rank_0.safetensors") if name.startswith("master/"))
    first, second = run_ranks(flipped_meanwhile, 2, str(kept[0]), str(state), name)
    assert first == second
    assert f"rank_0.safetensors is damaged: {name} is not what was written" in first


def read_in_pieces(folder, state):
    """The state as it is where tensors go to another device: through the host, a few rows at a time."""
    direct, own = build(folder, {}, {}), build(folder, {}, {})
    direct.state.load(Path(state))
    is_direct, checkpoint.PIECE_BYTES = checkpoint._Read.is_direct, 100
    checkpoint._Read.is_direct = False
    try:
        own.state.load(Path(state))
    finally:
        checkpoint._Read.is_direct, checkpoint.PIECE_BYTES = is_direct, 1 << 26
    return state_of(direct), state_of(own)


@pytest.mark.parametrize("world_size", [2, 3])
def test_pieces_on_their_way_to_a_device_make_up_the_tensors(run_ranks, kept, world_size):
    for direct, in_pieces in run_ranks(read_in_pieces, world_size, str(kept[0]), str(kept[1])):
        assert_same(in_pieces, direct)


def threads_on_an_accelerator(folder, state):
    """The streams that a save's and a load's threads worked on, where the tensors are not in host memory."""
    streams, seen = Streams(), {"write": set(), "run": set()}
    torch.accelerator.current_stream = streams.of_device
    streams.use("own")
    checkpoint.local_shard = lambda tensor, shard=checkpoint.local_shard: shard(tensor).as_subclass(OnAccelerator)

    def watch(owner, name):
        original = getattr(owner, name)
        setattr(owner, name, lambda *args: seen[name].add(streams.current) or original(*args))

    watch(checkpoint.StagedState, "write")
    watch(checkpoint._Read, "run")
    planned = checkpoint._planned_reads
    checkpoint._planned_reads = lambda *args: [
        replace(read, target=read.target.as_subclass(OnAccelerator)) for read in planned(*args)
    ]
    trained, loaded = build(folder, {}, {}), build(folder, {}, {})
    steps(trained, [0])
    trained.state.save(Path(state))
    loaded.state.load(Path(state))
    return state_of(trained), state_of(loaded), seen


def test_threads_work_behind_what_was_asked_of_the_device_before(run_ranks, tmp_path):
    folder = str(tiny_folder("llama", tmp_path / "model"))
    for trained, loaded, seen in run_ranks(threads_on_an_accelerator, 1, folder, str(tmp_path / "state")):
        assert_same(loaded, trained)
        assert seen == {"write": {"own"}, "run": {"own"}}


OTHERS = {
    "another optimizer": ({}, {"optimizer": "muon"}, "missing: momentum_buffer/model.layers.0"),
    "fewer parameters": (
        {"freeze_module_prefix": ["model.layers.0"]},
        {},
        "9 not part of the model: master/model.layers.0.input_layernorm.weight",
    ),
    "another dtype": (
        {"param_dtype": "bfloat16", "master_dtype": "bfloat16"},
        {},
        "of the wrong shape or dtype: master/model.embed_tokens.weight is float32 [101, 30], expected bfloat16",
    ),
    "a loss scale": ({"param_dtype": "float16"}, {}, "an engine without float16 gradients, this one is with them"),
    "adapters": ({"lora": LORA}, {}, "missing: master/"),
}


def test_the_state_of_another_engine_is_refused_by_name(run_ranks, kept):
    folder, state = kept
    engines = [(engine, optimizer) for engine, optimizer, _ in OTHERS.values()]
    first, second = run_ranks(refused, 2, str(folder), [str(state)] * len(engines), engines)
    assert first == second
    for error, (_, _, expected) in zip(first, OTHERS.values(), strict=True):
        assert expected in error


def test_the_state_of_a_model_of_another_size_is_refused_by_name(run_ranks, kept, tmp_path):
    wider = tiny_folder("llama", tmp_path / "wider", intermediate_size=52)
    ((text,),) = run_ranks(refused, 1, str(wider), [str(kept[1])], [({}, {})])
    assert "6 of the wrong shape or dtype: master/model.layers.0.mlp.gate_proj.weight is float32 [50, 30]" in text
    assert "expected float32 [52, 30]" in text


def test_a_folder_that_cannot_be_written_is_an_error_on_every_rank(run_ranks, kept, tmp_path):
    (tmp_path / "taken").write_text("x")
    with pytest.raises(RankError) as error:
        run_ranks(uninterrupted, 2, str(kept[0]), str(tmp_path / "taken"), {}, {})
    assert str(error.value).count("ExportError: ") >= 2
    assert "taken cannot be written" in str(error.value)
