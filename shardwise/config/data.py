"""Where rows come from and how they become tokens."""

from typing import Annotated, Literal, Self

from pydantic import Field, PositiveInt, model_validator

from shardwise.config.base import Arguments, Config, Paths

OverlongPolicy = Literal["error", "drop", "truncate"]


class ReasoningGymTask(Config):
    """A `.yaml` file among the data files, which names a task that reasoning-gym generates rows for."""

    task: str
    """The name of one of reasoning-gym's datasets: chain_sum, countdown, sudoku, ..."""
    size: PositiveInt = 1000
    """The number of problems."""
    seed: Annotated[int, Field(ge=0)] = 0
    """Another seed makes other problems: give training and validation files different ones."""
    arguments: Arguments = Field(default_factory=dict)
    """Keys of the dataset's own config, such as how hard its problems are."""


class HeldOutData(Config):
    """Held-out rows to measure on, and how prompts are read."""

    validation_files: Paths = Field(default_factory=list)
    """Held-out rows: jsonl or parquet files, folders written by datasets' save_to_disk, or yaml files that name a task
    of reasoning-gym; one path or a list."""
    max_validation_rows: PositiveInt | None = None
    """Use only this many held-out rows, the first ones; null uses all."""
    prompt_column: str = "prompt"
    """The prompt: a string, or a list of {role, content} messages."""
    system_prompt: str | None = None
    """A system message put before prompts that have none."""
    apply_chat_template: bool = True
    """Render prompts with the chat template. false: prompts are strings and are tokenized as they are."""
    preprocessing_num_workers: Annotated[int, Field(ge=0)] | None = None
    """The most processes beside the main one that turn rows into tokens; they are started only where that would take
    longer than ten seconds. null: one for every core, at most 32; 0: none."""

    @model_validator(mode="after")
    def _system_prompt_is_rendered(self) -> Self:
        if self.system_prompt is not None and not self.apply_chat_template:
            raise ValueError("system_prompt needs the chat template; set apply_chat_template=true or remove it")
        return self


class DataConfig(HeldOutData):
    """What supervised and prompt data for training have in common."""

    train_files: Paths = Field(default_factory=list)
    """Training rows, in the same forms as validation_files."""
    max_train_rows: PositiveInt | None = None
    """Use only this many training rows, the first ones; null uses all."""
    shuffle: bool = True
    """Draw a new order of the training rows for every epoch, from trainer.seed."""


class SequenceDataConfig(DataConfig):
    """What all data have in common whose rows hold whole sequences, answers included."""

    max_sequence_tokens: PositiveInt = 2048
    """The longest allowed sequence, prompt and response together."""
    on_overlong: OverlongPolicy = "error"
    """What happens to a longer row: stop with an error, drop it, or cut its end off. Both are counted."""
    tools_column: str = "tools"
    """The tools that the chat template offers to the model: a list of JSON schemas as OpenAI and Hugging Face have
    them, or a string of JSON that holds such a list; a row without the column has no tools."""
    images_column: str = "images"
    """Images for a model with a vision tower, in the order of their places in the messages: paths (relative to the data
    file's folder), the bytes of files, or objects with either; a row without the column has only the images that its
    messages hold. Both answers of a pair share them, and so does a teacher."""

    @model_validator(mode="after")
    def _tools_are_rendered(self) -> Self:
        if not self.apply_chat_template and self.tools_column != type(self).model_fields["tools_column"].default:
            raise ValueError(
                f"tools_column={self.tools_column} has no effect without the chat template, which says what the tools "
                "are; set apply_chat_template=true or remove it"
            )
        return self


class SupervisedDataConfig(SequenceDataConfig):
    """Rows with an answer to learn: a prompt and a response column, or a column of messages."""

    response_column: str = "response"
    """The answer to learn, a string."""
    messages_column: str = "messages"
    """A conversation, with loss on the assistant's turns only. A row that has this column is read as a conversation. A
    turn with tool_calls needs no content."""


