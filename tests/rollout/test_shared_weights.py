import json

import pytest
import torch

from shardwise.rollout.shared_weights import Form, SharedWeights, packed, unpacked

TENSORS = {
    "a": torch.arange(6, dtype=torch.bfloat16).view(2, 3),
    "scalar": torch.tensor(2.5),
    "empty": torch.empty(0, 4),
    "b": torch.arange(5, dtype=torch.float64),
}
FORMS = [Form.of(name, tensor) for name, tensor in TENSORS.items()]


def test_both_sides_find_every_tensor_at_the_same_place():
    ours = SharedWeights(FORMS)
    theirs = SharedWeights(unpacked(json.loads(json.dumps(packed(FORMS)))), ours.descriptor)
    for name, tensor in TENSORS.items():
        ours.tensor(name).copy_(tensor)
    for name, tensor in TENSORS.items():
        found = theirs.tensor(name)
        assert (found.dtype, found.shape) == (tensor.dtype, tensor.shape)
        assert torch.equal(found, tensor)
    ours.close()
    assert torch.equal(theirs.tensor("a"), TENSORS["a"])


def test_a_form_tells_what_can_be_read():
    form = Form.of("a", TENSORS["a"].to("meta"))
    assert form == Form("a", "bfloat16", [2, 3], is_readable=False)
    assert (form.on_meta().shape, form.on_meta().dtype) == ((2, 3), torch.bfloat16)
    assert Form.of("a", TENSORS["a"]).is_readable


def test_a_name_without_a_form_has_no_place():
    with pytest.raises(KeyError, match="other"):
        SharedWeights(FORMS).tensor("other")
