"""Which restore points stay. Deciding removes nothing; ``prune`` does."""

from dataclasses import dataclass

from upr_spark.backup.chain import Chain
from upr_spark.backup.manifest import Expiry
from upr_spark.backup.repository import Repository


@dataclass(frozen=True, slots=True)
class Keep:
    """Which restore points are to stay: those that one of the two keeps, and the newest in any case.

    Args:
        last: so many of the newest, 1 or more; None: not by number.
        within: those not older than so many microseconds; None: not by age.
    """

    last: int | None
    within: int | None

    def oldest(self, chain: Chain, now: int) -> int:
        """Return the oldest number that stays, of a chain that is not empty.

        Args:
            chain: as the repository has it.
            now: microseconds since the epoch.
        """
        kept = {chain.last}
        if self.last is not None:
            kept.add(max(chain.last - self.last + 1, chain.first))
        if self.within is not None:
            kept.update(link.number for link in chain.links if link.cut_time >= now - self.within)
        return min(kept)


def beginning(chain: Chain, oldest: int) -> int | None:
    """Return the newest number that the chain can begin at so that every restore point from ``oldest`` on stays.

    That is a full backup, or one with a merged base, such that the chain from there on is firm. None without.
    """
    for number in range(oldest, chain.first - 1, -1):
        if chain.is_base(number) and chain.begun_at(number).firm:
            return number
    return None


def expire(repository: Repository, chain: Chain, first: int, now: int) -> bool:
    """Let what is before a number expire.

    Args:
        repository: where.
        chain: as the repository has it.
        first: one that ``beginning`` returned.
        now: microseconds since the epoch.

    Returns: False when that was so already.
    """
    link = chain.link(first)
    bases = [""] if link.kind == "full" else repository.merged_bases(first)
    if not bases:
        # Another run let more expire meanwhile, and it was pruned.
        return False
    return repository.expire(Expiry(first, repository.id, link.sha256, bases[0], now))
