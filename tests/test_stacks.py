"""Into which parts the layers of a model are divided, to be matched while later ones are still to run."""

import pytest
import torch

from alignattn import objective, stacks


class Matcher:
    def is_separable(self):
        return True

    is_replayable = is_separable


class Record:
    query = key = torch.empty(stacks.LARGE, device="meta")


@pytest.mark.parametrize("layers", range(1, 40))
def test_parts_are_in_order_and_the_last_is_the_smallest(layers):
    parts = stacks._parted(list(range(layers)), Record(), Matcher())
    assert [place for part in parts for place in part] == list(range(layers))
    assert len(parts) <= stacks.PARTS
    if layers >= 2 * stacks.FEWEST:
        assert len(parts) > 1 and len(parts[-1]) == stacks.FEWEST
    if layers >= 4 * stacks.FEWEST:
        assert all(len(part) >= len(parts[-1]) for part in parts)


def test_small_layers_are_one_part():
    record = Record()
    record.query = torch.empty(stacks.LARGE // 2 - 1, device="meta")
    record.key = torch.empty(stacks.LARGE // 2, device="meta")
    assert stacks._parted([0, 1, 2, 3], record, Matcher()) == [[0, 1, 2, 3]]


@pytest.mark.parametrize("missing", [(), ((1, 0),), ((0, 1), (1, 1), (2, 1))])
def test_gradients_of_networks_are_added_over_all_parts(missing):
    generator = torch.Generator().manual_seed(0)
    parts = [[torch.rand(2, 3, generator=generator), torch.rand(4, generator=generator)] for _ in range(3)]
    before = [[one.clone() for one in part] for part in parts]
    for part, place in missing:
        parts[part][place] = before[part][place] = None
    for place, found in enumerate(objective._of_all(parts)):
        known = [part[place] for part in before if part[place] is not None]
        assert (found is None) == (not known)
        if known:
            torch.testing.assert_close(found, torch.stack(known).sum(0))
    for part, own in zip(parts, before, strict=True):  # a record lends them: they are not written over
        assert all(one is other is None or torch.equal(one, other) for one, other in zip(part, own, strict=True))
    assert list(objective._of_all(parts[:1])) == parts[0]
