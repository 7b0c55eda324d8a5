"""From data files to token batches: rows, preferences, chat rendering, packing, order of rows, quickstart problems."""

from shardwise.data.chat import render_conversation, render_observation, render_prompt, render_response_sample
from shardwise.data.images import ImageReader
from shardwise.data.loader import BatchLoader
from shardwise.data.mixture import PromptStream
from shardwise.data.packing import PackedStep, pack, unpack
from shardwise.data.preference import (
    check_labelled_row,
    check_pair_row,
    labelled_samples,
    mismatched,
    preference_pairs,
)
from shardwise.data.rows import Loaded, check_prompt_row, check_supervised_row, prompt_examples, supervised_samples
from shardwise.data.sources import Row, check_files, first_rows, get_column, has_column, read_rows, without_nulls
from shardwise.data.synthetic import (
    ProblemFiles,
    arithmetic_problems,
    build_model_folder,
    train_tokenizer,
)
from shardwise.data.tokenizer import check_vocabulary, load_tokenizer, longest_token
from shardwise.data.vision import UnusableProcessor, Vision, WordsAlone
