import subprocess
import sys
from typing import Annotated, ClassVar, Literal, get_args

import pytest
import yaml
from pydantic import Field, StrictBool, ValidationError

from shardwise.config import (
    RECIPES,
    Choice,
    Config,
    ConfigError,
    DistillConfig,
    EvalConfig,
    ModelConfig,
    PreferenceConfig,
    RecipeConfig,
    RewardModelConfig,
    RLConfig,
    SFTConfig,
    key_paths,
    leaves,
    parts_of,
)
from shardwise.config.algorithm import named
from shardwise.config.base import groups_of, tag_of
from shardwise.config.reference import describe

SFT = {"model": {"path": "m"}, "data": {"train_files": "a.jsonl"}}
RL = SFT | {"reward": {"functions": "r:score"}}
MINIMAL = [
    (SFTConfig, SFT),
    (PreferenceConfig, SFT),
    (RewardModelConfig, SFT),
    (DistillConfig, SFT | {"teacher": {"model": {"path": "t"}}}),
    (RLConfig, RL),
    (EvalConfig, {"model": {"path": "m"}, "data": {"validation_files": ["v"]}, "reward": RL["reward"]}),
]


class Leaf(Config):
    learning_rate: Annotated[float, Field(ge=0)] = 1.0
    warmup_steps: int = 0


class Tree(Config):
    name: str
    optimizer: Leaf = Leaf()
    maybe: Leaf | None = None


class Named(Config):
    path: str


class Branches(Config):
    union: StrictBool | Annotated[int, Field(strict=True, ge=2)] = True
    many: list[Leaf] = Field(default_factory=list)
    named: list[Named] = Field(default_factory=list)
    maybe: Leaf | None = None


class Ask(Choice):
    """Asks."""

    name: Literal["ask"] = "ask"
    times: Annotated[int, Field(ge=1)] = 2


class Tell(Choice):
    """Tells."""

    name: Literal["tell"] = "tell"
    whom: str
    loud: bool = False


class ByKind(Choice):
    """Told by another key than the name."""

    tag: ClassVar[str] = "kind"
    kind: Literal["first"] = "first"
    name: str = ""


class BySecondKind(Choice):
    """The other."""

    tag: ClassVar[str] = "kind"
    kind: Literal["second"] = "second"
    times: int = 0


class Chooses(Config):
    act: Annotated[Ask | Tell, Field(discriminator="name"), named("ask")] = Ask()
    acts: list[Annotated[Ask | Tell, Field(discriminator="name"), named("ask")]] = Field(default_factory=list)
    kinds: list[Annotated[ByKind | BySecondKind, Field(discriminator="kind")]] = Field(default_factory=list)
    leaf: Leaf = Leaf()


def write(tmp_path, text):
    path = tmp_path / "config.yaml"
    path.write_text(text, encoding="utf-8")
    return path


def error_of(function, *args, **kwargs):
    with pytest.raises(ConfigError) as error:
        function(*args, **kwargs)
    return str(error.value)


def test_file_is_read_and_overrides_win_in_their_order(tmp_path):
    path = write(tmp_path, "name: from-file\noptimizer:\n  learning_rate: 0.5\n")
    assert Tree.load(path) == Tree(name="from-file", optimizer=Leaf(learning_rate=0.5))
    loaded = Tree.load(path, ["optimizer.learning_rate=0.25", "name=x", "optimizer.learning_rate=1e-3"])
    assert loaded == Tree(name="x", optimizer=Leaf(learning_rate=1e-3))
    assert Tree.load(None, ["name=a=b"]).name == "a=b"


