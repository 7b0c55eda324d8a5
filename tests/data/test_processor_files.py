"""Files of processors in model folders."""

import pytest

from shardwise.config import ModelError
from shardwise.data.processor_files import read_keys


def test_keys_of_a_file_that_is_not_there_are_none(tmp_path):
    assert read_keys(tmp_path / "processor_config.json", "image_processor") == {}
    (tmp_path / "processor_config.json").write_text('{"image_processor": {"merge_size": 2}}')
    assert read_keys(tmp_path / "processor_config.json", "image_processor") == {"merge_size": 2}
    (tmp_path / "processor_config.json").write_text("7")
    with pytest.raises(ModelError, match=r"processor_config\.json cannot be read: it holds a number instead of keys"):
        read_keys(tmp_path / "processor_config.json")
