"""Training of reward models: a score for every answer, learnt from pairs of them."""

from collections.abc import Sequence
from functools import partial

import torch

from shardwise.config import RewardModelConfig
from shardwise.controller.base import WorkerGroup
from shardwise.data import preference_pairs
from shardwise.recipes.engine_source import EngineSource
from shardwise.recipes.engines import RemoteEngine, build_engine
from shardwise.recipes.losses import reward_model_losses
from shardwise.recipes.opened_model import open_model
from shardwise.recipes.rows import held_out_metrics, open_rows, train_on_rows
from shardwise.recipes.run import Run, is_finished
from shardwise.types import Metrics, Sample


def train(config: RewardModelConfig, group: WorkerGroup) -> None:
    """Runs the whole recipe. One step is one optimizer step on `trainer.batch_size` pairs. Checkpoints load as
    AutoModelForSequenceClassification."""
    model, trainer = open_model(config.model), config.trainer
    read = partial(preference_pairs, vision=model.vision)
    rows = open_rows(read, config.data, trainer, model, samples_per_row=2)
    if is_finished(config, total_steps=rows.total_steps):
        return
    scorer = build_engine(
        group,
        "reward model",
        EngineSource(
            model=model.config,
            layout=config.engine,
            head="sequence_scores",
            pad_token_id=model.tokenizer.pad_token_id,
            seed=trainer.seed,
        ),
        optimizer=trainer.optimizer_config(),
        total_steps=rows.total_steps,
    )
    scorer.use_loss("reward_model", config.loss)
    with Run(config, parts={"rows": rows}, engines={"": scorer}, total_steps=rows.total_steps) as run:
        train_on_rows(
            run, rows, step=partial(scorer.train, keep_together=2), validate=partial(validate, scorer, config=config)
        )


def validate(scorer: RemoteEngine, pairs: Sequence[Sample], config: RewardModelConfig) -> Metrics:
    """val/loss, val/accuracy and the loss's other metrics on held-out pairs."""
    scores = torch.stack([values.sum() for values in scorer.score(pairs)])
    rewards = torch.tensor([sample.reward for sample in pairs])
    return held_out_metrics(*reward_model_losses(config.loss)(scores, rewards))