class PreferenceDataConfig(SequenceDataConfig):
    """Rows with two answers to compare (dpo, ipo, simpo, orpo, reward models), or one that is good or bad (kto).

    A cell with an answer is a string or a list of messages. A list that begins with the assistant's turn answers the
    prompt column; any other is a whole conversation, and the prompt column is not read.
    """

    chosen_column: str = "chosen"
    """The better answer."""
    rejected_column: str = "rejected"
    """The worse answer. Both answer the same messages: conversations are compared from where they part."""
    margin_column: str | None = None
    """How much better the chosen answer is, a number of 0 or more; null: all pairs count alike."""
    response_column: str = "response"
    """For rows without pairs (kto): the answer; in a conversation, the assistant's last turn."""
    label_column: str = "label"
    """For rows without pairs (kto): whether the answer is desirable, a boolean."""

    @model_validator(mode="after")
    def _sides_differ(self) -> Self:
        if self.chosen_column == self.rejected_column:
            raise ValueError(
                f"chosen_column and rejected_column are both {self.chosen_column}, so every pair would be one answer "
                "compared with itself; name two columns"
            )
        return self


class EvalDataConfig(HeldOutData):
    """Rows with a prompt to answer and what a reward function needs to judge the answer."""

    ground_truth_column: str = "reward_model.ground_truth"
    """What the reward function gets as ground_truth; a dot goes into a nested column."""
    data_source_column: str = "data_source"
    """The name of a row's source; where the column is absent, the file's name."""
    tools_column: str = "tools"
    """With rollout.environment.type=tools: the tools that a row offers, a list of their names or of schemas with these
    names; a row without the column offers all."""
    images_column: str = "images"
    """Images for a model with a vision tower, as in `shardwise sft`."""
    max_prompt_tokens: PositiveInt = 1024
    """The longest allowed prompt."""
    on_overlong: OverlongPolicy = "error"
    """What happens to a longer prompt: stop with an error, drop it, or cut its start off. Both are counted."""


class MixtureStage(Config):
    """How the sources of the training rows are mixed, from one step of the run on."""

    from_step: PositiveInt = 1
    """The first step of the stage."""
    weights: dict[str, Annotated[float, Field(ge=0)]]
    """The share of each source among the prompts, by its name; they need not add up to 1. 0 leaves a source out."""

    @model_validator(mode="after")
    def _some_source_has_weight(self) -> Self:
        if not any(self.weights.values()):
            raise ValueError(f"weights={self.weights} leave every source out; give at least one a positive weight")
        return self


class DifficultyConfig(Config):
    """Which training prompts are too easy or too hard to be asked again at once."""

    min_pass_rate: Annotated[float, Field(ge=0, le=1)] = 0.0
    """A prompt is too hard if a smaller share of its last completions was correct; it then sits out one pass over its
    source."""
    max_pass_rate: Annotated[float, Field(ge=0, le=1)] = 1.0
    """A prompt is too easy if a larger share of its last completions was correct; it then sits out as well."""

    @model_validator(mode="after")
    def _leaves_something_out(self) -> Self:
        if self.min_pass_rate > self.max_pass_rate:
            raise ValueError(
                f"min_pass_rate={self.min_pass_rate} is above max_pass_rate={self.max_pass_rate}; swap them"
            )
        if (self.min_pass_rate, self.max_pass_rate) == (0.0, 1.0):
            raise ValueError("min_pass_rate=0 and max_pass_rate=1 leave no prompt out; narrow them or remove the group")
        return self


class PromptDataConfig(EvalDataConfig, DataConfig):
    """Prompts for reinforcement learning."""

    mixture: list[MixtureStage] = Field(default_factory=list)
    """How sources are mixed, stage after stage: a curriculum. Empty takes the rows as they are."""
    difficulty: DifficultyConfig | None = None
    """Leave out prompts by the share of their last completions that were correct; null leaves none out."""

    @model_validator(mode="after")
    def _stages_are_in_order(self) -> Self:
        steps = [stage.from_step for stage in self.mixture]
        if steps and (steps[0] != 1 or steps != sorted(set(steps))):
            raise ValueError(f"mixture has stages from the steps {steps}; begin with 1 and go up")
        return self