def test_a_path_may_begin_with_the_home_folder_wherever_one_is_taken(monkeypatch):
    """A shell expands ~ at the beginning of a word, and not behind `key=`."""
    monkeypatch.setenv("HOME", "/home/ada")
    given = {
        "model": {"path": "~/m", "tokenizer_path": "~/t", "chat_template": "~/c.jinja"},
        "data": {"train_files": "~/a.jsonl", "validation_files": ["~/b.jsonl", "c.jsonl"]},
        "trainer": {"output_dir": "~/run", "resume": "~/run/checkpoints/step_4"},
        "engine": {"lora": {"adapter_path": "~/adapter"}},
        "reward": {"functions": ["~/r.py:score"], "manager": "~/r.py:Manager"},
        "rollout": {
            "environment": "~/e.py:Env",
            "placement": {"type": "split", "num_ranks": 1, "medium": "disk", "folder": "~/w"},
        },
        "algorithm": {"policy_loss": "~/l.py:loss"},
    }
    text = RLConfig.parse(given, origin="test").to_yaml()
    assert "~" not in text
    assert text.count("/home/ada/") == 13
    given = {"data": {"validation_files": "~/b"}, "eval": {"output_dir": "~/e"}, "model": given["model"]}
    evaluated = EvalConfig.parse(given | {"reward": {"functions": "a:b"}}, origin="test")
    assert (evaluated.data.validation_files, evaluated.eval.output_dir) == (["/home/ada/b"], "/home/ada/e")


def test_override_opens_a_group_and_null_closes_one(tmp_path):
    path = write(tmp_path, "name: n\nmaybe: {warmup_steps: 3}\n")
    assert Tree.load(path, ["maybe=null"]).maybe is None
    assert Tree.load(None, ["name=n", "maybe.warmup_steps=2"]).maybe == Leaf(warmup_steps=2)


@pytest.mark.parametrize(
    ("override", "message"),
    [
        ("name", 'override "name" is not of the form key.path=value, e.g. engine.param_dtype=bfloat16'),
        ("=3", 'override "=3" is not of the form key.path=value, e.g. engine.param_dtype=bfloat16'),
        ("name=[1", 'override "name=[1": the value is not valid YAML; quote it'),
        (
            "name=after ####.",
            'override "name=after ####.": to YAML "####." is a comment and no part of the value; put the value in '
            "quotes that the shell leaves alone: name='\"...\"'",
        ),
        ("name=" + "[" * 2000, 'override "name=...": it is nested more than 100 levels deep'),
        ("maybe=&m {a: *m}", 'override "maybe=...": what the anchor in line 1 names contains itself; write it out'),
        (
            "name.first=1",
            'override "name.first=1": name is one value, not a group of keys; remove .first',
        ),
        (
            "optimizer..warmup_steps=1",
            'override "optimizer..warmup_steps=1" is not of the form key.path=value, e.g. engine.param_dtype=bfloat16',
        ),
        (
            "maybe.warmup_steps=1",
            'override "maybe.warmup_steps=1": maybe=4 stands where a group of keys belongs; correct it in the file',
        ),
        (
            "optimizer.warmup_steps=1",
            'override "optimizer.warmup_steps=1": optimizer is a list, and an override gives '
            "all of it: 'optimizer=[...]'",
        ),
    ],
)
def test_malformed_override_is_quoted(tmp_path, override, message):
    path = write(tmp_path, "name: n\nmaybe: 4\noptimizer: [1]\n")
    assert error_of(Tree.load, path, [override]) == message


def test_override_of_a_parameter_below_an_unknown_name_shows_how_to_give_both():
    assert error_of(Chooses.load, None, ["act=shout", "act.times=3"]) == (
        'override "act.times=3": act=shout is a value, not a group of keys; where it is a name that takes parameters, '
        "give them together: 'act={name: shout, times: ...}'"
    )


@pytest.mark.parametrize(
    ("tree", "message"),
    [
        ({"optimizer": {"warmup_steps": True}}, " optimizer.warmup_steps=True: input should be a valid integer"),
        ({"optimizer": {"learning_rate": False}}, " optimizer.learning_rate=False: input should be a valid number"),
        ({"name": True}, " name=True: expected text; put it in quotes: 'name=\"...\"' as an override"),
        (
            {"name": True, "optimizer": {"learning_rate": -1, "warmup_steps": True}},
            "\n  name=True: expected text; put it in quotes: 'name=\"...\"' as an override"
            "\n  optimizer.learning_rate=-1: input should be greater than or equal to 0"
            "\n  optimizer.warmup_steps=True: input should be a valid integer",
        ),
    ],
)
def test_a_truth_value_is_no_number_and_no_text(tree, message):
    """pydantic takes True for 1, and YAML takes `on` for True."""
    assert error_of(Tree.parse, {"name": "n"} | tree, origin="test") == f"test:{message}"
    assert Branches.parse({"union": False}, origin="test").union is False


