"""Which rank of which job runs on this node, as which process and on which GPU."""

from collections.abc import Iterable

from eagleeye.collect.base import Site
from eagleeye.collect.ranks import RankTable
from eagleeye.errors import NoData
from eagleeye.metrics import RANK_INFO
from eagleeye.records import Sample


class IdentityCollector:
    """One info sample for each rank of this node, also for those that vanished lately."""

    name = "identity"

    def __init__(self, site: Site) -> None:
        self._table = site.shared(RankTable)

    def supported(self) -> bool:
        """Processes exist everywhere."""
        return True

    def collect(self, now_s: float) -> Iterable[Sample]:
        """Return the info series, by which every other series of the node finds its rank."""
        ranks = self._table.ranks()
        if not ranks:
            raise NoData("no process of this node is a rank of a training job")
        for rank in ranks:
            labels = {
                "training_job": rank.identity.job,
                "rank": str(rank.identity.rank),
                "local_rank": str(rank.identity.local_rank),
                "world_size": str(rank.identity.world_size),
                "gpu": rank.gpu,
                "group": rank.identity.group,
                "pid": str(rank.process.pid),
            }
            yield Sample(RANK_INFO.series or "", labels, 1.0)
