"""Checks that take about a second, before any rank starts."""

from collections.abc import Callable
from functools import partial
from pathlib import Path

from huggingface_hub.errors import HFValidationError
from huggingface_hub.utils import validate_repo_id

from shardwise.config import (
    ConfigError,
    DataError,
    EvalConfig,
    LayoutConfig,
    ModelConfig,
    ModelError,
    PreferenceConfig,
    RecipeConfig,
    RewardModelConfig,
    RLConfig,
    SglangRollout,
    TrainerConfig,
    longest_sequence,
    parts_of,
)
from shardwise.console import warn
from shardwise.controller.restarts import torchrun_restarts_allowed
from shardwise.data import (
    Row,
    check_files,
    check_labelled_row,
    check_pair_row,
    check_prompt_row,
    check_supervised_row,
    first_rows,
    has_column,
)
from shardwise.data.tokenizer import read_template
from shardwise.engine import ParallelDims, resolve_folder
from shardwise.model_config import read_model_config
from shardwise.observability import METRICS
from shardwise.recipes.checkpointing.checkpoints import CHECKPOINTS, latest_hf_folder
from shardwise.recipes.checkpointing.fingerprints import require_base_of_adapter
from shardwise.recipes.checkpointing.manifest import verify_weights
from shardwise.recipes.checkpointing.resume import find_start
from shardwise.recipes.custom import require_callable
from shardwise.recipes.opened_model import Context
from shardwise.recipes.placement import num_training_ranks
from shardwise.recipes.sampling.environment import check_environment
from shardwise.rewards import check_rewards
from shardwise.rollout import check_sglang, require_routers


def check_inputs(config: RecipeConfig) -> None:
    """Checks, in this order:

    - the data files exist, and their first rows have the columns that the command reads
    - chat templates and model folders can be used, sequences fit into the models' contexts, and a model whose routing
      is to be replayed has routers
    - evaluation: the output folder is not that of a training run
    - training: torchrun's restarts would not undo what the config asks for, the run in the output folder can be
      resumed, and an adapter was trained on this model and has the hashes of its checkpoint
    - rewards, environments, SGLang and custom functions can be used

    Raises:
        DataError, ConfigError, ModelError: the first thing that is wrong.
    """
    train_files = [] if isinstance(config, EvalConfig) else config.data.train_files
    files = [*train_files, *config.data.validation_files]
    check_files(files)
    check_row = _row_check(config)
    for row in first_rows(files):
        check_row(row)
    longest = longest_sequence(config)
    for key, model in parts_of(config, ModelConfig):
        folder = _check_model(key, model)
        if folder is not None and not key.startswith("reward."):
            Context.of(folder).require(*longest)
        if folder is not None and key == "model" and isinstance(config, RLConfig) and config.rollout.router_replay:
            require_routers(folder)
    if isinstance(config, EvalConfig):
        _require_folder_of_its_own(Path(config.eval.output_dir))
    else:
        if torchrun_restarts_allowed():
            _require_restartable(config.trainer)
        find_start(config)
        lora = config.engine.lora
        require_base_of_adapter(lora, config.model, "engine.lora")
        if lora is not None and lora.adapter_path is not None:
            verify_weights(Path(lora.adapter_path))
    if isinstance(config, RLConfig | EvalConfig) and config.reward is not None:
        check_rewards(config.reward)
    if isinstance(config, RLConfig | EvalConfig) and config.rollout.environment is not None:
        check_environment(config.rollout.environment)
    if isinstance(config, RLConfig | EvalConfig) and isinstance(config.rollout.engine, SglangRollout):
        check_sglang(config.rollout.engine)
    require_callable(config)