@pytest.mark.parametrize("held", [[True], {"a": True}])
def test_a_truth_value_in_a_list_or_mapping_of_numbers_is_refused(held):
    class Rates(Config):
        rates: dict[str, float] | list[float]

    assert Rates.parse({"rates": [0.5]}, origin="test").rates == [0.5]
    assert "input should be a valid number" in error_of(Rates.parse, {"rates": held}, origin="test")


def test_keys_and_texts_that_yaml_reads_as_numbers_are_named(tmp_path):
    assert error_of(Tree.load, write(tmp_path, "name: n\n1: 2\noptimizer: {3: 4}\n")).splitlines()[1:] == [
        "  optimizer: 3 is no key; keys are text", "  the file: 1 is no key; keys are text",
    ]  # fmt: skip
    assert error_of(Tree.load, None, ["name=123"]) == (
        "the command line: name=123: expected text; put it in quotes: 'name=\"...\"' as an override"
    )
    assert Tree.load(None, ['name="123"']).name == "123"


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("a: [1", r"config.yaml is not valid YAML: while parsing a flow sequence .* line 1, column 4"),
        ("- 1\n- 2\n", r"config.yaml holds a list at the top level, expected keys and values$"),
        ("a: !!python/object/apply:os.system ['true']\n", r"config.yaml is not valid YAML: .*python/object"),
    ],
    ids=["broken", "list", "python-object"],
)
def test_unreadable_file_is_named(tmp_path, text, message):
    """Trap 35: YAML that would construct a Python object is refused."""
    with pytest.raises(ConfigError, match=message):
        Tree.load(write(tmp_path, text))


def test_file_that_is_absent_binary_or_empty(tmp_path):
    assert error_of(Tree.load, tmp_path / "no.yaml") == (
        f"config file {tmp_path / 'no.yaml'} does not exist; give the path of a YAML file with -c"
    )
    assert error_of(Tree.load, tmp_path) == f"config file {tmp_path} is no file; give the path of a YAML file with -c"
    (tmp_path / "binary.yaml").write_bytes(b"\xff\xfe\x00")
    assert "binary.yaml is not valid YAML" in error_of(Tree.load, tmp_path / "binary.yaml")
    assert error_of(Tree.load, write(tmp_path, "")).endswith(
        "name: required, but not given; set it in the file or as an override name=..."
    )


@pytest.mark.parametrize(
    ("override", "message"),
    [
        ("trainer.learnin_rate=1", "trainer.learnin_rate: unknown key; did you mean trainer.learning_rate?"),
        ("trainr.seed=1", "trainr: unknown key; did you mean trainer?"),
        ("engine.learning_rate=1", "engine.learning_rate: unknown key; did you mean trainer.learning_rate?"),
        ("fsdp_size=2", "fsdp_size: unknown key; did you mean engine.fsdp_size?"),
        (
            "model.something_else_entirely=1",
            "model.something_else_entirely: unknown key; "
            "valid keys here: model.path, model.tokenizer_path, model.chat_template",
        ),
        ("qqqq=1", "qqqq: unknown key; valid keys here: model, data, engine, trainer"),
        ("drop_out=1", "drop_out: unknown key; valid keys here: model, data, engine, trainer"),  # lora.dropout is far
        ("engine.wrap_policy.qqq=1", "engine.wrap_policy.qqq: unknown key; valid keys here: engine.wrap_policy."),
        (
            "engine.wrap_policy.path=1",
            "engine.wrap_policy.path: unknown key; did you mean model.path? valid keys here: engine.wrap_policy.",
        ),
        ("rollout.engine=vllm", "rollout: unknown key; it is a key of `shardwise rl`, `shardwise eval`"),
        ("algorithm={kl_coef: 1}", "algorithm: unknown key; it is a key of `shardwise rl`"),
        ("data.max_prompt_tokens=9", "data.max_prompt_tokens: unknown key; it is a key of `shardwise rl`, `shardwise "),
    ],
)
def test_unknown_key_gets_the_nearest_one(override, message):
    """Trap 19: a typo is never a default."""
    assert error_of(SFTConfig.load, None, ["model.path=m", "data.train_files=f", override]).startswith(
        f"the command line: {message}"
    )


