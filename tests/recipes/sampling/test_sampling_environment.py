import asyncio
import functools
import json
from typing import Annotated

import pytest
from pydantic import Field

from shardwise.config import (
    AgentEnvironment,
    ConfigError,
    CustomEnvironment,
    DataError,
    EvalConfig,
    RLConfig,
    ToolsEnvironment,
)
from shardwise.data import build_model_folder, train_tokenizer
from shardwise.recipes.evaluate import evaluate
from shardwise.recipes.rl import train
from shardwise.recipes.sampling.environment import (
    check_environment,
    load_agent,
    load_environment,
    require_tool_tags,
    tool_schemas,
    warn_of_unseen_tools,
)
from shardwise.types import Example

NUMBER = 9


class Whole:
    def __init__(self, *, chances=1):
        self.chances = chances

    def reset(self, example): ...

    def step(self, response): ...

    def reward(self): ...

    def close(self): ...


class Half:
    def reset(self, example): ...

    def step(self, response): ...

    def reward(self): ...


class Unheard(Whole):
    def step(self): ...


class Demanding(Whole):
    def reward(self, example): ...


class Static(Whole):
    @staticmethod
    def step(response): ...

    @classmethod
    def close(cls): ...


class Remembering(Whole):
    @functools.cache  # noqa: B019
    def reward(self): ...

    step = functools.partial(print, end="")


class Lazy(Whole):
    async def step(self, response):
        yield response


def agent_of_turns(example, endpoint):
    yield 1.0


@pytest.mark.parametrize(
    ("name", "parameters", "message"),
    [
        ("Unheard", {}, "has a method step that cannot be called with response: too many positional arguments; expec"),
        ("Demanding", {}, "has a method reward that cannot be called with nothing: missing a required argument"),
        ("Lazy", {}, "has a method step that is a generator; expected a class with reset"),
        ("Half", {}, "has no method close; expected a class with reset"),
        ("Whoel", {}, "did you mean Whole"),
        ("Whole", {"chance": 3}, r"cannot be made with the parameters given \(chance\): got an unexpected keyword"),
        ("NUMBER", {}, "NUMBER is a int, expected a class with reset"),
    ],
)
def test_a_class_that_is_no_environment_is_refused(name, parameters, message):
    config = CustomEnvironment(path=f"{__file__}:{name}", parameters=parameters)
    with pytest.raises(ConfigError, match=rf"^rollout\.environment\.path=.*{message}"):
        load_environment(config)


def test_an_environment_is_found_with_and_without_parameters():
    for parameters in ({}, {"chances": 2}):
        made = load_environment(CustomEnvironment(path=f"{__file__}:Whole", parameters=parameters))()
        assert type(made).__name__ == "Whole"
        assert made.chances == parameters.get("chances", 1)


def test_methods_of_an_environment_may_be_wrapped():
    assert load_environment(CustomEnvironment(path=f"{__file__}:Remembering"))().reward() is None


def test_methods_of_an_environment_may_need_no_instance():
    made = load_environment(CustomEnvironment(path=f"{__file__}:Static"))()
    assert made.step("a response") is made.close() is None


def test_an_agent_whose_call_gives_a_generator_is_refused():
    with pytest.raises(ConfigError, match=r"agent_of_turns is a generator, expected a function\(example, endpoint\)"):
        load_agent(AgentEnvironment(path=f"{__file__}:agent_of_turns"))


def add(a: int, b: int = 1) -> int:
    """Adds.

    Args:
        a: The first.
        b: The second.
    """
    return a + b


plus = add
part = functools.partial(add, 1)


class Adder:
    """Adds.

    Args:
        a: The first.
    """

    def __init__(self, a: int): ...


def shout(text: str) -> str:
    """Shouts.

    Args:
        text: What.
    """
    return f"{text}!"


def steps(a: int):
    """Adds up.

    Args:
        a: The first.
    """
    yield a


def by_place(a: int, /) -> int:
    """Adds.

    Args:
        a: The first.
    """


def many(*numbers: int) -> int:
    """Adds.

    Args:
        numbers: All.
    """


