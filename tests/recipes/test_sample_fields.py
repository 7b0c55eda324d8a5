import torch
from noisy_samples import two_groups, with_noise

from shardwise.recipes.sample_fields import padded, padded_field, with_field


def test_rows_are_padded_behind_their_end():
    assert padded([torch.tensor([1.0, 2.0]), torch.tensor([3.0])]).tolist() == [[1.0, 2.0], [3.0, 0.0]]
    assert padded([torch.tensor([True]), torch.tensor([True, True])]).tolist() == [[True, False], [True, True]]


def test_a_field_is_set_as_it_was_read_without_its_padding(make_group):
    samples = list(with_noise(two_groups(make_group), "values"))
    doubled = with_field(samples, "returns", 2 * padded_field(samples, "values"))
    assert [sample.returns.tolist() for sample in doubled] == [(2 * sample.values).tolist() for sample in samples]
    again = with_field(doubled, "advantages", [sample.returns for sample in doubled])
    assert [sample.advantages.tolist() for sample in again] == [sample.returns.tolist() for sample in doubled]