def test_of_many_valid_keys_the_nearest_are_listed():
    told = error_of(SFTConfig.load, None, ["model.path=m", "data.train_files=f", "trainer.zzzeedzzz=1"])
    *listed, rest = told.partition("; valid keys here: ")[2].split(", ")
    assert (len(listed), listed[0], rest) == (8, "trainer.seed", "...")
    told = error_of(SFTConfig.load, None, ["model.path=m", "data.train_files=f", "trainer=3"])
    first = list(SFTConfig.model_fields["trainer"].annotation.model_fields)[:8]
    assert told == f"the command line: trainer=3: expected a group of keys: {', '.join(first)}, ..."


@pytest.mark.parametrize("cls", get_args(RecipeConfig))
def test_a_key_of_other_commands_alone_is_told_as_theirs(cls):
    own = set(key_paths(cls))
    for name, other in RECIPES.items():
        for key in {path.partition(".")[0] for path in key_paths(other)} - own:
            assert f"{key}: unknown key; it is a key of " in (told := error_of(cls.parse, {key: 1}, origin="test"))
            assert f"`shardwise {name}`" in told


BLAMED = "the command line"
WARM = "optimizer.warmup_steps='x': input should be a valid integer, unable to parse string as an integer"
UNKNOWN = "unknown key; valid keys here: "


@pytest.mark.parametrize(
    ("text", "overrides", "expected"),
    [
        ("name: n", ["optimizer.warmup_steps=x"], {BLAMED: [WARM]}),
        ("name: n\noptimizer: {warmup_steps: x}", ["optimizer.learning_rate=1"], {"FILE": [WARM]}),
        ("name: n\noptimizer: {warmup_steps: 1}", ["optimizer.warmup_steps=x"], {BLAMED: [WARM]}),
        ("name: n\noptimizer: {warmup_steps: y}", ["optimizer={warmup_steps: x}"], {BLAMED: [WARM]}),
        ("name: n\noptimizer:", ["optimizer.warmup_steps=x"], {BLAMED: [WARM]}),
        ("name: n", ["qqqq.warmup_steps=1"], {BLAMED: [f"qqqq: {UNKNOWN}name, optimizer, maybe"]}),
        ("qqqq: {}", ["name=n", "qqqq.warmup_steps=1"], {"FILE": [f"qqqq: {UNKNOWN}name, optimizer, maybe"]}),
        (
            "optimizer: {warmup_steps: x}",
            ["optimizer.learning_rate=-1"],
            {
                "FILE": ["name: required, but not given; set it in the file or as an override name=...", WARM],
                BLAMED: ["optimizer.learning_rate=-1: input should be greater than or equal to 0"],
            },
        ),
    ],
)
def test_a_mistake_is_told_as_of_the_file_or_of_the_command_line(tmp_path, text, overrides, expected):
    path = write(tmp_path, text)
    told = error_of(Tree.load, path, overrides).replace(str(path), "FILE")
    blocks = [f"{origin}:" + "".join(f"\n  {line}" for line in lines) for origin, lines in expected.items()]
    one = [f"{origin}: {line}" for origin, lines in expected.items() for line in lines]
    assert told == "\n".join(blocks if len(one) > 1 else one)


@pytest.mark.parametrize(
    ("text", "overrides", "blamed"),
    [
        ("act: {name: tel}", ["act.whom=x"], False),
        ("act: {name: ask}", ["act.name=tel"], True),
        ("{}", ["act.name=tel"], True),
        ("act: {name: tell}", ["leaf.warmup_steps=1"], False),
        ("{}", ["act=tell"], True),
    ],
)
def test_a_mistake_in_a_choice_is_of_what_gave_its_name(tmp_path, text, overrides, blamed):
    path = write(tmp_path, text)
    assert error_of(Chooses.load, path, overrides).startswith(f"{BLAMED}: act" if blamed else f"{path}: act")