def anything(**numbers: int) -> int:
    """Adds.

    Args:
        numbers: All.
    """


def serve(drink: str) -> str:
    """Serves.

    Args:
        drink: What (choices: ["tea", "coffee"])
    """
    return drink


def unresolved(a: "Nowhere") -> int:  # noqa: F821
    """Adds.

    Args:
        a: The first.
    """


def unchecked(a: Annotated[int, Field(discriminator="kind")]) -> int:
    """Adds.

    Args:
        a: The first.
    """


def undescribed(a: int) -> int:
    """Has no Args."""


def untyped(a):
    """Has no type.

    Args:
        a: What?
    """


def tools(*names, **options):
    return ToolsEnvironment(functions=[f"{__file__}:{name}" for name in names], **options)


def test_tools_are_described_by_their_hints_and_docstrings_and_called_by_name():
    schema = tool_schemas(tools("add"))["add"]["function"]
    assert schema["description"] == "Adds."
    assert schema["parameters"]["properties"]["b"] == {"type": "integer", "description": "The second."}
    assert schema["parameters"]["required"] == ["a"]
    made = load_environment(tools("add", call_format="qwen", max_result_chars=9))()
    assert answer_of(made, "<tool_call><function=add><parameter=a>4</parameter></function></tool_call>") == "5"
    assert tool_schemas(None) == {}


def test_a_tool_that_takes_text_is_given_text_that_reads_as_json():
    made = load_environment(tools("shout", call_format="qwen"))()
    for text in ("5", "null", '{"a": 1}', "so"):
        call = f"<tool_call><function=shout><parameter=text>{text}</parameter></function></tool_call>"
        assert answer_of(made, call) == f"{text}!"


@pytest.mark.parametrize("call_format", ["hermes", "qwen"])
def test_choices_that_a_docstring_names_are_the_values_that_there_are(call_format):
    assert tool_schemas(tools("serve"))["serve"]["function"]["parameters"]["properties"]["drink"]["enum"]
    for drink, answer in (("tea", "tea"), ("wine", 'error: serve: drink: Input should be one of ["tea", "coffee"]')):
        call = {
            "hermes": json.dumps({"name": "serve", "arguments": {"drink": drink}}),
            "qwen": f"<function=serve><parameter=drink>{drink}</parameter></function>",
        }[call_format]
        made = load_environment(tools("serve", call_format=call_format))()
        assert answer_of(made, f"<tool_call>{call}</tool_call>") == answer


def answer_of(made, text):
    made.reset(Example(uid="a", prompt_ids=[1], prompt="", data_source="", ground_truth=""))
    (message,) = asyncio.run(made.step(text))
    return message["content"]


def test_a_tool_is_offered_by_the_name_that_it_answers_to():
    assert [schema["function"]["name"] for schema in tool_schemas(tools("plus", "add")).values()] == ["plus", "add"]
    call = '<tool_call>{"name": "plus", "arguments": {"a": 4}}</tool_call>'
    assert answer_of(load_environment(tools("plus"))(), call) == "5"


@pytest.mark.parametrize(
    ("names", "message"),
    [
        (["undescribed"], "undescribed does not say how it is called"),
        (["untyped"], "untyped does not say how it is called"),
        (["unresolved"], r"unresolved does not say how it is called \(NameError: name 'Nowhere' is not defined"),
        (["unchecked"], "arguments of unchecked cannot be checked against its type hints"),
        (["part"], "part is a partial, expected a plain function or a coroutine function"),
        (["Adder"], "Adder is a class, expected a plain function"),
        (["steps"], "steps is a generator, expected a plain function"),
        (["by_place"], "by_place has the positional-only parameter a, but a policy gives every argument by its name"),
        (["many"], "many has the variadic positional parameter numbers"),
        (["anything"], "anything has the variadic keyword parameter numbers"),
        (["add", "add"], "has two functions called add"),
        (["ad"], "did you mean add"),
    ],
)
def test_a_function_that_is_no_tool_is_refused(names, message):
    with pytest.raises(ConfigError, match=rf"^rollout\.environment\.functions.*{message}"):
        check_environment(tools(*names))


