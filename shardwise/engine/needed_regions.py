"""What every rank needs of the weights, on every rank."""

import json
from collections.abc import Mapping

from shardwise.engine.exchange import all_gather_json
from shardwise.region import Region


class NeededRegions:
    """Keeps what the ranks need; they tell each other again only when something has changed."""

    def __init__(self) -> None:
        self._own: Mapping[str, Region] | None = None
        self._by_rank: list[dict[str, Region]] = []

    def by_rank(self, own: Mapping[str, Region]) -> list[dict[str, Region]]:
        """Collective over all ranks. Returns by rank: name -> what the rank needs of the tensor. Regions that are
        equal are one object.

        Args:
            own: the same for this rank.
        """
        if any(all_gather_json(own != self._own)):
            texts = all_gather_json(json.dumps({name: region.spans for name, region in own.items()}))
            told = {text: json.loads(text) for text in texts}  # a thousand ranks of engines of eight tell eight things
            known: dict[Region, Region] = {}
            regions = {
                text: {name: known.setdefault(region := Region.of_lists(spans), region) for name, spans in tree.items()}
                for text, tree in told.items()
            }
            self._by_rank = [regions[text] for text in texts]
            self._own = own
        return self._by_rank