@pytest.mark.parametrize(
    ("overrides", "blamed"),
    [
        (["data.max_sequence_tokens=5000"], True),
        (["engine={max_tokens_per_micro_batch: 64}"], True),
        (["trainer.seed=1"], False),
        (["data.max_train_rows=1"], False),
    ],
)
def test_keys_that_do_not_go_together_are_told_as_of_the_command_line_where_it_gave_one(tmp_path, overrides, blamed):
    longest = 100 if blamed else 5000
    path = write(
        tmp_path, f"model: {{path: m}}\ndata: {{train_files: f, max_sequence_tokens: {longest}}}\nengine: {{}}"
    )
    told = error_of(SFTConfig.load, path, overrides)
    assert told.startswith(f"{BLAMED}: data.max_sequence" if blamed else f"{path}: data.max_sequence")


def test_every_problem_is_listed_at_once(tmp_path):
    path = write(
        tmp_path,
        "model: {}\ndata: {train_files: f, on_overlong: cut}\ntrainer: {seed: -1, batch_siz: 2, learning_rate: .nan}\n",
    )
    first, *rest = error_of(SFTConfig.load, path).split("\n  ")
    assert first == f"{path}:"
    assert sorted(rest) == [
        "data.on_overlong='cut': input should be 'error', 'drop' or 'truncate'",
        "model.path: required, but not given; set it in the file or as an override model.path=...",
        "trainer.batch_siz: unknown key; did you mean trainer.batch_size?",
        "trainer.learning_rate=nan: input should be a finite number",
        "trainer.seed=-1: input should be greater than or equal to 0",
    ]


@pytest.mark.parametrize(
    ("tree", "message"),
    [
        ("union: yes please", "union='yes please': input should be a valid boolean"),
        ("union: 1", "union=1: input should be greater than or equal to 2"),
        ("many: [{warmup_step: 1}]", "many.0.warmup_step: unknown key; did you mean many.warmup_steps?"),
        ("many: [{}, {warmup_steps: x}]", "many.1.warmup_steps='x': input should be a valid integer"),
        ("named: [{}]", "named.0.path: required, but not given; set it in the file"),
        ("maybe: {warmup_step: 1}", "maybe.warmup_step: unknown key; did you mean maybe.warmup_steps?"),
    ],
)
def test_error_in_a_union_a_list_or_an_optional_group_names_keys_that_exist(tmp_path, tree, message):
    """pydantic would call them `union.bool` and `union.constrained-int`."""
    assert message in error_of(Branches.load, write(tmp_path, tree))


def test_missing_group_is_reported_by_the_keys_it_needs():
    assert error_of(EvalConfig.load, None).split("\n  ")[1:] == [
        "model.path: required, but not given; set it in the file or as an override model.path=...",
        "reward.functions: required, but not given; set it in the file or as an override reward.functions=...",
    ]


def test_missing_group_of_groups_is_reported_by_the_keys_at_its_ends():
    assert error_of(DistillConfig.load, None).split("\n  ")[1:] == [
        "model.path: required, but not given; set it in the file or as an override model.path=...",
        "teacher.model.path: required, but not given; set it in the file or as an override teacher.model.path=...",
    ]


def test_group_left_empty_in_the_file_takes_overrides(tmp_path):
    path = write(tmp_path, "model: {path: m}\ndata: {train_files: f}\ntrainer:\n")
    assert SFTConfig.load(path, ["trainer.seed=4"]).trainer.seed == 4


def written_keys(tree, prefix=""):
    for name, value in tree.items():
        yield prefix + name
        if isinstance(value, dict):
            yield from written_keys(value, f"{prefix}{name}.")


def keys_of(config, prefix=""):
    """Every key of the groups that are there: not of absent ones, of lists, or of choices that were not taken."""
    for name in type(config).model_fields:
        yield prefix + name
        if isinstance(value := getattr(config, name), Config):
            yield from keys_of(value, f"{prefix}{name}.")


def test_every_recipe_takes_part_in_the_round_trip():
    assert {cls for cls, _ in MINIMAL} == set(get_args(RecipeConfig))


@pytest.mark.parametrize(("cls", "tree"), MINIMAL)
def test_yaml_round_trip_gives_an_equal_config_with_every_default_written_out(tmp_path, cls, tree):
    config = cls.parse(tree, origin="test")
    text = config.to_yaml()
    assert cls.load(write(tmp_path, text)) == config
    written = list(written_keys(yaml.safe_load(text)))
    assert set(written) <= set(key_paths(cls))
    assert written == list(keys_of(config))