@pytest.fixture
def tokenizer():
    return train_tokenizer(["2+3=5"], vocab_size=261)


@pytest.mark.parametrize("call_format", ["hermes", "qwen"])
def test_tags_may_be_text_or_ordinary_added_tokens(tokenizer, call_format):
    require_tool_tags(tools("add", call_format=call_format), tokenizer)
    tokenizer.add_tokens(["<tool_call>", "</tool_call>", "<function="])
    require_tool_tags(tools("add", call_format=call_format), tokenizer)


@pytest.mark.parametrize(
    ("call_format", "tag"), [("hermes", "<tool_call>"), ("hermes", "</tool_call>"), ("qwen", "<parameter=")]
)
def test_a_tag_that_decoding_drops_is_refused(tokenizer, call_format, tag):
    tokenizer.add_tokens([tag], special_tokens=True)
    with pytest.raises(ConfigError, match=rf"call_format={call_format} marks calls with {tag}, which the tokenizer"):
        require_tool_tags(tools("add", call_format=call_format), tokenizer)
    require_tool_tags(None, tokenizer)
    require_tool_tags(CustomEnvironment(path="a.py:Game"), tokenizer)


def test_a_chat_template_that_hides_the_tools_is_told_of(tokenizer, capsys):
    silent = tokenizer.chat_template
    shows = "{% if tools %}{{ tools[0].function.name }}{% endif %}"
    needs_a_system_message = "{{ raise_exception('no') if messages[0].role != 'system' }}"
    warn_of_unseen_tools(None, tokenizer, None)
    for template, system_prompt in [
        (silent + shows, None),
        (f"{needs_a_system_message}{silent}{shows}", "Add."),
        ("{{ raise_exception('a form of its own') }}", None),  # nothing is said of what cannot be told
    ]:
        tokenizer.chat_template = template
        warn_of_unseen_tools(tools("add"), tokenizer, system_prompt)
    assert capsys.readouterr().err == ""
    tokenizer.chat_template = silent
    warn_of_unseen_tools(tools("add"), tokenizer, None)
    assert capsys.readouterr().err.startswith("warning: the chat template says nothing of add: unless prompts do, the ")


@pytest.mark.parametrize(("recipe", "config"), [(train, RLConfig), (evaluate, EvalConfig)])
def test_a_recipe_looks_at_the_tags_before_it_reads_a_row(recipe, config, tokenizer, tmp_path):
    tokenizer.add_tokens(["<tool_call>"], special_tokens=True)
    build_model_folder(tmp_path, tokenizer=tokenizer, hidden_size=16, num_layers=1, intermediate_size=16)
    with pytest.raises(ConfigError, match="marks calls with <tool_call>"):
        recipe(with_tools(config, tmp_path, "gone.jsonl"), None)


@pytest.mark.parametrize(("recipe", "config"), [(train, RLConfig), (evaluate, EvalConfig)])
def test_a_recipe_refuses_rows_that_spell_the_token_of_images(recipe, config, tokenizer, tmp_path):
    build_model_folder(tmp_path, tokenizer=tokenizer, hidden_size=16, num_layers=1, intermediate_size=16)
    written = json.loads((tmp_path / "config.json").read_text())
    five = tokenizer.convert_tokens_to_ids("5")
    (tmp_path / "config.json").write_text(json.dumps(written | {"image_token_id": five}))
    (rows := tmp_path / "rows.jsonl").write_text('{"prompt": "2+3=5", "reward_model": {"ground_truth": ""}}')
    with pytest.raises(DataError, match=r"rows\.jsonl line 1: the text spells '5', by which the model knows a part"):
        recipe(with_tools(config, tmp_path, str(rows)), None)


def with_tools(config, folder, files):
    tree = {
        "model": {"path": str(folder)},
        "data": {"validation_files": files, "max_prompt_tokens": 8},
        "rollout": {"environment": tools("add").model_dump(), "max_response_tokens": 8},
        "reward": {"functions": "a.py:b"},
    }
    if config is RLConfig:
        tree["data"]["train_files"] = files
    return config.parse(tree, origin="test")