def check_layouts(config: RecipeConfig, num_ranks: int) -> None:
    """Checks that every engine can be laid out on a job's ranks. Raises ConfigError: one cannot; names it."""
    num_trainers = num_training_ranks(num_ranks, config.rollout.split if isinstance(config, RLConfig) else None)
    for key, layout in parts_of(config, LayoutConfig):
        try:
            ParallelDims.of(layout, world_size=num_trainers)
        except ConfigError as error:
            raise error if key == "engine" else ConfigError(f"{key}: {error}") from None


def _row_check(config: RecipeConfig) -> Callable[[Row], None]:
    """Returns the check that a row has the columns that the command reads."""
    match config:
        case RLConfig() | EvalConfig():
            return partial(check_prompt_row, config.data, is_judged=config.reward is not None)
        case PreferenceConfig():
            return partial(_check_preference_row, config)
        case RewardModelConfig():
            return partial(check_pair_row, config.data)
    return partial(check_supervised_row, config.data)


def _check_preference_row(config: PreferenceConfig, row: Row) -> None:
    """Checks that a row has the columns of its loss. Raises DataError: it has not; says so if it has those of the other
    kind of loss."""
    pair, labelled = ("chosen_column", "rejected_column"), ("response_column", "label_column")
    present = {key for key in (*pair, *labelled) if has_column(row, getattr(config.data, key))}
    if config.is_paired and present == set(labelled):
        raise DataError(
            f"{row.origin}: the row has one labelled answer, and loss={config.loss.name} compares two; set loss=kto (a "
            "custom loss: loss.is_paired=false), or data.chosen_column and data.rejected_column to the right columns"
        )
    if not config.is_paired and present == set(pair):
        raise DataError(
            f"{row.origin}: the row has two answers, and loss={config.loss.name} takes one with a label; set loss=dpo "
            "(a custom loss: loss.is_paired=true), or data.response_column and data.label_column to the right columns"
        )
    (check_pair_row if config.is_paired else check_labelled_row)(config.data, row)


def _require_folder_of_its_own(output_dir: Path) -> None:
    """Raises ConfigError: the folder is a training run's, whose samples and config an evaluation would move aside."""
    if (output_dir / METRICS).exists() or (output_dir / CHECKPOINTS).exists():
        raise ConfigError(
            f"eval.output_dir={output_dir} is the folder of a training run, which has a samples.jsonl and config.yaml "
            f"of its own; give another one, such as {output_dir / 'eval'}"
        )


def _require_restartable(trainer: TrainerConfig) -> None:
    """Raises ConfigError: torchrun, which starts the same command again after any end but success, would undo what the
    config asks for."""
    if trainer.resume == "never":
        raise ConfigError(
            "trainer.resume=never would begin anew at each of torchrun's restarts; set trainer.resume=auto and a "
            "trainer.output_dir of its own, torchrun --max-restarts 0, or start with shardwise --nproc and its "
            "--max-restarts, which resumes from the job's own checkpoints"
        )
    if trainer.max_time_seconds is not None:
        raise ConfigError(
            f"trainer.max_time_seconds={trainer.max_time_seconds:g} stops a job that torchrun would start again, with "
            "as much time once more; set torchrun --max-restarts 0, or start with shardwise --nproc and its "
            "--max-restarts"
        )


def _check_model(key: str, model: ModelConfig) -> Path | None:
    """Checks a model that is on this machine and returns its folder; one of the hub is left to whoever downloads it."""
    if model.chat_template is not None:
        read_template(model.chat_template)
    try:
        validate_repo_id(model.path)
        is_local = Path(model.path).exists()
    except HFValidationError:
        is_local = True
    if not is_local:
        if Path(model.path).parent.name and Path(model.path).parent.is_dir():
            warn(f"{key}.path={model.path} is no folder here, so it is taken for the name of a model on the hub")
        return None
    try:
        folder = resolve_folder(latest_hf_folder(model.path), may_download=False)
    except ModelError as error:
        raise ModelError(f"{key}.path={error}") from None
    try:
        read_model_config(folder)
    except ModelError as error:
        raise ModelError(f"{key}.path: {error}") from None
    return folder