def test_yaml_round_trip_keeps_values_that_are_not_defaults(tmp_path):
    config = SFTConfig.load(
        None,
        [
            "model.path=m",
            "data.train_files=[a, 'b: c']",
            "trainer.adam_betas=[0.5, 0.75]",
            "trainer.max_grad_norm=null",
            "trainer.learning_rate=2.5e-7",
            "data.system_prompt='yes\n#no'",
        ],
    )
    again = SFTConfig.load(write(tmp_path, config.to_yaml()))
    assert again == config
    assert (again.trainer.adam_betas, again.trainer.learning_rate) == ((0.5, 0.75), 2.5e-7)
    assert again.data.train_files == ["a", "b: c"]


def test_config_is_frozen():
    with pytest.raises(ValidationError, match="frozen"):
        Tree(name="n").name = "m"


def test_key_paths_walk_groups_and_optional_groups():
    assert list(key_paths(Tree)) == [
        "name",
        "optimizer",
        "optimizer.learning_rate",
        "optimizer.warmup_steps",
        "maybe",
        "maybe.learning_rate",
        "maybe.warmup_steps",
    ]


def test_parts_of_a_class_are_found_in_groups_and_in_lists_with_their_keys():
    tree = {
        "model": {"path": "m"},
        "data": {"train_files": "t"},
        "teachers": [{"model": {"path": "a"}}, {"model": {"path": "b"}, "data_source": "s"}],
        "algorithm": {"advantage": "distill"},
    }
    config = RLConfig.parse(tree, origin="test")
    found = {key: model.path for key, model in parts_of(config, ModelConfig)}
    assert found == {"model": "m", "teachers.0.model": "a", "teachers.1.model": "b"}
    assert list(parts_of(config.model, ModelConfig)) == [("", config.model)]


def test_leaves_are_the_values_of_a_tree_by_their_keys():
    tree = {"a": 1, "b": {"c": None, "d": {}}, "e": [], "f": [1, 2], "g": [{"h": 3}, {}]}
    assert dict(leaves(tree)) == {"a": 1, "b.c": None, "b.d": {}, "e": [], "f": [1, 2], "g.0.h": 3, "g.1": {}}


@pytest.mark.parametrize("cls", get_args(RecipeConfig))
def test_groups_at_their_defaults_are_those_that_are_validated(cls):
    def compare(node):
        for name, field in node.model_fields.items():
            default = field.get_default(call_default_factory=True)
            if isinstance(default, Config):
                assert default == type(default)(), name
            for group in groups_of(field.annotation):
                compare(group)

    compare(cls)


def undescribed(node, prefix=""):
    """Keys without a meaning. Of a group its class is the meaning, and of a choice the value of its tag."""
    if not (node.__doc__ or "").strip() or node.__doc__ in {base.__doc__ for base in node.__bases__}:
        yield f"{prefix}: {node.__name__}"
    tag = tag_of(node)
    for name, field in node.model_fields.items():
        groups = groups_of(field.annotation)
        for group in groups:
            yield from undescribed(group, f"{prefix}{name}.")
        if groups != [field.annotation] and (tag is None or name != tag[0]) and not field.description:
            yield prefix + name


@pytest.mark.parametrize("cls", get_args(RecipeConfig))
def test_every_value_has_a_description(cls):
    describe(cls)
    assert list(undescribed(cls)) == []


def test_what_lacks_a_description_is_found():
    """The tag needs none, another key called `name` does; so does a class of its own."""
    describe(Chooses)
    assert list(undescribed(Chooses)) == [
        ": Chooses",
        *("act.times", "act.whom", "act.loud", "act", "acts.times", "acts.whom", "acts.loud", "acts"),
        *("kinds.name", "kinds.times", "kinds"),
        *("leaf.: Leaf", "leaf.learning_rate", "leaf.warmup_steps"),
    ]


@pytest.mark.parametrize(
    ("tree", "expected"),
    [
        ("act: ask", Ask()),
        ("act: {times: 5}", Ask(times=5)),
        ("act: {name: tell, whom: me}", Tell(whom="me")),
        ("", Ask()),
    ],
)
def test_a_choice_is_a_name_or_a_group_and_the_default_name_is_added(tmp_path, tree, expected):
    loaded = Chooses.load(write(tmp_path, tree))
    assert loaded.act == expected
    assert type(loaded.act) is type(expected)
    assert Chooses.load(write(tmp_path, loaded.to_yaml())) == loaded


def test_arguments_of_a_choice_are_its_keys_without_the_tag():
    assert Tell(whom="me").arguments() == {"whom": "me", "loud": False}
    assert BySecondKind(times=4).arguments() == {"times": 4}
    assert ByKind(name="n").arguments() == {"name": "n"}


@pytest.mark.parametrize(
    ("tree", "message"),
    [
        ("act: tel", "act=tel: did you mean tell? use one of ask, tell"),
        ("act: qqq", "act=qqq: use one of ask, tell"),
        ("act: {name: tel, whom: x}", "act=tel: did you mean tell? use one of ask, tell"),
        ("act: {whom: me}", "act.whom: name=ask has no such key; it has times"),
        ("act: {name: tell, whom: me, times: 1}", "act.times: name=tell has no such key; it has whom, loud"),
        ("act: {name: tell}", "act.whom: required, but not given; set it in the file or as an override act.whom=..."),
        ("act: {times: 0}", "act.times=0: input should be greater than or equal to 1"),
        ("act: {name: tell, whom: me, loud: [1]}", "act.loud=[1]: input should be a valid boolean"),
        ("act: 3", "act=3: use one of ask, tell, alone or as the name in a group of keys"),
        ("act: [ask]", "act=['ask']: use one of ask, tell, alone or as the name in a group of keys"),
        ("acts: [tell]", "acts.0.whom: required, but not given; set it in the file"),
        ("acts: [{}, {name: tell, whom: a, loud: [1]}]", "acts.1.loud=[1]: input should be a valid boolean"),
        ("acts: [{}, {times: 1, whom: a}]", "acts.1.whom: name=ask has no such key; it has times"),
        ("acts: [{}, aks]", "acts.1=aks: did you mean ask? use one of ask, tell"),
        ("kinds: [{kind: frist}]", "kinds.0=frist: did you mean first? use one of first, second"),
        ("kinds: [{kind: second, name: n}]", "kinds.0.name: kind=second has no such key; it has times"),
        ("kinds: [3]", "kinds.0=3: expected a group of keys with kind=first or second"),
        ("leaf: 3", "leaf=3: expected a group of keys: learning_rate, warmup_steps"),
    ],
)
def test_an_error_in_a_choice_says_what_is_allowed_and_its_path_names_keys_only(tmp_path, tree, message):
    assert error_of(Chooses.load, write(tmp_path, tree)) == f"{tmp_path / 'config.yaml'}: {message}"


@pytest.mark.parametrize(("given", "fits"), [(2**63 - 1, True), (2**63, False), (-(2**63), True), (-(10**20), False)])
def test_an_integer_of_more_than_64_bits_is_refused_by_its_key_wherever_it_stands(tmp_path, given, fits):
    text = f"name: x\noptimizer: {{warmup_steps: {given}}}"
    if fits:
        assert Tree.load(write(tmp_path, text)).optimizer.warmup_steps == given
        return
    assert error_of(Tree.load, write(tmp_path, text)) == (
        f"{tmp_path / 'config.yaml'}: optimizer.warmup_steps: {given} does not fit in 64 bits; "
        "give -9223372036854775808 to 9223372036854775807"
    )


@pytest.mark.parametrize("key", ["trainer.seed", "rollout.max_response_tokens", "rollout.max_concurrent_sequences"])
def test_integers_that_reach_torch_are_among_them(key):
    with pytest.raises(ConfigError, match=f"{key}: 99999999999999999999 does not fit in 64 bits"):
        RLConfig.load(
            None,
            ["model.path=m", "data.train_files=a.jsonl", "reward.functions=r:score", f"{key}=99999999999999999999"],
        )


def test_config_imports_without_torch():
    code = "import sys, shardwise.config; print('torch' in sys.modules)"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60)
    assert (done.stdout, done.stderr) == ("False\n", "")
